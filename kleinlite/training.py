"""Learning the velocity.

We show a network a noisy picture and ask which way the noise lies. It can't know. What does it learn instead, and
when is the picture decided?

Letters: b pictures, n picture tokens of 128 channels, r reference tokens, m text tokens, f features of a text
token, t noise level from 0 (picture) to 1 (noise), eps noise.

Sources: rectified flow: Liu et al. 2022, arXiv 2209.03003; flow matching: Lipman et al. 2022, arXiv 2210.02747;
shifted times: Esser et al. 2024, arXiv 2403.03206; densities of times as weights: Kingma and Gao 2023, arXiv
2303.00848; Muon: Jordan et al. 2024, kellerjordan.github.io/posts/muon; Adam: Kingma and Ba 2014, arXiv 1412.6980.

Promoted from notebooks/11_training.ipynb: edit there, then run `make promote`. (seal 2565dfc7)
"""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from .position_ids import Rope, image_ids, reference_ids, text_ids
from .sampling import noised, shift_time
from .text_encoder import TextEncoder
from .transformer import Transformer

__all__ = [
    "shifted_times", "flow_ids", "Batch", "encode_batch", "join_references", "velocity_loss", "flow_loss", "initialize",
    "learning_rate", "make_optimizer", "flow_optimizer", "training_step",
]  # fmt: skip


def shifted_times(key: mx.array, b: int, shift: float = 6.0) -> mx.array:
    """Noise levels to train at, (b,): uniform, then pushed towards 1, where few-step sampling spends its steps."""
    return shift_time(mx.random.uniform(shape=(b,), key=key), shift)


def flow_ids(grid: tuple[int, int], references: mx.array) -> mx.array:
    """Coordinates (n + r, 4) of the picture's tokens and of references (b, r, 128), each as large as the picture."""
    count = references.shape[1] // (grid[0] * grid[1])
    ids = image_ids(*grid)
    return mx.concatenate([ids, reference_ids([grid] * count)]) if count else ids


class Batch(NamedTuple):
    """What a flow learns from: pictures, what they are drawn from, and where every token stands."""

    clean: mx.array  # latents (b, n, 128)
    txt: mx.array  # features of the prompts, (b, m, f)
    rope: Rope  # from `Transformer.rope`: of text, picture and references
    references: mx.array | None = None  # latents (b, r, 128)


def encode_batch(
    transformer: Transformer,
    text_encoder: TextEncoder,
    grid: tuple[int, int],
    clean: mx.array,
    references: mx.array,
    ids: mx.array,
    mask: mx.array,
) -> Batch:
    """Latents clean (b, n, 128) and references (b, r, 128), tokens ids and mask (b, m) → a batch.

    The text encoder does not learn: no gradient goes through its features.
    """
    txt = mx.stop_gradient(text_encoder(ids, mask))
    rope = transformer.rope(flow_ids(grid, references), text_ids(ids.shape[1]))
    return Batch(clean, txt, rope, references)


def join_references(x: mx.array, references: mx.array | None) -> mx.array:
    """Latents followed by the references: (b, n, 128) and (b, r, 128) → (b, n + r, 128)"""
    return x if references is None else mx.concatenate([x, references], axis=1)


def velocity_loss(
    transformer: Transformer,
    clean: mx.array,
    txt: mx.array,
    t: mx.array,
    eps: mx.array,
    rope: Rope,
    references: mx.array | None = None,
) -> mx.array:
    """Mean squared error of the velocity at x = (1 − t)·clean + t·eps, where eps − clean is right.

    clean, eps (b, n, 128), txt (b, m, f), t (b,), references (b, r, 128): they stay clean and are not judged.
    Rectified flow, Liu et al. 2022.
    """
    x = noised(clean, eps, t).astype(clean.dtype)
    velocity = transformer(join_references(x, references), txt, t, rope=rope)[:, : clean.shape[1]]
    return ((velocity - (eps - clean)).astype(mx.float32) ** 2).mean()


def flow_loss(transformer: Transformer, batch: Batch, key: mx.array, shift: float = 6.0) -> mx.array:
    """`velocity_loss` at random noise levels and with random noise, both drawn from `key`."""
    k_noise, k_time = mx.random.split(key)
    t = shifted_times(k_time, len(batch.clean), shift)
    eps = mx.random.normal(batch.clean.shape, key=k_noise)
    return velocity_loss(transformer, batch.clean, batch.txt, t, eps, batch.rope, batch.references)


def initialize(model: nn.Module, key: mx.array, damp: tuple[str, ...] = (), damping: float = 0.1) -> None:
    """Weights normal with variance 1/inputs, biases zero; matrices whose name ends in one of `damp` start smaller.

    Damped last matrices of residual branches let a fresh network begin close to the identity.
    """
    damped = tuple(f"{name}.weight" for name in damp)
    parameters: dict[str, mx.array] = dict(tree_flatten(model.trainable_parameters()))
    weights = []
    for name, w in parameters.items():
        if w.ndim >= 2:
            key, subkey = mx.random.split(key)
            scale = damping if name.endswith(damped) else 1.0
            inputs = math.prod(w.shape[1:])
            weights.append((name, scale * inputs**-0.5 * mx.random.normal(w.shape, key=subkey)))
        elif name.endswith("bias"):
            weights.append((name, mx.zeros_like(w)))
    model.update(tree_unflatten(weights))


def learning_rate(peak: float, steps: int, warmup: int = 100) -> Callable[[mx.array], mx.array]:
    """A linear rise over `warmup` steps, then half a cosine down to a hundredth of the peak at `steps`."""
    rise = optim.linear_schedule(peak / 100, peak, warmup)
    fall = optim.cosine_decay(peak, max(steps - warmup, 1), peak / 100)
    return optim.join_schedules([rise, fall], [warmup])


def make_optimizer(rate: float | Callable[[mx.array], mx.array]) -> optim.Optimizer:
    """Adam, each of whose steps is about as long as `rate` says, the first one too. Kingma and Ba 2014, algorithm 1

    Its two averages begin at 0 and are corrected for it, which MLX does only if it is told to.
    """
    return optim.Adam(rate, betas=[0.9, 0.99], bias_correction=True)


def flow_optimizer(steps: int, rate: float = 1.0) -> optim.Optimizer:
    """Muon for the blocks' matrices, Adam for everything at the edges, both with a warm-up of at most 100 steps."""
    warmup = min(100, max(1, steps // 10))
    muon = optim.Muon(learning_rate(rate * 0.02, steps, warmup), momentum=0.95, weight_decay=0.0)
    adam = make_optimizer(learning_rate(rate * 2e-3, steps, warmup))

    def in_a_block(name: str, w: mx.array) -> bool:
        # Z-Image (chapter 17) calls its blocks layers and refiners, and has steering inside
        return w.ndim == 2 and bool(re.search("(blocks|layers|refiner)(?!.*adaLN)", name))

    return optim.MultiOptimizer([muon, adam], [in_a_block])


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
