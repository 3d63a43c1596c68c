"""A preview that costs nothing: one matrix instead of the decoder, fitted to it by least squares.

A token of 128 numbers stands for 16×16 pixels. A linear map to 4×4 of them, three channels each, keeps what an eye
needs to tell whether a picture goes the right way.
"""

import mlx.core as mx
import mlx.nn as nn

from ..pipeline import to_pixels
from ..scenes import draw, sample

__all__ = ["fit_preview", "preview_pixels"]

BLOCKS = 4  # per side of a token
PICTURES = 16  # to fit it on, of 36 tokens each: four or more for every number of a token
RIDGE = 1e-3  # per token; keeps channels that hardly vary from counting


def fit_preview(autoencoder: nn.Module) -> mx.array:
    """The matrix (c + 1, 48) from a token's latents and a 1 to its pixels in 4×4 blocks, fitted on drawn scenes."""
    pixels = mx.concatenate([to_pixels(draw(sample(seed))) for seed in range(PICTURES)])
    tokens = autoencoder.encode(pixels).astype(mx.float32)
    a = with_ones(tokens).reshape(-1, tokens.shape[-1] + 1)
    b = to_blocks(pixels, tokens.shape[1]).reshape(-1, 3 * BLOCKS**2)
    normal = a.T @ a + RIDGE * len(a) * mx.eye(a.shape[1])
    matrix = mx.linalg.solve(normal, a.T @ b, stream=mx.cpu)
    mx.eval(matrix)
    return matrix


def preview_pixels(matrix: mx.array, latents: mx.array) -> mx.array:
    """Latents (b, gh, gw, c) → a small picture (b, 4·gh, 4·gw, 3), about [-1, 1]."""
    b, gh, gw, _ = latents.shape
    blocks = with_ones(latents.astype(mx.float32)) @ matrix
    blocks = blocks.reshape(b, gh, gw, BLOCKS, BLOCKS, 3).transpose(0, 1, 3, 2, 4, 5)
    return blocks.reshape(b, gh * BLOCKS, gw * BLOCKS, 3)


def to_blocks(pixels: mx.array, rows: int) -> mx.array:
    """Pixels (b, H, W, 3) of `rows` rows of tokens → the mean of each block, (b, gh, gw, 48)"""
    b, height, width, _ = pixels.shape
    side = height // rows
    small = side // BLOCKS
    blocks = pixels.reshape(b, rows, BLOCKS, small, width // side, BLOCKS, small, 3).mean(axis=(3, 6))
    return blocks.transpose(0, 1, 3, 2, 4, 5).reshape(b, rows, width // side, -1)


def with_ones(x: mx.array) -> mx.array:
    return mx.concatenate([x, mx.ones((*x.shape[:-1], 1), dtype=x.dtype)], axis=-1)
