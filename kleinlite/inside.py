"""Look into a model while it draws: which picture tokens attend to which words.

Letters: b pictures, n picture tokens, m text tokens.
"""

from typing import cast

import mlx.core as mx

from .inference.request import Options
from .klein import Klein, Step
from .position_ids import Rope, apply_rope
from .transformer import TransformerConfig, roped_attention

__all__ = ["AttentionRecorder", "record_attention"]


class AttentionRecorder:
    """Chapter 5's attention, which keeps what the picture's tokens give to those of the text.

    `maps` has an array (n, m) for each call, the mean of the heads of the first picture: a call is a block of a step.
    """

    def __init__(self, text_tokens: int):
        self.text_tokens = text_tokens
        self.maps: list[mx.array] = []

    def __call__(self, q: mx.array, k: mx.array, v: mx.array, rope: Rope) -> mx.array:
        m = self.text_tokens
        turned_q = apply_rope(q, rope)[:, :, m:]  # the picture's, (b, heads, n, head_dim)
        turned_k = apply_rope(k, rope)
        scores = (turned_q @ turned_k.swapaxes(-1, -2)).astype(mx.float32) * q.shape[-1] ** -0.5
        weights = mx.softmax(scores, axis=-1)  # (b, heads, n, m + n)
        self.maps.append(weights[0, :, :, :m].mean(axis=0))
        mx.eval(self.maps[-1])
        return roped_attention(q, k, v, rope)


def record_attention(klein: Klein, prompt: str, **options: int) -> tuple[list[Step], list[mx.array]]:
    """Draw one picture: its steps, and for each of them the attention to the text, (blocks, n, m), mean of the heads.

    options: seed, width, height, steps, as for a call.
    >>> klein = Klein.from_pretrained()
    >>> steps, maps = record_attention(klein, "a red star", seed=7)
    >>> len(maps), maps[0].shape
    (4, (7, 36, 32))
    """
    given: Options = {**options, "progress": False}  # type: ignore[typeddict-item]
    recorder = AttentionRecorder(klein.info.max_length)
    steps = []
    maps = []
    for step in klein.stream(prompt, attention_fn=recorder, **given):  # refuses models without such blocks
        cfg = cast(TransformerConfig, klein.parts.configs.transformer)
        steps.append(step)
        maps.append(mx.stack(recorder.maps[: cfg.double_blocks + cfg.single_blocks]))  # then the empty prompt's
        recorder.maps.clear()
    mx.eval(maps)
    return steps, maps
