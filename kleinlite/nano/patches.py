"""A second judge of lone things in a landscape, which knows no shapes: it counts patches of a color."""

import itertools
from dataclasses import replace

import numpy as np
from PIL import Image

from ..scenes import Thing, draw
from .evaluate import SIZE, SKYLINE, find_ground

__all__ = ["count_patches"]


def thing_pixels(picture: Image.Image, thing: Thing) -> np.ndarray:
    """Which pixels below the skyline have a thing's color, as it looks under this sky: (H - SKYLINE, W)"""
    ground = find_ground(picture)
    levels = np.asarray(picture.convert("RGB"), dtype=np.int32)
    if not ground.is_landscape:
        return np.zeros_like(levels[SKYLINE:, :, 0], dtype=bool)
    bare = np.asarray(draw(ground, SIZE), dtype=np.int32)
    model = np.asarray(draw(replace(ground, things=(replace(thing, place="left"),)), SIZE), dtype=np.int32)
    colors, counts = np.unique(model[np.abs(model - bare).sum(axis=-1) > 5], axis=0, return_counts=True)
    return np.abs(levels - colors[counts.argmax()]).sum(axis=-1)[SKYLINE:] < 76


def count_patches(picture: Image.Image, thing: Thing) -> int:
    """How many separate patches in a landscape have a thing's color, by columns."""
    columns = thing_pixels(picture, thing).sum(axis=0) >= 3
    widths = [len(list(run)) for is_thing, run in itertools.groupby(columns) if is_thing]
    return sum(width >= 4 for width in widths)
