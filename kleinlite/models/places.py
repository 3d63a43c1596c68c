"""What a picture tells of a model in a folder or a file: a name and a hash, to find it by, and not where it lies."""

import hashlib
import re
from pathlib import Path

from .registry import find_bundled

PIECE = 2**20  # bytes; of a larger file three pieces tell it from others
TOLD = re.compile(r"([^/\\\0]+)@[0-9a-f]{16}")


def tell(place: str | Path) -> str:
    """The name of a model or a part as pictures and notebooks show it: klein@3f2a… for a folder or a file."""
    path = Path(place)
    if find_bundled(str(place)) or not path.exists():
        return str(place)
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted([*path.glob("*.*"), *path.glob("*/*.*")]):
        if file == path or file.suffix in (".json", ".safetensors", ".gguf"):
            with file.open("rb") as opened:
                last = file.stat().st_size - PIECE
                for start in (0, last // 2, last) if last > 0 else (0,):
                    opened.seek(start)
                    digest.update(opened.read(PIECE))
    return f"{path.resolve().name}@{digest.hexdigest()[:16]}"


def find_told(told: str, *folders: Path) -> str | None:
    """What leads to a place of which `tell` has told: its path, if it lies in one of these folders, else None.

    What is no folder's or file's leads to itself.
    """
    found = TOLD.fullmatch(told)
    if not found:
        return told
    return next((str(folder / found[1]) for folder in folders if tell(folder / found[1]) == told), None)
