"""What the autoencoder, the tokenizer and the text encoder learn from; the transformer's batches are `curriculum`'s.

A batch depends on its step alone, so a run that was stopped goes on as if it had not been.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterable

import mlx.core as mx
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from kleinlite.autoencoder import Autoencoder, patchify
from kleinlite.nano import data
from kleinlite.text_encoder import PAD, TEMPLATE, tokenize

from .world import Scene, World


def draw_scenes(world: World, scenes: Iterable[Scene]) -> mx.array:
    """Drawn scenes as pixels in [-1, 1], (b, size, size, 3)."""
    return data.draw_scenes(scenes, world.size, lambda scene, _: world.draw(scene))


def encode_scenes(
    world: World, autoencoder: Autoencoder, scenes: list[Scene], progress: Callable[[Iterable], Iterable] = iter
) -> mx.array:
    """Latents of drawn scenes, (count, n, 128), float16."""
    return data.encode_scenes(autoencoder, scenes, world.size, progress, lambda scene, _: world.draw(scene))


def psnr(a: mx.array, b: mx.array) -> float:
    """Peak signal-to-noise ratio in decibels of pixels in [-1, 1]."""
    return 10 * math.log10(4 / float(((a - b) ** 2).mean()))


def autoencoder_batch(world: World, step: int, batch: int, crop: int) -> tuple[mx.array, mx.array]:
    """Random crops of fresh scenes (b, crop, crop, 3), and the noise key of this step."""
    rng = random.Random(step)
    x = draw_scenes(world, itertools.islice(world.allowed_scenes(1000 * step), batch))
    most = world.size - crop
    at = [(i, rng.randint(0, most), rng.randint(0, most)) for i in range(batch)]
    return mx.stack([x[i, r : r + crop, c : c + crop] for i, r, c in at]), mx.random.key(step)


def measure_latents(world: World, model: Autoencoder, count: int) -> None:
    """Fill the autoencoder's batch-norm statistics from `count` drawn scenes."""
    means = []
    for i in range(0, count, 16):
        pixels = draw_scenes(world, map(world.sample, range(i, i + 16)))
        means.append(mx.split(model.encoder(pixels), 2, axis=-1)[0])
        mx.eval(means)
    z = patchify(mx.concatenate(means))
    model.bn.running_mean = z.mean(axis=(0, 1, 2))
    model.bn.running_var = z.var(axis=(0, 1, 2))


QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(world: World, vocab: int = 640, reworded: bool = False) -> Tokenizer:
    """A byte-level BPE tokenizer in Qwen's form, its merges learned from the world's sentences.

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
    sentences = [text for seed in range(4000) for text in world.sentences(seed)]
    if reworded:
        rng = random.Random(0)
        sentences += [world.reword(rng, text) for text in sentences for _ in range(10)]
    template = [TEMPLATE.format("").replace("<think>", "").replace("</think>", "")] * 100
    trainer = trainers.BpeTrainer(vocab_size=vocab - 5, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(sentences + template, trainer)
    tokenizer.add_special_tokens([PAD, "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return tokenizer


def has_room(tokenizer: Tokenizer, text: str, tokens: int) -> bool:
    """Whether a sentence, in the chat template, has at most so many tokens."""
    return len(tokenizer.encode(TEMPLATE.format(text)).ids) <= tokens


def text_batch(
    world: World, tokenizer: Tokenizer, tokens: int, step: int, batch: int
) -> tuple[mx.array, mx.array]:  # fmt: skip
    """Random sentences of the world as ids and mask, (b, tokens) each."""
    rng = random.Random(step)
    texts = [world.sentence(rng, step * batch + i) for i in range(batch)]
    others = [world.reword(rng, text) for text in texts]
    said = [other if has_room(tokenizer, other, tokens) else text for text, other in zip(texts, others)]
    return tokenize(tokenizer, said, tokens)
