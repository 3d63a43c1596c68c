"""Products with packed weights on a CPU: whole codes, pieces, and the decoded matrix agree."""

from dataclasses import astuple

import mlx.core as mx
import pytest
from packings import ALL, matrix

from kleinlite.cpu.packed import decode_e4m3, matmul_in_pieces, whole_words
from kleinlite.quantisation import pack_matrix


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
    x, p = matrix(rows, 256, seed=1, scale=1.0), ALL[name]
    packed = pack_matrix(matrix(96, 256), p)
    expected = x @ packed.decode().T
    limit = 1e-5 * mx.abs(expected).max().item()
    mine = matmul_in_pieces(x, packed.tensors, *astuple(p))
    assert mx.abs(mine - expected).max().item() < limit


def test_every_eight_bit_float():
    codes = mx.array([c for c in range(256) if c & 127 != 127], dtype=mx.uint8)  # without the two "not a number"
    assert mx.array_equal(decode_e4m3(codes), mx.from_fp8(codes, mx.float32))
