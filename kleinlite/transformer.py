"""The transformer.

We build the network that reads a noisy picture and a prompt and answers with a velocity: the direction away from
the picture.

Letters: b pictures, n picture tokens, m text tokens, s = m + n, d width, nh heads, hd channels of a head, d_mlp
width inside the MLP.

Sources: adaLN: Peebles and Xie 2022 (DiT), arXiv 2212.09748. Two streams, one attention: Esser et al. 2024 (MMDiT),
arXiv 2403.03206. Norms on queries and keys, attention beside MLP: Dehghani et al. 2023 (ViT-22B), arXiv 2302.05442.
SwiGLU: Shazeer 2020, arXiv 2002.05202. Shapes and constants: diffusers' Flux2Transformer2DModel.

Promoted from notebooks/05_transformer.ipynb: edit there, then run `make promote`. (seal 43fc5886)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from .position_ids import Rope, apply_rope, rope_table

__all__ = [
    "TransformerConfig",
    "linear",
    "time_features",
    "TimeEmbedding",
    "Modulation",
    "modulate",
    "HeadRMSNorm",
    "QKNorm",
    "split_heads",
    "join_heads",
    "AttentionFn",
    "roped_attention",
    "SwiGLU",
    "mlp",
    "sequential",
    "StreamAttention",
    "DoubleBlock",
    "SingleBlock",
    "FinalLayer",
    "Transformer",
]


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
    def hd(self) -> int:
        """Channels of a head."""
        return sum(self.axes)

    @property
    def d(self) -> int:
        """Channels of a token."""
        return self.heads * self.hd

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


class Modulation(nn.Module):
    """From the time embedding, `count` vectors (b, 1, d) that shift, scale and gate the blocks."""

    def __init__(self, d: int, count: int):
        super().__init__()
        self.lin = linear(d, count * d)
        self._count = count

    def __call__(self, vec: mx.array) -> list[mx.array]:
        return list(mx.split(self.lin(nn.silu(vec))[:, None], self._count, axis=-1))


def modulate(x: mx.array, shift: mx.array, scale: mx.array) -> mx.array:
    """LayerNorm without weights (eps 1e-6), then scale and shift. x (b, s, d), shift and scale (b, 1, d)"""
    return (1 + scale) * mx.fast.layer_norm(x, None, None, 1e-6) + shift


class HeadRMSNorm(nn.Module):
    """RMSNorm over the channels of one head (eps 1e-6). (b, nh, s, hd) → same"""

    def __init__(self, hd: int):
        super().__init__()
        self.scale = mx.ones((hd,))

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.scale, 1e-6)


class QKNorm(nn.Module):
    """One norm for queries, one for keys, shared by all heads."""

    def __init__(self, hd: int):
        super().__init__()
        self.query_norm = HeadRMSNorm(hd)
        self.key_norm = HeadRMSNorm(hd)

    def __call__(self, q: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
        return self.query_norm(q), self.key_norm(k)


def split_heads(x: mx.array, count: int, nh: int) -> list[mx.array]:
    """(b, s, count·nh·hd) → `count` arrays (b, nh, s, hd)"""
    b, s, _ = x.shape
    x = x.reshape(b, s, count, nh, -1).transpose(2, 0, 3, 1, 4)  # (count, b, nh, s, hd)
    return list(x)


def join_heads(x: mx.array) -> mx.array:
    """(b, nh, s, hd) → (b, s, nh·hd)"""
    b, nh, s, hd = x.shape
    return x.transpose(0, 2, 1, 3).reshape(b, s, nh * hd)


AttentionFn = Callable[[mx.array, mx.array, mx.array, Rope], mx.array]  # queries, keys, values, table → (b, s, d)


def roped_attention(q: mx.array, k: mx.array, v: mx.array, rope: Rope) -> mx.array:
    """Every token attends to every token, queries and keys rotated by position. (b, nh, s, hd) → (b, s, d)"""
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

    def __init__(self, d: int, nh: int):
        super().__init__()
        self.qkv = linear(d, 3 * d)
        self.norm = QKNorm(d // nh)
        self.proj = linear(d, d)
        self._nh = nh

    def project_qkv(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """(b, s, d) → queries, keys, values (b, nh, s, hd), queries and keys normed"""
        q, k, v = split_heads(self.qkv(x), 3, self._nh)
        return *self.norm(q, k), v


class DoubleBlock(nn.Module):
    """Text and image keep their own weights and meet in one attention. img (b, n, d), txt (b, m, d) → same"""

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
        img_mod: list[mx.array],
        txt_mod: list[mx.array],
        rope: Rope,
        attention_fn: AttentionFn | None = None,
    ) -> tuple[mx.array, mx.array]:
        i_shift1, i_scale1, i_gate1, i_shift2, i_scale2, i_gate2 = img_mod
        t_shift1, t_scale1, t_gate1, t_shift2, t_scale2, t_gate2 = txt_mod
        m = txt.shape[1]
        img_qkv = self.img_attn.project_qkv(modulate(img, i_shift1, i_scale1))
        txt_qkv = self.txt_attn.project_qkv(modulate(txt, t_shift1, t_scale1))
        q, k, v = (mx.concatenate([t, i], axis=2) for t, i in zip(txt_qkv, img_qkv))  # text first: (b, nh, m + n, hd)
        y = (attention_fn or roped_attention)(q, k, v, rope)  # (b, m + n, d)
        img = img + i_gate1 * self.img_attn.proj(y[:, m:])
        txt = txt + t_gate1 * self.txt_attn.proj(y[:, :m])
        img = img + i_gate2 * sequential(self.img_mlp, modulate(img, i_shift2, i_scale2))
        txt = txt + t_gate2 * sequential(self.txt_mlp, modulate(txt, t_shift2, t_scale2))
        return img, txt


class SingleBlock(nn.Module):
    """One stream, attention and MLP side by side in two fused matrices. (b, s, d) → (b, s, d)"""

    def __init__(self, cfg: TransformerConfig):
        super().__init__()
        self.linear1 = linear(cfg.d, 3 * cfg.d + 2 * cfg.d_mlp)
        self.linear2 = linear(cfg.d + cfg.d_mlp, cfg.d)
        self.norm = QKNorm(cfg.hd)
        self.act = SwiGLU()
        self._nh = cfg.heads
        self._hd = cfg.hd

    def __call__(
        self, x: mx.array, mod: list[mx.array], rope: Rope, attention_fn: AttentionFn | None = None
    ) -> mx.array:
        shift, scale, gate = mod
        qkv, up = mx.split(self.linear1(modulate(x, shift, scale)), [3 * self._nh * self._hd], axis=-1)
        q, k, v = split_heads(qkv, 3, self._nh)
        y = (attention_fn or roped_attention)(*self.norm(q, k), v, rope)
        return x + gate * self.linear2(mx.concatenate([y, self.act(up)], axis=-1))


class FinalLayer(nn.Module):
    """Norm with a last shift and scale, then back to latent channels. (b, n, d) → (b, n, d_latent)"""

    def __init__(self, cfg: TransformerConfig):
        super().__init__()
        self.adaLN_modulation = [nn.SiLU(), linear(cfg.d, 2 * cfg.d)]
        self.linear = linear(cfg.d, cfg.d_latent)

    def __call__(self, x: mx.array, vec: mx.array) -> mx.array:
        shift, scale = mx.split(self.adaLN_modulation[1](nn.silu(vec))[:, None], 2, axis=-1)
        return self.linear(modulate(x, shift, scale))


class Transformer(nn.Module):
    """The velocity field: noisy latents, text features and a noise level in, a velocity per image token out."""

    def __init__(self, cfg: TransformerConfig):
        super().__init__()
        self.cfg = cfg
        self.img_in = linear(cfg.d_latent, cfg.d)
        self.txt_in = linear(cfg.d_text, cfg.d)
        self.time_in = TimeEmbedding(cfg.d_time, cfg.d)
        self.double_stream_modulation_img = Modulation(cfg.d, 6)
        self.double_stream_modulation_txt = Modulation(cfg.d, 6)
        self.single_stream_modulation = Modulation(cfg.d, 3)
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
        img_mod = self.double_stream_modulation_img(vec)
        txt_mod = self.double_stream_modulation_txt(vec)
        img = self.img_in(img)
        txt = self.txt_in(txt)
        for block in self.double_blocks:
            img, txt = block(img, txt, img_mod, txt_mod, rope, attention_fn)
        x = mx.concatenate([txt, img], axis=1)  # (b, m + n, d)
        mod = self.single_stream_modulation(vec)
        for single_block in self.single_blocks:
            x = single_block(x, mod, rope, attention_fn)
        return self.final_layer(x[:, txt.shape[1] :], vec)
