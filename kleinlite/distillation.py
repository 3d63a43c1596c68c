"""Fewer steps.

A student learns to do in four looks what its teacher needs many for, then in one; and then something that no
teacher knew.

Letters: b pictures, n picture tokens of 128 channels, m text tokens, f features of a text token, t noise level from
0 (picture) to 1 (noise).

Sources: guidance learned by a student, and then half of its steps, again and again: Meng et al. 2022, arXiv
2210.03142, after Salimans and Ho 2022, arXiv 2202.00512. Guidance: Ho and Salimans 2022, arXiv 2207.12598. Mean
velocities: Frans et al. 2024, arXiv 2410.12557; Geng et al. 2025, arXiv 2505.13447.

Promoted from notebooks/12_fewer_steps.ipynb: edit there, then run `make promote`. (seal fb695295)
"""

from itertools import pairwise

import mlx.core as mx

from .sampling import classifier_free_guidance, noised, schedule
from .training import Batch, join_references
from .transformer import Transformer

__all__ = ["guided_velocity", "guided_mean_velocity", "STUDENT_STEPS", "distill_loss", "own_path", "redraw_loss"]


def guided_velocity(
    teacher: Transformer, x: mx.array, batch: Batch, empty: mx.array, t: float | mx.array, guidance: float | mx.array
) -> mx.array:
    """What the teacher answers at x (b, n, 128) and noise level t, with the prompt and without it: (b, n, 128).

    batch: prompts, references and positions of the pictures. empty: features of the empty prompt, (1, m, f).
    guidance: one for all, or (b, 1, 1). Ho and Salimans 2022.
    """
    n = x.shape[1]
    img = join_references(x, batch.references)
    cond = teacher(img, batch.txt, t, rope=batch.rope)[:, :n]
    uncond = teacher(img, mx.repeat(empty, len(x), axis=0), t, rope=batch.rope)[:, :n]
    return classifier_free_guidance(cond, uncond, guidance)


def guided_mean_velocity(
    teacher: Transformer,
    x: mx.array,
    batch: Batch,
    empty: mx.array,
    t: float,
    t_end: float,
    guidance: float | mx.array,
) -> mx.array:
    """The one velocity that leads from x (b, n, 128) at t to where two smaller, guided steps of the teacher lead.

    batch: prompts, references and positions of the pictures. empty: features of the empty prompt, (1, m, f).
    guidance: one for all, or (b, 1, 1). Meng et al. 2022, Salimans and Ho 2022.
    """
    start = x
    half = (t + t_end) / 2
    for now, then in ((t, half), (half, t_end)):
        x = x + (then - now) * guided_velocity(teacher, x, batch, empty, now, guidance)
    return mx.stop_gradient((x - start) / (t_end - t))


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
    """Step number `segment` of four, from a noised picture: the student's one look against two guided ones.

    empty: features of the empty prompt, (1, m, f). guidance: of each picture's teacher, (b,); 1 is none. key: of the
    noise. (`mx.compile` makes a graph for each `segment`.)
    """
    n = batch.clean.shape[1]
    t, t_end = schedule(STUDENT_STEPS, n)[segment : segment + 2]
    x = noised(batch.clean, mx.random.normal(batch.clean.shape, key=key), t)
    target = guided_mean_velocity(teacher, x, batch, empty, t, t_end, guidance[:, None, None])
    velocity = student(join_references(x, batch.references), batch.txt, t, rope=batch.rope)[:, :n]
    return ((velocity - target) ** 2).mean()


def own_path(student: Transformer, x: mx.array, batch: Batch) -> list[mx.array]:
    """Where a student comes by: noise x (b, n, 128), then the latents after each of its four steps.

    batch: prompts, references and positions of the pictures.
    """
    path = [x]
    for t, t_next in pairwise(schedule(STUDENT_STEPS, x.shape[1])):
        img = join_references(path[-1], batch.references)
        velocity = student(img, batch.txt, t, rope=batch.rope)[:, : x.shape[1]]
        path.append(path[-1] + (t_next - t) * velocity)
    return path


def redraw_loss(student: Transformer, x: mx.array, batch: Batch, segment: int) -> mx.array:
    """From its own latents x (b, n, 128) before step `segment`, the student's velocity against the straight way to
    batch.clean, the latents of the drawing."""
    t = schedule(STUDENT_STEPS, x.shape[1])[segment]
    velocity = student(join_references(x, batch.references), batch.txt, t, rope=batch.rope)[:, : x.shape[1]]
    return ((velocity - (x - batch.clean) / t) ** 2).mean()
