"""From a name to loaded parts: what files say decides, each file is read once, each tensor matched once."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from stand_in_hub import TINY

from kleinlite.klein import Klein
from kleinlite.models import checkpoint as checkpoints
from kleinlite.models.checkpoint import open_checkpoint, resolve_model
from kleinlite.models.places import tell

NANO = resolve_model("nano")
IO = Path("/proc/self/io")


def copy_tiny(folder: Path) -> Path:
    return Path(shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("base", "expected*")))


def open_tiny(path: Path, **more: object) -> checkpoints.Checkpoint:
    return open_checkpoint(path, dtype=mx.float32, **more)


# ---------------------------------------------------------------- what files say decides


@pytest.mark.parametrize("name", ["my-kv-test", "klein-base-9b-kv", "base", "flux-2-klein-4b-kv"])
def test_the_name_of_a_folder_says_nothing(tmp_path, capsys, name):
    folder = copy_tiny(tmp_path / name)
    assert open_tiny(folder).info == checkpoints.replace(open_tiny(TINY).info, name=tell(folder))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "name, distilled, kv, told",
    [
        ("flux-2-klein-9b-kv-fp8", True, True, "distilled and for cached references"),
        ("flux-2-klein-base-4b", False, False, "a base model"),
        ("mine", True, False, None),
    ],
)
def test_the_name_of_a_single_file_is_all_there_is(tmp_path, caplog, name, distilled, kv, told):
    """Its header says neither, so its name does, and the log says that it did, once."""
    shutil.copyfile(own_names(tmp_path / "x.safetensors"), tmp_path / f"{name}.safetensors")
    checkpoints.say_once.cache_clear()
    infos = [open_tiny(tmp_path / f"{name}.safetensors", parts=TINY).info for _ in range(2)]
    assert [(info.distilled, info.kv) for info in infos] == [(distilled, kv)] * 2
    assert caplog.messages == ([f"{name}.safetensors is taken for {told}, by its name."] if told else [])


def own_names(path: Path) -> Path:
    """tiny's transformer as a single file."""
    weights = open_tiny(TINY).weights("transformer")
    mx.save_safetensors(str(path), {name: mx.contiguous(w) for name, w in weights.items()})
    return path


def test_an_index_says_which_parts_are_shared(tmp_path):
    """The folder's name does not: nano-base may be copied under any name, but not without the line."""
    shutil.copytree(NANO, tmp_path / "m", ignore=shutil.ignore_patterns("base", "loras"))
    for name in ("base", "other"):
        folder = Path(shutil.copytree(NANO / "base", tmp_path / "m" / name))
        assert open_tiny(folder).files["text_encoder"].path == tmp_path / "m" / "text_encoder"
        index = json.loads((folder / "model_index.json").read_text())
        del index["shares"]
        (folder / "model_index.json").write_text(json.dumps(index))
        with pytest.raises(FileNotFoundError, match="text_encoder/config.json is missing"):
            open_tiny(folder)


@pytest.mark.parametrize("name", ["Nano", "NANO-BASE"])
def test_bundled_models_in_any_case(name):
    assert open_tiny(name).info.distilled == (name == "Nano")


def test_a_part_of_another_model():
    for word in ("autoencoder", "vae"):  # ours, and that of the released folders
        found = open_tiny(TINY, parts={word: TINY / "vae"})
        assert found.configs == open_tiny(TINY).configs
        assert found.info.chosen == {"parts": {"autoencoder": tell(TINY / "vae")}}, "what a picture remembers"


# ---------------------------------------------------------------- once


def bytes_read() -> int:
    return int(IO.read_text().split("rchar:")[1].split()[0])


@pytest.mark.skipif(not IO.exists(), reason="only Linux counts")
def test_a_picture_reads_nanos_files_once():
    """18 MB; 120 when each file was checked eight times."""
    Klein.from_pretrained("nano")("a red circle", seed=7, progress=False)  # imports are read, too
    before = bytes_read()
    Klein.from_pretrained("nano")("a blue square", seed=7, progress=False)
    weights = [file for files in open_tiny("nano").files.values() for file in files.files]
    size = sum(path.stat().st_size for path in [*weights, NANO / "tokenizer" / "tokenizer.json"])
    assert 17e6 < size < 19e6
    assert 0.8 * size < bytes_read() - before < 1.02 * size  # a part of the autoencoder only encodes


def test_a_file_is_opened_once_to_be_checked_and_once_to_be_read(tmp_path):
    """By the call and by the command line. MLX opens in C, out of sight."""
    code = """
import sys
checked = []
read = []
def note(event, args):
    if event == "open" and str(args[0]).endswith(".safetensors"):
        checked.append(str(args[0]))
sys.addaudithook(note)
import mlx.core as mx
load = mx.load
def noted(source, **words):
    read.append(source)
    return load(source, **words)
mx.load = noted
from kleinlite import Klein
Klein.from_pretrained("nano", loras=["cross"])("a red circle", seed=7, progress=False)
adapter = [path for path in checked if "cross" in path]
assert len(adapter) == 2, checked  # its bytes are read here, for their hash
parts = [path for path in checked if path not in adapter]
assert len(parts) == len(set(parts)) == 3, checked
assert len(read) == 4, read
from kleinlite.cli import main
checked.clear()
read.clear()
assert main(["generate", "a red circle", "--lora", "cross", "--seed", "7", "-o", "x.png"]) == 0
assert len(checked) == 5 and len(set(checked)) == 4, checked
assert len(read) == 4, read  # a name is opened once
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_tensors_are_matched_once(monkeypatch):
    counts: list[str] = []
    match = checkpoints.match_weights
    monkeypatch.setattr(
        checkpoints,
        "match_weights",
        lambda module, *more: (counts.append(type(module).__name__), match(module, *more))[1],
    )
    checkpoint = open_tiny("nano")
    assert checkpoint.bits == (32, 32) and checkpoint.weights("transformer")
    first = checkpoint.load_transformer(), checkpoint.load_text_encoder(), checkpoint.load_autoencoder()
    assert sorted(counts) == ["Autoencoder", "TextEncoder", "Transformer"]
    again = checkpoint.load_transformer()  # as after a release
    assert again is not first[0] and len(counts) == 4
    for (name, w), (_, other) in zip(tree_flatten(again.parameters()), tree_flatten(first[0].parameters())):
        assert mx.array_equal(w, other), name


def test_what_was_loaded_is_not_kept():
    """Or a released transformer would stay in memory."""
    checkpoint = open_tiny("nano")
    before = mx.get_active_memory()
    module = checkpoint.load_transformer()
    mx.eval(module.parameters())
    assert mx.get_active_memory() - before > 20e6
    del module
    assert mx.get_active_memory() - before < 1e6
