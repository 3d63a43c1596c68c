"""klein-nano as the site's visitors have it: with matrices of 8-bit numbers, in a folder that the package loads."""

import gzip
import json
import struct
from pathlib import Path

import live
import numpy as np


def unpack_shard(content: bytes) -> bytes:
    """A packed shard → safetensors with float32 matrices: what packed.js does, written once more."""
    content = gzip.decompress(content)
    (size,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]

    def read(name):
        return data[slice(*header[name]["data_offsets"])]

    tensors = {}
    for name, tensor in header.items():
        if tensor["dtype"] == "I8":
            scale = np.frombuffer(read(f"{name}.scale"), "<f4")[:, None]
            codes = np.frombuffer(read(name), np.int8).reshape(len(scale), -1)
            tensors[name] = ("F32", tensor["shape"], (codes * scale).astype("<f4").tobytes())
        elif header.get(name.removesuffix(".scale"), tensor)["dtype"] != "I8":
            tensors[name] = (tensor["dtype"], tensor["shape"], read(name))
    entries, body = {}, b""
    for name, (dtype, shape, values) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(values)]}
        body += values
    head = json.dumps(entries).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + body


def write_site_model(folder: Path) -> Path:
    """The folder, filled; `base` in it is nano-base."""
    for path, content in live.pack_model(live.read_model()).items():
        packed = path.endswith(".gz")
        live.write_file(folder / path.removesuffix(".gz"), unpack_shard(content) if packed else content)
    return folder
