"""What a chapter does to show a mistake: a piece of a line changed and changed back, and who notices."""

from unittest.mock import patch

import pytest

pytest.importorskip("matplotlib")

from kleinlite import sampling
from kleinlite.book import mistakes
from kleinlite.sampling import schedule
from kleinlite.scenes import captions, draw, sample

BENT = "shift_time(t, shift)"


def test_a_line_is_changed_and_changed_back():
    right, straight = schedule(4, 36), mistakes.line(sampling.schedule, BENT, "t")
    assert schedule(4, 36) == right  # nothing happens before the context begins
    for _ in range(2):  # and it can be used again
        with straight:
            assert schedule(4, 36) == [1, 0.75, 0.5, 0.25, 0]  # the name that this file imported, too
        assert schedule(4, 36) == right
    with pytest.raises(ZeroDivisionError), straight:
        raise ZeroDivisionError
    assert schedule(4, 36) == right


@pytest.mark.parametrize("piece", ["no such words", "steps"])
def test_the_piece_must_be_there_once(piece):
    with pytest.raises(ValueError, match="schedule must have"):
        mistakes.line(schedule, piece, "t")


def test_a_readers_own_words_give_way_to_the_books():
    """A workbook's hole, filled in other words: the book's function with the mistake, and the reader's afterwards."""

    def shift_time(t, shift):
        odds = shift * t
        return odds / (odds + 1 - t)

    with pytest.raises(ValueError, match="shift_time must have"):
        mistakes.line(shift_time, "1 - t + shift * t", "1")  # a function of one's own, which no chapter asks for
    shift_time.__module__ = "__main__"  # as in a notebook
    shift_time.__qualname__ = "shift_time"
    assert shift_time(0.5, 3) == 0.75
    with mistakes.line(shift_time, "1 - t + shift * t", "1"):
        assert shift_time(0.5, 3) == 1.5
    assert shift_time(0.5, 3) == 0.75


def test_compare(capsys):
    scenes = [sample(seed) for seed in range(3)]
    told = [(scene, captions(scene)[-1]) for scene in scenes]
    world = {"dark": False}

    def pictures():
        return [draw(s).point(lambda v: v // 4) if world["dark"] else draw(s) for s in scenes]

    wrong = {"lights off": patch.dict(world, dark=True), "nothing": patch.dict(world)}
    effects = mistakes.compare(pictures, told, wrong, {"light": lambda: not world["dark"]})
    right = effects["right"]
    assert right == effects["nothing"] == (0, right.attributes, right.attributes, []) and right.asked == 1
    assert effects["lights off"].levels > 50 and effects["lights off"].asked < 1
    assert effects["lights off"].caught == ["light"]
    said = capsys.readouterr().out
    assert said.endswith("lights off: caught by light\nnothing: caught by no check of this chapter\n")
    with pytest.raises(ValueError, match="tells nothing: always"):
        mistakes.compare(pictures, told, {}, {"always": lambda: False})
