"""What the transformer learns from: pictures of captions, edits, and instructions that leave a picture as it is.

All scenes stand in one list and are encoded once; a `Lesson` names them by their rows. A batch depends on its step
alone.
"""

import random
from collections.abc import Sequence

import mlx.core as mx
from tokenizers import Tokenizer

from kleinlite.text_encoder import tokenize

from .data import has_room
from .world import KINDS, Lesson, Lessons, World

SEGMENTS = (3, 0, 3, 1, 3, 2, 3)  # which of the four steps a step of distillation is about, by turns
EMPTY = 0.1  # share of prompts that are left out: guidance asks without one


class Curriculum:
    """Draws batches from lessons and the latents of their scenes, (scenes, n, 128): of another kind at each step."""

    def __init__(
        self, world: World, lessons: Lessons, latents: mx.array, tokenizer: Tokenizer, tokens: int, batch: int,
        turns: Sequence[str] | None = None,
    ):  # fmt: skip
        self.world = world
        self.lessons = lessons
        self.latents = latents
        self.tokenizer = tokenizer
        self.tokens = tokens
        self.batch = batch
        self.turns = turns or world.turns

    def kind(self, step: int) -> str:
        """What the batch of a step is of: a list of `Lessons`, or "no_op_edits"."""
        return self.turns[step % len(self.turns)]

    def choose(self, step: int, rng: random.Random) -> list[Lesson]:
        """The lessons of a step."""
        kind = self.kind(step)
        number = max(2, self.batch // KINDS[kind])
        if kind == "edit_pairs":
            both = rng.choices(self.lessons.edit_pairs, k=number // 2)
            return [rng.choice(edits) for pair in both for edits in pair]
        if kind == "no_op_edits":
            rows = [lesson.target for lesson in rng.choices(self.lessons.pictures, k=number)]
            return [Lesson((self.world.no_op_instruction(rng, self.lessons.scenes[row]),), row, (row,)) for row in rows]
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
        other = self.world.reword(rng, text)
        return other if has_room(self.tokenizer, other, self.tokens) else text

    def student_batch(self, step: int) -> tuple[mx.array | int, ...]:
        """A batch, the guidance of each of its pictures, (b,), and which of the four steps it is of."""
        segment = SEGMENTS[step % len(SEGMENTS)]
        lessons = self.choose(step, random.Random(step))
        kind = self.kind(step)
        scenes = [self.lessons.scenes[lesson.target] for lesson in lessons]
        guidance = [self.world.guidance(scene, kind, segment) for scene in scenes]
        return *self(step), mx.array(guidance), segment
