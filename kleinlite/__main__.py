"""`python -m kleinlite` is the command `kleinlite`."""

import os
import sys

STOPPED = 130  # how a shell counts Ctrl-C


def main() -> int:
    """Run one command. Ctrl-C ends it at any time, also while its modules are read, with one line and status 130."""
    try:
        from . import cli

        status = cli.main()
    except KeyboardInterrupt:
        write_last(2, b"kleinlite: stopped.\n")
        status = STOPPED
    if status == STOPPED:
        # At once, by ourselves: Python, interrupted in an import, would end by the signal, and a second Ctrl-C would
        # be a traceback. What is half-written has been removed on the way here.
        write_last(1, b"")
        os._exit(STOPPED)
    return status


def write_last(number: int, text: bytes) -> None:
    """Write to a standard stream what still can be written."""
    stream = (sys.stdin, sys.stdout, sys.stderr)[number]
    try:
        if stream:
            stream.flush()
        os.write(number, text)
    except OSError:  # closed or full
        pass


if __name__ == "__main__":
    sys.exit(main())
