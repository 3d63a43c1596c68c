"""Mistakes told in a sentence. Hand-written, standard library only: for the command line and for programs of a room.

What the person at the keyboard can mend ends with one line on stderr and status 2; Ctrl-C with status 130. A mistake
in this program keeps its traceback.
"""

import argparse
import opcode
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

RAISE = opcode.opmap["RAISE_VARARGS"]  # what Python makes of a `raise`


class Parser(argparse.ArgumentParser):
    """argparse, with a sentence in place of the usage block."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see `{self.prog} --help`)\n")


def raised_here(error: Exception) -> bool:
    """Whether it comes from a `raise` in this package, and so is a sentence, and not from a call that failed."""
    last = error.__traceback__
    while last.tb_next:
        last = last.tb_next
    code = last.tb_frame.f_code
    return Path(__file__).parent in Path(code.co_filename).parents and code.co_code[last.tb_lasti] == RAISE


def explain_error(error: Exception) -> str | None:
    """The sentence for a mistake that the person at the keyboard can mend; None for a bug."""
    if isinstance(error, (ValueError, OSError, MemoryError)) and raised_here(error):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}." if error.filename else f"{error.strerror}."
    if isinstance(error, RuntimeError) and "temp_directory_path" in str(error):  # MLX compiles there
        return "The folder for temporary files does not exist: see what the variable TMPDIR says."
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "malloc]" in str(error)):
        return "There is not enough memory for this: try a smaller --size, or fewer --image pictures."
    return None


def printable(text: str) -> str:
    """One line for a terminal, with control characters escaped: a text may come from anywhere."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def first_few(items: Iterable, count: int = 4) -> str:
    """The first items of a list, and how many more there are."""
    names = [str(item) for item in items]
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


def run_command(command: Callable[..., None], *args: object) -> int:
    """Call it, tell what goes wrong in a sentence, and return the exit status."""
    try:
        command(*args)
    except KeyboardInterrupt:
        print("kleinlite: stopped.", file=sys.stderr)
        return 130
    except Exception as error:
        sentence = explain_error(error)
        if sentence is None:
            raise
        print(printable(f"kleinlite: {sentence}"), file=sys.stderr)
        return 2
    return 0
