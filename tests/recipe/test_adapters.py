"""The adapters that come with nano: what is trained is what is kept."""

from dataclasses import replace

from kleinlite import Klein
from recipe import adapters


def test_an_adapter_is_trained_and_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(adapters, "FOLDER", tmp_path / "loras")
    monkeypatch.setitem(adapters.SETTINGS, "cross", replace(adapters.SETTINGS["cross"], steps=1, batch=1))
    monkeypatch.setitem(adapters.PICTURES, "cross", 2)
    adapters.main(["cross"])
    assert dict(Klein.from_pretrained("nano", loras=[tmp_path / "loras" / "cross.safetensors"]).loras) == {"cross": 1.0}
