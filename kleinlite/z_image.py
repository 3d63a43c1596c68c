"""A sister model.

Z-Image-Turbo is another model, from another company. How much of it do we already own, and how do you port the rest
without a mistake?

Letters: b pictures, (gh, gw) rows and columns of patches, n = gh·gw picture tokens, m caption tokens, s = all rows,
d width.

Sources: Z-Image, 2025, arXiv 2511.22699; its blocks: Lumina-Image 2.0, 2025, arXiv 2503.21758; its eight steps: Liu
et al. 2025, arXiv 2511.22677; constants: the released files of Tongyi-MAI/Z-Image-Turbo and diffusers'
ZImageTransformer2DModel; names: Comfy-Org/z_image_turbo. Where notes on this model are unclear: corrections.

Promoted from notebooks/17_z_image.ipynb: edit there, then run `make promote`. (seal 54d4fd10)
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from tokenizers import Tokenizer

from .autoencoder import AutoencoderConfig, Decoder, Encoder, patchify, unpatchify
from .errors import UserError
from .position_ids import Rope, image_ids, rope_table
from .sampling import shift_time
from .text_encoder import RMSNorm, TextEncoder
from .transformer import linear, modulate, roped_attention, sequential, split_heads, time_features

__all__ = [
    "ZImageConfig", "PLAIN_TEMPLATE", "encode_caption", "patches", "from_patches", "Flux1AutoencoderConfig",
    "Flux1Autoencoder", "caption_ids", "picture_ids", "pad_to_multiple", "SelfAttention", "FeedForward",
    "SandwichBlock", "TimeMLP", "ScaleFinalLayer", "ZImageTransformer", "static_schedule", "z_image_velocity_field",
]  # fmt: skip


@dataclass(frozen=True)
class ZImageConfig:
    """The transformer in numbers. The defaults are the released Z-Image-Turbo's."""

    layers: int = 30
    refiners: int = 2  # blocks for the picture alone, and as many for the caption alone
    heads: int = 30
    axes: tuple[int, ...] = (32, 48, 48)  # channels of a head per position axis: sequence, row, column
    d_latent: int = 64
    d_text: int = 2560
    theta: float = 256.0
    eps: float = 1e-5  # of all RMS norms

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return sum(self.axes)

    @property
    def d(self) -> int:
        """Width."""
        return self.heads * self.head_dim

    @property
    def d_vec(self) -> int:
        """Width of the time vector that modulates the blocks."""
        return min(self.d, 256)


PLAIN_TEMPLATE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def encode_caption(encoder: TextEncoder, tokenizer: Tokenizer, prompt: str, max_length: int = 512) -> mx.array:
    """The features of a prompt's own tokens, without padding: (1, m, d_text)

    Raises UserError if prompt and template have more than `max_length` tokens.
    """
    ids = tokenizer.encode(PLAIN_TEMPLATE.format(prompt)).ids
    if len(ids) > max_length:
        template_length = len(tokenizer.encode(PLAIN_TEMPLATE.format("")).ids)
        raise UserError(
            f"The prompt has {len(ids)} tokens and this model reads {max_length} ({template_length} of them are the "
            f"chat template): shorten {prompt[:40]!r}… by about {len(ids) - max_length} tokens."
        )
    rows = mx.array([ids])
    features: mx.array = encoder(rows, mx.ones(rows.shape, dtype=mx.bool_))
    return features


def patches(z: mx.array) -> mx.array:
    """2×2 patches into channels: (b, 2·gh, 2·gw, c) → (b, gh, gw, 4c), channel index (row·2 + column)·c + channel."""
    x = patchify(z)
    return x.reshape(*x.shape[:3], -1, 4).swapaxes(-1, -2).reshape(x.shape)


def from_patches(x: mx.array) -> mx.array:
    """The way back from `patches`: (b, gh, gw, 4c) → (b, 2·gh, 2·gw, c)"""
    return unpatchify(x.reshape(*x.shape[:3], 4, -1).swapaxes(-1, -2).reshape(x.shape))


@dataclass(frozen=True)
class Flux1AutoencoderConfig(AutoencoderConfig):
    """FLUX.1's autoencoder in numbers."""

    latent_channels: int = 16
    scale: float = 0.3611
    shift: float = 0.1159


class Flux1Autoencoder(nn.Module):
    """Pictures to latents of an eighth of the height and width, in patches of 2×2, and back."""

    def __init__(self, cfg: Flux1AutoencoderConfig):
        super().__init__()
        self.cfg = cfg
        self.encoder = Encoder(cfg)
        self.decoder = Decoder(cfg)
        self.encoder["quant_conv"] = nn.Identity()  # FLUX.1 has no 1×1 convolutions around the latent
        self.decoder["post_quant_conv"] = nn.Identity()

    def encode(self, pixels: mx.array) -> mx.array:
        """Pixels in [-1, 1], (b, H, W, 3), sides multiples of 16 → patches (b, H/16, W/16, 64)."""
        mean, _ = mx.split(self.encoder(pixels), 2, axis=-1)
        return patches((mean - self.cfg.shift) * self.cfg.scale)

    def decode(self, latents: mx.array) -> mx.array:
        """Patches (b, gh, gw, 64) → pixels (b, 16·gh, 16·gw, 3), about [-1, 1], not clamped."""
        pixels: mx.array = self.decoder(from_patches(latents) / self.cfg.scale + self.cfg.shift)
        return pixels


def caption_ids(m: int) -> mx.array:
    """(m, 3) coordinates (place, row, column) of m caption tokens, padding included: (1 + k, 0, 0)."""
    k = mx.arange(1, m + 1)
    return mx.stack([k, mx.zeros_like(k), mx.zeros_like(k)], axis=-1)


def picture_ids(gh: int, gw: int, m: int) -> mx.array:
    """Coordinates behind a caption of m tokens, row by row: (m + 1, row, column); pads at (0, 0, 0). (32·k, 3)"""
    ids = image_ids(gh, gw, t=m + 1)[:, :3]
    return mx.pad(ids, [(0, -len(ids) % 32), (0, 0)])


def pad_to_multiple(x: mx.array, token: mx.array) -> mx.array:
    """Rows up to a multiple of 32, the new ones all `token` (1, d). (b, s, d) → (b, 32·k, d)"""
    b, s, d = x.shape
    return mx.concatenate([x, mx.broadcast_to(token, (b, -s % 32, d))], axis=1)


class SelfAttention(nn.Module):
    """Every token attends to every token; queries and keys normed per head and rotated. (b, s, d) → (b, s, d)"""

    def __init__(self, cfg: ZImageConfig):
        super().__init__()
        self.heads = cfg.heads
        self.qkv = linear(cfg.d, 3 * cfg.d)
        self.out = linear(cfg.d, cfg.d)
        self.q_norm = RMSNorm(cfg.head_dim, cfg.eps)
        self.k_norm = RMSNorm(cfg.head_dim, cfg.eps)

    def __call__(self, x: mx.array, rope: Rope) -> mx.array:
        q, k, v = split_heads(self.qkv(x), 3, self.heads)  # (b, heads, s, head_dim) each
        return self.out(roped_attention(self.q_norm(q), self.k_norm(k), v, rope))


class FeedForward(nn.Module):
    """SwiGLU with the checkpoint's names: silu(w1)·w3, and w2 down again. (b, s, d) → (b, s, d)"""

    def __init__(self, d: int):
        super().__init__()
        d_mlp = int(d / 3 * 8)
        self.w1 = linear(d, d_mlp)
        self.w2 = linear(d_mlp, d)
        self.w3 = linear(d, d_mlp)

    def __call__(self, x: mx.array) -> mx.array:
        return self.w2(nn.silu(self.w1(x)) * self.w3(x))


class SandwichBlock(nn.Module):
    """Attention, then MLP, each between two norms. x (b, s, d), vec (b, d_vec) or None → (b, s, d)

    timed: whether it has the matrix that makes scales and gates of `vec`. Two norms: Ding et al. 2021, arXiv
    2105.13290.
    """

    def __init__(self, cfg: ZImageConfig, timed: bool = True):
        super().__init__()
        self.attention = SelfAttention(cfg)
        self.feed_forward = FeedForward(cfg.d)
        self.attention_norm1 = RMSNorm(cfg.d, cfg.eps)
        self.attention_norm2 = RMSNorm(cfg.d, cfg.eps)
        self.ffn_norm1 = RMSNorm(cfg.d, cfg.eps)
        self.ffn_norm2 = RMSNorm(cfg.d, cfg.eps)
        if timed:
            self.adaLN_modulation = [nn.Linear(cfg.d_vec, 4 * cfg.d)]

    def modulation(self, vec: mx.array | None) -> tuple[mx.array | int, ...]:
        """Scale and gate (b, 1, d) for attention, then for the MLP; without a time nothing is scaled or held back."""
        if vec is None:
            return 0, 1, 0, 1
        scale1, gate1, scale2, gate2 = mx.split(self.adaLN_modulation[0](vec)[:, None], 4, axis=-1)
        return scale1, mx.tanh(gate1), scale2, mx.tanh(gate2)

    def __call__(self, x: mx.array, rope: Rope, vec: mx.array | None = None) -> mx.array:
        scale1, gate1, scale2, gate2 = self.modulation(vec)
        x = x + gate1 * self.attention_norm2(self.attention((1 + scale1) * self.attention_norm1(x), rope))
        return x + gate2 * self.ffn_norm2(self.feed_forward((1 + scale2) * self.ffn_norm1(x)))


class TimeMLP(nn.Module):
    """Waves of the time through two layers. (b, 256) → (b, d_vec)"""

    def __init__(self, d_vec: int):
        super().__init__()
        self.mlp = [nn.Linear(256, 1024), nn.SiLU(), nn.Linear(1024, d_vec)]

    def __call__(self, x: mx.array) -> mx.array:
        return sequential(self.mlp, x)


class ScaleFinalLayer(nn.Module):
    """Norm with a last scale, no shift, then back to patches. x (b, n, d), vec (b, d_vec) → (b, n, d_latent)"""

    def __init__(self, cfg: ZImageConfig):
        super().__init__()
        self.adaLN_modulation = [nn.SiLU(), nn.Linear(cfg.d_vec, cfg.d)]
        self.linear = nn.Linear(cfg.d, cfg.d_latent)

    def __call__(self, x: mx.array, vec: mx.array) -> mx.array:
        scale = sequential(self.adaLN_modulation, vec)[:, None]  # (b, 1, d)
        return self.linear(modulate(x, mx.zeros_like(scale), scale))


class ZImageTransformer(nn.Module):
    """One stream: noisy patches, a refined caption and a time in; out comes where the picture lies."""

    def __init__(self, cfg: ZImageConfig):
        super().__init__()
        self.cfg = cfg
        self.x_embedder = nn.Linear(cfg.d_latent, cfg.d)
        self.x_pad_token = mx.zeros((1, cfg.d))
        self.cap_embedder = [RMSNorm(cfg.d_text, cfg.eps), nn.Linear(cfg.d_text, cfg.d)]
        self.cap_pad_token = mx.zeros((1, cfg.d))
        self.t_embedder = TimeMLP(cfg.d_vec)
        self.noise_refiner = [SandwichBlock(cfg) for _ in range(cfg.refiners)]
        self.context_refiner = [SandwichBlock(cfg, timed=False) for _ in range(cfg.refiners)]
        self.layers = [SandwichBlock(cfg) for _ in range(cfg.layers)]
        self.final_layer = ScaleFinalLayer(cfg)

    def rope(self, grid: tuple[int, int], m: int) -> Rope:
        """The rotations of all rows, the picture's first, for a refined caption of m rows."""
        ids = mx.concatenate([picture_ids(*grid, m), caption_ids(m)])
        return rope_table(ids, self.cfg.axes, self.cfg.theta)

    def refine(self, txt: mx.array) -> mx.array:
        """A caption's features (b, m, d_text) → its rows in the stream, (b, 32·k, d): once per prompt."""
        x = pad_to_multiple(sequential(self.cap_embedder, txt), self.cap_pad_token)
        rope = rope_table(caption_ids(x.shape[1]), self.cfg.axes, self.cfg.theta)
        for block in self.context_refiner:
            x = block(x, rope)
        return x

    def __call__(self, img: mx.array, caption: mx.array, t: float | mx.array, rope: Rope) -> mx.array:
        """img (b, n, 64), caption from `refine`, t from 0 (noise) to 1 (picture) → picture − noise (b, n, 64)"""
        t = mx.broadcast_to(mx.array(t, dtype=mx.float32), (len(img),))
        vec = self.t_embedder(time_features(t).astype(img.dtype))  # (b, d_vec)
        x = pad_to_multiple(self.x_embedder(img), self.x_pad_token)
        cos, sin = rope
        picture_rope = cos[: x.shape[1]], sin[: x.shape[1]]
        for block in self.noise_refiner:
            x = block(x, picture_rope, vec)
        x = mx.concatenate([x, caption], axis=1)  # the picture first
        for block in self.layers:
            x = block(x, rope, vec)
        return self.final_layer(x[:, : img.shape[1]], vec)


def static_schedule(steps: int, shift: float = 3.0) -> list[float]:
    """steps + 1 noise levels from 1 down to 0, shifted by the same amount for pictures of all sizes."""
    return [shift_time(1 - i / steps, shift) for i in range(steps)] + [0.0]


def z_image_velocity_field(
    transformer: ZImageTransformer, captions: list[mx.array], grid: tuple[int, int]
) -> Callable[[mx.array, float, float], mx.array]:
    """The velocity dx/dt of latents x (b, n, 64) at noise level t, towards the noise.

    captions: the features of each picture's prompt, (1, m, d_text), m its own number of tokens. The field takes x, t,
    and the next noise level, which it does not need.
    """
    refined = [transformer.refine(txt) for txt in captions]
    ropes = {m: transformer.rope(grid, m) for m in {caption.shape[1] for caption in refined}}
    mx.eval(refined, ropes)

    def field(x: mx.array, t: float, t_next: float = 0.0) -> mx.array:
        x = x.astype(captions[0].dtype)
        rows = []
        for i, caption in enumerate(refined):
            rows.append(-transformer(x[i : i + 1], caption, 1 - t, ropes[caption.shape[1]]))
        return mx.concatenate(rows)

    return field
