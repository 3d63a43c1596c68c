"""The first run is made, the others are read; and all are made and written when that is asked for."""

import json

import pytest

from kleinlite.book.stored_runs import repeat


def test_all_are_run_and_stored_when_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("KLEINLITE_RUNS", "all")
    path = tmp_path / "runs.json"
    assert repeat(path, "net", lambda seed: {"loss": seed / 4}, (3, 4)) == [{"loss": 0.75}, {"loss": 1.0}]
    repeat(path, "other", lambda seed: (seed,), (5,))
    assert json.loads(path.read_text("utf-8")) == {"net": [{"loss": 0.75}, {"loss": 1.0}], "other": [[5]]}


def test_the_first_is_run_and_the_others_are_read(tmp_path, monkeypatch):
    monkeypatch.delenv("KLEINLITE_RUNS", raising=False)
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"net": [1, 2, 3]}), "utf-8")
    asked = []
    assert repeat(path, "net", lambda seed: asked.append(seed) or 10 * seed, (7, 8, 9)) == [70, 2, 3]
    assert asked == [7]
    assert repeat(path, "net", lambda seed: asked.append(seed), (7, 8, 9), live=False) == [1, 2, 3]
    assert asked == [7]  # and none was run now
    with pytest.raises(ValueError, match="no runs of 'net' for 2 seeds"):
        repeat(path, "net", float, (7, 8))
