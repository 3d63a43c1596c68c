"""A model as the site's visitors have it: with matrices of 8-bit numbers, in a folder that the package loads."""

import gzip
from pathlib import Path

import live
import numpy as np
from safetensors.numpy import load, save


def unpack_shard(content: bytes) -> bytes:
    """A packed shard → safetensors with float32 matrices: what packed.js does, written once more."""
    tensors = load(gzip.decompress(content))
    for name in [name for name, w in tensors.items() if w.dtype == np.int8]:
        rows = tensors[name].reshape(len(tensors[name]), -1) * tensors.pop(f"{name}.scale")[:, None]
        tensors[name] = rows.reshape(tensors[name].shape)
    return save(tensors)


def write_site_model(folder: Path, model: Path = live.NANO) -> Path:
    """The folder, filled; `base` in it is nano-base."""
    for path, content in live.pack_model(live.read_model(model)).items():
        packed = path.endswith(".gz")
        live.write_file(folder / path.removesuffix(".gz"), unpack_shard(content) if packed else content)
    return folder
