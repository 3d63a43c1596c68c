"""Properties of the ids and of the rotation; numbers against diffusers stand in test_parity_blocks."""

import mlx.core as mx
import pytest
from golden_tools import check

from kleinlite.position_ids import apply_rope, image_ids, reference_ids, rope_table, text_ids

AXES = (8, 8, 8, 8)


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def scores(ids: mx.array) -> mx.array:
    """Who attends how much to whom, for fixed random queries and keys at these positions."""
    q, k = (apply_rope(normal(1, 2, len(ids), 32, seed=i), rope_table(ids, AXES)) for i in range(2))
    return q @ k.swapaxes(-1, -2)


def test_ids():
    assert text_ids(3).tolist() == [[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 2]]
    assert image_ids(2, 3).tolist() == [[0, i, j, 0] for i in range(2) for j in range(3)]
    two = [[10, 0, j, 0] for j in range(4)] + [[20, i, 0, 0] for i in range(2)]
    assert reference_ids([(1, 4), (2, 1)]).tolist() == two  # each grid begins at (0, 0)


@pytest.mark.parametrize("axis", range(4))
def test_only_differences_matter(axis):
    ids = mx.concatenate([text_ids(3), image_ids(2, 3), reference_ids([(2, 2)])])
    moved = ids + mx.array([7 * (i == axis) for i in range(4)])
    check(scores(moved), scores(ids))
    one = mx.concatenate([ids[:1], moved[1:]])  # but moving all except one token does matter
    assert mx.abs(scores(one) - scores(ids)).max().item() > 0.1


@pytest.mark.parametrize("axis", range(4))
def test_each_axis_turns_its_own_channels(axis):
    x, ids = normal(1, 1, 1, 32), mx.array([[5 * (i == axis) for i in range(4)]])
    changed = mx.abs(apply_rope(x, rope_table(ids, AXES)) - x)[0, 0, 0].reshape(4, 8)
    assert [c.max().item() > 0.01 for c in changed] == [i == axis for i in range(4)]


def test_neighbours_turn_together():
    """Pairs are (0, 1), (2, 3), …, not (0, 16), (1, 17), …: their length stays, and the first one turns fastest."""
    x, ids = normal(1, 2, 6, 32), image_ids(2, 3, t=3)
    turned = apply_rope(x, rope_table(ids, AXES))

    def length(y):
        return mx.sqrt((y.reshape(*y.shape[:-1], 16, 2) ** 2).sum(-1))

    check(length(turned), length(x))
    one = mx.zeros((1, 1, 1, 32)) + (mx.arange(32) == 0)
    turned = apply_rope(one, rope_table(mx.array([[1, 0, 0, 0]]), AXES))
    check(turned[0, 0, 0, :2], [0.5403023, 0.8414710])  # by one radian, from the first axis to the second


def test_position_zero_changes_nothing():
    x = normal(1, 2, 3, 32)
    check(apply_rope(x, rope_table(mx.zeros((3, 4), dtype=mx.int32), AXES)), x, 0)


def test_half_precision_is_rounded_only_at_the_end():
    x, ids = normal(1, 2, 4, 128).astype(mx.bfloat16), mx.array([[30, 63, 127, 511]] * 4)
    rope = rope_table(ids)
    assert {r.dtype for r in rope} == {mx.float32} and {r.shape for r in rope} == {(4, 64)}
    turned = apply_rope(x, rope)
    assert turned.dtype == mx.bfloat16
    check(turned, apply_rope(x.astype(mx.float32), rope).astype(mx.bfloat16), 0)
