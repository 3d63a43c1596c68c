"""What several commands need: a folder to write in, and an end that waits for nothing."""

import signal
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

from ..errors import UserError, on_ctrl_c


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


def ctrl_c(at_once: bool) -> AbstractContextManager[None]:
    """Within, Ctrl-C ends the process as the system does it, with the shell's status 130; or, not at once, as Python.

    A step of MLX or a download may go on for a minute, and Python hears of Ctrl-C between two calls.
    """
    return on_ctrl_c(signal.SIG_DFL if at_once else signal.default_int_handler)
