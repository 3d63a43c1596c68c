"""The exam of the small world: balanced, kept back, and with a floor that is known."""

from collections import Counter
from dataclasses import replace

import mlx.core as mx
import pytest

from kleinlite.book import world
from kleinlite.scenes import held_out


def shapes(scenes):
    return Counter((thing.kind, thing.color) for scene in scenes for thing in scene.things)


def test_the_exam_has_every_shape_equally_often_and_its_pairs_are_kept_back():
    exam = world.make_exam(24)
    every = {(kind, color) for kind in world.KINDS for color in world.COLORS}
    assert shapes(exam.scenes[:16]) == dict.fromkeys(every, 1)
    assert shapes(exam.scenes[16:]) == dict.fromkeys(every, 2)
    assert Counter(scene.things[0].place for scene in exam.scenes[16:]) == {"top": 8, "left": 8}
    assert exam.sentences[16:] == list(world.PAIRS) and all(map(held_out, world.PAIRS))
    assert exam.labels[:16].tolist() == list(range(16))


@pytest.mark.parametrize("size", [24, 48])
def test_the_judge_finds_drawings_right_and_a_quarter_of_a_blank_sheet(size):
    exam = world.make_exam(size)
    assert world.count_right(list(exam.pictures), exam.scenes) == (48, 48)
    paper = mx.broadcast_to(exam.pictures[0, 0, 0], (size, size, 3))
    assert world.count_right([paper] * 16, exam.scenes[:16]) == (4, 4)
    assert world.count_right([paper] * 16, exam.scenes[16:]) == (8, 8)


@pytest.mark.parametrize("name", ["kind", "color"])
def test_kinds_and_colors_are_counted_apart(name):
    exam = world.make_exam(24)
    same = {"kind": "circle", "color": "red"}[name]
    scenes = [replace(s, things=tuple(replace(thing, **{name: same}) for thing in s.things)) for s in exam.scenes]
    right = world.count_right(list(world.drawings(scenes, 24)), exam.scenes)
    assert right == {"kind": (12, 48), "color": (48, 12)}[name]


def test_worlds_to_learn_from_and_to_test_with_share_no_scene():
    learned, kept = (world.make_world(40, back, 24) for back in (False, True))
    assert not {*learned.sentences} & {*kept.sentences, *world.PAIRS}
    learned, kept = (world.make_world(40, back, 24, alone=True) for back in (False, True))
    assert {len(scene.things) for scene in learned.scenes + kept.scenes} == {1}
    assert not {scene.jitter for scene in learned.scenes} & {scene.jitter for scene in kept.scenes}
