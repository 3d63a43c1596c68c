"""Redraw: what nano drew is measured, drawn as the nearest scene, and only then a lesson."""

import itertools
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image, ImageDraw

from kleinlite.errors import UserError
from kleinlite.klein import Klein
from kleinlite.nano.evaluate import requested
from kleinlite.sampling import schedule
from kleinlite.scenes import (
    SHAPES,
    Scene,
    Spot,
    Thing,
    draw,
    draw_shapes,
    held_out,
    scene_held_out,
    shape_spots,
)
from kleinlite.training import Batch, encode_batch
from recipe import redraw
from recipe.training import stay_loss

STAR = Scene((Thing("star", "blue", "left"),), background="yellow", jitter=3)
PAIR = Scene((Thing("circle", "red", "top"), Thing("square", "blue", "bottom")), background="white", jitter=1)


@pytest.mark.parametrize("kind", SHAPES)
def test_the_ruler_finds_middle_and_radius(kind):
    """To a third of a pixel, wherever the shape stands and however large it is."""
    for jitter, place in itertools.product(range(4), ("center", "left")):
        scene = Scene((Thing(kind, "blue", place),), background="yellow", jitter=jitter)
        seen, spots = redraw.nearest_scene(draw(scene))
        assert replace(seen, jitter=jitter) == scene
        assert 96 * max(abs(a - b) for a, b in zip(spots[0], shape_spots(scene)[0])) < 0.35


def test_a_dented_picture_is_drawn_again_as_it_was_meant():
    clean = draw(PAIR)
    dented = clean.copy()
    ImageDraw.Draw(dented).ellipse((54, 12, 60, 20), fill=clean.getpixel((2, 2)))
    seen, spots = redraw.accepted(dented, PAIR, "a red circle above a blue square")
    assert seen.things == PAIR.things
    again = draw_shapes(seen, spots)
    assert redraw.difference(again, clean) < redraw.difference(dented, clean)
    assert max(abs(a - b) for a, b in zip(spots[1], shape_spots(PAIR)[1])) * 96 < 0.35


@pytest.mark.parametrize(
    ("picture", "caption", "why"),
    [
        (draw(PAIR), "a red circle", "two things, one was asked"),
        (draw(STAR), "a blue heart on a yellow background", "another kind"),
        (draw(STAR), "a red star on a yellow background", "another color"),
        (draw(STAR), "a blue star on a green background", "another ground"),
        (Image.new("RGB", (96, 96), (250, 238, 180)), "a blue star", "nothing"),
        (Image.effect_noise((96, 96), 90).convert("RGB"), "a blue star", "noise"),
    ],
)
def test_what_is_not_what_was_asked_teaches_nothing(picture, caption, why):
    kind, color = caption.split()[2], caption.split()[1]
    paper = caption.split()[5] if "background" in caption else "yellow"
    asked = Scene((Thing(kind, color, "left"),), background=paper)
    assert redraw.accepted(picture, asked, caption) is None, why


def test_what_lies_too_far_from_any_drawing_teaches_nothing():
    noisy = np.asarray(draw(STAR), dtype=float) + np.random.default_rng(0).normal(0, 25, (96, 96, 3))
    noisy = Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))
    assert redraw.accepted(noisy, STAR, "a blue star") is None
    assert redraw.accepted(draw(STAR), STAR, "a blue star") is not None


def test_captions_are_fresh_and_say_every_color():
    cases = list(itertools.islice(redraw.fresh_captions(), 60))
    assert [len(scene.things) for scene, _ in cases].count(1) > 20
    for scene, caption in cases:
        assert not scene_held_out(scene) and not held_out(caption) and not scene.is_landscape
        assert all(f"color {i}" in requested(scene, caption) for i in range(len(scene.things)))
    again = list(itertools.islice(redraw.fresh_captions(redraw.FIRST + 10_000), 60))
    assert len({caption for _, caption in cases} & {caption for _, caption in again}) < 30


def test_targets_stand_further_from_the_mean_of_their_kind_and_place():
    one = Scene((Thing("circle", "red", "center"),), background="white")
    other = Scene((Thing("circle", "blue", "left"),), background="white")
    seen = [(one, [Spot(0.5, 0.5, 0.3)]), (one, [Spot(0.52, 0.5, 0.28)]), (other, [Spot(0.2, 0.4, 0.19)])]
    (first,), (second,), (alone,) = redraw.widened(seen)
    assert first == pytest.approx((0.51 - 0.01 * redraw.WIDER[0][0], 0.5, 0.29 + 0.01 * redraw.WIDER[0][0]))
    assert second == pytest.approx((0.51 + 0.01 * redraw.WIDER[0][0], 0.5, 0.29 - 0.01 * redraw.WIDER[0][0]))
    assert alone == pytest.approx((0.2, 0.4, 0.19))


def test_a_drawing_straight_ahead_has_nothing_to_teach():
    """And one that lies beside it by t is wrong by 1 per number, before any step."""

    def field(img, txt, t, rope):
        return t * img + 1

    x = mx.random.normal((2, 36, 3), key=mx.random.key(0))
    batch = Batch(x, mx.zeros((2, 1, 1)), None)
    for segment, t in enumerate(schedule(4, 36)[:-1]):
        ahead = batch._replace(clean=x - t * field(x, None, t, None))
        assert redraw.redraw_loss(field, x, ahead, segment).item() < 1e-8
        beside = batch._replace(clean=ahead.clean + t)
        assert redraw.redraw_loss(field, x, beside, segment).item() == pytest.approx(1.0, abs=1e-4)


@pytest.fixture(name="own", scope="module")
def drawn_by_nano():
    """A small round of the bundled model."""
    klein = Klein.from_pretrained("nano")
    parts = klein.transformer, klein.text_encoder, klein.autoencoder, klein.tokenizer
    return klein, redraw.draw_again(12, *parts, (6, 6))


def test_a_round_is_on_the_students_own_path(own):
    """Most pictures are kept; their drawings lie near them; a batch names the step that it is of."""
    klein, found = own
    assert 8 <= len(found.target) <= 12
    assert found.path.shape == (len(found.target), 5, 36, 128)

    def wrong(x, target, segment, ids=found.ids, mask=found.mask):
        batch = encode_batch(klein.transformer, klein.text_encoder, (6, 6), target, x[:, :0], ids, mask)
        return redraw.redraw_loss(klein.transformer, x, batch, segment).item()

    last = found.path[:, 3]
    others = mx.roll(found.target, 1, axis=0)
    assert wrong(last, found.target, 3) < 0.1 * wrong(last, others, 3), "nearer than any other's drawing"
    segments = set()
    for step in range(9):
        x, target, ids, mask, segment = found.batch(step, 5)
        assert x.shape == target.shape == (5, 36, 128)
        if segment < 3:
            assert wrong(x, target, segment, ids, mask) < 1e-6, "the other steps shall stay as they are"
        segments.add(segment)
    assert segments == {0, 1, 2, 3}


@pytest.mark.slow
def test_a_student_that_stays_as_it_was_loses_nothing(own):
    klein, found = own
    base = Klein.from_pretrained("nano-base").transformer
    batch = encode_batch(base, klein.text_encoder, (6, 6), found.target, found.target, found.ids, found.mask)
    for segment in range(4):
        key = mx.random.key(segment)
        assert stay_loss(klein.transformer, klein.transformer, batch, segment, key).item() == 0
        assert stay_loss(klein.transformer, base, batch, segment, key).item() > 1e-3


def test_a_student_that_draws_nothing_is_told_so(own):
    klein, _ = own
    silent = Klein.from_pretrained("nano").transformer
    silent.update({"final_layer": {"linear": {"weight": mx.zeros_like(silent.final_layer.linear.weight)}}})
    with pytest.raises(UserError, match="None of 4 pictures came near a drawing"):
        redraw.draw_again(4, silent, klein.text_encoder, klein.autoencoder, klein.tokenizer, (6, 6))
