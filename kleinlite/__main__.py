"""`python -m kleinlite` is the command `kleinlite`."""

import sys


def main() -> int:
    """Run one command. Ctrl-C ends it with one line and status 130, also while its modules are read."""
    try:
        from . import cli

        return cli.main()
    except KeyboardInterrupt:
        print("kleinlite: stopped.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
