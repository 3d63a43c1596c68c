"""The loop of a worker: a line in, one run of its stage, its cost out. Standard library only: it runs everywhere."""

import json
import resource
import sys
import time
from collections.abc import Callable

PRODUCT = (1536, 3072, 9216)  # rows, inputs, outputs: the widest matrices of a block of the 4B
TOKENS, TEXT_TOKENS, HEADS, HEAD_SIZE, WIDTH = 1024, 512, 24, 128, 3072  # a picture of 512²
COPY = 2**25  # values
BATCH = 32  # of the training step, whose network is as small as klein-nano's first
SMALL = {"double_blocks": 2, "single_blocks": 5, "heads": 4, "axes": (8, 8, 8, 8), "d_text": 288}
PROMPT = "a red circle above a blue square"


def peak_bytes() -> int:
    """The most memory that this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def serve(
    stages: dict[str, Callable[[], Callable[[], object]]], versions: str, peak: Callable[[], int] = peak_bytes
) -> None:
    """Prepare the stage that the command line names and run it once for each line of the input.

    stages: name → a function that prepares, and returns the function to be timed. Answers are lines of JSON.
    peak: the most memory held so far; on a GPU what its library counts.
    """
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints does not mix with the answers

    def say(**words):
        return print(json.dumps(words), file=answers, flush=True)

    if sys.argv[1] not in stages:
        return say(missing=True, versions=versions)
    run = stages[sys.argv[1]]()
    before = peak()
    run()  # compiles, and brings weights into memory
    say(ready=True, versions=versions)
    for _ in sys.stdin:
        wall, processor = time.perf_counter(), time.process_time()
        run()
        seconds, processor = time.perf_counter() - wall, time.process_time() - processor
        say(seconds=seconds, processor=processor, peak_bytes=peak() - before)
