"""The recipe as a program: it leaves a model, goes on where it was, and tells mistakes in a sentence."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from small_nano import SMALL, launch, uncompiled  # noqa: F401, a fixture

from kleinlite.klein import Klein
from kleinlite.scenes import shape_spots
from kleinlite.trainer.run import lock_folder
from recipe import redraw, repair, training
from recipe.__main__ import main


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["{}/file"], "file is a file: name a folder"),
        (["{}/new", "--stage", "transformer"], "autoencoder.safetensors is missing: train that stage first"),
        (["{}/cut", "--stage", "autoencoder"], "autoencoder.safetensors is damaged or cut short: delete it"),
        (["{}/new", "--stage", "export"], "autoencoder.safetensors is missing: train that stage first"),
        (["{}/new", "--world", "birds"], "There is no world 'birds': say shapes or critters, or a file"),
        (["{}/new", "--world", "{}/file"], "There is no world '"),
        (["{}/new", "--world", "critters", "--stage", "repair"], "There is no stage 'repair' here"),
        (["{}", "--stage", "painting"], "There is no stage 'painting' here: choose from autoencoder"),
        (["{}", "--steps", "5"], "--steps is a number from 1 to 1,000,000, and goes with the --stage"),
        (["{}", "--stage", "distill", "--steps", "9" * 30], "--steps is a number from 1 to 1,000,000"),
    ],
)
def test_mistakes_are_told_in_a_sentence(tmp_path, capsys, command, sentence):
    (tmp_path / "file").touch()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "autoencoder.safetensors").write_bytes(b"\0" * 5)
    try:
        status = main(["train", *(word.format(tmp_path) for word in command)])
    except SystemExit as stop:
        status = stop.code
    error = capsys.readouterr().err
    assert status == 2 and sentence in error and error.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_two_trainings_do_not_share_a_folder(tmp_path, capsys):
    with lock_folder(tmp_path):
        command = [sys.executable, "-m", "recipe", "train", str(tmp_path)]
        end = subprocess.run(command, capture_output=True, text=True)
    assert end.returncode == 2 and end.stderr.startswith("kleinlite: Another training is at work in")
    assert end.stderr.count("\n") == 1 and not end.stdout


@pytest.fixture
def kind_ruler(monkeypatch):
    """Untrained nets draw nothing that could be measured: take it for what was asked."""
    right = itertools.cycle((True, False))
    monkeypatch.setattr(redraw, "accepted", lambda picture, scene, caption: (scene, shape_spots(scene)))
    monkeypatch.setattr(repair, "shows", lambda *_: next(right))
    monkeypatch.setattr(repair, "find_mates", lambda path, seen, cases, previews: dict.fromkeys(previews, 0))


@pytest.mark.usefixtures("kind_ruler", "uncompiled")
def test_the_whole_recipe_leaves_a_model_and_goes_on_where_it_was(tmp_path, capsys):
    folder = tmp_path / "runs"
    training.train(folder, cfg=SMALL)
    assert f"done: {folder / 'nano'}" in capsys.readouterr().out
    for model, distilled in (("nano", True), ("nano/base", False)):
        klein = Klein.from_pretrained(folder / model)
        assert klein.info.distilled == distilled and klein("a tree", seed=1, steps=1, progress=False).size == (96, 96)
    assert {p.name for p in folder.glob("*.png")} == {
        "transformer.png", "distill.png", "redraw-1.png", "redraw-2.png", "redraw.png", "repair-1.png", "repair.png"
    }  # fmt: skip
    assert [line.split(":")[0] for line in (folder / "log").read_text().splitlines()] == [
        "autoencoder 2", "text_encoder 2", "transformer 2", "distill 2",
        "redraw-1 2", "redraw-2 2", "redraw 2", "repair-1 2", "repair 2",
    ]  # fmt: skip
    before = {p: p.stat().st_mtime_ns for p in folder.glob("*.safetensors")}
    training.train(folder, cfg=SMALL)
    assert before == {p: p.stat().st_mtime_ns for p in folder.glob("*.safetensors")}, "nothing is trained twice"


TOGETHER = """
import sys
from pathlib import Path

import mlx.core as mx

from kleinlite.scenes import shape_spots
from recipe import redraw, training

sys.path.append(sys.argv[2])
from small_nano import SMALL

mx.disable_compile()
redraw.accepted = lambda picture, scene, caption: (scene, shape_spots(scene))
for stage in ("autoencoder", "text_encoder", "transformer", "distill", "redraw"):
    training.train(Path(sys.argv[1]), stage, steps=4, cfg=SMALL)
"""


def test_two_processes_share_a_folder(tmp_path):
    """The first alone draws, for samples and for redraw. What it asked the second for then would never be answered."""
    (tmp_path / "together.py").write_text(TOGETHER)
    launch(tmp_path, tmp_path / "together.py", tmp_path / "runs", Path(__file__).parents[1])
    assert (tmp_path / "runs" / "log").read_text().count("samples in") == 2 + 2 + 3 * 2
