"""Bad input on the command line: one sentence that names the mistake and the way out, status 2, and no file left."""

import errno
import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from PIL import Image, PngImagePlugin
from stand_in_hub import Repository, released
from test_cli import PROMPT, run, save_tiny

from kleinlite import pipeline
from kleinlite.errors import FileError, HubError, MemoryLimitError, UserError, clip, first_few
from kleinlite.models.registry import MODELS

MADE = {"model": "nano", "prompt": PROMPT, "seed": 1, "steps": 4, "guidance": 1.0}
MADE |= {"negative_prompt": "", "width": 64, "height": 64, "references": 0}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def tiny(whole, tmp_path) -> Path:
    """A model in the working folder, to be damaged: `tiny`, with an undistilled one in `tiny/base`."""
    return Path(shutil.copytree(whole, tmp_path / "tiny")).relative_to(tmp_path)


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """refused("word word", "generate", …): the command line refuses, and its sentence has these words."""
    monkeypatch.chdir(tmp_path)

    def call(words: str, *argv):
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
        capsys.readouterr()
        status = run(*argv)  # a traceback would end the test here
        out, err = capsys.readouterr()
        assert err.startswith("kleinlite") and err.endswith((".\n", ")\n", "?\n")), err
        assert len(err.splitlines()) == 1 and 20 < len(err) < 700 and err[:-1].isprintable()
        missing = [word for word in words.split() if word not in err]
        assert not missing, err
        assert status == 2 and out == ""
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before

    return call


# ---------------------------------------------------------------- sentences


def test_a_sentence_is_one_line_whatever_it_quotes():
    """In Python too, not only on the command line: a file's names may come from anybody."""
    for kind in (UserError, FileError, HubError, MemoryLimitError):
        text = str(kind("a tensor called x\ny\x1b[31m" + 10**6 * "z" + ": download it again."))
        assert text.startswith("a tensor called x\\ny\\x1b[31mzzz") and text.endswith("zz: download it again.")
        assert text.isprintable() and len(text) <= 1000
    assert len(first_few([10**6 * "x"] * 9)) < 500


# ---------------------------------------------------------------- what is typed

TYPED = {
    "--size 510": "width multiple of 16 510 512",
    "--modell 4b": "--modell 4b is not understood: did you mean --model?",
    "--size 512x": "'512x' WIDTHxHEIGHT",
    "--size x512": "'x512' WIDTHxHEIGHT",
    "--size 64x64x64": "'64x64x64' WIDTHxHEIGHT",
    "--size big": "'big' WIDTHxHEIGHT",
    "--size -64x64": "--size",
    "--size 500x512": "width multiple of 16 500 496",
    "--size 64x65": "height multiple of 16 65 64",
    "--size 0x64": "width multiple of 16 0 try",
    "--steps 0": "steps at least 1 0",
    "--steps -3": "steps at least 1 -3",
    "--steps 1.5": "--steps '1.5' whole number",
    "--seed seven": "--seed 'seven' whole number",
    "--guidance 4": "tiny distilled guidance base model",
    "--guidance much": "--guidance 'much' number",
    "--guidance 0.5": "tiny distilled guidance base model",
    "--negative blue": "negative prompt guidance base model",
    "--model base-4b --guidance 0": "guidance 1 0",
    "--model 4b --guidance 4": "4b distilled guidance base-4b",
    "--model 4b --size 500x500": "multiple of 16",  # before 16 GB are fetched
    "--model nowhere": "'nowhere' nano 4b folder",
    "--model no/such/folder": "'no/such/folder' nano 4b folder",
    "--quantize 7": "quantize 3, 4, 5, 6, 8 7",
    "--quantize some": "quantize mxfp4 'some'",
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


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_out_of_range(seed, tiny, refused):
    refused(f"seed from 0 {seed}", "generate", PROMPT, "--model", tiny, "--seed", seed)


@pytest.mark.parametrize("guidance", ["nan", "inf"])
def test_a_guidance_that_is_no_number(guidance, tiny, refused):
    refused(f"guidance {guidance}", "generate", PROMPT, "--model", tiny / "base", "--guidance", guidance)


def test_a_negative_prompt_without_guidance(tiny, refused):
    options = "--guidance", "1", "--negative", "blue"
    refused("negative prompt guidance above 1", "generate", PROMPT, "--model", tiny / "base", *options)


def test_no_prompt(tiny, refused):
    refused("say what to draw quotes", "generate", "--model", tiny)
    Image.new("RGB", (64, 64)).save("x.png")
    refused("say what to draw before --image", "generate", "--model", tiny, "--image", "x.png", PROMPT)


def test_a_prompt_longer_than_the_window(tiny, refused):
    refused("prompt tokens reads 32 shorten by about", "generate", "a red circle " * 20, "--model", tiny)


def test_a_prompt_that_is_no_text(tiny, refused):
    refused("UTF-8 terminal", "generate", os.fsdecode(b"\xff\xfe"), "--model", tiny)


def test_an_unknown_command(refused):
    refused("'draw' generate info models", "draw", PROMPT)
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

    monkeypatch.setattr(pipeline, "euler", full)
    refused("not enough memory smaller --size", "generate", PROMPT, "--model", tiny)


def test_a_model_that_cannot_fit(tiny, hub, refused, monkeypatch):
    monkeypatch.setattr("kleinlite.inference.memory_check.machine_memory", lambda held=0: (10**5, 10**5))
    refused("takes GB of memory the machine has 0.0 GB", "generate", PROMPT, "--model", tiny)
    monkeypatch.setattr("kleinlite.inference.memory_check.machine_memory", lambda held=0: (8 * 10**9, 6 * 10**9))
    options = "--model", "4b", "--size", "512x512"
    refused("takes 9. GB of memory has 8.0 GB with quantize=8", "generate", PROMPT, *options)
    monkeypatch.setattr("kleinlite.inference.memory_check.machine_memory", lambda held=0: (10**9, 10**9))
    refused("takes 9. GB of memory has 1.0 GB a smaller model", "generate", PROMPT, *options)
    refused("takes 5. GB of memory has 1.0 GB a smaller model", "generate", PROMPT, *options, "--quantize", 8)
    monkeypatch.setattr("kleinlite.inference.memory_check.machine_memory", lambda held=0: (6 * 10**9, 6 * 10**9))
    refused("takes 6.5 GB of memory a smaller model", "generate", PROMPT, "--model", "4b-nvfp4", *options[2:])
    assert hub.requests == []  # 16 GB later would be late


# ---------------------------------------------------------------- pictures


def remember(path: str, text: str) -> None:
    """A picture that says this about itself."""
    chunk = PngImagePlugin.PngInfo()
    chunk.add_itxt("kleinlite", text)
    Image.new("RGB", (64, 64)).save(path, pnginfo=chunk)


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


def test_like_with_what_no_longer_works(tiny, refused):
    for change, words in {
        ("references", 2): "x.png 2 other picture(s) --image",
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


# ---------------------------------------------------------------- a model's folder

WEIGHTS = {
    "transformer": "diffusion_pytorch_model.safetensors",
    "vae": "diffusion_pytorch_model.safetensors",
    "text_encoder": "model.safetensors",
}
PARTS = pytest.mark.parametrize("part", WEIGHTS)


@pytest.fixture
def unusable(tiny, refused):
    """unusable("word word"): nothing can be drawn with the model."""
    return lambda words, model=tiny: refused(words, "generate", PROMPT, "--model", model, "-o", "x.png")


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change(path: Path, how) -> None:
    """Run `how(tensors)` on a file of weights."""
    tensors = mx.load(str(path))
    how(tensors)
    mx.eval(tensors)
    mx.save_safetensors(str(path), tensors)


def shard(path: Path) -> tuple[Path, Path]:
    """Split a file of weights in two, with their index."""
    tensors, shards = mx.load(str(path)), [path.with_stem(f"{path.stem}-0000{i}-of-00002") for i in (1, 2)]
    mx.eval(tensors)
    names = {name: shards[i % 2] for i, name in enumerate(sorted(tensors))}
    for file in shards:
        mx.save_safetensors(str(file), {name: tensors[name] for name in tensors if names[name] == file})
    index = {"weight_map": {name: file.name for name, file in names.items()}}
    path.with_suffix(".safetensors.index.json").write_text(json.dumps(index))
    path.unlink()
    return tuple(shards)


def test_an_empty_folder(unusable, tiny):
    Path("empty").mkdir()
    unusable("empty/model_index.json missing complete model", "empty")
    (tiny / "model_index.json").unlink()
    unusable("tiny/model_index.json missing")


@pytest.mark.parametrize("part", [*WEIGHTS, "tokenizer"])
def test_a_missing_part(part, unusable, tiny):
    shutil.rmtree(tiny / part)
    unusable(f"tiny/{part}/ missing complete")


def test_a_neighbours_part_is_not_taken(unusable, tiny):
    """Only `base` shares what lies beside it."""
    shutil.copytree(tiny, "model", ignore=shutil.ignore_patterns("vae", "base"))
    shutil.copytree(tiny / "vae", "vae")
    unusable("model/vae/ missing complete", "model")


@PARTS
def test_missing_files(part, unusable, tiny):
    (tiny / part / WEIGHTS[part]).rename("elsewhere")
    unusable(f"tiny/{part} no .safetensors download it again")
    Path("elsewhere").rename(tiny / part / WEIGHTS[part])
    (tiny / part / "config.json").unlink()
    unusable(f"tiny/{part}/config.json missing complete")


def test_a_missing_tokenizer(unusable, tiny):
    (tiny / "tokenizer" / "tokenizer.json").unlink()
    unusable("tiny/tokenizer/tokenizer.json missing complete")


@pytest.mark.parametrize("file", ["model_index.json", *(f"{part}/config.json" for part in WEIGHTS)])
@pytest.mark.parametrize("text", ["", '{"a": ', "\0", pytest.param("[]")])
def test_bad_json(file, text, unusable, tiny):
    (tiny / file).write_text(text)
    unusable(f"tiny/{file} JSON download it again")


@PARTS
def test_a_config_of_something_else(part, unusable, tiny):
    (tiny / part / "config.json").write_text('{"a": 1}')
    unusable("config.json in tiny says nothing about another kind of model")


@pytest.mark.parametrize("text", ["", "{", '{"version": "1.0"}'])
def test_a_bad_tokenizer(text, unusable, tiny):
    (tiny / "tokenizer" / "tokenizer.json").write_text(text)
    unusable("tiny/tokenizer/tokenizer.json is not a tokenizer download it again")


@PARTS
def test_damaged_weights(part, unusable, tiny):
    path = tiny / part / WEIGHTS[part]
    data = path.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1000000\n"
    for damaged in (b"", data[:5], data[:100], pointer, data[:20] + b"\xff" + data[21:]):
        path.write_bytes(damaged)
        unusable(f"{path} not a safetensors file damaged download it again")
    for length in (len(data) // 2, len(data) - 1):  # the second is what a stopped download leaves
        path.write_bytes(data[:length])
        unusable(f"{path} {length:,} of {len(data):,} bytes missing download it again")


@pytest.mark.parametrize("header", [b'{"a": {"dtype": "F16"}}', b'{"a": 1}'])
def test_weights_with_a_strange_header(header, unusable, tiny):
    path = tiny / "vae" / WEIGHTS["vae"]
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    unusable(f"{path} not a safetensors file damaged download it again")


def test_weights_of_an_unknown_type(unusable, tiny):
    path = tiny / "transformer" / WEIGHTS["transformer"]
    path.write_bytes(path.read_bytes().replace(b'"F16"', b'"F99"', 1))
    unusable(f"{path} not a safetensors file F99 download it again")


@PARTS
def test_missing_extra_and_misshapen_tensors(part, unusable, tiny):
    path = tiny / part / WEIGHTS[part]
    keep = path.read_bytes()
    gone = next(name for name in sorted(mx.load(str(path))) if name.endswith("weight"))
    change(path, lambda tensors: tensors.pop(gone))
    unusable(f"do not fit 1 missing: {gone} another model")
    path.write_bytes(keep)
    change(path, lambda tensors: tensors.update({"stray.weight": mx.zeros(3)}))
    unusable("do not fit 1 not expected: stray.weight another model")
    path.write_bytes(keep)
    tensors = sorted(mx.load(str(path)).items())
    odd = next(k for k, w in tensors if w.ndim == 1 and w.size > 1 and "norm_out" not in k)
    change(path, lambda tensors: tensors.update({odd: tensors[odd][:-1]}))
    unusable(f"do not fit 1 of the wrong shape: {odd} expected another model")


@pytest.mark.parametrize("name", ["transformer_blocks.0.attn.to_q.weight", "norm_out.linear.weight"])
def test_misshapen_tensors_that_we_join_or_turn(name, unusable, tiny):
    cut = (slice(None), slice(1)) if "to_q" in name else slice(-1)
    path = tiny / "transformer" / WEIGHTS["transformer"]
    change(path, lambda tensors: tensors.update({name: tensors[name][cut]}))
    unusable(f"do not fit 1 of the wrong shape: {name} expected another model")


@PARTS
def test_missing_and_truncated_shards(part, unusable, tiny):
    path = tiny / part / WEIGHTS[part]
    first, second = shard(path)
    assert run("generate", PROMPT, "--model", tiny, "-o", "x.png", "--steps", 1) == 0  # whole, it works
    Path("x.png").unlink()
    data = second.read_bytes()
    second.write_bytes(data[:-1])
    unusable(f"{second} {len(data) - 1:,} of {len(data):,} bytes missing")
    second.unlink()
    unusable(f"{second} named in {path.name}.index.json but missing: download")


@pytest.mark.parametrize("text", ["{", pytest.param("{}")])
def test_a_bad_index_of_shards(text, unusable, tiny):
    path = tiny / "vae" / (WEIGHTS["vae"] + ".index.json")
    path.write_text(text)
    unusable("tiny/vae download it again")


def test_parts_of_different_models(unusable, tiny):
    edit(tiny / "model_index.json", text_encoder_out_layers=[1, 2])
    unusable("transformer reads 72 text encoder gives 48 tiny different models")
    edit(tiny / "model_index.json", text_encoder_out_layers=[1, 2, 3])
    edit(tiny / "text_encoder" / "config.json", hidden_size=32)  # what the config of another size says
    unusable("reads 72 gives 96 different models")


def test_more_parts_of_different_models(unusable, tiny):
    config = tiny / "text_encoder" / "config.json"
    vocab = json.loads(config.read_text())["vocab_size"]
    edit(tiny / "model_index.json", text_encoder_out_layers=[1, 2, 9])
    unusable("model_index.json tiny layer 9 has 4 layers different models")
    edit(tiny / "model_index.json", text_encoder_out_layers=[1, 2, 3])
    edit(config, vocab_size=vocab - 1)
    unusable(f"text encoder tiny {vocab - 1} tokens tokenizer {vocab} different models")
    edit(config, vocab_size=vocab)
    edit(tiny / "vae" / "config.json", latent_channels=16)
    unusable("works on 128 autoencoder makes 64 different models")


# ---------------------------------------------------------------- the hub

REPO = MODELS["4b"].repo


def test_offline(hub, refused):
    refused(f"{REPO} is not on this machine without the offline nano", "generate", PROMPT, "--model", "4b", "--offline")
    refused(f"{REPO} is not on this machine", "quantize", "4b", "out", "--bits", "4", "--offline")
    assert hub.requests == []


def test_offline_by_the_environment(hub, refused, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused(f"{REPO} is not on this machine unset HF_HUB_OFFLINE", "generate", PROMPT, "--model", "4b")


def test_what_the_hub_does_not_have(hub, refused):
    words = "no folder or file some/body hub shows no repository check the name private `hf auth login`"
    for command in (["generate", PROMPT, "--model"], ["download"]):
        refused(words, *command, "some/body")
    refused(words, "quantize", "some/body", "out", "--bits", "4")
    hub.repositories["some/body"] = Repository({"README.md": b"x", "vae/config.json": b"{}"})
    refused("some/body has no model_index.json transformer/ released layout", "download", "some/body")


def test_what_cannot_be_downloaded(tiny, refused):
    refused("'nowhere' nano 4b-fp8 owner/name", "download", "nowhere")
    refused("tiny is on this machine already kleinlite models", "download", tiny)
    refused("MODEL", "download")


def test_no_network(hub, refused):
    hub.shutdown()
    hub.server_close()
    refused(f"{REPO} could not be fetched {hub.url} network nano", "generate", PROMPT, "--model", "4b")


def test_a_gated_model(hub, capsys):
    repo = MODELS["9b"].repo
    hub.repositories[repo] = Repository(released(), gated=True)
    for argv in (["download", "9b"], ["generate", PROMPT, "--model", "9b", "-o", "x.png"]):
        assert run(*argv) == 2
        out, err = capsys.readouterr()
        table, sentence = err[: err.index("kleinlite:")], err[err.index("kleinlite:") :]
        assert out == "" and "FLUX Non-Commercial, gated" in table and len(sentence.splitlines()) == 1
        for words in (f"{repo} is gated", f"https://huggingface.co/{repo}", "`hf auth login`"):
            assert words in sentence
    assert not Path("x.png").exists()


def test_a_download_that_is_cut(hub, capsys):
    hub.cut["vae/diffusion_pytorch_model.safetensors"], hub.falls = [10_000], True
    assert run("generate", PROMPT, "--model", "4b", "-o", "x.png") == 2
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert sentence.startswith(f"kleinlite: {REPO} could not be fetched")
    assert not Path("x.png").exists()


# ---------------------------------------------------------------- quantize


def test_how_to_quantize(tiny, refused):
    for options, words in {
        "": "--bits --mode 4b --help",
        "--bits 4 --mode mxfp4": "either --bits --mode",
        "--bits 7": "3, 4, 5, 6, 8 7",
        "--bits lots": "3, 4 'lots'",
        "--mode fp3": "mxfp4 'fp3'",
        "--frobnicate": "--frobnicate not understood",
    }.items():
        refused(words, "quantize", tiny, "out", *options.split())
    refused("OUT", "quantize", tiny, "--bits", "4")


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


# ---------------------------------------------------------------- what is no mistake of the reader's


@pytest.mark.parametrize(
    "bug",
    [
        lambda: [].gone,
        lambda: len(3),
        lambda: {}["x"],
        lambda: int("x"),  # a ValueError, but nobody's sentence
        lambda: mx.zeros(2) @ mx.zeros(3),
        lambda: mx.eval(tree_flatten(None)[0][1]),
    ],
)
def test_a_bug_keeps_its_traceback(bug, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pipeline, "euler", lambda *_: bug())
    with pytest.raises((AttributeError, TypeError, LookupError, ValueError)):
        run("generate", PROMPT, "--model", tiny)
    assert not list(tmp_path.glob("*.png"))


def test_a_call_that_fails_in_the_package_is_a_bug(tiny, tmp_path, monkeypatch):
    scope = {}  # no sentence of ours: nobody wrote a `raise`
    exec(compile("def euler(*_): int('x')", Path(pipeline.__file__).with_name("x.py"), "exec"), scope)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pipeline, "euler", scope["euler"])
    with pytest.raises(ValueError, match="invalid literal"):
        run("generate", PROMPT, "--model", tiny)


# ---------------------------------------------------------------- what comes from strangers


def test_an_empty_model(refused):
    for empty in ("", " "):
        refused("--model empty nano", "generate", PROMPT, "--model", empty)


def test_a_picture_cannot_have_a_model_downloaded(hub, refused):
    """Whoever gives away a picture must not choose what is fetched for it."""
    for model in ("4b", "some/body"):
        remember("x.png", json.dumps(MADE | {"model": model}))
        refused(f"x.png was drawn with {model!r} not on this machine --model {model}", "generate", "--like", "x.png")
    assert hub.requests == []


@pytest.mark.parametrize("change", [{"width": 10**30}, {"height": 6_400_000}, {"width": 2**20, "height": 2**20}])
def test_a_picture_that_wants_to_be_large(change, tiny, refused):
    remember("x.png", json.dumps(MADE | {"model": str(tiny)} | change))
    for more in ([], ["--model", "nano"]):
        start = time.process_time()
        with_limit = "pixels" if "width" in change and len(change) == 1 else "takes GB of memory"
        refused(with_limit, "generate", "--like", "x.png", *more)
        assert time.process_time() - start < 2


@pytest.mark.parametrize(
    "change",
    [
        {"seed": -1}, {"seed": 2**70}, {"seed": True}, {"steps": 10**9}, {"guidance": float("nan")},
        {"guidance": float("inf")}, {"prompt": "\ud800"}, {"negative_prompt": "\udcff"}, {"width": -16},
        {"width": True},
    ],
    ids=str,
)  # fmt: skip
def test_a_picture_with_numbers_out_of_range(change, tiny, refused):
    remember("x.png", json.dumps(MADE | {"model": str(tiny)} | change))
    refused("", "generate", "--like", "x.png")


def test_nested_metadata(tiny, refused):
    remember("x.png", "[" * 5000 + "]" * 5000)
    refused("x.png damaged", "info", "x.png")
    refused("x.png damaged", "generate", "--like", "x.png")


def test_a_strangers_text_stays_out_of_the_terminal(refused):
    """A sentence is one line, and what it quotes cannot do anything."""
    evil = "\x1b]0;owned\x07\x1b[2J\nkleinlite: all is well."
    remember("x.png", json.dumps(MADE | {"model": evil, "guidance": 3.0}))
    refused("", "generate", "--like", "x.png")
    refused("", "generate", PROMPT, "--model", evil)


def test_a_temporary_folder_that_is_not_there(tiny, refused, monkeypatch):
    def compiler(*_):
        raise RuntimeError("filesystem error: temp_directory_path: Not a directory [/nope]")  # as MLX says it

    monkeypatch.setattr(pipeline, "euler", compiler)
    refused("temporary files does not exist TMPDIR", "generate", PROMPT, "--model", tiny)


def test_names_from_files_are_cut_and_escaped():
    assert clip("a" * 64) == "a" * 64
    assert clip("b" + "a" * 10**7 + "c") == "b" + "a" * 31 + "…" + "a" * 31 + "c"
    assert clip("a\nb") == "a\\nb"
    for text in ("\x00" * 64, "\x1b" * 10**6, "é" * 100, "x" * 65):
        assert len(clip(text)) == 65 and clip(text).isprintable()
