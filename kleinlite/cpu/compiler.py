"""Where MLX compiles on a Linux CPU: a temporary folder, in which g++ writes small libraries that are loaded again."""

import os
import shutil
import sys
import tempfile
from functools import cache
from glob import iglob
from pathlib import Path

import mlx.core as mx

from ..errors import FileError, clip
from .operations import silu

EXECUTED = set('$`"\n')  # by the shell in which MLX calls g++ with the folder's name
VARIABLES = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")  # which name the folder, in this order; else it is /tmp


@cache
def prepare_compiler() -> None:
    """Compile something once, so that a folder in which it cannot be done is refused first. Raises FileError."""
    if sys.platform != "linux" or mx.default_device() != mx.Device(mx.cpu):
        return
    if (shared := Path(tempfile.gettempdir()) / "mlx").exists() and not os.access(shared, os.W_OK):
        own = Path.home() / ".cache" / "kleinlite"
        own.mkdir(parents=True, exist_ok=True)
        os.environ["TMPDIR"] = str(own)  # the shared one is another user's
    if not shutil.which("g++"):
        return  # MLX runs the operations one by one
    variable = next((name for name in VARIABLES if name in os.environ), "TMPDIR")
    folder = os.environ.get(variable, "/tmp")
    trouble = "its name has a character that a shell executes" if EXECUTED & set(folder) else ""
    try:
        for name in iglob("mlx/*/cpu/*.so", root_dir=folder) if folder and not trouble else ():
            if is_cut(library := Path(folder, name)):
                library.unlink()  # MLX writes under another name, so that this is nobody's draft: it is compiled again
        if not trouble:
            mx.eval(silu(mx.ones((2, 2))))
    except (OSError, RuntimeError) as error:
        trouble = clip(str(error), 160)
    if trouble:
        raise FileError(f"MLX cannot compile in {folder!r} ({trouble}): name another folder, {variable}=/a/folder.")


def is_cut(library: Path) -> bool:
    """Whether a library (ELF, 64 bits) ends before its table of sections does, of which its first bytes speak."""
    with library.open("rb") as file:
        head = file.read(64)
    table, size, count = (int.from_bytes(head[a:b], "little") for a, b in ((40, 48), (58, 60), (60, 62)))
    return head[:4] != b"\x7fELF" or len(head) < 64 or library.stat().st_size < table + size * count
