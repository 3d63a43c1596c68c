"""Fewer steps.

A student learns to do in four looks what its teacher does in forty, in two what another does in four, and on a
plane in one.

Letters: b pictures, n picture tokens of 128 channels, m text tokens, f features of a text token, t noise level from
0 (picture) to 1 (noise).

Sources: guidance learned by a student, and then half of its steps, again and again: Meng et al. 2022, arXiv
2210.03142, after Salimans and Ho 2022, arXiv 2202.00512. Guidance: Ho and Salimans 2022, arXiv 2207.12598. Mean
velocities: Frans et al. 2024, arXiv 2410.12557; Geng et al. 2025, arXiv 2505.13447.

Promoted from notebooks/12_fewer_steps.ipynb: edit there, then run `make promote`. (seal 7f8d5f81)
"""

import mlx.core as mx

from .sampling import classifier_free_guidance, noised, schedule
from .training import Batch, join_references
from .transformer import Transformer

__all__ = ["guided_mean_velocity", "STUDENT_STEPS", "distill_loss"]


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
    n = x.shape[1]
    half = (t + t_end) / 2
    empty = mx.repeat(empty, len(x), axis=0)
    for now, then in ((t, half), (half, t_end)):
        img = join_references(x, batch.references)
        cond = teacher(img, batch.txt, now, rope=batch.rope)[:, :n]
        uncond = teacher(img, empty, now, rope=batch.rope)[:, :n]
        x = x + (then - now) * classifier_free_guidance(cond, uncond, guidance)
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
