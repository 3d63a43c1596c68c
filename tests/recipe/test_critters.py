"""The second world: captions are exact, held-out pairs never meet, edits change one part, and the judge tells parts."""

import itertools
import json
import random
from dataclasses import replace

import numpy as np
import pytest
from PIL import ImageFilter

from kleinlite.nano.limits import CRITTERS, LIMITS, describe_limits, split_words
from kleinlite.scenes import held_out
from recipe import critters, evaluate
from recipe.critters import PARTS, TOGETHER, WORLD, Being, describe, pairs_apart, requested, sample

BEINGS = [sample(seed) for seed in range(400)]


def test_a_caption_names_just_what_it_says():
    rng = random.Random(0)
    for being in BEINGS:
        named = [key for key in being.parts if rng.random() < 0.5]
        assert requested(being, describe(being, named, moods=rng.random() < 0.5)) == named
        assert requested(being, WORLD.captions(being)[0]) == list(being.parts)


def test_the_words_of_captions_stay_what_they_were():
    being = Being("critter", "yellow", "purple", "round", "pointy ears", "a wink", "says oh")
    said = "a round yellow critter with pointy ears and a wink that says oh on a purple background"
    assert describe(being, being.parts) == said
    assert describe(being, ("eyes", "top"), moods=True) == "a winking critter with pointy ears"
    pot = Being("pot", "orange", "blue", "wide", "cactus", "closed eyes", "frowns")
    assert (
        describe(pot, pot.parts) == "a wide orange pot with a cactus and closed eyes that frowns on a blue background"
    )
    assert describe(replace(being, eyes="one eye"), ("eyes",), moods=True) == "a one-eyed critter"


def test_the_package_knows_all_words_and_no_others():
    """The list beside the weights is the grammar's, and nothing is said of captions, instructions and rewordings."""
    assert json.loads(CRITTERS.read_text("utf-8")) == critters.say_limits()
    rng = random.Random(0)
    said = {text for seed in range(600) for text in WORLD.sentences(seed)}
    said |= {WORLD.no_op_instruction(rng, being) for being in BEINGS}
    said |= {WORLD.reword(rng, text) for text in sorted(said) for _ in range(12)}
    assert {text for text in said if describe_limits("critters", 96, text, 96, 96)} == set()
    words = {word for text in said for word in split_words(text)}
    assert words == {word for known in LIMITS["critters"].words for word in known.split()}
    assert words > {word for text in TOGETHER for word in text.split()}


def test_two_parts_that_never_meet_are_in_no_lesson():
    lessons = WORLD.lessons(replace(WORLD.config, pictures=300, edits=100, families=30))
    assert not any(map(pairs_apart, lessons.scenes))
    assert not any(held_out(text) for lesson in lessons.pictures for text in lesson.texts if text)
    share = sum(map(bool, map(pairs_apart, (sample(seed) for seed in range(4000))))) / 4000
    assert 0.08 < share < 0.12, "a tenth of all scenes"


def test_each_edit_changes_one_part_and_says_which():
    for seed in range(200):
        (before,), text, after = WORLD.sample_edit(seed)
        assert critters.one_change(before, after) == text
    lessons = WORLD.lessons(replace(WORLD.config, pictures=10, edits=10, families=20))
    scenes = lessons.scenes
    for one, other in lessons.edit_pairs:
        (first,), (second,) = one, other
        assert first.references == second.references and first.target != second.target
        for lesson in (first, second):
            assert critters.one_change(scenes[lesson.references[0]], scenes[lesson.target]) == lesson.texts[0]


def test_an_idle_instruction_asks_for_nothing_that_could_change():
    rng = random.Random(3)
    for being in BEINGS:
        text = critters.idle_instruction(rng, being)
        for key in being.parts:
            for value in being.parts[key]:
                if value != getattr(being, key):
                    assert text != critters.instruction(being, key, value)


@pytest.mark.parametrize("apart", [False, True])
def test_cases_were_never_trained_on_and_the_test_set_shares_none(apart):
    development = WORLD.cases(60, apart=apart)
    test = WORLD.cases(60, test=True, apart=apart)
    assert not {text for _, text in development} & {text for _, text in test}
    for scene, text in (*development, *test):
        assert held_out(text) and bool(pairs_apart(scene)) == apart
        assert not apart or any({*pair} <= {*requested(scene, text)} for pair in pairs_apart(scene))
    for edit in WORLD.edit_cases(20, test=True):
        assert WORLD.edit_held_out(edit.references[0], edit.text)
    assert not {*WORLD.edit_cases(20)} & {*WORLD.edit_cases(20, test=True)}


def test_the_judge_finds_every_part_of_a_drawing_even_a_soft_one():
    critter, pot = (next(being for being in BEINGS if being.kind == kind) for kind in PARTS)
    for being in (critter, pot):
        picture = WORLD.draw(being).filter(ImageFilter.GaussianBlur(1))
        for caption in WORLD.captions(being)[1:3]:
            assert all(WORLD.examine(picture, being, caption).values()), caption


def test_the_judge_names_the_part_that_is_wrong_and_no_other():
    being = BEINGS[0]
    for key in ("mouth", "color"):
        wrong = replace(being, **{key: next(v for v in being.parts[key] if v != getattr(being, key))})
        seen = WORLD.examine(WORLD.draw(wrong), being, describe(being, being.parts))
        assert [name for name, ok in seen.items() if not ok] == [key]
        made, kept = WORLD.examine_edit(WORLD.draw(wrong), being, wrong)
        assert made == {key: True} and all(kept.values())


def test_the_judge_tells_a_critter_from_a_pot():
    being = next(being for being in BEINGS if being.kind == "pot")
    other = Being("critter", being.color, being.back, being.body, "a leaf", being.eyes, being.mouth)
    assert not WORLD.examine(WORLD.draw(other), being, "a pot")["kind"]
    assert WORLD.examine(WORLD.draw(other), other, "a critter")["kind"]


def test_every_part_has_a_drawing_of_its_own():
    for kind, parts in PARTS.items():
        first = Being(kind, **{key: next(iter(values)) for key, values in parts.items()})
        for key, values in parts.items():
            drawings = [np.asarray(WORLD.draw(replace(first, **{key: value})), np.float32) for value in values]
            apart = [np.abs(a - b).mean() for a, b in itertools.combinations(drawings, 2)]
            assert min(apart) > 0.3, (kind, key)


def test_the_report_in_other_words_and_plainly(capsys):
    """The card's commands, of two captions and two edits."""
    evaluate.main(["--world", "critters", "--model", "critters", "--test", "--reworded", "--plain", "--count", "2"])
    evaluate.main(["--world", "critters", "--model", "critters", "--test", "--edits", "--count", "2"])
    said = capsys.readouterr().out
    assert "critters, 2 held-out captions in other words" in said and "everything right: " in said
    assert "critters, 2 held-out edits" in said and " of 1\n" in said


@pytest.mark.parametrize(
    "said, plain",
    [
        ("Azure pot with SPROUT", "an azure pot with sprout"),
        ("red critter.", "a red critter."),
        ("Draw a critter", "draw a critter"),
        ("A Pot", "a pot"),
        ("One-eyed pot", "a one-eyed pot"),
    ],
)
def test_plain_words(said, plain):
    assert evaluate.plainly(said) == plain
