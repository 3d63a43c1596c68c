"""The page "What you can rely on" promises only what a test holds: each row names one that exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "notebooks" / "reliability.md").read_text("utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| promise |")]


def test_every_promise_is_a_row():
    assert len(ROWS) > 30


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:50])
def test_the_page_names_tests_that_exist(row):
    promise, held_by = row.strip("| ").rsplit(" | ", 1)
    named = re.findall(r"\[`(\w+)(…?)`\]\(\.\./(tests/[\w/]+\.py)\)", held_by)
    assert named and len(named) == held_by.count("]("), "the test that holds it"
    for name, cut, file in named:
        assert re.search(rf"^def {name}{'' if cut else chr(92) + '('}", (ROOT / file).read_text("utf-8"), re.M), name
