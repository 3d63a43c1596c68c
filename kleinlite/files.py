"""Files that are written whole or not at all, locks, and JSON: for all rooms."""

import contextlib
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .errors import ExistingFileError, FileError, UserError

__all__ = ["replace_file", "lock", "check_disk_space", "write_json"]

WRITE_FAILED = ("[write]", "[save_safetensors]", "No space left", "os error")  # as MLX and tokenizers say it


@contextmanager
def replace_file(path: str | Path, new: bool = False) -> Iterator[Path]:
    """A draft in the same folder, which takes the place of `path` when the block ends well.

    The draft has a name of its own and the ending of `path`. A file that is there is replaced and keeps its
    permissions. Raises ExistingFileError if what is there is not a regular file, FileError if it cannot be written.
    new: nothing is replaced, and ExistingFileError raised if anything has the name, even since a moment ago.
    """
    path = Path(path)
    mode = check_replaceable(path)
    draft = path.with_name(f".kleinlite-{secrets.token_hex(8)}.partial{path.suffix}")
    try:
        draft.open("xb").close()  # new, by its own name: nobody else's, and no link
        yield draft
        with draft.open("rb+") as file:
            os.fsync(file.fileno())  # or a power failure may leave a short file under its name
        if mode is not None:
            draft.chmod(mode)
        if new:
            take_name(draft, path)
        else:
            os.replace(draft, path)
    except FileError:
        raise
    except FileExistsError:
        raise ExistingFileError(f"{path} is there already: name another one.") from None
    except OSError as error:  # in the name of the file, not of its draft
        raise FileError(f"{path}: {error.strerror or error}.") from None
    except Exception as error:  # MLX and tokenizers have no classes of their own
        if not any(words in str(error) for words in WRITE_FAILED):
            raise
        raise FileError(f"{path} cannot be written ({error}): make room on its disk, or name another.") from None
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        remove_leftovers(path.parent)


def take_name(draft: Path, path: Path) -> None:
    """Give a draft a name that nobody has. Looking first would not do: two may look at once. Raises FileExistsError."""
    try:
        os.link(draft, path)
    except FileExistsError:
        raise
    except OSError:  # of a disk without links: the name is taken by an empty file
        path.open("xb").close()
        os.replace(draft, path)


def check_replaceable(path: Path) -> int | None:
    """The permissions of the regular file at `path`, None if nothing is there. Raises ExistingFileError."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):
        raise ExistingFileError(f"{path} is there and is not a plain file: name another one.")
    return stat.S_IMODE(mode)


def remove_leftovers(folder: Path) -> None:
    """Remove the drafts of killed processes: those older than an hour."""
    for draft in folder.glob(".kleinlite-*.partial*"):
        with contextlib.suppress(OSError):  # somebody else's, or somebody else was quicker
            if time.time() - draft.lstat().st_mtime > 3600:
                draft.unlink()


@contextmanager
def lock(path: str | Path) -> Iterator[None]:
    """Within, no other process has this lock. Raises ExistingFileError if one has it."""
    path = Path(path)
    file_lock = FileLock(path)
    try:
        file_lock.acquire(blocking=False)
    except Timeout:
        raise ExistingFileError(f"Another program is using {path}: wait until it is done.") from None
    try:
        yield
    finally:
        with contextlib.suppress(PermissionError):  # Windows keeps an open file, and removes this one on release
            path.unlink(missing_ok=True)
        file_lock.release()


def spell(path: Path) -> str:
    """A path for MLX and tokenizers, which know names in UTF-8 alone; Python carries any. Raises UserError."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError(f"The name of {path} is not UTF-8, and MLX opens no other: rename it.") from None
    return str(path)


def check_disk_space(folder: Path, nbytes: int) -> None:
    """Refuse to write more bytes than the disk has left. Raises FileError."""
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(existing).free
    if nbytes > free:
        raise FileError(
            f"{folder} will take {nbytes / 1e6:,.1f} MB and its disk has {free / 1e6:,.1f} MB left: make room there."
        )


def write_json(path: Path, value: Any) -> None:
    """A JSON file, laid out as the released ones are; in one move. Raises FileError."""
    with replace_file(path) as draft:
        draft.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
