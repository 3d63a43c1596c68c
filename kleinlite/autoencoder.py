"""The autoencoder.

We build the network that turns a picture into a small grid of numbers and back, and look inside those numbers.

Promoted from notebooks/01_autoencoder.ipynb: edit there, then run `make promote`. (seal 54fb84b3)
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from .cpu import affine, attention, by_rows, conv2d, silu, upsample_conv2d

__all__ = [
    "AutoencoderConfig",
    "GroupNorm",
    "Conv",
    "conv3",
    "norm_silu_conv",
    "ResBlock",
    "AttnBlock",
    "Downsample",
    "Upsample",
    "Level",
    "Mid",
    "Encoder",
    "Decoder",
    "pack",
    "unpack",
    "LatentNorm",
    "Autoencoder",
]


@dataclass(frozen=True)
class AutoencoderConfig:
    """The autoencoder in numbers. The defaults are the released 4B and 9B models'."""

    channels: tuple[int, ...] = (128, 256, 512, 512)  # per level, each half as tall and wide
    decoder_channels: tuple[int, ...] | None = None  # None: the same; small decoder: (96, 192, 384, 384)
    layers: int = 2  # residual blocks per encoder level; the decoder has one more
    latent_channels: int = 32
    groups: int = 32  # GroupNorm groups
    bn_eps: float = 1e-4

    @classmethod
    def tiny(cls) -> "AutoencoderConfig":
        """A few thousand weights, for tests and for looking at shapes."""
        return cls(channels=(8, 16, 24, 24), layers=1, groups=4)


class GroupNorm(nn.Module):
    """Mean 0 and variance 1 (eps 1e-6) over the pixels and channels of each group, then scale and shift per channel.

    (b, H, W, c) → same. Sums go row by row: a float32 sum over a whole large picture loses digits on a CPU.
    """

    def __init__(self, c: int, groups: int):
        super().__init__()
        self.weight, self.bias, self._groups = mx.ones((c,)), mx.zeros((c,)), groups

    def mean(self, x: mx.array) -> mx.array:
        """The mean of each group, repeated for its channels: (b, H, W, c) → (b, 1, 1, c)"""
        b, _, _, c = x.shape
        rows = x.mean(axis=2).mean(axis=1).reshape(b, self._groups, -1)  # (b, groups, channels of a group)
        return mx.repeat(rows.mean(axis=-1), c // self._groups, axis=-1)[:, None, None]

    def fit(self, x: mx.array) -> Callable[[mx.array], mx.array]:
        """The norm of x as a function of any of its pixels: mean and variance are those of the whole."""
        mean = self.mean(x)
        squares = lambda x: mx.square(x - mean).mean(axis=2, keepdims=True)
        scale = self.weight / mx.sqrt(self.mean(squares(x) if self.training else by_rows(squares, x)) + 1e-6)
        return lambda x: affine(x, mean, scale, self.bias)

    def __call__(self, x: mx.array) -> mx.array:
        return self.fit(x)(x)


class Conv(nn.Conv2d):
    """MLX's layer with our `conv2d`, except in training: gradients want the whole at once."""

    def __call__(self, x: mx.array, before: Callable[[mx.array], mx.array] = lambda x: x) -> mx.array:
        if self.training:
            return super().__call__(before(x))
        return conv2d(x, self.weight, self.stride[0], self.padding[0], self.bias, before)


def conv3(c_in: int, c_out: int) -> Conv:
    """3×3 convolution that keeps height and width."""
    return Conv(c_in, c_out, 3, padding=1)


def norm_silu_conv(norm: GroupNorm, conv: Conv, x: mx.array) -> mx.array:
    """conv(silu(norm(x))), except that norm and SiLU may wait until the convolution reads a row."""
    normed = norm.fit(x)
    return conv(x, lambda rows: silu(normed(rows)))


class ResBlock(nn.Module):
    """Norm, SiLU, conv, twice, added to the input. (b, H, W, c_in) → (b, H, W, c_out)"""

    def __init__(self, c_in: int, c_out: int, groups: int):
        super().__init__()
        self.norm1, self.conv1 = GroupNorm(c_in, groups), conv3(c_in, c_out)
        self.norm2, self.conv2 = GroupNorm(c_out, groups), conv3(c_out, c_out)
        if c_in != c_out:
            self.nin_shortcut = Conv(c_in, c_out, 1)

    def __call__(self, x: mx.array) -> mx.array:
        h = norm_silu_conv(self.norm1, self.conv1, x)
        h = norm_silu_conv(self.norm2, self.conv2, h)
        return h + (self.nin_shortcut(x) if "nin_shortcut" in self else x)


class AttnBlock(nn.Module):
    """Every position attends to every other, one head. (b, H, W, c) → (b, H, W, c)"""

    def __init__(self, c: int, groups: int):
        super().__init__()
        self.norm = GroupNorm(c, groups)
        self.q, self.k, self.v, self.proj_out = (nn.Linear(c, c) for _ in range(4))

    def __call__(self, x: mx.array) -> mx.array:
        b, H, W, c = x.shape
        y = self.norm(x).reshape(b, 1, H * W, c)  # one head of size c
        h = attention(self.q(y), self.k(y), self.v(y), scale=c**-0.5)
        return x + self.proj_out(h.reshape(b, H, W, c))


class Downsample(nn.Module):
    """Half the height and width: zeros on the right and bottom only, then a stride-2 convolution."""

    def __init__(self, c: int):
        super().__init__()
        self.conv = Conv(c, c, 3, stride=2)

    def __call__(self, x: mx.array) -> mx.array:
        return self.conv(mx.pad(x, [(0, 0), (0, 1), (0, 1), (0, 0)]))


class Upsample(nn.Module):
    """Twice the height and width: each pixel repeated, then a convolution that smooths."""

    def __init__(self, c: int):
        super().__init__()
        self.conv = conv3(c, c)

    def __call__(self, x: mx.array) -> mx.array:
        if not self.training:
            return upsample_conv2d(x, self.conv.weight, self.conv.bias)
        return self.conv(mx.repeat(mx.repeat(x, 2, axis=1), 2, axis=2))


class Level(nn.Module):
    """The residual blocks that work at one resolution, and the step to the next, if there is one."""

    def __init__(self, c_in: int, c_out: int, layers: int, groups: int):
        super().__init__()
        self.block = [ResBlock(c_in if i == 0 else c_out, c_out, groups) for i in range(layers)]

    def layers(self) -> list[nn.Module]:
        return [*self.block, *(self[name] for name in ("downsample", "upsample") if name in self)]

    def __call__(self, x: mx.array) -> mx.array:
        for layer in self.layers():
            x = layer(x)
        return x


class Mid(nn.Module):
    """The coarsest level's middle: residual block, attention, residual block."""

    def __init__(self, c: int, groups: int):
        super().__init__()
        self.block_1, self.block_2 = ResBlock(c, c, groups), ResBlock(c, c, groups)
        self.attn_1 = AttnBlock(c, groups)

    def __call__(self, x: mx.array) -> mx.array:
        return self.block_2(self.attn_1(self.block_1(x)))


class Encoder(nn.Module):
    """Pixels (b, H, W, 3) → mean and log-variance, (b, H/8, W/8, 2·latent_channels)"""

    def __init__(self, cfg: AutoencoderConfig):
        super().__init__()
        ch, last = cfg.channels, len(cfg.channels) - 1
        self.conv_in = conv3(3, ch[0])
        self.down = [Level(ch[max(i - 1, 0)], c, cfg.layers, cfg.groups) for i, c in enumerate(ch)]
        for level, c in zip(self.down[:last], ch[:last]):
            level.downsample = Downsample(c)
        self.mid = Mid(ch[-1], cfg.groups)
        self.norm_out, self.conv_out = GroupNorm(ch[-1], cfg.groups), conv3(ch[-1], 2 * cfg.latent_channels)
        self.quant_conv = nn.Conv2d(2 * cfg.latent_channels, 2 * cfg.latent_channels, 1)

    def __call__(self, x: mx.array) -> mx.array:
        x = self.conv_in(x)
        for level in self.down:
            x = level(x)
        return self.quant_conv(norm_silu_conv(self.norm_out, self.conv_out, self.mid(x)))


class Decoder(nn.Module):
    """Latents (b, H/8, W/8, latent_channels) → pixels (b, H, W, 3)"""

    def __init__(self, cfg: AutoencoderConfig):
        super().__init__()
        ch = cfg.decoder_channels or cfg.channels
        last = len(ch) - 1
        self.post_quant_conv = Conv(cfg.latent_channels, cfg.latent_channels, 1)
        self.conv_in = conv3(cfg.latent_channels, ch[-1])
        self.mid = Mid(ch[-1], cfg.groups)
        # Level k works at 1/2^k of the picture's size and level `last` runs first: the checkpoint's numbering.
        self.up = [Level(ch[min(k + 1, last)], c, cfg.layers + 1, cfg.groups) for k, c in enumerate(ch)]
        for level, c in zip(self.up[1:], ch[1:]):
            level.upsample = Upsample(c)
        self.norm_out, self.conv_out = GroupNorm(ch[0], cfg.groups), conv3(ch[0], 3)

    def __call__(self, z: mx.array) -> mx.array:
        x = self.mid(self.conv_in(self.post_quant_conv(z)))
        for level in reversed(self.up):
            for layer in level.layers():  # not `level(x)`, in which a large x would stay until the last block
                x = layer(x)
        return norm_silu_conv(self.norm_out, self.conv_out, x)


def pack(z: mx.array) -> mx.array:
    """2×2 patches into channels: (b, 2·gh, 2·gw, c) → (b, gh, gw, 4c), channel index c·4 + row·2 + column."""
    b, h, w, c = z.shape
    z = z.reshape(b, h // 2, 2, w // 2, 2, c)  # (b, gh, row, gw, column, c)
    return z.transpose(0, 1, 3, 5, 2, 4).reshape(b, h // 2, w // 2, 4 * c)


def unpack(z: mx.array) -> mx.array:
    """The way back from `pack`: (b, gh, gw, 4c) → (b, 2·gh, 2·gw, c)"""
    b, gh, gw, c4 = z.shape
    z = z.reshape(b, gh, gw, c4 // 4, 2, 2)  # (b, gh, gw, c, row, column)
    return z.transpose(0, 1, 4, 2, 5, 3).reshape(b, 2 * gh, 2 * gw, c4 // 4)


class LatentNorm(nn.Module):
    """Per-channel mean and variance of packed latents over the training pictures; never learned, only measured."""

    def __init__(self, c: int, eps: float):
        super().__init__()
        self.running_mean, self.running_var = mx.zeros((c,)), mx.ones((c,))
        self._eps = eps
        self.freeze()

    def normalise(self, z: mx.array) -> mx.array:
        return (z - self.running_mean) / mx.sqrt(self.running_var + self._eps)

    def denormalise(self, z: mx.array) -> mx.array:
        return z * mx.sqrt(self.running_var + self._eps) + self.running_mean


class Autoencoder(nn.Module):
    """Pictures to latents of a sixteenth of the height and width, and back."""

    def __init__(self, cfg: AutoencoderConfig):
        super().__init__()
        self.encoder, self.decoder = Encoder(cfg), Decoder(cfg)
        self.bn = LatentNorm(4 * cfg.latent_channels, cfg.bn_eps)

    def encode(self, pixels: mx.array) -> mx.array:
        """Pixels in [-1, 1], (b, H, W, 3), sides multiples of 16 → packed, normalised latents (b, H/16, W/16, 128)."""
        mean, _ = mx.split(self.encoder(pixels), 2, axis=-1)  # the log-variance only matters while training
        return self.bn.normalise(pack(mean))

    def decode(self, latents: mx.array) -> mx.array:
        """Packed, normalised latents (b, gh, gw, 128) → pixels (b, 16·gh, 16·gw, 3), about [-1, 1], not clamped."""
        return self.decoder(unpack(self.bn.denormalise(latents)))
