"""Wider networks that answer as the narrow ones did. Hand-written.

After "Net2Net" (arXiv 1511.05641). A transformer gets every channel of its residual stream twice: a matrix that reads
the stream gets two halves that differ, and whose sum is the old one; a matrix that writes it writes both copies. Heads
grow from hd to 2·hd channels: the rotary pairs of the old head keep their frequencies (every second one of the new
head's), the others begin silent. A decoder gets the channels of a level several times, which leaves a group norm's
mean and variance what they were.
"""

from dataclasses import replace

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from ..autoencoder import Autoencoder, AutoencoderConfig
from ..transformer import Transformer, TransformerConfig


def wide_config(c: TransformerConfig) -> TransformerConfig:
    """Twice the width in the same number of heads, with as many hidden units in the MLPs as before."""
    return replace(c, axes=tuple(2 * a for a in c.axes), mlp_ratio=c.mlp_ratio / 2)


def widen(old: Transformer, key: mx.array, spread: float = 0.5) -> Transformer:
    """The same function, twice as wide, with the old number of hidden units in its MLPs."""
    c = old._cfg
    d, hd, nh = c.d, c.hd, c.heads
    new = Transformer(wide_config(c))
    keys = iter(mx.random.split(key, 400))
    normal = lambda shape, size: size * mx.random.normal(shape, key=next(keys))
    rms = lambda w: mx.sqrt((w * w).mean())
    twice = lambda w: mx.concatenate([w, w])

    def read(w):  # (out, d) → (out, 2d)
        apart = normal(w.shape, spread * rms(w).item())
        return mx.concatenate([w / 2 + apart, w / 2 - apart], axis=1)

    def spaced(w):  # (nh·hd, x): the rows of a head's pairs at the even pairs of a head of 2·hd
        w = w.reshape(nh, len(c.axes), -1, 1, 2, w.shape[-1])  # head, axis, pair, 1, 2, x
        return mx.concatenate([w, mx.zeros_like(w)], axis=3).reshape(2 * nh * hd, -1)

    def attention_rows(w):  # (3·d, 2d)
        q, k, v = mx.split(w, 3)
        quiet = spaced(mx.ones((nh * hd, 1))) == 0
        k = spaced(k) + mx.where(quiet, normal((2 * d, w.shape[1]), 0.1 * rms(k).item()), 0.0)
        v = v.reshape(nh, hd, -1)
        return mx.concatenate([spaced(q), k, mx.concatenate([v, v], axis=1).reshape(2 * d, -1)])

    def attention_columns(w):  # (x, d) → (x, 2d), heads of values twice
        w = w.reshape(-1, nh, hd)
        apart = normal(w.shape, spread * rms(w).item())
        return mx.concatenate([w / 2 + apart, w / 2 - apart], axis=2).reshape(-1, 2 * d)

    out = []
    for name, w in tree_flatten(old.parameters()):
        w = w.astype(mx.float32)
        last = name.removesuffix(".weight")
        if name.endswith("norm.query_norm.scale") or name.endswith("norm.key_norm.scale"):
            one = spaced(mx.tile(w, nh)[:, None])[: 2 * hd, 0]
            by = 2**-0.5 if "query" in name else 1.0
            w = mx.where(spaced(mx.ones((nh * hd, 1)))[: 2 * hd, 0] > 0, one * by, by)
        elif last in ("img_in", "txt_in", "time_in.in_layer"):
            w = twice(w)
        elif last == "time_in.out_layer":
            w = twice(read(w))
        elif last.endswith((".lin", "adaLN_modulation.1")):
            w = read(w).reshape(-1, d, 2 * d)
            w = mx.concatenate([w, w], axis=1).reshape(-1, 2 * d)
        elif last == "final_layer.linear" or last.endswith("mlp.0"):
            w = read(w)
        elif last.endswith("mlp.2"):
            w = twice(w)
        elif last.endswith("qkv"):
            w = attention_rows(read(w))
        elif last.endswith("proj"):
            w = twice(attention_columns(w))
        elif last.endswith("linear1"):
            w = read(w)
            w = mx.concatenate([attention_rows(w[: 3 * d]), w[3 * d :]])
        elif last.endswith("linear2"):
            w = twice(mx.concatenate([attention_columns(w[:, :d]), w[:, d:]], axis=1))
        else:
            raise AssertionError(name)
        out.append((name, w))
    new.update(tree_unflatten(out))
    mx.eval(new.parameters())
    return new


def widen_decoder(old: Autoencoder, cfg: AutoencoderConfig, key: mx.array, spread: float = 0.3) -> Autoencoder:
    """The same function as an autoencoder of `cfg`, whose decoder has at each level a multiple of the channels."""
    new = Autoencoder(cfg)
    wider, out = dict(tree_flatten(new.parameters())), []
    for name, w in tree_flatten(old.parameters()):
        shape = wider[name].shape
        if w.ndim:
            w = mx.repeat(w, shape[0] // w.shape[0], axis=0)
        if w.ndim > 1 and (times := shape[-1] // w.shape[-1]) > 1:
            key, own = mx.random.split(key)
            apart = spread * mx.random.normal((*w.shape, times), key=own)
            w = (w[..., None] / times * (1 + apart - apart.mean(axis=-1, keepdims=True))).reshape(shape)
        out.append((name, w))
    new.update(tree_unflatten(out))
    mx.eval(new.parameters())
    return new
