"""Fewer steps.

klein draws a picture in four steps. What would it have to learn to draw one in a single step?

Letters: b pictures, n picture tokens of 128 channels, m text tokens, f features of a text token, t noise level from
0 (picture) to 1 (noise), s noise level at the end of a step.

Sources: distillation with guidance: Meng et al. 2022, arXiv 2210.03142, after Salimans and Ho 2022, arXiv
2202.00512; guidance: Ho and Salimans 2022, arXiv 2207.12598; mean velocities: Frans et al. 2024, arXiv 2410.12557;
Geng et al. 2025, arXiv 2505.13447; distribution matching: Yin et al. 2023, arXiv 2311.18828, and 2024, arXiv
2405.14867. How the released klein models were distilled has not been published in detail.

Promoted from notebooks/12_fewer_steps.ipynb: edit there, then run `make promote`. (seal 67b8338b)
"""

from itertools import pairwise

import mlx.core as mx

from .sampling import classifier_free_guidance, noised, schedule
from .training import Batch, join_references
from .transformer import Transformer

__all__ = ["guided_velocity", "guided_mean_velocity", "STUDENT_STEPS", "distill_loss", "own_path"]


def guided_velocity(
    teacher: Transformer, x: mx.array, batch: Batch, empty: mx.array, t: float | mx.array, guidance: float | mx.array
) -> mx.array:
    """The teacher's guided velocity at x (b, n, 128) and noise level t, from two evaluations: (b, n, 128).

    batch: prompts, references and positions of the pictures. empty: features of the empty prompt, (1, m, f).
    guidance: one for all, or (b, 1, 1). Ho and Salimans 2022.
    """
    n = x.shape[1]
    img = join_references(x, batch.references)
    cond = teacher(img, batch.txt, t, rope=batch.rope)[:, :n]
    uncond = teacher(img, mx.repeat(empty, len(x), axis=0), t, rope=batch.rope)[:, :n]
    return classifier_free_guidance(cond, uncond, guidance)


def guided_mean_velocity(
    teacher: Transformer, x: mx.array, batch: Batch, empty: mx.array, t: float, s: float, guidance: float | mx.array
) -> mx.array:
    """The one velocity that leads from x (b, n, 128) at t to where two smaller, guided steps of the teacher end, at s.

    batch: prompts, references and positions of the pictures. empty: features of the empty prompt, (1, m, f).
    guidance: one for all, or (b, 1, 1). Meng et al. 2022, Salimans and Ho 2022.
    """
    start = x
    middle = (t + s) / 2
    for now, then in ((t, middle), (middle, s)):
        x = x + (then - now) * guided_velocity(teacher, x, batch, empty, now, guidance)
    return mx.stop_gradient((x - start) / (s - t))


STUDENT_STEPS = 4


def distill_loss(
    student: Transformer,
    teacher: Transformer,
    batch: Batch,
    empty: mx.array,
    guidance: mx.array,
    segment: int,
    key: mx.array,
) -> mx.array:
    """Step number `segment` of four, from a noised picture: the student's velocity against the teacher's guided mean.

    empty: features of the empty prompt, (1, m, f). guidance: of each picture's teacher, (b,); 1 is none. key: of the
    noise. (`mx.compile` makes a graph for each `segment`.)
    """
    n = batch.clean.shape[1]
    t, s = schedule(STUDENT_STEPS, n)[segment : segment + 2]
    x = noised(batch.clean, mx.random.normal(batch.clean.shape, key=key), t)
    target = guided_mean_velocity(teacher, x, batch, empty, t, s, guidance[:, None, None])
    velocity = student(join_references(x, batch.references), batch.txt, t, rope=batch.rope)[:, :n]
    return ((velocity - target) ** 2).mean()


def own_path(student: Transformer, x: mx.array, batch: Batch) -> list[mx.array]:
    """The path of a student's four steps: noise x (b, n, 128), then the latents after each step.

    batch: prompts, references and positions of the pictures.
    """
    path = [x]
    for t, s in pairwise(schedule(STUDENT_STEPS, x.shape[1])):
        img = join_references(path[-1], batch.references)
        velocity = student(img, batch.txt, t, rope=batch.rope)[:, : x.shape[1]]
        path.append(path[-1] + (s - t) * velocity)
    return path
