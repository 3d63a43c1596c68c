"""Key/value cache.

Editing sends the reference pictures through the whole network at every step, although they never change. Can we do
that work once?

Letters: b pictures, r reference tokens, n picture tokens, m text tokens, d width.

Sources: keys and values kept in decoding: Shazeer 2019, arXiv 1911.02150. The pattern, in which references see only
each other at time 0: FLUX.2 [klein] 9b-kv, as diffusers' Flux2KleinKVPipeline runs it.

Promoted from notebooks/10_kv_cache.ipynb: edit there, then run `make promote`. (seal b1878973)
"""

from collections.abc import Callable, Sequence

import mlx.core as mx

from .position_ids import Rope, apply_rope, image_ids, reference_ids, rope_table, text_ids
from .transformer import AttentionFn, DoubleBlock, Mod, Transformer, join_heads, modulate, sequential, time_features

__all__ = [
    "KVCache", "image_stream", "recording_attention", "extract_kv", "cached_attention", "cached_velocity",
    "cached_velocity_field",
]  # fmt: skip

KVCache = list[tuple[mx.array, mx.array]]  # an entry for each block: keys and values (b, heads, r, head_dim)


def image_stream(block: DoubleBlock, x: mx.array, mods: list[Mod], rope: Rope, attention_fn: AttentionFn) -> mx.array:
    """The picture's stream of a double block, without any text. (b, r, d) → (b, r, d)"""
    mod1, mod2 = mods
    qkv = block.img_attn.project_qkv(modulate(x, mod1.shift, mod1.scale))
    x = x + mod1.gate * block.img_attn.proj(attention_fn(*qkv, rope))
    return x + mod2.gate * sequential(block.img_mlp, modulate(x, mod2.shift, mod2.scale))


def recording_attention(cache: KVCache) -> AttentionFn:
    """`roped_attention` that also appends a block's keys (normed and rotated) and values to `cache`."""

    def attention_fn(q: mx.array, k: mx.array, v: mx.array, rope: Rope) -> mx.array:
        q = apply_rope(q, rope)
        k = apply_rope(k, rope)
        cache.append((k, mx.contiguous(v)))  # a copy: v is a view into a fused product up to nine times its size
        return join_heads(mx.fast.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5))

    return attention_fn


def extract_kv(transformer: Transformer, references: mx.array, ids: mx.array) -> KVCache:
    """The keys and values of the references, which are modulated with time 0 and see only each other.

    references (b, r, 128), ids (r, 4) from `reference_ids`.
    """
    cache: KVCache = []
    cfg = transformer.cfg
    attention_fn = recording_attention(cache)
    rope = rope_table(ids, cfg.axes, cfg.theta)
    time_zero = time_features(mx.zeros((len(references),)), cfg.d_time).astype(references.dtype)
    vec = transformer.time_in(time_zero)  # (b, d)
    x = transformer.img_in(references)  # (b, r, d)
    mods = transformer.double_stream_modulation_img(vec)
    for double_block in transformer.double_blocks:
        x = image_stream(double_block, x, mods, rope, attention_fn)
    (mod,) = transformer.single_stream_modulation(vec)
    for single_block in transformer.single_blocks:
        x = single_block(x, mod, rope, attention_fn)
    return cache


def cached_attention(k_ref: mx.array, v_ref: mx.array) -> AttentionFn:
    """`roped_attention` of one block, which also attends to that block's entry of the cache."""

    def attention_fn(q: mx.array, k: mx.array, v: mx.array, rope: Rope) -> mx.array:
        b, heads, _, head_dim = q.shape
        k_all, v_all = (mx.broadcast_to(x, (b, heads, *x.shape[2:])) for x in (k_ref, v_ref))  # one for all pictures
        q = apply_rope(q, rope)
        k = mx.concatenate([k_all, apply_rope(k, rope)], axis=2)  # (b, heads, r + m + n, head_dim)
        v = mx.concatenate([v_all, v], axis=2)
        return join_heads(mx.fast.scaled_dot_product_attention(q, k, v, scale=head_dim**-0.5))

    return attention_fn


def cached_velocity(
    transformer: Transformer, img: mx.array, txt: mx.array, t: float | mx.array, rope: Rope, cache: KVCache
) -> mx.array:
    """`Transformer.__call__`, where each block also attends to its entry of the cache. → (b, n, 128)"""
    t = mx.broadcast_to(mx.array(t, dtype=mx.float32), (len(img),))
    vec = transformer.time_in(time_features(t, transformer.cfg.d_time).astype(img.dtype))  # (b, d)
    img_mods = transformer.double_stream_modulation_img(vec)
    txt_mods = transformer.double_stream_modulation_txt(vec)
    (mod,) = transformer.single_stream_modulation(vec)
    img = transformer.img_in(img)
    txt = transformer.txt_in(txt)
    for double_block, entry in zip(transformer.double_blocks, cache):
        img, txt = double_block(img, txt, img_mods, txt_mods, rope, cached_attention(*entry))
    x = mx.concatenate([txt, img], axis=1)  # (b, m + n, d)
    for single_block, entry in zip(transformer.single_blocks, cache[len(transformer.double_blocks) :]):
        x = single_block(x, mod, rope, cached_attention(*entry))
    return transformer.final_layer(x[:, txt.shape[1] :], vec)


def cached_velocity_field(
    transformer: Transformer, txt: mx.array, grid: tuple[int, int], references: Sequence[mx.array]
) -> Callable[[mx.array, float, float], mx.array]:
    """`velocity_field` for references whose keys and values are computed here, once, and read at every step.

    txt (b, m, d_text), grid of the picture to draw, references (b, gh, gw, 128) each. The field takes latents
    (b, n, 128), the noise level t, and the next one, which it does not need.
    """
    tokens = mx.concatenate([z[:1].flatten(1, 2) for z in references], axis=1)
    ids = reference_ids([(z.shape[1], z.shape[2]) for z in references])
    cache = extract_kv(transformer, tokens.astype(txt.dtype), ids)
    rope = transformer.rope(image_ids(*grid), text_ids(txt.shape[1]))
    mx.eval(rope, cache)

    def field(x: mx.array, t: float, t_next: float = 0.0) -> mx.array:
        return cached_velocity(transformer, x.astype(txt.dtype), txt, t, rope, cache)

    return field
