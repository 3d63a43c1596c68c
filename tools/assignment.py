"""A chapter's workbook as an assignment with points, for nbgrader or for Otter-Grader, which hand it out and grade it.

    python -m tools.assignment 05             assignments/source/05_transformer/05_transformer.ipynb, for nbgrader
    python -m tools.assignment 05 otter       assignments/otter/05_transformer.ipynb, for `otter assign`

It ends with its last hole. Each hole has the book's body between the marks that the two programs cut out, and a test
with a point for each line of that body. A test tries one function alone, as the workbook's lights do, so that a mistake
never costs the points of another hole.
"""

import argparse
import ast
import json
from pathlib import Path

from tools import workbook
from tools.notebooks import ROOT, to_json

TEST = """\
from tools.workbook_check import find_mistake

mistake = find_mistake("{module}", "{name}", globals())
assert mistake is None, mistake"""


def mark_bodies(source: str, names: list[str], begin: str, end: str) -> tuple[str, dict[str, int]]:
    """A cell whose holes stand between two marks, behind the shapes that a workbook keeps; and each body's lines."""
    lines = source.split("\n")
    tree = ast.parse(source)
    found = [(name, node) for name in names if (node := workbook.find_definition(tree, name))]
    points = {}
    for name, node in sorted(found, key=lambda pair: -pair[1].lineno):
        first, last = workbook.body_lines(node)
        body = lines[first:last]
        indent = " " * (node.col_offset + 4)
        shapes = workbook.keep_shapes(node, lines)
        points[name] = sum(bool(line.strip()) and not line.strip().startswith("#") for line in body)
        lines[first:last] = [*(indent + line for line in [*shapes, begin]), *body, indent + end]
    return "\n".join(lines), points


def cut_behind_the_last_hole(notebook: dict, name: str) -> list[dict]:
    """The cells of a chapter's workbook up to the last one with a hole; what fetches the book is left out."""
    cells = workbook.make_workbook(notebook, name)["cells"]
    last = max(i for i, cell in enumerate(cells) if cell["id"].startswith("check-"))
    return [cell for cell in cells[:last] if cell["id"] not in ("first-cell", "check")]


def make_assignment(notebook: dict, name: str, program: str) -> dict:
    """The notebook that a lecturer gives to nbgrader or to Otter; name: "05_transformer"."""
    module = workbook.module_of(notebook)
    chapter = {cell["id"]: cell for cell in notebook["cells"]}
    begin, end = (
        ("### BEGIN SOLUTION", "### END SOLUTION") if program == "nbgrader" else ("# BEGIN SOLUTION", "# END SOLUTION")
    )
    made = [] if program == "nbgrader" else [raw("config", f"# ASSIGNMENT CONFIG\nname: {name}\nexport_cell: false")]
    for cell in cut_behind_the_last_hole(notebook, name):
        holes = workbook.holes_in(chapter.get(cell["id"], cell), module)
        if cell["id"].startswith("check-"):
            continue
        if not holes:
            made.append(cell)
            continue
        names = {workbook.name_in_cell(hole): hole for hole in holes}
        source, points = mark_bodies("".join(chapter[cell["id"]]["source"]), list(names), begin, end)
        body = {**cell, "source": workbook.lines_of(source)}
        tests = [(hole, points[name], test_of(hole)) for name, hole in names.items()]
        made += (for_nbgrader if program == "nbgrader" else for_otter)(body, tests)
    return {**notebook, "cells": made}


def test_of(hole: str) -> str:
    name = workbook.name_in_cell(hole)
    return TEST.format(module=hole.removesuffix(f".{name}"), name=name)


def raw(name: str, source: str) -> dict:
    return {"cell_type": "raw", "id": name, "metadata": {}, "source": workbook.lines_of(source)}


def for_nbgrader(body: dict, tests: list[tuple[str, int, str]]) -> list[dict]:
    """The cell of a hole and its tests, with the metadata of nbgrader's cells."""

    def about(name: str, **kind: bool | int) -> dict:
        every = {
            "schema_version": 3,
            "grade_id": name,
            "task": False,
            "grade": False,
            "solution": False,
            "locked": False,
        }
        return {"nbgrader": every | kind}

    made = [{**body, "metadata": body["metadata"] | about(body["id"], solution=True)}]
    for hole, points, test in tests:
        name = f"test-{hole.replace('.', '-')}"  # nbgrader allows no dots
        grade = about(name, grade=True, locked=True, points=points)
        made.append({**workbook.new_cell("code", name, test), "metadata": grade})
    return made


def for_otter(body: dict, tests: list[tuple[str, int, str]]) -> list[dict]:
    """A question in Otter's raw cells."""
    name = body["id"]
    total = sum(points for _, points, _ in tests)
    made = [
        raw(f"{name}-question", f"# BEGIN QUESTION\nname: {tests[0][0].replace('.', '_')}\npoints: {total}"),
        raw(f"{name}-solution", "# BEGIN SOLUTION"),
        body,
        raw(f"{name}-solved", "# END SOLUTION"),
        raw(f"{name}-tests", "# BEGIN TESTS"),
    ]
    for hole, points, test in tests:
        config = f'""" # BEGIN TEST CONFIG\npoints: {points}\n""" # END TEST CONFIG\n'
        made.append(workbook.new_cell("code", f"{name}-{hole.replace('.', '-')}", config + test))
    return [*made, raw(f"{name}-tested", "# END TESTS"), raw(f"{name}-answered", "# END QUESTION")]


def main(argv: list[str] | None = None, root: Path = ROOT) -> None:
    parser = argparse.ArgumentParser(description="Write a chapter's workbook as an assignment with points.")
    parser.add_argument("chapter", help="5, 05 or 05_transformer")
    parser.add_argument("program", nargs="?", choices=["nbgrader", "otter"], default="nbgrader")
    options = parser.parse_args(argv)
    number = options.chapter.zfill(2) if options.chapter.isdecimal() else options.chapter
    found = [path for path in sorted(root.glob("notebooks/[0-9]*.ipynb")) if number in (path.stem, path.stem[:2])]
    if not found:
        raise SystemExit(f"There is no chapter {options.chapter}: choose one from 0 to 18.")
    (chapter,) = found
    notebook = json.loads(chapter.read_text("utf-8"))
    if not workbook.has_holes(notebook):
        raise SystemExit(f"{chapter.stem} has no holes: choose another chapter.")
    notebook = make_assignment(notebook, chapter.stem, options.program)
    place = "otter" if options.program == "otter" else f"source/{chapter.stem}"
    path = root / "assignments" / place / chapter.name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_json(notebook), "utf-8", newline="\n")
    print(f"{path.relative_to(root)}")


if __name__ == "__main__":
    main()
