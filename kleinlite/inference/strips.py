"""The autoencoder in strips: large pictures in little memory, on every device, with the numbers of chapter 1.

A picture of 1024 × 1024 pixels and 128 channels takes 0.5 GB, and a network that computes on whole pictures holds many
of them at once. Here a picture is a list of strips, some rows each. A layer makes one strip after the other:

- a 3 × 3 convolution reads one row more above and below;
- a group norm has the mean and the variance of the whole picture, which a pass over all strips finds before;
- attention takes some queries at a time, each with all keys;
- what has been read for the last time is let go, strip by strip. So a residual block holds two pictures at most;
- a very large upsampled picture is never there: its strips are made twice, once for the statistics and the shortcut
  and once for the convolution.

Only inference: gradients want the whole picture at once, so whoever trains does not call `use_strips`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..autoencoder import AttnBlock, Decoder, Downsample, Encoder, GroupNorm, Level, Mid, ResBlock, Upsample
from ..cpu import affine, conv2d, silu, upsample_conv2d
from ..models.families.taef2 import Taef2
from .memory_plan import KEPT_BYTES

__all__ = ["use_strips"]

SMALL_BYTES = 2**22  # of a picture
STRIP_BYTES = 2**23  # of a picture's rows at a time
SCORES_BYTES = 2**25  # of attention scores at a time

Rows = Callable[[mx.array], mx.array]


def use_strips(autoencoder: nn.Module) -> None:
    """Let a loaded autoencoder's encoder and decoder work in strips. A second call changes nothing.

    TAEF2's decoder pools over whole pictures, and is small enough for them: there each convolution goes strip by strip.
    """
    for part in autoencoder.modules():
        if type(part) is Encoder:
            part.__class__ = StripEncoder
        elif type(part) is Decoder:
            part.__class__ = StripDecoder
        elif isinstance(autoencoder, Taef2) and type(part) is nn.Conv2d:
            part.__class__ = StripConv2d


def is_small(b: int, height: int, width: int, c: int) -> bool:
    """Whether a picture is that of a small world: then chapter 1's own code runs, and a line changed there shows."""
    return 4 * b * height * width * c <= SMALL_BYTES


class StripConv2d(nn.Conv2d):
    """`nn.Conv2d`, as quick as this machine has it."""

    def __call__(self, x: mx.array) -> mx.array:
        return conv2d(x, self.weight, self.stride[0], self.padding[0], self.bias if "bias" in self else 0.0)


class StripEncoder(Encoder):
    def __call__(self, x: mx.array) -> mx.array:
        b, height, width, _ = x.shape
        if is_small(b, height, width, self.conv_in.weight.shape[0]):
            return super().__call__(x)
        picture = conv_strips(self.conv_in, cut(x, self.conv_in.weight.shape[0]))
        for level in self.down:
            picture = run_blocks(level, picture)
            if isinstance(level.downsample, Downsample):
                picture = downsample_strips(level.downsample, picture)
        picture = run_mid(self.mid, picture)
        return self.quant_conv(join(norm_silu_conv(self.norm_out, self.conv_out, picture)))


class StripDecoder(Decoder):
    def __call__(self, z: mx.array) -> mx.array:
        b, h, w, _ = z.shape
        if is_small(b, 8 * h, 8 * w, self.conv_out.weight.shape[-1]):
            return super().__call__(z)
        z = self.post_quant_conv(z)
        picture = run_mid(self.mid, conv_strips(self.conv_in, cut(z, self.conv_in.weight.shape[0])))
        for level in reversed(self.up):
            picture = run_blocks(level, picture)
            if isinstance(level.upsample, Upsample):
                picture = upsample_strips(level.upsample, picture)
        return join(norm_silu_conv(self.norm_out, self.conv_out, picture))


class Picture:
    """A picture (b, H, W, c) as strips (b, rows, W, c), from top to bottom; None for one that is not read any more."""

    def __init__(self, strips: list[mx.array]):
        self.strips: list[Any] = list(strips)

    def __len__(self) -> int:
        return len(self.strips)

    def with_neighbors(self, i: int) -> tuple[mx.array, int, int]:
        """Strip i with the row above and the row below it, and how many of these there are: 0 at the picture's ends."""
        top = int(i > 0)
        bottom = int(i < len(self) - 1)
        above = [self.strips[i - 1][:, -1:]] if top else []
        below = [self.strips[i + 1][:, :1]] if bottom else []
        return mx.concatenate([*above, self.strips[i], *below], axis=1), top, bottom

    def windows(self) -> Iterator[tuple[mx.array, int, int]]:
        """The same of one strip after the other; lets go of each once it has been read for the last time."""
        for i in range(len(self)):
            yield self.with_neighbors(i)
            if i > 0:
                self.strips[i - 1] = None


class Upsampled(Picture):
    """An upsampled picture that is never there as a whole: a strip is made when it is read."""

    def __init__(self, upsample: Upsample, picture: Picture):
        super().__init__([])
        self.upsample = upsample
        self.strips = picture.strips

    def with_neighbors(self, i: int) -> tuple[mx.array, int, int]:
        x, top, bottom = super().with_neighbors(i)
        x = upsample_conv2d(x, self.upsample.conv.weight, self.upsample.conv.bias)
        return x[:, top : x.shape[1] - bottom], top, bottom  # of the two rows that a neighbor gives, the inner one


# ---------------------------------------------------------------- cutting and joining


def strip_rows(b: int, width: int, c: int) -> int:
    """Rows of a strip: an even number, so that halves and doubles of strips are strips."""
    return max(2, STRIP_BYTES // (4 * b * width * c) // 2 * 2)


def cut(x: mx.array, c: int | None = None) -> Picture:
    """A picture (b, H, W, _) in strips, of a size that is right for `c` channels."""
    b, H, W, channels = x.shape
    rows = strip_rows(b, W, max(c or 0, channels))
    return Picture([x[:, first : first + rows] for first in range(0, H, rows)])


def join(picture: Picture) -> mx.array:
    if len(picture) == 1:
        return picture.strips[0]
    return mx.concatenate(picture.strips, axis=1)


def finished(strips: list[mx.array], strip: mx.array, count: int) -> None:
    """Append a strip; where it is not the only one it is computed now, before the next begins."""
    if count > 1:
        mx.eval(strip)
    strips.append(strip)


# ---------------------------------------------------------------- layers


def conv3_rows(conv: nn.Conv2d, x: mx.array, top: int, bottom: int) -> mx.array:
    """A 3 × 3 convolution of rows: zeros left and right, and above or below where no neighbor row came along."""
    x = mx.pad(x, [(0, 0), (1 - top, 1 - bottom), (1, 1), (0, 0)])
    return conv2d(x, conv.weight, bias=conv.bias)


def conv_strips(conv: nn.Conv2d, picture: Picture, before: Rows | None = None) -> Picture:
    """conv(before(picture)); lets go of the picture."""
    strips: list[mx.array] = []
    for x, top, bottom in picture.windows():
        if before is not None:
            x = before(x)
        finished(strips, conv3_rows(conv, x, top, bottom), len(picture))
    return Picture(strips)


def row_statistics(x: mx.array) -> tuple[mx.array, mx.array]:
    """Mean and variance of each row and channel: (b, rows, W, c) → twice (b, rows, 1, c)"""
    mean = x.mean(axis=2, keepdims=True)
    return mean, mx.square(x - mean).mean(axis=2, keepdims=True)


def fitted(norm: GroupNorm, statistics: list[tuple[mx.array, mx.array]]) -> Rows:
    """silu(norm(·)) for any rows of the picture whose rows' means and variances these are.

    The variance of a whole is the mean of its rows' variances and of their means' squared distances from its mean.
    """
    row_means = mx.concatenate([mean for mean, _ in statistics], axis=1)
    row_variances = mx.concatenate([variance for _, variance in statistics], axis=1)
    mean = norm.group_mean(row_means)
    scale = norm.weight / mx.sqrt(norm.group_mean(row_variances + mx.square(row_means - mean)) + 1e-6)
    shift = norm.bias
    mx.eval(mean, scale)
    return lambda x: affine(x, mean, scale, shift)


def fit(norm: GroupNorm, picture: Picture) -> Rows:
    """The norm, as a function of any rows of this picture."""
    statistics = []
    for strip in picture.strips:
        rows = row_statistics(strip)
        if len(picture) > 1:
            mx.eval(rows)
        statistics.append(rows)
    return fitted(norm, statistics)


def norm_silu_conv(norm: GroupNorm, conv: nn.Conv2d, picture: Picture) -> Picture:
    """conv(silu(norm(picture))); lets go of the picture."""
    normed = fit(norm, picture)
    return conv_strips(conv, picture, lambda x: silu(normed(x)))


def shortcut(block: ResBlock, x: mx.array) -> mx.array:
    if isinstance(block.nin_shortcut, nn.Identity):
        return x
    return conv2d(x, block.nin_shortcut.weight, bias=block.nin_shortcut.bias)


def run_block(block: ResBlock, picture: Picture) -> Picture:
    """A residual block; lets go of the picture."""
    skipped: list[mx.array] = []  # the input, on its short way
    statistics = []
    for i in range(len(picture)):
        x, top, bottom = picture.with_neighbors(i) if isinstance(picture, Upsampled) else (picture.strips[i], 0, 0)
        x = x[:, top : x.shape[1] - bottom]
        rows = row_statistics(x)
        skipped.append(shortcut(block, x))
        if len(picture) > 1:
            mx.eval(rows, skipped[-1])
        statistics.append(rows)
    normed1 = fitted(block.norm1, statistics)
    h = conv_strips(block.conv1, picture, lambda x: silu(normed1(x)))
    picture.strips.clear()
    normed2 = fit(block.norm2, h)
    strips: list[mx.array] = []
    for i, (x, top, bottom) in enumerate(h.windows()):
        strip = skipped[i] + conv3_rows(block.conv2, silu(normed2(x)), top, bottom)
        finished(strips, strip, len(h))
        skipped[i] = strip
    return Picture(strips)


def run_blocks(level: Level, picture: Picture) -> Picture:
    for block in level.block:
        picture = run_block(block, picture)
    return picture


def run_mid(mid: Mid, picture: Picture) -> Picture:
    return run_block(mid.block_2, attend(mid.attn_1, run_block(mid.block_1, picture)))


def attend(block: AttnBlock, picture: Picture) -> Picture:
    """Attention over positions, some queries at a time."""
    normed = fit(block.norm, picture)
    x = join(picture)
    b, H, W, c = x.shape
    y = normed(x).reshape(b, 1, H * W, c)
    k = block.k(y)
    v = block.v(y)
    count = max(1, SCORES_BYTES // (4 * b * H * W))
    parts: list[mx.array] = []
    for first in range(0, H * W, count):
        q = block.q(y[:, :, first : first + count])
        h = mx.fast.scaled_dot_product_attention(q, k, v, scale=c**-0.5)
        finished(parts, block.proj_out(h), -(-H * W // count))
    return cut(x + mx.concatenate(parts, axis=2).reshape(b, H, W, c))


def downsample_strips(downsample: Downsample, picture: Picture) -> Picture:
    """Half the height and width; lets go of the picture."""
    strips: list[mx.array] = []
    for x, top, bottom in picture.windows():
        x = mx.pad(x[:, top:], [(0, 0), (0, 1 - bottom), (0, 1), (0, 0)])
        if x.shape[1] > 2:  # a last single row and its zeros fill no window
            finished(strips, conv2d(x, downsample.conv.weight, stride=2, bias=downsample.conv.bias), len(picture))
    return cut(join(Picture(strips)))


def upsample_strips(upsample: Upsample, picture: Picture) -> Picture:
    """Twice the height and width; lets go of the picture, or makes strips when they are read if it is very large."""
    b, _, W, c = picture.strips[0].shape
    rows = strip_rows(b, 2 * W, c) // 2
    pieces = []  # each holds on to its own strip only
    for x in picture.strips:
        pieces += [x[:, first : first + rows] for first in range(0, x.shape[1], rows)]
    nbytes = 4 * sum(piece.nbytes for piece in pieces)
    upsampled = Upsampled(upsample, Picture(pieces))
    del x, pieces
    picture.strips.clear()
    if nbytes > KEPT_BYTES:
        return upsampled
    strips: list[mx.array] = []
    for y, top, bottom in upsampled.windows():
        finished(strips, y[:, top : y.shape[1] - bottom], len(upsampled))
    return Picture(strips)
