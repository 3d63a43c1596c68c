"""The second judge: it is right about drawings, sees a dent, and does not cut anything out."""

import numpy as np
import pytest
from PIL import Image, ImageDraw

from kleinlite.scenes import Scene, Thing, draw
from recipe.second_judge import covered, dents

CIRCLE = Thing("circle", "red", "center")
PAIR = (Thing("circle", "red", "top"), Thing("square", "blue", "bottom"))


@pytest.mark.parametrize("jitter", range(4))
def test_a_drawn_circle_is_round(jitter):
    assert dents(draw(Scene((CIRCLE,), background="blue", jitter=jitter)), [CIRCLE]) < 0.005
    assert dents(draw(Scene(PAIR, background="white", jitter=jitter)), PAIR) < 0.008


def test_an_ellipse_has_the_dents_that_its_axes_say():
    """Radii 20 and 22 pixels: r ≈ 21 + cos 2φ, so the deviation is 1/√2 of 21."""
    picture = Image.new("RGB", (384, 384), (243, 242, 238))
    ImageDraw.Draw(picture).ellipse((4 * 26, 4 * 28, 4 * 70, 4 * 68), fill=(214, 48, 49))
    assert dents(picture.resize((96, 96), Image.Resampling.BOX), [CIRCLE]) == pytest.approx(0.0337, abs=0.002)


def test_a_dent_is_seen_and_shadows_are_not():
    picture = draw(Scene((CIRCLE,), background="blue", jitter=None))
    ImageDraw.Draw(picture).ellipse((68, 40, 84, 56), fill=picture.getpixel((2, 2)))
    assert dents(picture, [CIRCLE]) > 0.03
    cover = covered(draw(Scene((CIRCLE,), background="blue", jitter=None)), [CIRCLE])[0]
    assert cover[70:80, 70:80].max() < 0.05, "the shadow is none of the circle"


def test_what_each_pixel_is_made_of():
    cover = covered(draw(Scene(PAIR, background="white", jitter=None)), PAIR)
    assert cover.shape == (2, 96, 96) and cover.min() >= 0 and cover.max() <= 1
    assert cover[0, 26, 48] > 0.95 and cover[1, 26, 48] < 0.05 and cover[1, 70, 48] > 0.95
    assert np.abs(cover[:, 2, 2]).max() < 0.02
