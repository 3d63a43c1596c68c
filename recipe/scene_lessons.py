"""What klein-nano's lessons show: scenes, edits of them, and families of scenes between which lies one instruction.

Nothing whose content is held out is in any list: no caption, no reference, no result of an edit.
"""

import random
from collections.abc import Callable, Iterator
from itertools import count, islice

from kleinlite.scenes import (
    BACKGROUNDS,
    COLORS,
    PLACES,
    SHAPES,
    Scene,
    Thing,
    captions,
    held_out,
    sample,
    scene_held_out,
)

from .edits import edit_held_out, instruction, relatives, sample_edit
from .world import Lesson, Lessons

GRID = (6, 6)  # image tokens of a picture
FAINT = {  # things that hardly stand out: (color, background) of shapes, (color, ground) of things in a landscape
    ("pink", "pink"), ("pink", "purple"), ("pink", "white"), ("yellow", "yellow"), ("yellow", "white"),
    ("orange", "yellow"), ("green", "hills"), ("white", "snow"), ("yellow", "desert"),
}  # fmt: skip


def allowed(scene: Scene) -> bool:
    """Whether a scene may be trained on: its content is not held out."""
    return not scene_held_out(scene)


def allowed_scenes(draw: Callable[[int], Scene], first: int = 0) -> Iterator[Scene]:
    """The scenes of the seeds from `first` on that may be trained on."""
    return filter(allowed, map(draw, count(first)))


def sample_row(seed: int) -> Scene:
    """Two or three shapes side by side; one time in two they are all the same, which a plural can name."""
    rng = random.Random(seed ^ 0x50EED)
    jitter = rng.randrange(1 << 30)
    count = rng.choice((2, 3, 3, 3))
    background = rng.choice(list(BACKGROUNDS))
    colors = [color for color in COLORS if color != background]  # white on white would not be seen
    if count == 2 or rng.random() < 0.4:
        found = [(rng.choice(SHAPES), rng.choice(colors))] * count
    else:
        found = [(kind, rng.choice(colors)) for kind in rng.sample(SHAPES, 3)]
    places = ("left", "center", "right") if count == 3 else ("left", "right")
    return Scene(
        tuple(Thing(*thing, place) for thing, place in zip(found, places)), background=background, jitter=jitter
    )  # fmt: skip


def sample_one(seed: int) -> Scene:
    """A single shape, more often than not in the middle, where it is largest: `sample` has few of these."""
    rng = random.Random(seed ^ 0x1EED)
    jitter = rng.randrange(1 << 30)
    background = rng.choice(list(BACKGROUNDS))
    color = rng.choice([color for color in COLORS if (color, background) != ("white", "white")])
    place = "center" if rng.random() < 0.7 else rng.choice(PLACES)
    return Scene((Thing(rng.choice(SHAPES), color, place),), background=background, jitter=jitter)


def make_lessons(pictures: int, edits: int, families: int) -> Lessons:
    """Pictures, a quarter of them single shapes and a tenth rows; edits; families."""
    lessons = Lessons()
    ones = pictures // 4
    rows = pictures // 10
    for draw, number in ((sample, pictures - ones - rows), (sample_one, ones), (sample_row, rows)):
        for scene in islice(allowed_scenes(draw), number):
            texts = tuple(text for text in captions(scene) if not held_out(text)) or ("",)
            lesson = Lesson(texts, lessons.add_scene(scene))
            lessons.pictures += [lesson] * (1 + extra_turns(scene))
    for references, text, target in islice(filter(edit_allowed, map(sample_edit, count())), edits):
        kind = lessons.edits if len(references) == 1 else lessons.two_reference_edits
        before = tuple(map(lessons.add_scene, references))
        kind.append(Lesson((text,), lessons.add_scene(target), before))
    for seed in range(families):
        add_family(lessons, list(filter(allowed, relatives(seed))))
    return lessons


def edit_allowed(edit: tuple[tuple[Scene, ...], str, Scene]) -> bool:
    """Whether an edit may be trained on: neither its scenes nor its instruction are held out."""
    references, text, target = edit
    return all(map(allowed, (*references, target))) and not edit_held_out(references[0], text)


def add_family(lessons: Lessons, family: list[Scene]) -> None:
    """The edit pairs among the scenes of `relatives`, and the edits that add a thing."""
    row = {scene: lessons.add_scene(scene) for scene in family}
    for before in family:
        if not before.things:
            continue
        first: list[Lesson] = []
        second: list[Lesson] = []
        for after in family:
            text = instruction(before, after)
            if not text or edit_held_out(before, text):
                continue
            lesson = Lesson((text,), row[after], (row[before],))
            if len(before.things) == 1:
                if len(after.things) == 2:
                    lessons.add_edits.append(lesson)
            elif before.things[0] in after.things:
                second.append(lesson)
            else:
                first.append(lesson)
        if first and second:
            lessons.edit_pairs.append((first, second))


def extra_turns(scene: Scene) -> int:
    """How often more than once: what has many corners, or none, or hardly stands out is learned last."""
    turns = 0
    for thing in scene.things:
        if thing.kind in ("triangle", "boat"):
            turns = max(turns, 1)
        if thing.kind in ("circle", "star") or (scene.background and thing.color == "white"):
            turns = max(turns, 2)
        if (thing.color, scene.background or scene.ground) in FAINT:
            turns = max(turns, 3 if scene.is_landscape else 2)
    return turns
