"""How much do the tests notice? Two hundred small faults, planted one at a time in the hand-written rooms.

    python -m tools.mutants map          run every test once and note which lines it runs, in .mutants/
    python -m tools.mutants              plant the faults in copies of the last commit, and count who catches them
    python -m tools.mutants --count 20   fewer of them

A fault is a comparison turned, a constant changed or a line left out; a seed chooses them. Against each run the tests
that run its line, the quick tier first, the fastest first, until one fails. Both tiers meet the same faults, so what
the quick tier misses and all tests catch is the price of being quick.
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
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple

import coverage

ROOT = Path(__file__).resolve().parents[1]
NOTES = ROOT / ".mutants"
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
        faults.append(Fault(path.relative_to(ROOT).as_posix(), line, kind, code))
    return faults


def run_pytest(where: Path, *options: str, seconds: float | None = None) -> int:
    """pytest in a copy of the repository; its exit status, 1 if it does not end."""
    environment = {**os.environ, "PYTHONPATH": str(where), "OPENBLAS_NUM_THREADS": "1", "MLX_ENABLE_TF32": "0"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    try:
        return subprocess.run(command, cwd=where, env=environment, capture_output=True, timeout=seconds).returncode
    except subprocess.TimeoutExpired:
        return 1


def write_map() -> None:
    """Run all tests, and store what each runs, how long it takes and which tier it is in."""
    NOTES.mkdir(exist_ok=True)
    report = NOTES / "tests.json"
    report.unlink(missing_ok=True)
    options = ["-n", "2", "--dist", "loadfile", "-p", "tools.mutants", "--cov=kleinlite", "--cov-context=test"]
    os.environ |= {"COVERAGE_FILE": str(NOTES / "coverage"), "KLEINLITE_TESTS": str(report)}
    run_pytest(ROOT, *options, "--cov-report=")


def pytest_runtest_logreport(report) -> None:
    """As a plugin of the run for the map: a line for each test that passed."""
    if report.when == "call" and report.passed and not os.environ.get("PYTEST_XDIST_WORKER"):
        row = [report.nodeid, report.duration, "slow" in report.keywords]
        with open(os.environ["KLEINLITE_TESTS"], "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


class Map(NamedTuple):
    """For each test its seconds and whether it is slow; for each line the tests that run it."""

    tests: dict[str, tuple[float, bool]]
    lines: dict[str, dict[int, set[str]]]

    def against(self, fault: Fault, slow: bool) -> list[str]:
        """The tests of a tier that run a line, the fastest first; those of its module where it runs at import."""
        lines = self.lines.get(fault.path, {})
        names = lines.get(fault.line, set())
        if not names:
            names = set().union(*lines.values()) if lines else set()
        rows = {name: self.tests[name] for name in names if name in self.tests}
        known = sorted((seconds, name) for name, (seconds, is_slow) in rows.items() if is_slow == slow)
        chosen: list[str] = []
        spent = 0.0
        for seconds, name in known:
            spent += seconds
            if spent <= SECONDS or not chosen:
                chosen.append(name)
        return chosen


def read_map() -> Map:
    """What `map` has stored."""
    rows = [json.loads(line) for line in (NOTES / "tests.json").read_text("utf-8").splitlines()]
    data = coverage.CoverageData(str(NOTES / "coverage"))
    data.read()
    lines: dict[str, dict[int, set[str]]] = {}
    for file in data.measured_files():
        by_line = data.contexts_by_lineno(file)
        names = {line: {c.partition("|")[0] for c in contexts if c} for line, contexts in by_line.items()}
        lines[Path(file).relative_to(ROOT).as_posix()] = names
    return Map({name: (seconds, slow) for name, seconds, slow in rows}, lines)


def catches(where: Path, tests: list[str]) -> bool:
    """Whether one of these tests fails."""
    if not tests:
        return False
    names = where / "names"
    names.write_text("\n".join(tests), "utf-8")
    return run_pytest(where, "-x", f"@{names}", seconds=HANGS) != 0


def judge(fault: Fault, known: Map, copies: Queue) -> str:
    """Which tier catches it: "quick", "all" or "none"."""
    where = copies.get()
    file = where / fault.path
    right = file.read_text("utf-8")
    try:
        file.write_text(fault.code, "utf-8")
        if catches(where, known.against(fault, slow=False)):
            return "quick"
        return "all" if catches(where, known.against(fault, slow=True)) else "none"
    finally:
        file.write_text(right, "utf-8")
        copies.put(where)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", nargs="?", choices=["map"], help="run every test once, first")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.what or not (NOTES / "tests.json").exists():
        write_map()
    if options.what:
        return
    known = read_map()
    faults = plant(options.count, options.seed)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        copies: Queue = Queue()
        for name in ("one", "other"):
            where = Path(folder) / name
            subprocess.run(["git", "clone", "-q", str(ROOT), str(where)], check=True)
            copies.put(where)
        verdicts = pool.map(lambda fault: judge(fault, known, copies), faults)
        caught: Counter = Counter()
        for fault, verdict in zip(faults, verdicts):
            caught[verdict] += 1
            print(f"{verdict:6} {fault}", flush=True)
    quick = caught["quick"]
    print(f"of {len(faults)} faults the quick tier catches {quick}, all tests {quick + caught['all']}")


if __name__ == "__main__":
    main()
