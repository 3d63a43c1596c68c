"""What the tests of packed weights share: matrices, settings, and how much each may lose."""

import mlx.core as mx

from kleinlite.pipeline import to_pixels
from kleinlite.quantization import QUANT_SPECS, QuantizedMatrix, QuantSpec, quantize_matrix

WISH = {"prompt": "a red circle above a blue square", "seed": 7, "progress": False}
ALL = {**QUANT_SPECS, 2: QuantSpec("affine", 2, 64)}
# Relative error of a normal matrix: what a right implementation has, and a wrong code or scale at once exceeds.
ERROR = {2: 0.45, 3: 0.21, 4: 0.1, 5: 0.05, 6: 0.025, 8: 0.008, "mxfp4": 0.13, "mxfp8": 0.03, "nvfp4": 0.1}


def matrix(*shape: int, seed: int = 0, scale: float = 0.02) -> mx.array:
    return scale * mx.random.normal(shape, key=mx.random.key(seed))


def product_case(name: int | str, rows: int) -> tuple[mx.array, QuantizedMatrix, mx.array, float]:
    """x, a quantized matrix, their product with the matrix decoded, and how far rounding may lie from it."""
    x = matrix(rows, 256, seed=1, scale=1.0)
    quantized = quantize_matrix(matrix(96, 256), ALL[name])
    expected = x @ quantized.decode().T
    return x, quantized, expected, 1e-5 * mx.abs(expected).max().item()


def error(a: mx.array, b: mx.array) -> float:
    """Relative, root mean square."""
    return mx.sqrt(((a - b) ** 2).mean() / (b**2).mean()).item()


def difference(a, b) -> float:
    """Mean difference of two pictures, in levels of 255."""
    return mx.abs(to_pixels(a) - to_pixels(b)).mean().item() * 127.5


def as_nvfp4(w: mx.array, layout: str) -> dict[str, mx.array]:
    """A matrix in the bytes of a layout."""
    second = mx.abs(w).max() / (448 * 6)
    codes, scales = mx.quantize(w / second, mode="nvfp4")
    codes = codes.view(mx.uint8)
    if layout == "tiled":
        rows, columns = scales.shape
        high, wide = -(-rows // 128) * 128, -(-columns // 4) * 4
        padded = mx.zeros((high, wide), mx.uint8)
        padded[:rows, :columns] = scales
        r, c = mx.arange(high)[:, None], mx.arange(wide)[None]
        offset = (r // 128 * (wide // 4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
        tiled = mx.zeros((high * wide,), mx.uint8)
        tiled[offset.flatten()] = padded.flatten()
        codes, scales = (codes >> 4) | (codes << 4), tiled.reshape(high, wide)
    return {"weight": codes, "weight_scale": mx.contiguous(scales), "weight_scale_2": second}
