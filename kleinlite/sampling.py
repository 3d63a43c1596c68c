"""Sampling.

We turn noise into data by following a velocity field in a few straight steps, and find out why klein spaces its
steps so unevenly.

Promoted from notebooks/04_sampling.ipynb: edit there, then run `make promote`. (seal 4c1eb149)
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import mlx.core as mx

__all__ = ["empirical_mu", "schedule", "EulerStep", "euler", "guide", "noise"]


def empirical_mu(n: int, steps: int) -> float:
    """How far to shift the schedule for n image tokens and this many steps; fitted by the model's makers."""
    long_run = 0.00016927 * n + 0.45666666
    if n > 4300:
        return long_run
    short_run = 8.73809524e-05 * n + 1.89833333
    slope = (long_run - short_run) / 190  # straight line in `steps` through (10, short_run) and (200, long_run)
    return slope * steps + long_run - 200 * slope


def schedule(steps: int, n: int) -> list[float]:
    """steps + 1 noise levels, from 1 (pure noise) down to 0 (the picture), for a picture of n tokens."""
    shift = math.exp(empirical_mu(n, steps))
    ts = [1 - i / steps for i in range(steps)]
    return [shift / (shift + (1 / t - 1)) for t in ts] + [0.0]


class EulerStep(NamedTuple):
    """One step of the loop: at noise level t the velocity was `velocity`, which led to `latents` at t_next."""

    index: int
    t: float
    t_next: float
    velocity: mx.array
    latents: mx.array


def euler(velocity: Callable[[mx.array, float], mx.array], x: mx.array, sigmas: list[float]) -> Iterator[EulerStep]:
    """Follow dx/dt = velocity(x, t) from sigmas[0] to sigmas[-1] in straight pieces, yielding every step."""
    for i, (t, t_next) in enumerate(zip(sigmas, sigmas[1:])):
        v = velocity(x, t)
        x = (x.astype(mx.float32) + (t_next - t) * v.astype(mx.float32)).astype(x.dtype)
        mx.eval(x, v)  # MLX is lazy: do this step's work now, so that a caller can stop, look or draw
        yield EulerStep(i, t, t_next, v, x)


def guide(cond: mx.array, uncond: mx.array, guidance: float) -> mx.array:
    """Classifier-free guidance: from the answer without the prompt, `guidance` times as far as the prompt moves it."""
    return uncond + guidance * (cond - uncond)


def noise(seed: int, n: int, channels: int = 128) -> mx.array:
    """Standard normal latents (1, n, channels) to start from, drawn on the CPU: the same for a seed on every device."""
    with mx.stream(mx.cpu):
        x = mx.random.normal((1, n, channels), key=mx.random.key(seed))
        mx.eval(x)
    return x
