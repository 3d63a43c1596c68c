"""What is picked to be labeled by eye, and the labels that chapter 13 reads."""

import json
from pathlib import Path

from kleinlite.nano.evaluate import held_out_captions
from recipe.judge_labels import DRAWN, FIRST, choose

STORED = json.loads((Path(__file__).parents[2] / "notebooks" / "judge-labels.json").read_text("utf-8"))


def test_few_refused_ones_are_all_taken_and_many_are_drawn_from():
    few = [i % 20 != 0 for i in range(900)]
    chosen = choose(few)
    assert {i for i in chosen if not few[i]} == set(range(0, 900, 20))
    assert len(chosen) == len(set(chosen)) == 45 + 100
    assert sum(few[i] for i in chosen[:45]) > 20  # shuffled: the order does not tell the verdict
    assert chosen == choose(few)
    many = [i % 3 != 0 for i in range(900)]
    assert sum(not many[i] for i in choose(many)) == 50


def test_each_stored_label_has_its_caption_and_an_answer():
    cases = held_out_captions(DRAWN, FIRST)
    pictures = STORED["pictures"]
    assert STORED["drawn"] == DRAWN and STORED["labeled_by"]
    assert all(cases[p["seed"]][1] == p["caption"] for p in pictures)
    assert {type(p["right"]) for p in pictures} == {bool} == {type(p["sure"]) for p in pictures}
    assert sum(not p["accepted"] for p in pictures) == STORED["drawn"] - STORED["accepted"]  # all that are refused
