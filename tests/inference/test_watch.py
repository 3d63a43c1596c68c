"""Watching a drawing: lines for a terminal, a file that is rewritten."""

import io

from PIL import Image

from kleinlite.inference.watch import Watcher, half_blocks

TWO = Image.new("RGB", (4, 4), "red")
TWO.paste((0, 0, 255), (0, 2, 4, 4))


def test_two_pixels_in_a_character():
    lines = half_blocks(TWO, 2, 40)
    assert lines == ["\x1b[38;2;255;0;0;48;2;0;0;255m▀" * 2]


def test_a_picture_fits_the_terminal():
    for columns, rows in ((80, 24), (10, 50), (200, 5), (1, 1)):
        lines = half_blocks(Image.new("RGB", (96, 64)), columns, rows)
        assert len(lines) <= max(rows, 1) and all(line.count("▀") <= columns for line in lines)


def test_the_next_one_stands_in_its_place():
    terminal = io.StringIO()
    watcher = Watcher(terminal=terminal)
    watcher.show(TWO)
    first = terminal.getvalue()
    watcher.show(TWO)
    assert not first.startswith("\x1b[") or first.startswith("\x1b[38")
    assert terminal.getvalue() == first + f"\x1b[{first.count(chr(10))}A" + first


def test_a_file_is_rewritten(tmp_path):
    watcher = Watcher(tmp_path / "now.png")
    for color in ("red", "blue"):
        watcher.show(Image.new("RGB", (8, 8), color))
    assert Image.open(tmp_path / "now.png").getpixel((0, 0)) == (0, 0, 255)
