"""What the autoencoder, the tokenizer and the text encoder learn from; the transformer's batches are `curriculum`'s.

A batch depends on its step alone, so a run that was stopped goes on as if it had not been.
"""

import itertools
import math
import random

import mlx.core as mx
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from kleinlite.autoencoder import Autoencoder, patchify
from kleinlite.nano.data import draw_samples, draw_scenes
from kleinlite.scenes import Scene, captions, held_out, sample, scene_held_out
from kleinlite.text_encoder import PAD, TEMPLATE, tokenize

from .curriculum import allowed_scenes
from .edits import edit_held_out, sample_edit
from .rewordings import reword


def held_out_scenes(first: int, count: int) -> list[Scene]:
    """The first scenes of the seeds from `first` on whose content is never trained on."""
    return list(itertools.islice(filter(scene_held_out, map(sample, itertools.count(first))), count))


def psnr(a: mx.array, b: mx.array) -> float:
    """Peak signal-to-noise ratio in decibels of pixels in [-1, 1]."""
    return 10 * math.log10(4 / float(((a - b) ** 2).mean()))


def autoencoder_batch(step: int, batch: int, size: int, crop: int) -> tuple[mx.array, mx.array]:
    """Random crops of fresh scenes (b, crop, crop, 3), and the noise key of this step."""
    rng = random.Random(step)
    x = draw_scenes(list(itertools.islice(allowed_scenes(sample, 1000 * step), batch)), size)
    at = [(i, rng.randint(0, size - crop), rng.randint(0, size - crop)) for i in range(batch)]
    return mx.stack([x[i, r : r + crop, c : c + crop] for i, r, c in at]), mx.random.key(step)


def measure_latents(model: Autoencoder, size: int, count: int) -> None:
    """Fill the autoencoder's batch-norm statistics from `count` drawn scenes."""
    means = [mx.split(model.encoder(draw_samples(range(i, i + 16), size)), 2, axis=-1)[0] for i in range(0, count, 16)]
    mx.eval(means)
    z = patchify(mx.concatenate(means))
    model.bn.running_mean = z.mean(axis=(0, 1, 2))
    model.bn.running_var = z.var(axis=(0, 1, 2))


QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(vocab: int = 640, reworded: bool = False) -> Tokenizer:
    """A byte-level BPE tokenizer in Qwen's form, its merges learned from the grammar's sentences.

    reworded: and from ten rewordings of each.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    sentences = [s for seed in range(4000) for s in (*captions(sample(seed)), sample_edit(seed)[1])]
    if reworded:
        rng = random.Random(0)
        sentences += [reword(rng, text) for text in sentences for _ in range(10)]
    template = [TEMPLATE.format("").replace("<think>", "").replace("</think>", "")] * 100
    trainer = trainers.BpeTrainer(vocab_size=vocab - 5, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(sentences + template, trainer)
    tokenizer.add_special_tokens([PAD, "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return tokenizer


def sample_sentence(rng: random.Random, seed: int) -> str:
    """A caption of scene `seed` or, one time in four, an edit instruction; never a held-out one."""
    if rng.random() < 0.25:
        references, text, _ = sample_edit(seed)
        return "" if edit_held_out(references[0], text) else text
    scene = sample(seed)
    return "" if scene_held_out(scene) else rng.choice([c for c in captions(scene) if not held_out(c)] or [""])


def text_batch(tokenizer: Tokenizer, tokens: int, step: int, batch: int) -> tuple[mx.array, mx.array]:
    """Random sentences of the grammar as ids and mask, (b, tokens) each."""
    rng = random.Random(step)
    texts = [sample_sentence(rng, step * batch + i) for i in range(batch)]
    others = [reword(rng, text) for text in texts]
    fits = [len(tokenizer.encode(TEMPLATE.format(other)).ids) <= tokens for other in others]
    return tokenize(tokenizer, [other if fit else text for text, other, fit in zip(texts, others, fits)], tokens)
