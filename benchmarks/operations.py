"""The operations of `kleinlite.cpu` against MLX's own: `python -m benchmarks.operations`. Hand-written."""

import math
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx

from kleinlite.cpu import (
    affine,
    attention,
    blas,
    blas_name,
    conv2d,
    setup,
    silu,
    softmax,
    upsample_conv2d,
)
from kleinlite.cpu.quantized_matmul import quantized_matmul


def time_ratio(own: Callable, theirs: Callable, *args: mx.array, rounds: int = 7) -> float:
    """Best time of `own` / best time of `theirs`, taken in turns, because other work comes and goes."""
    best = [math.inf, math.inf]
    for turn in range(rounds + 1):
        for i, f in enumerate((own, theirs)):
            start = time.perf_counter()
            mx.eval(f(*args))
            if turn > 0:  # the first turn compiles
                best[i] = min(best[i], time.perf_counter() - start)
    return best[0] / best[1]


def print_row(title: str, own: Callable, theirs: Callable, *shapes: tuple[int, ...]) -> None:
    """The three ratios of one operation on random arrays: forward, with its gradient, with its gradient compiled."""
    args = [mx.random.normal(shape) for shape in shapes]
    w = mx.random.normal(own(*args).shape)
    mx.eval(args, w)
    every = tuple(range(len(args)))
    steps = [mx.value_and_grad(lambda *args, f=f: (f(*args) * w).sum(), every) for f in (own, theirs)]
    compiled = [mx.compile(step) for step in steps]
    ratios = (
        time_ratio(own, theirs, *args),
        time_ratio(steps[0], steps[1], *args),
        time_ratio(compiled[0], compiled[1], *args),
    )
    print(f"{title:40}{ratios[0]:10.2f}{ratios[1]:12.2f}{ratios[2]:10.2f}", flush=True)


def print_forward(title: str, own: Callable, theirs: Callable, *args: Any) -> None:
    """The first of these ratios alone, for what is only used forward."""
    print(f"{title:40}{time_ratio(own, theirs, *args):10.2f}", flush=True)


def benchmark() -> None:
    """Print a table of ratios, time here / time of MLX's own operation: below 1 is faster."""
    print(f"time here / time of MLX's own operation ({blas_name() or 'no fast BLAS'}, {os.cpu_count()} cores)")
    print(f"{'':40}{'forward':>10}{'+ backward':>12}{'compiled':>10}")
    large = (2048, 4096)
    small = (2176, 384)
    print_row(f"softmax {large}", softmax, lambda x: mx.softmax(x, axis=-1), large)
    for shape in (small, large):

        def gated(a: mx.array, b: mx.array) -> mx.array:
            return silu(a) * b

        def theirs(a: mx.array, b: mx.array) -> mx.array:
            return a * mx.sigmoid(a) * b

        print_row(f"silu(a) * b {shape}", gated, theirs, shape, shape)
    for heads in ((32, 4, 68, 32), (8, 24, 256, 64)):
        for title, mask in (("", None), (" causal", mx.tri(heads[2]) > 0)):
            how = {"scale": heads[3] ** -0.5, "mask": mask}
            own = partial(attention, **how)
            theirs = partial(mx.fast.scaled_dot_product_attention, **how)
            print_row(f"attention {heads}{title}", own, theirs, heads, heads, heads)

    def plain(x: mx.array, mean: mx.array, scale: mx.array, shift: mx.array) -> mx.array:
        return (x - mean) * scale + shift

    print_row("affine (1, 256, 256, 128)", affine, plain, (1, 256, 256, 128), *3 * [(1, 1, 1, 128)])

    def upsample(x: mx.array, w: mx.array) -> mx.array:
        return mx.conv2d(mx.repeat(mx.repeat(x, 2, axis=1), 2, axis=2), w, padding=1)

    for picture in ((1, 64, 64, 128), (1, 256, 256, 128)):
        args = mx.random.normal(picture), mx.random.normal((128, 3, 3, 128))
        print_forward(f"convolution {picture}", conv2d, mx.conv2d, *args, 1, 1)
        print_forward(f"upsampled, convolution {picture}", upsample_conv2d, upsample, *args)
    for bits in (8, 4):
        x = mx.random.normal((64, 1024))
        (w, scales, biases) = mx.quantize(mx.random.normal((1024, 1024)), bits=bits)

        def ours(x: mx.array, *w: mx.array, bits: int = bits) -> mx.array:
            return quantized_matmul(x, dict(zip(("weight", "scales", "biases"), w)), "affine", bits, 64)

        theirs = partial(mx.quantized_matmul, bits=bits)
        print_forward(f"product with {bits} bits (64, 1024, 1024)", ours, theirs, x, w, scales, biases)
    if blas_name():
        a = mx.random.normal((256, 1024))
        b = mx.random.normal((1024, 1024))
        mx.eval(a, b)

        def slow(a: mx.array, b: mx.array) -> None:
            ours = blas._write(blas._own)
            mx.eval(a @ b)
            blas._write(ours)

        print(f"{'matrix product (256, 1024, 1024)':40}{time_ratio(mx.matmul, slow, a, b, rounds=3):10.3f}")


if __name__ == "__main__":
    setup()
    benchmark()
