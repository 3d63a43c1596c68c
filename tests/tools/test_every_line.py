"""What each line of microklein does when it is broken: what is stored is of the page as it stands."""

import json
import random
import re

import numpy as np
import pytest
from PIL import Image

from tools.every_line import COLUMNS, PAGE, RESULTS, SIDE, Right, changes, examine, starts, unbroken

STORED = json.loads((RESULTS / "lines.json").read_text("utf-8"))
SOURCE = PAGE.read_text("utf-8")


def identify(change: dict) -> tuple:
    return change["line"], change["before"], change["after"]


def test_what_is_stored_is_of_this_page():
    """After an edit of microklein: python -m tools.every_line."""
    assert STORED["starts"] == starts(SOURCE)
    assert [identify(change) for change in STORED["changes"]] == [
        (change.line, change.before, change.after) for change in changes(SOURCE)
    ]


def test_no_line_is_left_out_that_has_something_to_break():
    """Left are functions that read files or arguments, and lines that only open files, name shapes, loop or return."""
    text, left = SOURCE.split("\n"), unbroken(SOURCE, STORED["changes"])
    assert len({change["line"] for change in STORED["changes"]}) > 70
    computing = [text[line - 1].strip() for line, why in left.items() if why.startswith("has no operator")]
    assert all(
        re.match(r"([\w, ]+) = |x = xp.pad|for |if |assert |return |states.append|tokenizer.enable_padding", line)
        for line in computing
    )


def test_a_change_is_one_place_of_one_function():
    for change in changes("def conv(x, w):\n    y = x * w + 3\n    return silu(y)\n"):
        assert change.function == "conv"
    found = [(change.before, change.after) for change in changes("def conv(x, w):\n    return x * 4\n")]
    assert found == [("x * 4", "x / 4"), ("4", "6")]


def test_a_change_that_does_not_draw_says_why():
    right = Right(np.zeros(1), np.zeros(1), np.zeros((96, 96, 3), np.uint8))
    broken = next(change for change in changes("def decode(folder, z, gh, gw):\n    return z + 'a'[gh * 3]\n"))
    about, picture = examine(broken, right)
    assert picture is None and "Error" in about["error"]


@pytest.mark.slow
def test_five_changes_are_drawn_again():
    sheet = np.asarray(Image.open(RESULTS / "pictures.jpg")).astype(int)
    right = Right.of(SOURCE)
    by_name = {(change.line, change.before, change.after): change for change in changes(SOURCE)}
    for stored in random.Random().sample([change for change in STORED["changes"] if "picture" in change], 5):
        about, picture = examine(by_name[identify(stored)], right)
        row, column = divmod(stored["picture"], COLUMNS)
        shown = sheet[row * SIDE : (row + 1) * SIDE, column * SIDE : (column + 1) * SIDE]
        assert picture is not None and np.abs(shown - picture).mean() < 12, identify(stored)  # a JPEG of it
        assert about["levels"] == pytest.approx(stored["levels"], abs=1), identify(stored)
        assert about.get("judge") == stored["judge"] or stored["levels"] > 20, identify(stored)
