"""A strict look at shapes: cut out by color, whatever their place and size, and laid over the six that there are.

A thing is what is nearer to its own color than to the background and the shadow. Its bounding box is scaled to a
square and compared with each kind's: the overlap (IoU) says which kind it is, and how well it is drawn. A crown is no
star here, and a rounded square no circle. *Ripple* is what a flat background does that it should not: the standard
deviation, in levels of 255, where nothing stands.
"""

import functools
import math
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter

from ..scenes import COLORS, SHAPES, mix_colors, shape_corners

SIDE = 96  # of the masks that are compared
CORE = 20  # pixels of a 96 × 96 picture that a thing must have left when a ring of one pixel is taken away
FINE = 4  # outlines are followed in quarters of a pixel
UNCLEAR = 0.8  # a shape that overlaps less with every kind is none of them


@dataclass(frozen=True)
class Found:
    """A thing in a picture: kind ("unclear" if it is none), color, middle (x, y) in fractions of the side."""

    kind: str
    color: str
    middle: tuple[float, float]


def pixels(image: Image.Image) -> mx.array:
    """(H, W, 3), levels from 0 to 255"""
    return mx.array(np.asarray(image.convert("RGB"))).astype(mx.float32)


def mask_image(mask: mx.array) -> Image.Image:
    """A mask (H, W) as a picture of 0 and 255."""
    return Image.fromarray(np.asarray((mask * 255).astype(mx.uint8)))


def to_mask(image: Image.Image) -> mx.array:
    return mx.array(np.asarray(image)) > 127


def squared(mask: Image.Image) -> mx.array:
    """The mask's bounding box scaled to SIDE × SIDE."""
    return to_mask(mask.crop(mask.getbbox()).resize((SIDE, SIDE), Image.Resampling.BILINEAR))


@functools.cache
def templates() -> dict[str, mx.array]:
    """Each kind, drawn large and cut to its bounding box."""
    found = {}
    for kind in SHAPES:
        image = Image.new("L", (512, 512))
        ImageDraw.Draw(image).polygon([(x * 512, y * 512) for x, y in shape_corners(kind, 0.5, 0.5, 0.4)], fill=255)
        found[kind] = squared(image)
    return found


def overlaps(mask: Image.Image) -> dict[str, float]:
    """How much of each kind a shape's mask has: intersection over union."""
    own = squared(mask)
    return {kind: float((own & shape).sum() / (own | shape).sum()) for kind, shape in templates().items()}


def background_of(picture: mx.array) -> mx.array:
    """The median color along the border, (3,)."""
    edges = picture[:2], picture[-2:], picture[:, :2], picture[:, -2:]
    border = mx.concatenate([edge.reshape(-1, 3) for edge in edges])
    return mx.sort(border, axis=0)[len(border) // 2]


def distances(picture: mx.array, colors: list) -> mx.array:
    """Squared distance of each pixel to each color, (count, H, W)"""
    return mx.stack([((picture - mx.array(list(color), dtype=mx.float32)) ** 2).sum(-1) for color in colors])


def components(mask: Image.Image) -> list[Image.Image]:
    """The connected parts of a mask, each as a mask."""
    left = mask.copy()
    found = []
    while box := left.getbbox():
        row = left.crop((box[0], box[1], box[2], box[1] + 1))
        start = (box[0] + row.tobytes().index(255), box[1])
        ImageDraw.floodfill(left, start, 128)
        found.append(left.point(lambda v: 255 * (v == 128)))
        left = left.point(lambda v: 255 * (v == 255))
    return found


def area(mask: Image.Image) -> int:
    return mask.histogram()[255]


def cut_out(image: Image.Image) -> list[tuple[str, Image.Image]]:
    """Color and mask of everything that stands on a flat background. Masks are FINE times as large as the picture."""
    picture = pixels(image)
    large = (image.width * FINE, image.height * FINE)
    red, green, blue = (int(level) for level in background_of(picture))  # levels are whole numbers
    ground = red, green, blue
    colors = [ground, mix_colors(ground, (60, 60, 80), 0.3), *COLORS.values()]
    away = distances(picture, colors)
    found = []
    nearest = away.argmin(axis=0)
    fine = distances(pixels(image.resize(large, Image.Resampling.BICUBIC)), colors)  # where between two pixels it ends
    for i, color in enumerate(COLORS, 2):
        # The rim of a thing fades into the background, through other colors: a ring of one pixel decides nothing.
        cores = mask_image(nearest == i).filter(ImageFilter.MinFilter(3))
        seeds = [core for core in components(cores) if area(core) >= CORE]
        whole = mask_image(away[i] < mx.minimum(away[0], away[1]))
        for part in components(whole) if seeds else []:
            if any(area(ImageChops.darker(part, seed)) for seed in seeds):
                around = part.filter(ImageFilter.MaxFilter(3)).resize(large, Image.Resampling.NEAREST)
                outline = mask_image(fine[i] < mx.minimum(fine[0], fine[1]))
                found.append((color, ImageChops.darker(around, outline)))
    return found


def find_shapes(image: Image.Image) -> list[Found]:
    """Everything that stands on a flat background, from the largest to the smallest."""
    found = []
    for color, mask in sorted(cut_out(image), key=lambda cut: -area(cut[1])):
        by_kind = overlaps(mask)
        kind = max(by_kind, key=by_kind.__getitem__)
        left, top, right, bottom = mask.getbbox() or (0, 0, 0, 0)  # never empty: `cut_out` asks for an area
        middle = (left + right) / 2 / mask.width, (top + bottom) / 2 / mask.height
        found.append(Found(kind if by_kind[kind] >= UNCLEAR else "unclear", color, middle))
    return found


def ripple(image: Image.Image) -> float:
    """Standard deviation in levels over the background, 5 pixels and more away from anything that stands on it."""
    picture = pixels(image)
    ground = background_of(picture)
    thing = mask_image(((picture - ground) ** 2).sum(-1) > 24**2).filter(ImageFilter.MinFilter(3))  # no specks
    free = ~to_mask(thing.filter(ImageFilter.MaxFilter(13)))
    count = mx.maximum(free.sum(), 1)
    mean = (picture * free[..., None]).sum(axis=(0, 1)) / count
    return math.sqrt(float((((picture - mean) ** 2) * free[..., None]).sum() / count) / 3)
