"""Lessons hold nothing that is held out, and are what they say."""

import random

import mlx.core as mx
from small_nano import small_world  # noqa: F401, a fixture

from kleinlite.scenes import held_out, scene_held_out
from recipe.curriculum import SEGMENTS
from recipe.edits import edit_held_out, instruction
from recipe.scene_lessons import make_lessons
from recipe.shapes import WORLD
from recipe.world import EDIT_GUIDANCE, GUIDANCE


def test_nothing_held_out_is_in_the_lessons():
    lessons = make_lessons(pictures=300, edits=300, families=6)
    assert not any(map(scene_held_out, lessons.scenes))
    assert not any(held_out(text) for lesson in lessons.pictures for text in lesson.texts if text)
    for lesson in (*lessons.edits, *lessons.two_reference_edits, *lessons.add_edits):
        assert not edit_held_out(lessons.scenes[lesson.references[0]], lesson.texts[0])
    assert any(thing.kind == "boat" for scene in lessons.scenes for thing in scene.things)


def test_edit_pairs_are_two_edits_of_one_scene_one_for_each_thing():
    lessons = make_lessons(pictures=10, edits=10, families=6)
    assert lessons.edit_pairs and lessons.add_edits
    for both in lessons.edit_pairs:
        for thing, edits in zip((1, 0), both):  # the first list changes the first thing and keeps the second
            for lesson in edits:
                before, after = lessons.scenes[lesson.references[0]], lessons.scenes[lesson.target]
                assert instruction(before, after) == lesson.texts[0] and before.things[thing] in after.things


def test_a_batch_is_of_the_kind_that_its_step_says(world):
    data = world[-1]
    for step, kind in enumerate(WORLD.turns):
        clean, references, ids, mask, _ = data(step)
        assert references.shape[1] == {"pictures": 0, "two_reference_edits": 72}.get(kind, 36)
        assert len(ids) == len(clean)
        if kind == "no_op_edits":
            assert mx.array_equal(clean, references)
    assert {data.student_batch(step)[-1] for step in range(7)} == set(SEGMENTS) == {0, 1, 2, 3}


def test_a_landscape_is_guided_once_its_layout_stands(world):
    """Guided from the first step on, the student draws second houses."""
    data = world[-1]
    seen = set()
    for step in range(40):
        *_, guidance, segment = data.student_batch(step)
        for lesson, given in zip(data.choose(step, random.Random(step)), guidance.tolist()):
            landscape = data.lessons.scenes[lesson.target].is_landscape
            pictures = data.kind(step) == "pictures"
            assert given == (EDIT_GUIDANCE if not pictures else 1.0 if landscape and segment < 2 else GUIDANCE)
            seen.add((pictures, landscape, segment < 2))
    assert len(seen) == 8, "all cases"
