"""Whether a GPU computes what the CPU does: one quantized product and one convolution, before the first picture.

With MLX 0.32.0 convolutions and NVFP4 came out wrong on CUDA, and a wrong product draws noise without
a word. Not run so far: no GPU was at hand, and the test in tests/inference puts the CPU in its place.
"""

import sys
from functools import cache
from importlib.metadata import version
from typing import cast

import mlx.core as mx

__all__ = ["compare_devices", "say_what_differs"]

TOLERANCE = 0.02  # of the largest value: TF32 and float16 accumulators stay far below, a broken kernel far above


@cache
def say_what_differs() -> None:
    """A line on stderr, once, if the default device is a GPU whose numbers are not the CPU's."""
    if mx.default_device() != mx.Device(mx.cpu):
        for sentence in compare_devices(mx.default_device()):
            print(f"kleinlite: {sentence}", file=sys.stderr)


def compare_devices(device: mx.Device) -> list[str]:
    """A sentence for each computation in which `device` differs from the CPU by more than `TOLERANCE`."""
    tests = {"a product with quantized weights": quantized_product, "a convolution of 512×512 pixels": convolution}
    sentences = []
    for name, compute in tests.items():
        right = compute(mx.Device(mx.cpu))
        off = mx.abs(compute(device) - right).max() / mx.abs(right).max()
        largest = float(cast(float, off.item()))
        if not largest < TOLERANCE:  # NaN, too
            sentences.append(
                f"{name} is off by {100 * largest:.0f} % on this GPU with mlx {version('mlx')}, so pictures may be "
                "wrong: install another version of mlx, or draw on the CPU with mx.set_default_device(mx.cpu)."
            )
    return sentences


def quantized_product(device: mx.Device) -> mx.array:
    """(64, 256) times a matrix (256, 256) in four bits"""
    with mx.stream(mx.cpu):  # the same numbers for both
        x_key, w_key = mx.random.split(mx.random.key(0))
        x = mx.random.normal((64, 256), key=x_key)
        quantized = mx.quantize(mx.random.normal((256, 256), key=w_key), group_size=64, bits=4)
        mx.eval(x, quantized)
    with mx.stream(device):
        product = mx.quantized_matmul(x, *quantized, transpose=True, group_size=64, bits=4)
        mx.eval(product)
    return product


def convolution(device: mx.Device) -> mx.array:
    """3×3, from 3 channels to 32"""
    with mx.stream(mx.cpu):
        x_key, w_key = mx.random.split(mx.random.key(1))
        x = mx.random.normal((1, 512, 512, 3), key=x_key)
        w = mx.random.normal((32, 3, 3, 3), key=w_key)
        mx.eval(x, w)
    with mx.stream(device):
        y = mx.conv2d(x, w, padding=1)
        mx.eval(y)
    return y
