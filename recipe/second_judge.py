"""A second look at shapes, by another way than the judge's: nothing is cut out, every pixel is a mixture.

The judge's masks teach the stage `redraw`, so they cannot say how good it is. Here a pixel is so much background, so
much shadow and so much of each asked colour (least squares), which leaves soft pictures of the things. *Dents*: rays
from the middle of a thing meet its edge where half of a pixel is covered; the standard deviation of their lengths over
the mean. *Fit*: the kind's own drawing laid over the soft picture at the place and size where it fits best.

H, W pixels
"""

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image

from kleinlite.scenes import BACKGROUNDS, COLOURS, Scene, Spot, Thing, draw_shapes, mix_colours

RAYS = 90
STEP = 0.05  # pixels along a ray
MOVES = (2.0, 1.0, 0.5, 0.25, 0.12, 0.06)  # pixels, from the first try to the last


def covered(picture: Image.Image, things: Sequence[Thing]) -> np.ndarray:
    """How much of each pixel is each thing, by its colour, from 0 to 1: (things, H, W)"""
    levels = np.asarray(picture.convert("RGB"), dtype=np.float64)
    ground = np.median(np.concatenate([levels[0], levels[-1], levels[:, 0], levels[:, -1]]), axis=0)
    red, green, blue = (round(float(level)) for level in ground)
    shadow = mix_colours((red, green, blue), (60, 60, 80), 0.3)
    parts = np.array([shadow, *(COLOURS[thing.colour] for thing in things)]) - ground
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


def dents(picture: Image.Image, things: Sequence[Thing], which: int = 0) -> float:
    """Standard deviation of the radius of one of the things, a circle, over its mean; 0 is round."""
    found = radii(covered(picture, things)[which])
    return float(found.std() / max(found.mean(), STEP))


def soft_overlap(a: np.ndarray, b: np.ndarray) -> float:
    """Intersection over union of two soft pictures (H, W)."""
    return float(np.minimum(a, b).sum() / np.maximum(a, b).sum())


def fit(picture: Image.Image, things: Sequence[Thing], which: int = 0) -> tuple[float, Spot]:
    """The best overlap of one of the things with its kind's drawing, and where that drawing stands."""
    cover = covered(picture, things)[which]
    side = cover.shape[1]
    scene = Scene((Thing(things[which].kind, "black", things[which].place),), background="white")
    paper = np.array(BACKGROUNDS["white"], dtype=np.float64)
    ink = np.array(COLOURS["black"]) - paper

    def score(spot: Spot) -> float:
        drawn = np.asarray(draw_shapes(scene, [spot], side, shadows=False), dtype=np.float64)
        return soft_overlap(cover, np.clip(((drawn - paper) @ ink) / (ink @ ink), 0, 1))

    solid = np.where(cover > 0.5, cover, 0)
    rows, columns = np.mgrid[: cover.shape[0], :side] + 0.5
    total = max(solid.sum(), 1e-9)
    best = Spot(float((solid * columns).sum() / total / side), float((solid * rows).sum() / total / side),
                math.sqrt(total / 2.5) / side)  # fmt: skip
    highest = score(best)
    for move in MOVES:
        better = True
        while better:
            better = False
            for axis in (0, 1, 2):
                for sign in (1, -1):
                    moved = list(best)
                    moved[axis] += sign * move / side
                    if moved[2] > 0 and (tried := score(Spot(*moved))) > highest:
                        best = Spot(*moved)
                        highest = tried
                        better = True
    return highest, best
