"""A part's files on this machine: JSON, shards and their index, and whether weights are whole. Hand-written.

What a damaged weight file is, the safetensors library decides; here it becomes a sentence.
"""

import contextlib
import json
import re
from pathlib import Path

import mlx.core as mx
from safetensors import SafetensorError, deserialize, safe_open

from ..checkpoints import read_header
from ..errors import printable

# Bytes up to which a file is checked in memory: `safe_open` imports numpy, which takes longer than drawing with nano.
SMALL_FILE = 2**25
LARGEST_JSON = 2**26  # bytes; an index of the largest model has a hundredth of it


def check_file(path: Path) -> None:
    """Refuse what is no file: nothing, a link that leads nowhere, a pipe that would wait for ever."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: the folder is not a complete model in the released layout.")
    if not path.is_file():
        raise ValueError(f"{path} is not a file, but a folder, a pipe or a device: the folder is not a complete model.")


def read_json(path: Path) -> dict:
    """A JSON file that holds names and values. Raises FileNotFoundError or ValueError with a sentence."""
    check_file(path)
    if path.stat().st_size > LARGEST_JSON:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes, far too many for what it is: download it again.")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path} is not valid JSON ({printable(str(e))[:100]}): download it again.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is JSON, but not a list of names and their values: download it again.")
    return found


def check_weights_file(path: Path) -> None:
    """Refuse a safetensors file that is damaged or was cut short. Raises ValueError."""
    try:
        if path.stat().st_size <= SMALL_FILE:
            deserialize(path.read_bytes())
        else:
            with safe_open(path, framework="np"):
                pass
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


def list_weights_files(path: Path) -> list[Path]:
    """The files with a part's weights: all shards of a folder, or the one file.

    Raises FileNotFoundError or ValueError if one is missing, damaged, or not in the folder.
    """
    if path.is_file():
        check_weights_file(path)
        return [path]
    if index := sorted(path.glob("*.safetensors.index.json")):
        files = [path / name for name in read_shard_names(index[0])]
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"There is no .safetensors file in {path}: the model is not complete, download it again."
        )
    for file in files:
        if not file.is_file():
            why = f"named in {index[0].name} but missing" if index else "a link to a file that is missing"
            raise FileNotFoundError(f"{file} is {why}: download the model again.")
        if not is_inside(file, path):
            raise ValueError(f"{file} is a link to a file outside of the folder: copy that file here.")
        check_weights_file(file)
    return files


def read_shard_names(index: Path) -> list[str]:
    """The files that an index of shards names. Raises ValueError unless they are plain names beside it."""
    places = read_json(index).get("weight_map")
    names = list(places.values()) if isinstance(places, dict) else []
    plain = lambda name: isinstance(name, str) and re.fullmatch(r"[^/\\\0]+\.safetensors", name)
    if not names or not all(map(plain, names)):
        raise ValueError(f"{index} names no files beside it in which the weights are: download it again.")
    return sorted(set(names))


def is_inside(file: Path, folder: Path) -> bool:
    """Whether a file of this folder really lies in it or, where the folder is of the hub's cache, in its store."""
    stores = [folder.resolve()]
    for parent in folder.absolute().parents:
        if parent.name == "snapshots":  # …/hub/models--owner--name/snapshots/commit/vae
            repository = parent.parent.resolve()
            stores += [repository / "blobs", repository.parent / "blobs"]
    real = file.resolve()
    return any(real.is_relative_to(store) for store in stores)


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
        metadata |= mx.load(str(file), return_metadata=True)[1]
    return metadata
