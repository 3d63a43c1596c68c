"""A sister model.

We build a second system, Z-Image-Turbo, from the parts that we own, and ask of every difference: choice or
necessity?

Promoted from notebooks/14_z_image.ipynb: edit there, then run `make promote`. (seal b0a48944)
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from tokenizers import Tokenizer

from .autoencoder import AutoencoderConfig, Decoder, Encoder, pack, unpack
from .cpu import silu
from .position_ids import image_ids, rope_table
from .text_encoder import RMSNorm, TextEncoder
from .transformer import chain, linear, modulate, roped_attention, split_heads, time_features

__all__ = [
    "ZImageConfig",
    "PLAIN_TEMPLATE",
    "encode_caption",
    "patches",
    "from_patches",
    "ScaledAutoencoderConfig",
    "ScaledAutoencoder",
    "caption_ids",
    "picture_ids",
    "fill_up",
    "SelfAttention",
    "FeedForward",
    "SandwichBlock",
    "TimeMLP",
    "ScaleFinalLayer",
    "ZImageParts",
    "ZImageTransformer",
    "static_schedule",
    "sister_field",
]


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

    hd = property(lambda cfg: sum(cfg.axes))
    d = property(lambda cfg: cfg.heads * cfg.hd)
    d_vec = property(lambda cfg: min(cfg.d, 256))  # what steers the blocks


PLAIN_TEMPLATE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def encode_caption(encoder: TextEncoder, tokenizer: Tokenizer, prompt: str, most: int = 512) -> mx.array:
    """The tapped states of a prompt's own tokens, without padding: (1, m, features)"""
    ids = tokenizer.encode(PLAIN_TEMPLATE.format(prompt)).ids
    if len(ids) > most:
        raise ValueError(
            f"The prompt has {len(ids)} tokens and this model reads {most} (8 of them are the chat template): "
            f"shorten {prompt[:40]!r}… by about {len(ids) - most} tokens."
        )
    ids = mx.array([ids])
    return encoder(ids, mx.ones(ids.shape, dtype=mx.bool_))


def patches(z: mx.array) -> mx.array:
    """2×2 patches into channels: (b, 2·gh, 2·gw, c) → (b, gh, gw, 4c), channel index (row·2 + column)·c + channel."""
    x = pack(z)
    return x.reshape(*x.shape[:3], -1, 4).swapaxes(-1, -2).reshape(x.shape)


def from_patches(x: mx.array) -> mx.array:
    """The way back from `patches`: (b, gh, gw, 4c) → (b, 2·gh, 2·gw, c)"""
    return unpack(x.reshape(*x.shape[:3], 4, -1).swapaxes(-1, -2).reshape(x.shape))


@dataclass(frozen=True)
class ScaledAutoencoderConfig(AutoencoderConfig):
    """FLUX.1's autoencoder in numbers."""

    latent_channels: int = 16
    scale: float = 0.3611
    shift: float = 0.1159


class ScaledAutoencoder(nn.Module):
    """Pictures to latents of an eighth of the height and width, in patches of 2×2, and back."""

    def __init__(self, cfg: ScaledAutoencoderConfig):
        super().__init__()
        self.encoder, self.decoder, self._cfg = Encoder(cfg), Decoder(cfg), cfg
        self.encoder.quant_conv = self.decoder.post_quant_conv = nn.Identity()

    def encode(self, pixels: mx.array) -> mx.array:
        """Pixels in [-1, 1], (b, H, W, 3), sides multiples of 16 → patches (b, H/16, W/16, 64)."""
        mean, _ = mx.split(self.encoder(pixels), 2, axis=-1)
        return patches((mean - self._cfg.shift) * self._cfg.scale)

    def decode(self, latents: mx.array) -> mx.array:
        """Patches (b, gh, gw, 64) → pixels (b, 16·gh, 16·gw, 3), about [-1, 1], not clamped."""
        return self.decoder(from_patches(latents) / self._cfg.scale + self._cfg.shift)


def caption_ids(m: int) -> mx.array:
    """(m, 3) coordinates (place, row, column) of m caption tokens, padding included: (1 + k, 0, 0)."""
    k = mx.arange(1, m + 1)
    return mx.stack([k, mx.zeros_like(k), mx.zeros_like(k)], axis=-1)


def picture_ids(gh: int, gw: int, m: int) -> mx.array:
    """(gh·gw, 3) coordinates behind a caption of m tokens, row by row: (m + 1, row, column); pads at (0, 0, 0)."""
    ids = image_ids(gh, gw, t=m + 1)[:, :3]
    return mx.pad(ids, [(0, -len(ids) % 32), (0, 0)])


def fill_up(x: mx.array, token: mx.array) -> mx.array:
    """Rows up to a multiple of 32, the new ones all `token` (1, d). (b, s, d) → (b, 32·k, d)"""
    b, s, d = x.shape
    return mx.concatenate([x, mx.broadcast_to(token, (b, -s % 32, d))], axis=1)


class SelfAttention(nn.Module):
    """Every token attends to every token; queries and keys normed per head and turned. (b, s, d) → (b, s, d)"""

    def __init__(self, cfg: ZImageConfig):
        super().__init__()
        self.qkv, self.out = linear(cfg.d, 3 * cfg.d), linear(cfg.d, cfg.d)
        self.q_norm, self.k_norm = RMSNorm(cfg.hd, cfg.eps), RMSNorm(cfg.hd, cfg.eps)
        self._nh = cfg.heads

    def __call__(self, x: mx.array, rope: tuple[mx.array, mx.array]) -> mx.array:
        q, k, v = split_heads(self.qkv(x), 3, self._nh)  # (b, nh, s, hd) each
        return self.out(roped_attention(self.q_norm(q), self.k_norm(k), v, rope))


class FeedForward(nn.Module):
    """SwiGLU with the checkpoint's names: silu(w1)·w3, and w2 down again. (b, s, d) → (b, s, d)"""

    def __init__(self, d: int):
        super().__init__()
        d_mlp = int(d / 3 * 8)
        self.w1, self.w2, self.w3 = linear(d, d_mlp), linear(d_mlp, d), linear(d, d_mlp)

    def __call__(self, x: mx.array) -> mx.array:
        return self.w2(silu(self.w1(x)) * self.w3(x))


class SandwichBlock(nn.Module):
    """Attention, then MLP, each between two norms. x (b, s, d), vec (b, d_vec) or None → (b, s, d)"""

    def __init__(self, cfg: ZImageConfig, timed: bool = True):
        super().__init__()
        self.attention, self.feed_forward = SelfAttention(cfg), FeedForward(cfg.d)
        self.attention_norm1, self.attention_norm2 = RMSNorm(cfg.d, cfg.eps), RMSNorm(cfg.d, cfg.eps)
        self.ffn_norm1, self.ffn_norm2 = RMSNorm(cfg.d, cfg.eps), RMSNorm(cfg.d, cfg.eps)
        if timed:
            self.adaLN_modulation = [nn.Linear(cfg.d_vec, 4 * cfg.d)]

    def steer(self, vec: mx.array | None) -> tuple:
        """Scale and gate (b, 1, d) for attention, then for the MLP; without a time nothing is scaled or held back."""
        if vec is None:
            return 0, 1, 0, 1
        scale1, gate1, scale2, gate2 = mx.split(self.adaLN_modulation[0](vec)[:, None], 4, axis=-1)
        return scale1, mx.tanh(gate1), scale2, mx.tanh(gate2)

    def __call__(self, x: mx.array, rope: tuple[mx.array, mx.array], vec: mx.array | None = None) -> mx.array:
        scale1, gate1, scale2, gate2 = self.steer(vec)
        x = x + gate1 * self.attention_norm2(self.attention((1 + scale1) * self.attention_norm1(x), rope))
        return x + gate2 * self.ffn_norm2(self.feed_forward((1 + scale2) * self.ffn_norm1(x)))


class TimeMLP(nn.Module):
    """Waves of the time through two layers. (b, 256) → (b, d_vec)"""

    def __init__(self, d_vec: int):
        super().__init__()
        self.mlp = [nn.Linear(256, 1024), nn.SiLU(), nn.Linear(1024, d_vec)]

    def __call__(self, x: mx.array) -> mx.array:
        return chain(self.mlp, x)


class ScaleFinalLayer(nn.Module):
    """Norm with a last scale, no shift, then back to patches. (b, n, d) → (b, n, d_latent)"""

    def __init__(self, cfg: ZImageConfig):
        super().__init__()
        self.adaLN_modulation = [nn.SiLU(), nn.Linear(cfg.d_vec, cfg.d)]
        self.linear = nn.Linear(cfg.d, cfg.d_latent)

    def __call__(self, x: mx.array, vec: mx.array) -> mx.array:
        return self.linear(modulate(x, 0, chain(self.adaLN_modulation, vec)[:, None]))


class ZImageParts(nn.Module):
    """What the transformer holds, under the released names, and the rotations of its rows."""

    def __init__(self, cfg: ZImageConfig):
        super().__init__()
        self._cfg = cfg
        self.x_embedder, self.x_pad_token = nn.Linear(cfg.d_latent, cfg.d), mx.zeros((1, cfg.d))
        self.cap_embedder = [RMSNorm(cfg.d_text, cfg.eps), nn.Linear(cfg.d_text, cfg.d)]
        self.cap_pad_token, self.t_embedder = mx.zeros((1, cfg.d)), TimeMLP(cfg.d_vec)
        self.noise_refiner = [SandwichBlock(cfg) for _ in range(cfg.refiners)]
        self.context_refiner = [SandwichBlock(cfg, timed=False) for _ in range(cfg.refiners)]
        self.layers = [SandwichBlock(cfg) for _ in range(cfg.layers)]
        self.final_layer = ScaleFinalLayer(cfg)

    def rope(self, grid: tuple[int, int], m: int) -> tuple[mx.array, mx.array]:
        """The rotations of all rows, the picture's first, for a refined caption of m rows."""
        return rope_table(mx.concatenate([picture_ids(*grid, m), caption_ids(m)]), self._cfg.axes, self._cfg.theta)


class ZImageTransformer(ZImageParts):
    """One stream: noisy patches, a refined caption and a time in; out comes where the picture lies."""

    def refine(self, txt: mx.array) -> mx.array:
        """A caption's features (b, m, d_text) → its rows in the stream, (b, 32·k, d): once per prompt."""
        x = fill_up(chain(self.cap_embedder, txt), self.cap_pad_token)
        rope = rope_table(caption_ids(x.shape[1]), self._cfg.axes, self._cfg.theta)
        for block in self.context_refiner:
            x = block(x, rope)
        return x

    def __call__(self, img: mx.array, caption: mx.array, t: float | mx.array, rope) -> mx.array:
        """img (b, n, 64), caption from `refine`, t from 0 (noise) to 1 (picture), → picture − noise (b, n, 64)"""
        t = mx.broadcast_to(mx.array(t, dtype=mx.float32), (len(img),))
        vec = self.t_embedder(time_features(t).astype(img.dtype))  # (b, d_vec)
        x = fill_up(self.x_embedder(img), self.x_pad_token)
        for block in self.noise_refiner:
            x = block(x, [table[: x.shape[1]] for table in rope], vec)
        x = mx.concatenate([x, caption], axis=1)  # the picture first
        for block in self.layers:
            x = block(x, rope, vec)
        return self.final_layer(x[:, : img.shape[1]], vec)


def static_schedule(steps: int, shift: float = 3.0) -> list[float]:
    """steps + 1 noise levels from 1 down to 0, shifted by the same amount for pictures of all sizes."""
    ts = [1 - i / steps for i in range(steps)]
    return [shift * t / (1 + (shift - 1) * t) for t in ts] + [0.0]


def sister_field(
    transformer: ZImageTransformer, captions: list[mx.array], grid: tuple[int, int]
) -> Callable[[mx.array, float], mx.array]:
    """Where to go from latents x (b, n, 64) at noise level t, as a function of (x, t): d x / d t.

    captions: the features of each picture's prompt, (1, m, d_text), m its own number of tokens.
    """
    refined = [transformer.refine(txt) for txt in captions]
    ropes = {m: transformer.rope(grid, m) for m in {txt.shape[1] for txt in refined}}
    mx.eval(refined, ropes)

    def velocity(x: mx.array, t: float) -> mx.array:
        x = x.astype(captions[0].dtype)
        rows = [-transformer(x[i : i + 1], txt, 1 - t, ropes[txt.shape[1]]) for i, txt in enumerate(refined)]
        return mx.concatenate(rows)

    return velocity
