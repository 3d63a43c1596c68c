"""What the two adapters that come with nano have learned from: a shape that it has never seen, and a style.

Chapter 13 learns the cross in front of the reader; `python -m kleinlite.finetune.bundled` trains and writes both.
"""

import random
from collections.abc import Callable

import mlx.core as mx
from PIL import Image, ImageChops, ImageDraw, ImageFilter

from ..pipeline import Klein
from ..scenes import BACKGROUNDS, CENTRES, COLOURS, RELATIONS, SHAPES, Scene, Thing, captions, draw, sample
from .judge import array

SIZE = 96
WHERE = {
    "above": ("top", "bottom"), "below": ("bottom", "top"), "left of": ("left", "right"), "right of": ("right", "left"),
}  # fmt: skip
AT = {"centre": "", "top": " at the top", "bottom": " at the bottom", "left": " on the left", "right": " on the right"}
INKS = [colour for colour in COLOURS if colour != "white"]  # white could stand on white


def draw_cross(
    colour: str, background: str, place: str = "centre", other: Thing | None = None, jitter: int | None = 0
) -> Image.Image:
    """A cross with its shadow, as large and as shifted as `scenes.draw` would have a shape; beside it another thing."""
    side, rng = 4 * SIZE, random.Random(jitter)
    move = rng.uniform if jitter is not None else (lambda low, high: (low + high) / 2)
    picture = draw(Scene((other,) if other else (), background=background, jitter=jitter), side)
    x, y = (c + move(-0.025, 0.025) for c in CENTRES[place])
    r = (0.3 if place == "centre" else 0.19) * move(0.94, 1.06)
    shadow = tuple(round(0.7 * a + 0.3 * b) for a, b in zip(BACKGROUNDS[background], (60, 60, 80)))
    pen = ImageDraw.Draw(picture)
    for ink, dx, dy in ((shadow, 0.02, 0.025), (COLOURS[colour], 0, 0)):
        for w, h in ((r, 0.36 * r), (0.36 * r, r)):
            box = (x + dx - w, y + dy - h, x + dx + w, y + dy + h)
            pen.rectangle([side * edge for edge in box], fill=ink)
    return picture.resize((SIZE, SIZE), Image.Resampling.BOX)


def a(words: str) -> str:
    return f"{'an' if words.startswith('orange') else 'a'} {words}"


def cross(seed: int) -> tuple[Image.Image, str]:
    """A picture with a cross, alone or beside another shape, and its caption; the same for the same seed."""
    rng = random.Random(seed)
    colour, background = rng.choice(INKS), rng.choice(list(BACKGROUNDS))
    on = f"on a {background} background"
    if rng.random() < 0.5:
        place = rng.choice(list(CENTRES))
        return draw_cross(colour, background, place, jitter=seed), f"{a(colour)} cross{AT[place]} {on}"
    relation = rng.choice(list(RELATIONS))
    place, there = WHERE[relation]
    other = Thing(rng.choice(SHAPES), rng.choice(INKS), there)
    picture = draw_cross(colour, background, place, other, seed)
    return picture, f"{a(colour)} cross {relation} {a(other.colour)} {other.kind} {on}"


def outlined(seed: int) -> tuple[Image.Image, str]:
    """A scene whose edges were drawn over in ink, with its usual caption; the same for the same seed."""
    scene, rng = sample(seed), random.Random(seed)
    picture = draw(scene, 3 * SIZE)
    edges = ImageChops.difference(picture.filter(ImageFilter.MaxFilter(9)), picture.filter(ImageFilter.MinFilter(9)))
    picture.paste((30, 30, 36), mask=edges.convert("L").point(lambda level: 255 if level > 30 else 0))
    return picture.resize((SIZE, SIZE), Image.Resampling.BOX), rng.choice(captions(scene)[1:])


def is_cross(picture: Image.Image, colour: str, background: str) -> bool:
    """Whether, of all shapes drawn in these colours in the middle, a little shifted, the cross is the closest."""
    seen, best = array(picture), {}
    for kind in ("cross", *SHAPES):
        scene = Scene((Thing(kind, colour, "centre"),), background=background, jitter=None)
        drawn = array(draw_cross(colour, background, jitter=None) if kind == "cross" else draw(scene, SIZE))
        shifted = mx.stack([mx.roll(drawn, (dy, dx), (0, 1)) for dy in (-3, 0, 3) for dx in (-3, 0, 3)])
        best[kind] = ((shifted - seen) ** 2).mean(axis=(1, 2, 3)).min().item()
    return min(best, key=best.get) == "cross"


def crosses_right(klein: Klein, count: int = 24, **how) -> float:
    """Of `count` crosses that were asked for, in colours unlike those of `cross(0 … 31)`, the share that is right."""
    known = {cross(seed)[1] for seed in range(32)}
    wishes = [(c, b, f"{a(c)} cross on a {b} background") for c in INKS for b in BACKGROUNDS]
    wishes = random.Random(0).sample([wish for wish in wishes if wish[2] not in known], count)
    drawn = klein([text for _, _, text in wishes], seed=0, progress=False, **how)
    return sum(is_cross(picture, c, b) for picture, (c, b, _) in zip(drawn, wishes)) / count


ADAPTERS: dict[str, Callable[[int], tuple[Image.Image, str]]] = {"cross": cross, "outlined": outlined}
