"""Error bars, pairs, distances: against cases worked out by hand, and against what chance really does."""

import math
import random
import statistics

import mlx.core as mx
import pytest

from kleinlite.measuring import (
    bootstrap_error,
    frechet_distance,
    mean_and_error,
    paired_difference,
    sign_test,
    wilson_interval,
)


def test_wilsons_interval():
    low, high = wilson_interval(81, 263)
    assert (low, high) == (pytest.approx(0.2553, abs=1e-4), pytest.approx(0.3662, abs=1e-4))  # Newcombe 1998, table I
    assert wilson_interval(0, 20) == (0, pytest.approx(0.1611, abs=1e-4))  # the same
    assert wilson_interval(20, 20) == (pytest.approx(1 - 0.1611, abs=1e-4), 1)
    for p in (low, high):  # from its ends the count lies 1.96 standard errors away
        assert abs(81 / 263 - p) == pytest.approx(1.96 * math.sqrt(p * (1 - p) / 263))


@pytest.mark.parametrize(("p", "count"), [(0.5, 40), (0.9, 40), (0.95, 40), (0.98, 100)])
def test_wilsons_interval_holds_the_truth_in_about_nineteen_of_twenty(p, count):
    def chance(right):
        return math.comb(count, right) * p**right * (1 - p) ** (count - right)

    def holds(right):
        low, high = wilson_interval(right, count)
        return low <= p <= high

    assert 0.93 < sum(chance(right) for right in filter(holds, range(count + 1))) < 0.975


def test_the_bootstrap_knows_the_error_of_a_mean():
    rng = random.Random(1)
    cases = [rng.gauss(0, 3) for _ in range(400)]
    expected = statistics.stdev(cases) / math.sqrt(400)
    assert bootstrap_error(statistics.mean, cases, draws=2000) == pytest.approx(expected, rel=0.06)
    assert bootstrap_error(statistics.mean, [2.0] * 9) == 0
    assert bootstrap_error(statistics.mean, cases) == bootstrap_error(statistics.mean, cases)  # seeded


def test_pairs():
    assert mean_and_error([1, 2, 3]) == (2, pytest.approx(1 / math.sqrt(3)))
    assert paired_difference([1, 2, 3], [2, 4, 3]) == (1, pytest.approx(1 / math.sqrt(3)))
    mean, error = paired_difference([10, 20, 30, 40], [11, 21, 31, 41])  # however far the cases lie apart
    assert (mean, error) == (1, 0)


def test_the_sign_test_counts_coins():
    assert sign_test(5, 0) == sign_test(0, 5) == 2 / 32
    assert sign_test(4, 1) == 2 * (1 + 5) / 32
    assert sign_test(3, 3) == sign_test(0, 0) == 1


def test_the_frechet_distance_of_normal_distributions():
    """Along each axis (μ_a − μ_b)² + (σ_a − σ_b)²; rotated together, two clouds keep their distance."""
    corners = mx.array([[x, y] for x in (-1.0, 1.0) for y in (-1.0, 1.0)])  # mean 0, covariance 1
    other = corners * mx.array([2.0, 3.0]) + mx.array([5.0, 0.0])
    assert frechet_distance(corners, corners) == pytest.approx(0, abs=1e-5)
    assert frechet_distance(corners, other) == pytest.approx(25 + 1 + 4, rel=1e-5)
    assert frechet_distance(other, corners) == pytest.approx(30, rel=1e-5)
    turn = mx.array([[math.cos(0.7), -math.sin(0.7)], [math.sin(0.7), math.cos(0.7)]])
    assert frechet_distance(corners @ turn, other @ turn) == pytest.approx(30, rel=1e-4)
    long = corners * mx.array([3.0, 1.0])
    wide = corners * mx.array([1.0, 3.0])
    assert frechet_distance(long, wide) == pytest.approx(8, rel=1e-4)  # equal traces, other directions
