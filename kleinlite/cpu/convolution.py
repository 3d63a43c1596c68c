"""Convolutions on a Linux CPU.

MLX lays out the neighborhood of every pixel, nine times the picture for a 3 × 3 filter, and multiplies that. Here:

- a few rows at a time, one strip after the other. The same result, but what lies in between stays small;
- 3 × 3 filters by Winograd's algorithm: four neighboring results take 16 multiplications instead of 36. (Lavin and
  Gray, Fast Algorithms for Convolutional Neural Networks, 2015, section 4.1: F(2 × 2, 3 × 3).) What is added up before
  and after costs a rounding or two, as much as another order of adding would.
"""

from collections.abc import Callable
from contextlib import suppress

import mlx.core as mx

from .operations import _fast

STRIP = 8 * 2**20  # bytes of intermediate values at a time: they stay in the processor's cache


def conv2d(x: mx.array, weight: mx.array, stride: int = 1, padding: int = 0, bias: mx.array | float = 0.0) -> mx.array:
    """Convolution with zeros around: (b, H, W, c_in), filters (c_out, k, k, c_in) → (b, H', W', c_out), plus bias."""
    b, H, W, c = x.shape
    c_out, k = weight.shape[:2]
    height, width = ((side + 2 * padding - k) // stride + 1 for side in (H, W))
    if not _fast(x, weight):
        return mx.conv2d(x, weight, stride, padding) + bias
    if (k, stride, padding) == (1, 1, 0):
        return x @ weight[:, 0, 0].T + bias

    def convolve(x: mx.array) -> mx.array:
        return mx.conv2d(x, weight, stride)

    values = k * k * c
    step = 1
    if (k, stride) == (3, 1) and height % 2 == width % 2 == 0 and c >= 16 and b * height * width * c * c_out > FEW:
        filters = winograd_filters(*mx.depends([weight], [x]))  # not before their turn

        def convolve(x: mx.array) -> mx.array:
            return winograd(x, filters)  # 16 values for 4 pixels

        values = 4 * max(c, c_out)
        step = 2

    def strip(first: int, last: int) -> mx.array:
        top = first * stride - padding
        bottom = (last - 1) * stride - padding + k
        around = [(0, 0), (max(-top, 0), max(bottom - H, 0)), (padding, padding), (0, 0)]
        rows = x[:, max(top, 0) : min(bottom, H)]
        return convolve(mx.pad(rows, around) if padding else rows) + bias

    return _in_strips(strip, height, 4 * b * width * values, step)


def upsample_conv2d(x: mx.array, weight: mx.array, bias: mx.array | float = 0.0) -> mx.array:
    """Each pixel repeated, 2 × 2, then a 3 × 3 convolution with zeros around: (b, H, W, c_in) → (b, 2·H, 2·W, c_out).

    Of the three rows that a result reads, two are one row of x. Those two rows of the filter are added up beforehand,
    and the large picture in between is never there: 16 multiplications for four results instead of 36.
    """
    if not _fast(x, weight):
        return mx.conv2d(mx.repeat(mx.repeat(x, 2, axis=1), 2, axis=2), weight, padding=1) + bias
    (b, H, W, c) = x.shape
    c_out = len(weight)
    (weight,) = mx.depends([weight], [x])  # or MLX would prepare the filters of a whole network first, and keep them

    def halves(w: mx.array, axis: int) -> tuple[mx.array, mx.array]:
        """Of three rows or columns two, for the even and for the odd ones of the result."""
        w0, w1, w2 = mx.split(w, 3, axis)
        return mx.concatenate([w0, w1 + w2], axis), mx.concatenate([w0 + w1, w2], axis)

    filters = [halves(half, 2) for half in halves(weight, 1)]  # 2 times 2 times (c_out, 2, 2, c_in)

    def convolve(x: mx.array) -> mx.array:
        h = x.shape[1] - 2
        parts = [mx.conv2d(x[:, i : i + h + 1, j : j + W + 1], filters[i][j]) for i in (0, 1) for j in (0, 1)]
        y = mx.stack(parts, axis=3).reshape(b, h, W, 2, 2, c_out)  # last but two: odd row? odd column?
        return y.swapaxes(2, 3).reshape(b, 2 * h, 2 * W, c_out)

    def strip(first: int, last: int) -> mx.array:
        around = [(0, 0), (int(first == 0), int(last == H)), (1, 1), (0, 0)]
        return convolve(mx.pad(x[:, max(first - 1, 0) : last + 1], around)) + bias

    return _in_strips(strip, H, 4 * b * W * (8 * c + 8 * c_out))


def _in_strips(strip: Callable[[int, int], mx.array], height: int, row_bytes: int, step: int = 1) -> mx.array:
    """A picture of this height, a multiple of `step` rows at a time.

    strip: makes rows first, ..., last - 1 of the result. Each is worked out and goes to its place before the next
    begins, so that nothing large is there twice.
    """
    rows = max(1, STRIP // row_bytes // step) * step
    result = mx.zeros((0,))  # until the first strip says what a row becomes
    for first in range(0, height, rows):
        last = min(first + rows, height)
        y = strip(first, last)
        if last - first == height:
            return y
        grown = y.shape[1] // (last - first)
        if first == 0:
            result = mx.zeros((len(y), grown * height, *y.shape[2:]), y.dtype)
        result[:, grown * first : grown * last] = y
        with suppress(ValueError):  # inside `mx.compile` there is nothing to work out yet
            mx.eval(result)
    return result


# ---------------------------------------------------------------- Winograd's algorithm

FEW = 10**7  # multiplications of a filter's point; with fewer, starting some 70 operations takes longer than they save


def winograd_filters(weight: mx.array) -> list[mx.array]:
    """Filters (c_out, 3, 3, c_in) → G w Gᵀ, 16 matrices (c_in, c_out), row by row."""

    def spread(a: mx.array, b: mx.array, c: mx.array) -> list[mx.array]:
        return [a, (a + b + c) * 0.5, (a - b + c) * 0.5, c]

    rows = spread(*(weight[:, i] for i in range(3)))  # 4 times (c_out, 3, c_in)
    return [matrix.T for row in rows for matrix in spread(*(row[:, i] for i in range(3)))]


def winograd(x: mx.array, filters: list[mx.array]) -> mx.array:
    """Convolution without padding, (b, H + 2, W + 2, c_in) → (b, H, W, c_out), H and W even. In the paper's letters:

    d, 4 × 4 pixels, two further for the next; V = Bᵀ d B; M = U · V, the products; Y = Aᵀ M A, 2 × 2 results.
    """
    b = x.shape[0]
    H = x.shape[1] - 2
    W = x.shape[2] - 2
    c = x.shape[3]

    def before(d0: mx.array, d1: mx.array, d2: mx.array, d3: mx.array) -> tuple[mx.array, ...]:
        return (d0 - d2, d1 + d2, d2 - d1, d1 - d3)

    def behind(m0: mx.array, m1: mx.array, m2: mx.array, m3: mx.array) -> tuple[mx.array, ...]:
        return (m0 + m1 + m2, m1 - m2 - m3)

    columns = before(*(x[:, :, i : i + W : 2] for i in range(4)))  # 4 times (b, H + 2, W/2, c)
    V = [before(*(d[:, i : i + H : 2] for i in range(4))) for d in columns]  # 4 times 4 times (b, H/2, W/2, c)
    M = [[V[j][i].reshape(-1, c) @ filters[4 * i + j] for i in range(4)] for j in range(4)]
    Y = zip(*(behind(*column) for column in M))  # for both rows of results: 4 times (b · H/2 · W/2, c_out)
    rows = [mx.stack(list(behind(*row)), axis=1).reshape(b, H // 2, W, -1) for row in Y]
    return mx.stack(rows, axis=2).reshape(b, H, W, -1)
