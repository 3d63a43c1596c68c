"""GGUF files: read where MLX can, and told in a sentence where it cannot."""

import struct
from pathlib import Path

import mlx.core as mx
import pytest

from kleinlite import Klein
from kleinlite.models.checkpoint import open_checkpoint
from kleinlite.models.files import load_arrays, open_weight_file

NANO = Path(__import__("kleinlite").__file__).parent / "nano" / "weights"
BLOCKS = {"F32": (1, 4), "F16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q8_0": (32, 34)}
BLOCKS |= {"Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210)}
BLOCKS |= {"BF16": (1, 2)}
KINDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q5_K": 13}
KINDS |= {"Q6_K": 14, "BF16": 30}


def write_gguf(path: Path, kind: str, data: bytes = b"", name: bytes = b"x.weight") -> Path:
    """One tensor (2, 256)."""

    def text(words):
        return struct.pack("<Q", len(words)) + words

    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 2)
    head += text(b"general.architecture") + struct.pack("<I", 8) + text(b"flux")
    head += text(b"list") + struct.pack("<IIQ", 9, 4, 3) + bytes(12)
    head += text(name) + struct.pack("<IQQIQ", 2, 256, 2, KINDS[kind], 0)
    count, nbytes = BLOCKS[kind]
    path.write_bytes(head + bytes(-len(head) % 32) + (data or bytes(512 // count * nbytes)))
    return path


@pytest.mark.parametrize("kind", BLOCKS)
def test_kinds_are_read_or_refused(tmp_path, kind):
    path = write_gguf(tmp_path / "x.gguf", kind)
    dtype = kind if kind in ("F32", "F16", "BF16") else f"GGUF {KINDS[kind]}"
    assert open_weight_file(path).tensors == {"x.weight": {"dtype": dtype, "shape": [2, 256]}}
    if kind in ("Q5_0", "Q3_K", "Q5_K"):
        with pytest.raises(ValueError, match="MLX cannot read .*x.gguf .*: take one in Q8_0"):
            load_arrays(path)
    else:
        mx.eval(load_arrays(path))


def test_a_download_that_was_cut(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", "F16")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="x.gguf .*past the end of the file. Perhaps an incomplete download"):
        load_arrays(path)
    path.write_bytes(b"<html>")
    with pytest.raises(ValueError, match="download it again"):
        load_arrays(path)


def pack_q8(w: mx.array) -> bytes:
    """Q8_0: groups of 32 numbers, a float16 scale and 32 whole numbers each."""
    groups = w.astype(mx.float32).reshape(-1, 32)
    scales = mx.abs(groups).max(axis=1, keepdims=True) / 127
    codes = mx.round(groups / mx.maximum(scales, 1e-12)).astype(mx.int8)
    pairs = zip(scales.astype(mx.float16)[:, 0], codes)
    return b"".join(bytes(memoryview(mx.array([s]))) + bytes(memoryview(c)) for s, c in pairs)


def write_transformer(path: Path, arrays: dict[str, mx.array]) -> Path:
    """A transformer: matrices in Q8_0 where rows are multiples of 32, all else in float16."""

    def text(words):
        return struct.pack("<Q", len(words)) + words

    infos, blobs = b"", []
    offset = 0
    for name, w in arrays.items():
        packed = w.ndim == 2 and w.shape[1] % 32 == 0
        blob = pack_q8(w) if packed else bytes(memoryview(w.astype(mx.float16)))
        infos += text(name.encode()) + struct.pack("<I", w.ndim) + b"".join(struct.pack("<Q", n) for n in w.shape[::-1])
        infos += struct.pack("<IQ", 8 if packed else 1, offset)
        blobs.append(blob + bytes(-len(blob) % 32))
        offset += len(blobs[-1])
    head = b"GGUF" + struct.pack("<IQQ", 3, len(arrays), 0) + infos
    path.write_bytes(head + bytes(-len(head) % 32) + b"".join(blobs))
    return path


@pytest.mark.slow
def test_a_transformer_draws_from_a_gguf_file(tmp_path):
    from mlx.utils import tree_flatten

    checkpoint = open_checkpoint("nano", dtype=mx.float32)
    arrays = dict(tree_flatten(checkpoint.load_transformer().parameters()))
    path = write_transformer(tmp_path / "klein-4b-Q8_0.gguf", arrays)
    klein = Klein.from_pretrained(path, parts="nano", dtype=mx.float32)
    right = Klein.from_pretrained("nano", dtype=mx.float32)
    a, b = (list(k.stream("a red circle", seed=7, progress=False, steps=4))[-1] for k in (klein, right))
    assert mx.abs(a.latents - b.latents).max().item() < 0.05 * mx.abs(b.latents).max().item()
