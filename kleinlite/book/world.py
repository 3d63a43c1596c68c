"""The small world that chapters 0 to 5 learn to draw, and a judge of what they draw.

White paper with one shape in the middle, or two shapes side by side or one above the other; four kinds, four colors.

b pictures · n patches · c numbers of a patch
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from ..nano.data import draw_scenes as drawings
from ..scenes import Scene, Thing, captions, held_out
from . import plots

KINDS = ("circle", "square", "triangle", "star")
COLORS = ("red", "yellow", "green", "blue")
PAIRS = (  # of the exam: kept back, every kind in every color twice, as many above one another as side by side
    "a red triangle above a yellow star", "a red square left of a blue circle",
    "a green circle above a red star", "a blue triangle left of a blue square",
    "a red star above a yellow circle", "a yellow square left of a green star",
    "a green square above a red circle", "a yellow triangle left of a green circle",
    "a blue square above a red circle", "a red triangle left of a yellow square",
    "a blue star above a green square", "a yellow triangle left of a blue circle",
    "a blue triangle above a yellow circle", "a green triangle left of a green star",
    "a green triangle above a blue star", "a yellow star left of a red square",
)  # fmt: skip
SHOWN = (0, 5, 10, 15, 16, 17, 18, 19)  # of an exam: four single shapes, four pairs


@dataclass(frozen=True)
class World:
    """Scenes and what a network needs of them: pictures (b, size, size, 3) in [-1, 1], labels (b,), sentences."""

    scenes: list[Scene]
    pictures: mx.array
    labels: mx.array
    sentences: list[str]


@dataclass(frozen=True)
class Row:
    """What the judge says of one klein: its loss, and how many of the exam's 48 shapes are right."""

    name: str
    loss: float
    kinds: int  # right kinds of 48; a blank sheet has 12
    colors: int  # right colors of 48; a blank sheet has 12
    drawn: mx.array  # (32, size, size, 3), the single shapes first


def sample(seed: int) -> Scene:
    """One shape in the middle or two of different kinds, on white paper; the same for the same seed."""
    rng = random.Random(seed)
    kinds = rng.sample(KINDS, 2)
    places = rng.choice((("center",), ("top", "bottom"), ("left", "right")))
    things = tuple(Thing(kind, rng.choice(COLORS), place) for kind, place in zip(kinds, places))
    return Scene(things, background="white", jitter=seed)


def sentence(scene: Scene) -> str:
    """What the scene shows, in words: "a red circle" or "a red circle above a blue square"."""
    return captions(scene)[len(scene.things) % 2]


def label(scene: Scene) -> int:
    """The number, 0 to 15, of the first shape's color and kind: all that a label says of a scene."""
    first = scene.things[0]
    return COLORS.index(first.color) * len(KINDS) + KINDS.index(first.kind)


def world_of(scenes: list[Scene], size: int) -> World:
    """Scenes with their drawings, labels and sentences."""
    labels = mx.array([label(scene) for scene in scenes])
    return World(scenes, drawings(scenes, size), labels, [sentence(scene) for scene in scenes])


def make_world(count: int, kept_back: bool = False, size: int = 48, alone: bool = False) -> World:
    """The first scenes to learn from or, with `kept_back`, to test with: one sentence in ten.

    With `alone` single shapes only. Then all sixteen sentences are learned, and one drawing in ten is kept back.
    """
    scenes: list[Scene] = []
    seed = 0
    while len(scenes) < count:
        scene = sample(seed)
        kept = held_out(str(seed) if alone else sentence(scene))
        if kept == kept_back and len(scene.things) <= (1 if alone else 2):
            scenes.append(scene)
        seed += 1
    return world_of(scenes, size)


def scene_of(asked: str) -> Scene:
    """The scene that such a sentence asks for: "a red circle" or "a red circle above a blue square"."""
    _, color, kind, *rest = asked.split()
    if not rest:
        return Scene((Thing(kind, color, "center"),), background="white", jitter=None)
    places = ("top", "bottom") if rest[0] == "above" else ("left", "right")
    things = (Thing(kind, color, places[0]), Thing(rest[-1], rest[-2], places[1]))
    return Scene(things, background="white", jitter=None)


def make_exam(size: int = 48) -> World:
    """32 scenes to ask for, with 48 shapes: every kind in every color alone, then 16 pairs that were kept back."""
    singles = [f"a {color} {kind}" for color in COLORS for kind in KINDS]
    return world_of([scene_of(asked) for asked in (*singles, *PAIRS)], size)


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
        colors = [replace(thing, color=color) for color in COLORS if color != thing.color]
        for others in (kinds, colors):
            changed = [replace(scene, things=scene.things[:i] + (other,) + scene.things[i + 1 :]) for other in others]
            right.append(all(near < distance(picture, scene) for scene in changed))
    return right


def count_right(pictures: Sequence[mx.array], scenes: Sequence[Scene]) -> tuple[int, int]:
    """How many kinds and how many colors the judge finds right. A blank sheet has a quarter of a balanced exam."""
    right = [answers(picture, scene) for picture, scene in zip(pictures, scenes)]
    return sum(sum(one[::2]) for one in right), sum(sum(one[1::2]) for one in right)


def judge(name: str, loss: float, drawn: mx.array, exam: World) -> Row:
    """Judge the drawings (32, size, size, 3) of an exam; print the row and show four single shapes and four pairs."""
    drawn = mx.clip(drawn, -1, 1)
    kinds, colors = count_right(list(drawn), exam.scenes)
    print(f"{name}; loss {loss:.3f}; of 48 shapes {kinds} kinds and {colors} colors right")
    plots.show([drawn[i] for i in SHOWN], [exam.sentences[i] for i in SHOWN], columns=8)
    return Row(name, loss, kinds, colors, drawn)
