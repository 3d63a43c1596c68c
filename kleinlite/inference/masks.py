"""Changing a part of a picture, or how much of it: masks, strength, extension, and the way back to its own pixels.

The steps of chapter 6 work on a canvas whose sides are multiples of 16. Here a picture of any size is put on one, and
what was drawn is cropped and pasted back, so that a pixel under a black mask is the one that was given, bit by bit.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from PIL import Image, ImageChops

from ..errors import UserError
from .picture_file import check_reference_size, to_rgb

__all__ = ["Change", "Extension", "plan_change", "count_skipped", "read_mask"]

Extension = tuple[int, int, int, int]  # pixels to be added on the left, the top, the right and the bottom
TOKEN = 16  # pixels on a side


@dataclass(frozen=True, eq=False)
class Change:
    """A picture to be changed, and how: what a request knows of it beside the references."""

    canvas: Image.Image  # RGB, sides multiples of 16: the picture, reflected at its edges where there is more room
    mask: Image.Image | None  # L, of the same size: white is drawn anew, black stays. None: everything is drawn anew
    box: tuple[int, int, int, int]  # left, top, right and bottom of the result on the canvas
    strength: float
    extend: Extension
    own_mask: bool  # whether the caller gave a mask; an extension has one in any case

    @property
    def size(self) -> tuple[int, int]:
        left, top, right, bottom = self.box
        return right - left, bottom - top

    def token_mask(self) -> mx.array | None:
        """1 where a token is drawn anew, 0 where it stays, (1, n, 1).

        As diffusers makes it: pixels to black and white, then bilinear without antialiasing, which reads four pixels of
        each token, those around its middle. So a token on an edge can be grey. The mask's own greys blend pixels.
        """
        if self.mask is None:
            return None
        width, height = self.mask.size
        white = to_array(self.mask) >= 128
        tokens = white.astype(mx.float32).reshape(height // TOKEN, TOKEN, width // TOKEN, TOKEN)
        middle = slice(TOKEN // 2 - 1, TOKEN // 2 + 1)
        return tokens[:, middle, :, middle].mean(axis=(1, 3)).reshape(1, -1, 1)

    def paste(self, drawn: Image.Image) -> Image.Image:
        """The result: what was drawn, where the mask is white; the picture itself, where it is black."""
        if self.mask is not None:
            drawn = Image.composite(drawn, self.canvas, self.mask)
        return drawn.crop(self.box)

    def metadata(self) -> dict[str, Any]:
        """What a picture remembers of it; not the mask itself, only that there was one."""
        facts: dict[str, Any] = {"width": self.size[0], "height": self.size[1], "strength": self.strength}
        if any(self.extend):
            facts["extend"] = list(self.extend)
        if self.own_mask:
            facts["mask"] = True
        return facts


def plan_change(images: Sequence[Image.Image], options: Mapping[str, Any]) -> Change | None:
    """What `mask`, `strength` and `extend` make of the first picture; None without any. Raises UserError."""
    mask = options.get("mask")
    strength = options.get("strength")
    extend = options.get("extend")
    if mask is None and strength is None and extend is None:
        return None
    if not images:
        name = "mask" if mask is not None else "strength" if strength is not None else "extend"
        raise UserError(f"{name} says how to change a picture, and there is none: give it as images=[picture].")
    strength = check_strength(1.0 if strength is None else strength)
    extend = check_extension((0, 0, 0, 0) if extend is None else extend)
    picture = check_reference_size(to_rgb(images[0]))
    own = None if mask is None else read_mask(mask, picture.size)
    if own is not None and not any(extend):
        check_levels(own)
    return place(picture, own, extend, strength)


def place(picture: Image.Image, own: Image.Image | None, extend: Extension, strength: float) -> Change:
    """The canvas of a picture, which begins where a token does, its mask and the place of the result on it."""
    left, top, right, bottom = extend
    width, height = picture.size
    before = round_up(left), round_up(top)
    size = round_up(before[0] + width + right), round_up(before[1] + height + bottom)
    after = size[0] - width - before[0], size[1] - height - before[1]
    mask = None
    if own is not None or any(extend):
        white = Image.new("L", size, 255)
        kept = reflect(own or Image.new("L", picture.size, 0), before, after)
        # On a side without an extension there is only padding, for which the mask goes on as the picture does.
        inner = (
            before[0] if left else 0,
            before[1] if top else 0,
            before[0] + width if right else size[0],
            before[1] + height if bottom else size[1],
        )
        white.paste(kept.crop(inner), inner)
        mask = white
    start = before[0] - left, before[1] - top
    box = (*start, start[0] + left + width + right, start[1] + top + height + bottom)
    return Change(reflect(picture, before, after), mask, box, strength, extend, own is not None)


def reflect(picture: Image.Image, before: tuple[int, int], after: tuple[int, int]) -> Image.Image:
    """More room to the left and the top (before) and to the right and the bottom (after), filled by reflection."""
    width, height = picture.size
    pixels = to_array(picture).reshape(height, width, -1)
    pixels = mx.take(pixels, reflected_indices(before[1], height, after[1]), axis=0)
    pixels = mx.take(pixels, reflected_indices(before[0], width, after[0]), axis=1)
    buffer: Any = pixels  # MLX's types do not say that an array is one
    return Image.frombytes(picture.mode, (pixels.shape[1], pixels.shape[0]), bytes(memoryview(buffer)))


def to_array(picture: Image.Image) -> mx.array:
    """All numbers of a picture behind each other, 0 to 255."""
    buffer: Any = memoryview(picture.tobytes())
    return mx.array(buffer)


def reflected_indices(before: int, count: int, after: int) -> mx.array:
    """… 2 1 | 0 1 2 … n-1 | n-2 n-3 …, turning back at each end as often as it takes."""
    places = mx.arange(-before, count + after) % (2 * count - 2)
    return mx.minimum(places, 2 * count - 2 - places)


def round_up(pixels: int) -> int:
    return -(-pixels // TOKEN) * TOKEN


# ---------------------------------------------------------------- checks


def read_mask(mask: Any, size: tuple[int, int]) -> Image.Image:
    """A mask as one channel of 8 bits, for a picture of this size. Raises UserError."""
    meaning = "white is drawn anew, black stays"
    if not isinstance(mask, Image.Image):
        hint = "make one with PIL.Image.open or fromarray"
        raise UserError(f"mask must be a picture, not a {type(mask).__name__}: {hint}; {meaning}.")
    if mask.has_transparency_data and min(mask.convert("RGBA").getchannel("A").tobytes()) < 255:
        raise UserError(f"The mask is transparent in places: fill it with black and white ({meaning}).")
    red, green, blue = to_rgb(mask, convert_colors=False).split()
    if ImageChops.difference(red, green).getbbox() or ImageChops.difference(red, blue).getbbox():
        raise UserError(f'The mask has colors: give one of greys, such as mask.convert("L") ({meaning}).')
    if red.size != size:
        wanted = f"{size[0]}×{size[1]}"
        raise UserError(
            f"The mask is {red.width}×{red.height} and the picture {wanted}: give a mask of the picture's size."
        )
    return red


def check_levels(mask: Image.Image) -> None:
    """Raises UserError for a mask that selects nothing, or everything."""
    low, high = mask.getextrema()
    if high == 0:
        raise UserError("The mask is all black, so that nothing would be drawn: paint white what is to change.")
    if low == 255:
        raise UserError("The mask is all white, so that nothing would stay: leave it out, or paint black what stays.")


def check_strength(strength: Any) -> float:
    if isinstance(strength, bool) or not isinstance(strength, numbers.Real):
        raise UserError(f"strength must be a number such as 0.6, not a {type(strength).__name__}.")
    strength = float(strength)
    if not 0 < strength <= 1:
        raise UserError(f"strength is a number above 0 (hardly a change) and up to 1 (all anew), not {strength:g}.")
    return strength


def check_extension(extend: Any) -> Extension:
    try:
        left, top, right, bottom = map(operator.index, extend)
    except (TypeError, ValueError):
        raise UserError(
            "extend takes four whole numbers of pixels (left, top, right, bottom), such as (0, 0, 64, 0)."
        ) from None
    if min(left, top, right, bottom) < 0:
        raise UserError("extend adds pixels, and a number of them is negative: to cut a picture, use its crop method.")
    if max(left, top, right, bottom) > 2**16:
        raise UserError("extend adds at most 65536 pixels on a side: take less.")
    return left, top, right, bottom


def count_skipped(steps: int, strength: float) -> int:
    """How many steps a strength leaves out, as in diffusers: int(steps - steps·strength). Raises UserError if all."""
    skipped = int(max(steps - min(steps * strength, steps), 0))
    if skipped >= steps:
        least = math.ceil(100 / steps) / 100
        raise UserError(f"With a strength of {strength:g} no step of {steps} is left: try {least:g} or more.")
    return skipped
