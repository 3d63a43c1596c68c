"""Mistakes told in a sentence. Hand-written, standard library only: for the command line and for programs of a room.

What the person at the keyboard can mend ends with one line on stderr and status 2; Ctrl-C with status 130. A mistake
in this program keeps its traceback.
"""

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NoReturn

LONGEST = 996  # characters of a sentence: names in it may come from anybody's file


class OneSentence(Exception):
    """An error whose text is one printable line of bounded length, whatever it quotes.

    shell: the same for a command line, where it has an option for what Python calls otherwise.
    """

    def __init__(self, *sentence: object, shell: str | None = None):
        super().__init__(*sentence)
        self.shell = shell

    def __str__(self) -> str:
        return shorten(printable(super().__str__()), LONGEST)


class UserError(OneSentence, ValueError):
    """A mistake of the caller. Its text is a sentence: what is wrong, and the way out."""


class FileError(OneSentence, OSError):
    """A file or a folder that cannot be used as it was asked; its text is a sentence."""


class MissingFileError(FileError, FileNotFoundError):
    """A file that is needed and not here."""


class ExistingFileError(FileError, FileExistsError):
    """A file or a folder that is in the way, or in use by another process."""


class HubError(FileError, ConnectionError):
    """A model hub that could not be asked, or whose answer is not to be trusted."""


class MemoryLimitError(OneSentence, MemoryError):
    """A request that this machine cannot hold."""


USER_ERRORS = (UserError, FileError, MemoryLimitError)


class Parser(argparse.ArgumentParser):
    """argparse, with a sentence instead of the usage block."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see `{self.prog} --help`)\n")


def explain_error(error: Exception) -> str | None:
    """The sentence for a mistake that the person at the keyboard can mend; None for a bug."""
    if isinstance(error, USER_ERRORS):
        return shorten(error.shell, LONGEST) if error.shell else str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}." if error.filename else f"{error.strerror}."
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "malloc]" in str(error)):
        return "There is not enough memory for this: try a smaller --size, or fewer --image pictures."
    return None


def printable(text: str) -> str:
    """One line for a terminal, with control characters escaped: a text may come from anywhere."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shorten(text: str, most: int) -> str:
    """The text, without its middle if it is longer than `most` characters."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-(most // 2) :]}"


def clip(name: str, most: int = 64) -> str:
    """A name from a file, for a sentence: on one line, and without its middle if it is longer than `most`."""
    return shorten(printable(name), most)


def first_few(items: Iterable, count: int = 4) -> str:
    """The first items of a list, and how many more there are."""
    names = [shorten(str(item), 100) for item in items]
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


@cache
def say_once(sentence: str) -> None:
    """A line in the log, the first time only."""
    logging.getLogger("kleinlite").warning("%s", printable(sentence))


@contextmanager
def on_ctrl_c(handler: Any) -> Iterator[None]:
    """Within, Ctrl-C does this. In a thread that is not the main one, which hears of no signals, it stays as it is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


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
