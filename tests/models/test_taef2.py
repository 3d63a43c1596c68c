"""TAEF2 beside its description in NumPy, from files in its maker's names, in the hub's, and with a decoder alone."""

import mlx.core as mx
import numpy as np
import pytest
from agreement import close

from kleinlite import Klein
from kleinlite.autoencoder import patchify
from kleinlite.errors import UserError

BLOCKS = {  # number in the maker's files → whether the block pools
    "decoder": {3: True, 4: True, 5: True, 8: False, 9: False, 10: False, 13: False, 14: False, 15: False, 18: False},
    "encoder": {1: False, 3: False, 4: False, 5: False, 7: False, 8: False, 9: False, 11: True, 12: True, 13: True},
}
CONVOLUTIONS = {  # number → channels out and in, and whether it has a bias
    "decoder": {1: (64, 32, True), 7: (64, 64, False), 12: (64, 64, False), 17: (64, 64, False), 19: (3, 64, True)},
    "encoder": {0: (64, 3, True), 2: (64, 64, False), 6: (64, 64, False), 10: (64, 64, False), 14: (32, 64, True)},
}


def make_half(half):
    """Random weights under the maker's names, large enough that every branch shows."""
    random = np.random.default_rng(len(half))
    shapes = {}
    for number, (c_out, c_in, bias) in CONVOLUTIONS[half].items():
        shapes |= {f"{number}.weight": (c_out, c_in, 3, 3)} | ({f"{number}.bias": (c_out,)} if bias else {})
    for number, pools in BLOCKS[half].items():
        for k in (0, 2, 4):
            shapes |= {f"{number}.conv.{k}.weight": (64, 64, 3, 3), f"{number}.conv.{k}.bias": (64,)}
        if pools:
            shapes |= {f"{number}.pool.0.weight": (256, 64, 1, 1), f"{number}.pool.3.weight": (64, 256, 1, 1)}
            shapes |= {f"{number}.pool.1.weight": (256,), f"{number}.pool.1.bias": (256,)}
    return {
        name: random.normal(0, 1 / np.sqrt(max(np.prod(shape[1:]), 4)), shape).astype(np.float32)
        for name, shape in shapes.items()
    }


HALVES = {half: make_half(half) for half in ("encoder", "decoder")}


def conv(x, weights, name, stride=1):
    """(c, h, w) → (c', h', w'), zeros around."""
    w = weights[f"{name}.weight"]
    k = w.shape[-1]
    x = np.pad(x, ((0, 0), (k // 2, k // 2), (k // 2, k // 2)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (k, k), (1, 2))[:, ::stride, ::stride]
    out = np.einsum("chwij,ocij->ohw", windows, w)
    return out + weights[f"{name}.bias"][:, None, None] if f"{name}.bias" in weights else out


def block(x, weights, number):
    if f"{number}.pool.0.weight" in weights:
        groups = conv(x, weights, f"{number}.pool.0").reshape(4, -1)
        groups = (groups - groups.mean(1, keepdims=True)) / np.sqrt(groups.var(1, keepdims=True) + 1e-5)
        pooled = groups.reshape(256, *x.shape[1:]) * weights[f"{number}.pool.1.weight"][:, None, None]
        pooled = np.maximum(pooled + weights[f"{number}.pool.1.bias"][:, None, None], 0)
        x = x + conv(pooled, weights, f"{number}.pool.3")
    y = x
    for k in (0, 2, 4):
        y = conv(np.maximum(y, 0) if k else y, weights, f"{number}.conv.{k}")
    return np.maximum(y + x, 0)


def decode(z):
    """Latents (32, h, w) → colors (3, 8h, 8w)"""
    weights = HALVES["decoder"]
    x = np.maximum(conv(3 * np.tanh(z / 3), weights, 1), 0)
    for number in range(3, 19):
        if number in BLOCKS["decoder"]:
            x = block(x, weights, number)
        elif number in CONVOLUTIONS["decoder"]:
            x = conv(x.repeat(2, 1).repeat(2, 2), weights, number)
    return conv(x, weights, 19)


def encode(x):
    """Colors (3, h, w) → latents (32, h/8, w/8)"""
    weights = HALVES["encoder"]
    for number in range(15):
        if number in BLOCKS["encoder"]:
            x = block(x, weights, number)
        else:
            x = conv(x, weights, number, stride=2 if number in (2, 6, 10) else 1)
    return x


def hub_name(half, name):
    number, rest = name.split(".", 1)
    return f"{half}.layers.{int(number) - (half == 'decoder')}.{rest}"


LAYOUTS = {
    "hub": {hub_name(half, name): w for half, weights in HALVES.items() for name, w in weights.items()},
    "maker": {f"{half}.{name}": w for half, weights in HALVES.items() for name, w in weights.items()},
    "decoder": HALVES["decoder"],
}


def open_klein(folder, layout):
    path = folder / f"{layout}.safetensors"
    mx.save_safetensors(str(path), {name: mx.array(w) for name, w in LAYOUTS[layout].items()})
    return Klein.from_pretrained(parts={"autoencoder": path})


def channels_last(x):
    return mx.array(x.transpose(1, 2, 0))[None]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 0.01])
def test_both_ways(tmp_path, layout, size):
    autoencoder = open_klein(tmp_path, layout).autoencoder
    z = size * np.random.default_rng(1).normal(0, 2, (32, 4, 6)).astype(np.float32)
    assert close((autoencoder.decode(patchify(channels_last(z))) + 1) / 2, channels_last(decode(z)), 2e-6)
    if layout != "decoder":
        x = size * np.random.default_rng(2).random((3, 32, 48), np.float32)
        assert close(autoencoder.encode(2 * channels_last(x) - 1), patchify(channels_last(encode(x))), 2e-6)


def test_a_decoder_alone(tmp_path):
    """It draws and shows previews; only references want the other half."""
    klein = open_klein(tmp_path, "decoder")
    *_, step, last = klein.stream("a red circle", seed=1, steps=2, progress=False)
    assert step.preview(fast=True) == step.preview() != last.preview()
    with pytest.raises(UserError, match="has no encoder for pictures"):
        klein("make it blue", images=[last.preview()], seed=1)
