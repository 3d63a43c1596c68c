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
        print("kleinlite: stopped.", file=sys.stderr)
        status = STOPPED
    if status == STOPPED:
        # At once, by ourselves: Python, interrupted in an import, would end by the signal, and a second Ctrl-C would
        # be a traceback. What is half-written has been removed on the way here.
        sys.stdout.flush()
        os._exit(STOPPED)
    return status


if __name__ == "__main__":
    sys.exit(main())
