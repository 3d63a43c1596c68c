"""A picture of klein-nano beside other programs: what products in several threads cost when the cores are taken.

    python -m benchmarks.busy       quiet, then beside one and two programs that never wait, by turns; three minutes

Each turn is a process of its own: one thread for all products; OpenBLAS as it is by itself, whose threads wait for
work by turning in circles; and kleinlite, whose threads sleep, and which counts the idle cores before each step.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

TURNS = 5
WAYS = {  # → environment, and whether busy cores are left alone
    "one thread": ({"OPENBLAS_NUM_THREADS": "1"}, False),
    "OpenBLAS alone": ({"OPENBLAS_THREAD_TIMEOUT": "26"}, False),  # its own default
    "kleinlite": ({}, True),
}
WORKER = """
import contextlib, statistics, sys, time
import kleinlite.inference.loaded_model as loaded_model
from kleinlite import Klein
if sys.argv[1] == "False":
    loaded_model.idle_cores_only = contextlib.nullcontext
klein = Klein.from_pretrained()
seconds = []
for seed in range(4):
    start = time.perf_counter()
    klein("a red star", seed=seed, progress=False)
    seconds.append(time.perf_counter() - start)
print(statistics.median(seconds[1:]))
"""


@contextmanager
def busy_programs(count: int) -> Iterator[None]:
    """So many programs that keep a core busy."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()


def time_picture(way: str) -> float:
    """Seconds of a picture in a warm process of its own."""
    settings, leave = WAYS[way]
    others = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")}
    command = [sys.executable, "-c", WORKER, str(leave)]
    return float(subprocess.run(command, env=others | settings, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    print(
        f"seconds of a picture, median (least) of {TURNS} turns, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    for count in (0, 1, 2):
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        with busy_programs(count):
            for _ in range(TURNS):
                for way, found in seconds.items():
                    found.append(time_picture(way))
        cells = (f"{way} {statistics.median(found):.2f} ({min(found):.2f})" for way, found in seconds.items())
        print(f"beside {count}: {', '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
