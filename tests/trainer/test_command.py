"""`kleinlite train-lora`."""

import json
import shutil

import pytest
from safetensors import safe_open
from stand_in_hub import Repository, released

from kleinlite.cli import main
from kleinlite.models.adapters import describe_adapter, open_adapter
from kleinlite.models.checkpoint import resolve_model


def test_the_command(folder, tmp_path, capsys):
    out = tmp_path / "x.safetensors"
    options = ["--model", "nano-base", "--rank", "2", "--steps", "2", "--every", "2", "--accumulate", "1"]
    assert main(["train-lora", str(folder), *options, "-o", str(out), "--layout", "comfy"]) == 0
    told = capsys.readouterr().out
    assert "6 pictures of 96x96, at most 0." in told and f"{out}: " in told
    assert told.endswith("Not there yet? The same command goes on with --steps 4.\n")
    with safe_open(out, framework="np") as file:
        assert all(name.startswith("diffusion_model.") for name in file.keys())  # noqa: SIM118, it is no dictionary


def test_a_rank_for_each_kind_of_matrix(folder, tmp_path, capsys):
    """The file has these ranks and no other matrices, PEFT can read which, and a later start must ask for the same."""
    out = tmp_path / "x.safetensors"
    options = ["--model", "nano-base", "--steps", "1", "--accumulate", "1", "-o", str(out), "--rank"]
    assert main(["train-lora", str(folder), *options, "qkv=3,linear1=2"]) == 0
    adapter = open_adapter(out)
    told = describe_adapter(adapter)
    assert told["rank"] == "2, 3" and "mlp" not in told["matrices"] and "linear2" not in told["matrices"]
    with safe_open(out, framework="np") as file:
        header = json.loads(file.metadata()["lora_adapter_metadata"])
    assert header["transformer.r"] == 3 and set(header["transformer.rank_pattern"].values()) == {2}
    capsys.readouterr()
    assert main(["train-lora", str(folder), *options, "linear1=2,qkv=3"]) == 0
    assert main(["train-lora", str(folder), *options, "qkv=3"]) == 2
    assert "other settings (rank)" in capsys.readouterr().err


def test_the_command_plans_a_model_that_is_not_here(folder, tmp_path, capsys):
    options = ["--model", "base-4b", "--quantize", "4", "--size", "512x512", "--plan", "--offline"]
    assert main(["train-lora", str(folder), *options, "-o", str(tmp_path / "x.safetensors")]) == 0
    assert "GB" in capsys.readouterr().out and not (tmp_path / "x.safetensors").exists()


@pytest.mark.parametrize(
    "options, sentence",
    [
        (["-o", "x.png"], "ends in .safetensors"),
        (["-o", "none/x.safetensors"], "does not exist"),
        (["-o", "x.safetensors", "--model", "4b"], "train on base-4b, and use the adapter on 4b"),
        (["-o", "x.safetensors", "--model", "9b-kv"], "train on base-9b, and use the adapter on 9b-kv"),
        (["-o", "x.safetensors", "--model", "nano"], "train on nano-base, and use the adapter on nano"),
        (["-o", "x.safetensors", "--model", "z-image-turbo"], "take base-4b or base-9b"),
        (["-o", "x.safetensors", "--rank", "0"], "rank counts from 1"),
        (["-o", "x.safetensors", "--rank", "qkv=2,mpl=3"], "qkv, proj, mlp, linear1, linear2, not for 'mpl'"),
        (["-o", "x.safetensors", "--rate", "2"], "learning rate"),
        (["-o", "x.safetensors", "--quantize", "7"], "quantize is one of"),
    ],
)
def test_the_command_refuses(folder, tmp_path, monkeypatch, capsys, options, sentence):
    monkeypatch.chdir(tmp_path)
    assert main(["train-lora", str(folder), *options]) == 2
    assert sentence in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["crosses"]


def test_a_copy_of_a_distilled_model_is_refused(folder, tmp_path, capsys):
    shutil.copytree(resolve_model("nano"), tmp_path / "copy")
    out = tmp_path / "x.safetensors"
    assert main(["train-lora", str(folder), "--model", str(tmp_path / "copy"), "-o", str(out)]) == 2
    assert "is distilled: train on its base model" in capsys.readouterr().err


def test_a_distilled_model_of_the_hub_is_refused(folder, tmp_path, hub, capsys):
    """Only its files tell, so it is fetched first."""
    hub.repositories["some/body"] = Repository(released())
    options = ["--model", "some/body", "--plan", "-o", str(tmp_path / "x.safetensors")]
    assert main(["train-lora", str(folder), *options]) == 2
    assert "some/body is distilled" in capsys.readouterr().err


def test_what_is_no_adapter_is_not_replaced(folder, tmp_path, capsys):
    """A model, a text, a link: nothing of a training is written, not even its folder."""
    model = tmp_path / "model.safetensors"
    shutil.copy(resolve_model("nano") / "transformer" / "diffusion_pytorch_model.safetensors", model)
    (tmp_path / "text.safetensors").write_text("mine")
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "text.safetensors")
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.safetensors")}
    for name in before:
        assert main(["train-lora", str(folder), "--model", "nano-base", "-o", str(tmp_path / name)]) == 2
        assert "is there and is not an adapter: name another file" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.safetensors")} == before
    assert not list(tmp_path.glob("*.training"))


@pytest.mark.parametrize(
    "rank, sentence",
    [
        ("qkv=2,3", "'qkv=2,3' is no rank, nor one for each kind, such as qkv=16,linear1=8"),
        ("qkv=two", "'qkv=two' is no rank"),
    ],
)
def test_ranks_that_cannot_be_read(folder, tmp_path, capsys, rank, sentence):
    with pytest.raises(SystemExit, match="2"):
        main(["train-lora", str(folder), "-o", str(tmp_path / "x.safetensors"), "--rank", rank])
    assert sentence in capsys.readouterr().err
