"""GGUF files, as llama.cpp and ComfyUI-GGUF write them: the header, and which kinds of numbers MLX can read.

`mx.load` reads the tensors: Q4_0, Q4_1 and Q8_0 as quantized matrices, what its library can convert as float16.
The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import struct
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import UserError

__all__ = ["check_gguf"]

KINDS = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
READABLE = {"F32", "F16", "Q4_0", "Q4_1", "Q8_0", "Q2_K", "Q4_K", "Q6_K", "BF16", "I8", "I16", "I32"}
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING = 8
ARRAY = 9
MOST_AXES = 4  # of a tensor, by the format; with more, MLX's library ends the process
Tensors = dict[str, dict[str, Any]]


def check_gguf(path: Path, file: BinaryIO) -> Tensors:
    """Name → {"dtype": kind, "shape": rows first}. Raises UserError if damaged, or of a kind that MLX cannot read."""
    try:
        magic = file.read(4)
        version = read_number(file, 4)
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError
        count = read_number(file, 10)
        for _ in range(read_number(file, 10)):
            read_string(file)
            skip_value(file, read_number(file, 4))
        tensors = dict(read_tensor(file) for _ in range(count))
    except (ValueError, struct.error, KeyError, RecursionError, OverflowError, MemoryError):
        raise UserError(f"{path} is not a GGUF file of version 2 or 3, or it is damaged: download it again.") from None
    missing = sorted({tensor["dtype"] for tensor in tensors.values()} - READABLE)
    if missing:
        raise UserError(
            f"{path} has tensors of the kind {', '.join(missing)}, which MLX cannot read: take a file in Q8_0, Q4_0, "
            "Q4_K_S or F16, or the safetensors files."
        )
    return tensors


def read_number(file: BinaryIO, kind: int) -> Any:
    layout = "<" + NUMBERS[kind]
    [number] = struct.unpack(layout, file.read(struct.calcsize(layout)))
    return number


def read_string(file: BinaryIO) -> str:
    return file.read(read_number(file, 10)).decode()


def skip_value(file: BinaryIO, kind: int) -> None:
    if kind == STRING:
        read_string(file)
    elif kind == ARRAY:
        inner = read_number(file, 4)
        for _ in range(read_number(file, 10)):
            skip_value(file, inner)
    else:
        read_number(file, kind)


def read_tensor(file: BinaryIO) -> tuple[str, dict[str, Any]]:
    name = read_string(file)
    count = read_number(file, 4)
    if count > MOST_AXES:
        raise ValueError
    axes = [read_number(file, 10) for _ in range(count)]
    kind = read_number(file, 4)
    read_number(file, 10)  # where its numbers begin
    return name, {"dtype": KINDS.get(kind, f"number {kind}"), "shape": axes[::-1]}
