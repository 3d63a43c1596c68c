"""One call at a time, from whatever thread it comes. Hand-written.

In MLX what a thread has begun only that thread can finish, two threads that compute at once end the process, and so
does a thread that computed and ends. But weights are loaded lazily, and whoever serves several people calls from
threads that come and go. So everything that computes here goes through `in_turn`:

- in the main thread at once, so that Ctrl-C, a debugger and a progress bar work as always;
- from all other threads in one thread that stays, in the order in which they came.

Both work on streams that MLX allows all threads to use as long as they take turns: a lock sees to that.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import ParamSpec, TypeVar

import mlx.core as mx

from ..cpu import setup_process

__all__ = ["in_turn"]

P, R = ParamSpec("P"), TypeVar("R")
LOCK = threading.RLock()
WORKER = ThreadPoolExecutor(1, thread_name_prefix="kleinlite")  # the library ends it with the process
STATE = threading.local()  # .is_worker: whether this is the thread that stays
process = setup_process()  # the one in which MLX has worked first


@cache
def shared_stream(device: mx.DeviceType) -> mx.Stream:
    """The stream of a device that all threads use in turn."""
    return mx.new_thread_unsafe_stream(device)


def in_turn(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """function(*args, **kwargs), when no other thread computes."""
    if process not in (None, os.getpid()):
        raise RuntimeError(
            "This process was forked from one that had used kleinlite, and MLX's threads stayed behind: start it with "
            'the method "spawn", or import kleinlite in the new process only.'
        )
    if threading.current_thread() is threading.main_thread() or getattr(STATE, "is_worker", False):
        return compute(function, *args, **kwargs)
    return WORKER.submit(as_worker, function, *args, **kwargs).result()


def compute(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    global process
    with LOCK:
        process = os.getpid()
        device = mx.default_device().type
        with mx.stream(shared_stream(mx.cpu)), mx.stream(shared_stream(device)):  # files are read on the CPU, too
            return function(*args, **kwargs)


def as_worker(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """`compute` in the thread that stays, which keeps nothing of its own in MLX: it could not end with the process."""
    STATE.is_worker = True
    try:
        return compute(function, *args, **kwargs)
    finally:
        mx.clear_streams()
