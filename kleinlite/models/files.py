"""A model's files on this machine: JSON, shards and their index, and whether weights are whole.

What a damaged weight file is, the safetensors library decides; here it becomes a sentence. A part's files are listed
and checked once, by `open_weights`. Every array that comes from a weight file comes from `WeightFiles.load`.
"""

import json
import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from safetensors import SafetensorError, deserialize, safe_open

from ..errors import MissingFileError, UserError, clip, first_few, printable, say_once
from ..files import spell
from .gguf import GGUF, read_gguf
from .registry import FOLDERS

# Bytes up to which a file is read whole: `safe_open` imports numpy, which takes longer than drawing with nano.
SMALL_FILE = 2**25
SMALL_PART_BYTES = 2**28  # smaller parts (nano's, the autoencoder) are cast once, when they are loaded
GIT_LFS = b"version https://git-lfs"
# Where transformers and diffusers look for a part's weights, in their order; an index names shards:
USUAL_NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
)


def check_file(path: Path, small: int = 0) -> bytes:
    """A file's first bytes; of a small one, its header. Raises MissingFileError or, of git-lfs's note, UserError."""
    if not path.is_file():
        raise MissingFileError(f"{path} is missing: the folder is not a complete model in the released layout.")
    with open(spell(path), "rb") as file:
        start = file.read(len(GIT_LFS))
        if path.stat().st_size <= small:
            start += file.read(min(small, int.from_bytes(start[:8], "little")))
    refuse_pointer(path, start)
    return start


def refuse_pointer(path: Path, start: bytes) -> None:
    """Refuse what git leaves in a large file's place, by its first bytes. Raises UserError."""
    if start.startswith(GIT_LFS):
        raise UserError(f"{path} is git-lfs's note of where the file is: run `git lfs pull` in its folder.")


def list_files(folder: Path, pattern: str) -> list[Path]:
    """The files of a folder but for hidden ones: a Mac writes `._x` beside x where a disk is not its own.

    In the order of their names, in which x9 comes before x10.
    """

    def order(path: Path) -> tuple[Any, ...]:
        words = re.split(r"(\d+)", name_key(path))  # every other one is a number
        return [int(word) if i % 2 else word for i, word in enumerate(words)], path.suffix, path.name

    return sorted((path for path in folder.glob(pattern) if not path.name.startswith(".")), key=order)


def name_key(path: Path) -> str:
    """A file's name without its ending, the same however é is written (a Mac's e and ´) and in capitals."""
    return unicodedata.normalize("NFC", path.stem).casefold()


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
class WeightFiles:
    """A part's weights in one file or several, each of them whole when it was opened. Only headers have been read."""

    path: Path  # the part's folder, or its single file
    files: tuple[Path, ...]
    tensors: dict[str, dict[str, Any]]  # name → dtype and shape
    kind: str = "safetensors"  # or "gguf", by the content: a file of the hub's store has no ending

    @property
    def nbytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    @property
    def is_large(self) -> bool:
        return self.nbytes >= SMALL_PART_BYTES

    @property
    def is_wide(self) -> bool:
        """Whether a large part has matrices in float32, which are narrowed."""
        matrices = [tensor for tensor in self.tensors.values() if len(tensor["shape"]) == 2]
        return self.is_large and any(tensor["dtype"] == "F32" for tensor in matrices)

    def load(self) -> tuple[dict[str, mx.array], dict[str, str]]:
        """All tensors, lazily, and what else the headers say. Raises UserError."""
        arrays: dict[str, mx.array] = {}
        metadata: dict[str, str] = {}
        for file in self.files:
            try:
                tensors, words = cast(Any, mx.load(str(file), format=self.kind, return_metadata=True))
            except (RuntimeError, ValueError) as e:  # of a type that MLX has not, or cut short
                wanted = "one in Q8_0, Q4_0 or F16, or in safetensors" if self.kind == "gguf" else "another file"
                raise UserError(f"MLX cannot read {file} ({clip(str(e), 160)}): take {wanted}.") from None
            if self.kind == "gguf" and self.tensors.keys() - tensors.keys():  # MLX ends at a kind that it has not
                raise UserError(f"{file} has tensors of a kind that MLX cannot read: take one in Q8_0, Q4_0 or F16.")
            arrays |= tensors
            if self.kind == "gguf":  # whose words may be arrays of one number, or of many
                numbers = {name: w.item() for name, w in words.items() if isinstance(w, mx.array) and w.size == 1}
                words = {name: str(word) for name, word in (words | numbers).items() if not isinstance(word, mx.array)}
                words["format"] = "gguf"
            metadata |= words
        return arrays, metadata


def open_weights(path: Path) -> WeightFiles:
    """A part's weights, its one file or all shards of its folder, checked. Raises MissingFileError or UserError."""
    if path.is_file():
        return open_weight_file(path)
    files = find_weight_files(path)
    tensors: dict[str, dict[str, Any]] = {}
    owners: dict[str, Path] = {}
    for file in files:
        shard = open_weight_file(file)
        twice = next((name for name in shard.tensors if name in tensors), None)
        if twice:
            raise UserError(
                f"{clip(twice)} is in {owners[twice].name} and in {file.name}, both in {path}: move away the one that "
                "is not meant."
            )
        tensors |= shard.tensors
        owners |= dict.fromkeys(shard.tensors, file)
    return WeightFiles(path, tuple(files), tensors)


def find_weight_files(folder: Path) -> list[Path]:
    """The files with a part's weights: of several those that the libraries would read. Raises MissingFileError."""
    there = list_files(folder, "*.safetensors")
    usual = next((folder / name for name in USUAL_NAMES if (folder / name).exists()), None)
    if usual is None:
        files = there
    elif usual.suffix == ".json":
        files = read_shard_names(usual)
    else:
        files = [usual]
    if not files:
        raise MissingFileError(f"There is no .safetensors file in {folder}: download it again.")
    left = [path.name for path in there if path not in files]
    if left:
        say_once(f"{folder}: {first_few(left)} not read beside {first_few(path.name for path in files)}.")
    return files


def read_shard_names(index: Path) -> list[Path]:
    """The files that an index of shards names. Raises UserError unless they are plain names beside it."""
    places = read_json(index).get("weight_map")
    names = {str(name) for name in places.values()} if isinstance(places, dict) else set()
    if not names or not all(re.fullmatch(r"[^/\\\0]+\.safetensors", name) for name in names):
        raise UserError(f"{index} names no files beside it in which the weights are: download it again.")
    return [index.with_name(name) for name in sorted(names)]


def load_arrays(path: Path) -> dict[str, mx.array]:
    """All tensors of a part's folder or file, lazily."""
    return open_weights(path).load()[0]


def open_weight_file(path: Path) -> WeightFiles:
    """One weight file, whole as its library sees it. Raises MissingFileError or UserError."""
    start = check_file(path, SMALL_FILE)
    if start.startswith(GGUF):
        return WeightFiles(path, (path,), read_gguf(path), "gguf")
    size = path.stat().st_size
    try:
        if size <= SMALL_FILE:  # the library looks at header and length, not at the numbers
            found = deserialize(start.ljust(size, b"\0"))
            tensors = {name: {"dtype": w["dtype"], "shape": w["shape"]} for name, w in found}
        else:
            with safe_open(path, framework="mlx") as file:
                slices = {name: file.get_slice(name) for name in file.offset_keys()}
                tensors = {name: {"dtype": w.get_dtype(), "shape": w.get_shape()} for name, w in slices.items()}
    except SafetensorError as error:
        why = printable(str(error))[:100]
        said = f"{path} ({size:,} bytes) is not a whole safetensors file ({why})"
        raise UserError(f"{said}: download it again.") from None
    return WeightFiles(path, (path,), tensors)


def looks_like_weights(path: Path) -> bool:
    """Whether a file looks like weights, by its name or its first bytes; a folder may be an adapter's."""
    if path.suffix in (".safetensors", ".gguf"):
        return True
    if not path.is_file():
        return path.is_dir()
    with path.open("rb") as file:
        start = file.read(9)
    return start[8:] == b"{" or start.startswith(GGUF)
