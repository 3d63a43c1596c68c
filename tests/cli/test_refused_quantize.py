"""`kleinlite quantize` refuses: one sentence with the way out, status 2, no file left."""

import errno
from pathlib import Path
from types import SimpleNamespace

# ---------------------------------------------------------------- quantize


def test_how_to_quantize(tiny, refused):
    for options, words in {
        "": "folder bits 4b --quantize --help",
        "--quantize 7": "3, 4, 5, 6, 8 7",
        "--bits lots": "3, 4 'lots'",
        "--mode fp3": "mxfp4 'fp3'",
        "--frobnicate": "--frobnicate not understood",
    }.items():
        refused(words, "quantize", tiny, "out", *options.split())
    refused("folder bits 4b --quantize --help", "quantize", tiny, "--bits", "4")


def test_where_to_quantize(tiny, hub, refused):
    Path("file").touch()
    for out, words in {
        "tiny": "tiny is there already new folder",
        "file": "file is there already",
        "nowhere/out": "The folder nowhere does not exist",
    }.items():
        for model in (tiny, "4b"):
            refused(words, "quantize", model, out, "--bits", "4")
    assert hub.requests == []  # 16 GB later would be late
    refused("'nowhere' nano 4b", "quantize", "nowhere", "out", "--bits", "4")


def test_no_room_to_quantize(tiny, refused, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    refused("disk left make room", "quantize", tiny, "out", "--bits", "4")


def test_quantize_fails_halfway(tiny, refused, monkeypatch):
    def full(*_):
        assert any(path.name != "tiny" for path in Path().iterdir())  # the draft, which must go
        raise OSError(errno.ENOSPC, "No space left on device", "x")

    monkeypatch.setattr("kleinlite.models.export.write_safetensors", full)
    refused("x: No space left on device.", "quantize", tiny, "out", "--bits", "4")
    assert {path.name for path in Path().iterdir()} == {"tiny"}
