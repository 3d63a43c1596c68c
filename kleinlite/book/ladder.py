"""What 3 chapters build together.

Promoted from notebooks/00,01,02: edit there, then run `make promote`. (seal a3746b71)
"""

import math
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from tqdm.auto import tqdm

from ..position_ids import apply_rope, rope_table

__all__ = [
    "to_patches", "to_pictures", "noised", "Block", "PlainKlein", "flow_loss", "train", "walk", "even_times", "loss_on",
    "PatchAutoencoder", "patch_loss", "train_autoencoder", "RopeBlock",
]  # fmt: skip


def to_patches(pictures: mx.array, patch: int = 4) -> mx.array:
    """Pictures (b, H, W, 3) cut into squares of patch × patch pixels, row by row: (b, n, 3·patch²)."""
    b, H, W, _ = pictures.shape
    cut = pictures.reshape(b, H // patch, patch, W // patch, patch, 3).transpose(0, 1, 3, 2, 4, 5)
    return cut.reshape(b, -1, 3 * patch * patch)


def to_pictures(patches: mx.array, patch: int = 4, columns: int = 6) -> mx.array:
    """Undoes `to_patches` for pictures that are `columns` patches wide."""
    cut = patches.reshape(len(patches), -1, columns, patch, patch, 3).transpose(0, 1, 3, 2, 4, 5)
    return cut.reshape(len(patches), -1, columns * patch, 3)


def noised(x0: mx.array, eps: mx.array, t: mx.array) -> mx.array:
    """Data x0 (b, n, c) mixed with noise: (1 - t)·x0 + t·eps, with a time (b,) for each picture."""
    t = t[:, None, None]
    return (1 - t) * x0 + t * eps


class Block(nn.Module):
    """A plain transformer block: attention among all tokens, then a small network for each. (b, s, d) → (b, s, d)"""

    def __init__(self, d: int = 96, heads: int = 3):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(d)
        self.norm2 = nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, d)
        self.up = nn.Linear(d, 4 * d)
        self.down = nn.Linear(4 * d, d)

    def attend(self, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        """Each query takes from the values whose keys fit it. (b, heads, s, d / heads) each"""
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5)

    def __call__(self, x: mx.array) -> mx.array:
        b, s, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(b, s, 3, self.heads, -1).transpose(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v).transpose(0, 2, 1, 3).reshape(b, s, d))
        return x + self.down(nn.gelu_approx(self.up(self.norm2(x))))


class PlainKlein(nn.Module):
    """Noisy patches x (b, n, c), words and times t (b,) in, velocities (b, n, c) out.

    Each of n = `places` patches has a learned vector; with 0 none has one, and n is free.
    """

    def __init__(self, c: int, words: nn.Module, blocks: list[Block], d: int = 96, places: int = 36):
        super().__init__()
        self.words = words
        self.time = nn.Linear(32, d)
        self.into = nn.Linear(c, d)
        self.places = mx.zeros((places, d)) if places else 0.0
        self.blocks = blocks
        self.norm = nn.LayerNorm(d)
        self.out = nn.Linear(d, c)

    def __call__(self, x: mx.array, words: mx.array, t: mx.array) -> mx.array:
        waves = t[:, None] * mx.exp(mx.linspace(0, math.log(100), 16))
        time = self.time(mx.concatenate([mx.cos(waves), mx.sin(waves)], axis=1))  # (b, d)
        words = self.words(words).reshape(len(x), -1, time.shape[1])  # (b, 1, d) for a label
        rows = mx.concatenate([words, self.into(x) + self.places + time[:, None]], axis=1)  # (b, 1 + n, d)
        for block in self.blocks:
            rows = block(rows)
        return self.out(self.norm(rows[:, words.shape[1] :]))


def flow_loss(net: nn.Module, x0: mx.array, words: mx.array, t: mx.array, eps: mx.array) -> mx.array:
    """Mean squared error of the guess of eps - x0 (flow matching, Lipman et al. 2022, arXiv 2210.02747)."""
    return ((net(noised(x0, eps, t), words, t) - (eps - x0)) ** 2).mean()


def train(net: nn.Module, x0: mx.array, words: mx.array, steps: int = 500, seed: int = 0) -> list[float]:
    """Learn to guess the velocity from data x0 (N, n, c) and their words. Returns the loss of every step."""
    warm = optim.linear_schedule(0, 2e-3, 50)
    adam = optim.AdamW(optim.join_schedules([warm, optim.cosine_decay(2e-3, steps - 50)], [50]))
    loss_and_gradient = nn.value_and_grad(net, lambda *batch: flow_loss(net, *batch))
    losses = []
    every = max(1, steps // 20)
    bar = tqdm(mx.random.split(mx.random.key(seed), steps), desc="training", mininterval=0, miniters=every)
    for key in bar:
        k_rows, k_noise, k_time = mx.random.split(key, 3)
        rows = mx.random.randint(0, len(x0), (32,), key=k_rows)
        eps = mx.random.normal((32, *x0.shape[1:]), key=k_noise)
        t = mx.random.uniform(shape=(32,), key=k_time)
        loss, gradient = loss_and_gradient(x0[rows], words[rows], t, eps)
        adam.update(net, gradient)
        mx.eval(loss, net.state, adam.state)
        losses.append(float(loss))
        bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    return losses


def walk(net: nn.Module, words: mx.array, shape: tuple[int, ...], times: Sequence[float], seed: int = 1) -> mx.array:
    """From noise of this shape (b, n, c) against the velocity, through these times from 1 down to 0."""
    x = mx.random.normal(shape, key=mx.random.key(seed))
    for t, t_next in zip(times, times[1:]):
        x = x + (t_next - t) * net(x, words, mx.full((len(x),), t))
        mx.eval(x)
    return x


def even_times(steps: int) -> list[float]:
    """So many equal steps from 1 to 0."""
    return [1 - i / steps for i in range(steps + 1)]


def loss_on(net: nn.Module, x0: mx.array, words: mx.array) -> float:
    """The flow loss on all these examples, each at four times spread evenly over (0, 1), with fixed noise."""
    losses = []
    for k in range(4):
        t = (mx.arange(len(x0)) / len(x0) + k / 4) % 1
        eps = mx.random.normal(x0.shape, key=mx.random.key(k))
        losses.append(float(flow_loss(net, x0, words, t, eps)))
    return sum(losses) / 4


class PatchAutoencoder(nn.Module):
    """Each 8 × 8 patch by itself: 192 numbers to c latents and back."""

    def __init__(self, c: int = 8, width: int = 256):
        super().__init__()
        self.into = nn.Linear(192, width)
        self.moments_of = nn.Linear(width, 2 * c)
        self.back = nn.Linear(c, width)
        self.out = nn.Linear(width, 192)
        self._mean = mx.zeros((c,))  # of the training latents, by channel; the underscore keeps them out of the weights
        self._std = mx.ones((c,))

    def moments(self, patches: mx.array) -> tuple[mx.array, mx.array]:
        """Patches (…, 192) to mean and log-variance of their latents, (…, c) each."""
        mean, log_variance = mx.split(self.moments_of(nn.silu(self.into(patches))), 2, axis=-1)
        return mean, mx.clip(log_variance, -10, 5)

    def patches(self, latents: mx.array) -> mx.array:
        """Raw latents (…, c) to patches (…, 192)."""
        return self.out(nn.silu(self.back(latents)))

    def encode(self, pictures: mx.array) -> mx.array:
        """Pictures (b, H, W, 3) to latents (b, n, c), each channel with mean 0 and variance 1 over the training set."""
        return (self.moments(to_patches(pictures, 8))[0] - self._mean) / self._std

    def decode(self, latents: mx.array, columns: int = 6) -> mx.array:
        """Latents (b, n, c) of pictures that are `columns` patches wide, to pixels."""
        return to_pictures(self.patches(latents * self._std + self._mean), 8, columns)


def patch_loss(net: PatchAutoencoder, patches: mx.array, eps: mx.array, pull: float) -> mx.array:
    """Squared error of patches (b, 192), and `pull` times the KL divergence of their latents from a normal."""
    mean, log_variance = net.moments(patches)
    latents = mean + mx.exp(log_variance / 2) * eps * (pull > 0)
    distance = (mean**2 + mx.exp(log_variance) - 1 - log_variance).mean() / 2
    return ((net.patches(latents) - patches) ** 2).mean() + pull * distance


def train_autoencoder(pictures: mx.array, pull: float = 1e-4, steps: int = 2000, seed: int = 0) -> PatchAutoencoder:
    """Learn from patches of pictures (N, H, W, 3) that are not plain paper, then measure the latents of all."""
    mx.random.seed(seed)
    net = PatchAutoencoder()
    every = to_patches(pictures, 8).reshape(-1, 192)
    contrast = every.max(axis=1) - every.min(axis=1)
    drawn = mx.argsort(contrast)[-int((contrast > 0.05).sum()) :]
    adam = optim.Adam(optim.cosine_decay(3e-3, steps))
    loss_and_gradient = nn.value_and_grad(net, lambda patches, eps: patch_loss(net, patches, eps, pull))
    keys = mx.random.split(mx.random.key(seed), steps)
    for key in tqdm(keys, desc="autoencoder", mininterval=0, miniters=max(1, steps // 20)):
        k_rows, k_noise = mx.random.split(key)
        rows = drawn[mx.random.randint(0, drawn.size, (256,), key=k_rows)]
        eps = mx.random.normal((256, net._mean.size), key=k_noise)
        _, gradient = loss_and_gradient(every[rows], eps)
        adam.update(net, gradient)
        mx.eval(net.state, adam.state)
    mean = net.moments(every)[0]
    net._mean = mean.mean(axis=0)
    net._std = mx.sqrt(mean.var(axis=0))
    return net


class RopeBlock(Block):
    """Chapter 0's block, its queries and keys turned by their position ids (s, 4)."""

    def __init__(self, ids: mx.array):
        super().__init__()
        self._rope = rope_table(ids, (0, 12, 12, 8))  # the underscore keeps it out of the weights

    def attend(self, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return super().attend(apply_rope(q, self._rope), apply_rope(k, self._rope), v)
