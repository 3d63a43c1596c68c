"""Models that cannot be used: their folder, the hub. One sentence with the way out, status 2, no file left."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from command import PROMPT, run
from stand_in_hub import Repository, released

from kleinlite.models.registry import MODELS
from kleinlite.scenes import draw, sample

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
    path.write_bytes(pointer)
    unusable(f"{path} git-lfs's note `git lfs pull` in its folder")
    stopped = data[:-1], data[: len(data) // 2]  # downloads
    for damaged in (b"", data[:5], data[:100], data[:20] + b"\xff" + data[21:], *stopped):
        path.write_bytes(damaged)
        unusable(f"{path} {len(damaged):,} bytes not a whole safetensors file download it again")


@pytest.mark.parametrize("header", [b'{"a": {"dtype": "F16"}}', b'{"a": 1}'])
def test_weights_with_a_strange_header(header, unusable, tiny):
    path = tiny / "vae" / WEIGHTS["vae"]
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    unusable(f"{path} not a whole safetensors file download it again")


def test_weights_of_an_unknown_type(unusable, tiny):
    path = tiny / "transformer" / WEIGHTS["transformer"]
    path.write_bytes(path.read_bytes().replace(b'"F16"', b'"F99"', 1))
    unusable(f"{path} not a whole safetensors file F99 download it again")


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
    unusable(f"{second} {len(data) - 1:,} bytes not a whole safetensors file")
    second.unlink()
    unusable(f"{second} missing complete model")


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


def test_a_training_offline(hub, refused, tiny):
    (tiny.parent / "pictures").mkdir()
    draw(sample(0)).save(tiny.parent / "pictures" / "a.png")
    (tiny.parent / "pictures" / "a.txt").write_text("a house")
    file = tiny / "base" / "transformer" / "diffusion_pytorch_model.safetensors"
    words = f"{MODELS['base-4b'].repo} is not on this machine"
    refused(words, "train-lora", "pictures", "-o", "x.safetensors", "--model", file, "--parts", "base-4b", "--offline")
    assert hub.requests == []


def test_what_cannot_be_is_refused_before_a_download(hub, refused):
    refused("4b-nvfp4 is quantized already", "generate", PROMPT, "--model", "4b-nvfp4", "--quantize", "4")
    refused("smal-decoder", "generate", PROMPT, "--model", "4b", "--decoder", "smal-decoder")
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
    refused(f"{REPO} could not be fetched network nano", "generate", PROMPT, "--model", "4b")


def test_a_gated_model(hub, capsys):
    repo = MODELS["9b"].repo
    hub.repositories[repo] = Repository(released(), gated=True)
    for argv in (["download", "9b"], ["generate", PROMPT, "--model", "9b", "-o", "x.png"]):
        assert run(*argv) == 2
        out, err = capsys.readouterr()
        sentence = err[err.index("kleinlite:") :]
        assert out == "" and "FLUX Non-Commercial, gated" in err and len(sentence.splitlines()) == 1
        for words in (f"{repo} is gated", f"https://huggingface.co/{repo}", "`hf auth login`"):
            assert words in sentence
    assert not Path("x.png").exists()


def test_a_download_that_is_cut(hub, capsys):
    hub.cut["vae/diffusion_pytorch_model.safetensors"], hub.falls = [10_000], True
    assert run("generate", PROMPT, "--model", "4b", "-o", "x.png") == 2
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert sentence.startswith(f"kleinlite: {REPO} could not be fetched")
    assert not Path("x.png").exists()
