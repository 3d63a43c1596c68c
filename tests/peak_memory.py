"""What a piece of work takes, whatever an earlier test left in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import mlx.core as mx


@contextmanager
def peak_memory() -> Iterator[SimpleNamespace]:
    """After it, `.bytes`: the most memory that MLX had in use meanwhile, beyond what was in use before."""
    peak = SimpleNamespace()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    yield peak
    peak.bytes = mx.get_peak_memory() - before
