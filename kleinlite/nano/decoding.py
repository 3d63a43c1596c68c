"""What the decoder is taught, to read latents as the flow writes them; and what it shows of them. Hand-written.

The encoder's latents are exact; the transformer's are a little off, most of all after its last step, from t = 0.7 to
the picture. So the decoder sees mostly latents that went through noise and one step of the transformer, and must find
the drawn picture behind them. "Diffusion Transformers with Representation Autoencoders" (arXiv 2510.11690) adds noise
to the decoder's latents for the same reason; these are the mistakes themselves.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import mlx.core as mx
import mlx.optimizers as optim
from tokenizers import Tokenizer

from ..autoencoder import Autoencoder
from ..position_ids import image_ids, text_ids
from ..scenes import Scene, captions, sample, sample_one, sample_row
from ..text_encoder import TextEncoder, tokenize
from ..training import learning_rate
from ..transformer import Transformer
from .data import draw_scenes
from .lessons import extra_turns

CLEAN = 3  # of eight pictures so many keep the encoder's latents: editing and image-to-image start from these
MOST = 4  # so many times as often a scene may come as another
USUAL = 0.28  # standard deviation of a picture's pixels about their mean colour, the median of 300 scenes
UNSEEN = 0.25  # an error that no pixel shows counts so much: the next step still reads it
FIRST = 40_000_000  # scenes from this seed on: neither those that the transformer has seen nor those of the judge


def decoder_scene(rng: random.Random, seed: int) -> Scene:
    """Any scene, single shapes more often: a flat background and one outline show the decoder's faults best."""
    kind = rng.random()
    return sample(seed) if kind < 0.6 else sample_one(seed) if kind < 0.9 else sample_row(seed)


def decoder_scenes(rng: random.Random, first: int, count: int) -> list[Scene]:
    """So many of them, from a seed on; what is learned last comes as often more as in `Lessons`."""
    seeds, scenes = itertools.count(first), []
    while len(scenes) < count:
        scene = decoder_scene(rng, next(seeds))
        if rng.random() < (1 + extra_turns(scene)) / MOST:
            scenes.append(scene)
    return scenes


def written(
    flow: Transformer, txt: mx.array, latents: mx.array, t: mx.array, key: mx.array
) -> mx.array:  # fmt: skip
    """What one step takes latents (b, gh, gw, 128) with noise of level t (b,) for, in the same shape."""
    b, gh, gw, c = latents.shape
    clean, noise = latents.reshape(b, -1, c), mx.random.normal((b, gh * gw, c), key=key)
    level = t[:, None, None]
    x = (1 - level) * clean + level * noise
    return (x - level * flow(x, txt, t, image_ids(gh, gw), text_ids(txt.shape[1]))).reshape(latents.shape)


def written_times(key: mx.array, b: int) -> mx.array:
    """Noise levels, (b,): two thirds near 0.7, where the last of four steps begins, the rest anywhere below 0.85."""
    u = mx.random.uniform(shape=(b,), key=key)
    return mx.where(mx.arange(b) < b * 2 // 3, 0.66 + 0.1 * u, 0.85 * u)


def decoder_batches(
    autoencoder: Autoencoder, flow: Transformer, text_encoder: TextEncoder, tokenizer: Tokenizer, tokens: int,
    batch: int, size: int,
) -> Callable[[int], tuple[mx.array, mx.array]]:  # fmt: skip
    """A function of the step: drawn pictures (batch, size, size, 3) and latents of them, most of them written."""
    write = mx.compile(lambda ids, mask, z, t, key: written(flow, text_encoder(ids, mask), z, t, key))

    def draw_batch(step: int) -> tuple[mx.array, mx.array]:
        rng, (k_clean, k_time, k_noise) = random.Random(step), mx.random.split(mx.random.key(step), 3)
        scenes, clean = decoder_scenes(rng, FIRST + 64 * step, batch), CLEAN * batch // 8
        x = draw_scenes(scenes, size)
        z = autoencoder.encode(x)
        ids, mask = tokenize(tokenizer, [rng.choice(captions(scene)) for scene in scenes[clean:]], tokens)
        t = written_times(k_time, batch - clean)
        kept = z[:clean] + 0.02 * mx.random.normal(z[:clean].shape, key=k_clean)
        return x, mx.stop_gradient(mx.concatenate([kept, write(ids, mask, z[clean:], t, k_noise)]))

    return draw_batch


def decoder_loss(model: Autoencoder, pixels: mx.array, latents: mx.array) -> mx.array:
    """Absolute error, whose best guess at an uncertain edge is one side of it, and squared error, which PSNR counts.

    A picture counts by what there is to be seen: in white on pink, an error of a level takes more of the outline.
    """
    error = model.decode(latents) - pixels
    pictures = (mx.abs(error) + 2 * error * error).mean(axis=(1, 2, 3))
    return (weights(pixels) * pictures).mean()


def weights(pixels: mx.array) -> mx.array:
    """What each picture counts, (b,): 1 where its colours differ as usual, up to 3 where they hardly do."""
    contrast = mx.sqrt(pixels.var(axis=(1, 2)).mean(axis=-1))
    return mx.clip(USUAL / contrast, 0.8, 3.0)


def decoder_optimizer(steps: int) -> optim.Optimizer:
    """Muon for the convolutions from many channels to many, Adam for the rest."""
    adam = optim.AdamW(learning_rate(1e-3, steps), betas=[0.9, 0.99], weight_decay=0.0, bias_correction=True)
    muon = optim.Muon(learning_rate(5e-3, steps), momentum=0.95, weight_decay=0.0)
    return optim.MultiOptimizer([muon, adam], [lambda _, w: w.ndim == 4 and min(w.shape[0], w.shape[-1]) > 8])


def sight(autoencoder: Autoencoder, pixels: mx.array, key: mx.array) -> mx.array:
    """R, (128, 128): of errors of latents, `errors @ R` squared is what the decoder shows, on average over tokens.

    R R = (1 - UNSEEN) J^T J + UNSEEN I, with J the derivative of the pixels by a token, and J^T J scaled to the trace
    of I. Random signs on the pixels, pulled back to the latents, have J^T J as their second moment (Hutchinson 1990).
    """
    seen = mx.zeros((128, 128))
    for x, k in zip(mx.split(pixels, len(pixels)), mx.random.split(key, len(pixels))):
        signs = 1 - 2.0 * mx.random.bernoulli(shape=x.shape, key=k)
        pulled = mx.vjp(autoencoder.decode, [autoencoder.encode(x)], [signs])[1][0].reshape(-1, 128)
        seen = seen + pulled.T @ pulled
        mx.eval(seen)  # one picture's activations at a time
    both = (1 - UNSEEN) * 128 / mx.trace(seen) * seen + UNSEEN * mx.eye(128)
    values, vectors = mx.linalg.eigh(both, stream=mx.cpu)
    return (vectors * mx.sqrt(values)) @ vectors.T
