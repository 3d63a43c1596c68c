"""Pictures and their files: reading any, and writing PNGs that remember what made them. Hand-written."""

import contextlib
import json
import os
import secrets
import time
import warnings
from pathlib import Path

from PIL import Image, ImageOps, PngImagePlugin

__all__ = ["open_picture", "to_rgb", "check_reference_size", "save_picture", "picture_info", "read_metadata"]

# What a picture of ours remembers, see `Request.metadata`; and perhaps "quantize", "parts" and "loras".
REMEMBERED = {"model": str, "prompt": str, "seed": int, "steps": int, "guidance": (int, float)}
REMEMBERED |= {"negative_prompt": str, "width": int, "height": int, "references": int}

MOST_PIXELS = 2**30 // 12  # 89 million, the number above which Pillow warns; it is 0.3 GB decoded
BACKGROUND = (255, 255, 255)  # behind what is transparent


def open_picture(path: str | Path) -> Image.Image:
    """A picture from a file, turned upright as its camera says; or a ValueError that names the file."""
    if not Path(path).is_file():
        what = "is a folder" if Path(path).is_dir() else "does not exist"
        raise ValueError(f"{path} {what}: name a picture's file.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damaged tags: the picture comes, or the sentence
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                image.load()  # text chunks may come after the pixels
                return ImageOps.exif_transpose(image)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise ValueError(f"{path} has more than {MOST_PIXELS // 10**6} million pixels: make it smaller.") from None
    except Exception as error:  # there are many ways to stumble over a broken file, and Pillow knows them
        why = "" if isinstance(error, Image.UnidentifiedImageError) else f" ({error})"
        raise ValueError(f"{path} cannot be read as a picture{why}: use a PNG, JPEG or WebP file.") from None


def to_rgb(image: Image.Image) -> Image.Image:
    """Any picture in 8-bit RGB, upright: 16 bits and numbers from 0 to 1 are scaled, what is transparent is white."""
    size, limit = f"{image.width}×{image.height}", MOST_PIXELS // 10**6
    if image.width * image.height > MOST_PIXELS:  # before it is decoded
        raise ValueError(f"A picture of {size} is too large, at most {limit} million pixels can be read: shrink it.")
    try:
        image = ImageOps.exif_transpose(image)
        if image.has_transparency_data and not image.mode.startswith("I"):  # of 16 bits only a level is transparent
            behind = Image.new("RGBA", image.size, (*BACKGROUND, 255))
            return Image.alpha_composite(behind, image.convert("RGBA")).convert("RGB")
        if image.mode != "F" and not image.mode.startswith("I"):
            return image.convert("RGB")
        levels = image.convert("F") if image.mode == "F" else image.convert("I").convert("F")
        low, high = levels.getextrema()
    except Exception as error:  # a file that was opened and not read until now, or a mode that Pillow cannot convert
        raise ValueError(f"The picture cannot be read ({error}): use a PNG, JPEG or WebP file.") from None
    white = 65535 if image.mode != "F" or high > 255 else 255 if high > 1 else 1
    if not 0 <= low <= high <= white:
        raise ValueError(f"A picture with levels from {low:g} to {high:g} has no known white: scale it to 0 … 255.")
    return levels.point(lambda level: level * (255 / white) + 0.5).convert("L").convert("RGB")


def check_reference_size(image: Image.Image) -> Image.Image:
    """The picture itself, if it can be a reference."""
    w, h = image.size
    if min(w, h) < 64 or max(w, h) > 8 * min(w, h):
        raise ValueError(f"A reference picture needs sides of at least 64 pixels and at most 8:1, this one is {w}×{h}.")
    return image


def save_picture(picture: Image.Image, path: str | Path) -> None:
    """Write a PNG that remembers what made it; in one move, so that no half-written file can be left.

    A file that is there is replaced and keeps its permissions.
    """
    path, chunk = Path(path), PngImagePlugin.PngInfo()
    if "kleinlite" in picture.info:
        chunk.add_itxt("kleinlite", json.dumps(picture.info["kleinlite"], ensure_ascii=False))
    draft = path.with_name(f".kleinlite-{secrets.token_hex(8)}.partial.png")  # Pillow loads what the name says, no more
    try:
        with draft.open("xb") as file:  # new, by its own name: nobody else's, and no link
            picture.save(file, pnginfo=chunk)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            draft.chmod(path.stat().st_mode & 0o7777)
        os.replace(draft, path)
    except OSError as error:  # in the name of the picture, not of its draft
        raise OSError(f"{path}: {error.strerror or error}.") from None
    finally:
        draft.unlink(missing_ok=True)
    remove_leftovers(path.parent)


def remove_leftovers(folder: Path) -> None:
    """Drafts that a killed process left: older than an hour, since writing one takes a second."""
    for draft in folder.glob(".kleinlite-*.partial*"):
        with contextlib.suppress(OSError):  # somebody else's, or somebody else was quicker
            if time.time() - draft.lstat().st_mtime > 3600:
                draft.unlink()


def picture_info(picture: Image.Image | str | Path) -> dict:
    """What made a picture: prompt, seed, model, steps, guidance, size. From the picture itself or its PNG file."""
    image = picture if isinstance(picture, Image.Image) else open_picture(picture)
    image.load()  # text chunks may come after the pixels
    if "kleinlite" not in image.info:
        raise ValueError("This picture does not say what made it: it was not written by kleinlite, or was saved again.")
    made = image.info["kleinlite"]
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        made = made if isinstance(made, dict) else json.loads(made)
        if isinstance(made, dict):
            return made
    raise ValueError("What this picture says about itself is damaged: it was changed by another program.")


def read_metadata(path: str | Path) -> dict:
    """What made the picture in a file, complete and of the right types; or a ValueError that names the file."""
    image = open_picture(path)
    try:
        made = picture_info(image)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    start = {"seed"} if made.get("noise") is True else set()
    complete = all(isinstance(made.get(name), REMEMBERED[name]) for name in REMEMBERED.keys() - start)
    parts = made.get("parts", "")
    places = parts.values() if isinstance(parts, dict) else [parts]
    complete = complete and all(isinstance(place, str) for place in places)
    loras = made.get("loras", [])
    complete = complete and isinstance(loras, list) and all(map(is_lora, loras))
    if not complete or not isinstance(made.get("quantize", ""), (int, str)):
        raise ValueError(f"{path}: what it says about itself is damaged: give the prompt and the options instead.")
    return made


def is_lora(found: object) -> bool:
    """Whether this is what `Loras.metadata` says of one adapter: a file's name, which leads to no other folder."""
    kinds = {"file": str, "scale": (int, float), "sha256": str}
    right = isinstance(found, dict) and all(isinstance(found.get(name), kind) for name, kind in kinds.items())
    return right and Path(found["file"]).name == found["file"]
