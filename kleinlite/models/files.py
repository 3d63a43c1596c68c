"""A part's files on this machine: JSON, shards and their index, and whether weights are whole. Hand-written.

What a damaged weight file is, the safetensors library decides; here it becomes a sentence.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import mlx.core as mx
from safetensors import SafetensorError, safe_open

from ..checkpoints import read_header


def read_json(path: Path) -> dict:
    """A JSON file that holds names and values. Raises FileNotFoundError or ValueError with a sentence."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: the folder is not a complete model in the released layout.")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{path} is not valid JSON ({e}): download it again.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is JSON, but not a list of names and their values: download it again.")
    return found


def check_weights_file(path: Path) -> None:
    """Refuse a safetensors file that is damaged or was cut short. Raises ValueError."""
    try:
        with safe_open(path, framework="np"):
            return
    except (SafetensorError, OSError) as error:
        why = printable(str(error).removeprefix("Error while deserializing header: "))[:100]
    size, needed = path.stat().st_size, 0
    with contextlib.suppress(Exception):  # only to tell a file that was cut from one that is damaged
        end = max(t["data_offsets"][1] for t in read_header(path).values())
        with path.open("rb") as f:
            needed = 8 + int.from_bytes(f.read(8), "little") + end
    if size < needed:
        raise ValueError(f"{path} has {size:,} of {needed:,} bytes, the rest is missing: download it again.")
    raise ValueError(f"{path} is not a safetensors file, or it is damaged ({why}): download it again.")


def printable(text: str) -> str:
    """Words from a stranger's file, with control characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def list_weights_files(path: Path) -> list[Path]:
    """The files with a part's weights: all shards of a folder, or the one file. Raises if one is missing or damaged."""
    if path.is_file():
        shards = [path]
    elif index := sorted(path.glob("*.safetensors.index.json")):
        shards = [path / name for name in sorted(set(read_json(index[0]).get("weight_map", {}).values()))]
    else:
        shards = sorted(path.glob("*.safetensors"))
    if not shards:
        raise FileNotFoundError(
            f"There is no .safetensors file in {path}: the model is not complete, download it again."
        )
    for file in shards:
        if not file.exists():
            raise FileNotFoundError(f"{file} is named in {index[0].name} but missing: download the model again.")
        check_weights_file(file)
    return shards


def load_arrays(path: Path) -> dict[str, mx.array]:
    """All tensors of a part's folder or file. The arrays are lazy: nothing is read before it is used."""
    arrays = {}
    for file in list_weights_files(path):
        try:
            arrays.update(mx.load(str(file)))
        except RuntimeError as e:
            raise ValueError(f"MLX cannot read {file} ({e}): download it again, or take another model.") from None
    return arrays


def read_metadata(path: Path) -> dict[str, str]:
    """The words in the headers of a part's files."""
    metadata = {}
    for file in list_weights_files(path):
        with safe_open(file, framework="np") as opened:
            metadata |= opened.metadata() or {}
    return metadata
