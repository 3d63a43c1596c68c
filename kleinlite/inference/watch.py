"""A drawing to be watched as it comes: in a file that every step rewrites, or in the terminal."""

import shutil
import sys
from pathlib import Path
from typing import TextIO

from PIL import Image

from .picture_file import save_picture

__all__ = ["Watcher"]

LARGEST_ROWS = 24  # of the terminal, two pixels each


class Watcher:
    """Shows one picture after the other in the same place: `file` if there is one, else on a terminal."""

    def __init__(self, file: Path | None = None, terminal: TextIO = sys.stderr):
        self.file = file
        self.terminal = terminal
        self.rows = 0  # of the picture that stands on the terminal

    def show(self, picture: Image.Image) -> None:
        if self.file:
            save_picture(picture, self.file)
            return
        lines = half_blocks(picture, *shutil.get_terminal_size())
        back = f"\x1b[{self.rows}A" if self.rows else ""  # the cursor goes up, over the picture before
        self.terminal.write(back + "".join(f"{line}\x1b[0m\n" for line in lines))
        self.terminal.flush()
        self.rows = len(lines)


def half_blocks(picture: Image.Image, columns: int, rows: int) -> list[str]:
    """Lines for a terminal of so many columns and rows, in 24-bit colors: each ▀ is two pixels."""
    rows = max(1, min(rows - 2, LARGEST_ROWS))
    scale = min(columns / picture.width, 2 * rows / picture.height)
    width = max(1, int(picture.width * scale))
    height = max(1, int(picture.height * scale / 2))
    small = picture.convert("RGB").resize((width, 2 * height), Image.Resampling.BOX)
    colors = [tuple(small.tobytes()[i : i + 3]) for i in range(0, 6 * width * height, 3)]
    lines = []
    for y in range(0, 2 * height, 2):
        pairs = zip(colors[y * width : (y + 1) * width], colors[(y + 1) * width : (y + 2) * width])
        lines.append("".join(paint(upper, lower) for upper, lower in pairs))
    return lines


def paint(upper: tuple[int, ...], lower: tuple[int, ...]) -> str:
    front = ";".join(map(str, upper))
    behind = ";".join(map(str, lower))
    return f"\x1b[38;2;{front};48;2;{behind}m▀"
