"""Changing a part of a picture, or how much of it: masks, strength, extension, and the way back to its own pixels.

The steps of chapter 6 work on a canvas whose sides are multiples of 16. Here a picture of any size is put on one, and
what was drawn is cropped and pasted back, so that a pixel under a black mask is the one that was given, bit by bit.
"""

import numbers
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from PIL import Image

from ..errors import UserError
from .picture_file import check_reference_size, to_eight_bits, to_rgb

__all__ = ["Change", "Extension", "plan_change", "count_skipped", "read_mask"]

Extension = tuple[int, int, int, int]  # pixels to be added on the left, the top, the right and the bottom
TOKEN = 16  # pixels on a side
HALF = 128  # the level from which on a mask's pixel counts as white


@dataclass(frozen=True, eq=False)
class Change:
    """A picture to be changed, and how: what a request knows of it besides the references."""

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
        each token, those around its middle. So a token on an edge can be gray. The mask's own grays blend pixels.
        """
        if self.mask is None:
            return None
        width, height = self.mask.size
        white = to_array(self.mask) >= HALF
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
        said = f"{name} says how to change a picture, and there is none: give it as"
        raise UserError(f"{said} images=[picture].", shell=f"{said} --image FILE.")
    strength = 1.0 if strength is None else strength
    if not isinstance(strength, numbers.Real) or not 0 < float(strength) <= 1:
        raise UserError(f"strength is a number above 0 (hardly a change) and up to 1 (all anew), not {strength}.")
    extend = check_extension((0, 0, 0, 0) if extend is None else extend)
    picture = check_reference_size(to_rgb(images[0]))
    own = None if mask is None else read_mask(mask, picture.size)
    change = place(picture, own, extend, float(strength))
    if own:
        check_drawn(own, change)
    return change


def place(picture: Image.Image, own: Image.Image | None, extend: Extension, strength: float) -> Change:
    """The canvas of a picture, which begins where a token does, its mask and the place of the result on it."""
    left, top, right, bottom = extend
    width, height = picture.size
    x = round_up(left)
    y = round_up(top)
    size = round_up(x + width + right), round_up(y + height + bottom)
    mask = None
    if own is not None or any(extend):
        mask = Image.new("L", size, 255)
        mask.paste(own or 0, (x, y, x + width, y + height))
    box = x - left, y - top, x + width + right, y + height + bottom
    return Change(reflect(picture, x, y, size), mask, box, strength, extend, own is not None)


def reflect(picture: Image.Image, x: int, y: int, size: tuple[int, int]) -> Image.Image:
    """A canvas with the picture at (x, y), which goes on around it by reflection."""
    pixels = to_array(picture).reshape(picture.height, picture.width, -1)
    pixels = mx.take(pixels, reflected_indices(y, picture.height, size[1]), axis=0)
    pixels = mx.take(pixels, reflected_indices(x, picture.width, size[0]), axis=1)
    buffer: Any = pixels  # MLX's types do not say that an array is one
    return Image.frombytes(picture.mode, size, bytes(memoryview(buffer)))


def to_array(picture: Image.Image) -> mx.array:
    """All numbers of a picture behind each other, 0 to 255."""
    buffer: Any = memoryview(picture.tobytes())
    return mx.array(buffer)


def reflected_indices(before: int, count: int, total: int) -> mx.array:
    """… 2 1 | 0 1 2 … n-1 | n-2 n-3 …, turning back at each end as often as it takes."""
    places = (mx.arange(total) - before) % (2 * count - 2)
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
    levels = to_eight_bits(mask, convert_colors=False).convert("L")
    if levels.size != size:
        sizes = "The mask is {}×{} and the picture {}×{}".format(*levels.size, *size)
        raise UserError(f"{sizes}: give a mask of the picture's size.")
    return levels


def check_drawn(own: Image.Image, change: Change) -> None:
    """Refuse a mask by which nothing would be drawn anew: one that is black, faint or too thin. Raises UserError."""
    brightest = cast(tuple[int, int], own.getextrema())[1]
    drawn = cast(mx.array, change.token_mask()).max().item()
    if brightest < HALF and (brightest or not drawn):
        faint = f"The brightest level of the mask is {brightest} of 255, and nothing below {HALF} is drawn anew"
        raise UserError(f"{faint}: paint white what is to change.")
    if not drawn:
        raise UserError(f"The white of the mask is too thin to be drawn anew, in squares of {TOKEN} pixels: widen it.")


def check_extension(extend: Any) -> Extension:
    try:
        left, top, right, bottom = map(operator.index, extend)
    except (TypeError, ValueError):
        sides = "four whole numbers of pixels (left, top, right, bottom)"
        raise UserError(f"extend takes {sides}, such as (0, 0, 64, 0).") from None
    if min(left, top, right, bottom) < 0:
        raise UserError("extend adds pixels, and a number of them is negative: to cut a picture, use its crop method.")
    return left, top, right, bottom


def count_skipped(steps: int, strength: float) -> int:
    """How many steps a strength leaves out, as in diffusers: int(steps - steps·strength). One is always left."""
    return min(int(steps - steps * strength), steps - 1)
