"""Fewer bits per weight: the formulas, the layers, and how much is in memory."""

import mlx.core as mx
import pytest
from packings import ALL, ERROR, WISH, difference, error, matrix, product_case

from kleinlite import Klein
from kleinlite.quantization import (
    QUANT_SPECS,
    UNQUANTIZED,
    QuantizedLinear,
    QuantizedMatrix,
    QuantSpec,
    quantize_matrix,
    quantized_product,
)

# ---------------------------------------------------------------- formulas


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("scale", [0.02, 3.0])
def test_how_much_is_lost(name, scale):
    w = matrix(96, 256, scale=scale)
    packed = quantize_matrix(w, ALL[name])
    assert packed.shape == w.shape
    assert ERROR[name] / 2 < error(packed.decode(), w) < ERROR[name]
    assert packed.decode(mx.bfloat16).dtype == mx.bfloat16
    half = quantize_matrix(w.astype(mx.bfloat16), ALL[name])
    stored = sum(t.nbytes for k, t in half.tensors.items() if k != "global_scale")
    assert stored * 8 == ALL[name].bits_per_weight * w.size


def test_affine_groups_by_their_formula():
    """Every weight is within half a step of its code's value, and zero is exact."""
    w = mx.concatenate([matrix(8, 64), mx.zeros((8, 64)), mx.full((8, 64), 0.5)], axis=1)
    for bits in (2, 3, 4, 5, 6, 8):
        groups = w.reshape(8, 3, 64)
        step = (groups.max(axis=-1) - groups.min(axis=-1)) / (2**bits - 1)
        off = mx.abs(quantize_matrix(w, QuantSpec("affine", bits, 64)).decode() - w).reshape(8, 3, 64)
        # One step may become up to 1/2 code wider so that zero is a mark.
        assert mx.all(off.max(axis=-1) <= 0.5 * step * (1 + 1 / (2**bits - 2)) + 1e-3 * (bits == 2) + 2e-3).item()
        assert off[:, 1].max().item() == 0


def test_products_without_codes():
    x, w = matrix(5, 96, seed=1, scale=1.0), matrix(64, 96)
    stored = QuantizedMatrix({"weight": w.astype(mx.bfloat16)}, UNQUANTIZED)
    assert mx.allclose(quantized_product(x, stored), x @ stored.decode().T, atol=1e-5)
    scales = mx.abs(matrix(64, 1, seed=2))
    fp8 = QuantizedMatrix({"weight": mx.to_fp8(w), "scales": scales}, QuantSpec("fp8", 8))
    assert mx.allclose(quantized_product(x, fp8), x @ fp8.decode().T, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("name", ALL)
def test_products(name, rows):
    """Ours, MLX's own quantized product, and the decoded matrix agree. (Its own knows no global scale.)"""
    x, packed, expected, limit = product_case(name, rows)
    product = quantized_product(x[None, :, None], packed)[0, :, 0]
    assert mx.abs(product - expected).max().item() < 10 * limit
    t = packed.tensors
    p = packed.spec
    theirs = mx.quantized_matmul(x, t["weight"], t["scales"], t.get("biases"), True, p.group, p.bits, p.mode)
    theirs = theirs * t["global_scale"][:, 0] if "global_scale" in t else theirs
    assert mx.abs(theirs - expected).max().item() < 10 * limit
    half = quantized_product(x.astype(mx.bfloat16), packed)
    assert half.dtype == mx.bfloat16 and error(half.astype(mx.float32), expected) < 0.02


# ---------------------------------------------------------------- layers


def test_a_layer_with_its_bias():
    w, bias, x = matrix(64, 96), matrix(64, seed=1), matrix(3, 96, seed=2, scale=1.0)
    layer = QuantizedLinear(QuantizedMatrix({"weight": w.astype(mx.bfloat16)}, UNQUANTIZED), bias)
    assert mx.allclose(layer(x), x @ w.astype(mx.bfloat16).astype(mx.float32).T + bias, atol=1e-6)
    assert layer.matrix.tensors.keys() == {"weight"} and layer.matrix.shape == (64, 96)
    assert not layer.trainable_parameters()


def test_rows_can_be_chosen_and_reordered():
    """As of an embedding: `map` works on the matrix's rows whatever arrays there are."""
    ids = mx.array([[3, 0], [3, 5]])
    for name in QUANT_SPECS:
        table = quantize_matrix(matrix(8, 64), QUANT_SPECS[name])
        assert mx.array_equal(table.map(lambda w: w[ids]).decode(), table.decode()[ids]), name


# ---------------------------------------------------------------- nano


@pytest.mark.parametrize("name", QUANT_SPECS)
def test_nano(name):
    right, klein = Klein.from_pretrained("nano"), Klein.from_pretrained("nano", quantize=name)
    off = difference(klein(**WISH), right(**WISH))
    limit = {3: 30, 4: 15, 5: 8, 6: 5, 8: 2, "mxfp4": 25, "mxfp8": 6, "nvfp4": 15}[name]
    assert 0 < off < limit
    assert not [m for m in klein.autoencoder.modules() if isinstance(m, QuantizedLinear)]
    assert [m for m in klein._model.checkpoint.load_text_encoder().modules() if isinstance(m, QuantizedLinear)]
