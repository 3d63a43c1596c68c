"""Jobs timed by turns: other programs come and go, and should meet all jobs alike. Hand-written."""

import os
import time
from collections.abc import Callable, Sequence

import mlx.core as mx


def pick_clock() -> Callable[[], float]:
    """The processor's own time where one thread does all the work: it stands still while other programs run."""
    one_thread = mx.default_device() == mx.Device(mx.cpu) and os.environ.get("OPENBLAS_NUM_THREADS") == "1"
    return time.process_time if one_thread else time.perf_counter


def race(
    jobs: Sequence[Callable[[], object]], rounds: int, clock: Callable[[], float] | None = None
) -> list[list[float]]:
    """Seconds of each job, round by round; in a round each has one turn. What MLX has put off is computed.

    clock: as `pick_clock` says if not given.
    """
    clock = clock or pick_clock()
    seconds: list[list[float]] = [[] for _ in jobs]
    for _ in range(rounds):
        for job, turns in zip(jobs, seconds):
            start = clock()
            mx.eval(job())
            turns.append(clock() - start)
    return seconds
