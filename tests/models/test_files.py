"""Weight files: what the safetensors library refuses is refused in a sentence, and so is what lies elsewhere."""

import json
import os
import random
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from damage import damage_header, one_sentence, weights_are_read_as_written_or_refused
from stand_in_hub import TINY

from kleinlite.errors import UserError, explain_error
from kleinlite.models.checkpoint import open_checkpoint
from kleinlite.models.export import quantize_model
from kleinlite.models.files import load_arrays, open_weights

VAE = "vae/diffusion_pytorch_model.safetensors"


@pytest.fixture
def model(tmp_path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "model", ignore=shutil.ignore_patterns("base")))


@pytest.fixture
def told(model):
    """told(words): the sentence with which the model is refused has these words."""

    def call(*words: str):
        with pytest.raises((ValueError, OSError)) as refusal:
            open_checkpoint(model, dtype=mx.float32)
        assert one_sentence(refusal.value), refusal.value
        assert all(word in str(refusal.value) for word in words), refusal.value

    return call


def test_thousands_of_damaged_headers(tmp_path):
    rng, path = random.Random(7), tmp_path / "x.safetensors"
    arrays = {"a.weight": mx.arange(12.0).reshape(3, 4), "b": mx.arange(6, dtype=mx.uint8), "c": mx.array(2.0)}
    mx.save_safetensors(str(path), arrays, {"format": "pt"})
    data, read = path.read_bytes(), 0
    for _ in range(2500):
        path.write_bytes(damage_header(data, rng))
        read += weights_are_read_as_written_or_refused(path)
    assert 100 < read < 1500


def test_a_header_that_is_one_byte_short(model, told):
    """Every weight would be shifted by a byte."""
    path = model / "transformer/diffusion_pytorch_model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    data = (length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :]
    path.write_bytes(length.to_bytes(8, "little") + data[8:])
    told(str(path), "not a whole safetensors file", "not fully covered")


@pytest.mark.parametrize("where", ["../../outside.safetensors", "/etc/passwd", "..\\x.safetensors", "", "x.bin", 7])
def test_shards_are_plain_names(model, told, where):
    shutil.copy(model / VAE, model.parent / "outside.safetensors")
    (model / f"{VAE}.index.json").write_text(json.dumps({"weight_map": {"a": where}}))
    told("index.json names no files beside it")


@pytest.mark.parametrize(
    "said", [{}, {"weight_map": {}}, {"weight_map": ["x.safetensors"]}, {"weight_map": None}], ids=str
)
def test_an_index_that_names_nothing(model, told, said):
    (model / f"{VAE}.index.json").write_text(json.dumps(said))
    told("index.json names no files beside it")


def test_links_are_followed(model, tmp_path):
    """The hub's cache is made of them, and its store may lie on another disk."""
    outside = (model / VAE).rename(tmp_path / "0123456789abcdef")
    (model / VAE).symlink_to(outside)
    assert open_checkpoint(model, dtype=mx.float32)


def test_a_link_that_leads_nowhere(model, told):
    (model / VAE).unlink()
    (model / VAE).symlink_to("nowhere")
    told(VAE, "missing")


@pytest.mark.parametrize("file", ["vae/config.json", "model_index.json", "tokenizer/tokenizer.json", VAE])
def test_pipes_and_devices(model, told, file):
    (model / file).unlink()
    os.mkfifo(model / file)
    told(file, "missing")
    (model / file).unlink()
    (model / file).symlink_to("/dev/zero")
    told(file, "missing")


def test_a_copy_takes_only_what_lies_there(model, tmp_path):
    """People publish it."""
    (tmp_path / "secret.txt").write_text("mine")
    (model / "tokenizer" / "notes.txt").symlink_to(tmp_path / "secret.txt")
    (model / "tokenizer" / "id_rsa").write_text("mine")
    quantize_model(model, tmp_path / "copy", 8, progress=False)
    names = {path.name for path in (tmp_path / "copy" / "tokenizer").iterdir()}
    assert names == {path.name for path in (TINY / "tokenizer").iterdir()}


# ---------------------------------------------------------------- every tensor has one place

OTHERS = [".fp16", ".old", " copy", "_ema", "-v2", "", "z", "a"]


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("file", [VAE, "text_encoder/model.safetensors"])
def test_of_two_files_the_one_that_the_libraries_read(model, caplog, file, other):
    path = model / file
    arrays = load_arrays(path)
    mx.eval(arrays)
    name = f"{path.stem}{other}" if other and not other.isalpha() else f"{other}x"
    mx.save_safetensors(str(path.with_name(f"{name}.safetensors")), {k: w + 100 for k, w in arrays.items()})
    assert open_weights(path.parent).files == (path,)
    assert f"{name}.safetensors not read beside {path.name}" in caplog.messages[-1]


def test_a_tensor_in_two_files(model, told):
    path = model / VAE
    arrays = load_arrays(path)
    mx.eval(arrays)
    path.unlink()
    first, second = "one-00001-of-00002.safetensors", "one-00002-of-00002.safetensors"
    names = sorted(arrays)
    for name, own in ((first, names[:9]), (second, names[9:])):
        mx.save_safetensors(str(path.with_name(name)), {k: arrays[k] for k in own})
    assert open_checkpoint(model, dtype=mx.float32)
    mx.save_safetensors(str(path.with_name(second)), {k: arrays[k] for k in names[8:]})
    told(names[8], first, second)
    weights = {name: first if name in names[:9] else second for name in names}
    path.with_name(f"{path.name}.index.json").write_text(json.dumps({"weight_map": weights}))
    told(names[8], first, second)


def test_what_a_mac_writes_beside_files(model, caplog):
    """On a disk that is not its own: ._x beside x, 4 kB that begin with 00 05 16 07."""
    for path in [path for path in model.rglob("*") if path.is_file()]:
        path.with_name(f"._{path.name}").write_bytes(b"\0\5\x16\7" + bytes(4092))
    (model / "vae" / "._diffusion_pytorch_model.safetensors.index.json").write_bytes(b"\0\5\x16\7")
    assert open_checkpoint(model, dtype=mx.float32) and caplog.messages == []
    quantize_model(model, model.parent / "copy", 8, progress=False)
    assert not list((model.parent / "copy").rglob("._*"))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 123\n".format("0" * 64)


@pytest.mark.parametrize("file", [VAE, "tokenizer/tokenizer.json", "vae/config.json"])
def test_a_note_of_git_lfs(model, told, file):
    (model / file).write_text(POINTER)
    told(file, "git-lfs's note", "git lfs pull")


@pytest.mark.parametrize("file", [VAE, "tokenizer/tokenizer.json", "vae/config.json"])
def test_a_file_that_may_not_be_read(model, monkeypatch, file):
    """The sentence is the system's, which names the file; nobody is told to download it again."""
    opened = Path.open

    def refuse(path, *args, **how):
        if path == model / file:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **how)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(PermissionError) as error:
        open_checkpoint(model, dtype=mx.float32)
    assert explain_error(error.value) == f"{model / file}: Permission denied."


def test_words_of_a_file_are_escaped(tmp_path):
    text = json.dumps({"\x1b[2Jx": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(9))
    with pytest.raises(ValueError) as refusal:
        load_arrays(tmp_path / "x.safetensors")
    assert one_sentence(refusal.value)


# ---------------------------------------------------------------- packed matrices


def is_refused(folder: Path, *words: str) -> None:
    with pytest.raises(UserError) as error:
        open_checkpoint(folder, dtype=mx.float32)
    said = str(error.value)
    assert one_sentence(error.value) and len(said) < 300 and all(word in said for word in words), said


def test_nvfp4_of_mlxs_own_tools_has_one_scale(tmp_path):
    """No matrix of such a file has a second one."""
    quantize_model("nano", tmp_path / "q", "nvfp4", progress=False)
    for part in ("transformer", "text_encoder"):
        [path] = open_weights(tmp_path / "q" / part).files
        arrays = mx.load(str(path))
        mx.eval(arrays)
        arrays = {name: w for name, w in arrays.items() if not name.endswith("global_scale")}
        mx.save_safetensors(str(path), arrays, {"format": "mlx"})
    assert open_checkpoint(tmp_path / "q", dtype=mx.float32)


# ---------------------------------------------------------------- what a network's numbers are


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder"])
@pytest.mark.parametrize("dtype", [mx.int32, mx.uint32, mx.complex64, mx.bool_])
def test_whole_and_complex_numbers_are_no_weights(model, part, dtype):
    [path] = open_weights(model / part).files
    arrays = mx.load(str(path))
    mx.eval(arrays)
    name = next(name for name in sorted(arrays) if name.endswith(".weight") and arrays[name].ndim == 1)
    mx.save_safetensors(str(path), arrays | {name: arrays[name].astype(dtype)})
    is_refused(model, "should have real numbers")


def test_fp8_in_an_autoencoder_is_refused(model):
    """Nobody writes it; taken for whole numbers, its codes would be other weights."""
    [path] = open_weights(model / "vae").files
    arrays = mx.load(str(path))
    mx.eval(arrays)
    name = next(name for name in sorted(arrays) if name.endswith(".weight") and arrays[name].ndim == 1)
    mx.save_safetensors(str(path), arrays | {name: mx.to_fp8(arrays[name])})
    is_refused(model, "uint8) should have real numbers")


@pytest.mark.parametrize("part", ["transformer", "text_encoder"])
def test_a_norm_in_fp8_is_decoded(model, part):
    """Files that were cast as a whole have them."""
    [path] = open_weights(model / part).files
    arrays = mx.load(str(path))
    mx.eval(arrays)
    name = next(name for name in sorted(arrays) if name.endswith(".weight") and arrays[name].ndim == 1)
    cast = mx.to_fp8(arrays[name].astype(mx.float32))
    rounded = mx.from_fp8(cast, mx.float32)
    scaled = {name: cast, name.replace(".weight", ".weight_scale"): mx.array(2.0)}
    for change, expected in (({name: cast}, rounded), (scaled, 2 * rounded)):
        mx.save_safetensors(str(path), arrays | change)
        weights = open_checkpoint(model, dtype=mx.float32).weights(part)
        assert any(isinstance(w, mx.array) and w.shape == expected.shape and mx.array_equal(w, expected)
                   for w in weights.values())  # fmt: skip


@pytest.mark.parametrize("kind, size", [("F64", 8), ("F8_E5M2", 1)])
def test_types_that_mlx_does_not_know(model, kind, size):
    [path] = open_weights(model / "transformer").files
    path.write_bytes(raw_file({"x": (kind, 3 * size)}))
    is_refused(model, "MLX cannot read", path.name, f"unsupported dtype {kind}")


def raw_file(tensors: dict[str, tuple[str, int]]) -> bytes:
    """A safetensors file with three numbers in each tensor. tensors: name → type and bytes."""
    header = {}
    end = 0
    for name, (kind, size) in tensors.items():
        header[name] = {"dtype": kind, "shape": [3], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(end)


def test_the_words_of_parts_are_cut(model):
    with pytest.raises(ValueError, match="parts names") as error:
        open_checkpoint(model, dtype=mx.float32, parts={f"{i}" * 1000: "nano" for i in range(1000)})
    assert len(str(error.value)) < 300


def test_a_single_file_is_read_by_its_content(tmp_path):
    """A file of the hub's store has no ending."""
    [path] = open_weights(open_checkpoint("nano", dtype=mx.float32).home.path / "transformer").files
    for name in ("transformer", "transformer.bin"):
        shutil.copy(path, tmp_path / name)
        assert set(load_arrays(tmp_path / name)) == set(load_arrays(path))
