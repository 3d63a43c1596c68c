"""What the bundled models say of requests that they never learned."""

import random

import pytest

from kleinlite.nano.limits import DRAWS, HARMLESS, LIMITS, THINGS, describe_limits, split_words
from kleinlite.scenes import captions, sample
from recipe.edits import no_op_instruction, sample_edit
from recipe.scene_lessons import sample_one, sample_row
from recipe.shapes import WORLD

GRAMMAR = {text for seed in range(500) for text in (
    *captions(sample(seed)), *captions(sample_one(seed)), *captions(sample_row(seed)), sample_edit(seed)[1],
)}  # fmt: skip
RNG = random.Random(0)
GRAMMAR |= {no_op_instruction(RNG, sample(seed)) for seed in range(300)}
REWORDED = {WORLD.reword(RNG, text) for text in sorted(GRAMMAR) for _ in range(3)}


def limits(prompt: str, width: int = 96, height: int = 96, model: str = "nano") -> str:
    return describe_limits(model, 96, prompt, width, height)


def test_nothing_is_said_of_what_nano_learned():
    assert {text for text in GRAMMAR if limits(text)} == set()
    assert {text for text in REWORDED if limits(text)} == set()
    assert (
        limits("a\u200bred\u00a0cir\u00adcle")
        == limits("")
        == limits("Red CIRCLE!!!")
        == limits("It's a house in the colour red")
        == ""
    )


def test_every_word_is_said_by_the_grammar():
    words = LIMITS["nano"].words
    assert {word for text in GRAMMAR | REWORDED for word in split_words(text)} == words - HARMLESS
    assert words > LIMITS["nano"].things | {word for pair in LIMITS["nano"].never for word in pair.split()}


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ("a cat", '"cat"'),
        ("a cat on a cat, and a Dog", '"cat", "dog"'),
        ("ein roter Stern auf blauem Grund", '"ein", "roter", "stern", 3 more words'),
        ("a pink heart on a black background", '"black background"'),
        ("a red star and a blue star and a green star and a house", "more than 3 things"),
    ],
)
def test_what_is_unknown_is_named(prompt, told):
    assert limits(prompt) == f"nano never learned {told}: it draws {DRAWS}."


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ("a red cirle", '"cirle": did you mean "circle"?'),
        ("a tre", '"tre": did you mean "tree"?'),
        ("a Hose", '"hose": did you mean "house"?'),
        ("a cat and a yelow sun", '"cat", "yelow": did you mean "yellow"?'),
        ("a $home", f'"$home": it draws {DRAWS}.'),
        ("a car", f'"car": it draws {DRAWS}.'),  # no star
        ("a horse", f'"horse": it draws {DRAWS}.'),  # no house
    ],
)
def test_a_typo_is_guessed(prompt, told):
    assert limits(prompt) == f"nano never learned {told}"


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ("a dragon with five noses", '"dragon", "five", "noses"'),
        ("a cat", '"cat"'),  # which has ears that it knows:
        ("a red critter with cat ears and a bunny", '"bunny"'),
        ("a black critter on a yellow backdrop", '"black critter", "yellow backdrop"'),
        ("a red critter and a blue pot", "two in one picture"),
    ],
)
def test_critters_name_what_they_do_not_know(prompt, told):
    assert limits(prompt, model="critters") == f"critters never learned {told}: it draws {LIMITS['critters'].draws}."


def test_other_sizes():
    assert limits("a red star", 128, 96) == f"nano never learned another size than 96×96: it draws {DRAWS}."
    assert '"cat", another size' in limits("a cat", 96, 112, model="nano-base")


def test_other_models_are_left_alone():
    assert limits("a cat", 512, 512, model="4b") == limits("a cat", model="/home/me/my-nano") == ""


def test_what_it_draws_names_every_thing():
    assert all(f"{thing}s" in DRAWS for thing in THINGS)
