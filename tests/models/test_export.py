"""Quantised copies of models: what they hold, what they draw, how little memory they take."""

import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import pytest
from packings import WISH
from peak_memory import peak_memory
from stand_in_hub import TINY
from tiers import slow

from kleinlite import Klein
from kleinlite.models import export
from kleinlite.models.checkpoint import open_checkpoint
from kleinlite.quantization import QUANT_SPECS

CPU = pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="what is measured here is the CPU's way")


@pytest.mark.parametrize("name", [4, *slow(3, "nvfp4", "mxfp8")])
def test_a_quantized_copy(name, tmp_path):
    export.quantize_model("nano", tmp_path / "q", name, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["q"]
    copy = Klein.from_pretrained(tmp_path / "q")
    assert copy(**WISH).tobytes() == Klein.from_pretrained("nano", quantize=name)(**WISH).tobytes()
    config = json.loads((tmp_path / "q" / "transformer" / "config.json").read_text())
    p = QUANT_SPECS[name]
    assert config["quantization"] == {"group_size": p.group, "bits": p.bits, "mode": p.mode}
    names = [k for path in (tmp_path / "q" / "text_encoder").glob("*.safetensors") for k in mx.load(str(path))]
    assert not [k for k in names if "layers.3" in k or k.startswith("norm")]
    with pytest.raises(ValueError, match="quantized already"):
        open_checkpoint(tmp_path / "q", dtype=mx.float32, quantize=4)
    with pytest.raises(FileExistsError, match="is there already"):
        export.quantize_model("nano", tmp_path / "q", name)


def test_a_copy_of_the_base_model(tmp_path):
    """Its parts lie beside it; the copy is whole."""
    export.quantize_model("nano-base", tmp_path / "q", 8, progress=False)
    copy = open_checkpoint(tmp_path / "q", dtype=mx.float32)
    assert not copy.info.distilled and copy.files["autoencoder"].path.parent == tmp_path / "q"


def test_a_copy_says_what_it_holds(tmp_path):
    """Other programs build as many layers as its config.json says; the layers that no model reads are left out."""
    export.quantize_model("nano", tmp_path / "q", 8, progress=False)
    config = json.loads((tmp_path / "q" / "text_encoder" / "config.json").read_text())
    names = [k for path in (tmp_path / "q" / "text_encoder").glob("*.safetensors") for k in mx.load(str(path))]
    layers = {int(found[1]) for found in map(re.compile(r"(?:model\.)?layers\.(\d+)\.").match, names) if found}
    assert layers == set(range(config["num_hidden_layers"]))
    config = json.loads((tmp_path / "q" / "transformer" / "config.json").read_text())
    names = [k for path in (tmp_path / "q" / "transformer").glob("*.safetensors") for k in mx.load(str(path))]
    for word, blocks in (("num_layers", "double_blocks"), ("num_single_layers", "single_blocks")):
        found = {name.split(".")[1] for name in names if name.startswith(f"{blocks}.")}
        assert len(found) == config[word]


@pytest.mark.parametrize("name", [4, 8, "nvfp4"])
def test_the_bytes_that_are_asked_of_the_disk(name, tmp_path):
    """Neither a tenth nor ten times of what the two parts take: small matrices stay as they are."""
    export.quantize_model("nano", tmp_path / "q", name, progress=False)
    planned = export.quantized_bytes(open_checkpoint("nano", dtype=mx.bfloat16, quantize=name))
    files = [path for part in ("transformer", "text_encoder") for path in (tmp_path / "q" / part).glob("*.safetensors")]
    assert 0.8 < sum(path.stat().st_size for path in files) / planned < 1.25


def test_a_copy_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "write_safetensors", full)
    with pytest.raises(OSError, match="No space left"):
        export.quantize_model("nano", tmp_path / "q", 4, progress=False)
    assert not list(tmp_path.iterdir())


@CPU
def test_a_copy_needs_little_memory(tmp_path):
    mx.clear_cache()
    with peak_memory() as peak:
        export.quantize_model("nano", tmp_path / "q", 4, progress=False)
        largest = max(w.nbytes for w in open_checkpoint("nano", dtype=mx.float32).weights("transformer").values())
    assert peak.bytes < 3 * largest


# ---------------------------------------------------------------- killed, or two at once

KILLED = """
import os, signal, sys
from kleinlite.models.export import quantize_model

out, last, seen = sys.argv[2], int(sys.argv[3]), 0

def count(event, arguments):
    global seen
    path = str(arguments[1] if event == "os.rename" else arguments[0]) if arguments else ""
    if event in ("open", "os.mkdir", "os.rename", "os.remove") and path.startswith(os.path.dirname(out)):
        seen += 1
        if seen == last:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(count)
quantize_model(sys.argv[1], out, 8, progress=False)
print(seen)
"""


def quantize_in_a_process(out: Path, last: int) -> subprocess.CompletedProcess:
    """A copy of the tiny model, by a program that is killed before it touches a file for the `last`-th time."""
    command = [sys.executable, "-c", KILLED, str(TINY), str(out), str(last)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"KLEINLITE_CPU": "off"})


@pytest.mark.slow
def test_killed_at_any_point(tmp_path):
    """There is no copy, or a whole one; and the next run clears up."""
    touches = int(quantize_in_a_process(tmp_path / "whole", 0).stdout)
    for last in (1, 4, touches // 2, touches - 2, touches - 1, touches):
        out = tmp_path / str(last) / "copy"
        out.parent.mkdir()
        assert quantize_in_a_process(out, last).returncode == -signal.SIGKILL
        if not out.exists():
            export.quantize_model(TINY, out, 8, progress=False)
        assert open_checkpoint(out, dtype=mx.float32)
        left = {path.name for path in out.parent.rglob("*") if path.is_file() and not path.is_relative_to(out)}
        assert left <= {".copy.lock"}  # where it was killed when only that was left to do
    assert touches > 20


def test_two_into_one_folder(tmp_path, monkeypatch):
    """The second is refused, and the first does not notice."""
    write, refused = export.write_copy, []

    def meanwhile(*args):
        with ThreadPoolExecutor(1) as pool:
            refused.append(pool.submit(export.quantize_model, TINY, tmp_path / "copy", 8, progress=False).exception())
        write(*args)

    monkeypatch.setattr(export, "write_copy", meanwhile)
    export.quantize_model(TINY, tmp_path / "copy", 8, progress=False)
    assert re.search(r"copy\S*: wait until it is done", str(refused[0])) and len(refused) == 1
    assert open_checkpoint(tmp_path / "copy", dtype=mx.float32)
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_what_is_not_ours_stays(tmp_path):
    """A hidden folder of somebody else's, and rights as the user's files have them."""
    for name in (".copy.partial", ".copy.mine", ".copy.12345678.partial.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").touch()
    export.quantize_model(TINY, tmp_path / "copy", 8, progress=False)
    assert len(list(tmp_path.rglob("precious"))) == 3
    (tmp_path / "other").mkdir()
    assert (tmp_path / "copy").stat().st_mode == (tmp_path / "other").stat().st_mode
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(FileExistsError, match="is there already"):
        export.quantize_model(TINY, tmp_path / "link", 8, progress=False)
