"""Learning the velocity.

We train networks to know the way from noise to pictures: in the plane, in a minute's live training, and in the
recipe that made klein-nano.

Promoted from notebooks/11_training.ipynb: edit there, then run `make promote`. (seal 82c95b4f)
"""

import math
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from .autoencoder import Autoencoder
from .position_ids import image_ids, reference_ids, text_ids
from .text_encoder import TextEncoder, next_token_logits
from .transformer import Transformer

__all__ = [
    "shifted_times",
    "flow_ids",
    "flow_loss",
    "initialize",
    "learning_rate",
    "flow_optimizer",
    "training_step",
    "autoencoder_loss",
    "text_encoder_loss",
]


def shifted_times(key: mx.array, b: int, shift: float = 6.0) -> mx.array:
    """Noise levels to train at, (b,): uniform, then pushed towards 1, where few-step sampling spends its steps."""
    u = mx.random.uniform(shape=(b,), key=key)
    return shift * u / (1 + (shift - 1) * u)


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


def initialize(model: nn.Module, key: mx.array, damp: tuple[str, ...] = (), damping: float = 0.1) -> None:
    """Weights normal with variance 1/inputs, biases zero; matrices whose name ends in one of `damp` start smaller.

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


def flow_optimizer(steps: int, rate: float = 1.0) -> optim.Optimizer:
    """Muon for the blocks' matrices, Adam for everything at the edges, both with a warm-up of at most 100 steps."""
    warmup = min(100, max(1, steps // 10))
    muon = optim.Muon(learning_rate(rate * 0.02, steps, warmup), momentum=0.95, weight_decay=0.0)
    adam = optim.AdamW(
        learning_rate(rate * 2e-3, steps, warmup), betas=[0.9, 0.99], weight_decay=0.0, bias_correction=True
    )
    return optim.MultiOptimizer([muon, adam], [lambda name, w: "blocks" in name and w.ndim == 2])


def training_step(
    model: nn.Module, optimizer: optim.Optimizer, loss: Callable[..., mx.array]
) -> Callable[..., mx.array]:
    """A compiled step: `update(*batch)` moves the model's weights once and returns `loss(model, *batch)` before it.

    Under `mlx.launch` each process brings its own batch, and the gradients are averaged.
    """
    optimizer.init(model.trainable_parameters())
    value_and_grad = nn.value_and_grad(model, lambda *batch: loss(model, *batch))
    state = [model.state, optimizer.state]

    def update(*batch: mx.array) -> mx.array:
        value, grads = nn.average_gradients(value_and_grad(*batch))
        grads, _ = optim.clip_grad_norm(grads, 1.0)
        optimizer.update(model, grads)
        return value

    return mx.compile(update, inputs=state, outputs=state)


def autoencoder_loss(model: Autoencoder, pixels: mx.array, key: mx.array, kl_weight: float = 2e-4) -> mx.array:
    """Picture through a noisy latent and back: absolute and squared error, and a light pull towards unit normal."""
    mean, logvar = mx.split(model.encoder(pixels), 2, axis=-1)
    logvar = mx.clip(logvar, -20, 10)
    z = mean + mx.exp(0.5 * logvar) * mx.random.normal(mean.shape, key=key)
    error = model.decoder(z) - pixels
    kl = 0.5 * (mean * mean + mx.exp(logvar) - 1 - logvar)
    return mx.abs(error).mean() + 4 * (error * error).mean() + kl_weight * kl.mean()


def text_encoder_loss(model: TextEncoder, ids: mx.array, mask: mx.array) -> mx.array:
    """Cross-entropy of the next token, over real tokens: how language models learn."""
    loss = nn.losses.cross_entropy(next_token_logits(model, ids, mask)[:, :-1], ids[:, 1:])
    real = mask[:, 1:].astype(mx.float32)
    return (loss * real).sum() / real.sum()
