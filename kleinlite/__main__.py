"""`python -m kleinlite` is the command `kleinlite`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
