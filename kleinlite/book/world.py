"""The small world that chapters 0 to 5 learn to draw, and a judge of what they draw.

White paper with one shape in the middle, or two shapes side by side or one above the other; four kinds, four colors.

b pictures · n patches · c numbers of a patch
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from ..scenes import Scene, Thing, captions, draw, held_out
from . import plots

KINDS = ("circle", "square", "triangle", "star")
COLORS = ("red", "yellow", "green", "blue")
SHOWN = (0, 1, 2, 3, 16, 17, 18, 20)  # of an exam: four single shapes, four pairs


@dataclass(frozen=True)
class World:
    """Scenes and what a network needs of them: pictures (b, size, size, 3) in [-1, 1], labels (b,), sentences."""

    scenes: list[Scene]
    pictures: mx.array
    labels: mx.array
    sentences: list[str]


@dataclass(frozen=True)
class Row:
    """What the judge says of one klein: its loss on scenes kept back, and which share of its answers is right."""

    name: str
    loss: float
    singles: float  # of 16 single shapes, with sentences that were learned: kind and color of each
    pairs: float  # of 16 pairs, with sentences that were kept back
    drawn: mx.array  # (32, size, size, 3), the single shapes first


def sample(seed: int) -> Scene:
    """One shape in the middle or two of different kinds, on white paper; the same for the same seed."""
    rng = random.Random(seed)
    kinds = rng.sample(KINDS, 2)
    places = rng.choice((("centre",), ("top", "bottom"), ("left", "right")))
    things = tuple(Thing(kind, rng.choice(COLORS), place) for kind, place in zip(kinds, places))
    return Scene(things, background="white", jitter=seed)


def sentence(scene: Scene) -> str:
    """What the scene shows, in words: "a red circle" or "a red circle above a blue square"."""
    return captions(scene)[len(scene.things) % 2]


def label(scene: Scene) -> int:
    """The number, 0 to 15, of the first shape's color and kind: all that a label says of a scene."""
    first = scene.things[0]
    return COLORS.index(first.colour) * len(KINDS) + KINDS.index(first.kind)


def drawings(scenes: Sequence[Scene], size: int) -> mx.array:
    """The scenes drawn: (b, size, size, 3) in [-1, 1]."""
    drawn = [mx.array(list(draw(scene, size).tobytes())).reshape(size, size, 3) for scene in scenes]
    return mx.stack(drawn).astype(mx.float32) / 127.5 - 1


def world_of(scenes: list[Scene], size: int) -> World:
    """Scenes with their drawings, labels and sentences."""
    labels = mx.array([label(scene) for scene in scenes])
    return World(scenes, drawings(scenes, size), labels, [sentence(scene) for scene in scenes])


def make_world(count: int, kept_back: bool = False, size: int = 48) -> World:
    """The first so many scenes whose sentence is learned from, or, with `kept_back`, of those that are not."""
    scenes: list[Scene] = []
    seed = 0
    while len(scenes) < count:
        scene = sample(seed)
        if held_out(sentence(scene)) == kept_back:
            scenes.append(scene)
        seed += 1
    return world_of(scenes, size)


def make_exam(size: int = 48) -> World:
    """32 scenes to ask for: 16 single shapes that were learned, then 16 pairs with sentences that were kept back."""
    singles = [scene for scene in make_world(80, size=size).scenes if len(scene.things) == 1]
    pairs = [scene for scene in make_world(60, kept_back=True, size=size).scenes if len(scene.things) == 2]
    return world_of(singles[:16] + pairs[:16], size)


def distance(picture: mx.array, scene: Scene) -> float:
    """Mean squared difference to the scene's drawing, in the best of nine places: at most one pixel off."""
    drawn = drawings([replace(scene, jitter=None)], len(picture))[0]
    shifted = [mx.roll(mx.roll(drawn, dy, 0), dx, 1) for dy in (-1, 0, 1) for dx in (-1, 0, 1)]
    return float(((mx.stack(shifted) - picture) ** 2).mean(axis=(1, 2, 3)).min())


def answers(picture: mx.array, scene: Scene) -> list[bool]:
    """For each shape, kind and color: is the picture nearer to the scene than to all that differ only in it?"""
    near = distance(picture, scene)
    right = []
    for i, thing in enumerate(scene.things):
        kinds = [replace(thing, kind=kind) for kind in KINDS if kind != thing.kind]
        colors = [replace(thing, colour=color) for color in COLORS if color != thing.colour]
        for others in (kinds, colors):
            changed = [replace(scene, things=scene.things[:i] + (other,) + scene.things[i + 1 :]) for other in others]
            right.append(all(near < distance(picture, scene) for scene in changed))
    return right


def share_right(pictures: Sequence[mx.array], scenes: Sequence[Scene]) -> float:
    """Which share of all kinds and colors asked for the judge finds in the pictures. Guessing finds a quarter."""
    right = [answer for picture, scene in zip(pictures, scenes) for answer in answers(picture, scene)]
    return sum(right) / len(right)


def judge(name: str, loss: float, drawn: mx.array, exam: World) -> Row:
    """Judge the drawings (32, size, size, 3) of an exam; print the row and show four single shapes and four pairs."""
    drawn = mx.clip(drawn, -1, 1)
    singles = share_right(list(drawn[:16]), exam.scenes[:16])
    pairs = share_right(list(drawn[16:]), exam.scenes[16:])
    print(f"{name}: loss {loss:.3f}; right: {singles:.0%} of 32 answers on single shapes, {pairs:.0%} of 64 on pairs")
    plots.show([drawn[i] for i in SHOWN], [exam.sentences[i] for i in SHOWN], columns=8)
    return Row(name, loss, singles, pairs, drawn)
