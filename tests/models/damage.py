"""Ways to damage a model's files, and what must come of it: the model, or one sentence."""

import copy
import json
import random
import shutil
import struct
from pathlib import Path

import mlx.core as mx
import numpy as np
from packings import as_nvfp4
from safetensors import SafetensorError
from safetensors.numpy import load_file
from stand_in_hub import TINY

from kleinlite.models.checkpoint import open_checkpoint
from kleinlite.models.files import load_arrays

ODD = [
    None, True, False, 0, 1, -1, 2, 3.5, -0.0, 1e-9, 1e30, float("nan"), float("inf"), 10**9, 10**30, "", "x", "16", [],
    {}, [None], [0], [1, 2], ["x"] * 4, [8, 8, 8, 8.5], [[8]], {"a": 1}, {"rope_theta": "x"}, {"bits": 4},
    "\x1b[2J", "é" * 500,
]  # fmt: skip


def one_sentence(error: Exception) -> bool:
    text = str(error)
    short = 20 < len(text) < 1000 and len(text.splitlines()) == 1 and text.isprintable()
    return short and text.endswith((".", "?")) and isinstance(error, (ValueError, OSError))


def places(value: object, path: tuple = ()) -> list[tuple]:
    """Every place in a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(p for key, v in inside for p in places(v, (*path, key)))]


def change(value: object, place: tuple, new: object) -> object:
    """A copy with another value at a place; the place goes if `new` is `change` itself."""
    value = copy.deepcopy(value)
    if not place:
        return new
    at = value
    for key in place[:-1]:
        at = at[key]
    if new is change:
        del at[place[-1]]
    else:
        at[place[-1]] = new
    return value


def damage_header(data: bytes, rng: random.Random) -> bytes:
    """One of a few kinds of damage to a safetensors file."""
    length = struct.unpack("<Q", data[:8])[0]
    text, rest = data[8 : 8 + length], data[8 + length :]
    kind = rng.randrange(9)
    if kind == 0:  # some byte of the header
        i = rng.randrange(len(text))
        return data[: 8 + i] + bytes([rng.randrange(256)]) + data[9 + i :]
    if kind == 1:  # the length
        wrong = max(0, length + rng.choice([-1, 1, -8, 8, 2**20, 2**40, rng.randrange(-length, 100)]))
        return struct.pack("<Q", wrong) + data[8:]
    if kind == 2:  # cut, or longer
        return data[: rng.randrange(len(data))] if rng.random() < 0.7 else data + bytes(rng.randrange(1, 100))
    if kind == 3:  # brackets without end, other alphabets
        text = rng.choice(
            [b"[" * 5000 + b"]" * 5000, text.decode().encode("utf-16"), b"\xff" + text, b"\xef\xbb\xbf" + text]
        )
    else:
        header = json.loads(text)
        name = rng.choice(list(header))
        if kind == 4 and "data_offsets" in header[name]:  # shares bytes with another, or leaves some out
            offsets = header[name]["data_offsets"]
            header[name]["data_offsets"] = [max(0, x + rng.choice([0, 0, -2, 2, 64])) for x in offsets]
        elif kind == 5 and "shape" in header[name]:
            shape = header[name]["shape"]
            header[name]["shape"] = rng.choice(
                [shape[::-1], [*shape, 1], [-x for x in shape], [x + 2**32 for x in shape]]
            )
        elif kind == 6 and "dtype" in header[name]:
            header[name]["dtype"] = rng.choice(["F32", "BF16", "I8", "F8_E4M3", "F99", "", "C64", None, "BOOL"])
        elif kind == 7:
            header = change(
                header, rng.choice(places(header)), rng.choice([*ODD, change]) if rng.random() < 0.9 else "y"
            )
        else:
            header[rng.choice(["__metadata__", "x", "", "\ud800"])] = rng.choice(ODD)
        text = json.dumps(header).encode("utf-8", "replace")
    return struct.pack("<Q", len(text)) + text + rest


def weights_are_read_as_written_or_refused(path: Path) -> bool:
    """Whether a file was read. Fails where we read what the safetensors library refuses, or read it otherwise."""
    try:
        found = load_arrays(path)
    except (ValueError, OSError) as error:
        assert one_sentence(error), repr(error)
        return False
    try:
        expected = load_file(path)
    except (SafetensorError, TypeError, KeyError, AttributeError) as error:  # numpy lacks a type
        assert "Error while deserializing" not in str(error), error
        return True
    assert found.keys() == expected.keys()
    for name, w in expected.items():
        ours = np.array(found[name].view(mx.uint8)) if w.nbytes and w.ndim else np.zeros(0)
        assert not ours.size or ours.tobytes() == w.tobytes(), name
    return True


# ---------------------------------------------------------------- adapters

DEEP = "[" * 100_000 + "]" * 100_000
ODD_WORDS = [DEEP, "", "{", "[]", '{"lora_alpha": 1' + 400 * "0" + "}", "x" * 300_000, "\x1b[2J" * 100]
ODD_WORDS += [json.dumps({"alpha_pattern": {pattern: 4}}) for pattern in ("(([a-z_.0-9])+)+!", "(" * 3000, "to_q", "")]
TYPES = [mx.float32, mx.float16, mx.bfloat16, mx.uint8, mx.int8, mx.uint32, mx.int64, mx.bool_, mx.complex64]


def damage_words(words: dict[str, str], rng: random.Random) -> dict[str, str]:
    """What a header says of an adapter, with one thing of it another."""
    name = rng.choice(["lora_adapter_metadata", "kleinlite", "model", "ss_base_model_version"])
    if rng.random() < 0.5:
        return words | {name: rng.choice(ODD_WORDS)}
    said = json.loads(words.get("lora_adapter_metadata", "{}"))
    place = rng.choice(places(said)[1:] or [("lora_alpha",)])
    said = change(said | {"lora_alpha": 4}, place, rng.choice(ODD))
    return words | {name: json.dumps(said)}


def damage_tensor(arrays: dict[str, mx.array], rng: random.Random) -> dict[str, mx.array]:
    """A file's tensors, with one gone, doubled, renamed, or of another type, shape or content."""
    name = rng.choice(sorted(arrays))
    w = arrays[name]
    kind = rng.randrange(8)
    rest = {key: other for key, other in arrays.items() if key != name}
    if kind == 0:
        return rest
    if kind == 1:
        return arrays | {rng.choice([name + "x", "x" * 300, "a\nb", name.rpartition(".")[0] + ".biases"]): w}
    if kind == 2:
        return rest | {rng.choice([name.replace(".", "_"), name[1:], name.rpartition(".")[0] + ".alpha"]): w}
    if kind == 3:
        return arrays | {name: w.astype(rng.choice(TYPES))}
    if kind == 4:
        shapes = [(-1,), (1, *w.shape), (*w.shape, 1), (1,) * 20 + w.shape]
        return arrays | {name: w.reshape(rng.choice(shapes))}
    if kind == 5:
        return arrays | {name: mx.contiguous(w[: rng.randrange(len(w))] if w.ndim else mx.stack([w, w]))}
    if kind == 6:
        return arrays | {name: mx.full(w.shape, rng.choice([0, 1, 255, float("nan"), 3e38])).astype(w.dtype)}
    return arrays | {name: mx.zeros(rng.choice([(), (0,), (0, 3), (1,), (3, 3), (2**16, 1)])).astype(w.dtype)}


# ---------------------------------------------------------------- whole models

HEADER_WORDS = ("_quantization_metadata", "quantization", "format", "quantization_level")
ODD_BYTES = [b"", b"{", b"[]", b"null", b"5", b"\xff\xfe", b'{"format": [1]}', b'{"convrot": 2}', DEEP.encode()]


def write_packed_model(folder: Path) -> Path:
    """tests/pipelines/tiny in shards, its transformer's matrices packed in three ways, as their programs say it."""
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("base", "expected.safetensors"))
    weights = open_checkpoint(folder, dtype=mx.float32).weights("transformer")
    arrays: dict[str, mx.array] = {}
    said = {}
    for name, w in weights.items():
        layer = name.removesuffix(".weight")
        if w.ndim < 2 or "blocks" not in name:
            arrays[name] = mx.contiguous(w)
        elif name == "single_blocks.0.linear2.weight":
            words = ("weight", "scales", "biases")
            arrays |= {f"{layer}.{word}": part for word, part in zip(words, mx.quantize(w, group_size=32, bits=4))}
        elif name == "single_blocks.1.linear2.weight":
            arrays |= {f"{layer}.{word}": part for word, part in as_nvfp4(w.astype(mx.float32), "tiled").items()}
            said[layer] = {"format": "nvfp4"}
        else:
            scale = mx.abs(w).max().astype(mx.float32) / 448
            arrays |= {name: mx.to_fp8(w.astype(mx.float32) / scale), f"{layer}.weight_scale": scale}
            arrays[f"{layer}.comfy_quant"] = mx.array([*b'{"format": "float8_e4m3fn"}'], mx.uint8)
    mx.eval(arrays)
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    mx.save_safetensors(str(file), arrays, {"_quantization_metadata": json.dumps({"layers": said})})
    config = file.with_name("config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization": {"group_size": 32, "bits": 4}}))
    shard = folder / "text_encoder" / "model-1-of-1.safetensors"
    names = mx.load(str(shard.with_name("model.safetensors").rename(shard)))
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, shard.name)}
    shard.with_name("model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def damage_model(folder: Path, rng: random.Random) -> None:
    """Damage a word of a model's JSON files or of its header, or one of its packed tensors."""
    texts = sorted(
        path for path in folder.rglob("*.json") if "tokenizer" not in path.parts and path.name != "meta.json"
    )
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    kind = rng.randrange(4)
    if kind == 0:
        path = rng.choice(texts)
        said = json.loads(path.read_text())
        said = change(said, rng.choice(places(said)), rng.choice([*ODD, change]))
        path.write_text(rng.choice([json.dumps(said)] * 9 + [DEEP, "{", ""]), "utf-8", "replace")
        return
    arrays, words = mx.load(str(file), return_metadata=True)
    if kind == 1:
        said = json.loads(words["_quantization_metadata"])
        said = change(said, rng.choice(places(said)), rng.choice(ODD))
        words |= {rng.choice(HEADER_WORDS): rng.choice([json.dumps(said), *ODD_WORDS])}
    elif kind == 2:
        name = rng.choice([name for name in arrays if name.endswith(".comfy_quant")])
        arrays |= {name: mx.array([*rng.choice(ODD_BYTES)], mx.uint8).astype(rng.choice(TYPES))}
    else:
        packed = {name: w for name, w in arrays.items() if "scale" in name or "biases" in name or w.dtype.size < 4}
        arrays = {name: w for name, w in arrays.items() if name not in packed} | damage_tensor(packed, rng)
    mx.eval(arrays)
    mx.save_safetensors(str(file), arrays, words)
