"""What is typed wrongly, and pictures that are none: one sentence with the way out, status 2, no file left."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from command import MADE, PROMPT, remember
from PIL import Image

from kleinlite import klein as klein_module
from kleinlite.models.checkpoint import resolve_model

# ---------------------------------------------------------------- what is typed

TYPED = {
    "--modell 4b": "--modell 4b is not understood",
    "--size 512x": "'512x' WIDTHxHEIGHT",
    "--size x512": "'x512' WIDTHxHEIGHT",
    "--size 64x64x64": "'64x64x64' WIDTHxHEIGHT",
    "--size big": "'big' WIDTHxHEIGHT",
    "--size -64x64": "--size",
    "--size 500x512": "width multiple of 16 500 496",
    "--steps 0": "steps at least 1 0",
    "--steps 1.5": "--steps invalid int value: '1.5'",
    "--seed seven": "--seed invalid int value: 'seven'",
    "--guidance much": "--guidance invalid float value: 'much'",
    "--model 4b --guidance 4": "4b distilled guidance base-4b",
    "--model 4b --size 500x500": "multiple of 16",  # before 16 GB are fetched
    "--model nowhere": "'nowhere' nano 4b folder",
    "--model no/such/folder": "'no/such/folder' does not exist kleinlite models",
    "--quantize": "--quantize expected",
    "--frobnicate": "--frobnicate not understood --help",
    "--step 4": "--step not understood --help",
    "blue": "blue not understood quotes",
    "--image": "--image expected",
    "--like": "--like expected",
}


@pytest.mark.parametrize("options", TYPED)
def test_what_is_typed(options, tiny, refused):
    refused(TYPED[options], "generate", PROMPT, "--model", tiny, *options.split())


def test_an_empty_model(refused):
    refused("name of the model is empty nano", "generate", PROMPT, "--model", "")


def test_a_transformer_alone(tiny, refused):
    """In the words of a shell, where Python's would not do."""
    transformer = resolve_model("nano") / "transformer" / "diffusion_pytorch_model.safetensors"
    shutil.copy(transformer, "mine.safetensors")
    refused("is a single file --parts 4b folder", "generate", PROMPT, "--model", "mine.safetensors")
    refused("'gone'", "generate", PROMPT, "--model", "mine.safetensors", "--parts", "gone")
    whole = "whole model; a name as parts is for a model that is one file --decoder NAME"
    refused(whole, "generate", PROMPT, "--model", tiny, "--parts", "nano")
    both = "--parts", "nano", "--decoder", "nano"
    refused("'nano': --decoder cannot replace one", "generate", PROMPT, "--model", "mine.safetensors", *both)
    refused("strength give it as --image FILE", "generate", PROMPT, "--strength", "0.5")


def test_no_prompt(tiny, refused):
    refused("say what to draw quotes", "generate", "--model", tiny)
    Image.new("RGB", (64, 64)).save("x.png")
    refused("say what to draw before --image", "generate", "--model", tiny, "--image", "x.png", PROMPT)


def test_a_prompt_longer_than_the_window(tiny, refused):
    refused("prompt tokens reads 32 shorten by about", "generate", "a red circle " * 20, "--model", tiny)


def test_a_prompt_that_is_no_text(tiny, refused):
    refused("UTF-8 terminal", "generate", os.fsdecode(b"\xff\xfe"), "--model", tiny)


def test_an_unknown_command(refused):
    refused(f'no command: did you mean `kleinlite generate "{PROMPT}"`?', PROMPT, "--seed", 7)
    refused(f'no command: did you mean `kleinlite generate "{PROMPT}"`?', "draw", PROMPT)
    refused("'quantise' is no command: did you mean `kleinlite quantize`?", "quantise", "nano")
    refused("did you mean --output?", "generate", PROMPT, "--out", "x.png")
    refused("x.png not understood", "info", "y.png", "x.png")
    refused("quotes", "generate", "a", "")


# ---------------------------------------------------------------- where the picture goes


def test_output(tiny, refused):
    Path("folder.png").mkdir()
    for path, words in {
        "folder.png": "folder.png is a folder: name a file",
        ".": "is a folder picture.png",
        "nowhere/x.png": "The folder nowhere does not exist",
        "x.jpg": "PNG x.jpg .png: try x.png",
        "x": "PNG .png: try x.png",
    }.items():
        refused(words, "generate", PROMPT, "--model", tiny, "-o", path)


def test_a_folder_that_cannot_be_written(tiny, refused, monkeypatch):
    def full(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    refused("Nothing can be written Permission denied another folder", "generate", PROMPT, "--model", tiny)


def test_a_disk_that_is_full(tiny, refused, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", "x.png")

    monkeypatch.setattr("kleinlite.files.os.replace", full)  # after the draft was written
    refused("x.png: No space left on device.", "generate", PROMPT, "--model", tiny, "-o", "x.png")


def test_a_model_too_large_for_the_memory(tiny, refused, monkeypatch):
    def full(*_, **__):
        raise RuntimeError("[malloc] Unable to allocate 123456 bytes.")

    monkeypatch.setattr(klein_module, "euler", full)
    refused("not enough memory smaller --size", "generate", PROMPT, "--model", tiny)


def test_a_model_that_cannot_fit(tiny, hub, refused, monkeypatch):
    monkeypatch.setattr("kleinlite.inference.machine_memory.machine_memory", lambda held=0: (10**5, 10**5))
    refused("takes GB of memory the machine has 0.0 GB", "generate", PROMPT, "--model", tiny)
    monkeypatch.setattr("kleinlite.inference.machine_memory.machine_memory", lambda held=0: (8 * 10**9, 6 * 10**9))
    options = "--model", "4b", "--size", "512x512"
    refused("takes 9. GB of memory has 8.0 GB with --quantize 8", "generate", PROMPT, *options)
    monkeypatch.setattr("kleinlite.inference.machine_memory.machine_memory", lambda held=0: (10**9, 10**9))
    refused("takes 9. GB of memory has 1.0 GB a smaller model", "generate", PROMPT, *options)
    refused("takes 5. GB of memory has 1.0 GB a smaller model", "generate", PROMPT, *options, "--quantize", 8)
    monkeypatch.setattr("kleinlite.inference.machine_memory.machine_memory", lambda held=0: (6 * 10**9, 6 * 10**9))
    refused("takes 6. GB of memory a smaller model", "generate", PROMPT, "--model", "4b-nvfp4", *options[2:])
    assert hub.requests == []  # 16 GB later would be late


# ---------------------------------------------------------------- pictures


def break_pictures() -> dict[str, str]:
    """Files that are no pictures, and the words for each."""
    Path("folder").mkdir()
    Path("empty.png").touch()
    Path("text.png").write_text("this is no picture")
    Image.effect_noise((80, 80), 50).save("whole.png")
    data = Path("whole.png").read_bytes()
    Path("cut.png").write_bytes(data[: len(data) // 2])
    Path("spoilt.png").write_bytes(data[:40] + bytes(100) + data[140:])
    words = {name: f"{name} cannot be read PNG" for name in ("empty.png", "text.png", "cut.png", "spoilt.png")}
    return words | {"folder": "folder is a folder", "nowhere.png": "nowhere.png does not exist"}


def test_files_that_are_no_pictures(tiny, refused):
    for name, words in break_pictures().items():
        refused(words, "generate", PROMPT, "--model", tiny, "--image", name)
        refused(words, "generate", PROMPT, "--model", tiny, "--image", "whole.png", name)
        refused(words, "generate", "--model", tiny, "--like", name)
        refused(words, "info", name)


@pytest.mark.parametrize("size", [(32, 32), (63, 200), (64, 1024), (1024, 64)])
def test_references_too_small_or_too_long(size, tiny, refused):
    Image.new("RGB", size).save("x.png")
    refused(f"x.png: 64 8:1 {size[0]}×{size[1]}", "generate", PROMPT, "--model", tiny, "--image", "x.png")


def test_a_picture_that_says_nothing(tiny, refused):
    Image.new("RGB", (64, 64)).save("x.png")
    for command in (["info"], ["generate", "--model", tiny, "--like"]):
        refused("x.png does not say what made it", *command, "x.png")


@pytest.mark.parametrize(
    "said",
    [
        pytest.param("{"),
        "[1]",
        '"x"',
        '{"prompt": "x"}',
        json.dumps(MADE | {"steps": "4"}),
        json.dumps(MADE | {"prompt": None}),
        json.dumps(MADE | {"quantize": [4]}),
    ],
)
def test_a_picture_that_says_nonsense(said, tiny, refused):
    remember("x.png", said)
    for command in (["info"], ["generate", "--model", tiny, "--like"]):
        refused("x.png damaged", *command, "x.png")


def test_a_model_is_no_adapter(tiny, refused):
    refused("tiny is a whole model, not an adapter: it is for from_pretrained itself, or --model.", "info", tiny)


def test_prompts_in_no_file(tiny, refused):
    Path("bytes.txt").write_bytes(b"\xff")
    for file, why in {"nope.txt": "No such file", "bytes.txt": "it is not UTF-8", ".": "directory"}.items():
        refused(f"{file} cannot be read {why} one prompt a line", "generate", "--prompts", file, "--model", tiny)


def test_like_with_what_no_longer_works(tiny, refused):
    for change, words in {
        ("references", 2): "x.png from pictures does not contain --image",
        ("width", 500): "width multiple of 16",
        ("steps", 0): "steps at least 1",
        ("guidance", 3.0): "distilled guidance",
        ("prompt", "a " * 100): "tokens shorten",
        ("quantize", 7): "quantize 3, 4 7",
        ("parts", "some/body"): "x.png parts of 'some/body' not on this machine trust kleinlite download",
        ("parts", "gone"): "'gone' nano folder",
        ("noise", True): "noise which it does not contain --seed",
        ("model", "gone"): "'gone' nano folder",
    }.items():
        remember("x.png", json.dumps(MADE | {"model": str(tiny)} | dict([change])))
        refused(words, "generate", "--like", "x.png")
