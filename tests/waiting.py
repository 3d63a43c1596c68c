"""Waiting for an event, never for a clock: the limit only says where a test hangs, and a busy machine passes."""

import subprocess
import time
from collections.abc import Callable

HANGS = 900  # seconds
HANGS_MS = 1000 * HANGS


def wait_until(happened: Callable[[], object], what: str) -> None:
    """Look again and again until it has."""
    end = time.monotonic() + HANGS
    while not happened():
        assert time.monotonic() < end, f"{what}: not within {HANGS} s"
        time.sleep(0.02)


def stop(process: subprocess.Popen) -> None:
    """Ask a server to end, and end it if it does not answer."""
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
