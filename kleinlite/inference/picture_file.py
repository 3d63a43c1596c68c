"""Pictures and their files: reading any, and writing PNGs that remember what made them."""

import contextlib
import io
import json
import math
import warnings
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from PIL import Image, ImageOps, PngImagePlugin

from ..errors import FileError, UserError
from ..files import replace_file
from ..models.files import GIT_LFS, refuse_pointer

__all__ = [
    "open_picture", "to_rgb", "check_png_name", "check_reference_size", "shrink", "open_reference", "remember",
    "save_picture", "picture_info", "read_metadata",
]  # fmt: skip

# What a picture of ours remembers, see `Request.metadata` and `LoadedModel.metadata`.
REMEMBERED: dict[str, Any] = {
    "model": str, "prompt": str, "seed": int, "steps": int, "guidance": (int, float), "negative_prompt": str,
    "width": int, "height": int, "references": int, "quantize": (int, str), "parts": (str, dict), "loras": list,
    "mask": bool, "box": list, "extend": list, "pictures": str, "strength": (int, float), "noise": bool,
}  # fmt: skip

DARKEST = 16  # of 255: below, either nothing is to be seen, or white is not 255
MOST_PIXELS = 2**30 // 12  # 89 million, the number above which Pillow warns; it is 0.3 GB decoded
BACKGROUND = (255, 255, 255)  # behind what is transparent
# Pillow stops at 1 MB of text or color profile, which a workflow of ComfyUI's or a camera's may exceed.
PngImagePlugin.MAX_TEXT_CHUNK = 2**26
PngImagePlugin.MAX_TEXT_MEMORY = 2**29


def open_picture(path: str | Path) -> Image.Image:
    """A picture from a file, turned upright as its camera says. Raises UserError or FileError."""
    path = Path(path).expanduser()
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise UserError(f"{path} {what}: name a picture's file.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damaged tags: the picture comes, or the sentence
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                image.load()  # text chunks may come after the pixels
                return ImageOps.exif_transpose(image)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise UserError(f"{path} has more than {MOST_PIXELS // 10**6} million pixels: make it smaller.") from None
    except PermissionError as error:
        raise FileError(f"{path}: {error.strerror}.") from None
    except Exception as error:  # there are many ways to stumble over a broken file, and Pillow knows them
        with Path(path).open("rb") as file:
            refuse_pointer(Path(path), file.read(len(GIT_LFS)))
        why = "" if isinstance(error, Image.UnidentifiedImageError) else f" ({error})"
        raise UserError(f"{path} cannot be read as a picture{why}: use a PNG, JPEG or WebP file.") from None


def to_srgb(image: Image.Image) -> Image.Image:
    """A picture with the profile of a phone, a camera or a printer, its colors in sRGB's numbers.

    A profile that is damaged, or not for this kind of picture, is passed over, as viewers do.
    """
    if not image.info.get("icc_profile") or image.mode not in ("RGB", "RGBA", "P", "L", "CMYK"):
        return image
    from PIL import ImageCms  # which loads a library, for few pictures

    try:
        profile = ImageCms.ImageCmsProfile(io.BytesIO(image.info["icc_profile"]))
        srgb = ImageCms.createProfile("sRGB")
        flags = ImageCms.Flags.BLACKPOINTCOMPENSATION
        intent = ImageCms.Intent.RELATIVE_COLORIMETRIC
        own = image if image.mode in ("L", "CMYK") else image.convert("RGB")
        result = ImageCms.profileToProfile(own, profile, srgb, intent, "RGB", flags=flags)
    except (ImageCms.PyCMSError, ImportError, OSError, TypeError, ValueError):
        return image
    assert result  # a new one, since none was to be changed in place
    result.info.pop("icc_profile", None)
    if image.has_transparency_data:
        result.putalpha(image.convert("RGBA").getchannel("A"))
    return result


def to_rgb(image: Image.Image) -> Image.Image:
    """Any picture in 8-bit sRGB, upright; what is transparent is white. A picture of one color comes as it is.

    Raises UserError for what cannot be read, and where hardly a thing could be seen.
    """
    rgb = to_eight_bits(image)
    extrema = cast(list[tuple[int, int]], rgb.getextrema())
    brightest = max(high for _, high in extrema)
    if brightest < DARKEST and any(low < high for low, high in extrema):
        raise UserError(f"The brightest level of the picture is {brightest} of 255: scale it, so that white is 255.")
    return rgb


def to_eight_bits(image: Image.Image, convert_colors: bool = True) -> Image.Image:
    """The same, however dark. convert_colors: False for a mask, whose levels are no colors."""
    size = f"{image.width}×{image.height}"
    limit = MOST_PIXELS // 10**6
    if image.width * image.height > MOST_PIXELS:  # before it is decoded
        raise UserError(f"A picture of {size} is too large, at most {limit} million pixels can be read: shrink it.")
    if 0 in image.size:
        raise UserError(f"A picture of {size} is empty: it has no pixel.")
    try:
        image = ImageOps.exif_transpose(image)
        if convert_colors:
            image = to_srgb(image)
        if image.has_transparency_data and not image.mode.startswith("I"):  # of 16 bits only a level is transparent
            behind = Image.new("RGBA", image.size, (*BACKGROUND, 255))
            return Image.alpha_composite(behind, image.convert("RGBA")).convert("RGB")
        if image.mode != "F" and not image.mode.startswith("I"):
            return image.convert("RGB")
        levels = image.convert("F") if image.mode == "F" else image.convert("I").convert("F")
        numbers = mx.array(cast(Any, memoryview(levels.tobytes()).cast("f")))
    except Exception as error:  # a file that was opened and not read until now, or a mode that Pillow cannot convert
        raise UserError(f"The picture cannot be read ({error}): use a PNG, JPEG or WebP file.") from None
    low = cast(float, numbers.min().item())
    high = cast(float, numbers.max().item())
    white = find_white(low, high, whole=image.mode != "F")
    return levels.point(lambda level: level * (255 / white) + 0.5).convert("L").convert("RGB")


def find_white(low: float, high: float, whole: bool) -> int:
    """White by the lowest and the highest level of a picture of more than 8 bits, or of floating point: it cannot say.

    Resizing leads floating point beyond black and white, by a quarter with LANCZOS; that is cut off.
    Raises UserError where it may be anything: a camera's 10, 12 or 14 bits, 0 and 1 in whole numbers, -1 … 1, NaN.
    """
    beyond = 0 if whole else 1 / 3
    whites = (255, 65535) if whole else (1, 255, 65535)
    white = next((white for white in whites if high <= white * (1 + beyond)), 0)
    darkest = 2**14 if white == 65535 else white * DARKEST / 255
    if not white or not low >= -white * beyond or not (high >= darkest or low == high == 0):
        raise UserError(f"A picture with levels from {low:g} to {high:g} has no known white: scale it to 0 … 255.")
    return white


def check_reference_size(image: Image.Image, least: int = 64) -> Image.Image:
    """The picture itself, if it can be a reference."""
    w, h = image.size
    if min(w, h) < least or max(w, h) > 8 * min(w, h):
        raise UserError(f"A reference picture needs sides of at least {least} pixels and at most 8:1, not {w}×{h}.")
    return image


def shrink(image: Image.Image, side: int) -> Image.Image:
    """A picture of about side² pixels at most, its sides multiples of 16; one that has no more stays as it is."""
    w, h = image.size
    if w * h <= side * side:
        return image
    scale = side / math.sqrt(w * h)
    size = max(16, 16 * round(w * scale / 16)), max(16, 16 * round(h * scale / 16))
    return ImageOps.fit(image, size, Image.Resampling.LANCZOS)


def open_reference(path: str | Path) -> Image.Image:
    """A reference picture from a file, upright, in RGB and of a size that a model takes. Raises UserError."""
    image = open_picture(path)
    try:
        return check_reference_size(to_rgb(image))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


class Picture(Image.Image):
    """A picture that says what made it, `info["kleinlite"]`, and writes it into every PNG file that it is saved to."""

    def save(self, fp: Any, format: str | None = None, **params: Any) -> None:
        super().save(fp, format, **{"pnginfo": write_chunk(self), **params})


def remember(picture: Image.Image, made: dict[str, Any]) -> None:
    """Let a picture say what made it, wherever it is saved."""
    picture.info["kleinlite"] = made
    picture.__class__ = Picture


def write_chunk(picture: Image.Image) -> PngImagePlugin.PngInfo:
    chunk = PngImagePlugin.PngInfo()
    if "kleinlite" in picture.info:
        made = picture.info["kleinlite"]  # text, if the picture was opened from a file
        chunk.add_itxt("kleinlite", made if isinstance(made, str) else json.dumps(made, ensure_ascii=False))
    return chunk


def save_picture(picture: Image.Image, path: str | Path, *, new: bool = False) -> None:
    """Write a PNG that remembers what made it, in one move. Raises UserError for a name of another format.

    new: replace nothing, and raise ExistingFileError, a FileExistsError, if there is anything of that name.
    """
    if not isinstance(picture, Image.Image):
        raise UserError(f"save_picture writes one picture, not a {type(picture).__name__}: save each by itself.")
    path = Path(path).expanduser()
    check_png_name(path)
    with replace_file(path, new) as draft:
        picture.save(draft, pnginfo=write_chunk(picture))


def check_png_name(path: Path) -> None:
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file in it, such as {path / 'picture.png'}.")
    if path.suffix.lower() != ".png":
        example = path.with_suffix(".png") if path.name else "picture.png"
        raise UserError(f"Pictures are written as PNG and {path} does not end in .png: try {example}.")


def picture_info(picture: Image.Image | str | Path) -> dict[str, Any]:
    """What made a picture: prompt, seed, model, steps, guidance, size. From the picture itself or its PNG file."""
    image = picture if isinstance(picture, Image.Image) else open_picture(picture)
    image.load()  # text chunks may come after the pixels
    if "kleinlite" not in image.info:
        raise UserError("This picture does not say what made it: it was not written by kleinlite, or was saved again.")
    made = image.info["kleinlite"]
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        made = made if isinstance(made, dict) else json.loads(made)
    if not isinstance(made, dict):
        raise UserError("What this picture says about itself is damaged: it was changed by another program.")
    return made


def read_metadata(path: str | Path) -> dict[str, Any]:
    """What made the picture in a file, of the right types. Raises UserError or FileError."""
    image = open_picture(path)
    try:
        made = picture_info(image)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    parts = made.get("parts", "")
    places = parts.values() if isinstance(parts, dict) else [parts]
    whole = {"model", "prompt"} <= made.keys()
    whole = whole and all(isinstance(value, REMEMBERED.get(name, object)) for name, value in made.items())
    whole = whole and all(isinstance(place, str) for place in places) and all(map(is_lora, made.get("loras", [])))
    if not whole:
        raise UserError(f"{path}: what it says about itself is damaged: give the prompt and the options instead.")
    return made


def is_lora(found: object) -> bool:
    """Whether this is what `Loras.metadata` says of one adapter: a file's name, which leads to no other folder."""
    kinds: dict[str, Any] = {"file": str, "scale": (int, float), "sha256": str}
    if not isinstance(found, dict) or not all(isinstance(found.get(name), kind) for name, kind in kinds.items()):
        return False
    return Path(found["file"]).name == found["file"]
