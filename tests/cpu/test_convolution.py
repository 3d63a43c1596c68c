"""Convolutions by strips, and with fewer products, against MLX's own."""

import math

import mlx.core as mx
import pytest
from agreement import agree, close, linux, normal
from peak_memory import peak_memory

from kleinlite import cpu


@pytest.mark.parametrize("shape", [(1, 40, 30, 8), (2, 33, 17, 8), (1, 3, 5, 8)])
@pytest.mark.parametrize("k, stride, padding", [(3, 1, 1), (3, 2, 0), (3, 1, 0), (1, 1, 0), (5, 2, 2)])
@pytest.mark.parametrize("strip", [1, 20_000, 2**23])  # single rows, some rows, everything at once
def test_conv2d(shape, k, stride, padding, strip, monkeypatch):
    monkeypatch.setattr(cpu.convolution, "STRIP", strip)
    x, w, bias = normal(*shape), normal(6, k, k, 8, seed=1), normal(6, seed=2)
    right = mx.conv2d(x, w, stride, padding) + bias
    assert close(cpu.conv2d(x, w, stride, padding, bias), right)


@pytest.mark.parametrize("shape, padding", [((1, 40, 30, 16), 0), ((1, 40, 30, 16), 1), ((2, 2, 6, 20), 1)])
@pytest.mark.parametrize("strip", [1, 100_000, 2**23])
def test_conv2d_with_fewer_multiplications(shape, padding, strip, monkeypatch):
    """Winograd's algorithm: the numbers and the gradients of the plain way, in strips of two rows or more."""
    monkeypatch.setattr(cpu.convolution, "STRIP", strip)
    monkeypatch.setattr(cpu.convolution, "FEW", 0)
    used = []
    own = cpu.convolution.winograd
    monkeypatch.setattr(cpu.convolution, "winograd", lambda *args: used.append(1) or own(*args))
    x, w = normal(*shape), normal(6, 3, 3, shape[-1], seed=1)
    assert agree(
        lambda x, w: cpu.conv2d(x, w, 1, padding), lambda x, w: mx.conv2d(x, w, 1, padding), x, w, tolerance=1e-5
    )
    assert bool(used) == cpu.FAST


@pytest.mark.parametrize("shape", [(1, 20, 15, 8), (2, 1, 3, 5)])
@pytest.mark.parametrize("strip", [1, 20_000, 2**23])
def test_upsample_conv2d(shape, strip, monkeypatch):
    monkeypatch.setattr(cpu.convolution, "STRIP", strip)

    def theirs(x, w):
        return mx.conv2d(mx.repeat(mx.repeat(x, 2, axis=1), 2, axis=2), w, padding=1)

    x, w = normal(*shape), normal(6, 3, 3, shape[-1], seed=1)
    assert agree(cpu.upsample_conv2d, theirs, x, w, tolerance=1e-5)


@linux
@pytest.mark.parametrize("filters", [8, 32])  # as MLX multiplies, and with fewer multiplications
def test_conv2d_takes_little_memory(filters, monkeypatch):
    """The result and some strips: not nine times the picture."""
    monkeypatch.setattr(cpu.convolution, "STRIP", 2**18)
    x, w = normal(1, 256, 256, 32), normal(filters, 3, 3, 32, seed=1)
    monkeypatch.setattr(cpu.convolution, "FEW", 0 if filters == 32 else math.inf)
    peaks = []
    for f in (cpu.conv2d, mx.conv2d):
        mx.eval(x, w)
        mx.clear_cache()
        with peak_memory() as peak:
            mx.eval(f(x, w, 1, 1))
        peaks.append(peak.bytes)
    assert peaks[0] < 1.5 * x.nbytes < 9 * x.nbytes < peaks[1]


@linux
def test_filters_wait_for_their_turn(monkeypatch):
    """Forty convolutions in a row do not hold forty prepared filters, each nearly twice as large as the filter."""
    monkeypatch.setattr(cpu.convolution, "FEW", 0)
    x, w = normal(1, 8, 8, 64), [normal(64, 3, 3, 64, seed=i) / 24 for i in range(40)]
    mx.eval(x, w)
    with peak_memory() as peak:
        for i, filters in enumerate(w):
            x = cpu.upsample_conv2d(x, filters)[:, ::2, ::2] if i % 2 else cpu.conv2d(x, filters, 1, 1)
        mx.eval(x)
    assert peak.bytes < 20 * w[0].nbytes
