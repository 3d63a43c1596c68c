"""GGUF files, as llama.cpp and ComfyUI-GGUF write them: what the header says of each tensor. `mx.load` reads them.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import os
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import UserError, clip

GGUF = b"GGUF"  # how such a file begins
PLAIN = {0: "F32", 1: "F16", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 30: "BF16"}  # kinds that are not packed
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a word's value, by its type
STRING = 8
ARRAY = 9


def read_gguf(path: Path) -> dict[str, dict[str, Any]]:
    """Name → {"dtype": kind, "shape": rows first}. Nothing behind the file's end is read. Raises UserError."""
    try:
        with path.open("rb") as file:
            return read_header(file)
    except (EOFError, LookupError, ValueError, RecursionError) as error:
        why = clip(str(error), 100)
        raise UserError(f"{path} is no whole GGUF file of version 2 or 3 ({why}): download it again.") from None


def read_header(file: BinaryIO) -> dict[str, dict[str, Any]]:
    take(file, len(GGUF))
    if (version := read_int(file, 4)) not in (2, 3):  # the first counts in 32 bits, a big-endian one from the other end
        raise ValueError(f"version {version}")
    count = read_int(file)
    words = read_int(file)
    for _ in range(words):
        read_string(file)
        skip_values(file, read_int(file, 4))
    tensors: dict[str, dict[str, Any]] = {}
    for _ in range(count):
        name, tensor = read_tensor(file)
        if not name or name in tensors:
            raise ValueError(f"the name {clip(name)!r} of a tensor is empty, or another's")
        tensors[name] = tensor
    return tensors


def take(file: BinaryIO, size: int, skip: bool = False) -> bytes:
    """The next bytes, or nothing and past them. Raises EOFError if there are fewer."""
    if size > os.fstat(file.fileno()).st_size - file.tell():
        raise EOFError("it is cut short")
    if skip:
        file.seek(size, 1)
    return b"" if skip else file.read(size)


def read_int(file: BinaryIO, size: int = 8) -> int:
    return int.from_bytes(take(file, size), "little")


def read_string(file: BinaryIO) -> str:
    return take(file, read_int(file)).decode()


def skip_values(file: BinaryIO, kind: int, count: int = 1) -> None:
    if kind in SIZES:
        take(file, count * SIZES[kind], skip=True)
    elif kind not in (STRING, ARRAY):
        raise ValueError(f"a word has the type {kind}")
    else:
        for _ in range(count):
            if kind == STRING:
                read_string(file)
            else:
                skip_values(file, read_int(file, 4), read_int(file))


def read_tensor(file: BinaryIO) -> tuple[str, dict[str, Any]]:
    name = read_string(file)
    if not 1 <= (dimensions := read_int(file, 4)) <= 4:
        raise ValueError(f"{clip(name)!r} has {dimensions} dimensions")
    axes = [read_int(file) for _ in range(dimensions)]
    kind = read_int(file, 4)
    read_int(file)  # where its numbers begin
    return name, {"dtype": PLAIN.get(kind, f"GGUF {kind}"), "shape": axes[::-1]}
