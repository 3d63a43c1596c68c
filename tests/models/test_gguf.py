"""GGUF files: read where MLX can, refused by the name of their kind where it cannot."""

import struct
from pathlib import Path

import mlx.core as mx
import pytest

from kleinlite import Klein
from kleinlite.models.checkpoint import open_checkpoint
from kleinlite.models.files import load_arrays, open_weight_file
from kleinlite.models.gguf import KINDS, READABLE

NANO = Path(__import__("kleinlite").__file__).parent / "nano" / "weights"
BLOCKS = {"F32": (1, 4), "F16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q8_0": (32, 34)}
BLOCKS |= {"Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210)}
BLOCKS |= {"BF16": (1, 2)}


def write_gguf(path: Path, kind: str, data: bytes = b"", name: bytes = b"x.weight") -> Path:
    """One tensor (2, 256)."""
    number = next(number for number, word in KINDS.items() if word == kind)

    def text(words):
        return struct.pack("<Q", len(words)) + words

    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 2)
    head += text(b"general.architecture") + struct.pack("<I", 8) + text(b"flux")
    head += text(b"list") + struct.pack("<IIQ", 9, 4, 3) + bytes(12)
    head += text(name) + struct.pack("<IQQIQ", 2, 256, 2, number, 0)
    count, nbytes = BLOCKS[kind]
    path.write_bytes(head + bytes(-len(head) % 32) + (data or bytes(512 // count * nbytes)))
    return path


@pytest.mark.parametrize("kind", BLOCKS)
def test_kinds_are_read_or_refused_by_name(tmp_path, kind):
    path = write_gguf(tmp_path / "x.gguf", kind)
    if kind in READABLE:
        assert open_weight_file(path).tensors == {"x.weight": {"dtype": kind, "shape": [2, 256]}}
        mx.eval(mx.load(str(path)))
    else:
        with pytest.raises(ValueError, match=f"of the kind {kind}"):
            open_weight_file(path)
        with pytest.raises(RuntimeError):
            mx.eval(mx.load(str(path)))


@pytest.mark.parametrize("damage", [b"", b"GGUF", b"GGUF" + bytes(200), b"\xff" * 64])
def test_damaged_files_are_told(tmp_path, damage):
    path = tmp_path / "x.gguf"
    path.write_bytes(damage)
    with pytest.raises(ValueError, match="is not a GGUF file"):
        open_weight_file(path)


def test_what_would_end_the_process_is_refused(tmp_path):
    """More axes than the format has, and lists in lists without end."""
    data = write_gguf(tmp_path / "x.gguf", "F16").read_bytes()
    place = data.index(b"x.weight") + 8
    (tmp_path / "axes.gguf").write_bytes(data[:place] + struct.pack("<I", 9) + data[place + 4 :])
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 4) + b"list" + struct.pack("<I", 9)
    (tmp_path / "lists.gguf").write_bytes(head + struct.pack("<IQ", 9, 1) * 100_000)
    for name in ("axes.gguf", "lists.gguf"):
        with pytest.raises(ValueError, match="is not a GGUF file"):
            load_arrays(tmp_path / name)


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


def test_what_is_no_klein_says_what_it_is(tmp_path):
    names = ("encoder.0.weight", "encoder.1.conv.0.weight", "decoder.3.skip.weight", "decoder.1.bias")
    path = tmp_path / "taef2.safetensors"
    mx.save_safetensors(str(path), {name: mx.zeros((4,)) for name in names})
    for parts in (None, "nano"):
        with pytest.raises(ValueError, match="tiny autoencoder for previews"):
            Klein.from_pretrained(path, parts=parts)
    with pytest.raises(ValueError, match="tiny autoencoder for previews"):
        Klein.from_pretrained("nano", parts={"vae": path})
