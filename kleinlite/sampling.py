"""Sampling.

Follow an average from noise, and you end at a sharp picture. Why does that work?

Letters: b pictures, n picture tokens, c channels, t noise level from 1 (noise) to 0 (picture), mu and shift of the
schedule.

Sources: rectified flow: Liu et al. 2022, arXiv 2209.03003. Flow matching: Lipman et al. 2022, arXiv 2210.02747.
Classifier-free guidance: Ho and Salimans 2022, arXiv 2207.12598. The constants of `empirical_mu`:
compute_empirical_mu in the FLUX.2 authors' and diffusers' code.

Promoted from notebooks/04_sampling.ipynb: edit there, then run `make promote`. (seal bae8d565)
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import mlx.core as mx

__all__ = [
    "empirical_mu", "T", "shift_time", "noised", "schedule", "EulerStep", "Field", "euler", "noise",
    "classifier_free_guidance",
]  # fmt: skip


def empirical_mu(n: int, steps: int) -> float:
    """How far to shift the schedule for n image tokens and this many steps; fitted by the model's makers."""
    long_run = 0.00016927 * n + 0.45666666
    if n > 4300:
        return long_run
    short_run = 8.73809524e-05 * n + 1.89833333
    slope = (long_run - short_run) / 190  # straight line in `steps` through (10, short_run) and (200, long_run)
    return slope * steps + long_run - 200 * slope


T = TypeVar("T", float, mx.array)  # a noise level, or an array of them


def shift_time(t: T, shift: float) -> T:
    """Noise level t moved towards the noise: s·t / (1 + (s - 1)·t); 0 stays 0 and 1 stays 1."""
    return shift * t / (1 - t + shift * t)


def noised(clean: mx.array, eps: mx.array, t: float | mx.array) -> mx.array:
    """Clean latents at noise level t, a number or (b,): (1 - t)·clean + t·eps. (b, …) → same

    Rectified flow, Liu et al. 2022, arXiv 2209.03003; flow matching, Lipman et al. 2022, arXiv 2210.02747.
    """
    t = mx.array(t, dtype=mx.float32).reshape(-1, *[1] * (clean.ndim - 1))  # (b, 1, …, 1)
    return ((1 - t) * clean + t * eps).astype(clean.dtype)


def schedule(steps: int, n: int) -> list[float]:
    """steps + 1 noise levels, from 1 (pure noise) down to 0 (the picture), for a picture of n tokens."""
    shift = math.exp(empirical_mu(n, steps))
    ts = [1 - i / steps for i in range(steps)]
    return [shift_time(t, shift) for t in ts] + [0.0]


class EulerStep(NamedTuple):
    """One step of the loop: at noise level t the velocity was `velocity`, which led to `latents` at t_next."""

    index: int  # type: ignore[assignment]  # a step's number, instead of tuple.index
    t: float
    t_next: float
    velocity: mx.array
    latents: mx.array


# x (b, n, c), noise level t, and the level that the step leads to → velocity (b, n, c). Most models ignore the last.
Field = Callable[[mx.array, float, float], mx.array]


def euler(velocity: Field, x: mx.array, sigmas: list[float]) -> Iterator[EulerStep]:
    """Follow dx/dt = velocity(x, t, t_next) from sigmas[0] to sigmas[-1] in straight pieces, yielding every step."""
    for i, (t, t_next) in enumerate(zip(sigmas, sigmas[1:])):
        v = velocity(x, t, t_next)
        x = (x.astype(mx.float32) + (t_next - t) * v.astype(mx.float32)).astype(x.dtype)
        mx.eval(x, v)  # MLX is lazy: do this step's work now, so that a caller can stop, look or draw
        yield EulerStep(i, t, t_next, v, x)


def noise(seed: int, n: int, channels: int = 128) -> mx.array:
    """Standard normal latents (1, n, channels) to start from, drawn on the CPU: the same for a seed on every device."""
    with mx.stream(mx.cpu):
        x = mx.random.normal((1, n, channels), key=mx.random.key(seed))
        mx.eval(x)
    return x


def classifier_free_guidance(cond: mx.array, uncond: mx.array, guidance: float | mx.array) -> mx.array:
    """Classifier-free guidance: from the answer without the prompt, `guidance` times as far as the prompt moves it.

    Ho and Salimans 2022, arXiv 2207.12598.
    """
    return uncond + guidance * (cond - uncond)
