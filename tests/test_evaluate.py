"""The judge sees what is drawn, and says no to what is not."""

from dataclasses import replace

import mlx.core as mx
import pytest

from kleinlite.evaluate import asked, held_out_captions, judge, shown, tally
from kleinlite.pipeline import to_images
from kleinlite.scenes import Scene, Thing, captions, draw, sample
from kleinlite.training import pictures

SCENES = [sample(seed) for seed in range(30_000_000, 30_000_080)]


def score(images, scenes=SCENES):
    results = [shown(judge(image), scene, asked(scene, captions(scene)[-1])) for image, scene in zip(images, scenes)]
    return tally(results)


def test_clean_drawings_are_read_right():
    by_kind, attributes, whole = score([draw(scene) for scene in SCENES])
    assert attributes >= 0.99 and whole >= 0.97, by_kind


def test_noise_does_not_disturb():
    x = pictures(range(30_000_000, 30_000_080), 96)
    noisy = to_images(x + 0.08 * mx.random.normal(x.shape, key=mx.random.key(0)))
    assert score(noisy)[1] >= 0.98


def test_the_wrong_pictures_are_told():
    """Pictures of other scenes of the same family must not pass."""
    shapes = [s for s in SCENES if not s.is_landscape and len(s.things) == 2]
    others = shapes[1:] + shapes[:1]
    _, attributes, whole = score([draw(s) for s in others], shapes)
    assert attributes < 0.6 and whole == 0


PAIR = Scene((Thing("circle", "red", "top"), Thing("square", "blue", "bottom")), background="white", jitter=4)
LAND = Scene((Thing("house", "red", "left"),), sky="day", ground="hills", sun_side="right", jitter=4)
CHANGES = {
    "kind 0": (PAIR, replace(PAIR, things=(replace(PAIR.things[0], kind="diamond"), PAIR.things[1]))),
    "colour 1": (PAIR, replace(PAIR, things=(PAIR.things[0], replace(PAIR.things[1], colour="green")))),
    "background": (PAIR, replace(PAIR, background="pink")),
    "number": (PAIR, replace(PAIR, things=PAIR.things[:1])),
    "sky": (LAND, replace(LAND, sky="night")),
    "ground": (LAND, replace(LAND, ground="snow")),
    "sun side": (LAND, replace(LAND, sun_side="left")),
}


@pytest.mark.parametrize("attribute", CHANGES)
def test_one_wrong_attribute_is_seen(attribute):
    scene, other = CHANGES[attribute]
    want = asked(scene, captions(scene)[-1])
    assert all(shown(judge(draw(scene)), scene, want).values())
    assert not shown(judge(draw(other)), scene, want)[attribute]


def test_upside_down_is_wrong():
    turned = replace(PAIR, things=(replace(PAIR.things[1], place="top"), replace(PAIR.things[0], place="bottom")))
    result = shown(judge(draw(turned)), PAIR, asked(PAIR, captions(PAIR)[0]))
    assert not all(result[f"place {i}"] for i in range(2)) or not all(result[f"kind {i}"] for i in range(2))


def test_only_what_the_caption_says_is_asked():
    assert asked(PAIR, "a red circle above a blue square").keys() == {
        "family", "kind 0", "colour 0", "place 0", "kind 1", "colour 1", "place 1"
    }  # fmt: skip
    assert asked(LAND, "a house").keys() == {"family", "kind 0"}
    assert asked(LAND, "a red house under a yellow sun").keys() == {"family", "kind 0", "colour 0", "sky"}
    full = asked(LAND, captions(LAND)[-1])
    assert full["sun side"] == "right" and full["ground"] == "hills" and full["sky"] == "day"


def test_captions_are_held_out_and_always_the_same():
    first = held_out_captions(20)
    assert first == held_out_captions(20) and len({c for _, c in first}) == 20
