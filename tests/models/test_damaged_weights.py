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

from kleinlite.models.export import quantize_model
from kleinlite.models.files import list_weights_files, load_arrays
from kleinlite.models.opening import open_checkpoint

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
    told(str(path), "damaged", "not fully covered")


@pytest.mark.parametrize(
    "where", ["../../outside.safetensors", "/etc/passwd", "..\\x.safetensors", ".", "", "x.bin", 7, ["x"]]
)
def test_shards_are_plain_names(model, told, where):
    shutil.copy(model / VAE, model.parent / "outside.safetensors")
    (model / f"{VAE}.index.json").write_text(json.dumps({"weight_map": {"a": where}}))
    told("index.json names no files beside it")


@pytest.mark.parametrize("weight_map", [None, [], {}, "x", 1])
def test_an_index_of_another_shape(model, told, weight_map):
    (model / f"{VAE}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    told("index.json names no files beside it")


def test_no_links_out_of_the_folder(model, told, tmp_path):
    outside = (model / VAE).rename(tmp_path / "outside.safetensors")
    (model / VAE).symlink_to(outside)
    told(VAE, "a link to a file outside of the folder")
    outside.rename(model / "vae" / "inside.bin")
    (model / VAE).unlink()
    (model / VAE).symlink_to("inside.bin")
    assert open_checkpoint(model, dtype=mx.float32)


def test_the_hub_caches_own_links_are_followed(model, tmp_path):
    """A name in a snapshot is a link into the store of its repository, or of the cache."""
    snapshot = tmp_path / "hub/models--a--b/snapshots/0123"
    snapshot.parent.mkdir(parents=True)
    model.rename(snapshot)
    for place in ("../../../blobs", "../../../../blobs"):
        (snapshot / "vae" / place).mkdir()
        (snapshot / VAE).rename(snapshot / "vae" / place / "abc")
        (snapshot / VAE).symlink_to(f"{place}/abc")
        assert open_checkpoint(snapshot, dtype=mx.float32)
        blob = (snapshot / VAE).resolve()
        (snapshot / VAE).unlink()
        blob.rename(snapshot / VAE)


def test_a_link_that_leads_nowhere(model, told):
    (model / VAE).unlink()
    (model / VAE).symlink_to("nowhere")
    told(VAE, "missing")


@pytest.mark.parametrize("file", ["vae/config.json", "model_index.json", "tokenizer/tokenizer.json", VAE])
def test_pipes_and_devices(model, told, file):
    (model / file).unlink()
    os.mkfifo(model / file)
    told("missing" if file == VAE else "is not a file")
    (model / file).unlink()
    (model / file).symlink_to("/dev/zero")
    told("missing" if file == VAE else "is not a file")


def test_a_copy_takes_only_what_lies_there(model, tmp_path):
    """People publish it."""
    (tmp_path / "secret.txt").write_text("mine")
    (model / "tokenizer" / "notes.txt").symlink_to(tmp_path / "secret.txt")
    (model / "tokenizer" / "id_rsa").write_text("mine")
    quantize_model(model, tmp_path / "copy", 8, progress=False)
    names = {path.name for path in (tmp_path / "copy" / "tokenizer").iterdir()}
    assert names == {path.name for path in (TINY / "tokenizer").iterdir()}


def test_words_of_a_file_are_escaped(tmp_path):
    text = json.dumps({"\x1b[2Jx": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(9))
    with pytest.raises(ValueError) as refusal:
        load_arrays(tmp_path / "x.safetensors")
    assert one_sentence(refusal.value)


def test_packed_matrices_whose_scales_do_not_fit(tmp_path):
    quantize_model("nano", tmp_path / "q", 8, progress=False)
    [path] = list_weights_files(tmp_path / "q/text_encoder")
    arrays = mx.load(str(path))
    mx.eval(arrays)
    name = next(name for name in arrays if name.endswith(".scales"))
    for wrong in (arrays[name][:, :-1], arrays[name][:-1], mx.concatenate([arrays[name]] * 2, axis=1)):
        mx.save_safetensors(str(path), arrays | {name: mx.contiguous(wrong)})
        with pytest.raises(ValueError, match="its scales do not fit"):
            open_checkpoint(tmp_path / "q", dtype=mx.float32)
