"""A second look at shapes, by another way than the judge's: nothing is cut out, every pixel is a mixture.

The judge's masks teach the stage `redraw`, so they cannot say how good it is. Here a pixel is so much background, so
much shadow and so much of each asked color (least squares), which leaves soft pictures of the things. *Dents*: rays
from the middle of a thing meet its edge where half of a pixel is covered; the standard deviation of their lengths over
the mean.

H, W pixels
"""

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image

from kleinlite.scenes import COLORS, Thing, mix_colors

RAYS = 90
STEP = 0.05  # pixels along a ray


def covered(picture: Image.Image, things: Sequence[Thing]) -> np.ndarray:
    """How much of each pixel is each thing, by its color, from 0 to 1: (things, H, W)"""
    levels = np.asarray(picture.convert("RGB"), dtype=np.float64)
    ground = np.median(np.concatenate([levels[0], levels[-1], levels[:, 0], levels[:, -1]]), axis=0)
    red, green, blue = (round(float(level)) for level in ground)
    shadow = mix_colors((red, green, blue), (60, 60, 80), 0.3)
    parts = np.array([shadow, *(COLORS[thing.color] for thing in things)]) - ground
    shares = np.linalg.lstsq(parts.T, (levels - ground).reshape(-1, 3).T, rcond=None)[0]
    return np.clip(shares[1:], 0, 1).reshape(len(things), *levels.shape[:2])


def at(cover: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A soft picture (H, W) between its pixels, whose middles are at one half: bilinear."""
    x = np.clip(x - 0.5, 0, cover.shape[1] - 1.001)
    y = np.clip(y - 0.5, 0, cover.shape[0] - 1.001)
    i = x.astype(int)
    j = y.astype(int)
    u = x - i
    v = y - j
    above = cover[j, i] * (1 - u) + cover[j, i + 1] * u
    below = cover[j + 1, i] * (1 - u) + cover[j + 1, i + 1] * u
    return above * (1 - v) + below * v


def radii(cover: np.ndarray) -> np.ndarray:
    """From the middle of a thing (H, W) to its edge, in pixels, in RAYS directions."""
    rows, columns = np.mgrid[: cover.shape[0], : cover.shape[1]] + 0.5
    solid = np.where(cover > 0.5, cover, 0)  # no specks
    total = max(solid.sum(), 1e-9)
    x = (solid * columns).sum() / total
    y = (solid * rows).sum() / total
    angles = np.linspace(0, 2 * math.pi, RAYS, endpoint=False)
    lengths = np.arange(0, max(cover.shape), STEP)
    seen = at(cover, x + np.outer(np.cos(angles), lengths), y + np.outer(np.sin(angles), lengths))
    return lengths[(seen < 0.5).argmax(axis=1)]


def dents(picture: Image.Image, things: Sequence[Thing]) -> float:
    """Standard deviation of the radius of the first thing, a circle, over its mean; 0 is round."""
    found = radii(covered(picture, things)[0])
    return float(found.std() / max(found.mean(), STEP))
