"""Fewer steps, and measuring.

A student learns to do in four looks what its teacher does in forty. Then we ask how we know that its pictures are
right.

Promoted from notebooks/12_fewer_steps.ipynb: edit there, then run `make promote`. (seal 52934ddf)
"""

import mlx.core as mx

from .position_ids import text_ids
from .sampling import guide, schedule
from .text_encoder import TextEncoder
from .training import flow_ids
from .transformer import Transformer

__all__ = ["guided_mean_velocity", "distill_loss"]


def guided_mean_velocity(
    teacher: Transformer, x: mx.array, references: mx.array, txt: mx.array, empty: mx.array, rope: mx.array,
    t: float, t_end: float, guidance: float | mx.array,
) -> mx.array:  # fmt: skip
    """The one velocity that leads from x (b, n, 128) at t to where two smaller, guided steps of the teacher lead.

    empty: features of the empty prompt, (1, m, features). guidance: one for all, or (b, 1, 1).
    """
    start, half, without = x, (t + t_end) / 2, mx.repeat(empty, x.shape[0], axis=0)
    for now, then in ((t, half), (half, t_end)):
        img = mx.concatenate([x, references], axis=1)
        with_prompt, alone = (teacher(img, words, now, rope=rope)[:, : x.shape[1]] for words in (txt, without))
        x = x + (then - now) * guide(with_prompt, alone, guidance)
    return mx.stop_gradient((x - start) / (t_end - t))


def distill_loss(
    model: Transformer, teacher: Transformer, text_encoder: TextEncoder, empty: mx.array, grid: tuple[int, int],
    clean: mx.array, references: mx.array, ids: mx.array, mask: mx.array, key: mx.array, guidance: mx.array,
    segment: mx.array,
) -> mx.array:  # fmt: skip
    """One of four steps, from a noisy picture: the student's one look against two guided steps of the teacher.

    guidance: how much each picture's teacher is guided, (b,), 1 for not at all. segment: an array as long as the number
    of the step, so that each has a graph.
    """
    i, n = segment.shape[0], clean.shape[1]
    t, t_end = schedule(4, n)[i : i + 2]
    eps, txt = mx.random.normal(clean.shape, key=key), mx.stop_gradient(text_encoder(ids, mask))
    rope = teacher.rope(flow_ids(grid, references), text_ids(ids.shape[1]))
    x = (1 - t) * clean + t * eps
    target = guided_mean_velocity(teacher, x, references, txt, empty, rope, t, t_end, guidance[:, None, None])
    v = model(mx.concatenate([x, references], axis=1), txt, t, rope=rope)[:, :n]
    return ((v - target) ** 2).mean()
