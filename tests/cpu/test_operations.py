"""The quick exp and what is built on it, attention too, against MLX's own."""

import math

import mlx.core as mx
import pytest
from agreement import agree, close, linux, normal
from peak_memory import peak_memory
from tiers import slow

from kleinlite import cpu
from kleinlite.cpu.operations import _exp


@linux
@pytest.mark.parametrize("compiled", [True, False])
def test_exp_is_within_rounding_of_the_value(compiled):
    x = mx.concatenate([mx.linspace(-87, 88, 20011), mx.linspace(-1, 1, 4001), mx.linspace(-1e-6, 1e-6, 11)])
    if not compiled:  # as under mx.grad, or where there is no g++
        mx.disable_compile()
    try:
        y = _exp(x).tolist()
    finally:
        mx.enable_compile()
    assert max(abs(b / math.exp(a) - 1) for a, b in zip(x.tolist(), y)) <= 3e-7


@linux
def test_exp_at_the_ends():
    inf = math.inf
    assert _exp(mx.array([-inf, -3e38, -1000, -88, 0, 89, 1000, inf])).tolist() == [0] * 4 + [1] + [inf] * 3
    assert math.isnan(_exp(mx.array(math.nan)).item())  # must not turn into a number


@pytest.mark.parametrize("shape", [(), (3, 5, 17), (2, 0)])
def test_values_one_by_one(shape):
    x = 4 * normal(*shape)
    if x.size == 0:
        assert cpu.silu(x).shape == shape
        return
    assert agree(cpu.silu, lambda x: x * mx.sigmoid(x), x)
    row = [normal(*shape[-1:], seed=i) for i in (1, 2, 3)]
    assert agree(cpu.affine, lambda x, mean, scale, shift: (x - mean) * scale + shift, x, *row)


@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_softmax(axis):
    x = 5 * normal(4, 6, 9)
    assert agree(lambda x: cpu.softmax(x, axis), lambda x: mx.softmax(x, axis=axis), x)


def test_a_view_that_is_not_contiguous():
    x = normal(6, 10)
    assert close(cpu.silu(x[:, ::2].T), x[:, ::2].T * mx.sigmoid(x[:, ::2].T))
    assert close(cpu.softmax(x.T), mx.softmax(x.T, axis=-1))


def test_half_of_a_large_array():
    """As a gate is: copied before its exp."""
    x = normal(300, 2000)
    own, theirs = (
        lambda x: cpu.silu(x[:, :1000]) * x[:, 1000:],
        lambda x: x[:, :1000] * mx.sigmoid(x[:, :1000]) * x[:, 1000:],
    )
    assert agree(own, theirs, x)


def test_large_values_stay_numbers():
    x = mx.array([[-3e38, -1e4, -100, 0, 100, 1e4, 1e30]])
    for own, theirs in ((cpu.silu, lambda x: x * mx.sigmoid(x)), (cpu.softmax, lambda x: mx.softmax(x, axis=-1))):
        for f in (lambda f, x: f(x), lambda f, x: mx.grad(lambda x: f(x).sum())(x)):
            assert close(f(own, x), f(theirs, x), 1e-7)
    assert cpu.silu(x).tolist()[0][3:] == x.tolist()[0][3:]
    assert close(cpu.softmax(mx.array([0.0, -mx.inf, 1.0])), mx.softmax(mx.array([0.0, -mx.inf, 1.0])))
    assert cpu.softmax(mx.array([0.0, -mx.inf, 1.0]))[1].item() == 0


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_other_types_are_left_to_mlx(dtype):
    x, q = normal(3, 8).astype(dtype), normal(1, 2, 5, 8).astype(dtype)
    assert mx.array_equal(cpu.silu(x), x * mx.sigmoid(x))
    assert mx.array_equal(cpu.softmax(x), mx.softmax(x, axis=-1, precise=True))
    theirs = mx.fast.scaled_dot_product_attention(q, q, q, scale=0.3, mask=None)
    assert mx.array_equal(cpu.attention(q, q, q, 0.3), theirs)


def masks(b: int, nh: int, s: int) -> dict[str, mx.array | None]:
    causal, real = mx.tri(s) > 0, mx.arange(s) < mx.array([[s], [s - 3]])[:b]
    return {
        "none": None,
        "causal": causal,
        "padding": real[:, None, None, :],
        "both": causal & real[:, None, None, :],
        "per head": (normal(b, nh, s, s, seed=3) > 0) | (mx.eye(s) > 0),
    }


@pytest.mark.parametrize("nkv", [6, 2, 1])
@pytest.mark.parametrize("mask", masks(1, 1, 5))
@pytest.mark.parametrize("rows", [4, *slow(11, 1)])  # queries at a time
def test_attention(mask, nkv, rows, monkeypatch):
    b, nh, s, hd = 2, 6, 11, 8
    monkeypatch.setattr(cpu.operations, "SCORES", rows * 4 * b * nh * s)
    mask = masks(b, nh, s)[mask]
    q, k, v = normal(b, nh, s, hd), normal(b, nkv, s, hd, seed=1), normal(b, nkv, s, hd, seed=2)

    def own(q, k, v):
        return cpu.attention(q, k, v, hd**-0.5, mask)

    def theirs(q, k, v):
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=hd**-0.5, mask=mask)

    assert agree(own, theirs, q, k, v)
    assert agree(own, theirs, 6 * q, 6 * k, v, tolerance=2e-5)  # scores of 50: most weights are 0 or 1
    assert mx.isfinite(own(1e4 * q, 1e4 * k, v)).all()


@pytest.mark.parametrize("keys", [255, 272, 320, 1000])
def test_attention_over_long_rows(keys):
    """Rows whose maximum and sum are taken in folds, and rows that cannot be folded."""
    q, k, v = normal(1, 4, 5, 8), 3 * normal(1, 2, keys, 8, seed=1), normal(1, 2, keys, 8, seed=2)
    mask = mx.arange(keys) < keys - 7

    def theirs(q, k, v):
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=0.5, mask=mask)

    assert agree(lambda q, k, v: cpu.attention(q, k, v, 0.5, mask), theirs, q, k, v, tolerance=1e-5)


def test_attention_with_heads_behind_the_tokens():
    """As models call it: (b, s, nh, hd), turned; not contiguous."""
    q, k, v = (normal(2, 9, heads, 4, seed=i).swapaxes(1, 2) for i, heads in enumerate((4, 2, 2)))
    theirs = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.5, mask=None)
    assert close(cpu.attention(q, k, v, 0.5), theirs)


@linux
def test_attention_takes_little_memory(monkeypatch):
    """A few parts at a time, as far as MLX plans ahead, not the scores of all 64 heads."""
    q = normal(1, 64, 256, 8)
    monkeypatch.setattr(cpu.operations, "SCORES", 4 * 256 * 256)
    mx.eval(q)
    with peak_memory() as peak:
        mx.eval(cpu.attention(q, q, q, 0.3))
    assert peak.bytes < 32 * cpu.operations.SCORES
