"""Autoresearch: one whole round, what a try may not do, and when it is kept."""

from dataclasses import replace

import mlx.core as mx
import pytest

from kleinlite.errors import UserError
from kleinlite.klein import Klein
from kleinlite.nano.evaluate import draw_all, held_out_captions
from recipe.auto import __main__ as command, given, judge as judging
from recipe.auto.__main__ import Row, add_row, decide, main, read_rows
from recipe.auto.given import Given
from recipe.auto.judge import believes, judge, one_word_changed
from recipe.auto.rules import FOLDER, TRAIN, check_train, locked_files
from recipe.auto.train import train

ROW = Row(5.0, 0, 100, 50.0, 1.0, 60.0, 7, "baseline", "as it is", "00000000")
SOURCE = TRAIN.read_text("utf-8")


def test_the_file_as_it_is_keeps_the_rules():
    check_train(SOURCE)


@pytest.mark.parametrize(
    "cheat, sentence",
    [
        ("from kleinlite.nano.evaluate import examine", "may not import kleinlite.nano.evaluate"),
        ("from kleinlite.scenes import sample", "may not import kleinlite.scenes"),
        ("from .judge import judge", "may not import judge"),
        ("from .given import encode_once", "may not import given"),
        ("from . import judge", "may not import"),
        ("import kleinlite.klein", "may not import kleinlite.klein"),
        ("import os", "may not import os"),
        ("nano = mx.load('transformer.safetensors')", "may not use load"),
        ("teacher = Given._klein", "may not use _klein"),
        ("text = open('judge.py')", "may not use open"),
        ("\n" * 200, "the rules allow 200"),
        ("def train(:", "this is no Python"),
    ],
)
def test_a_cheat_is_refused(cheat, sentence):
    with pytest.raises(UserError, match=sentence):
        check_train(SOURCE + cheat + "\n")


def test_nothing_held_out_is_learned_from(tmp_path):
    given.encode_once(tmp_path, 32)
    curriculum = Given(tmp_path, 1, 0).curriculum(4)
    assert len(curriculum.lessons.scenes) == 32
    assert not any(curriculum.world.held_out(scene) for scene in curriculum.lessons.scenes)


def test_a_keep_beats_the_spread_and_convinces_both():
    rows = [replace(ROW, score=score) for score in (50.0, 52.0, 51.0)]
    rows.append(replace(ROW, minutes=10.0, score=99.0))  # another track
    assert decide(rows, replace(ROW, score=53.0)) == "discard", "as far above the mean as the seeds lie apart"
    assert decide(rows, replace(ROW, score=53.1)) == "keep"
    assert decide(rows, replace(ROW, score=53.1, second=59.9)) == "discard"
    rows.append(replace(ROW, score=54.0, second=70.0, verdict="keep"))
    assert decide(rows, replace(ROW, score=55.0, second=70.0)) == "discard"
    assert decide(rows, replace(ROW, score=56.1, second=70.0)) == "keep"


def test_another_changed_file_is_refused(tmp_path, monkeypatch, capsys):
    results = tmp_path / "results.tsv"
    asked = ["try", "batch of 16", f"--results={results}", f"--folder={tmp_path}"]
    assert main(asked) == 2
    assert "run `python -m recipe.auto baseline --minutes 5` first" in capsys.readouterr().err
    add_row(results, replace(ROW, locked=locked_files()))
    monkeypatch.setattr(command, "locked_files", lambda: "12345678")
    assert main(asked) == 2
    assert "Something else than train.py has changed" in capsys.readouterr().err
    assert len(read_rows(results)) == 1


def test_the_lock_sees_every_module_but_one(tmp_path):
    folder = tmp_path / FOLDER.relative_to(FOLDER.parents[1])
    folder.mkdir(parents=True)
    for name in ("train.py", "judge.py"):
        (folder / name).write_text("")
    before = locked_files(tmp_path)
    (folder / "train.py").write_text("BATCH = 16")
    assert locked_files(tmp_path) == before
    (folder / "judge.py").write_text("score = 100")
    assert locked_files(tmp_path) != before


@pytest.mark.slow
def test_the_second_judge_tells_a_picture_from_another():
    nano = Klein.from_pretrained("nano-base", keep_loaded=True)
    said = [caption for _, caption in held_out_captions(8, 1_500_000_000)]
    assert "a red heart below an orange star" in said and len(one_word_changed("a red heart below an orange star")) == 4
    pictures = draw_all(Klein.from_pretrained("nano"), said)
    own = [right for pair in zip(pictures, said) for right in believes(nano, *pair)]
    others = [right for pair in zip(pictures[1:] + pictures[:1], said) for right in believes(nano, *pair)]
    assert sum(own) >= len(own) - 1
    assert sum(others) <= 0.7 * len(others), "by chance it is half"


@pytest.mark.slow
def test_a_whole_round(tmp_path, monkeypatch):
    """Training for a second, the judges, the row and the chart."""
    given.encode_once(tmp_path, 32)
    train(Given(tmp_path, 1 / 60, 0))
    monkeypatch.setattr(judging, "SHOWN", 4)
    verdict = judge(tmp_path, 6)
    assert 0 <= verdict.score <= 100 and 0 <= verdict.second <= 100 and verdict.steps >= 1
    mx.clear_cache()
    results = tmp_path / "results.tsv"
    monkeypatch.setattr(command, "measure", lambda *args: replace(ROW, seed=args[2], locked=locked_files()))
    common = [f"--results={results}", f"--folder={tmp_path}"]
    assert main(["baseline", *common]) == 0
    assert main(["baseline", *common]) == 2, "once is enough"
    assert main(["try", "nothing", *common]) == 0
    assert [row.verdict for row in read_rows(results)] == ["baseline"] * 3 + ["discard"]
    assert main(["chart", *common]) == 0
    assert (tmp_path / "chart.png").stat().st_size > 1000
