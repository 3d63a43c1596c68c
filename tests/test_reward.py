"""Chapter 15: what a reward makes of a group of pictures, and where the loss leads."""

import mlx.core as mx
import pytest

from kleinlite.reward import clean_error, mirrored, nft_loss, optimality

SHAPE = (4, 9, 128)
CLEAN = mx.random.normal(SHAPE, key=mx.random.key(0))
EPS = mx.random.normal(SHAPE, key=mx.random.key(1))
OLD = mx.random.normal(SHAPE, key=mx.random.key(2))
T = mx.array([0.95, 0.88, 0.7, 0.5])
X = (1 - T)[:, None, None] * CLEAN + T[:, None, None] * EPS


def loss(velocity: mx.array, r: float) -> mx.array:
    return nft_loss(lambda *_, **__: velocity, X, None, T, CLEAN, mx.full((4,), r), OLD, None)


def test_each_caption_is_its_own_measure():
    r = optimality(mx.array([[1.0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]))
    assert r[0, 3].item() == 0 and r[0, 0].item() > 0.5
    assert r[1:].flatten().tolist() == [0.5] * 8  # where all are alike, nothing is learned
    assert optimality(mx.ones((2, 3))).tolist() == [[0.5] * 3] * 2


def test_only_the_order_and_the_spread_of_rewards_count():
    rewards = mx.random.uniform(shape=(3, 5), key=mx.random.key(3))
    assert mx.allclose(optimality(rewards), optimality(100 * rewards + 7), atol=1e-3)
    assert optimality(mx.array([[0.0, 1.0, 2.0, 3.0, 100.0]])).max().item() == 1


def test_the_size_of_an_error_is_a_scale_and_not_a_goal():
    distance = X - T[:, None, None] * OLD - CLEAN
    gradient = mx.grad(lambda velocity: clean_error(velocity, X, T, CLEAN).sum())(OLD)
    scale = mx.abs(distance).mean(axis=(1, 2), keepdims=True)
    assert mx.allclose(gradient, -2 * T[:, None, None] * distance / (9 * 128 * scale), atol=1e-6)


def test_the_right_velocity_has_no_error():
    assert clean_error(EPS - CLEAN, X, T, CLEAN).max().item() < 1e-5
    assert clean_error(OLD, X, T, CLEAN).min().item() > 0.1


def test_good_pictures_attract_and_bad_ones_repel():
    towards = (EPS - CLEAN - OLD) / mx.linalg.norm((EPS - CLEAN - OLD).flatten())
    gradients = {r: mx.grad(loss)(OLD, r) for r in (0.0, 0.5, 1.0)}
    slopes = {r: (gradient * towards).sum().item() for r, gradient in gradients.items()}
    assert slopes[1.0] < 0 < slopes[0.0] == pytest.approx(-slopes[1.0], rel=1e-4)
    assert abs(slopes[0.5]) < 1e-6


def test_the_mirror_image_is_as_far_on_the_other_side():
    change = EPS - OLD
    assert mx.allclose(mirrored(OLD + change, OLD), OLD - change, atol=1e-5)


def test_the_mirror_image_stands_on_the_other_side_of_the_old_velocity():
    assert loss(2 * OLD - (EPS - CLEAN), 0.0).item() < 1e-4  # the bad pictures' velocity is the mirror image itself
