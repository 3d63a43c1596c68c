"""Repair: a lone thing that came twice, or not at all, learns from a success that shows what was asked."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from kleinlite.errors import UserError
from kleinlite.klein import Klein
from kleinlite.sampling import schedule
from kleinlite.scenes import Scene, Thing, draw, held_out, scene_held_out
from recipe import repair

HILLS = Scene((), sky="day", ground="hills", sun_side="left")
CAPTION = "a red house on green hills"


def house(*places: str, color: str = "red") -> Scene:
    """Houses on green hills by day."""
    return Scene(tuple(Thing("house", color, place) for place in places), sky="day", ground="hills", sun_side="left")


def test_captions_are_fresh_and_of_one_thing():
    cases = list(itertools.islice(repair.lone_captions(), 60))
    for scene, caption in cases:
        assert scene.is_landscape and len(scene.things) == 1
        assert not scene_held_out(scene) and not held_out(caption)
    assert {scene.things[0].kind for scene, _ in cases} == {"house", "tree", "boat"}


@pytest.mark.parametrize("place", ["left", "right"])
def test_a_picture_leans_to_where_its_thing_stands(place):
    assert repair.leaning(draw(house(place)), HILLS) == place


def test_a_mate_shows_what_was_asked_on_the_side_that_the_failure_leans_to():
    """Two houses fail; of the successes the red ones fit, on the left, and of these the nearest."""
    seen = [house("left", "right"), house("right"), house("left"), house("left"), house("left", color="blue")]
    cases = [(house("left"), CAPTION)] * 4 + [(house("left", color="blue"), "a blue house")]
    path = mx.random.normal((5, 5, 36, 128), key=mx.random.key(0))
    goal = repair.expected(path[:1], repair.LEANS)[0]
    path[1, -1] = goal
    path[3, -1] = goal + 0.01
    path[4, -1] = goal
    assert repair.find_mates(path, seen, cases, {0: draw(house("left"))}) == {0: 3}
    assert repair.find_mates(path, seen, cases, {0: draw(house("right"))}) == {0: 1}


def test_a_failure_shall_lead_to_its_mate_and_a_success_where_it_led():
    path = mx.random.normal((6, 5, 36, 128), key=mx.random.key(1))
    mate = mx.random.normal((6, 36, 128), key=mx.random.key(2))
    ids = mx.arange(6)[:, None]
    own = repair.Own(path, mate, mx.array([False, True] * 3), ids, ids)
    times = schedule(4, 36)
    for step in range(len(repair.TURNS)):
        x, target, rows, _, segment = own.batch(step, 8)
        assert len(x) == 8 and sum(row % 2 for row in rows[:, 0].tolist()) == 4
        t, t_next = times[segment : segment + 2]
        for i, row in enumerate(rows[:, 0].tolist()):
            np.testing.assert_array_equal(x[i], path[row, segment])
            led = x[i] + (t_next - t) * (x[i] - target[i]) / t  # one step of the velocity that redraw_loss asks for
            if row % 2:
                np.testing.assert_array_equal(target[i], mate[row])
            else:
                np.testing.assert_allclose(led, path[row, segment + 1], atol=1e-4)


def test_a_round_finds_failures_of_nano_and_their_mates(monkeypatch):
    """The judge is told to see two houses in every other picture."""
    klein = Klein.from_pretrained("nano", keep_loaded=True)
    asked = [(house("left"), CAPTION)] * 4
    monkeypatch.setattr(repair, "lone_captions", lambda first: iter(asked))
    monkeypatch.setattr(repair, "judge_all", lambda pictures: [house("left", "right"), house("left")] * 2)
    monkeypatch.setattr(repair, "leaning", lambda picture, ground: "left")
    parts = klein.transformer, klein.text_encoder, klein.autoencoder, klein.tokenizer
    own = repair.draw_lone_things(4, *parts, (6, 6))
    assert own.failed.tolist() == [True, False, True, False]
    successes = own.path[mx.array([1, 3]), -1]
    for row in (0, 2):
        assert any(mx.array_equal(own.target[row], success).item() for success in successes)
    monkeypatch.setattr(repair, "judge_all", lambda pictures: [house("left")] * 4)
    with pytest.raises(UserError, match="No failure among 4 pictures has a mate"):
        repair.draw_lone_things(4, *parts, (6, 6))
