"""Assignments: each hole can be cut out by nbgrader and by Otter, and its points hang on its own function alone."""

import json
import re

import pytest

from tools import workbook
from tools.assignment import make_assignment
from tools.holes import HOLES

CHAPTERS = [workbook.ROOT / "notebooks" / name for name in workbook.make_all()]


def make(path, program: str) -> list[dict]:
    return make_assignment(json.loads(path.read_text("utf-8")), path.stem, program)["cells"]


def source(cell: dict) -> str:
    return "".join(cell["source"])


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_nbgrader_can_read_every_assignment(path):
    """By the rules of its own format 3: names without dots, each once; what is graded has points and is locked."""
    cells = make(path, "nbgrader")
    about = [cell["metadata"]["nbgrader"] for cell in cells if "nbgrader" in cell["metadata"]]
    names = [one["grade_id"] for one in about]
    assert len(set(names)) == len(names) and all(re.fullmatch(r"[\w-]+", name) for name in names)
    assert all(one["locked"] and one["points"] > 0 for one in about if one["grade"])
    module = workbook.module_of({"cells": cells}) or "book.ladder"
    tested = re.findall(r'find_mistake\("([\w.]+)", "([\w.]+)"', "".join(map(source, cells)))
    assert sorted(name for part, name in tested if part == module) == sorted(HOLES.get(module, []))
    assert "nbgrader" in cells[-1]["metadata"], "it ends with its last hole"


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_what_is_cut_out_is_the_workbooks_hole(path):
    cells = make(path, "nbgrader")
    holes = {
        cell["id"]: source(cell)
        for cell in workbook.make_workbook(json.loads(path.read_text("utf-8")), path.stem)["cells"]
    }
    for cell in cells:
        if cell["metadata"].get("nbgrader", {}).get("solution"):
            cut = re.sub(r"### BEGIN SOLUTION\n.*?### END SOLUTION", "…", source(cell), flags=re.S)
            assert cut == re.sub(r'raise NotImplementedError\("Your turn: [\w.]+"\)', "…", holes[cell["id"]])


@pytest.mark.parametrize(
    ("right", "wrong", "loses"), [("", "", []), ("(t_next - t) * v", "(t - t_next) * v", ["euler"])]
)
def test_a_mistake_costs_its_own_points(right, wrong, loses):
    names: dict = {"__name__": "__main__"}
    lost = []
    for cell in make(CHAPTERS[4], "nbgrader"):
        about = cell["metadata"].get("nbgrader", {})
        if about.get("solution") or "#| export" in source(cell):
            exec(source(cell).replace(right, wrong) if right else source(cell), names)
        elif about.get("grade"):
            try:
                exec(source(cell), names)
            except AssertionError:
                lost.append(about["grade_id"].removeprefix("test-sampling-"))
    assert lost == loses


def test_otters_raw_cells_open_and_close():
    cells = make(CHAPTERS[5], "otter")
    marks = [source(cell).split("\n")[0] for cell in cells if cell["cell_type"] == "raw"]
    question = [
        "# BEGIN QUESTION",
        "# BEGIN SOLUTION",
        "# END SOLUTION",
        "# BEGIN TESTS",
        "# END TESTS",
        "# END QUESTION",
    ]
    assert marks == ["# ASSIGNMENT CONFIG", *question * (len(marks) // 6)] and len(marks) > 40
