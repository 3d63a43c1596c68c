"""GGUF files: read where MLX can, and told in a sentence where it cannot."""

import struct
from pathlib import Path

import mlx.core as mx
import pytest
from damage import one_sentence

from kleinlite import Klein
from kleinlite.errors import UserError
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


def word(kind: int, value: bytes = b"1234", name: bytes = b"abcde") -> bytes:
    """A word of a header, and before it the counts of one word and no tensor."""
    return struct.pack("<IQQQ", 3, 0, 1, len(name)) + name + struct.pack("<I", kind) + value


def tensor(name: bytes = b"x", dimensions: int = 1) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", dimensions) + struct.pack("<QIQ", 1, 0, 0)


@pytest.mark.parametrize(
    "head, why",
    [
        (struct.pack(">IQQ", 3, 2, 1) + bytes(64), "version 50331648"),
        (struct.pack("<III", 1, 2, 3) + bytes(64), "version 1"),
        (struct.pack("<IQQ", 4, 0, 0), "version 4"),
        (word(77), "type 77"),
        (word(4, name=b"\xff\xfe"), "decode"),
        (word(8, struct.pack("<Q", 2**63)), "cut short"),
        (word(9, struct.pack("<IQ", 4, 2**60)), "cut short"),
        (word(9, struct.pack("<IQ", 8, 2**40)), "cut short"),
        (word(9, struct.pack("<IQ", 9, 1) * 100_000), ""),  # lists of lists of lists …
        (struct.pack("<IQQ", 3, 2**40, 0) + bytes(10**6), "'' has 0 dimensions"),
        (struct.pack("<IQQ", 3, 2**40, 0) + tensor() + bytes(10**6), "'' has 0 dimensions"),
        (struct.pack("<IQQ", 3, 2, 0) + 2 * tensor(), "the name 'x' of a tensor"),
        (struct.pack("<IQQ", 3, 1, 0) + tensor(b""), "the name '' of a tensor"),
        (struct.pack("<IQQ", 3, 1, 0) + tensor(dimensions=2**31) + bytes(10**6), "'x' has 2147483648 dimensions"),
        (struct.pack("<IQQ", 3, 1, 0) + tensor(dimensions=0), "'x' has 0 dimensions"),
    ],
)
def test_a_damaged_header_is_a_sentence(tmp_path, head, why):
    """And nothing is looked for behind the file's end, however many entries are announced."""
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + head)
    with pytest.raises(
        UserError, match="x.gguf is no whole GGUF file of version 2 or 3 .*: download it again"
    ) as refusal:
        open_weight_file(path)
    assert why in str(refusal.value) and one_sentence(refusal.value)


def test_a_header_that_is_cut_anywhere(tmp_path):
    whole = write_gguf(tmp_path / "x.gguf", "F16").read_bytes()
    end = whole.index(b"x.weight") + 8 + 4 + 2 * 8 + 4 + 8
    path = tmp_path / "cut.gguf"
    for size in range(4, end):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match="cut short"):
            open_weight_file(path)
    path.write_bytes(whole[:end])
    assert open_weight_file(path).tensors.keys() == {"x.weight"}


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
