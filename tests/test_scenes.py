"""The drawn world: the same for the same seed, captions that are true, edits that change only what they name."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import ImageChops

from kleinlite.scenes import (
    COLORS,
    Scene,
    Thing,
    captions,
    draw,
    held_out,
    sample,
)
from recipe.edits import instruction, relatives, sample_edit
from recipe.scene_lessons import sample_one, sample_row

SEEDS = range(400)


def changed_share(a, b):
    """Share of pixels that differ visibly between two pictures."""
    difference = ImageChops.difference(a, b).convert("L")
    return sum(value > 24 for value in difference.tobytes()) / (a.width * a.height)


def test_a_seed_is_a_scene():
    assert [sample(s) for s in SEEDS] == [sample(s) for s in SEEDS]
    assert draw(sample(3)).tobytes() == draw(sample(3)).tobytes()
    assert len({sample(s) for s in SEEDS}) > 390


def test_captions_name_what_the_scene_holds():
    for seed in SEEDS:
        scene = sample(seed)
        full = captions(scene)[-1]
        assert len(set(captions(scene))) == len(captions(scene))
        assert all(f"{t.color} {t.kind}" in full for t in scene.things)
        assert "a orange" not in " ".join(captions(scene))


def test_relations_are_the_way_round_they_are_drawn():
    pair = (Thing("circle", "red", "top"), Thing("square", "blue", "bottom"))
    assert captions(Scene(pair, background="white"))[0] == "a red circle above a blue square"
    picture = draw(Scene(pair, background="white", jitter=5))
    r, _, b = picture.getpixel((48, 26))
    assert r > 150 > b, "the red circle is in the upper half"
    r, _, b = picture.getpixel((48, 70))
    assert b > 150 > r, "the blue square is in the lower half"


@pytest.mark.parametrize("color", COLORS)
def test_colors_are_what_they_are_called(color):
    picture = draw(Scene((Thing("square", color, "center"),), background="white"))
    assert picture.getpixel((48, 48)) == COLORS[color]


def test_held_out_captions_are_a_fixed_tenth():
    known = {c for seed in range(3000) for c in captions(sample(seed))}
    share = sum(map(held_out, known)) / len(known)
    assert 0.08 < share < 0.12
    assert held_out("a green tree on white snow") and held_out("a blue square above a red circle")  # on every machine
    assert not held_out("a red circle above a blue square") and not held_out("a yellow sun over a blue sea")


def test_nothing_is_white_on_white():
    scenes = [sample(s) for s in range(3000)] + [s for seed in range(3000) for s in (sample_edit(seed)[2],)]
    assert not any(s.background == "white" and any(t.color == "white" for t in s.things) for s in scenes)


def test_edits_change_what_they_name_and_keep_the_rest():
    kinds = set()
    for seed in SEEDS:
        references, text, target = sample_edit(seed)
        kinds.add(text.split()[0])
        assert target != references[0]
        assert target.jitter == references[0].jitter
        if text.startswith("make the background"):
            assert replace(target, background=references[0].background) == references[0]
        if text.startswith("remove"):
            assert set(target.things) < set(references[0].things)
        if text == "put both together":
            assert set(target.things) == {t for r in references for t in r.things} and len(references) == 2
    assert kinds == {"make", "change", "turn", "remove", "add", "put"}


def test_an_instruction_names_one_change_or_none():
    circle, square, tree = (
        Thing("circle", "red", "top"),
        Thing("square", "blue", "bottom"),
        Thing("tree", "pink", "left"),
    )
    flat = Scene((circle, square), background="white", jitter=9)
    land = Scene((tree,), sky="day", ground="snow", sun_side="left", jitter=9)

    def things(*things):
        return replace(flat, things=things)

    said = {
        "remove the circle": (flat, things(square)),
        "add a red circle": (things(square), flat),
        "make the square orange": (flat, things(circle, replace(square, color="orange"))),
        "turn the circle into a star": (flat, things(replace(circle, kind="star"), square)),
        "turn the tree into a red house": (land, replace(land, things=(Thing("house", "red", "left"),))),
        "make the background pink": (flat, replace(flat, background="pink")),
        "make it night": (land, replace(land, sky="night")),
        "change the ground to green hills": (land, replace(land, ground="hills")),
    }
    for text, (before, after) in said.items():
        assert instruction(before, after) == text
    other = things(Thing("star", "green", "top"), square)
    for after in (flat, other, replace(flat, jitter=8), replace(things(square), background="pink"), things()):
        assert instruction(flat, after) is None


def test_relatives_share_everything_but_their_things():
    for seed in range(200):
        scenes = relatives(seed)
        first = scenes[0]
        assert len(first.things) == 2 and len(set(scenes)) == len(scenes) in (8, 24)
        assert all(replace(scene, things=first.things) == first for scene in scenes)
        assert all(len({t.kind for t in scene.things}) == len(scene.things) > 0 for scene in scenes)
        asked = [[instruction(scene, other) for other in scenes] for scene in scenes]
        assert all(sum(text is not None for text in row) >= 2 for row in asked)
        for row in asked:  # one picture, one sentence: one answer
            assert len(set(row) - {None}) == sum(text is not None for text in row)


def test_recoloring_one_thing_leaves_most_pixels_alone():
    before = Scene((Thing("circle", "red", "top"), Thing("square", "blue", "bottom")), background="white", jitter=9)
    after = replace(before, things=(replace(before.things[0], color="green"), before.things[1]))
    share = changed_share(draw(before), draw(after))
    assert 0.05 < share < 0.2


SAMPLERS = {"sample": sample, "sample_one": sample_one, "sample_row": sample_row}
STORED = json.loads((Path(__file__).parent / "goldens" / "scenes.json").read_text("utf-8"))


@pytest.mark.parametrize("name", STORED)
def test_the_drawings_are_those_that_nano_learned_from(name):
    """The mean color of each of 6 × 6 places, up to what another Pillow rounds."""
    kind, seed = name.split()
    drawn = np.asarray(draw(SAMPLERS[kind](int(seed)), 48), float)
    places = drawn.reshape(6, 8, 6, 8, 3).mean(axis=(1, 3)).reshape(-1)
    assert np.abs(places - STORED[name]).max() < 2
