"""A folder of pictures to learn from: `dog.png`, its caption in `dog.txt` and, for an edit, `dog_ref.png` before it."""

import logging
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageOps

from ..errors import UserError, first_few
from ..inference.picture_file import open_picture, to_rgb
from ..inference.request import check_side
from ..klein import as_reference
from ..models.files import list_files, name_key

REFERENCE = re.compile(r"(.+)_ref\d*")


@dataclass(frozen=True)
class Example:
    """A picture, what it shows, and for an edit the pictures before it."""

    name: str
    picture: Image.Image
    caption: str
    references: tuple[Image.Image, ...] = ()


def read_folder(folder: str | Path, size: tuple[int, int] | None = None) -> list[Example]:
    """The examples in a folder, in the order of their names, all of one size.

    size: width and height to which every picture is scaled and cut; as they are, cut to multiples of 16, if not given.
    What has more than 1024² pixels is shrunk.
    Raises UserError, which names the files, for whatever could not be learned from.
    """
    if size:
        check_side(size[0], "width")
        check_side(size[1], "height")
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder: name one with pictures and their captions, dog.png and dog.txt.")
    there = list_files(folder, "*")
    check_twins(there)
    endings = {ending for ending, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    files = {name_key(path): path for path in there if path.suffix.lower() in endings and path.is_file()}
    texts = {name_key(path): path for path in there if path.suffix == ".txt"}
    named = {key: found[1] if (found := REFERENCE.fullmatch(key)) else None for key in files}
    targets = {key: path for key, path in files.items() if named[key] is None}
    before = {target: [path for key, path in files.items() if named[key] == target] for target in targets}
    check_captions(there, [path for key, path in files.items() if named[key] in (None, *targets)])
    check_names(folder, targets, before, texts)
    captions = {key: read_caption(texts[key]) for key in targets}
    examples = [
        Example(
            path.stem, read_reference(path, size), captions[key], tuple(read_reference(p, size) for p in before[key])
        )
        for key, path in targets.items()
    ]
    check_sizes(folder, examples)
    return examples


def check_twins(there: list[Path]) -> None:
    """Refuse names that are one on other disks, or to the eye: one file would be left out. Raises UserError."""
    counts = Counter((name_key(path), path.suffix.lower()) for path in there)
    twins = [path for path in there if counts[name_key(path), path.suffix.lower()] > 1]
    if twins:
        raise UserError(
            f"{first_few(twins)} differ in capitals alone, or in how their letters are written: rename one."
        )


def check_captions(there: list[Path], files: list[Path]) -> None:
    """Refuse a caption whose picture is not among those that are read; say what else is left out. Raises UserError."""
    names = set(map(name_key, files))
    alone = [path for path in there if path.suffix == ".txt" and name_key(path) not in names]
    if alone:
        raise UserError(f"{first_few(alone)}: no picture of that name can be read (PNG, JPEG, WebP, …).")
    left = [path.name for path in there if path not in files and path.suffix != ".txt"]
    if left:
        logging.getLogger("kleinlite").warning("%s", f"Nothing is learned from {first_few(left)}.")


def check_names(folder: Path, targets: dict[str, Path], before: dict[str, list[Path]], texts: dict[str, Path]) -> None:
    """Refuse a folder in which something is missing, before any picture is read."""
    if len(targets) < 2:
        what = "no picture" if not targets else "one picture"
        raise UserError(f"There is {what} in {folder} (PNG, JPEG, WebP, …): it takes two or more, best 10 to 50.")
    if missing := [path.with_suffix(".txt") for key, path in targets.items() if key not in texts]:
        raise UserError(
            f"{first_few(missing)} missing: every picture needs a caption, in a text file of the same name."
        )
    counts = Counter(map(len, before.values()))
    if len(counts) > 1:
        usual, _ = counts.most_common(1)[0]
        odd = [path for key, path in targets.items() if len(before[key]) != usual]
        raise UserError(f"{first_few(odd)}: most pictures here have {usual} references (_ref), and all need as many.")


def check_sizes(folder: Path, examples: list[Example]) -> None:
    """Refuse pictures of more than one size: a batch has to be one array."""
    for what, all_of in (
        ("pictures", [e.picture for e in examples]),
        ("references", [r for e in examples for r in e.references]),
    ):
        sizes = Counter(f"{w}x{h}" for w, h in (picture.size for picture in all_of))
        if len(sizes) > 1:
            usual = sizes.most_common(1)[0][0]
            found = first_few(f"{count} of {size}" for size, count in sizes.most_common())
            raise UserError(f"The {what} in {folder} differ in size ({found}): scale and cut them with --size {usual}.")


def read_caption(path: Path) -> str:
    """The words in a caption's file, on one line."""
    try:
        words = " ".join(path.read_text(encoding="utf-8-sig").split())
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text: save the caption again.") from None
    if not words:
        raise UserError(f"{path} is empty: say in it what the picture shows.")
    return words


def read_reference(path: str | Path, size: tuple[int, int] | None = None) -> Image.Image:
    """A picture from a file as the model takes it, first scaled and cut to `size` if one is given."""
    image = open_picture(path)
    try:
        image = to_rgb(image)
        return as_reference(ImageOps.fit(image, size, Image.Resampling.LANCZOS) if size else image)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
