"""Learning from a judge.

nano draws a lone house, tree or boat twice, or not at all, in one picture of ten. A program can tell. Can nano
learn from the verdict alone, and what does it cost?

Letters: b pictures, n picture tokens, m text tokens, t noise level, r optimality of a picture.

Sources: DiffusionNFT: Zheng et al. 2025, arXiv 2509.16117. Advantages over a group: Shao et al. 2024 (GRPO), arXiv
2402.03300. Policy gradients through the steps: Liu et al. 2025 (Flow-GRPO), arXiv 2505.05470.

Promoted from notebooks/15_judge.ipynb: edit there, then run `make promote`. (seal f177aa8f)
"""

import mlx.core as mx

from .position_ids import Rope
from .transformer import Transformer

__all__ = ["optimality", "mirrored", "clean_error", "nft_loss"]


def optimality(rewards: mx.array) -> mx.array:
    """How much better each picture is than its caption's others, from 0 to 1. rewards (captions, pictures of each).

    0.5 + 0.5·clip(advantage, −1, 1), the advantage over the group's mean. Zheng et al. 2025, arXiv 2509.16117.
    """
    advantage = (rewards - rewards.mean(axis=1, keepdims=True)) / mx.maximum(mx.std(rewards), 1e-6)
    return 0.5 + 0.5 * mx.clip(advantage, -1, 1)


def mirrored(velocity: mx.array, old: mx.array) -> mx.array:
    """The change from the old velocity to this one, taken the other way. (b, n, 128) → same"""
    return 2 * old - velocity


def clean_error(velocity: mx.array, x: mx.array, t: mx.array, clean: mx.array) -> mx.array:
    """How far the clean picture that a velocity expects is from the real one, of each row: (b,)

    velocity, x, clean (b, n, 128), t (b,). Divided by the mean distance, so that no noise level outweighs the others.
    """
    distance = x - t[:, None, None] * velocity - clean
    scale = mx.stop_gradient(mx.abs(distance).mean(axis=(1, 2)))
    return (distance**2).mean(axis=(1, 2)) / mx.maximum(scale, 1e-5)


def nft_loss(
    transformer: Transformer, x: mx.array, txt: mx.array, t: mx.array, clean: mx.array, r: mx.array, old: mx.array,
    rope: Rope,
) -> mx.array:  # fmt: skip
    """DiffusionNFT with β = 1: good pictures should fit the velocity, bad ones its mirror image at the old velocity.

    clean (b, n, 128): own pictures, x: the same noised to t (b,). r (b,): see `optimality`. old: velocities at x of the
    network that drew them. Zheng et al. 2025, arXiv 2509.16117.
    """
    velocity = transformer(x, txt, t, rope=rope)
    better = clean_error(velocity, x, t, clean)
    worse = clean_error(mirrored(velocity, old), x, t, clean)
    return (r * better + (1 - r) * worse).mean()
