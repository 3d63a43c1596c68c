"""Products with packed weights on a CPU: whole codes, pieces, and the decoded matrix agree."""

from dataclasses import astuple

import mlx.core as mx
import pytest
from packings import ALL, matrix, product_case
from peak_memory import peak_memory

from kleinlite.cpu import speed_up
from kleinlite.cpu.quantized_matmul import decode_e4m3, matmul_in_pieces, whole_words
from kleinlite.quantization import (
    QUANT_SPECS,
    UNQUANTIZED,
    QuantizedLinear,
    QuantizedMatrix,
    QuantSpec,
    quantize_matrix,
)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_words_hold_whole_codes(bits):
    """Against `mx.dequantize` with scale 1 and bias 0, which gives the codes themselves."""
    codes = mx.random.randint(0, 2**32, (5, 64 * bits // 32), dtype=mx.uint32, key=mx.random.key(bits))
    words, n = whole_words(codes, bits)
    mine = mx.stack([(words >> (bits * k)) & (2**bits - 1) for k in range(n)], axis=-1).reshape(5, 64)
    theirs = mx.dequantize(codes, mx.ones((5, 1)), mx.zeros((5, 1)), 64, bits)
    assert mx.array_equal(mine.astype(mx.float32), theirs)


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("name", ALL)
def test_products_piece_by_piece(name, rows):
    """Piece by piece, and with the decoded matrix."""
    x, packed, expected, limit = product_case(name, rows)
    mine = matmul_in_pieces(x, packed.tensors, *astuple(packed.spec))
    assert mx.abs(mine - expected).max().item() < limit


def test_every_eight_bit_float():
    codes = mx.array([c for c in range(256) if c & 127 != 127], dtype=mx.uint8)  # without the two "not a number"
    assert mx.array_equal(decode_e4m3(codes), mx.from_fp8(codes, mx.float32))


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="what is measured here is the CPU's way")
@pytest.mark.parametrize("kind", ["stored", "fp8", 8, 4, "nvfp4"])
def test_one_decoded_matrix_at_a_time(kind):
    """Ten products in a row: the most that is ever in memory beside the codes is about one matrix in float32."""
    d, matrices = 1024, []
    for i in range(10):
        w = matrix(d, d, seed=i, scale=d**-0.5)
        if kind == "stored":
            matrices.append(QuantizedMatrix({"weight": w.astype(mx.bfloat16)}, UNQUANTIZED))
        elif kind == "fp8":
            tensors = {"weight": mx.to_fp8(w), "scales": mx.ones((d, 1))}
            matrices.append(QuantizedMatrix(tensors, QuantSpec("fp8", 8)))
        else:
            matrices.append(quantize_matrix(w.astype(mx.bfloat16), QUANT_SPECS[kind]))
    x = matrix(4, d, scale=1.0)
    mx.eval(x, [m.tensors for m in matrices])
    del w
    mx.clear_cache()
    with peak_memory() as peak:
        for m in matrices:
            layer = QuantizedLinear(m)
            speed_up(layer)
            x = layer(x)
        mx.eval(x)
    assert peak.bytes < 1.3 * 4 * d * d
