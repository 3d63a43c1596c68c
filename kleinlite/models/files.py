"""A model's files on this machine: JSON, shards and their index, and whether weights are whole.

What a damaged weight file is, the safetensors library decides; here it becomes a sentence. A part's files are listed
and checked once, by `open_weights`, and then known as a `WeightFiles`. Every array that comes from a weight file,
whoever has made it, comes from a `WeightFile`.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import mlx.core as mx
from safetensors import SafetensorError, deserialize, safe_open

from ..errors import MissingFileError, UserError, clip, first_few, printable
from .fields import say_once
from .gguf import check_gguf
from .registry import FOLDERS

# Bytes up to which a file is checked in memory: `safe_open` imports numpy, which takes longer than drawing with nano.
SMALL_FILE = 2**25
LARGEST_HEADER = 10**8  # bytes: the limit of the format
GGUF = b"GGUF"  # how such a file begins
GIT_LFS = b"version https://git-lfs"
NAMES = ("model", "diffusion_pytorch_model")  # of a part's weights, as transformers and diffusers look for them
MLX_TYPES = {
    "BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F8_E4M3", "F16", "BF16", "F32", "C64",
}  # fmt: skip


def check_file(path: Path) -> None:
    """Refuse what is not there, or only git's note of it. Raises MissingFileError or UserError."""
    if not path.is_file():
        raise MissingFileError(f"{path} is missing: the folder is not a complete model in the released layout.")
    with path.open("rb") as file:
        refuse_pointer(path, file.read(len(GIT_LFS)))


def refuse_pointer(path: Path, start: bytes) -> None:
    """Refuse what git leaves in a large file's place, by its first bytes. Raises UserError."""
    if start == GIT_LFS:
        raise UserError(f"{path} is git-lfs's note of where the file is: run `git lfs pull` in its folder.")


def list_files(folder: Path, pattern: str) -> list[Path]:
    """The files of a folder in order, but for hidden ones: a Mac writes `._x` beside x where a disk is not its own."""
    return sorted(path for path in folder.glob(pattern) if not path.name.startswith("."))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds names and values. Raises MissingFileError or UserError."""
    check_file(path)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path} is not valid JSON ({printable(str(e))[:100]}): download it again.") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} is JSON, but not a list of names and their values: download it again.")
    return values


INDEX = "model_index.json"
INDEXES = (INDEX, "modular_model_index.json")  # diffusers has two ways to write a pipeline


def find_index(folder: Path) -> Path:
    """A model's index, under either name; the usual one if there is none."""
    return next((folder / name for name in INDEXES if (folder / name).exists()), folder / INDEX)


@dataclass(frozen=True)
class ModelFolder:
    """A model's folder, and what its index says."""

    path: Path
    index: dict[str, Any]

    def part(self, name: str) -> Path:
        """Where a part, "tokenizer" or "scheduler" lies: here, or in the folder above if the index shares its parts."""
        folder = FOLDERS.get(name, name)
        own = self.path / folder
        if "shares" in self.index and not own.is_dir():
            own = self.path.parent / folder
        encoder = own.parent / FOLDERS["text_encoder"]  # where FLUX 3's tokenizer lies
        in_encoder = name == "tokenizer" and not own.is_dir() and (encoder / "tokenizer.json").exists()
        return encoder if in_encoder else own


# ---------------------------------------------------------------- weights


@dataclass(frozen=True)
class WeightFile:
    """One file with weights, whole when it was opened. Only its header has been read."""

    path: Path
    kind: str  # "safetensors" or "gguf", by its content: its name may end in anything
    tensors: dict[str, dict[str, Any]]  # name → dtype and shape

    def load(self) -> tuple[dict[str, mx.array], dict[str, str]]:
        """The tensors, lazily, and what the header says beside them. Raises UserError."""
        try:
            arrays, words = cast(Any, mx.load(str(self.path), format=self.kind, return_metadata=True))
        except (RuntimeError, ValueError) as e:  # a path that is no UTF-8
            raise UserError(f"MLX cannot read {self.path} ({clip(str(e), 100)}): take another file.") from None
        if self.kind == "gguf":  # whose words may be arrays of one number, or of many
            numbers = {name: w.item() for name, w in words.items() if isinstance(w, mx.array) and w.size == 1}
            words = {name: str(word) for name, word in (words | numbers).items() if not isinstance(word, mx.array)}
            words["format"] = "gguf"
        return arrays, words


@dataclass(frozen=True)
class WeightFiles:
    """The files with a part's weights, each of them whole when it was opened."""

    path: Path  # the part's folder, or its single file
    shards: tuple[WeightFile, ...]

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(shard.path for shard in self.shards)

    @property
    def nbytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    @property
    def tensors(self) -> dict[str, dict[str, Any]]:
        return {name: tensor for shard in self.shards for name, tensor in shard.tensors.items()}

    def load(self) -> tuple[dict[str, mx.array], dict[str, str]]:
        """All tensors, and what the headers say beside them. The arrays are lazy: only headers are read."""
        arrays: dict[str, mx.array] = {}
        metadata: dict[str, str] = {}
        for shard in self.shards:
            tensors, words = shard.load()
            arrays |= tensors
            metadata |= words
        return arrays, metadata


def open_weights(path: Path) -> WeightFiles:
    """A part's weights, its one file or all shards of its folder, checked. Raises MissingFileError or UserError."""
    if path.is_file():
        return WeightFiles(path, (open_weight_file(path),))
    index, files = find_weight_files(path)
    if not files:
        raise MissingFileError(f"There is no .safetensors file in {path}: download it again.")
    for file in files:
        if not file.is_file():
            why = f"named in {index.name} but missing" if index else "a link to a file that is missing"
            raise MissingFileError(f"{file} is {why}: download the model again.")
    shards = tuple(map(open_weight_file, files))
    owner: dict[str, WeightFile] = {}
    for shard in shards:
        for name in shard.tensors:
            other = owner.setdefault(name, shard)
            if other is not shard:
                raise UserError(
                    f"{clip(name)} is in {other.path.name} and in {shard.path.name}, both in {path}: move away the one "
                    "that is not meant."
                )
    return WeightFiles(path, shards)


def find_weight_files(folder: Path) -> tuple[Path | None, list[Path]]:
    """The index of a part's shards, if there is one, and the files: of several those that the libraries would read.

    transformers looks for model.safetensors and then for its index; diffusers for an index first. Raises UserError.
    """
    there = list_files(folder, "*.safetensors")
    indexes = list_files(folder, "*.safetensors.index.json")
    whole, other = (folder / f"{name}.safetensors" for name in NAMES)
    named = [path for path in indexes if path.name.removesuffix(".safetensors.index.json") in NAMES] or indexes
    if len(named) > 1 and whole not in there:
        raise UserError(f"{named[0]} and {named[1].name} both say where the weights are: move away one of them.")
    if named and whole not in there:
        files = [folder / name for name in read_shard_names(named[0])]
    else:
        named = []
        files = next(([path] for path in (whole, other) if path in there), there)
    left = [path.name for path in there if path not in files]
    if left:
        say_once(f"{folder}: {first_few(left)} not read beside {first_few(path.name for path in files)}.")
    return (named[0] if named else None), files


def load_arrays(path: Path) -> dict[str, mx.array]:
    """All tensors of a part's folder or file, lazily."""
    return open_weights(path).load()[0]


def open_weight_file(path: Path) -> WeightFile:
    """A weight file that is whole and whose numbers MLX can read; only its header is read. Raises UserError."""
    with path.open("rb") as file:
        start = file.read(len(GIT_LFS))
        refuse_pointer(path, start)
        file.seek(0)
        # By its content, since a file of the hub's store has no ending; and by its ending, or a damaged one was none.
        if start.startswith(GGUF) or path.suffix == ".gguf":
            return WeightFile(path, "gguf", check_gguf(path, file))
        return WeightFile(path, "safetensors", check_safetensors(path, file))


def is_safetensors(path: Path) -> bool:
    """Whether a file looks like weights, by its name or its first bytes; a folder may be an adapter's."""
    if path.suffix in (".safetensors", ".gguf"):
        return True
    if not path.is_file():
        return path.is_dir()
    with path.open("rb") as file:
        start = file.read(9)
    return start[8:] == b"{" or start.startswith(GGUF)


def check_safetensors(path: Path, file: BinaryIO) -> dict[str, dict[str, Any]]:
    """The header, if the library takes the file for whole and MLX can read what is in it. Raises UserError."""
    size = os.fstat(file.fileno()).st_size
    start = file.read(8)
    header = file.read(min(int.from_bytes(start, "little"), LARGEST_HEADER))
    try:
        if size <= SMALL_FILE:
            deserialize((start + header).ljust(size, b"\0"))  # it looks at header and length, not at the numbers
        else:
            with safe_open(path, framework="np"):
                pass
    except (SafetensorError, OSError) as error:
        why = printable(str(error).removeprefix("Error while deserializing header: "))[:100]
        raise UserError(
            f"{path} ({size:,} bytes) is not a whole safetensors file ({why}): download it again."
        ) from None
    tensors: dict[str, dict[str, Any]] = json.loads(header)
    tensors.pop("__metadata__", None)
    types = sorted({str(tensor["dtype"]) for tensor in tensors.values()} - MLX_TYPES)
    if types:
        raise UserError(
            f"{path} has tensors of the type {', '.join(types)}, which MLX cannot read: save it in bfloat16 or float16."
        )
    return tensors


def read_shard_names(index: Path) -> list[str]:
    """The files that an index of shards names. Raises UserError unless they are plain names beside it."""
    places = read_json(index).get("weight_map")
    names = list(map(str, places.values())) if isinstance(places, dict) else []
    if not names or not all(re.fullmatch(r"[^/\\\0]+\.safetensors", name) for name in names):
        raise UserError(f"{index} names no files beside it in which the weights are: download it again.")
    return sorted(set(names))
