"""TAEF2: the tiny autoencoder for FLUX.2's latents (Ollin Boer Bohan, MIT License, huggingface.co/madebyollin/taef2).

A hundredth of the multiplications of klein's own decoder, and pictures that are a little softer.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from ...autoencoder import patchify, unpatchify
from ...checkpoints import Rule
from ...errors import UserError
from ..part_format import PartFormat, Shapes

WIDTH = 64
POOLED = 4 * WIDTH  # channels of the branch that sees the whole picture


@dataclass(frozen=True)
class Taef2Config:
    """There is one TAEF2. Its halves come in one file, or the decoder alone. The widths are for memory plans."""

    encodes: bool = True
    channels: tuple[int, ...] = (WIDTH, WIDTH)
    decoder_channels: tuple[int, ...] | None = None
    latent_channels: int = 32


def conv3(c_in: int, c_out: int, stride: int = 1, bias: bool = False) -> nn.Conv2d:
    return nn.Conv2d(c_in, c_out, 3, stride, padding=1, bias=bias)


class Block(nn.Module):
    """Three convolutions beside a shortcut; pooled: first, a branch adds what the whole picture has in common."""

    def __init__(self, pooled: bool = False):
        super().__init__()
        layers = [conv3(WIDTH, WIDTH, bias=True) for _ in range(3)]
        self.conv = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
        if pooled:
            self.pool = nn.Sequential(
                nn.Conv2d(WIDTH, POOLED, 1, bias=False), nn.GroupNorm(4, POOLED, pytorch_compatible=True), nn.ReLU(),
                nn.Conv2d(POOLED, WIDTH, 1, bias=False),
            )  # fmt: skip

    def __call__(self, x: mx.array) -> mx.array:
        if "pool" in self:
            x = x + self.pool(x)
        return nn.relu(self.conv(x) + x)


def make_encoder() -> nn.Sequential:
    """Colors in [0, 1], (b, H, W, 3) → normalized latents (b, H/8, W/8, 32)"""
    layers = [conv3(3, WIDTH, bias=True), Block()]
    for pooled in (False, False, True):
        layers += [conv3(WIDTH, WIDTH, stride=2), *(Block(pooled) for _ in range(3))]
    return nn.Sequential(*layers, conv3(WIDTH, 32, bias=True))


def make_decoder() -> nn.Sequential:
    """Normalized latents (b, h, w, 32) → colors (b, 8h, 8w, 3), about [0, 1]"""
    layers = [conv3(32, WIDTH, bias=True), nn.ReLU()]
    for pooled in (True, False, False):
        layers += [*(Block(pooled) for _ in range(3)), nn.Upsample(2), conv3(WIDTH, WIDTH)]
    return nn.Sequential(*layers, Block(), conv3(WIDTH, 3, bias=True))


class Taef2(nn.Module):
    """In place of chapter 1's `Autoencoder`: the same latents, the same two ways."""

    def __init__(self, cfg: Taef2Config):
        super().__init__()
        self.encoder = make_encoder() if cfg.encodes else None
        self.decoder = make_decoder()

    def encode(self, pixels: mx.array) -> mx.array:
        """Pixels in [-1, 1], (b, H, W, 3) → latents (b, H/16, W/16, 128). Raises UserError without an encoder."""
        if self.encoder is None:
            raise UserError("This TAEF2 file has no encoder for pictures: take taef2.safetensors, which has both.")
        return patchify(self.encoder((pixels + 1) / 2))

    def decode(self, latents: mx.array) -> mx.array:
        """Latents (b, gh, gw, 128) → pixels (b, 16·gh, 16·gw, 3), about [-1, 1], not clamped."""
        soft = 3 * mx.tanh(unpatchify(latents) / 3)
        return 2 * self.decoder(soft) - 1


# ---------------------------------------------------------------- its files

LAYER = re.compile(r"((encoder|decoder)\.)?(layers\.)?(\d+)\.((conv\.\d+|pool\.\d+|skip)\.)?(weight|bias)")


def own_name(name: str) -> str:
    """A tensor's name here and on the hub, from that in its maker's own files, or in those with the decoder alone.

    There a first layer counts, in the decoder, that has no weights.
    """
    found = LAYER.fullmatch(name)
    if found is None or found[3]:
        return name
    half = found[2] or "decoder"
    number = int(found[4]) - (half == "decoder")
    return f"{half}.layers.{number}.{name[found.end(4) + 1 :]}"


def is_taef2(names: Iterable[str]) -> bool:
    """Whether these tensors are TAEF2's: its older relatives have no branch that sees the whole picture."""
    return "decoder.layers.2.pool.0.weight" in names


def infer_taef2(shapes: Shapes) -> Taef2Config:
    return Taef2Config(encodes="encoder.layers.0.weight" in shapes)


TAEF2 = PartFormat(
    config=Taef2Config,
    network=Taef2,
    fields={},
    names=[Rule(r"\b(conv|pool)\.layers\.", [r"\1."])],
    anchor="decoder.layers.0.weight",
    infer=infer_taef2,
)
