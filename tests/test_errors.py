"""Bad input on the command line: one sentence that names the mistake and the way out, status 2, and no file left."""

import errno
import json
import os
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from PIL import Image, PngImagePlugin
from test_cli import PROMPT, in_a_process, run, save_tiny

from kleinlite import pipeline
from kleinlite.checkpoints import HUB

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
        assert len(err.splitlines()) == 1 and 20 < len(err) < 700
        missing = [word for word in words.split() if word not in err]
        assert not missing, err
        assert status == 2 and out == ""
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before

    return call


# ---------------------------------------------------------------- what is typed

TYPED = {
    "--size 512": "'512' WIDTHxHEIGHT such as",
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
    "--guidance 0.5": "guidance 1 0.5",
    "--negative blue": "negative prompt guidance base model",
    "--model base-4b --guidance 0": "guidance 1 0",
    "--model 4b --guidance 4": "4b distilled guidance base-4b",
    "--model 4b --size 500x500": "multiple of 16",  # before 16 GB are fetched
    "--model nowhere": "'nowhere' nano 4b folder",
    "--model no/such/folder": "'no/such/folder' nano 4b folder",
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

    monkeypatch.setattr(pipeline.os, "replace", full)  # after the draft was written
    refused("x.png: No space left on device.", "generate", PROMPT, "--model", tiny, "-o", "x.png")


def test_a_model_too_large_for_the_memory(tiny, refused, monkeypatch):
    def full(*_, **__):
        raise RuntimeError("[malloc] Unable to allocate 123456 bytes.")

    monkeypatch.setattr(pipeline, "euler", full)
    refused("not enough memory smaller --size", "generate", PROMPT, "--model", tiny)


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
        unusable(f"{path} not a safetensors file damaged: download it again")
    for length in (len(data) // 2, len(data) - 1):  # the second is what a stopped download leaves
        path.write_bytes(data[:length])
        unusable(f"{path} {length:,} of {len(data):,} bytes missing download it again")


@pytest.mark.parametrize("header", [b'{"a": {"dtype": "F16"}}', b'{"a": 1}'])
def test_weights_with_a_strange_header(header, unusable, tiny):
    path = tiny / "vae" / WEIGHTS["vae"]
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    unusable(f"{path} not a safetensors file damaged: download it again")


def test_weights_of_an_unknown_type(unusable, tiny):
    path = tiny / "transformer" / WEIGHTS["transformer"]
    path.write_bytes(path.read_bytes().replace(b'"F16"', b'"F99"', 1))
    unusable(f"MLX cannot read {path} F99")


@PARTS
def test_missing_extra_and_misshapen_tensors(part, unusable, tiny):
    path = tiny / part / WEIGHTS[part]
    keep = path.read_bytes()
    gone = sorted(mx.load(str(path)))[-1]
    change(path, lambda tensors: tensors.pop(gone))
    unusable(f"do not fit 1 missing: {gone} another model")
    path.write_bytes(keep)
    change(path, lambda tensors: tensors.update({"stray.weight": mx.zeros(3)}))
    unusable("do not fit 1 not expected: stray.weight another model")
    path.write_bytes(keep)
    odd = next(k for k, w in mx.load(str(path)).items() if w.ndim == 1 and w.size > 1 and "norm_out" not in k)
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


def test_no_network(tmp_path):
    code = "import sys\nfrom kleinlite.cli import main\nsys.exit(main(sys.argv[1:]))"
    cache = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    end = in_a_process(code, "generate", PROMPT, "--model", "4b", "-o", tmp_path / "x.png", **cache)
    assert end.returncode == 2 and end.stdout == "" and len(end.stderr.splitlines()) == 1
    for words in (HUB["4b"], "is not on this machine", "unset HF_HUB_OFFLINE", "nano"):
        assert words in end.stderr
    assert not (tmp_path / "x.png").exists()


def answer(kind: str) -> Exception:
    """An error of the hub's, without the reply that it would carry."""
    errors = pytest.importorskip("huggingface_hub.errors")
    made = getattr(errors, kind)
    error = made.__new__(made)
    error.args = ("401 Client Error.\n\nMore about it on https://huggingface.co (Request ID: 1).",)
    return error


@pytest.mark.parametrize(
    "model, kind, words",
    [
        ("9b", "GatedRepoError", f"{HUB['9b']} gated: accept https://huggingface.co/{HUB['9b']} `hf auth login`"),
        ("some/body", "RepositoryNotFoundError", "no folder some/body hub private `hf auth login`"),
        ("some/body", "HFValidationError", "no folder some/body hub check the name"),
        ("4b", "HfHubHTTPError", f"{HUB['4b']} could not be fetched network nano"),
        ("4b", "LocalEntryNotFoundError", f"{HUB['4b']} could not be fetched network nano"),
    ],
)
def test_what_the_hub_answers(model, kind, words, refused, monkeypatch):
    def refuse(*_, **__):
        raise answer(kind)

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    refused(words, "generate", PROMPT, "--model", model)


@pytest.mark.parametrize(
    "error, words",
    [
        (OSError(errno.ENOSPC, "No space left on device", "weights"), "weights: No space left on device."),
        (RuntimeError("Data processing error: no answer\nand more"), "could not be fetched no answer network"),
    ],
)
def test_what_fails_while_downloading(error, words, refused, monkeypatch):
    scope = {"error": error}  # raised in the hub's own code, as far as the traceback tells
    exec(compile("def fetch(*_, **__): raise error", "huggingface_hub/fetch.py", "exec"), scope)
    monkeypatch.setattr("huggingface_hub.snapshot_download", scope["fetch"])
    refused(words, "generate", PROMPT, "--model", "4b")


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
