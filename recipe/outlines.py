"""A style: what nano's adapter `outlined` has learned from."""

import functools
import itertools
import random
from dataclasses import replace

from PIL import Image, ImageChops, ImageFilter

from kleinlite.nano.evaluate import SIZE
from kleinlite.scenes import COLORS, Scene, captions, draw, sample


def outlined(seed: int) -> tuple[Image.Image, str]:
    """A scene with outlines, and its usual caption; the same for the same seed."""
    scene = next(scene for scene in map(sample, itertools.count(1000 * seed)) if scene.things)
    return outline(scene), random.Random(seed).choice(captions(scene)[1:])


def outline(scene: Scene) -> Image.Image:
    """The scene with its things outlined in ink."""
    picture = draw(scene, 3 * SIZE)
    body = silhouettes(scene, picture)
    edges = ImageChops.difference(body.filter(ImageFilter.MaxFilter(11)), body.filter(ImageFilter.MinFilter(11)))
    picture.paste(COLORS["black"], mask=edges)
    return picture.resize((SIZE, SIZE), Image.Resampling.BOX)


def silhouettes(scene: Scene, picture: Image.Image) -> Image.Image:
    """The pixels of a drawn scene that belong to a thing, in white: no shadow, and no sky, ground or sun."""
    if scene.is_landscape:
        apart = ImageChops.difference(picture, draw(replace(scene, things=()), picture.width))
        return strongest(apart).point(lambda level: 255 * (level > 0))
    flat = [ImageChops.difference(picture, Image.new("RGB", picture.size, COLORS[t.color])) for t in scene.things]
    masks = [strongest(apart).point(lambda level: 255 * (level < 6)) for apart in flat]
    return functools.reduce(ImageChops.lighter, masks)


def strongest(picture: Image.Image) -> Image.Image:
    """The largest of a pixel's three channels."""
    return functools.reduce(ImageChops.lighter, picture.split())
