"""Fewer bits per weight: the formulas, the layers, and how much is in memory."""

from dataclasses import astuple

import mlx.core as mx
import pytest
from packings import ALL, ERROR, WISH, difference, error, matrix

from kleinlite import Klein
from kleinlite.cpu.packed import packed_matmul
from kleinlite.quantisation import (
    PACKINGS,
    STORED,
    Packed,
    PackedLinear,
    Packing,
    pack_matrix,
)

CPU = pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="what is measured here is the CPU's way")

# ---------------------------------------------------------------- formulas


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("scale", [0.02, 3.0])
def test_how_much_is_lost(name, scale):
    w = matrix(96, 256, scale=scale)
    packed = pack_matrix(w, ALL[name])
    assert packed.shape == w.shape
    assert ERROR[name] / 2 < error(packed.decode(), w) < ERROR[name]
    assert packed.decode(mx.bfloat16).dtype == mx.bfloat16
    half = pack_matrix(w.astype(mx.bfloat16), ALL[name])
    stored = sum(t.nbytes for k, t in half.tensors.items() if k != "global_scale")
    assert stored * 8 == ALL[name].bits_per_weight * w.size


def test_affine_groups_by_their_formula():
    """Every weight is within half a step of its code's value, and zero is exact."""
    w = mx.concatenate([matrix(8, 64), mx.zeros((8, 64)), mx.full((8, 64), 0.5)], axis=1)
    for bits in (2, 3, 4, 5, 6, 8):
        groups = w.reshape(8, 3, 64)
        step = (groups.max(axis=-1) - groups.min(axis=-1)) / (2**bits - 1)
        off = mx.abs(pack_matrix(w, Packing("affine", bits, 64)).decode() - w).reshape(8, 3, 64)
        # One step may become up to 1/2 code wider so that zero is a mark.
        assert mx.all(off.max(axis=-1) <= 0.5 * step * (1 + 1 / (2**bits - 2)) + 1e-3 * (bits == 2) + 2e-3).item()
        assert off[:, 1].max().item() == 0


def test_products_without_codes():
    x, w = matrix(5, 96, seed=1, scale=1.0), matrix(64, 96)
    stored = Packed({"weight": w.astype(mx.bfloat16)}, STORED)
    assert mx.allclose(packed_matmul(x, stored.tensors, *astuple(STORED)), x @ stored.decode().T, atol=1e-5)
    scales = mx.abs(matrix(64, 1, seed=2))
    fp8 = Packed({"weight": mx.to_fp8(w), "scales": scales}, Packing("fp8", 8))
    assert mx.allclose(packed_matmul(x, fp8.tensors, *astuple(fp8.packing)), x @ fp8.decode().T, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("name", ALL)
def test_products(name, rows):
    """Ours, MLX's own quantised product, and the decoded matrix agree. (Its own knows no global scale.)"""
    x, p = matrix(rows, 256, seed=1, scale=1.0), ALL[name]
    packed = pack_matrix(matrix(96, 256), p)
    expected = x @ packed.decode().T
    limit = 1e-5 * mx.abs(expected).max().item()
    assert (
        mx.abs(packed_matmul(x[None, :, None], packed.tensors, *astuple(p))[0, :, 0] - expected).max().item()
        < 10 * limit
    )
    t = packed.tensors
    theirs = mx.quantized_matmul(x, t["weight"], t["scales"], t.get("biases"), True, p.group, p.bits, p.mode)
    theirs = theirs * t["global_scale"][:, 0] if "global_scale" in t else theirs
    assert mx.abs(theirs - expected).max().item() < 10 * limit
    half = packed_matmul(x.astype(mx.bfloat16), packed.tensors, *astuple(p))
    assert half.dtype == mx.bfloat16 and error(half.astype(mx.float32), expected) < 0.02


# ---------------------------------------------------------------- layers


@CPU
@pytest.mark.parametrize("kind", ["stored", "fp8", 8, 4, "nvfp4"])
def test_one_decoded_layer_at_a_time(kind):
    """Ten layers in a row: the most that is ever in memory beside them is about one of them in float32."""
    d, layers = 1024, []
    for i in range(10):
        w = matrix(d, d, seed=i, scale=d**-0.5)
        if kind == "stored":
            layers.append(PackedLinear(Packed({"weight": w.astype(mx.bfloat16)}, STORED)))
        elif kind == "fp8":
            layers.append(PackedLinear(Packed({"weight": mx.to_fp8(w), "scales": mx.ones((d, 1))}, Packing("fp8", 8))))
        else:
            layers.append(PackedLinear(pack_matrix(w.astype(mx.bfloat16), PACKINGS[kind])))
    x = matrix(4, d, scale=1.0)
    mx.eval(x, [m.parameters() for m in layers])
    del w
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for layer in layers:
        x = layer(x)
    mx.eval(x)
    assert mx.get_peak_memory() - before < 1.3 * 4 * d * d


# ---------------------------------------------------------------- nano


@pytest.mark.parametrize("name", PACKINGS)
def test_nano(name):
    right, klein = Klein.from_pretrained("nano"), Klein.from_pretrained("nano", quantize=name)
    off = difference(klein(**WISH), right(**WISH))
    limit = {3: 30, 4: 15, 5: 8, 6: 5, 8: 2, "mxfp4": 25, "mxfp8": 6, "nvfp4": 15}[name]
    assert 0 < off < limit
    assert not [m for m in klein.autoencoder.modules() if isinstance(m, PackedLinear)]
    assert [m for m in klein.checkpoint.load_text_encoder().modules() if isinstance(m, PackedLinear)]
