"""What several commands need: a folder to write in, and an end that does not wait."""

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import UserError


def check_folder(folder: Path) -> None:
    """Refuse a folder in which nothing could be written."""
    if not folder.is_dir():
        raise UserError(f"The folder {folder} does not exist: make it first, or name another.")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"Nothing can be written in {folder} ({error.strerror}): name another folder.") from None


def name_quantization(quantize: int | str) -> str:
    return f"{quantize} bits" if isinstance(quantize, int) else quantize


@contextmanager
def ending_soon() -> Iterator[None]:
    """Within, Ctrl-C ends the process after a second, should it not have ended by then.

    A step of MLX or a download may go on for a minute, and Python hears of Ctrl-C between two calls. The system writes
    it into a pipe at once, from which a thread reads. Windows knows no such pipe before Python 3.12.
    """
    if not hasattr(os, "set_blocking"):
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    ended = threading.Event()

    def end() -> None:
        if os.read(reading, 1) == bytes([signal.SIGINT]) and not ended.wait(1):
            print("\n" * sys.stderr.isatty() + "kleinlite: stopped.", file=sys.stderr, flush=True)  # below the bar
            os._exit(130)
        os.close(reading)

    before = signal.set_wakeup_fd(writing)
    threading.Thread(target=end, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(before)
        os.close(writing)
