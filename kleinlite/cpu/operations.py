"""exp and what is built on it, and attention: MLX's operations, quicker or in less memory on a Linux CPU.

Where the device is not a Linux CPU, each of these functions calls MLX's own operation.
"""

import math
import os
import sys
from collections.abc import Callable
from functools import cache
from typing import cast

import mlx.core as mx

FAST = sys.platform == "linux" and mx.default_device() == mx.Device(mx.cpu) and os.environ.get("KLEINLITE_CPU") != "off"

# ---------------------------------------------------------------- exp, and what is built on it

LN2_HIGH = 0.693145751953125  # ln 2 in two parts; n * LN2_HIGH is exact
LN2_LOW = 1.428606765330187e-06
ROUND = 1.5 * 2**23 + 127  # float32 has no room left for fractions here, so adding this rounds


@mx.compile
def _exp(x: mx.array) -> mx.array:
    """exp(x) = 2^n · e^r, with n whole and |r| <= ln(2) / 2. Within 3e-7 of the value, relative.

    From -88 down it is 0, as for -inf in a mask; from 88.4 up it is inf (the true end is 88.7).
    """
    x = mx.clip(x, -88.0, 89.0)
    t = x * (1 / math.log(2)) + ROUND  # its lowest bits now hold n + 127 ...
    n = t - ROUND
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    r2 = r * r  # the polynomial is e^r to 1.1e-7: 1 + r + r²/2 + ..., nudged to spread the error evenly
    p = ((1 + r) + (0.49999231 + 0.16667115 * r) * r2) + (0.041890337 + 0.0083125015 * r) * (r2 * r2)
    return p * (t.view(mx.int32) << 23).view(mx.float32)  # ... and n + 127 is how float32 stores 2^n


def _reduce(op: Callable[..., mx.array], x: mx.array) -> mx.array:
    """`op`, such as mx.max, over the last axis, which stays with length 1.

    MLX reduces along rows one value at a time, across them several at once. So a long row is folded first.
    """
    width = math.gcd(x.shape[-1], 64)
    if width >= 16 and x.shape[-1] >= 256:
        x = op(x.reshape(*x.shape[:-1], -1, width), axis=-2)
    return op(x, axis=-1, keepdims=True)


@mx.custom_function
@mx.compile
def _fast_weights(x: mx.array) -> mx.array:
    """exp(x), scaled by a number per row so that the largest is 1. The scale cancels later: here it is a constant."""
    return _exp(x - _reduce(mx.max, x))


@_fast_weights.vjp
def _fast_weights_vjp(x: mx.array, g: mx.array, y: mx.array) -> mx.array:
    return g * y


@mx.custom_function
@mx.compile
def _fast_silu(x: mx.array) -> mx.array:
    return x / (1 + _exp(-x))


@_fast_silu.vjp
@mx.compile
def _fast_silu_vjp(x: mx.array, g: mx.array, y: mx.array) -> mx.array:
    s = 1 / (1 + _exp(-x))  # inside mx.compile the same numbers as above, not once more
    return g * (s + y * (1 - s))


def _fast(*arrays: mx.array) -> bool:
    return FAST and all(a.dtype == mx.float32 for a in arrays)


def silu(x: mx.array) -> mx.array:
    """x · sigmoid(x), value by value."""
    if not _fast(x):
        return x * mx.sigmoid(x)
    # MLX compiles quick loops for arrays without gaps only: half of a large array is copied first.
    return cast(mx.array, _fast_silu(mx.contiguous(x) if x.size > 2**18 else x))


@mx.compile
def affine(x: mx.array, mean: mx.array, scale: mx.array, shift: mx.array) -> mx.array:
    """(x - mean) · scale + shift, in one pass over the memory."""
    return (x - mean) * scale + shift


def softmax(x: mx.array, axis: int = -1) -> mx.array:
    """exp(x), scaled so that it adds up to 1 along `axis`."""
    if not _fast(x):
        return mx.softmax(x, axis=axis, precise=True)
    weights = cast(mx.array, _fast_weights(x.swapaxes(axis, -1)))
    return (weights / weights.sum(axis=-1, keepdims=True)).swapaxes(axis, -1)


SCORES = 10 * 2**20  # bytes of scores at a time: they stay in the processor's cache


@cache
def second_stream() -> mx.Stream:
    """MLX works on one operation of a stream at a time, most of them on one thread; so there are two streams."""
    return mx.new_thread_unsafe_stream(mx.cpu)


def attention(q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array | None = None) -> mx.array:
    """softmax(q kᵀ · scale) v: (b, nh, s, hd) and twice (b, nkv, s, hd) → (b, nh, s, hd).

    nh is a multiple of nkv: that many heads in a row share one head of keys and values.
    mask: True = may look; any shape that broadcasts to (b, nh, s, s).
    """
    if not _fast(q, k, v):
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
    (b, nh, s, _) = q.shape
    (nkv, keys) = k.shape[1:3]
    q = q * scale
    k = mx.contiguous(k)  # once, or each product below would do it
    v = mx.contiguous(v)
    shared = nh // nkv
    size = 4 * shared * s * keys  # bytes of the scores of one head of keys
    if b * nkv * size <= SCORES:
        return _attention(q, k, v, mask)
    groups = max(1, SCORES // size)  # heads of keys, and queries, at a time
    rows = -(-s // -(-size // SCORES))
    streams = [mx.default_stream(mx.cpu), second_stream()]
    last: dict[mx.Stream, list[mx.array]] = {stream: [] for stream in streams}
    if mask is not None:
        mask = mx.broadcast_to(mask, (b, nh, s, keys))

    def part(i: int, g: int, row: int) -> mx.array:
        """Some queries of some heads of picture i: they need no others."""
        here = slice(i, i + 1)
        stream = streams[(i * nkv + g) // groups % 2]
        mine = here, slice(shared * g, shared * (g + groups)), slice(row, row + rows)
        kv = here, slice(g, g + groups)
        with mx.stream(stream):
            some = mx.depends([q[mine]], last[stream])[0]  # after the part before, or MLX would begin with many at once
            last[stream] = [_attention(some, k[kv], v[kv], mask if mask is None else mask[mine])]
        return last[stream][0]

    def heads(i: int, g: int) -> mx.array:
        return mx.concatenate([part(i, g, row) for row in range(0, s, rows)], axis=2)

    pictures = [mx.concatenate([heads(i, g) for g in range(0, nkv, groups)], axis=1) for i in range(b)]
    return mx.concatenate(pictures)


def _attention(q: mx.array, k: mx.array, v: mx.array, mask: mx.array | None) -> mx.array:
    """All scores at once. The sum divides the product, which is smaller than the scores."""
    (b, nh, s, hd) = q.shape
    nkv = k.shape[1]
    # The heads that share keys go below each other, into one taller product: no copies of k and v.
    scores = q.reshape(b, nkv, -1, hd) @ k.swapaxes(-1, -2)  # (b, nkv, nh/nkv * s, s)
    if mask is not None:
        scores = scores.reshape(b, nh, s, -1) + mx.where(mask, 0.0, -mx.inf)
    weights = cast(mx.array, _fast_weights(scores)).reshape(b, nkv, -1, k.shape[2])
    return ((weights @ v) * (1 / _reduce(mx.sum, weights))).reshape(b, nh, s, hd)
