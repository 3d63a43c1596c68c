"""Promotion writes the package from the book: notebooks/01_autoencoder.ipynb → kleinlite/autoencoder.py.

A code cell of a notebook names the module (`#| default_exp autoencoder`), and each cell after it that begins with
`#| export` goes into it. What comes out should read like a file somebody wrote: a docstring, the imports
together, then the definitions in the order in which the chapter builds them. A cell that begins with
`#| export book.ladder` goes into kleinlite/book/ladder.py, which several chapters write together.

    python -m tools.promote                        write the modules that changed, and say which
    python -m tools.promote --check                write nothing; exit 1 if a module is out of date
    python -m tools.promote --diff 01_autoencoder  show what promoting would change
    python -m tools.promote --lines                count the package's lines, room by room

Code that is copied from a book into a package drifts, unless something holds the two together. Here that is a
handful of rules; one that is broken is refused in a sentence, exit status 2, before anything is written.
Standard library only, so that a package broken by a bad edit can still be promoted back to health.
"""

import argparse
import ast
import difflib
import hashlib
import json
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 120  # the formatter's line length in pyproject.toml
TRAILER = "Promoted from {}: edit there, then run `make promote`. (seal {})"
SEALED = re.compile("^" + re.escape(TRAILER).replace(r"\{\}", r"(\S+)") + "$", re.M)
DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
IMPORT = (ast.Import, ast.ImportFrom)


class PromotionError(Exception):
    """A broken rule, as one sentence: PromotionError(where, what is wrong, the way out)."""

    def __str__(self) -> str:
        return "{} {}: {}.".format(*self.args)


class Module(NamedTuple):
    notebook: str  # notebooks/01_autoencoder.ipynb
    path: str  # kleinlite/autoencoder.py
    text: str  # what the notebook says the module should be
    names: list[tuple[str, str]]  # each promoted name and the cell that promotes it


class Cell(NamedTuple):
    where: str  # code cell 7 of notebooks/01_autoencoder.ipynb
    path: str  # the module it goes into
    body: str
    nodes: list[ast.stmt]


def marked_cells(file: Path) -> tuple[str, list[Cell]]:
    """The prose of a notebook, and its cells that are promoted."""
    notebook, module = f"notebooks/{file.name}", None
    try:
        cells = json.loads(file.read_text("utf-8"))["cells"]
    except (ValueError, KeyError):
        raise PromotionError(notebook, "is not a readable notebook", "mend or restore the file") from None
    prose, code = (["".join(c["source"]) for c in cells if c["cell_type"] == t] for t in ("markdown", "code"))
    marked = []
    for number, source in enumerate(code, start=1):
        cell = f"code cell {number} of {notebook}"
        marks = re.match(r"(#\| ?\w+.*\n?)*", source)[0]
        body = source[len(marks) :]
        module = module or re.search(r"default_exp +([a-z]\w*)", marks)
        if re.search(r"^# *\| *export\b", body, re.M):
            raise PromotionError(cell, "has its mark in the wrong place", "make `#| export` its first line")
        mark = re.search(r"^#\| ?export *([a-z]\w*\.[a-z]\w*)?\s*$", marks, re.M)
        if not mark:
            continue
        if not (mark[1] or module):
            way_out = "begin one with `#| default_exp name`"
            raise PromotionError(cell, "is marked, but no cell up to it names the module", way_out)
        try:
            nodes = ast.parse(body).body
        except SyntaxError as error:
            what = f"is marked, but is not plain Python ({error.msg})"
            raise PromotionError(cell, what, "take magics out of it, or take the mark off") from None
        path = f"kleinlite/{(mark[1] or module[1]).replace('.', '/')}.py"
        marked.append(Cell(cell, path, body, nodes))
    return "\n\n".join(prose), marked


def build_modules(files: list[Path]) -> list[Module]:
    """Notebooks → their modules, in the order in which they begin."""
    cells: dict[str, list[Cell]] = {}
    sources: dict[str, dict[str, str]] = {}
    for file in files:
        prose, marked = marked_cells(file)
        for cell in marked:
            cells.setdefault(cell.path, []).append(cell)
            others = sources.setdefault(cell.path, {})
            others[file.stem] = prose
            if len(others) > 1 and cell.path.count("/") == 1:  # a chapter's own module
                first = f"notebooks/{next(iter(others))}.ipynb"
                way_out = "rename or unmark one"
                raise PromotionError(f"notebooks/{file.name}", f"promotes `{cell.path}`, as does {first}", way_out)
    return [write_module(path, sources[path], own) for path, own in cells.items()]


def write_module(path: str, sources: dict[str, str], cells: list[Cell]) -> Module:
    """The module of these cells; `sources` has the prose of each notebook that they are from."""
    several = len(sources) > 1
    notebook = "notebooks/" + (",".join(stem[:2] for stem in sources) if several else f"{next(iter(sources))}.ipynb")
    names = [(name, cell.where) for cell in cells for node in cell.nodes for name in promoted_names(node, cell.where)]
    imports = [node for cell in cells for node in cell.nodes if isinstance(node, IMPORT)]
    blocks = [block for cell in cells for block in strip_imports(cell.body, cell.nodes, cell.where)]
    public = [f'"{name}"' for name, _ in names if not name.startswith("_")]
    prose = f"# What {len(sources)} chapters build together" if several else next(iter(sources.values()))
    title = make_docstring(prose, notebook)
    head = [title, *merge_imports(imports, path.count("/")), format_names(public)]
    text, in_definition = "\n\n".join(head), False
    for first, block, last in blocks:  # two blank lines around functions and classes, one elsewhere
        text += "\n" * (3 if in_definition or first else 2) + block
        in_definition = last
    return Module(notebook, path, add_seal(text + "\n"), names)


def promoted_names(node: ast.stmt, cell: str) -> list[str]:
    """The names that a statement gives to the module. Statements of any other kind are refused."""
    if isinstance(node, DEFINITION):
        return [node.name]
    if isinstance(node, IMPORT) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return []
    if isinstance(node, (ast.Assign, ast.AnnAssign)):  # a constant: UPPER_CASE, or a value that calls nothing
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [getattr(t, "id", "") for target in targets for t in getattr(target, "elts", [target])]
        calls = any(isinstance(part, ast.Call) for part in ast.walk(node))
        if all(name.isupper() or (name and not calls) for name in names):
            return names
    line = ast.unparse(node).split("\n")[0]
    what = f"has `{line}`, but only imports, functions, classes and constants can be promoted"
    raise PromotionError(cell, what, "move it to a cell without the mark")


def strip_imports(body: str, nodes: list[ast.stmt], cell: str) -> list[tuple[bool, str, bool]]:
    """The cell's own lines, as they were written, and whether they begin and end with a definition."""
    kept = [node for node in nodes if not isinstance(node, IMPORT)]
    cut = {line for node in nodes if node not in kept for line in range(node.lineno, node.end_lineno + 1)}
    if any(node.lineno in cut for node in kept):
        raise PromotionError(cell, "has an import and a definition in one line", "give each a line of its own")
    text = "\n".join(line for i, line in enumerate(body.split("\n"), start=1) if i not in cut).strip()
    text = re.sub(r"\n{4,}", "\n\n\n", text) if cut else text
    return [(isinstance(kept[0], DEFINITION), text, isinstance(kept[-1], DEFINITION))] if kept else []


def merge_imports(imports: list[ast.Import | ast.ImportFrom], depth: int) -> list[str]:
    """All imports, each once, in a formatter's order: standard library, third party, this package."""
    found: dict[tuple, set[str]] = {}
    for node in imports:
        source = re.sub(r"^kleinlite\b\.?", "." * depth, getattr(node, "module", None) or "")
        for name in map(ast.unparse, node.names):
            top = re.split("[. ]", source or name)[0]
            group = 3 if not top else 0 if top == "__future__" else 1 if top in sys.stdlib_module_names else 2
            key = (group, bool(source), (source or name).lower(), source or name)
            found.setdefault(key, set()).add(name)
    lines: dict[int, list[str]] = {}
    for (group, is_from, _, source), names in sorted(found.items()):
        ordered = sorted(names, key=lambda name: (not name.isupper(), name[0].islower(), name.lower()))
        line = format_import(f"from {source} import ", ordered) if is_from else f"import {source}"
        lines.setdefault(group, []).append(line)
    return ["\n".join(group) for group in lines.values()]


def format_import(head: str, items: list[str]) -> str:
    """`from a import b, c`, or one name a line if that is too long, as a formatter lays it out."""
    line = head + ", ".join(items)
    lines = "".join(f"    {item},\n" for item in items)
    return line if len(line) <= WIDTH else f"{head}(\n{lines})"


def format_names(public: list[str]) -> str:
    """`__all__`, in as few lines as hold it."""
    names = ", ".join(public)
    line = f"__all__ = [{names}]"
    lines = textwrap.indent(textwrap.fill(f"{names},", WIDTH - 4), "    ")
    return line if len(line) <= WIDTH else f"__all__ = [\n{lines}\n]  # fmt: skip"


def make_docstring(prose: str, notebook: str) -> str:
    """The chapter's title, its promise (the first quote, else the first sentence), and where to edit.

    Between them stand the legend and the references: the paragraphs that begin with "Letters:" and "Sources:".
    """
    prose = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", prose).replace("**", "").replace('"""', "")
    blocks = re.split(r"\n\s*\n", re.sub(r"^(#.*)", r"\1\n", prose, flags=re.M))

    def first(pattern: str) -> str:
        return next((block for block in map(str.strip, blocks) if re.match(pattern, block)), "")

    title = re.sub(r"^# (\d+[.:]? )?", "", first("# ")) or "A chapter of the book"
    promise = re.sub("^>", "", first(r">(?! \[!)"), flags=re.M) or re.split(r"(?<=[.!?])\s", first(r"\w"))[0]
    parts = [title + "." * title[-1].isalnum(), promise, first("Letters:"), first("Sources:")]
    parts = [" ".join(part.split()) for part in parts if part]
    parts = [textwrap.fill(part, WIDTH - 4, break_on_hyphens=False) for part in parts]
    text = "\n\n".join([*parts, TRAILER.format(notebook, "?")])
    raw = "r" if "\\" in text else ""
    return f'{raw}"""{text}\n"""'


# The whole book → the package


def read_text(path: Path) -> str:
    return path.read_text("utf-8") if path.exists() else ""


def strip_seal(text: str) -> str:
    """A module without its seal."""
    return SEALED.sub(lambda found: TRAILER.format(found[1], "?"), text, count=1)


def add_seal(text: str) -> str:
    """A module with a short hash of itself in its docstring, by which a later edit by hand is noticed."""
    digest = hashlib.sha256(strip_seal(text).encode()).hexdigest()[:8]
    return SEALED.sub(lambda found: TRAILER.format(found[1], digest), text, count=1)


def plan_modules(root: Path = ROOT) -> list[Module]:
    """What all the notebooks promote, after a look that no rule of the book is broken."""
    if not (root / "notebooks").is_dir():
        raise PromotionError(root, "has no notebooks to promote", "run this in a clone of the repository")
    modules = build_modules(sorted((root / "notebooks").glob("*.ipynb")))
    owners: dict[tuple[str, str], str] = {}  # the room and a name in it → who promotes it
    for notebook, path, text, names in modules:
        room = Path(path).parent.as_posix()
        for name, owner in [(path, notebook), *names]:
            if (room, name) in owners:
                raise PromotionError(owner, f"promotes `{name}`, as does {owners[room, name]}", "rename or unmark one")
            owners[room, name] = owner
        old = read_text(root / path)
        if old and not SEALED.search(old):
            raise PromotionError(notebook, f"would overwrite the hand-written {path}", "change its `#| default_exp`")
        if old and old != add_seal(old) and strip_seal(old) != strip_seal(text):
            way_out = f"move the edit into the notebook, delete {path}, and run `make promote`"
            raise PromotionError(path, f"was edited by hand, but {notebook} writes it", way_out)
    for file in sorted((root / "kleinlite").rglob("*.py")):
        path = file.relative_to(root).as_posix()
        if (file.relative_to(root).parent.as_posix(), path) not in owners and (found := SEALED.search(read_text(file))):
            raise PromotionError(path, f"is no longer promoted by {found[1]}", "delete it")
    return modules


def promote(root: Path = ROOT, check: bool = False) -> list[Module]:
    """Write the modules that differ from their notebooks (with `check`, only find them), and return them."""
    changed = [module for module in plan_modules(root) if read_text(root / module.path) != module.text]
    for module in [] if check else changed:
        draft = root / f"{module.path}.tmp"
        draft.write_text(module.text, "utf-8", newline="\n")
        os.replace(draft, root / module.path)  # whole or not at all
    return changed


def diff(name: str, root: Path = ROOT) -> None:
    """Show what promoting a saved notebook would change: `promote.diff("01_autoencoder")`."""
    files = sorted((root / "notebooks").glob("*.ipynb"))
    modules = build_modules(files)
    asked = [file.stem for file in files if Path(name).stem in (file.stem, file.stem[3:])]
    own = [m for m in modules for stem in asked if stem in m.notebook or stem[:2] in m.notebook[10:].split(",")]
    if not own:
        raise PromotionError(name, "promotes nothing", "name a notebook that does, for example 01_autoencoder")
    for module in own:
        old, new = (strip_seal(text).splitlines(True) for text in (read_text(root / module.path), module.text))
        lines = difflib.unified_diff(old, new, module.path, module.notebook)
        print("".join(lines).rstrip() or f"{module.path} is up to date.")


def print_lines(root: Path = ROOT) -> None:
    """How many lines each room of the package has, and which share of them the notebooks wrote."""
    rooms: dict[str, list[tuple[int, bool]]] = {"": [], "all": []}
    for path in sorted((root / "kleinlite").rglob("*.py")):
        room, text = (*path.relative_to(root / "kleinlite").parts[:-1], "")[0], path.read_text("utf-8")
        for name in (room, "all"):
            rooms.setdefault(name, []).append((text.count("\n"), bool(SEALED.search(text))))
    for room, files in sorted(rooms.items()):
        lines, promoted = sum(n for n, _ in files), sum(n for n, sealed in files if sealed)
        print(f"{room or 'top floor':10} {lines:6,} lines, {promoted / lines:4.0%} promoted")


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="Write the package from the notebooks.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if one is out of date")
    parser.add_argument("--diff", metavar="NOTEBOOK", help="show what promoting one notebook would change")
    parser.add_argument("--lines", action="store_true", help="count the package's lines, room by room")
    options = parser.parse_args(argv)
    if options.lines:
        return print_lines(root)
    try:
        if options.diff:
            return diff(options.diff, root)
        changed = promote(root, options.check)
    except PromotionError as refusal:
        print(refusal, file=sys.stderr)
        return 2
    for module in changed:
        print(f"{module.path} {'differs from' if options.check else 'written from'} {module.notebook}")
    if not changed:
        print("Every promoted module is up to date.")
    elif options.check:
        print("Run `make promote` to write what the notebooks say.")
    return int(options.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
