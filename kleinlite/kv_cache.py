"""Key/value cache.

We make editing cheaper: what the reference pictures have to say is worked out once, and every step only looks it
up.

Promoted from notebooks/10_kv_cache.ipynb: edit there, then run `make promote`. (seal f7252b5e)
"""

from collections.abc import Callable

import mlx.core as mx

from .cpu import attention
from .position_ids import apply_rope, image_ids, reference_ids, rope_table, text_ids
from .transformer import DoubleBlock, Transformer, chain, join_heads, modulate, time_features

__all__ = ["image_half", "noting_attention", "extract_kv", "cached_attention", "cached_velocity_field"]


def image_half(block: DoubleBlock, x: mx.array, mod: list[mx.array], rope, attend) -> mx.array:
    """The image stream of a double block, without any text. (b, r, d) → same"""
    shift1, scale1, gate1, shift2, scale2, gate2 = mod
    x = x + gate1 * block.img_attn.proj(attend(*block.img_attn.heads(modulate(x, shift1, scale1)), rope))
    return x + gate2 * chain(block.img_mlp, modulate(x, shift2, scale2))


def noting_attention(cache: list[tuple[mx.array, mx.array]]) -> Callable:
    """`roped_attention` that also appends each block's keys (normed and turned) and values to `cache`."""

    def attend(q, k, v, rope):
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        cache.append((k, mx.contiguous(v)))  # a copy: v is a view into a fused product up to nine times its size
        return join_heads(attention(q, k, v, scale=q.shape[-1] ** -0.5))

    return attend


def extract_kv(transformer: Transformer, references: mx.array, ids: mx.array) -> list[tuple[mx.array, mx.array]]:
    """The cache: keys and values (b, nh, r, hd) of the references, for each block in order.

    references (b, r, 128), ids (r, 4) from `reference_ids`. They are modulated with time 0 and see only each other.
    """
    cache, cfg = [], transformer._cfg
    attend, rope = noting_attention(cache), rope_table(ids, cfg.axes, cfg.theta)
    still = time_features(mx.zeros((len(references),)), cfg.d_time).astype(references.dtype)
    vec = transformer.time_in(still)  # (b, d)
    x, mod = transformer.img_in(references), transformer.double_stream_modulation_img(vec)
    for block in transformer.double_blocks:
        x = image_half(block, x, mod, rope, attend)
    mod = transformer.single_stream_modulation(vec)
    for block in transformer.single_blocks:
        x = block(x, mod, rope, attend)
    return cache


def cached_attention(cache: list[tuple[mx.array, mx.array]]) -> Callable:
    """`roped_attention` that also looks at the cache, block after block: make a new one for each forward pass."""
    layers = iter(cache)

    def attend(q, k, v, rope):
        b, nh, _, hd = q.shape
        k_ref, v_ref = (mx.broadcast_to(x, (b, nh, x.shape[2], hd)) for x in next(layers))
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        k, v = mx.concatenate([k_ref, k], axis=2), mx.concatenate([v_ref, v], axis=2)  # (b, nh, r + m + n, hd)
        return join_heads(attention(q, k, v, scale=hd**-0.5))

    return attend


def cached_velocity_field(
    transformer: Transformer, txt: mx.array, references: mx.array, grids: list[tuple[int, int]], grid: tuple[int, int]
) -> Callable[[mx.array, float], mx.array]:
    """`velocity_field` for references that are computed here, once, and looked up at every step."""
    cache = extract_kv(transformer, references[:1].astype(txt.dtype), reference_ids(grids))
    rope = transformer.rope(image_ids(*grid), text_ids(txt.shape[1]))
    mx.eval(rope, cache)
    return lambda x, t: transformer(x.astype(txt.dtype), txt, t, rope=rope, attend=cached_attention(cache))
