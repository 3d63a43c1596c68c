"""One call at a time, from whatever thread it comes.

In MLX only the thread that began a computation can finish it. Two threads that compute at once end the process, and so
does a thread that ends after computing. But weights are loaded lazily, and a server calls from threads that come and
go. So everything that computes goes through `run_serialized`:

- in the main thread at once, so that Ctrl-C, a debugger and a progress bar work as always;
- from all other threads in one thread that stays, in the order in which they came.

Both use streams of MLX that all threads may share if they take turns; a lock makes them take turns.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import ParamSpec, TypeVar, cast

import mlx.core as mx

from ..cpu import setup

__all__ = ["run_serialized"]

P = ParamSpec("P")
R = TypeVar("R")
LOCK = threading.RLock()
WORKER = ThreadPoolExecutor(1, thread_name_prefix="kleinlite")  # the library ends it with the process
STATE = threading.local()  # .is_worker: whether this is the thread that stays
process: int | None = None  # the one in which MLX has worked first


@cache
def shared_stream(device: mx.DeviceType) -> mx.Stream:
    """The stream of a device that all threads use in turn."""
    return mx.new_thread_unsafe_stream(device)


def run_serialized(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """function(*args, **kwargs), when no other thread computes."""
    if process not in (None, os.getpid()):
        raise RuntimeError(
            "This process was forked from one that had used kleinlite, and MLX's threads stayed behind: start it with "
            'the method "spawn", or use kleinlite in the new process only.'
        )
    if threading.current_thread() is threading.main_thread() or getattr(STATE, "is_worker", False):
        return compute(function, *args, **kwargs)
    return WORKER.submit(as_worker, lambda: function(*args, **kwargs)).result()


def compute(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    global process
    with LOCK:
        setup()  # before the first large array: a fast matrix product where MLX's own is slow
        process = os.getpid()
        device = mx.default_device().type
        files = mx.stream(shared_stream(mx.cpu))  # are read on the CPU, too
        with files, mx.stream(shared_stream(device)), untouched_random_state():
            return function(*args, **kwargs)


@contextmanager
def untouched_random_state() -> Iterator[None]:
    """What the caller's `mx.random` gives next does not depend on what is done here.

    A layer draws its first weights when it is built, before those of a file replace them. Each thread has random
    numbers of its own, and to look at them is to compute, so that only the main thread's are kept.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    state = cast(Sequence[mx.array], mx.random.state)
    high, low = cast(list[int], state[0].tolist())
    try:
        yield
    finally:
        mx.random.seed(high << 32 | low)


def as_worker(function: Callable[[], R]) -> R:
    """`compute` in the thread that stays. It keeps no stream of its own, or MLX could not end with the process."""
    STATE.is_worker = True
    try:
        return compute(function)
    finally:
        mx.clear_streams()
