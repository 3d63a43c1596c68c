"""The strict look at shapes: right where they are right, and not to be pleased by what is nearly one."""

import math
from dataclasses import replace

import mlx.core as mx
import pytest
from PIL import Image, ImageChops, ImageDraw, ImageFilter

from kleinlite.nano.evaluate import detected, judge, requested
from kleinlite.nano.shapes import cut_out, find_shapes, overlaps, ripple
from kleinlite.scenes import COLORS, SHAPES, Scene, Thing, captions, draw
from recipe.one_shape import one_shape, one_shape_cases, summary

STAR = Thing("star", "red", "center")
BLUE = (184, 212, 244)


def painted(corners, color="red", size=96) -> Image.Image:
    """A polygon, corners in fractions of the side, on pale blue."""
    image = Image.new("RGB", (3 * size, 3 * size), BLUE)
    ImageDraw.Draw(image).polygon([(3 * size * x, 3 * size * y) for x, y in corners], fill=COLORS[color])
    return image.resize((size, size), Image.Resampling.BOX)


def test_drawn_shapes_pass():
    got = summary([one_shape(draw(scene), scene.things[0]) for scene, _ in one_shape_cases()[::3]])
    assert got["right"] == got["count"] == 28
    assert got["iou"] > 0.96 and got["worst"] > 0.92 and got["ripple"] < 0.1


@pytest.mark.parametrize("kind", SHAPES)
def test_place_and_size_do_not_matter(kind):
    large = draw(Scene((Thing(kind, "purple", "center"),), background="white"))
    for side, corner in ((96, (0, 0)), (60, (30, 8)), (44, (2, 50))):
        canvas = Image.new("RGB", (96, 96), large.getpixel((0, 0)))
        canvas.paste(large.resize((side, side), Image.Resampling.LANCZOS), corner)
        (found,) = find_shapes(canvas)
        ((_, mask),) = cut_out(canvas)
        assert (found.kind, found.color) == (kind, "purple") and overlaps(mask)[kind] > 0.88


def test_a_crown_is_no_star_and_a_rounded_square_no_circle():
    crown = [(0.2, 0.75), (0.2, 0.3), (0.35, 0.5), (0.5, 0.25), (0.65, 0.5), (0.8, 0.3), (0.8, 0.75)]
    assert not one_shape(painted(crown), STAR)[0]

    def power(v):
        return math.copysign(abs(v) ** 0.4, v)  # a superellipse of exponent 5

    turns = [2 * math.pi * i / 80 for i in range(80)]
    rounded = painted([(0.5 + 0.3 * power(math.cos(a)), 0.5 + 0.3 * power(math.sin(a))) for a in turns])
    right, overlap, _ = one_shape(rounded, Thing("circle", "red", "center"))
    assert not right and overlap < 0.9
    assert one_shape(painted([(0.2, 0.2), (0.8, 0.2), (0.8, 0.8), (0.2, 0.8)]), Thing("square", "red", "center"))[0]


def test_another_color_is_wrong_and_nothing_is_nothing():
    assert not one_shape(draw(Scene((replace(STAR, color="blue"),), background="white")), STAR)[0]
    assert one_shape(Image.new("RGB", (96, 96), BLUE), STAR)[:2] == (False, 0.0)


def test_ripple_is_counted_in_levels():
    scene = Scene((STAR,), background="green")
    waves = 3 * mx.sin(mx.arange(96) * 0.9)[None, :, None] * mx.ones((96, 96, 3))
    noise = Image.frombytes("RGB", (96, 96), bytes(memoryview(mx.round(waves + 10).astype(mx.uint8))))
    rippled = ImageChops.subtract(ImageChops.add(draw(scene), noise), Image.new("RGB", (96, 96), (10, 10, 10)))
    assert ripple(draw(scene)) == 0
    assert ripple(rippled) == pytest.approx(3 / 2**0.5, rel=0.1)


def test_soft_pictures_are_still_read():
    """What an autoencoder does to a drawing, roughly."""
    for scene, _ in one_shape_cases()[::7]:
        assert one_shape(draw(scene).filter(ImageFilter.GaussianBlur(0.8)), scene.things[0])[0]


PAIR = Scene((Thing("star", "red", "left"), Thing("circle", "blue", "right")), background="white", jitter=4)
HOUSE = Scene((Thing("house", "red", "left"),), sky="day", ground="snow", sun_side="right", jitter=4)


def wrong(image: Image.Image, scene: Scene) -> set[str]:
    right = detected(judge(image), scene, requested(scene, captions(scene)[-1]))
    return {name for name, ok in right.items() if not ok}


def test_a_second_house_is_told():
    one = draw(HOUSE)
    assert not wrong(one, HOUSE)
    for left in (40, 54):
        two = one.copy()
        two.paste(one.crop((10, 40, 44, 90)), (left, 40))
        assert "number" in wrong(two, HOUSE)


def test_a_third_shape_is_told():
    three = draw(PAIR)
    ImageDraw.Draw(three).rectangle((40, 8, 52, 20), fill=COLORS["green"])
    assert not wrong(draw(PAIR), PAIR) and "number" in wrong(three, PAIR)


def test_shapes_are_read_where_they_stand():
    moved = ImageChops.offset(draw(PAIR), 0, 20)
    assert not wrong(moved, PAIR)
    assert {"place 0", "place 1"} <= wrong(ImageChops.offset(draw(PAIR), 48, 0), PAIR)
