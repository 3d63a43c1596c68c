"""Promotion: what it writes, what it refuses, and that the package is in step with the book."""

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import promote

ROOT = Path(__file__).resolve().parents[2]

SETUP = """#| default_exp demo
#| export
import mlx.core as mx
from dataclasses import dataclass"""

SQUARE = '''#| export
# A comment above stays.
def square(x: mx.array) -> mx.array:
    """Each value times itself."""
    return x * x  # (b, n)'''


def write(root: Path, name: str, *cells: str) -> Path:
    """A notebook of code cells; a cell that begins with "MD " is prose."""
    kinds = [("markdown", c[3:]) if c.startswith("MD ") else ("code", c) for c in cells]
    book = {"cells": [{"cell_type": kind, "source": text.splitlines(True)} for kind, text in kinds]}
    for folder in ("notebooks", "kleinlite"):
        (root / folder).mkdir(exist_ok=True)
    (root / "notebooks" / f"{name}.ipynb").write_text(json.dumps(book), "utf-8")
    return root / "kleinlite" / "demo.py"


def refusal(root: Path, capsys) -> str:
    """The one sentence with which promotion ends; nothing may have been written meanwhile."""
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert promote.main([], root) == 2
    assert promote.main(["--check"], root) == 2
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[0] == lines[1]
    return lines[0]


# What it writes


def test_a_module_reads_like_a_file_somebody_wrote(tmp_path):
    module = write(
        tmp_path,
        "01_demo",
        "MD # 1. Squares\n\n![a sketch](s.png)\n\n> [!NOTE]\n> Not this.\n\n"
        "> From a *number* to its\n> [square](x.md).",
        SETUP,
        "print('not marked')",
        SQUARE,
        "#| export\nfrom pathlib import Path\nfrom kleinlite.other import b, LIMIT, Case\n\n_HIDDEN = 1\nEPS = 1e-6",
        "#| export\nfrom dataclasses import field\nfrom kleinlite import viz\n\n\n"
        "@dataclass\nclass Pair:\n    a: int = 0",
    )
    assert promote.main([], tmp_path) == 0
    seal = promote.SEALED.search(module.read_text()).group(2)
    assert (
        module.read_text()
        == f'''"""Squares.

From a *number* to its square.

Promoted from notebooks/01_demo.ipynb: edit there, then run `make promote`. (seal {seal})
"""

from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx

from . import viz
from .other import LIMIT, Case, b

__all__ = ["square", "EPS", "Pair"]


# A comment above stays.
def square(x: mx.array) -> mx.array:
    """Each value times itself."""
    return x * x  # (b, n)


_HIDDEN = 1
EPS = 1e-6


@dataclass
class Pair:
    a: int = 0
'''
    )


def test_the_result_needs_no_formatter(tmp_path):
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    if not ruff:
        pytest.skip("ruff is not installed: pip install -e '.[test]'")
    names = [f"a_rather_long_name_{i}" for i in range(9)]
    cells = [f"#| export\nfrom kleinlite.other import {', '.join(names)}", SQUARE]
    cells += [f"#| export\ndef function_{name}():\n    return {name}" for name in names]
    cells += ["#| export\nfrom __future__ import annotations\nimport numpy as np\nfrom PIL import Image\n\nONE = 1"]
    cells += ["#| export\ndef before():\n    pass\n\n\nimport os\n\n\ndef after():\n    return os"]
    title = f"MD # {'Every word of a long title. ' * 9}\n\n> {'And of a long promise. ' * 9}"
    module = write(tmp_path, "01_demo", title, SETUP, *cells)
    promote.main([], tmp_path)
    settings = ["--config", str(ROOT / "pyproject.toml"), str(module)]
    for command in (["format", "--diff"], ["check", "--no-cache", "--ignore", "F401"]):
        result = subprocess.run([ruff, *command, *settings], capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "prose, start",
    [
        ("# Squares\nThe first sentence. The second.", '"""Squares.\n\nThe first sentence.\n\nPromoted'),
        ("# Why squares?", '"""Why squares?\n\nPromoted'),
        ("# Squares\n\n> $\\sqrt{x}$ and back.", 'r"""Squares.\n\n$\\sqrt{x}$ and back.\n\nPromoted'),
        ("No title.", '"""A chapter of the book.\n\nNo title.\n\nPromoted'),
    ],
)
def test_docstring(tmp_path, prose, start):
    module = write(tmp_path, "01_demo", f"MD {prose}", SETUP, SQUARE)
    promote.main([], tmp_path)
    assert module.read_text().startswith(start)
    assert ast.get_docstring(ast.parse(module.read_text()))


def test_promoting_twice_changes_nothing(tmp_path, capsys):
    module = write(tmp_path, "01_demo", SETUP, SQUARE)
    promote.main([], tmp_path)
    text, time = module.read_text(), module.stat().st_mtime_ns
    capsys.readouterr()
    assert promote.main([], tmp_path) == 0 and promote.main(["--check"], tmp_path) == 0
    assert (module.read_text(), module.stat().st_mtime_ns) == (text, time)
    assert "written" not in capsys.readouterr().out


def test_a_changed_notebook_is_found_and_written(tmp_path, capsys):
    module = write(tmp_path, "01_demo", SETUP, SQUARE)
    promote.main([], tmp_path)
    old = module.read_text()
    write(tmp_path, "01_demo", SETUP, SQUARE.replace("x * x", "x**2"))
    assert promote.main(["--check"], tmp_path) == 1
    said = capsys.readouterr().out
    assert "kleinlite/demo.py differs from notebooks/01_demo.ipynb" in said and "make promote" in said
    assert module.read_text() == old, "--check writes nothing"
    assert promote.main([], tmp_path) == 0
    assert "x**2" in module.read_text() and promote.main(["--check"], tmp_path) == 0


def test_notebooks_without_marks_and_no_notebooks(tmp_path, capsys):
    write(tmp_path, "00_idea", "MD # Overview", "1 + 1")
    assert promote.main([], tmp_path) == 0 and not list((tmp_path / "kleinlite").iterdir())
    (tmp_path / "notebooks" / "00_idea.ipynb").unlink()
    assert promote.main(["--check"], tmp_path) == 0
    (tmp_path / "notebooks").rmdir()
    assert "in a clone of the repository" in refusal(tmp_path, capsys)


def test_lines_are_counted_room_by_room(tmp_path, capsys):
    write(tmp_path, "01_demo", SETUP, SQUARE)
    promote.main([], tmp_path)
    (tmp_path / "kleinlite" / "room").mkdir()
    (tmp_path / "kleinlite" / "room" / "hand.py").write_text('"""By hand."""\n\nX = 1\n')
    capsys.readouterr()
    assert not promote.main(["--lines"], tmp_path)
    above, whole, room = (line.split() for line in capsys.readouterr().out.splitlines())
    assert above[-2:] == ["100%", "promoted"] and room == ["room", "3", "lines,", "0%", "promoted"]
    assert int(whole[1]) == int(above[2]) + 3


def test_diff(tmp_path, capsys):
    write(tmp_path, "01_demo", SETUP, SQUARE)
    promote.main([], tmp_path)
    capsys.readouterr()
    promote.diff("01_demo", tmp_path)
    assert capsys.readouterr().out == "kleinlite/demo.py is up to date.\n"
    write(tmp_path, "01_demo", SETUP, SQUARE.replace("x * x", "x**2"))
    for name in ("01_demo", "demo", "notebooks/01_demo.ipynb"):
        promote.diff(name, tmp_path)
        lines = capsys.readouterr().out.splitlines()
        changes = [line for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")]
        assert changes == ["-    return x * x  # (b, n)", "+    return x**2  # (b, n)"]
    assert promote.main(["--diff", "missing"], tmp_path) == 2
    assert "missing promotes nothing" in capsys.readouterr().err


# What it refuses


def test_a_name_promoted_twice_in_one_notebook(tmp_path, capsys):
    write(tmp_path, "01_demo", SETUP, SQUARE, "2 + 2", "#| export\nsquare = 3")
    said = refusal(tmp_path, capsys)
    assert said == (
        "code cell 4 of notebooks/01_demo.ipynb promotes `square`, "
        "as does code cell 2 of notebooks/01_demo.ipynb: rename or unmark one."
    )


def test_a_name_promoted_by_two_notebooks(tmp_path, capsys):
    write(tmp_path, "01_demo", SETUP, SQUARE)
    write(tmp_path, "02_more", "#| default_exp more", SQUARE)
    said = refusal(tmp_path, capsys)
    assert "code cell 2 of notebooks/02_more.ipynb" in said and "code cell 2 of notebooks/01_demo.ipynb" in said


@pytest.mark.parametrize(
    "cell",
    [
        "print(1)",
        "x = mx.zeros(3)",
        "for i in range(3):\n    pass",
        "if True:\n    import os",
        "X.y = 3",
        "N += 1",
    ],
)
def test_code_that_does_something_when_imported(tmp_path, capsys, cell):
    write(tmp_path, "01_demo", SETUP, f"{SQUARE}\n\n\n{cell}")
    said = refusal(tmp_path, capsys)
    assert f"code cell 2 of notebooks/01_demo.ipynb has `{cell.splitlines()[0]}`" in said and "without the mark" in said


@pytest.mark.parametrize(
    "cell", ["A, B = 1, 2", "words = ('a', 'b')", "N: int = 3", "P = re.compile('x')", "'''Text.'''"]
)
def test_constants_are_allowed(tmp_path, cell):
    module = write(tmp_path, "01_demo", SETUP, f"#| export\n{cell}")
    assert promote.main([], tmp_path) == 0 and cell in module.read_text()


def test_a_definition_behind_an_import(tmp_path, capsys):
    """Imports move to the top as whole lines, so this one would be lost."""
    write(tmp_path, "01_demo", SETUP, "#| export\nimport math; TAU = 6.28")
    said = refusal(tmp_path, capsys)
    assert "code cell 2 of notebooks/01_demo.ipynb has an import and a definition in one line" in said


def test_magics(tmp_path, capsys):
    write(tmp_path, "01_demo", SETUP, "#| export\n%matplotlib inline")
    said = refusal(tmp_path, capsys)
    assert "code cell 2 of notebooks/01_demo.ipynb" in said and "not plain Python" in said


def test_a_module_edited_by_hand(tmp_path, capsys):
    module = write(tmp_path, "01_demo", SETUP, SQUARE)
    promote.main([], tmp_path)
    module.write_text(module.read_text().replace("x * x", "x**2"))
    said = refusal(tmp_path, capsys)
    assert "kleinlite/demo.py was edited by hand" in said
    assert "move the edit into the notebook, delete kleinlite/demo.py, and run `make promote`" in said
    edited = SQUARE.replace("x * x", "x**2")  # the way out, and a shortcut: the notebook already says the same
    write(tmp_path, "01_demo", SETUP, edited)
    assert promote.main([], tmp_path) == 0 and promote.main(["--check"], tmp_path) == 0


def test_a_module_written_by_hand(tmp_path, capsys):
    write(tmp_path, "01_demo", SETUP, SQUARE).write_text('"""By hand."""\n')
    assert "would overwrite the hand-written kleinlite/demo.py" in refusal(tmp_path, capsys)


def test_no_module_named(tmp_path, capsys):
    write(tmp_path, "01_demo", "import math", SQUARE)
    said = refusal(tmp_path, capsys)
    assert "code cell 2 of notebooks/01_demo.ipynb" in said and "#| default_exp name" in said


def test_two_notebooks_for_one_module(tmp_path, capsys):
    write(tmp_path, "01_demo", SETUP, SQUARE)
    write(tmp_path, "02_more", SETUP, "#| export\nONE = 1")
    said = refusal(tmp_path, capsys)
    assert "notebooks/02_more.ipynb promotes `kleinlite/demo.py`, as does notebooks/01_demo.ipynb" in said


def test_chapters_write_a_module_together(tmp_path, capsys):
    """Cells marked with a module's name go there, in the order of the chapters, beside the chapter's own module."""
    own = write(tmp_path, "01_demo", SETUP, SQUARE, "#| export book.ladder\nimport math\nONE = 1")
    write(tmp_path, "02_more", "import math", "#| export book.ladder\nfrom kleinlite.scenes import draw\nTWO = 2")
    (tmp_path / "kleinlite" / "book").mkdir()
    assert promote.main([], tmp_path) == 0
    text = (tmp_path / "kleinlite" / "book" / "ladder.py").read_text("utf-8")
    parts = ("import math", "from ..scenes import draw", "ONE = 1", "TWO = 2")
    assert sorted(parts, key=text.index) == list(parts)
    assert "Promoted from notebooks/01,02: edit there" in text
    assert "ONE" not in own.read_text("utf-8")
    capsys.readouterr()
    promote.diff("02_more", tmp_path)
    assert capsys.readouterr().out == "kleinlite/book/ladder.py is up to date.\n"
    write(tmp_path, "02_more", "import math", "#| export book.ladder\nONE = 2")
    assert "promotes `ONE`, as does code cell 3 of notebooks/01_demo.ipynb" in refusal(tmp_path, capsys)
    write(tmp_path, "01_demo", SETUP, SQUARE)
    write(tmp_path, "02_more", "import math")
    assert "kleinlite/book/ladder.py is no longer promoted by" in refusal(tmp_path, capsys)


@pytest.mark.parametrize("cell", ["# NBVAL_SKIP\n#| export\nONE = 1", "\n#| export\nONE = 1", "# | export\nONE = 1"])
def test_a_mark_that_would_be_overlooked(tmp_path, capsys, cell):
    write(tmp_path, "01_demo", SETUP, cell)
    assert "code cell 2 of notebooks/01_demo.ipynb has its mark in the wrong place" in refusal(tmp_path, capsys)


def test_a_module_whose_notebook_is_gone(tmp_path, capsys):
    write(tmp_path, "01_demo", SETUP, SQUARE)
    promote.main([], tmp_path)
    (tmp_path / "notebooks" / "01_demo.ipynb").unlink()
    assert "kleinlite/demo.py is no longer promoted by notebooks/01_demo.ipynb: delete it" in refusal(tmp_path, capsys)


def test_an_unreadable_notebook(tmp_path, capsys):
    write(tmp_path, "01_demo", SETUP, SQUARE)
    (tmp_path / "notebooks" / "01_demo.ipynb").write_text("<<<<<<< HEAD\n{}")
    assert "notebooks/01_demo.ipynb is not a readable notebook" in refusal(tmp_path, capsys)


# This repository


def test_lines_are_as_long_as_the_formatter_has_them():
    assert f"\nline-length = {promote.WIDTH}\n" in (ROOT / "pyproject.toml").read_text("utf-8")


def test_stored_outputs_say_that_the_package_is_what_the_book_says():
    chapters = [json.loads(path.read_text("utf-8")) for path in (ROOT / "notebooks").glob("*.ipynb")]
    cells = [cell for chapter in chapters for cell in chapter["cells"] if "promote.diff(" in "".join(cell["source"])]
    printed = ["".join(cell["outputs"][0]["text"]) for cell in cells]
    assert len(printed) > 14 and all(text.endswith(" is up to date.\n") for text in printed), printed


def test_promotion_needs_nothing_but_python():
    """Run as a plain file, isolated from every installed package."""
    command = [sys.executable, "-I", "-S", str(ROOT / "tools" / "promote.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
