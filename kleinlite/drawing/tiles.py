"""Decoding in tiles: less memory, another picture. Hand-written; nothing does it unasked."""

import mlx.core as mx

from ..autoencoder import Autoencoder

__all__ = ["decode_in_tiles"]


def decode_in_tiles(autoencoder: Autoencoder, latents: mx.array, tile: int = 32, overlap: int = 8) -> mx.array:
    """`Autoencoder.decode` in squares of `tile` tokens that fade over `overlap`: less memory, another picture.

    (b, gh, gw, 128) → (b, 16·gh, 16·gw, 3)
    """
    b, gh, gw, _ = latents.shape
    starts = lambda side: [*range(0, max(side - tile, 0), tile - overlap), max(side - tile, 0)]
    ramp = lambda n: mx.minimum(mx.minimum(mx.arange(1, n + 1), mx.arange(n, 0, -1)), 16 * overlap)
    pixels, weights = mx.zeros((b, 16 * gh, 16 * gw, 3)), mx.zeros((b, 16 * gh, 16 * gw, 1))
    for top in starts(gh):
        for left in starts(gw):
            part = autoencoder.decode(latents[:, top : top + tile, left : left + tile])
            h, w = part.shape[1:3]
            weight, there = (ramp(h)[:, None] * ramp(w))[None, ..., None], (16 * top, 16 * left)
            pixels[:, there[0] : there[0] + h, there[1] : there[1] + w] += weight * part
            weights[:, there[0] : there[0] + h, there[1] : there[1] + w] += weight
            mx.eval(pixels, weights)  # one tile at a time
    return pixels / weights
