"""What nano is trained on: pictures and captions of drawn scenes, as batches. Hand-written.

A batch depends on its step alone, so a run that was stopped goes on as if it had not been. The transformer's pictures
are encoded once (`encode_training_set`); `FlowData` draws its batches from those latents.

b batch · n image tokens · m text tokens · H, W pixels
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence

import mlx.core as mx
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from ..autoencoder import Autoencoder, pack
from ..scenes import (
    Scene,
    captions,
    draw,
    edit_held_out,
    held_out,
    instruction,
    relatives,
    sample,
    sample_edit,
    scene_held_out,
)
from ..text_encoder import PAD, TEMPLATE, tokenize

# ---------------------------------------------------------------- pictures


def draw_scenes(scenes: list[Scene], size: int) -> mx.array:
    """Drawn scenes as pixels in [-1, 1], (b, size, size, 3)."""
    rows = [mx.array(memoryview(draw(scene, size).tobytes())) for scene in scenes]
    return mx.stack(rows).reshape(len(scenes), size, size, 3).astype(mx.float32) / 127.5 - 1


def draw_samples(seeds: Iterable[int], size: int) -> mx.array:
    """The scenes of these seeds as pixels, (b, size, size, 3)."""
    return draw_scenes([sample(seed) for seed in seeds], size)


def psnr(a: mx.array, b: mx.array) -> float:
    """Peak signal-to-noise ratio in decibels of pixels in [-1, 1]."""
    return 10 * math.log10(4 / ((a - b) ** 2).mean().item())


def autoencoder_batch(step: int, batch: int, size: int, crop: int) -> tuple[mx.array, mx.array]:
    """Random crops of fresh scenes (b, crop, crop, 3), and the noise key of this step."""
    rng = random.Random(step)
    x = draw_samples(range(step * batch, (step + 1) * batch), size)
    at = [(i, rng.randint(0, size - crop), rng.randint(0, size - crop)) for i in range(batch)]
    return mx.stack([x[i, r : r + crop, c : c + crop] for i, r, c in at]), mx.random.key(step)


def measure_latents(model: Autoencoder, size: int, count: int = 512) -> None:
    """Fill the autoencoder's batch-norm statistics from `count` drawn scenes."""
    means = [mx.split(model.encoder(draw_samples(range(i, i + 16), size)), 2, axis=-1)[0] for i in range(0, count, 16)]
    mx.eval(means)
    z = pack(mx.concatenate(means))
    model.bn.running_mean, model.bn.running_var = z.mean(axis=(0, 1, 2)), z.var(axis=(0, 1, 2))


# ---------------------------------------------------------------- words

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(vocab: int = 640) -> Tokenizer:
    """A byte-level BPE tokenizer in Qwen's form, its merges learned from the grammar's sentences."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    sentences = [s for seed in range(4000) for s in (*captions(sample(seed)), sample_edit(seed)[1])]
    template = [TEMPLATE.format("").replace("<think>", "").replace("</think>", "")] * 100
    trainer = trainers.BpeTrainer(vocab_size=vocab - 5, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(sentences + template, trainer)
    tokenizer.add_special_tokens([PAD, "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return tokenizer


def sample_sentence(rng: random.Random, seed: int) -> str:
    """A caption of scene `seed` or, one time in four, an edit instruction; never a held-out one."""
    if rng.random() < 0.25:
        return sample_edit(seed)[1]
    return rng.choice([c for c in captions(sample(seed)) if not held_out(c)] or [""])


def text_batch(tokenizer: Tokenizer, tokens: int, step: int, batch: int) -> tuple[mx.array, mx.array]:
    """Random sentences of the grammar as ids and mask, (b, tokens) each."""
    rng = random.Random(step)
    return tokenize(tokenizer, [sample_sentence(rng, step * batch + i) for i in range(batch)], tokens)


# ---------------------------------------------------------------- latents


def encode_scenes(
    autoencoder: Autoencoder, scenes: list[Scene], size: int, progress: Callable[[Iterable], Iterable] = iter
) -> mx.array:
    """Latents of drawn scenes, (count, n, 128), float16."""
    rows = []
    for i in progress(range(0, len(scenes), 32)):
        latents = autoencoder.encode(draw_scenes(scenes[i : i + 32], size))
        rows.append(latents.reshape(latents.shape[0], -1, latents.shape[-1]).astype(mx.float16))
        mx.eval(rows[-1])
    return mx.concatenate(rows)


def training_scenes(count: int, edits: int, families: int) -> dict[str, list[Scene]]:
    """Everything the transformer trains on.

    pictures: sample(0 … count-1). targets, first: result and first reference of sample_edit(0 … edits-1).
    second: second references, of those edits that have one, in the same order. relatives: those of 0 … families-1.
    """
    found = [sample_edit(seed) for seed in range(edits)]
    return {
        "pictures": [sample(seed) for seed in range(count)],
        "targets": [target for _, _, target in found],
        "first": [references[0] for references, _, _ in found],
        "second": [references[1] for references, _, _ in found if len(references) == 2],
        "relatives": [scene for seed in range(families) for scene in relatives(seed)],
    }


def encode_training_set(
    autoencoder: Autoencoder,
    size: int,
    count: int,
    edits: int,
    families: int,
    progress: Callable[[Iterable], Iterable] = iter,
) -> dict[str, mx.array]:
    """The latents of `training_scenes`, by the same names: encoded once."""
    scenes = training_scenes(count, edits, families)
    return {name: encode_scenes(autoencoder, scenes[name], size, progress) for name in scenes}


@functools.cache  # every stage asks for the same
def twin_edits(rows: int) -> list[list[tuple[int, list, list]]]:
    """Of each family among so many `relatives`: the scenes of two things and, for either thing, what may be asked.

    A scene is its row; what may be asked is a list of (instruction, row of the result).
    """
    first, families = 0, []
    for seed in itertools.count():
        if first >= rows:
            return families
        scenes, found = relatives(seed), []
        for i, before in enumerate(scenes):
            if len(before.things) < 2:
                continue
            edits = [], []
            for j, after in enumerate(scenes):
                text = instruction(before, after)
                if text and not edit_held_out(before, text):
                    edits[before.things[0] in after.things].append((text, first + j))  # if so, the other changes
            if all(edits):
                found.append((first + i, *edits))
        if found:
            families.append(found)
        first += len(scenes)


TURNS = 5 * ("pictures", "pictures", "pictures", "edits") + ("pictures", "pictures", "pictures", "pairs")


class FlowData:
    """Draws the transformer's batches from an encoded training set: of another kind at each step, by turns.

    pictures: a scene and a caption. edits: a scene, an instruction, the changed scene. pairs: the same with two
    references. twins: two edits of one scene of two things, an instruction for each.
    """

    def __init__(
        self, latents: dict[str, mx.array], tokenizer: Tokenizer, tokens: int, batch: int,
        turns: Sequence[str] = TURNS,
    ):  # fmt: skip
        self.latents, self.tokenizer, self.tokens, self.batch, self.turns = latents, tokenizer, tokens, batch, turns
        count = latents["pictures"].shape[0]  # name a scene twice and it comes twice as often
        self.seeds = [seed for seed in range(count) if not scene_held_out(sample(seed))]
        self.edits_by_seed = [sample_edit(seed) for seed in range(latents["targets"].shape[0])]
        allowed = [s for s, (refs, text, _) in enumerate(self.edits_by_seed) if not edit_held_out(refs[0], text)]
        self.one_reference = [s for s in allowed if len(self.edits_by_seed[s][0]) == 1]
        two = [s for s, (refs, _, _) in enumerate(self.edits_by_seed) if len(refs) == 2]
        self.second_row = {seed: row for row, seed in enumerate(two)}  # where a seed's second reference is stored
        self.two_references = [s for s in allowed if s in self.second_row]
        self.families = twin_edits(latents["relatives"].shape[0])

    def __call__(self, step: int) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array]:
        """clean (b, n, 128), references (b, r, 128) with r = 0, n or 2n, ids and mask (b, m), and the step's key."""
        rng = random.Random(step)
        texts, clean, references = getattr(self, self.turns[step % len(self.turns)])(rng)
        texts = ["" if rng.random() < 0.1 else self.say(rng, text) for text in texts]  # guidance asks without one
        ids, mask = tokenize(self.tokenizer, texts, self.tokens)
        return clean.astype(mx.float32), references.astype(mx.float32), ids, mask, mx.random.key(step)

    def say(self, rng: random.Random, text: str) -> str:
        """The words in which a batch says this sentence."""
        return text

    def pictures(self, rng: random.Random) -> tuple[list[str], mx.array, mx.array]:
        seeds = rng.choices(self.seeds, k=self.batch)
        texts = [rng.choice([c for c in captions(sample(s)) if not held_out(c)] or [""]) for s in seeds]
        clean = self.latents["pictures"][mx.array(seeds)]
        return texts, clean, clean[:, :0]

    def edits(self, rng: random.Random) -> tuple[list[str], mx.array, mx.array]:
        return self._edits(rng.choices(self.one_reference, k=self.batch // 2))

    def pairs(self, rng: random.Random) -> tuple[list[str], mx.array, mx.array]:
        seeds = rng.choices(self.two_references, k=self.batch // 3)
        texts, clean, first = self._edits(seeds)
        second = self.latents["second"][mx.array([self.second_row[s] for s in seeds])]
        return texts, clean, mx.concatenate([first, second], axis=1)

    def _edits(self, seeds: list[int]) -> tuple[list[str], mx.array, mx.array]:
        rows = mx.array(seeds)
        return [self.edits_by_seed[s][1] for s in seeds], self.latents["targets"][rows], self.latents["first"][rows]

    def twins(self, rng: random.Random) -> tuple[list[str], mx.array, mx.array]:
        found = [rng.choice(rng.choice(self.families)) for _ in range(self.batch // 4)]
        before = [row for row, *_ in found for _ in range(2)]
        often = lambda edits: [1 if text.startswith("remove") else 3 for text, _ in edits]  # the easy ones less often
        chosen = [rng.choices(edits, often(edits))[0] for _, *both in found for edits in both]
        texts, after = zip(*chosen)
        known = self.latents["relatives"]
        return list(texts), known[mx.array(after)], known[mx.array(before)]
