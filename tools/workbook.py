"""The workbook: every chapter with the bodies of its most instructive functions taken out, and a check behind each.

    python -m tools.workbook write       workbook/01_autoencoder.ipynb, …; files that are there are kept
    python -m tools.workbook check 05    put the module that workbook/05_transformer.ipynb writes under the book's tests

Nothing is written twice: the holes are the names in `tools.holes`, the bodies stand in the chapters, and what
is right is what the promoted modules answer. Signature, docstring and the comments that tell shapes stay. Prose
beside a hole that has a formula or a piece of code folds into a hint.
"""

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tools import promote
from tools.first_cell import FIRST_CELL
from tools.holes import HOLES
from tools.notebooks import to_json

ROOT = Path(__file__).resolve().parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text("utf-8")
SITE = re.search(r'^Book = "(.+)"', PROJECT, re.M)[1]
REPOSITORY = re.search(r'^Repository = "(.+)"', PROJECT, re.M)[1]
EXPORT = re.compile(r"^#\| ?export *([a-z]\w*\.[a-z]\w*)?\s*$", re.M)  # a module's name, where it is not the chapter's
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s]+)\)")
SHAPE = re.compile(
    r"#\s*((?:[^()#]*: )?\([^()]*,[^()]*\).*)$"
)  # a comment that begins with a shape, or "words: (shape)"
GIVES_AWAY = re.compile(r"\$\$|`[^`\n]*[=+*/(][^`\n]*`|\$[^$\n]*=[^$\n]*\$")
UNDO = re.compile(r"`git checkout [^`]*`")  # which brings the chapter back
WAITING = "Your turn: "
TESTED = "`make check-mine CH={}` puts all of it under the book's own tests. "
DRAWN = ("autoencoder", "position_ids", "text_encoder", "sampling", "transformer", "pipeline")  # what a picture runs on
DRAW = """\
from tools.workbook_check import installed
from kleinlite.klein import Klein as Finished

with installed("{module}", globals()):
    picture = Finished.from_pretrained()("a red house under a yellow sun", seed=7, progress=False)
picture"""


def module_of(notebook: dict) -> str:
    """The module that a notebook writes, "" if none."""
    code = "\n".join("".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code")
    found = re.search(r"^#\| ?default_exp +(\w+)", code, re.M)
    return found[1] if found else ""


def holes_in(cell: dict, module: str) -> list[str]:
    """The holes of a cell of a chapter that writes this module: "sampling.noised"."""
    source = "".join(cell["source"])
    mark = EXPORT.search(source) if cell["cell_type"] == "code" else None
    if not mark:
        return []
    target = mark[1] or module
    tree = ast.parse(source)
    return [f"{target}.{hole}" for hole in HOLES.get(target, ()) if find_definition(tree, hole)]


def find_definition(tree: ast.Module, name: str) -> ast.FunctionDef | None:
    """The function `f`, or the method `C.f`, of a cell."""
    body: Iterable[ast.stmt] = tree.body
    node = None
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.ClassDef)
        node = next((n for n in body if isinstance(n, kinds) and n.name == part), None)
        body = node.body if node else ()
    return node


def body_lines(node: ast.FunctionDef) -> tuple[int, int]:
    """First and last line of what stands below the docstring, counted from 0, the last one not included."""
    first = node.body[0]
    if ast.get_docstring(node) is not None:
        return first.end_lineno, node.end_lineno
    return first.lineno - 1, node.end_lineno


def keep_shapes(node: ast.FunctionDef, lines: list[str]) -> list[str]:
    """The comments of a body that tell a shape, each with the name of what has it."""
    kept = []
    start, end = body_lines(node)
    for number in range(start, end):
        found = SHAPE.search(lines[number])
        if found:
            given = [n for n in ast.walk(node) if isinstance(n, ast.Assign) and n.end_lineno == number + 1]
            name = f"{ast.unparse(given[0].targets[0])}: " if given else ""
            kept.append(f"# {name}{found[1]}")
    return kept


def empty(source: str, holes: list[str]) -> str:
    """A cell whose holes have no bodies."""
    lines = source.split("\n")
    tree = ast.parse(source)
    found = [(name, node) for name in holes if (node := find_definition(tree, name))]
    for name, node in sorted(found, key=lambda pair: -pair[1].lineno):
        start, end = body_lines(node)
        indent = " " * (node.col_offset + 4)
        body = [*keep_shapes(node, lines), f'raise NotImplementedError("{WAITING}{name}")']
        lines[start:end] = [indent + line for line in body]
    return "\n".join(lines)


def fold_hints(prose: str) -> str:
    """Prose whose paragraphs with formulas or pieces of code are folded."""
    blocks = re.split(r"\n\s*\n(?![^<]*</details>)", prose.strip())
    done: list[str] = []
    folded: list[str] = []
    for block in [*blocks, ""]:
        if GIVES_AWAY.search(block) and not block.startswith(("#", "<details")):
            folded.append(block)
            continue
        if folded:
            done.append("\n\n".join(["<details>\n<summary>Hint</summary>", *folded, "</details>"]))
        folded = []
        done.append(block)
    return "\n\n".join(block for block in done if block)


def prose_beside(cells: list[dict], place: int) -> set[int]:
    """The places of the prose before a cell, over at most two cells of code, and of the prose right behind it."""
    before = next((i for i in range(place - 1, max(place - 4, 0), -1) if cells[i]["cell_type"] == "markdown"), None)
    behind = place + 1 if cells[place + 1]["cell_type"] == "markdown" else None
    return {i for i in (before, behind) if i is not None}


def make_workbook(notebook: dict, name: str) -> dict:
    """A chapter, as read from its file, with holes; name: "04_sampling"."""
    module = module_of(notebook)
    cells = notebook["cells"]
    here = {i: found for i, cell in enumerate(cells) if (found := holes_in(cell, module))}
    hints = set().union(*(prose_beside(cells, i) for i in here))
    made: list[dict] = []
    for i, cell in enumerate(cells):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            source = UNDO.sub("deleting this file, then `make workbook`,", source)
            source = link_to_site(source)
            made.append({**cell, "source": lines_of(fold_hints(source) if i in hints else source)})
            if i == 0:
                made.append(new_cell("markdown", "how-to", introduce(name, sum(here.values(), []))))
                made.append(new_cell("code", "first-cell", FIRST_CELL))
            continue
        if cell["id"] == "first-cell":  # it stands above already
            continue
        if "promote.diff(" in source:  # a workbook is tried, not promoted
            if module in DRAWN:
                made.append(new_cell("markdown", "draw-it", "A picture that klein-nano draws by what you wrote above:"))
                made.append(new_cell("code", "draw-mine", DRAW.format(module=module)))
            continue
        holes = here.get(i, [])
        source = empty(source, [name_in_cell(hole) for hole in holes]) if holes else source
        made.append({**cell, "source": lines_of(source), "outputs": [], "execution_count": None})
        if not any(c["id"] == "check" for c in made):
            made.append(new_cell("code", "check", "from tools.workbook_check import check"))
        if holes:
            checks = "\n".join(f'check("{hole}", globals())' for hole in holes)
            made.append(new_cell("code", f"check-{i}", checks))
    return {**notebook, "cells": made}


def link_to_site(source: str) -> str:
    """Prose of a chapter that is read elsewhere: its relative links lead to the site, or to the code on GitHub."""

    def lead(link: re.Match) -> str:
        if link[1].startswith("../"):
            return f"]({REPOSITORY}/blob/main/{link[1].removeprefix('../')})"
        return f"]({SITE}{re.sub('[.](ipynb|md)', '.html', link[1])})"

    return LINK.sub(lead, source)


def name_in_cell(hole: str) -> str:
    """sampling.noised → noised, transformer.SwiGLU.__call__ → SwiGLU.__call__"""
    module = next(module for module in HOLES if hole.startswith(f"{module}."))
    return hole.removeprefix(f"{module}.")


def lines_of(source: str) -> list[str]:
    return source.splitlines(keepends=True)


def new_cell(kind: str, name: str, source: str) -> dict:
    more = {"outputs": [], "execution_count": None} if kind == "code" else {}
    return {"cell_type": kind, "id": name, "metadata": {}, "source": lines_of(source), **more}


def introduce(name: str, holes: list[str]) -> str:
    """What a reader has to know, at the top of a chapter."""
    listed = ", ".join(f"`{name_in_cell(hole)}`" for hole in holes)
    return (
        f"> **Workbook.** In this copy of [the chapter]({SITE}{name}.html) you write {len(holes)} bodies yourself: "
        f"{listed}. Each raises `NotImplementedError` until you do. The cell behind it then says ✓, or what differs. "
        "What gives an answer away is folded into a *Hint*. Later cells run on what you wrote. "
        f"{TESTED.format(name[:2]) if int(name[:2]) else ''}([How to work through this book]({SITE}workbook.html))"
    )


def has_holes(notebook: dict) -> bool:
    """Whether a chapter leaves something to write."""
    return any(holes_in(cell, module_of(notebook)) for cell in notebook["cells"])


def make_all(root: Path = ROOT) -> dict[str, str]:
    """The workbook of each chapter that has holes, as a file's text, by its name."""
    found = {}
    for path in sorted((root / "notebooks").glob("[0-9]*.ipynb")):
        notebook = json.loads(path.read_text("utf-8"))
        if has_holes(notebook):
            found[path.name] = to_json(make_workbook(notebook, path.stem))
    return found


def write(root: Path = ROOT) -> None:
    """Write all chapters into workbook/, beside the data that they read. A reader's file is never touched."""
    folder = root / "workbook"
    folder.mkdir(exist_ok=True)
    for data in (root / "notebooks").glob("*.json"):
        shutil.copyfile(data, folder / data.name)
    for name, text in make_all(root).items():
        path = folder / name
        if path.exists():
            print(f"workbook/{name} is there already and stays as it is: delete it for a fresh one.")
        else:
            path.write_text(text, "utf-8", newline="\n")
            print(f"workbook/{name}")
    print("`make lab` shows them, in the folder workbook.")


def write_downloads(folder: Path, notebooks: dict[str, dict]) -> set[str]:
    """The site's copies; returns the pages that have one. notebooks: by path, "04_sampling.ipynb"."""
    found = set()
    for name, notebook in notebooks.items():
        if has_holes(notebook):
            text = to_json(make_workbook(notebook, Path(name).stem))
            path = folder / name
            if not path.exists() or path.read_text("utf-8") != text:  # else `mdbook serve` would build for ever
                folder.mkdir(parents=True, exist_ok=True)
                path.write_text(text, "utf-8", newline="\n")
            found.add(name)
    return found


# ---------------------------------------------------------------- the book's tests on the reader's module


def find_mine(chapter: str, root: Path = ROOT) -> Path:
    """The reader's notebook of a chapter: 5, 05 or 05_transformer."""
    number = chapter.zfill(2) if chapter.isdecimal() else chapter
    made = sorted((root / "workbook").glob("*.ipynb"))
    found = [path for path in made if number in (path.stem, path.stem[:2])]
    if not found:
        there = f"there are {', '.join(path.stem[:2] for path in made)}" if made else "run `make workbook` first"
        raise SystemExit(f"There is no workbook of chapter {chapter or '…'}: {there}.")
    return found[0]


def list_empty(notebook: dict) -> list[str]:
    """The holes that nobody has filled."""
    code = "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    return re.findall(rf'^\s*raise NotImplementedError\("{WAITING}([\w.]+)"\)', code, re.M)


def link_or_copy(source: Path, place: Path) -> None:
    """Windows refuses links to most users."""
    try:
        place.symlink_to(source)
    except OSError:
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, place)


def make_copy(folder: Path, module: promote.Module, root: Path = ROOT) -> None:
    """The repository in a folder of its own, where one module is the reader's; weights and notebooks are links."""
    for name in ("pyproject.toml", "notebooks", "tools", "site", "benchmarks", "Makefile", "README.md"):
        link_or_copy(root / name, folder / name)
    shutil.copytree(root / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(root / "kleinlite", folder / "kleinlite", ignore=shutil.ignore_patterns("__pycache__", "weights"))
    for model in ("nano", "critters"):
        weights = Path("kleinlite") / model / "weights"
        link_or_copy(root / weights, folder / weights)
    (folder / module.path).write_text(module.text, "utf-8")


def read_mine(chapter: str, root: Path = ROOT) -> tuple[Path, promote.Module]:
    """The reader's notebook of a chapter, and the module that it writes.

    Raises SystemExit with a sentence where there is none yet.
    """
    path = find_mine(chapter, root)
    notebook = json.loads(path.read_text("utf-8"))
    name = module_of(notebook)
    if not name:
        raise SystemExit(
            f"workbook/{path.name} writes no module of its own, so that its check cells are all its tests."
        )
    if waiting := list_empty(notebook):
        raise SystemExit(f"workbook/{path.name} still waits for {', '.join(waiting)}: write them first.")
    try:
        return path, next(m for m in promote.build_modules([path]) if m.path == f"kleinlite/{name}.py")
    except promote.PromotionError as refusal:
        raise SystemExit(str(refusal).replace("notebooks/", "workbook/")) from None


@contextmanager
def repository_with(module: promote.Module, root: Path = ROOT) -> Iterator[Path]:
    """A copy of the repository in which one module is the reader's, for as long as the context lasts."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(os.path.realpath(made))
        make_copy(folder, module, root)
        yield folder


def run_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Python, on the package of a copy of the repository."""
    variables = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=variables, capture_output=True, text=True)


def run_tests(folder: Path, name: str) -> subprocess.CompletedProcess:
    """The book's tests of a module."""
    tests = [f"tests/{file.name}" for file in sorted((folder / "tests").glob(f"test_{name}*.py"))]
    return run_in(
        folder, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", *tests, "tests/test_parity_blocks.py",
        "-k", f"test_{name}",
    )  # fmt: skip


def check_mine(chapter: str, root: Path = ROOT) -> int:
    """Run the book's tests of a chapter on what the reader wrote; returns the exit status."""
    path, module = read_mine(chapter, root)
    name = Path(module.path).stem
    with repository_with(module, root) as folder:
        print(f"The book's tests try your {name}: seconds, or a few minutes.", flush=True)
        done = run_tests(folder, name)
        print(done.stdout.replace(f"{folder}{os.sep}", "") + done.stderr)  # the folder is gone when this is read
    verdict = "passes" if done.returncode == 0 else "does not yet pass"
    print(f"Your {name}, from workbook/{path.name}, {verdict} the book's tests.")
    return done.returncode


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the workbook, or test what a reader wrote in it.")
    parser.add_argument("action", choices=["write", "check"])
    parser.add_argument("chapter", nargs="?", default="", help="with check: 5, 05 or 05_transformer")
    options = parser.parse_args(argv)
    if options.action == "check":
        return check_mine(options.chapter)
    try:
        write()
        sys.stdout.flush()
    except BrokenPipeError:  # `make workbook | head`: what Python flushes at its end goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
