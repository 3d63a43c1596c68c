"""Two streams for a training step on a Linux CPU. Hand-written; elsewhere nothing here changes anything.

MLX runs the operations of a stream one after the other and, apart from products, each on one core. The rows of a batch
do not need each other: with half of them on a stream of its own, two cores are busy. A product then takes half of the
threads, or the two streams' products would wait for each other. MLX begins on some fifty operations of a graph at a
time, so what is shared must be no longer than that: a block, not a network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from .blas import limit_threads
from .operations import second_stream

_sharing = False
_turn = 0


@cache
def _streams() -> tuple[mx.Stream, mx.Stream]:
    return mx.default_stream(mx.cpu), second_stream()


@contextmanager
def two_streams() -> Iterator[None]:
    """In here `by_halves` and `by_turns` have two streams, unless products have no more than one thread."""
    global _sharing
    threads = limit_threads(None)
    if threads < 2:
        yield
        return
    limit_threads(threads // 2)
    _sharing = True
    try:
        yield
    finally:
        _sharing = False
        limit_threads(threads)


def by_halves(f: Callable[..., Any], *arrays: mx.array) -> Any:
    """f(*arrays), where f works on each row of a batch for itself: inside `two_streams` each has half of the rows."""
    b = len(arrays[0])
    if not _sharing or b < 2:
        return f(*arrays)
    halves = []
    for stream, rows in zip(_streams(), (slice(b // 2), slice(b // 2, b))):
        with mx.stream(stream):
            halves.append(f(*(a[rows] for a in arrays)))
    return tree_map(lambda *parts: mx.concatenate(parts), *halves)


@contextmanager
def by_turns() -> Iterator[None]:
    """What is begun in here runs, inside `two_streams`, on the one stream and then on the other."""
    global _turn
    if not _sharing:
        yield
        return
    _turn = 1 - _turn
    with mx.stream(_streams()[_turn]):
        yield
