"""Whether an operation of `kleinlite.cpu` gives what MLX's own gives."""

import mlx.core as mx
import pytest

from kleinlite import cpu

linux = pytest.mark.skipif(not cpu.FAST, reason="kleinlite.cpu changes something on a Linux CPU only")


def close(a: mx.array, b: mx.array, tolerance: float = 3e-6) -> bool:
    """Same shape and type, no nan, and the largest difference small against the values."""
    assert a.shape == b.shape and a.dtype == b.dtype
    limit = tolerance * max(1.0, mx.abs(b).max().item())
    return mx.abs(a - b).max().item() <= limit  # False for nan, too


def agree(own, theirs, *args: mx.array, tolerance: float = 3e-6) -> bool:
    """Values and gradients, with and without mx.compile."""
    w = normal(*theirs(*args).shape, seed=9)

    def gradients(f):
        return mx.grad(lambda args: (f(*args) * w).sum())

    right = theirs(*args), *gradients(theirs)(list(args))
    plain = own(*args), *gradients(own)(list(args))
    compiled = right[0], *mx.compile(gradients(own))(list(args))  # `own` alone compiles itself
    return all(close(a, b, tolerance) for got in (plain, compiled) for a, b in zip(got, right))


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))
