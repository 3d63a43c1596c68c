"""What the transformer learns from: pictures of captions, edits, and instructions that leave a picture as it is.

All scenes stand in one list and are encoded once; a `Lesson` names them by their rows. Nothing whose content is held
out is in any list: no caption, no reference, no result of an edit. A batch depends on its step alone.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice

import mlx.core as mx
from tokenizers import Tokenizer

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
from kleinlite.text_encoder import TEMPLATE, tokenize

from .edits import edit_held_out, instruction, relatives, sample_edit
from .rewordings import no_op_instruction, reword

GRID = (6, 6)  # image tokens of a picture
TURNS = (
    "pictures", "add_edits", "edit_pairs", "edits", "pictures", "no_op_edits", "pictures", "edits", "pictures",
    "edit_pairs", "pictures", "no_op_edits", "pictures", "edits", "pictures", "edit_pairs", "pictures", "edits",
    "no_op_edits", "pictures", "add_edits", "edit_pairs", "pictures", "two_reference_edits", "edits",
)  # fmt: skip
SHARES = {  # references make a batch smaller
    "pictures": 1, "edits": 2, "add_edits": 2, "no_op_edits": 2, "edit_pairs": 2, "two_reference_edits": 3,
}  # fmt: skip
SEGMENTS = (3, 0, 3, 1, 3, 2, 3)  # which of the four steps a step of distillation is about, by turns
GUIDANCE = 3.0  # of pictures from words alone
EDIT_GUIDANCE = 1.5  # the reference leaves little to choose
LAYOUT = 2  # the first steps, in which a landscape is not guided: there guidance turns skies to night
EMPTY = 0.1  # share of prompts that are left out: guidance asks without one
FAINT = {  # things that hardly stand out: (color, background) of shapes, (color, ground) of things in a landscape
    ("pink", "pink"), ("pink", "purple"), ("pink", "white"), ("yellow", "yellow"), ("yellow", "white"),
    ("orange", "yellow"), ("green", "hills"), ("white", "snow"), ("yellow", "desert"),
}  # fmt: skip


@dataclass(frozen=True)
class Lesson:
    """Sentences, one of which is said; the row of the picture that should come out; rows of its references."""

    texts: tuple[str, ...]
    target: int
    references: tuple[int, ...] = ()


@dataclass
class Lessons:
    """All scenes, and the lessons of each kind. An edit pair: two edits of one scene, one for each of its things."""

    scenes: list[Scene] = field(default_factory=list)
    pictures: list[Lesson] = field(default_factory=list)
    edits: list[Lesson] = field(default_factory=list)
    two_reference_edits: list[Lesson] = field(default_factory=list)
    add_edits: list[Lesson] = field(default_factory=list)
    edit_pairs: list[tuple[list[Lesson], list[Lesson]]] = field(default_factory=list)

    def add_scene(self, scene: Scene) -> int:
        """Its row."""
        self.scenes.append(scene)
        return len(self.scenes) - 1


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


class Curriculum:
    """Draws batches from lessons and the latents of their scenes, (scenes, n, 128): of another kind at each step."""

    def __init__(
        self, lessons: Lessons, latents: mx.array, tokenizer: Tokenizer, tokens: int, batch: int,
        turns: Sequence[str] = TURNS,
    ):  # fmt: skip
        self.lessons = lessons
        self.latents = latents
        self.tokenizer = tokenizer
        self.tokens = tokens
        self.batch = batch
        self.turns = turns

    def kind(self, step: int) -> str:
        """What the batch of a step is of: a list of `Lessons`, or "no_op_edits"."""
        return self.turns[step % len(self.turns)]

    def choose(self, step: int, rng: random.Random) -> list[Lesson]:
        """The lessons of a step."""
        kind = self.kind(step)
        number = max(2, self.batch // SHARES[kind])
        if kind == "edit_pairs":
            both = rng.choices(self.lessons.edit_pairs, k=number // 2)
            return [rng.choice(edits) for pair in both for edits in pair]
        if kind == "no_op_edits":
            rows = [lesson.target for lesson in rng.choices(self.lessons.pictures, k=number)]
            return [Lesson((no_op_instruction(rng, self.lessons.scenes[row]),), row, (row,)) for row in rows]
        lessons: list[Lesson] = getattr(self.lessons, kind)
        return rng.choices(lessons, k=number)

    def __call__(self, step: int) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array]:
        """clean (b, n, 128), references (b, r, 128) with r = 0, n or 2n, ids and mask (b, m), and the step's key."""
        rng = random.Random(step)
        chosen = self.choose(step, rng)
        texts = ["" if rng.random() < EMPTY else self.say(rng, rng.choice(lesson.texts)) for lesson in chosen]
        ids, mask = tokenize(self.tokenizer, texts, self.tokens)
        clean = self.latents[mx.array([lesson.target for lesson in chosen])].astype(mx.float32)
        references = clean[:, :0]
        if chosen[0].references:
            rows = mx.array([lesson.references for lesson in chosen])
            references = self.latents[rows].reshape(len(chosen), -1, clean.shape[-1]).astype(mx.float32)
        return clean, references, ids, mask, mx.random.key(step)

    def say(self, rng: random.Random, text: str) -> str:
        """The sentence in some words, if the text encoder has room for them."""
        other = reword(rng, text)
        return other if len(self.tokenizer.encode(TEMPLATE.format(other)).ids) <= self.tokens else text

    def student_batch(self, step: int) -> tuple[mx.array | int, ...]:
        """A batch, the guidance of each of its pictures, (b,), and which of the four steps it is of."""
        segment = SEGMENTS[step % len(SEGMENTS)]
        lessons = self.choose(step, random.Random(step))
        scenes = [self.lessons.scenes[lesson.target] for lesson in lessons]
        if self.kind(step) == "pictures":
            guidance = [1.0 if scene.is_landscape and segment < LAYOUT else GUIDANCE for scene in scenes]
        else:
            guidance = [EDIT_GUIDANCE] * len(scenes)
        return *self(step), mx.array(guidance), segment
