"""GGUF files, as llama.cpp and ComfyUI-GGUF write them: what the header says of each tensor. `mx.load` reads them.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from pathlib import Path
from typing import Any, BinaryIO

GGUF = b"GGUF"  # how such a file begins
PLAIN = {0: "F32", 1: "F16", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 30: "BF16"}  # kinds that are not packed
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a word's value, by its type
STRING = 8
ARRAY = 9


def read_gguf(path: Path) -> dict[str, dict[str, Any]]:
    """Name → {"dtype": kind, "shape": rows first}."""
    with path.open("rb") as file:
        file.seek(8)
        tensors = read_int(file)
        words = read_int(file)
        for _ in range(words):
            read_string(file)
            skip_value(file, read_int(file, 4))
        return dict(read_tensor(file) for _ in range(tensors))


def read_int(file: BinaryIO, size: int = 8) -> int:
    return int.from_bytes(file.read(size), "little")


def read_string(file: BinaryIO) -> str:
    return file.read(read_int(file)).decode()


def skip_value(file: BinaryIO, kind: int) -> None:
    if kind == STRING:
        read_string(file)
    elif kind == ARRAY:
        inner = read_int(file, 4)
        for _ in range(read_int(file)):
            skip_value(file, inner)
    else:
        file.seek(SIZES[kind], 1)


def read_tensor(file: BinaryIO) -> tuple[str, dict[str, Any]]:
    name = read_string(file)
    axes = [read_int(file) for _ in range(read_int(file, 4))]
    kind = read_int(file, 4)
    read_int(file)  # where its numbers begin
    return name, {"dtype": PLAIN.get(kind, f"GGUF {kind}"), "shape": axes[::-1]}
