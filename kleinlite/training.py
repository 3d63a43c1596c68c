"""Training klein-nano.

We train the small model of this book: scenes drawn by a program, an autoencoder, a language model of captions, and
a transformer that learns to paint them.

Promoted from notebooks/08_training.ipynb: edit there, then run `make promote`. (seal 1b9e7a18)
"""

import functools
import itertools
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from .autoencoder import Autoencoder, pack
from .position_ids import image_ids, reference_ids, text_ids
from .sampling import guide, schedule
from .scenes import Scene, captions, draw, edit_held_out, held_out, instruction, relatives, sample, sample_edit
from .text_encoder import PAD, TEMPLATE, TextEncoder, tokenize
from .transformer import Transformer

__all__ = [
    "to_batch",
    "pictures",
    "psnr",
    "initialise",
    "learning_rate",
    "SHARE",
    "from_first",
    "read_run",
    "Run",
    "autoencoder_batch",
    "autoencoder_loss",
    "measure_latents",
    "decoder_batch",
    "decoder_loss",
    "QWEN_SPLIT",
    "train_tokenizer",
    "sentence",
    "text_batch",
    "text_encoder_loss",
    "encode_scenes",
    "training_scenes",
    "encode_training_set",
    "shifted_times",
    "twin_edits",
    "TURNS",
    "FlowData",
    "flow_ids",
    "flow_loss",
    "flow_optimizer",
    "distill_loss",
]


def to_batch(scenes: list[Scene], size: int) -> mx.array:
    """Drawn scenes as pixels in [-1, 1], (b, size, size, 3)."""
    rows = [mx.array(memoryview(draw(scene, size).tobytes())) for scene in scenes]
    return mx.stack(rows).reshape(len(scenes), size, size, 3).astype(mx.float32) / 127.5 - 1


def pictures(seeds: list[int], size: int) -> mx.array:
    """The scenes of these seeds as pixels, (b, size, size, 3)."""
    return to_batch([sample(seed) for seed in seeds], size)


def psnr(a: mx.array, b: mx.array) -> float:
    """Peak signal-to-noise ratio in decibels of pixels in [-1, 1]."""
    return 10 * math.log10(4 / ((a - b) ** 2).mean().item())


def initialise(model: nn.Module, key: mx.array, damp: tuple[str, ...] = (), damping: float = 0.1) -> None:
    """Weights normal with variance 1/fan-in, biases zero; matrices whose name ends in one of `damp` start smaller.

    Damped last matrices of residual branches let a fresh network begin close to the identity.
    """
    weights = []
    for name, w in tree_flatten(model.trainable_parameters()):
        if w.ndim >= 2:
            key, sub = mx.random.split(key)
            scale = damping if name.endswith(tuple(f"{d}.weight" for d in damp)) else 1.0
            weights.append((name, scale * math.prod(w.shape[1:]) ** -0.5 * mx.random.normal(w.shape, key=sub)))
        elif name.endswith("bias"):
            weights.append((name, mx.zeros_like(w)))
    model.update(tree_unflatten(weights))


def learning_rate(peak: float, steps: int, warmup: int = 100) -> Callable[[mx.array], mx.array]:
    """A short linear rise, then half a cosine down to a hundredth of the peak at `steps`."""
    down = optim.cosine_decay(peak, max(steps - warmup, 1), peak / 100)
    return optim.join_schedules([optim.linear_schedule(peak / 100, peak, warmup), down], [warmup])


SHARE = 72_000  # of several processes, number r takes the batches from step r · SHARE on: other ones, of the same kinds


def from_first(tree):
    """The first process's arrays, on every process that `mlx.launch` started; alone, the arrays themselves."""
    rank, shared = mx.distributed.init().rank(), []
    for name, a in sorted(tree_flatten(tree)):  # by name and one at a time: out of step, processes wait for ever
        shared.append((name, mx.distributed.all_sum(a if rank == 0 else mx.zeros_like(a))))
        mx.eval(shared)
    return tree_unflatten(shared)


def read_run(path: Path, expected: dict[str, mx.array]) -> tuple[dict, int]:
    """The trees and the step in a run's file; ValueError if it was cut short or belongs to another network."""
    try:
        arrays, info = mx.load(str(path), return_metadata=True)
    except RuntimeError:
        raise ValueError(f"{path} is damaged or cut short: delete it, and its stage starts again.") from None
    if {k: v.shape for k, v in arrays.items()} != {k: v.shape for k, v in expected.items()}:
        raise ValueError(f"{path} holds another network than this one: delete it, or use another folder.")
    return tree_unflatten(list(arrays.items())), int(info["step"])


class Run:
    """A training run that can be stopped at any time: weights, their moving average, optimizer and step in one file.

    Under `mlx.launch` each process trains on batches of its own and the gradients are averaged: n processes make one
    run with batches n times as large. The first one reads and writes the file; the others are told what is in it.
    """

    def __init__(self, path: Path, model: nn.Module, optimizer: optim.Optimizer, decay: float = 0.999):
        self.path, self.model, self.optimizer, self.decay = Path(path), model, optimizer, decay
        self.group, self.step = mx.distributed.init(), 0
        optimizer.init(model.trainable_parameters())
        self.average = tree_map(lambda w: w + 0, model.trainable_parameters())
        trees = self._trees()
        if self.group.rank() == 0 and self.path.exists():
            trees, self.step = read_run(self.path, dict(tree_flatten(trees)))
        trees, self.step = from_first(trees), from_first(mx.array(self.step)).item()
        model.update(trees["model"])
        optimizer.state, self.average = trees["optimizer"], trees["average"]

    def _trees(self) -> dict:
        """Everything that a later start needs."""
        weights = self.model.trainable_parameters()
        return {"model": weights, "optimizer": self.optimizer.state, "average": self.average}

    def save(self) -> None:
        """Write the file in one move, so that a stop in the middle leaves the old one."""
        if self.group.rank() == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial = self.path.with_suffix(".partial.safetensors")
            mx.save_safetensors(str(partial), dict(tree_flatten(self._trees())), {"step": str(self.step)})
            os.replace(partial, self.path)

    def steps(self, until: int, loss: Callable[..., mx.array], batches: Callable[[int], tuple]) -> Iterator[float]:
        """Train until step `until`, yielding each step's loss. `batches(step)` makes the arguments of `loss(model, …)`.

        A batch depends on the step alone, so a resumed run sees what an uninterrupted one would have seen.
        """
        value_and_grad = nn.value_and_grad(self.model, lambda *batch: loss(self.model, *batch))
        state = [self.model.state, self.optimizer.state]

        def update(batch):
            value, grads = nn.average_gradients(value_and_grad(*batch), self.group)  # over processes
            grads, _ = optim.clip_grad_norm(grads, 1.0)
            self.optimizer.update(self.model, grads)
            return value

        update = mx.compile(update, inputs=state, outputs=state)
        while self.step < until:
            value = update(batches(self.step + SHARE * self.group.rank()))
            # A young average forgets faster: with a fixed decay it would remember the random start.
            decay = min(self.decay, (1 + self.step) / (10 + self.step))
            weights = self.model.trainable_parameters()
            self.average = tree_map(lambda a, w, d=decay: d * a + (1 - d) * w, self.average, weights)
            mx.eval(value, state, self.average)
            self.step += 1
            yield value.item()


def autoencoder_batch(step: int, batch: int, size: int, crop: int) -> tuple[mx.array, mx.array]:
    """Random crops of fresh scenes (b, crop, crop, 3), and the noise key of this step."""
    rng = random.Random(step)
    x = pictures([step * batch + i for i in range(batch)], size)
    at = [(i, rng.randint(0, size - crop), rng.randint(0, size - crop)) for i in range(batch)]
    return mx.stack([x[i, r : r + crop, c : c + crop] for i, r, c in at]), mx.random.key(step)


def autoencoder_loss(model: Autoencoder, pixels: mx.array, key: mx.array, kl_weight: float = 2e-4) -> mx.array:
    """Picture through a noisy latent and back: absolute and squared error, and a light pull towards unit normal."""
    mean, logvar = mx.split(model.encoder(pixels), 2, axis=-1)
    logvar = mx.clip(logvar, -20, 10)
    z = mean + mx.exp(0.5 * logvar) * mx.random.normal(mean.shape, key=key)
    error = model.decoder(z) - pixels
    kl = 0.5 * (mean * mean + mx.exp(logvar) - 1 - logvar)
    return mx.abs(error).mean() + 4 * (error * error).mean() + kl_weight * kl.mean()


def measure_latents(model: Autoencoder, size: int, count: int = 512) -> None:
    """Fill the autoencoder's batch-norm statistics from `count` drawn scenes."""
    means = [
        mx.split(model.encoder(pictures(list(range(i, i + 16)), size)), 2, axis=-1)[0] for i in range(0, count, 16)
    ]
    mx.eval(means)
    z = pack(mx.concatenate(means))
    model.bn.running_mean, model.bn.running_var = z.mean(axis=(0, 1, 2)), z.var(axis=(0, 1, 2))


def decoder_batch(model: Autoencoder, step: int, batch: int, size: int) -> tuple[mx.array, mx.array]:
    """Whole fresh pictures and their latents, with a little noise, as the transformer's will have."""
    x = pictures(range(step * batch, (step + 1) * batch), size)
    z = model.encode(x)
    return x, z + 0.02 * mx.random.normal(z.shape, key=mx.random.key(step))


def decoder_loss(model: Autoencoder, pixels: mx.array, latents: mx.array) -> mx.array:
    """What the decoder alone makes of latents: mostly squared error, which is what PSNR counts."""
    error = model.decode(latents) - pixels
    return 0.3 * mx.abs(error).mean() + 4 * (error * error).mean()


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


def sentence(rng: random.Random, seed: int) -> str:
    """A caption of scene `seed` or, one time in four, an edit instruction; never a held-out one."""
    if rng.random() < 0.25:
        return sample_edit(seed)[1]
    return rng.choice([c for c in captions(sample(seed)) if not held_out(c)] or [""])


def text_batch(tokenizer: Tokenizer, tokens: int, step: int, batch: int) -> tuple[mx.array, mx.array]:
    """Random sentences of the grammar as ids and mask, (b, tokens) each."""
    rng = random.Random(step)
    return tokenize(tokenizer, [sentence(rng, step * batch + i) for i in range(batch)], tokens)


def text_encoder_loss(model: TextEncoder, ids: mx.array, mask: mx.array) -> mx.array:
    """Cross-entropy of the next token, over real tokens: how language models learn."""
    loss = nn.losses.cross_entropy(model.logits(ids, mask)[:, :-1], ids[:, 1:])
    real = mask[:, 1:].astype(mx.float32)
    return (loss * real).sum() / real.sum()


def encode_scenes(autoencoder: Autoencoder, scenes: list[Scene], size: int, progress=iter) -> mx.array:
    """Latents of drawn scenes, (count, n, 128), float16."""
    rows = []
    for i in progress(range(0, len(scenes), 32)):
        latents = autoencoder.encode(to_batch(scenes[i : i + 32], size))
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
    autoencoder: Autoencoder, size: int, count: int, edits: int, families: int, progress=iter
) -> dict[str, mx.array]:
    """The latents of `training_scenes`, by the same names: encoded once."""
    scenes = training_scenes(count, edits, families)
    return {name: encode_scenes(autoencoder, scenes[name], size, progress) for name in scenes}


def shifted_times(key: mx.array, b: int, shift: float = 6.0) -> mx.array:
    """Noise levels to train at, (b,): uniform, then pushed towards 1, where few-step sampling spends its steps."""
    u = mx.random.uniform(shape=(b,), key=key)
    return shift * u / (1 + (shift - 1) * u)


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
        self.seeds = list(range(latents["pictures"].shape[0]))  # scenes; name one twice and it comes twice as often
        self.known = [sample_edit(seed) for seed in range(latents["targets"].shape[0])]
        allowed = [s for s, (refs, text, _) in enumerate(self.known) if not edit_held_out(refs[0], text)]
        self.ones = [s for s in allowed if len(self.known[s][0]) == 1]
        two = [s for s, (refs, _, _) in enumerate(self.known) if len(refs) == 2]
        self.row_of = {seed: row for row, seed in enumerate(two)}  # where a seed's second reference is stored
        self.twos = [s for s in allowed if s in self.row_of]
        self.families = twin_edits(latents["relatives"].shape[0])

    def __call__(self, step: int) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array]:
        """clean (b, n, 128), references (b, r, 128) with r = 0, n or 2n, ids and mask (b, m), and the step's key."""
        rng = random.Random(step)
        texts, clean, references = getattr(self, self.turns[step % len(self.turns)])(rng)
        texts = ["" if rng.random() < 0.1 else text for text in texts]  # so that guidance has an answer without one
        ids, mask = tokenize(self.tokenizer, texts, self.tokens)
        return clean.astype(mx.float32), references.astype(mx.float32), ids, mask, mx.random.key(step)

    def pictures(self, rng: random.Random) -> tuple[list[str], mx.array, mx.array]:
        seeds = rng.choices(self.seeds, k=self.batch)
        texts = [rng.choice([c for c in captions(sample(s)) if not held_out(c)] or [""]) for s in seeds]
        clean = self.latents["pictures"][mx.array(seeds)]
        return texts, clean, clean[:, :0]

    def edits(self, rng: random.Random) -> tuple[list[str], mx.array, mx.array]:
        return self._edits(rng.choices(self.ones, k=self.batch // 2))

    def pairs(self, rng: random.Random) -> tuple[list[str], mx.array, mx.array]:
        seeds = rng.choices(self.twos, k=self.batch // 3)
        texts, clean, first = self._edits(seeds)
        second = self.latents["second"][mx.array([self.row_of[s] for s in seeds])]
        return texts, clean, mx.concatenate([first, second], axis=1)

    def _edits(self, seeds: list[int]) -> tuple[list[str], mx.array, mx.array]:
        rows = mx.array(seeds)
        return [self.known[s][1] for s in seeds], self.latents["targets"][rows], self.latents["first"][rows]

    def twins(self, rng: random.Random) -> tuple[list[str], mx.array, mx.array]:
        found = [rng.choice(rng.choice(self.families)) for _ in range(self.batch // 4)]
        before = [row for row, *_ in found for _ in range(2)]
        often = lambda edits: [1 if text.startswith("remove") else 3 for text, _ in edits]  # the easy ones less often
        chosen = [rng.choices(edits, often(edits))[0] for _, *both in found for edits in both]
        texts, after = zip(*chosen)
        known = self.latents["relatives"]
        return list(texts), known[mx.array(after)], known[mx.array(before)]


def flow_ids(grid: tuple[int, int], references: mx.array) -> mx.array:
    """Coordinates of the picture's tokens and of the equally large references in `references` (b, r, 128)."""
    count = references.shape[1] // (grid[0] * grid[1])
    ids = image_ids(*grid)
    return mx.concatenate([ids, reference_ids([grid] * count)]) if count else ids


def flow_loss(
    model: Transformer, text_encoder: TextEncoder, grid: tuple[int, int],
    clean: mx.array, references: mx.array, ids: mx.array, mask: mx.array, key: mx.array,
    shift: float = 6.0,
) -> mx.array:  # fmt: skip
    """Rectified flow: at x = (1 − t)·clean + t·noise the velocity to learn is noise − clean. References stay clean."""
    k_noise, k_time = mx.random.split(key)
    b, n, _ = clean.shape
    t, eps = shifted_times(k_time, b, shift), mx.random.normal(clean.shape, key=k_noise)
    x = (1 - t[:, None, None]) * clean + t[:, None, None] * eps
    txt = mx.stop_gradient(text_encoder(ids, mask))
    img = mx.concatenate([x, references], axis=1)
    v = model(img, txt, t, flow_ids(grid, references), text_ids(ids.shape[1]))[:, :n]
    return ((v - (eps - clean)) ** 2).mean()


def flow_optimizer(steps: int, rate: float = 1.0) -> optim.Optimizer:
    """Muon for the blocks' matrices, Adam for everything at the edges.

    Muon makes every update of a matrix act equally strongly in all directions.
    """
    warmup = min(100, max(1, steps // 10))
    muon = optim.Muon(learning_rate(rate * 0.02, steps, warmup), momentum=0.95, weight_decay=0.0)
    adam = optim.AdamW(
        learning_rate(rate * 2e-3, steps, warmup), betas=[0.9, 0.99], weight_decay=0.0, bias_correction=True
    )
    return optim.MultiOptimizer([muon, adam], [lambda name, w: "blocks" in name and w.ndim == 2])


def distill_loss(
    model: Transformer, teacher: Transformer, text_encoder: TextEncoder, empty: mx.array, guidance: float,
    grid: tuple[int, int], clean: mx.array, references: mx.array, ids: mx.array, mask: mx.array, key: mx.array,
) -> mx.array:  # fmt: skip
    """Learn to do in one of four steps, without guidance, what the teacher does in two smaller ones with it.

    empty: features of the empty prompt (1, m, features). The student starts as a copy of the teacher.
    """
    k_noise, k_step = mx.random.split(key)
    b, n, _ = clean.shape
    sigmas = mx.array(schedule(4, n))
    i = mx.random.randint(0, 4, (b,), key=k_step)
    t, t_end = sigmas[i], sigmas[i + 1]
    x = start = (1 - t[:, None, None]) * clean + t[:, None, None] * mx.random.normal(clean.shape, key=k_noise)
    txt, without = text_encoder(ids, mask), mx.repeat(empty, b, axis=0)
    rope = teacher.rope(flow_ids(grid, references), text_ids(ids.shape[1]))

    def velocity(net, x, txt, t):
        return net(mx.concatenate([x, references], axis=1), txt, t, rope=rope)[:, :n]

    half = (t + t_end) / 2
    for now, then in ((t, half), (half, t_end)):
        v = guide(velocity(teacher, x, txt, now), velocity(teacher, x, without, now), guidance)
        x = x + (then - now)[:, None, None] * v
    mean_velocity = mx.stop_gradient((x - start) / (t_end - t)[:, None, None])
    return ((velocity(model, start, mx.stop_gradient(txt), t) - mean_velocity) ** 2).mean()
