"""What machines that were started together tell each other, so that all of them do the same.

A picture that several machines draw together needs the same request on all of them, in the same order: one that refused
alone would leave the others waiting. Chapter 18 cuts the model; here is what they agree on.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import mlx.core as mx

from ..errors import UserError

__all__ = ["from_first", "least", "say_who_is_lost"]

LOST = "connection to a peer was lost"  # what MLX's ring says when another process is gone


def least(number: int, group: mx.distributed.Group) -> int:
    """The smallest of the numbers that the machines have."""
    return cast(int, mx.distributed.all_gather(mx.array([number], dtype=mx.int64), group=group).min().item())


def from_first(numbers: Sequence[int], group: mx.distributed.Group) -> list[int]:
    """The first machine's numbers, each below 2**63."""
    mine = mx.array(list(numbers), dtype=mx.int64)
    shared = mx.distributed.all_sum(mine if group.rank() == 0 else mx.zeros_like(mine), group=group)
    return cast(list[int], shared.tolist())


@contextmanager
def say_who_is_lost() -> Iterator[None]:
    """A sentence instead of a traceback, which would bury what the machine that stopped has said. Raises UserError."""
    try:
        yield
    except RuntimeError as error:
        if LOST not in str(error):
            raise
        raise UserError("Another machine has stopped: see what it said, and start the command again.") from None
