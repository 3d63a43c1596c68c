"""The recipe as a program: it leaves a model, goes on where it was, and tells mistakes in a sentence."""

import signal
import subprocess
import sys

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from small_nano import small_recipe  # noqa: F401, a fixture

from kleinlite import cli
from kleinlite.nano import recipe
from kleinlite.nano.data import text_batch
from kleinlite.nano.run import lock_folder
from kleinlite.pipeline import Klein
from kleinlite.training import training_step


def test_the_whole_recipe_leaves_a_model_and_goes_on_where_it_was(tmp_path, small, monkeypatch, capsys):
    monkeypatch.setattr(recipe, "calibrate", lambda recipe, stages: None)
    monkeypatch.setattr(recipe, "decoder_optimizer", lambda steps: optim.Adam(0.05))  # two steps that can be seen
    folder = tmp_path / "runs"
    assert recipe.main([str(folder)]) == 0
    assert f"done: {folder / 'nano'}" in capsys.readouterr().out
    for model, distilled in (("nano", True), ("nano/base", False)):
        klein = Klein.from_pretrained(folder / model)
        assert klein.info.distilled == distilled and klein("a tree", seed=1, steps=1, progress=False).size == (96, 96)
    decoder = klein.autoencoder.decoder.conv_out.weight
    average = mx.load(str(folder / "decoder.safetensors"))["average.decoder.conv_out.weight"]
    assert mx.allclose(decoder, average, atol=1e-3, rtol=1e-3), "what the decoder's stage made is what is exported"
    drawn = {"transformer.png", "sharpen.png", "edits.png", "wide.png", "distill.png"}
    assert {p.name for p in folder.glob("*.png")} == drawn and not list(folder.glob("*partial*"))
    before = {p: p.stat().st_mtime_ns for p in folder.glob("*.safetensors")}
    recipe.main([str(folder)])
    assert before == {p: p.stat().st_mtime_ns for p in folder.glob("*.safetensors")}, "nothing is trained twice"


def test_calibration_says_what_is_left_and_trains_nothing(tmp_path, small, capsys):
    folder = tmp_path / "runs"
    recipe.Recipe(folder, recipe.STEPS).text_encoder()
    recipe.main([str(folder), "--calibrate", "--stage", "text_encoder"])
    assert "done" in capsys.readouterr().out
    recipe.main([str(folder), "--calibrate", "--stage", "distill", "--steps", "5000"])
    head, encoding, distill, total = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["stage", "steps"] and encoding.startswith("encoding")
    assert distill.split()[:3] == ["distill", "5,000", "5,000"] and distill.endswith("GB") and total.startswith("all")
    assert {p.name for p in folder.iterdir()} == {"text_encoder.safetensors", "tokenizer"}


def test_control_c_saves_after_the_step_and_says_so(tmp_path, small, monkeypatch, capsys):
    monkeypatch.setattr(recipe, "calibrate", lambda recipe, stages: None)
    monkeypatch.setattr(recipe.train_with_progress, "__defaults__", (100, training_step))

    def batch(tokenizer, tokens, step, count):
        if step == 3:
            signal.raise_signal(signal.SIGINT)
        return text_batch(tokenizer, tokens, step, count)

    monkeypatch.setattr(recipe, "text_batch", batch)
    command = [str(tmp_path), "--stage", "text_encoder", "--steps", "6"]
    assert cli.main(["train", *command]) == 130
    assert "goes on from here" in capsys.readouterr().err
    assert recipe.Recipe(tmp_path, recipe.STEPS).done("text_encoder") == 4, "the step that was under way is in the file"
    monkeypatch.setattr(recipe, "text_batch", text_batch)
    recipe.main(command)
    assert recipe.Recipe(tmp_path, recipe.STEPS).done("text_encoder") == 6


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["{}/file"], "file is a file: name a folder"),
        (["{}/new", "--stage", "sharpen"], "autoencoder.safetensors is missing: train that stage first"),
        (["{}/cut", "--stage", "autoencoder"], "autoencoder.safetensors is damaged or cut short: delete it"),
        (["{}/new", "--stage", "export"], "autoencoder.safetensors is missing: train that stage first"),
        (["{}", "--stage", "painting"], "invalid choice: 'painting'"),
        (["{}", "--steps", "5"], "--steps is a number from 1 on, and goes with the --stage"),
    ],
)
def test_mistakes_are_told_in_a_sentence(tmp_path, capsys, command, sentence):
    (tmp_path / "file").touch()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "autoencoder.safetensors").write_bytes(b"\0" * 5)
    try:
        status = cli.main(["train", *(word.format(tmp_path) for word in command)])
    except SystemExit as stop:
        status = stop.code
    error = capsys.readouterr().err
    assert status == 2 and sentence in error and error.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_two_trainings_do_not_share_a_folder(tmp_path, capsys):
    with lock_folder(tmp_path):
        code = f"import sys; from kleinlite.nano import recipe; sys.exit(recipe.main([{str(tmp_path)!r}]))"
        end = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert end.returncode == 2 and end.stderr.startswith("kleinlite: Another training is at work in")
    assert end.stderr.count("\n") == 1 and not end.stdout


def test_control_c_with_nothing_to_save_says_nothing_of_it(tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(recipe, "calibrate", interrupted)
    assert recipe.main([str(tmp_path / "runs")]) == 130
    assert capsys.readouterr() == ("", "kleinlite: stopped.\n")


def test_the_recipe_needs_no_command_line():
    """`mlx.launch -m kleinlite.nano.recipe` starts it as a program of its own."""
    command = [sys.executable, "-m", "kleinlite.nano.recipe", "runs", "--stage", "painting"]
    end = subprocess.run(command, capture_output=True, text=True)
    assert end.returncode == 2 and "invalid choice: 'painting'" in end.stderr and end.stderr.count("\n") == 1
    code = "import sys, kleinlite.nano.recipe; print('kleinlite.cli' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
