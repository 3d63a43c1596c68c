"""The autoencoder in strips: large pictures in little memory, on every device, with the numbers of chapter 1.

A picture of 1024 × 1024 pixels and 128 channels takes 0.5 GB, and between two of them a layer makes several more. Here
a layer makes some rows at a time, so that what lies between is a strip and never a picture:

- a 3 × 3 convolution reads one row more above and below;
- a group norm has the mean and the variance of the whole picture, which a pass over all strips finds before;
- attention takes some queries at a time, each with all keys.

Only inference: gradients want the whole picture at once, so do not call `use_strips` when you train.
"""

from collections.abc import Callable, Iterable, Iterator

import mlx.core as mx
import mlx.nn as nn

from ..autoencoder import AttnBlock, Decoder, Downsample, Encoder, GroupNorm, Mid, ResBlock, Upsample
from ..cpu import affine, conv2d, silu, upsample_conv2d
from ..models.families.taef2 import Taef2

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
    """As chapter 1's, with its levels written out: a call for a level would keep what goes in until it is over."""

    def __call__(self, x: mx.array) -> mx.array:
        b, height, width, _ = x.shape
        if is_small(b, height, width, self.conv_in.weight.shape[0]):
            return super().__call__(x)
        x = convolve(self.conv_in, x)
        for level in self.down:
            for block in level.block:
                x = run_block(block, x)
            if isinstance(level.downsample, Downsample):
                x = halve(level.downsample, x)
        x = run_mid(self.mid, x)
        return self.quant_conv(convolve(self.conv_out, x, norm_silu(self.norm_out, x)))


class StripDecoder(Decoder):
    """The same."""

    def __call__(self, z: mx.array) -> mx.array:
        b, h, w, _ = z.shape
        if is_small(b, 8 * h, 8 * w, self.conv_out.weight.shape[-1]):
            return super().__call__(z)
        x = run_mid(self.mid, convolve(self.conv_in, self.post_quant_conv(z)))
        for level in reversed(self.up):
            for block in level.block:
                x = run_block(block, x)
            if isinstance(level.upsample, Upsample):
                x = double(level.upsample, x)
        return convolve(self.conv_out, x, norm_silu(self.norm_out, x))


# ---------------------------------------------------------------- strips


def windows(x: mx.array, c: int) -> Iterator[tuple[mx.array, int, int]]:
    """Strips of a picture (b, H, W, _) that becomes one of c channels, each with the rows above and below it.

    And how many of these there are: 0 at the picture's ends.
    """
    b, H, W, channels = x.shape
    rows = max(2, STRIP_BYTES // (4 * b * W * max(c, channels)) // 2 * 2)  # even, as a quick 3 × 3 convolution wants
    for first in range(0, H, rows):
        top = int(first > 0)
        bottom = int(first + rows < H)
        yield x[:, first - top : first + rows + bottom], top, bottom


def stack(strips: Iterable[mx.array], height: int) -> mx.array:
    """A picture from its strips, each computed and in its place before the next begins."""
    picture = mx.zeros((0,))  # until the first strip says how wide it is
    first = 0
    for strip in strips:
        b, rows, W, c = strip.shape
        if first == 0:
            picture = mx.zeros((b, height, W, c), strip.dtype)
        picture[:, first : first + rows] = strip
        mx.eval(picture)
        first += rows
    return picture


# ---------------------------------------------------------------- layers


def convolve(conv: nn.Conv2d, x: mx.array, before: Rows = lambda x: x) -> mx.array:
    """conv(before(x)) for a 3 × 3 convolution. Zeros are around the picture, not around a strip."""

    def strips() -> Iterator[mx.array]:
        for rows, top, bottom in windows(x, conv.weight.shape[0]):
            padded = mx.pad(before(rows), [(0, 0), (1 - top, 1 - bottom), (1, 1), (0, 0)])
            yield conv2d(padded, conv.weight, bias=conv.bias)

    return stack(strips(), x.shape[1])


def norm_silu(norm: GroupNorm, x: mx.array) -> Rows:
    """silu(norm(·)) of this picture, for any rows of it."""
    mean = norm.group_mean(x)
    squares = []
    for rows, top, bottom in windows(x, 0):
        inner = rows[:, top : rows.shape[1] - bottom]
        squares.append(mx.square(inner - mean).mean(axis=2, keepdims=True))
        mx.eval(squares[-1])
    scale = norm.weight / mx.sqrt(norm.group_mean(mx.concatenate(squares, axis=1)) + 1e-6)
    return lambda rows: silu(affine(rows, mean, scale, norm.bias))


def run_block(block: ResBlock, x: mx.array) -> mx.array:
    h = convolve(block.conv1, x, norm_silu(block.norm1, x))
    h = convolve(block.conv2, h, norm_silu(block.norm2, h))
    shortcut = block.nin_shortcut
    if not isinstance(shortcut, nn.Identity):
        x = conv2d(x, shortcut.weight, bias=shortcut.bias)
    h = x + h
    mx.eval(h)
    return h


def run_mid(mid: Mid, x: mx.array) -> mx.array:
    return run_block(mid.block_2, attend(mid.attn_1, run_block(mid.block_1, x)))


def attend(block: AttnBlock, x: mx.array) -> mx.array:
    """Attention over positions, some queries at a time."""
    b, H, W, c = x.shape
    y = block.norm(x).reshape(b, 1, H * W, c)
    k = block.k(y)
    v = block.v(y)
    count = max(1, SCORES_BYTES // (4 * b * H * W))
    parts: list[mx.array] = []
    for first in range(0, H * W, count):
        q = block.q(y[:, :, first : first + count])
        h = mx.fast.scaled_dot_product_attention(q, k, v, scale=c**-0.5)
        parts.append(block.proj_out(h))
        mx.eval(parts[-1])
    return x + mx.concatenate(parts, axis=2).reshape(b, H, W, c)


def halve(downsample: Downsample, x: mx.array) -> mx.array:
    """Half the height and width."""
    x = mx.pad(x, [(0, 0), (0, 1), (0, 1), (0, 0)])
    return conv2d(x, downsample.conv.weight, stride=2, bias=downsample.conv.bias)


def double(upsample: Upsample, x: mx.array) -> mx.array:
    """Twice the height and width. The two rows that come of a neighbor's row lack neighbors themselves, and go."""

    def strips() -> Iterator[mx.array]:
        for rows, top, bottom in windows(x, 4 * x.shape[3]):
            y = upsample_conv2d(rows, upsample.conv.weight, upsample.conv.bias)
            yield y[:, 2 * top : y.shape[1] - 2 * bottom]

    return stack(strips(), 2 * x.shape[1])
