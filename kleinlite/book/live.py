"""What the pages need to draw in a visitor's browser: scripts, and klein-nano cut so that nobody loads what is not used.

Both are copied beside the chapters when the site is built, each to a folder named after what it holds: a browser that
keeps an old script never meets new weights. The model's folder stays one that `Klein.from_pretrained` and diffusers
load: its weights are sharded by what needs them, the safetensors way.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from pathlib import Path

SCRIPTS = Path(__file__).parent / "javascript"
NANO = Path(__file__).parents[1] / "nano"
FOLDER = "live"  # beside the chapters; not in git
LATER = {"vae": r"(encoder|quant_conv)\.", "text_encoder": r"model\.norm\."}  # what drawing does without: a shard of its own


def shards(file: Path, later: str) -> dict[str, bytes]:
    """A safetensors file as one or two shards and their index, by file name: first what is needed at once."""
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    about = header.pop("__metadata__", None)
    parts = [[n for n in header if not re.match(later, n)], [n for n in header if re.match(later, n)]]
    parts = [names for names in parts if names]
    found, where = {}, {}
    for i, names in enumerate(parts, start=1):
        name = f"{file.stem}-{i:05}-of-{len(parts):05}.safetensors"
        entries, body = {"__metadata__": about} if about else {}, b""
        for tensor in names:
            first, end = header[tensor]["data_offsets"]
            entries[tensor] = header[tensor] | {"data_offsets": [len(body), len(body) + end - first]}
            body += data[first:end]
            where[tensor] = name
        head = json.dumps(entries, separators=(",", ":")).encode()
        head += b" " * (-len(head) % 8)
        found[name] = struct.pack("<Q", len(head)) + head + body
    index = {"metadata": {"total_size": len(data)}, "weight_map": where}
    return found | {f"{file.name}.index.json": json.dumps(index).encode()}


def model_files(nano: Path = NANO) -> dict[str, bytes]:
    """The model's folder as the site serves it, by path."""
    config = json.loads((nano / "text_encoder/config.json").read_text("utf-8"))
    taps = json.loads((nano / "model_index.json").read_text("utf-8"))["text_encoder_out_layers"]
    above = "|".join(str(layer) for layer in range(max(taps), config["num_hidden_layers"]))
    later = LATER | {"text_encoder": rf"model\.(norm|layers\.({above}))\."}
    found = {}
    for file in sorted(f for f in nano.rglob("*") if f.suffix in (".json", ".safetensors")):
        path = file.relative_to(nano)
        if file.suffix == ".json":
            found[path.as_posix()] = file.read_bytes()
        else:
            cut = shards(file, later.get(path.parts[0], r"$^"))
            found |= {(path.parent / name).as_posix(): content for name, content in cut.items()}
    return found


def script_files() -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in sorted(SCRIPTS.iterdir()) if f.suffix in (".js", ".wasm", ".css")}


def write(folder: Path, name: str, files: dict[str, bytes]) -> str:
    """Write files to folder/name-HASH, if it is not there, and nothing else of that name stays; returns its name."""
    digest = hashlib.sha256()
    for path, content in files.items():
        digest.update(f"{path} {len(content)}\n".encode() + content)
    called = f"{name}-{digest.hexdigest()[:10]}"
    for path, content in files.items():
        there = folder / called / path
        if not there.exists():  # writing it again would make `mdbook serve` build again, for ever
            there.parent.mkdir(parents=True, exist_ok=True)
            there.write_bytes(content)
    return called
