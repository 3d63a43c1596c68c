"""The speedrun: a whole report from nothing, the same after a stop, and mistakes in a sentence."""

import os
import signal
from dataclasses import replace

import mlx.core as mx
import pytest

from kleinlite.errors import UserError
from kleinlite.klein import Klein
from kleinlite.transformer import TransformerConfig
from recipe import speedrun as module
from recipe.__main__ import main
from recipe.speedrun import SpeedrunConfig, rate_at, speedrun

SMALL = SpeedrunConfig(
    TransformerConfig(1, 1, 2, (4, 4, 4, 4), d_text=288), scenes=64, batch=4, steps=1, captions=10, guidance=1.0
)


@pytest.fixture(autouse=True)
def make_haste(monkeypatch):
    """Compiling, and looking at samples, take longer than all that is trained here."""
    monkeypatch.setattr(module, "LOOKS", 2)
    mx.disable_compile()
    yield
    mx.enable_compile()


class Clock:
    """A second at each look; at look number `stop`, Ctrl-C is pressed."""

    def __init__(self, start: int = 0, stop: int = -1):
        self.now = start
        self.stop = stop

    def __call__(self) -> float:
        self.now += 1
        if self.now == self.stop:
            os.kill(os.getpid(), signal.SIGINT)
        return float(self.now)


def test_a_run_writes_a_whole_report(tmp_path, capsys):
    speedrun(tmp_path, 0.3, SMALL, Clock())
    report = (tmp_path / "report.md").read_text("utf-8")
    first = report.split("\n")[0]
    assert first.startswith("# ") and " % ± " in first and "of what 10 held-out captions ask for is right" in first
    assert first[2:] in capsys.readouterr().out
    for row in ("everything right", "minutes", "weights trained", "machine", "load at the end", "versions", "commit"):
        assert f"\n| {row} | " in report
    assert report.count("\n1. ") == 1 and "\n10. " in report
    for file in ("pictures.png", "loss.png", "samples.png"):
        assert (tmp_path / file).stat().st_size > 100
    assert Klein.from_pretrained(tmp_path / "model")("a tree", steps=1, guidance=1, progress=False).size == (96, 96)
    with pytest.raises(UserError, match="holds a finished run"):
        speedrun(tmp_path, 0.3, SMALL, Clock())


@pytest.mark.slow
def test_stopped_and_resumed_it_is_the_same(tmp_path):
    """The clock stands still between two starts, too."""
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    speedrun(whole, 0.3, SMALL, Clock())
    with pytest.raises(KeyboardInterrupt):
        speedrun(parts, 0.3, SMALL, Clock(stop=9))
    assert not (parts / "report.md").exists()
    stopped = module.read_arrays(parts / "run.safetensors")[1]["step"]
    with pytest.raises(UserError, match="holds a run of 0.3 minutes: say --minutes 0.3"):
        speedrun(parts, 2, SMALL)
    speedrun(parts, 0.3, SMALL, Clock(start=1000))
    arrays, about = module.read_arrays(whole / "run.safetensors")
    others, other_about = module.read_arrays(parts / "run.safetensors")
    assert 1 <= int(stopped) < int(about["step"]) == int(other_about["step"])
    assert arrays.keys() == others.keys() and all(mx.array_equal(arrays[name], others[name]) for name in arrays)
    logs = [(folder / "log.json").read_text() for folder in (whole, parts)]
    assert logs[0] == logs[1]


@pytest.mark.parametrize("minutes", ["0", "-3", "nan", "inf", "2000"])
def test_bad_minutes_get_a_sentence(tmp_path, capsys, minutes):
    assert main(["speedrun", str(tmp_path / "run"), f"--minutes={minutes}"]) == 2
    error = capsys.readouterr().err
    assert "--minutes is a number from 1 to 1440" in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_other_mistakes_get_one_too(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file is a file: name a folder"):
        speedrun(tmp_path / "file", 1, SMALL)
    large = replace(SMALL, transformer=TransformerConfig(2, 5, 8, (16, 16, 16, 16), d_text=288))
    with pytest.raises(UserError, match=r"The network has [\d.]+ M weights: the rules allow 10 M"):
        speedrun(tmp_path / "large", 1, large)


def test_the_learning_rate_follows_the_clock():
    assert [rate_at(share) for share in (0.0, 0.01, 0.02, 0.5, 0.75, 1.0)] == [0.01, 0.5, 1.0, 1.0, 0.5, 0.01]
