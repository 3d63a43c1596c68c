"""How much do the tests notice? Two hundred small faults, planted one at a time in the hand-written rooms.

    python -m tools.mutants              plant them in copies of the last commit, and count what nobody notices
    python -m tools.mutants --count 20   fewer of them

A fault is a comparison turned, a constant changed or a line left out; a seed chooses them. The quick tests run once in
a copy that notes which of them come by which fault. Then each fault meets the tests that came by, forty seconds of
them at most, until one fails. What they all let pass meets the slow tests in the same way.
"""

import argparse
import ast
import copy
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TIERS = {"quick": "not slow", "slow": "slow"}  # and how pytest is told
SECONDS = 40  # of tests against one fault, in each tier
HANGS = 300  # seconds without an end: the fault is caught, for nobody would wait longer
TURNED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip


class Fault(NamedTuple):
    """One change of one line."""

    path: str
    line: int
    kind: str
    number: int  # of the changed node, in the order of ast.walk
    code: str  # of the whole module, with the fault in it

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.kind}"


def hand_written() -> list[Path]:
    """The modules that no notebook writes."""
    modules = sorted((ROOT / "kleinlite").rglob("*.py"))
    return [path for path in modules if "\nPromoted from notebooks/" not in path.read_text("utf-8")]


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What can be wrong with one node."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in TURNED:
        turned = copy.deepcopy(node)
        turned.ops[0] = TURNED[type(node.ops[0])]()
        yield "comparison", turned
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        value = not node.value if isinstance(node.value, bool) else node.value + 1
        yield "constant", ast.copy_location(ast.Constant(value), node)
    if isinstance(node, ast.Assign | ast.AugAssign | ast.Raise) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield "line", ast.copy_location(ast.Pass(), node)


class Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST):
        self.old = old
        self.new = new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


def plant(count: int, seed: int) -> list[Fault]:
    """So many faults, a third of each kind."""
    found: dict[str, list[tuple[Path, int, int]]] = {"comparison": [], "constant": [], "line": []}
    for path in hand_written():
        tree = ast.parse(path.read_text("utf-8"))
        for number, node in enumerate(ast.walk(tree)):
            for kind, _ in changes(node):
                found[kind].append((path, number, node.lineno))
    rng = random.Random(seed)
    faults = []
    for i in range(count):
        kind = list(found)[i % len(found)]
        path, number, line = found[kind].pop(rng.randrange(len(found[kind])))
        tree = ast.parse(path.read_text("utf-8"))
        node = list(ast.walk(tree))[number]
        new = dict(changes(node))[kind]
        code = ast.unparse(ast.fix_missing_locations(Replace(node, new).visit(tree)))
        faults.append(Fault(path.relative_to(ROOT).as_posix(), line, kind, number, code))
    return faults


def run_pytest(where: Path, *options: str, seconds: float | None = None) -> int:
    """pytest in a copy of the repository; its exit status, 1 if it does not end."""
    environment = {**os.environ, "PYTHONPATH": str(where), "OPENBLAS_NUM_THREADS": "1", "MLX_ENABLE_TF32": "0"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    try:
        return subprocess.run(command, cwd=where, env=environment, capture_output=True, timeout=seconds).returncode
    except subprocess.TimeoutExpired:
        return 1


NOTED = """
import os

known = set()


def note(place):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if test and (test, place) not in known:
        known.add((test, place))
        with open({file!r}, "a", encoding="utf-8") as file:
            file.write(test + "\\t" + place + "\\n")
"""


def note(place: str) -> ast.stmt:
    """A statement that notes that the test of the moment has come by."""
    return ast.parse(f"__import__('kleinlite.noted', fromlist=['note']).note({place!r})").body[0]


def with_notes(code: str, path: str, faults: list[Fault]) -> str:
    """A module that notes who enters its functions, and who comes by a statement that a fault would change."""
    tree = ast.parse(code)
    nodes = list(ast.walk(tree))
    above = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
    noted = defaultdict(list)
    for fault in faults:
        node = nodes[fault.number]
        while not isinstance(node, ast.stmt):
            node = above[node]
        if type(above[node]) not in (ast.Module, ast.ClassDef):  # these run at import, for all tests of the module
            noted[node].append(str(fault))
    for node in nodes:
        for _, body in ast.iter_fields(node):
            if isinstance(body, list):
                body[:] = [new for old in body for new in (*map(note, noted.get(old, ())), old)]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body.insert(int(ast.get_docstring(node) is not None), note(path))
    return ast.unparse(ast.fix_missing_locations(tree))


class Watched(NamedTuple):
    """The seconds of each test that passed, and the tests that came by a fault or a module.

    First stand the tests that come by little else: they are about this. Then the fastest.
    """

    seconds: dict[str, float]
    came_by: dict[str, set[str]]

    def against(self, fault: Fault) -> list[str]:
        """The tests that a fault has to pass, in their order; those of its module where it runs at import."""
        names = self.came_by.get(str(fault)) or self.came_by.get(fault.path, set())
        chosen: list[str] = []
        spent = 0.0
        for name in (name for name in self.seconds if name in names):
            spent += self.seconds[name]
            if spent <= SECONDS or not chosen:
                chosen.append(name)
        return chosen


def clone(where: Path) -> Path:
    """A copy of the last commit."""
    subprocess.run(["git", "clone", "-q", str(ROOT), str(where)], check=True)
    return where


def watch(tier: str, faults: list[Fault]) -> Watched:
    """Run a tier's tests in a copy that takes notes. Tests that fail in it are left out: faults are not why."""
    with tempfile.TemporaryDirectory() as folder:
        where = clone(Path(folder) / "watched")
        notes = Path(folder) / "notes"
        tests = Path(folder) / "tests"
        for module in hand_written():
            path = module.relative_to(ROOT).as_posix()
            code = with_notes(module.read_text("utf-8"), path, [fault for fault in faults if fault.path == path])
            (where / path).write_text(code, "utf-8")
        (where / "kleinlite/noted.py").write_text(NOTED.format(file=str(notes)), "utf-8")
        os.environ["KLEINLITE_TESTS"] = str(tests)
        run_pytest(where, "-n", "2", "--dist", "loadfile", "-m", TIERS[tier], "-p", "tools.mutants")
        came_by = defaultdict(set)
        for line in notes.read_text("utf-8").splitlines():
            name, _, place = line.rpartition("\t")
            came_by[place].add(name)
        visits = Counter(name for names in came_by.values() for name in names)
        rows = map(json.loads, tests.read_text("utf-8").splitlines())
        return Watched(dict(sorted(rows, key=lambda row: (visits[row[0]], row[1]))), came_by)


def pytest_runtest_logreport(report) -> None:
    """As a plugin of a watched run: a line for each test that passed."""
    if report.when == "call" and report.passed and not os.environ.get("PYTEST_XDIST_WORKER"):
        with open(os.environ["KLEINLITE_TESTS"], "a", encoding="utf-8") as file:
            file.write(json.dumps([report.nodeid, report.duration]) + "\n")


def passes(fault: Fault, tests: list[str], copies: Queue) -> bool:
    """Whether a fault passes the tests unnoticed."""
    if not tests:
        return True
    where = copies.get()
    file = where / fault.path
    right = file.read_text("utf-8")
    names = where / "names"
    names.write_text("\n".join(tests), "utf-8")
    try:
        file.write_text(fault.code, "utf-8")
        return run_pytest(where, "-x", f"@{names}", seconds=HANGS) == 0
    finally:
        file.write_text(right, "utf-8")
        copies.put(where)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    left = plant(options.count, options.seed)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        copies: Queue = Queue()
        for name in ("one", "other"):
            copies.put(clone(Path(folder) / name))
        for tier in TIERS:
            watched = watch(tier, left)
            passing = pool.map(lambda fault, w=watched: passes(fault, w.against(fault), copies), left)
            unnoticed = []
            for fault, passed in zip(left, passing):
                if passed:
                    unnoticed.append(fault)
                    print(fault, flush=True)
            left = unnoticed
            print(f"of {options.count} faults {len(left)} pass the {tier} tests too", flush=True)


if __name__ == "__main__":
    main()
