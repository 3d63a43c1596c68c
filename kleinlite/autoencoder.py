"""The autoencoder.

What can be thrown away without being missed? We build the network that turns a picture into a small grid of
numbers, and back.

Letters: b pictures, H and W pixels, c channels, gh and gw rows and columns of latent tokens, 16 pixels each.

Sources: the released FLUX.2 autoencoder (names, shapes, norm of the latents), as diffusers' AutoencoderKLFlux2 runs
it.

Promoted from notebooks/01_autoencoder.ipynb: edit there, then run `make promote`. (seal e5e0253c)
"""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

__all__ = [
    "AutoencoderConfig", "GroupNorm", "conv3", "ResBlock", "AttnBlock", "Downsample", "Upsample", "Level", "Mid",
    "Encoder", "Decoder", "patchify", "unpatchify", "LatentBatchNorm", "Autoencoder",
]  # fmt: skip


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
        """175,059 weights, for tests and for looking at shapes."""
        return cls(channels=(8, 16, 24, 24), layers=1, groups=4)


class GroupNorm(nn.Module):
    """Mean 0 and variance 1 (eps 1e-6) over the pixels and channels of each group, then scale and shift per channel.

    (b, H, W, c) → same. Sums go row by row: a float32 sum over a whole large picture loses digits.
    Wu and He 2018, arXiv 1803.08494.
    """

    def __init__(self, c: int, groups: int):
        super().__init__()
        self.weight = mx.ones((c,))
        self.bias = mx.zeros((c,))
        self.groups = groups

    def group_mean(self, x: mx.array) -> mx.array:
        """The mean of each group, repeated for its channels: (b, H, W, c) → (b, 1, 1, c)"""
        b, _, _, c = x.shape
        channels = x.mean(axis=2).mean(axis=1).reshape(b, self.groups, -1)  # (b, groups, channels of a group)
        return mx.repeat(channels.mean(axis=-1), c // self.groups, axis=-1)[:, None, None]

    def __call__(self, x: mx.array) -> mx.array:
        mean = self.group_mean(x)
        variance = self.group_mean(mx.square(x - mean))
        return (x - mean) * (self.weight / mx.sqrt(variance + 1e-6)) + self.bias


def conv3(c_in: int, c_out: int) -> nn.Conv2d:
    """3×3 convolution that keeps height and width."""
    return nn.Conv2d(c_in, c_out, 3, padding=1)


class ResBlock(nn.Module):
    """Norm, SiLU, conv, twice, added to the input. (b, H, W, c_in) → (b, H, W, c_out)"""

    def __init__(self, c_in: int, c_out: int, groups: int):
        super().__init__()
        self.norm1 = GroupNorm(c_in, groups)
        self.conv1 = conv3(c_in, c_out)
        self.norm2 = GroupNorm(c_out, groups)
        self.conv2 = conv3(c_out, c_out)
        self.nin_shortcut = nn.Identity() if c_in == c_out else nn.Conv2d(c_in, c_out, 1)

    def __call__(self, x: mx.array) -> mx.array:
        h = self.conv1(nn.silu(self.norm1(x)))
        h = self.conv2(nn.silu(self.norm2(h)))
        return self.nin_shortcut(x) + h


class AttnBlock(nn.Module):
    """Every position attends to every other, one head. (b, H, W, c) → (b, H, W, c)"""

    def __init__(self, c: int, groups: int):
        super().__init__()
        self.norm = GroupNorm(c, groups)
        self.q = nn.Linear(c, c)
        self.k = nn.Linear(c, c)
        self.v = nn.Linear(c, c)
        self.proj_out = nn.Linear(c, c)

    def __call__(self, x: mx.array) -> mx.array:
        b, H, W, c = x.shape
        y = self.norm(x).reshape(b, 1, H * W, c)  # one head of size c
        h = mx.fast.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y), scale=c**-0.5)
        return x + self.proj_out(h.reshape(b, H, W, c))


class Downsample(nn.Module):
    """Half the height and width: zeros on the right and bottom only, then a stride-2 convolution."""

    def __init__(self, c: int):
        super().__init__()
        self.conv = nn.Conv2d(c, c, 3, stride=2)

    def __call__(self, x: mx.array) -> mx.array:
        return self.conv(mx.pad(x, [(0, 0), (0, 1), (0, 1), (0, 0)]))


class Upsample(nn.Module):
    """Twice the height and width: each pixel repeated, then a convolution that smooths."""

    def __init__(self, c: int):
        super().__init__()
        self.conv = conv3(c, c)

    def __call__(self, x: mx.array) -> mx.array:
        x = mx.repeat(x, 2, axis=1)
        x = mx.repeat(x, 2, axis=2)
        return self.conv(x)


class Level(nn.Module):
    """The residual blocks that work at one resolution, then the step to the next, if there is one."""

    def __init__(
        self, c_in: int, c_out: int, layers: int, groups: int,
        downsample: Downsample | None = None, upsample: Upsample | None = None,
    ):  # fmt: skip
        super().__init__()
        self.block = [ResBlock(c_in if i == 0 else c_out, c_out, groups) for i in range(layers)]
        self.downsample = downsample or nn.Identity()
        self.upsample = upsample or nn.Identity()

    def __call__(self, x: mx.array) -> mx.array:
        for block in self.block:
            x = block(x)
        return self.upsample(self.downsample(x))


class Mid(nn.Module):
    """The coarsest level's middle: residual block, attention, residual block."""

    def __init__(self, c: int, groups: int):
        super().__init__()
        self.block_1 = ResBlock(c, c, groups)
        self.attn_1 = AttnBlock(c, groups)
        self.block_2 = ResBlock(c, c, groups)

    def __call__(self, x: mx.array) -> mx.array:
        return self.block_2(self.attn_1(self.block_1(x)))


class Encoder(nn.Module):
    """Pixels (b, H, W, 3) → mean and log-variance, (b, H/8, W/8, 2·latent_channels)"""

    def __init__(self, cfg: AutoencoderConfig):
        super().__init__()
        ch = cfg.channels
        last = len(ch) - 1
        self.conv_in = conv3(3, ch[0])
        self.down = [
            Level(ch[max(k - 1, 0)], c, cfg.layers, cfg.groups, downsample=Downsample(c) if k < last else None)
            for k, c in enumerate(ch)
        ]
        self.mid = Mid(ch[-1], cfg.groups)
        self.norm_out = GroupNorm(ch[-1], cfg.groups)
        self.conv_out = conv3(ch[-1], 2 * cfg.latent_channels)
        self.quant_conv = nn.Conv2d(2 * cfg.latent_channels, 2 * cfg.latent_channels, 1)

    def __call__(self, x: mx.array) -> mx.array:
        x = self.conv_in(x)
        for level in self.down:
            x = level(x)
        x = self.mid(x)
        return self.quant_conv(self.conv_out(nn.silu(self.norm_out(x))))


class Decoder(nn.Module):
    """Latents (b, H/8, W/8, latent_channels) → pixels (b, H, W, 3)"""

    def __init__(self, cfg: AutoencoderConfig):
        super().__init__()
        ch = cfg.decoder_channels or cfg.channels
        last = len(ch) - 1
        self.post_quant_conv = nn.Conv2d(cfg.latent_channels, cfg.latent_channels, 1)
        self.conv_in = conv3(cfg.latent_channels, ch[-1])
        self.mid = Mid(ch[-1], cfg.groups)
        # Level k works at 1/2^k of the picture's size and level `last` runs first: the checkpoint's numbering.
        self.up = [
            Level(ch[min(k + 1, last)], c, cfg.layers + 1, cfg.groups, upsample=Upsample(c) if k > 0 else None)
            for k, c in enumerate(ch)
        ]
        self.norm_out = GroupNorm(ch[0], cfg.groups)
        self.conv_out = conv3(ch[0], 3)

    def __call__(self, z: mx.array) -> mx.array:
        x = self.mid(self.conv_in(self.post_quant_conv(z)))
        for level in reversed(self.up):
            x = level(x)
        return self.conv_out(nn.silu(self.norm_out(x)))


def patchify(z: mx.array) -> mx.array:
    """2×2 patches into channels: (b, 2·gh, 2·gw, c) → (b, gh, gw, 4c), channel index c·4 + row·2 + column."""
    b, h, w, c = z.shape
    z = z.reshape(b, h // 2, 2, w // 2, 2, c)  # (b, gh, row, gw, column, c)
    return z.transpose(0, 1, 3, 5, 2, 4).reshape(b, h // 2, w // 2, 4 * c)


def unpatchify(z: mx.array) -> mx.array:
    """The way back from `patchify`: (b, gh, gw, 4c) → (b, 2·gh, 2·gw, c)"""
    b, gh, gw, c4 = z.shape
    z = z.reshape(b, gh, gw, c4 // 4, 2, 2)  # (b, gh, gw, c, row, column)
    return z.transpose(0, 1, 4, 2, 5, 3).reshape(b, 2 * gh, 2 * gw, c4 // 4)


class LatentBatchNorm(nn.Module):
    """Per-channel mean and variance of patchified latents over the training pictures; measured, never learned."""

    def __init__(self, c: int, eps: float):
        super().__init__()
        self.running_mean = mx.zeros((c,))
        self.running_var = mx.ones((c,))
        self.eps = eps
        self.freeze()

    def normalize(self, z: mx.array) -> mx.array:
        """(z - mean) / sqrt(var + eps), channel by channel. (b, gh, gw, c) → same"""
        return (z - self.running_mean) / mx.sqrt(self.running_var + self.eps)

    def denormalize(self, z: mx.array) -> mx.array:
        """The way back from `normalize`."""
        return z * mx.sqrt(self.running_var + self.eps) + self.running_mean


class Autoencoder(nn.Module):
    """Pictures to latents of a sixteenth of the height and width, and back."""

    def __init__(self, cfg: AutoencoderConfig):
        super().__init__()
        self.encoder = Encoder(cfg)
        self.decoder = Decoder(cfg)
        self.bn = LatentBatchNorm(4 * cfg.latent_channels, cfg.bn_eps)

    def encode(self, pixels: mx.array) -> mx.array:
        """Pixels in [-1, 1], (b, H, W, 3), sides multiples of 16 → normalized, patchified latents (b, gh, gw, 128)."""
        mean, _ = mx.split(self.encoder(pixels), 2, axis=-1)  # the log-variance only matters while training
        return self.bn.normalize(patchify(mean))

    def decode(self, latents: mx.array) -> mx.array:
        """Patchified, normalized latents (b, gh, gw, 128) → pixels (b, 16·gh, 16·gw, 3), about [-1, 1], not clamped."""
        return self.decoder(unpatchify(self.bn.denormalize(latents)))
