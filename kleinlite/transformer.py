"""The transformer.

One network gets noise, a prompt and a noise level, and answers with a direction. How do three things so different
come together in it?

Letters: b pictures, n picture tokens, m text tokens, s = m + n, d width, d_mlp width inside the MLP.

Sources: adaLN: Peebles and Xie 2022 (DiT), arXiv 2212.09748. Two streams, one attention: Esser et al. 2024 (MMDiT),
arXiv 2403.03206. Norms on queries and keys, attention beside MLP: Dehghani et al. 2023 (ViT-22B), arXiv 2302.05442.
SwiGLU: Shazeer 2020, arXiv 2002.05202. Shapes and constants: diffusers' Flux2Transformer2DModel.

Promoted from notebooks/05_transformer.ipynb: edit there, then run `make promote`. (seal 0c9aee8a)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from .position_ids import Rope, apply_rope, rope_table

__all__ = [
    "TransformerConfig", "linear", "time_features", "TimeEmbedding", "Mod", "Modulation", "modulate", "HeadRMSNorm",
    "QKNorm", "split_heads", "join_heads", "AttentionFn", "roped_attention", "SwiGLU", "mlp", "sequential",
    "StreamAttention", "DoubleBlock", "SingleBlock", "FinalLayer", "Transformer",
]  # fmt: skip


@dataclass(frozen=True)
class TransformerConfig:
    """The transformer in numbers. The defaults are the released 4B model's."""

    double_blocks: int = 5
    single_blocks: int = 20
    heads: int = 24
    axes: tuple[int, ...] = (32, 32, 32, 32)  # channels of a head per position axis t, h, w, l
    d_latent: int = 128
    d_text: int = 7680
    mlp_ratio: float = 3.0
    theta: float = 2000.0
    d_time: int = 256

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return sum(self.axes)

    @property
    def d(self) -> int:
        """Channels of a token."""
        return self.heads * self.head_dim

    @property
    def d_mlp(self) -> int:
        """Channels inside the MLP."""
        return int(self.d * self.mlp_ratio)

    @classmethod
    def tiny(cls) -> "TransformerConfig":
        return cls(double_blocks=1, single_blocks=2, heads=2, axes=(4, 4, 4, 4), d_text=72)


def linear(d_in: int, d_out: int) -> nn.Linear:
    """Every matrix in this model comes without a bias."""
    return nn.Linear(d_in, d_out, bias=False)


def time_features(t: mx.array, dim: int = 256) -> mx.array:
    """Noise level as waves: t in [0, 1], (b,) → (b, dim): cosines, then sines, of 1000·t·10000^(-2i/dim)."""
    f = mx.exp(-math.log(10000) * mx.arange(dim // 2, dtype=mx.float32) / (dim // 2))
    angles = 1000 * t.astype(mx.float32)[:, None] * f
    return mx.concatenate([mx.cos(angles), mx.sin(angles)], axis=-1)


class TimeEmbedding(nn.Module):
    """Waves through a two-layer MLP. (b, dim) → (b, d)"""

    def __init__(self, dim: int, d: int):
        super().__init__()
        self.in_layer = linear(dim, d)
        self.out_layer = linear(d, d)

    def __call__(self, x: mx.array) -> mx.array:
        return self.out_layer(nn.silu(self.in_layer(x)))


class Mod(NamedTuple):
    """How the time steers one part of a block: shift and scale what it reads, gate what it writes. (b, 1, d) each"""

    shift: mx.array
    scale: mx.array
    gate: mx.array


class Modulation(nn.Module):
    """From the time's vector (b, d), a `Mod` for each of `count` parts of a block. Fresh, it is all zeros.

    adaLN-Zero: Peebles and Xie 2022 (DiT), arXiv 2212.09748.
    """

    def __init__(self, d: int, count: int):
        super().__init__()
        self.lin = linear(d, 3 * count * d)
        self.lin.weight = mx.zeros_like(self.lin.weight)  # so a fresh block writes nothing
        self.count = count

    def __call__(self, vec: mx.array) -> list[Mod]:
        vectors = mx.split(self.lin(nn.silu(vec))[:, None], 3 * self.count, axis=-1)
        return [Mod(*vectors[i : i + 3]) for i in range(0, 3 * self.count, 3)]


def modulate(x: mx.array, shift: mx.array, scale: mx.array) -> mx.array:
    """LayerNorm without weights (eps 1e-6), then scale and shift. x (b, s, d), shift and scale (b, 1, d)"""
    return (1 + scale) * mx.fast.layer_norm(x, None, None, 1e-6) + shift


class HeadRMSNorm(nn.Module):
    """RMSNorm over the channels of one head (eps 1e-6). (b, heads, s, head_dim) → same"""

    def __init__(self, head_dim: int):
        super().__init__()
        self.scale = mx.ones((head_dim,))

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.scale, 1e-6)


class QKNorm(nn.Module):
    """One norm for queries, one for keys, shared by all heads."""

    def __init__(self, head_dim: int):
        super().__init__()
        self.query_norm = HeadRMSNorm(head_dim)
        self.key_norm = HeadRMSNorm(head_dim)

    def __call__(self, q: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
        return self.query_norm(q), self.key_norm(k)


def split_heads(x: mx.array, count: int, heads: int) -> list[mx.array]:
    """(b, s, count·heads·head_dim) → `count` arrays (b, heads, s, head_dim)"""
    b, s, _ = x.shape
    x = x.reshape(b, s, count, heads, -1).transpose(2, 0, 3, 1, 4)  # (count, b, heads, s, head_dim)
    return list(x)


def join_heads(x: mx.array) -> mx.array:
    """(b, heads, s, head_dim) → (b, s, heads·head_dim)"""
    b, heads, s, head_dim = x.shape
    return x.transpose(0, 2, 1, 3).reshape(b, s, heads * head_dim)


AttentionFn = Callable[[mx.array, mx.array, mx.array, Rope], mx.array]  # queries, keys, values, table → (b, s, d)


def roped_attention(q: mx.array, k: mx.array, v: mx.array, rope: Rope) -> mx.array:
    """Every token attends to every token, queries and keys rotated by position. (b, heads, s, head_dim) → (b, s, d)"""
    q = apply_rope(q, rope)
    k = apply_rope(k, rope)
    return join_heads(mx.fast.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5))


class SwiGLU(nn.Module):
    """silu(first half)·second half; Shazeer 2020, arXiv 2002.05202. (b, s, 2·d_mlp) → (b, s, d_mlp)"""

    def __call__(self, x: mx.array) -> mx.array:
        gate, up = mx.split(x, 2, axis=-1)
        return nn.silu(gate) * up


def mlp(d: int, d_mlp: int) -> list[nn.Module]:
    """Matrix, SwiGLU, matrix; a list, so that the weights are called `0` and `2` as in the checkpoint."""
    return [linear(d, 2 * d_mlp), SwiGLU(), linear(d_mlp, d)]


def sequential(layers: list[nn.Module], x: mx.array) -> mx.array:
    """Apply one layer after another."""
    for layer in layers:
        x = layer(x)
    return x


class StreamAttention(nn.Module):
    """One stream's own matrices for a joint attention: queries, keys, values in, projection out."""

    def __init__(self, d: int, heads: int):
        super().__init__()
        self.qkv = linear(d, 3 * d)
        self.norm = QKNorm(d // heads)
        self.proj = linear(d, d)
        self.heads = heads

    def project_qkv(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """(b, s, d) → queries, keys, values (b, heads, s, head_dim), queries and keys normed"""
        q, k, v = split_heads(self.qkv(x), 3, self.heads)
        return *self.norm(q, k), v


class DoubleBlock(nn.Module):
    """Text and picture keep their own weights and meet in one attention. img (b, n, d), txt (b, m, d) → same"""

    def __init__(self, cfg: TransformerConfig):
        super().__init__()
        self.img_attn = StreamAttention(cfg.d, cfg.heads)
        self.img_mlp = mlp(cfg.d, cfg.d_mlp)
        self.txt_attn = StreamAttention(cfg.d, cfg.heads)
        self.txt_mlp = mlp(cfg.d, cfg.d_mlp)

    def __call__(
        self,
        img: mx.array,
        txt: mx.array,
        img_mods: list[Mod],
        txt_mods: list[Mod],
        rope: Rope,
        attention_fn: AttentionFn = roped_attention,
    ) -> tuple[mx.array, mx.array]:
        """img_mods and txt_mods: two `Mod`s each, for attention and for the MLP."""
        img_mod1, img_mod2 = img_mods
        txt_mod1, txt_mod2 = txt_mods
        img_qkv = self.img_attn.project_qkv(modulate(img, img_mod1.shift, img_mod1.scale))
        txt_qkv = self.txt_attn.project_qkv(modulate(txt, txt_mod1.shift, txt_mod1.scale))
        q, k, v = (mx.concatenate(list(pair), axis=2) for pair in zip(txt_qkv, img_qkv))  # text first
        y = attention_fn(q, k, v, rope)  # (b, m + n, d)
        for_txt, for_img = mx.split(y, [txt.shape[1]], axis=1)
        img = img + img_mod1.gate * self.img_attn.proj(for_img)
        txt = txt + txt_mod1.gate * self.txt_attn.proj(for_txt)
        img = img + img_mod2.gate * sequential(self.img_mlp, modulate(img, img_mod2.shift, img_mod2.scale))
        txt = txt + txt_mod2.gate * sequential(self.txt_mlp, modulate(txt, txt_mod2.shift, txt_mod2.scale))
        return img, txt


class SingleBlock(nn.Module):
    """One stream, attention and MLP side by side in two fused matrices. (b, s, d) → (b, s, d)"""

    def __init__(self, cfg: TransformerConfig):
        super().__init__()
        self.linear1 = linear(cfg.d, 3 * cfg.d + 2 * cfg.d_mlp)
        self.linear2 = linear(cfg.d + cfg.d_mlp, cfg.d)
        self.norm = QKNorm(cfg.head_dim)
        self.act = SwiGLU()
        self.heads = cfg.heads
        self.head_dim = cfg.head_dim

    def __call__(self, x: mx.array, mod: Mod, rope: Rope, attention_fn: AttentionFn = roped_attention) -> mx.array:
        fused = self.linear1(modulate(x, mod.shift, mod.scale))
        qkv, gate_up = mx.split(fused, [3 * self.heads * self.head_dim], axis=-1)
        q, k, v = split_heads(qkv, 3, self.heads)
        y = attention_fn(*self.norm(q, k), v, rope)
        return x + mod.gate * self.linear2(mx.concatenate([y, self.act(gate_up)], axis=-1))


class FinalLayer(nn.Module):
    """Norm with a last shift and scale, then back to latent channels. (b, n, d) → (b, n, d_latent)"""

    def __init__(self, cfg: TransformerConfig):
        super().__init__()
        self.adaLN_modulation = [nn.SiLU(), linear(cfg.d, 2 * cfg.d)]
        self.linear = linear(cfg.d, cfg.d_latent)

    def __call__(self, x: mx.array, vec: mx.array) -> mx.array:
        shift, scale = mx.split(sequential(self.adaLN_modulation, vec)[:, None], 2, axis=-1)
        return self.linear(modulate(x, shift, scale))


class Transformer(nn.Module):
    """The velocity field: noisy latents, text features and a noise level in, a velocity per image token out."""

    def __init__(self, cfg: TransformerConfig):
        super().__init__()
        self.cfg = cfg
        self.img_in = linear(cfg.d_latent, cfg.d)
        self.txt_in = linear(cfg.d_text, cfg.d)
        self.time_in = TimeEmbedding(cfg.d_time, cfg.d)
        self.double_stream_modulation_img = Modulation(cfg.d, 2)
        self.double_stream_modulation_txt = Modulation(cfg.d, 2)
        self.single_stream_modulation = Modulation(cfg.d, 1)
        self.double_blocks = [DoubleBlock(cfg) for _ in range(cfg.double_blocks)]
        self.single_blocks = [SingleBlock(cfg) for _ in range(cfg.single_blocks)]
        self.final_layer = FinalLayer(cfg)

    def rope(self, img_ids: mx.array, txt_ids: mx.array) -> Rope:
        """The rotation table of the joint sequence, text first. It does not depend on t: compute once per picture."""
        return rope_table(mx.concatenate([txt_ids, img_ids], axis=-2), self.cfg.axes, self.cfg.theta)

    def __call__(
        self,
        img: mx.array,
        txt: mx.array,
        t: float | mx.array,
        img_ids: mx.array | None = None,
        txt_ids: mx.array | None = None,
        *,
        rope: Rope | None = None,
        attention_fn: AttentionFn | None = None,
    ) -> mx.array:
        """img (b, n, 128), txt (b, m, d_text), t in [0, 1] as a number or (b,), ids (n, 4) and (m, 4) → (b, n, 128)

        `rope`, from `Transformer.rope`, replaces the ids; `attention_fn` replaces `roped_attention`, block after block.
        """
        t = mx.broadcast_to(mx.array(t, dtype=mx.float32), (img.shape[0],))
        if rope is None:
            assert img_ids is not None and txt_ids is not None, "give the ids, or the rope made of them"
            rope = self.rope(img_ids, txt_ids)
        vec = self.time_in(time_features(t, self.cfg.d_time).astype(img.dtype))  # (b, d)
        img_mods = self.double_stream_modulation_img(vec)
        txt_mods = self.double_stream_modulation_txt(vec)
        (mod,) = self.single_stream_modulation(vec)
        attention_fn = attention_fn or roped_attention
        img = self.img_in(img)
        txt = self.txt_in(txt)
        for block in self.double_blocks:
            img, txt = block(img, txt, img_mods, txt_mods, rope, attention_fn)
        x = mx.concatenate([txt, img], axis=1)  # (b, m + n, d)
        for single_block in self.single_blocks:
            x = single_block(x, mod, rope, attention_fn)
        return self.final_layer(x[:, txt.shape[1] :], vec)
