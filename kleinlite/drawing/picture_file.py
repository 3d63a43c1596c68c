"""Pictures and their files: reading any, and writing PNGs that remember what made them. Hand-written."""

from __future__ import annotations

import json
import os
from pathlib import Path

from PIL import Image, ImageOps, PngImagePlugin

__all__ = ["open_picture", "save_picture", "picture_info", "read_metadata"]

# What a picture of ours remembers, see `Request.metadata`; and perhaps "quantize".
REMEMBERED = {"model": str, "prompt": str, "seed": int, "steps": int, "guidance": (int, float)}
REMEMBERED |= {"negative_prompt": str, "width": int, "height": int, "references": int}


def open_picture(path: str | Path) -> Image.Image:
    """A picture from a file, turned upright as its camera says; or a ValueError that names the file."""
    if not Path(path).is_file():
        what = "is a folder" if Path(path).is_dir() else "does not exist"
        raise ValueError(f"{path} {what}: name a picture's file.")
    try:
        with Image.open(path) as image:
            image.load()  # text chunks may come after the pixels
            return ImageOps.exif_transpose(image)
    except Exception as error:  # there are many ways to stumble over a broken file, and Pillow knows them
        why = "" if isinstance(error, Image.UnidentifiedImageError) else f" ({error})"
        raise ValueError(f"{path} cannot be read as a picture{why}: use a PNG, JPEG or WebP file.") from None


def save_picture(picture: Image.Image, path: str | Path) -> None:
    """Write a PNG that remembers what made it; in one move, so that no half-written file can be left."""
    path, chunk = Path(path), PngImagePlugin.PngInfo()
    if "kleinlite" in picture.info:
        chunk.add_itxt("kleinlite", json.dumps(picture.info["kleinlite"], ensure_ascii=False))
    partial = path.with_name(f".{path.name}.partial")
    try:
        picture.save(partial, format="PNG", pnginfo=chunk)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def picture_info(picture: Image.Image | str | Path) -> dict:
    """What made a picture: prompt, seed, model, steps, guidance, size. From the picture itself or its PNG file."""
    image = picture if isinstance(picture, Image.Image) else Image.open(picture)
    image.load()  # text chunks may come after the pixels
    if "kleinlite" not in image.info:
        raise ValueError("This picture does not say what made it: it was not written by kleinlite, or was saved again.")
    made = image.info["kleinlite"]
    try:
        return made if isinstance(made, dict) else json.loads(made)
    except ValueError:
        raise ValueError("What this picture says about itself is damaged: it was changed by another program.") from None


def read_metadata(path: str | Path) -> dict:
    """What made the picture in a file, complete and of the right types; or a ValueError that names the file."""
    image = open_picture(path)
    try:
        made = picture_info(image)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    known = made if isinstance(made, dict) else {}
    complete = all(isinstance(known.get(name), kind) for name, kind in REMEMBERED.items())
    if not complete or not isinstance(known.get("quantize", ""), (int, str)):
        raise ValueError(f"{path}: what it says about itself is damaged: give the prompt and the options instead.")
    return made
