"""Quantised copies of models: what they hold, what they draw, how little memory they take."""

import json

import mlx.core as mx
import pytest
from packings import WISH

from kleinlite import Klein
from kleinlite.models import export
from kleinlite.models.opening import open_checkpoint
from kleinlite.quantisation import PACKINGS

CPU = pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="what is measured here is the CPU's way")


@pytest.mark.parametrize("name", [3, 4, "nvfp4", "mxfp8"])
def test_a_quantised_copy(name, tmp_path, monkeypatch):
    monkeypatch.setattr(export.split_shards, "__defaults__", (300_000,))
    export.quantize_model("nano", tmp_path / "q", name, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["q"]
    copy = Klein.from_pretrained(tmp_path / "q")
    assert copy(**WISH).tobytes() == Klein.from_pretrained("nano", quantize=name)(**WISH).tobytes()
    config = json.loads((tmp_path / "q" / "transformer" / "config.json").read_text())
    p = PACKINGS[name]
    assert config["quantization"] == {"group_size": p.group, "bits": p.bits, "mode": p.mode}
    shards = sorted((tmp_path / "q" / "transformer").glob("*.safetensors"))
    assert len(shards) > 1 and all(path.stat().st_size < 400_000 for path in shards)
    names = [k for path in (tmp_path / "q" / "text_encoder").glob("*.safetensors") for k in mx.load(str(path))]
    assert not [k for k in names if "layers.3" in k or k.startswith("norm")]
    with pytest.raises(ValueError, match="quantised already"):
        open_checkpoint(tmp_path / "q", dtype=mx.float32, quantize=4)
    with pytest.raises(FileExistsError, match="is there already"):
        export.quantize_model("nano", tmp_path / "q", name)


def test_a_copy_of_the_base_model(tmp_path):
    """Its parts lie beside it; the copy is whole."""
    export.quantize_model("nano-base", tmp_path / "q", 8, progress=False)
    copy = open_checkpoint(tmp_path / "q", dtype=mx.float32)
    assert not copy.info.distilled and copy.parts["vae"][1].parent == tmp_path / "q"


def test_a_copy_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "write_safetensors", full)
    with pytest.raises(OSError, match="No space left"):
        export.quantize_model("nano", tmp_path / "q", 4, progress=False)
    assert not list(tmp_path.iterdir())


def test_a_copy_without_its_packing(tmp_path):
    export.quantize_model("nano", tmp_path / "q", 4, progress=False)
    path = tmp_path / "q" / "transformer" / "config.json"
    config = json.loads(path.read_text())
    del config["quantization"]
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="is quantised and config.json does not say how"):
        open_checkpoint(tmp_path / "q", dtype=mx.float32)


@CPU
def test_a_copy_needs_little_memory(tmp_path):
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    export.quantize_model("nano", tmp_path / "q", 4, progress=False)
    largest = max(w.nbytes for w in open_checkpoint("nano", dtype=mx.float32).weights("transformer").values())
    assert mx.get_peak_memory() - before < 3 * largest
