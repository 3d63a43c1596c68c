"""What the transformer is taught beyond `FlowData`'s batches: other words, rows of things, edits that ask for nothing.

`Lessons` is `FlowData` with sentences that went through `words.reword`, rows of shapes and single ones among the
pictures, and two more kinds of batch: adds and idle.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import mlx.core as mx
from tokenizers import Tokenizer

from ..position_ids import text_ids
from ..scenes import (
    Scene,
    captions,
    edit_held_out,
    held_out,
    instruction,
    relatives,
    sample,
    sample_one,
    sample_row,
    scene_held_out,
)
from ..text_encoder import TEMPLATE, TextEncoder
from ..training import flow_ids, shifted_times
from ..transformer import Transformer
from .data import FlowData
from .words import idle_instruction, reword

MORE = {"rows": sample_row, "ones": sample_one}
LESSONS = ("pictures", "edits", "twins", "pictures", "idle", "pictures", "edits", "pictures", "adds", "pictures",
           "twins", "idle", "pictures", "edits", "pictures", "twins", "pictures", "edits", "idle", "pictures",
           "pairs", "pictures", "adds", "twins", "edits")  # fmt: skip
STUDENT = ("pictures", "idle", "pictures", "edits", "twins", "pictures", "pictures", "edits", "pictures", "idle",
           "pictures", "adds", "pictures", "twins", "pictures")  # fmt: skip
SEGMENTS = (3, 0, 3, 1, 3, 2, 3)  # which of the four steps a distillation step is about, by turns
FAINT = {  # things that hardly stand out: (colour, background) of shapes, (colour, ground) of things in a landscape
    ("pink", "pink"), ("pink", "purple"), ("pink", "white"), ("yellow", "yellow"), ("yellow", "white"),
    ("orange", "yellow"), ("green", "hills"), ("white", "snow"), ("yellow", "desert"),
}  # fmt: skip
GUIDANCE, EDITING = 3.0, 1.5  # of pictures from words alone, and of edits, where the reference leaves little to choose
LAYOUT = 2  # the first so many of the four steps settle where things stand
NONSENSE = 0.03  # how often a word is made up: what the rest of the sentence says still holds


def said(rng: random.Random, text: str) -> str:
    """A sentence in some words."""
    if text and rng.random() < NONSENSE:
        words = text.split()
        words[rng.randrange(len(words))] = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 7)))
        return " ".join(words)
    return reword(rng, text)


def extra_turns(scene: Scene) -> int:
    """How often more than once: what has many corners, or none, or hardly stands out is learned last."""
    turns = 0
    for thing in scene.things:
        if thing.kind == "triangle":
            turns = max(turns, 1)
        if thing.kind in ("circle", "star") or (scene.background and thing.colour == "white"):
            turns = max(turns, 2)
        if (thing.colour, scene.background or scene.ground) in FAINT:
            turns = max(turns, 3 if scene.is_landscape else 2)
    return turns


class Lessons(FlowData):
    """`FlowData`, of more kinds. latents["rows"] and ["ones"] are those of `sample_row`, `sample_one`."""

    def __init__(
        self,
        latents: dict[str, mx.array],
        tokenizer: Tokenizer,
        tokens: int,
        batch: int,
        turns: Sequence[str] = LESSONS,
    ):
        super().__init__(latents, tokenizer, tokens, batch, turns)
        self.scenes = {seed: sample(seed) for seed in self.seeds}
        self.more = {
            name: [(row, scene) for row, scene in enumerate(map(draw, range(latents[name].shape[0])))
                   if not scene_held_out(scene)]
            for name, draw in MORE.items()
        }  # fmt: skip
        self.seeds += [seed for seed in self.seeds for _ in range(extra_turns(self.scenes[seed]))]
        for rows in self.more.values():
            rows += [(row, scene) for row, scene in rows for _ in range(extra_turns(scene))]
        self.growing, first = [], 0
        for seed in range(10**9):
            if first >= latents["relatives"].shape[0]:
                break
            family = relatives(seed)
            pairs = []
            for i, before in enumerate(family):
                for j, after in enumerate(family):
                    if len(before.things) == 1 and len(after.things) == 2 and set(before.things) < set(after.things):
                        text = instruction(before, after)
                        if text and not edit_held_out(before, text):
                            pairs.append((text, first + i, first + j))
            if pairs:
                self.growing.append(pairs)
            first += len(family)

    def say(self, rng: random.Random, text: str) -> str:
        """The sentence in some words, if the text encoder has room for them."""
        other = said(rng, text)
        return other if len(self.tokenizer.encode(TEMPLATE.format(other)).ids) <= self.tokens else text

    def choose(self, rng: random.Random) -> list[tuple[str, int, Scene]]:
        """A batch of pictures: the list that each comes from, its row there, and what it shows."""
        counts = {"rows": self.batch // 10, "ones": self.batch // 4}
        seeds = rng.choices(self.seeds, k=self.batch - sum(counts.values()))
        chosen = [("pictures", seed, self.scenes[seed]) for seed in seeds]
        for name, count in counts.items():
            chosen += [(name, *found) for found in rng.choices(self.more[name], k=count)]
        return chosen

    def pictures(self, rng: random.Random):
        chosen = self.choose(rng)
        texts = [rng.choice([c for c in captions(scene) if not held_out(c)] or [""]) for *_, scene in chosen]
        clean = mx.stack([self.latents[name][row] for name, row, _ in chosen])
        return texts, clean, clean[:, :0]

    def adds(self, rng: random.Random):
        found = [rng.choice(rng.choice(self.growing)) for _ in range(self.batch // 2)]
        texts, before, after = zip(*found)
        known = self.latents["relatives"]
        return list(texts), known[mx.array(after)], known[mx.array(before)]

    def idle(self, rng: random.Random):
        seeds = rng.choices(self.seeds, k=self.batch // 2)
        clean = self.latents["pictures"][mx.array(seeds)]
        return [idle_instruction(rng, self.scenes[seed]) for seed in seeds], clean, clean


def more_scenes(rows: int, ones: int) -> dict[str, list[Scene]]:
    """What `Lessons` wants besides `training_scenes`: shapes side by side, and single ones."""
    return {name: [MORE[name](seed) for seed in range(count)] for name, count in (("rows", rows), ("ones", ones))}


class StudentLessons(Lessons):
    """The same for distillation: with each batch the guidance of its pictures, (b,), and which of the four steps it is
    about, as an array of that length.
    """

    def __call__(self, step: int) -> tuple[mx.array, ...]:
        clean, *rest = super().__call__(step)
        segment = SEGMENTS[step % len(SEGMENTS)]
        if self.turns[step % len(self.turns)] == "pictures":
            scenes = [scene for *_, scene in self.choose(random.Random(step))]  # the batch's own choice, once more
            guidance = [1.0 if scene.is_landscape and segment < LAYOUT else GUIDANCE for scene in scenes]
        else:
            guidance = [EDITING] * len(clean)
        return clean, *rest, mx.array(guidance), mx.zeros((segment,))


def lesson_times(key: mx.array, b: int, edits: bool) -> mx.array:
    """Noise levels, (b,): two in five near 0.7, from where the last of four steps jumps to the picture.

    A third is higher, where the layout is decided and, of edits, which thing is meant (shift 16); the rest is lower,
    where the distilled model's teacher draws the outlines.
    """
    k_which, k_time = mx.random.split(key)
    u, which = mx.random.uniform(shape=(b,), key=k_time), mx.random.uniform(shape=(b,), key=k_which)
    high = shifted_times(k_time, b, 16.0) if edits else 0.8 + 0.2 * u
    return mx.where(which < 0.4, 0.62 + 0.16 * u, mx.where(which < 0.75, high, 0.72 * u))


def lesson_loss(
    model: Transformer, text_encoder: TextEncoder, grid: tuple[int, int], root: mx.array,
    clean: mx.array, references: mx.array, ids: mx.array, mask: mx.array, key: mx.array,
) -> mx.array:  # fmt: skip
    """The flow loss at these noise levels, of errors @ root, (128, 128): as the decoder shows them (`decoding.sight`).

    That moves no optimum, for the best answer is the mean, whatever it is measured by. A network too small for the
    best answer is told where to be wrong.
    """
    k_noise, k_time = mx.random.split(key)
    b, n, _ = clean.shape
    t, eps = lesson_times(k_time, b, references.shape[1] > 0), mx.random.normal(clean.shape, key=k_noise)
    x = (1 - t[:, None, None]) * clean + t[:, None, None] * eps
    txt = mx.stop_gradient(text_encoder(ids, mask))
    img = mx.concatenate([x, references], axis=1)
    v = model(img, txt, t, flow_ids(grid, references), text_ids(ids.shape[1]))[:, :n]
    return (((v - (eps - clean)) @ root) ** 2).mean()
