"""Drawn scenes as what nano sees of them: pixels and latents. b batch · n image tokens"""

from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
import numpy as np

from .. import scenes as shapes
from ..autoencoder import Autoencoder


def draw_scenes(scenes: Iterable[Any], size: int, draw: Callable[[Any, int], Any] = shapes.draw) -> mx.array:
    """Drawn scenes as pixels in [-1, 1], (b, size, size, 3)."""
    return mx.stack([mx.array(np.asarray(draw(scene, size))) for scene in scenes]).astype(mx.float32) / 127.5 - 1


def draw_samples(seeds: Iterable[int], size: int) -> mx.array:
    """The scenes of these seeds as pixels, (b, size, size, 3)."""
    return draw_scenes(map(shapes.sample, seeds), size)


def encode_scenes(
    autoencoder: Autoencoder, scenes: list[Any], size: int, progress: Callable[[Iterable], Iterable] = iter,
    draw: Callable[[Any, int], Any] = shapes.draw,
) -> mx.array:  # fmt: skip
    """Latents of drawn scenes, (count, n, 128), float16."""
    rows = []
    for i in progress(range(0, len(scenes), 32)):
        latents = autoencoder.encode(draw_scenes(scenes[i : i + 32], size, draw))
        rows.append(latents.reshape(latents.shape[0], -1, latents.shape[-1]).astype(mx.float16))
        mx.eval(rows[-1])
    return mx.concatenate(rows)
