"""A shape that nano has never seen: what its adapter `cross` has learned from, and a judge of it."""

import functools
import random
from typing import Any

import mlx.core as mx
from PIL import Image, ImageDraw

from ..klein import Klein
from ..scenes import BACKGROUNDS, CENTERS, COLORS, SHAPES, Scene, Thing, draw, mix_colors, movement, with_article
from .evaluate import SIZE, to_array

WHERE = {
    "above": ("top", "bottom"), "below": ("bottom", "top"), "left of": ("left", "right"), "right of": ("right", "left"),
}  # fmt: skip
AT = {"center": "", "top": " at the top", "bottom": " at the bottom", "left": " on the left", "right": " on the right"}
PAPERS = [str(background) for background in BACKGROUNDS]
INKS = [color for color in COLORS if color != "white"]  # white could stand on white


def draw_cross(
    color: str, background: str, place: str = "center", other: Thing | None = None, jitter: int | None = 0
) -> Image.Image:
    """A cross with its shadow, as large and as shifted as `scenes.draw` would have a shape; beside it another thing."""
    side = 4 * SIZE
    move = movement(jitter)
    picture = draw(Scene((other,) if other else (), background=background, jitter=jitter), side)
    x, y = (c + move(-0.025, 0.025) for c in CENTERS[place])
    r = (0.3 if place == "center" else 0.19) * move(0.94, 1.06)
    shadow = mix_colors(BACKGROUNDS[background], (60, 60, 80), 0.3)
    pen = ImageDraw.Draw(picture)
    for ink, dx, dy in ((shadow, 0.02, 0.025), (COLORS[color], 0, 0)):
        for w, h in ((r, 0.36 * r), (0.36 * r, r)):
            box = (x + dx - w, y + dy - h, x + dx + w, y + dy + h)
            pen.rectangle([side * edge for edge in box], fill=ink)
    return picture.resize((SIZE, SIZE), Image.Resampling.BOX)


def cross(seed: int) -> tuple[Image.Image, str]:
    """A picture with a cross, alone or beside another shape, and its caption; the same for the same seed."""
    rng = random.Random(seed)
    color = rng.choice(INKS)
    background = rng.choice(PAPERS)
    on = f"on a {background} background"
    if rng.random() < 0.5:
        place = rng.choice(list(CENTERS))
        return draw_cross(color, background, place, jitter=seed), f"{with_article(color)} cross{AT[place]} {on}"
    relation = rng.choice(list(WHERE))
    place, there = WHERE[relation]
    other = Thing(rng.choice(SHAPES), rng.choice(INKS), there)
    picture = draw_cross(color, background, place, other, seed)
    return picture, f"{with_article(color)} cross {relation} {with_article(other.color)} {other.kind} {on}"


def closest(picture: Image.Image, drawings: dict[str, mx.array]) -> str:
    """The name of the drawing, (h, w, 3), that comes closest to the picture, a little shifted."""
    seen = to_array(picture)
    far = {}
    for name, there in drawings.items():
        shifted = mx.stack([mx.roll(mx.roll(there, dy, 0), dx, 1) for dy in (-3, 0, 3) for dx in (-3, 0, 3)])
        far[name] = float(((shifted - seen) ** 2).mean(axis=(1, 2, 3)).min())
    return min(far, key=far.__getitem__)


def lone(kind: str, color: str, background: str) -> Scene:
    """One shape in the middle."""
    return Scene((Thing(kind, color, "center"),), background=background, jitter=None)


@functools.cache
def lone_drawings(color: str, background: str) -> dict[str, mx.array]:
    """All shapes in the middle, the cross among them, as arrays."""
    shapes = {kind: draw(lone(kind, color, background), SIZE) for kind in SHAPES}
    shapes["cross"] = draw_cross(color, background, jitter=None)
    return {kind: to_array(drawing) for kind, drawing in shapes.items()}


def is_cross(picture: Image.Image, color: str, background: str) -> bool:
    """Whether, of all shapes drawn in these colors in the middle, the cross is the closest."""
    return closest(picture, lone_drawings(color, background)) == "cross"


def cross_accuracy(klein: Klein, count: int = 24, **how: Any) -> float:
    """Of `count` crosses that were asked for, in colors unlike those of `cross(0 … 31)`, the share that is right."""
    known = {cross(seed)[1] for seed in range(32)}
    wishes = [(c, b, f"{with_article(c)} cross on a {b} background") for c in INKS for b in PAPERS]
    wishes = random.Random(0).sample([wish for wish in wishes if wish[2] not in known], count)
    drawn = klein([text for _, _, text in wishes], seed=0, progress=False, **how)
    return sum(is_cross(picture, c, b) for picture, (c, b, _) in zip(drawn, wishes)) / count
