"""A training that was killed, moved or given absurd numbers: what the next start finds, mends and refuses."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kleinlite.klein import Klein
from kleinlite.models.adapters import describe_adapter, open_adapter
from kleinlite.models.checkpoint import resolve_model
from kleinlite.models.places import tell
from kleinlite.nano.crosses import cross
from kleinlite.trainer.adapter import LoraTrainer
from kleinlite.trainer.folder import read_folder
from kleinlite.trainer.settings import Settings
from kleinlite.training import learning_rate

QUICK = Settings(rank=1, steps=4, rate=1e-3, accumulate=1, every=2)


@pytest.fixture
def folder(tmp_path):
    """Three crosses with captions."""
    folder = tmp_path / "crosses"
    folder.mkdir()
    for seed in range(3):
        picture, caption = cross(seed)
        picture.save(folder / f"{seed}.png")
        (folder / f"{seed}.txt").write_text(caption)
    return folder


def train(folder: Path, out: Path, settings: Settings = QUICK, model: str = "nano-base") -> Path:
    LoraTrainer(Klein.from_pretrained(model), read_folder(folder), out, settings).train()
    return out


def told(out: Path) -> dict[str, bytes]:
    """What a training writes: the adapter and samples, which a kill must not change."""
    beside = out.with_suffix(".training")
    files = [out, *beside.glob("samples-*.png")]
    return {path.name: path.read_bytes() for path in files}


class Killed(BaseException):
    """The process is gone: nobody catches it."""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["report", "draw_samples"])
def test_a_kill_between_state_and_report_loses_nothing(folder, tmp_path, monkeypatch, where):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole = told(train(folder, tmp_path / "a" / "x.safetensors"))

    def kill(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(LoraTrainer, where, kill)
        with pytest.raises(Killed):
            train(folder, tmp_path / "b" / "x.safetensors")
    assert told(train(folder, tmp_path / "b" / "x.safetensors")) == whole


def test_more_steps_go_on_and_fewer_are_refused(folder, tmp_path):
    out = tmp_path / "x.safetensors"
    short = told(train(folder, out, replace(QUICK, steps=2)))
    longer = LoraTrainer(Klein.from_pretrained("nano-base"), read_folder(folder), out, replace(QUICK, steps=3))
    assert longer.run.step == 2
    longer.train()
    rate = longer.run.optimizer.learning_rate.item()  # of the third step of three
    assert longer.run.step == 3 and rate == pytest.approx(learning_rate(1e-3, 3, 1)(2).item())
    long = told(out)
    assert long[out.name] != short[out.name]
    assert {"samples-00002.png", "samples-00003.png"} < set(long)
    with pytest.raises(ValueError, match=r"other settings \(steps\): delete it, or name another file"):
        train(folder, out, replace(QUICK, steps=2))
    assert told(out) == long


@pytest.mark.slow
def test_a_stop_between_two_looks_adds_none(folder, tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole = told(train(folder, tmp_path / "a" / "x.safetensors"))
    real = LoraTrainer.batch

    def stop(trainer, number):
        if number == 3:
            trainer.run.save()  # as Ctrl-C does after a step
            raise Killed
        return real(trainer, number)

    with monkeypatch.context() as patch:
        patch.setattr(LoraTrainer, "batch", stop)
        with pytest.raises(Killed):
            train(folder, tmp_path / "b" / "x.safetensors")
    assert told(train(folder, tmp_path / "b" / "x.safetensors")) == whole


def test_an_adapter_does_not_tell_where_its_maker_lives(folder, tmp_path):
    home = tmp_path / "home" / "jane"
    shutil.copytree(resolve_model("nano"), home)
    out = train(folder, tmp_path / "x.safetensors", model=str(home / "base"))
    assert open_adapter(out).trained_on == tell(home / "base")
    assert "jane" not in str(describe_adapter(open_adapter(out)).values()).replace(str(out), "")
    assert b"jane" not in out.read_bytes()
