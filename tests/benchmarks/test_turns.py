"""Jobs take turns, what they put off is computed while the clock runs, and the clock is the one that fits."""

import itertools
import time

import mlx.core as mx
import pytest

from benchmarks.turns import pick_clock, race


def test_jobs_take_turns():
    order = []
    ticks = itertools.count(step=3)
    jobs = [lambda: order.append("first"), lambda: order.append("second")]
    assert race(jobs, 3, clock=lambda: next(ticks)) == [[3, 3, 3], [3, 3, 3]]
    assert order == ["first", "second"] * 3


def test_results_are_computed_within_their_turn(monkeypatch):
    events = []
    monkeypatch.setattr(mx, "eval", lambda result: events.append(result))
    race([lambda: "result"], 1, clock=lambda: events.append("clock") or 0.0)
    assert events == ["clock", "result", "clock"]


@pytest.mark.parametrize(
    ("device", "threads", "clock"),
    [(mx.cpu, "1", time.process_time), (mx.cpu, "2", time.perf_counter), (mx.gpu, "1", time.perf_counter)],
)
def test_processor_time_counts_where_one_thread_does_the_work(monkeypatch, device, threads, clock):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", threads)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(device))
    assert pick_clock() is clock
