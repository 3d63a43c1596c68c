"""Runs the book's notebooks and stores their outputs without noise: a second run leaves an empty git diff.

    python -m tools.notebooks run [--all] [NOTEBOOK ...]    restart, run all cells, store clean outputs
    python -m tools.notebooks clean [NOTEBOOK ...]          only tidy what is stored, after a session in Jupyter
    python -m tools.notebooks list [NOTEBOOK ...]           print the paths

`run` without names takes those whose own code, whose chapter modules or whose weights are not what drew their stored
outputs, two at a time. A change of any other module makes none stale: `make test` runs them all and compares.

Readers on the web see stored outputs, so they are committed; reviewers read diffs, so nothing in them may
change on its own. Kept: text, tables, pictures (once, as PNG), and execution counts 1..n, which nbval
insists on. Dropped: time stamps, editor settings, progress bars and warnings, live widgets (nothing without a
kernel; the still picture beside one is kept). Made the same everywhere: memory addresses, and the names of folders
on this machine. Added by `run`: what drew them (`fingerprints`), so that a test finds outputs of other code or weights.
A picture stays as it is stored where no pixel moved by more than three levels: that much differs between processors.
Cells tagged `varies` (seconds, what a training gave on this processor) keep what is stored unless one of them changed.
Cells marked `# NBVAL_SKIP` (the released weights) are not run: they keep the outputs of the Mac that did.
"""

import argparse
import ast
import base64
import hashlib
import io
import json
import os
import re
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from PIL import Image, ImageChops

from kleinlite.files import replace_file

ROOT = Path(__file__).resolve().parents[1]
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
CELL_METADATA = ("alt", "jupyter", "tags")  # what a cell may say about itself; `alt` describes its pictures
DRAWN_BY = "kleinlite"  # the notebook's own metadata under which the fingerprints stand
MOST_LEVELS = 3  # by which a pixel may move before a picture counts as another one
# For every kernel: float32 products in full, and one thread each, for two run at a time.
ENVIRONMENT = {"MLX_ENABLE_TF32": "0", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
WIDGET = "application/vnd.jupyter.widget-view+json"
NOISE = [
    (re.compile(r"\b0x[0-9a-f]{6,}\b", re.I), "0x…"),
    (re.compile(re.escape(str(ROOT)) + r"(/|\b)"), ""),
    (re.compile(re.escape(str(Path.home())) + r"\b"), "~"),
    (re.compile(rf"{re.escape(tempfile.gettempdir())}/ipykernel_\d+/\d+\.py"), "cell"),
    (re.compile(rf"{re.escape(tempfile.gettempdir())}/[\w.-]+"), "/tmp/…"),
]


class RunError(Exception):
    """A cell raised, took too long, or took the kernel down."""


def digest(*contents: bytes) -> str:
    """The start of a SHA-256 over all of them."""
    return hashlib.sha256(b"\0".join(contents)).hexdigest()[:16]


@cache
def bundled_weights() -> str:
    """The weights that come with the package, as a number that does not depend on the folder they lie in."""
    files = [p for f in ("kleinlite/nano/weights", "recipe/weights") for p in (ROOT / f).rglob("*.safetensors")]
    return digest(*sorted(file.read_bytes() for file in files))


def code_lines(source: str) -> str:
    """Python source without blank lines, lines that only comment, and what IPython alone understands."""
    lines = (line.rstrip() for line in source.splitlines())
    return "\n".join(re.sub(r"^(\s*)[%!].*", r"\1pass", line) for line in lines if re.match(r"\s*[^#\s]|#\|", line))


def without_docstrings(source: str) -> str:
    """Python source without what only explains; every line keeps its number."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines[docstring.lineno - 1 : docstring.end_lineno] = [""] * (docstring.end_lineno - docstring.lineno + 1)
            if len(node.body) == 1 and not isinstance(node, ast.Module):
                lines[docstring.lineno - 1] = " " * docstring.col_offset + "pass"
    return "\n".join(lines)


def cells_code(notebook: dict) -> str:
    """The code of a notebook, cell after cell, without what only fetches the book (tools/first_cell.py)."""
    cells = [c for c in notebook["cells"] if c["cell_type"] == "code" and c.get("id") != "first-cell"]
    return "\n".join(code_lines(text_of(cell["source"])) for cell in cells)


def imported_names(source: str) -> set[str]:
    """Dotted names that a notebook imports, anywhere in it; `from a import b` gives a and a.b."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@cache
def chapter_module(name: str) -> str:
    """The code of a module that a chapter writes, `kleinlite.sampling`; "" for any other name."""
    file = ROOT.joinpath(*name.split(".")).with_suffix(".py")
    text = file.read_text("utf-8") if file.is_file() else ""
    return code_lines(without_docstrings(text)) if "\nPromoted from notebooks/" in text else ""


def fingerprints(notebook: dict) -> dict[str, str]:
    """What outputs come from: the notebook's own code, the chapters' modules that it names, weights, as numbers."""
    code = cells_code(notebook)
    modules = [chapter_module(name).encode() for name in sorted(imported_names(code))]
    return {"code": digest(code.encode()), "modules": digest(*modules), "weights": bundled_weights()}


def what_changed(notebook: dict) -> list[str]:
    """Which of the three are not what drew the stored outputs."""
    drawn_by = notebook["metadata"].get(DRAWN_BY, {})
    return [name for name, number in fingerprints(notebook).items() if drawn_by.get(name) != number]


def text_of(value: str | list[str]) -> str:
    """Notebook files keep text as one string or as a list of lines."""
    return "".join(value)


def tags_of(cell: dict) -> set[str]:
    """The tags of a cell, with nbval's comments counted as the tags they stand for."""
    words = re.findall(r"^# (NBVAL_\w+)", text_of(cell["source"]), re.M)
    return {*cell["metadata"].get("tags", []), *(word.lower().replace("_", "-") for word in words)}


def normalize_text(text: str | list[str]) -> list[str]:
    """Lines as they look after their carriage returns, without what differs from run to run."""
    text = re.sub(r"[^\n]*\r(?!\n)", "", text_of(text))
    for pattern, replacement in NOISE:
        text = pattern.sub(replacement, text)
    return text.splitlines(keepends=True)


def picture_sizes(output: dict, kept: dict) -> dict:
    """How large a page shows each picture; it may have more pixels than that."""
    known = {mime: about for mime, about in output.get("metadata", {}).items() if mime in kept and "height" in about}
    return {mime: {"width": about["width"], "height": about["height"]} for mime, about in known.items()}


def clean_outputs(outputs: list[dict], count: int) -> list[dict]:
    """The outputs worth keeping."""
    kept: list[dict] = []
    for output in outputs:
        kind, data = output["output_type"], output.get("data", {})
        if output.get("name") == "stderr" or (WIDGET in data and not {"image/png", "image/jpeg"} & data.keys()):
            continue
        if kind == "stream":
            lines = text_of(output["text"])
            if kept and kept[-1]["output_type"] == "stream":  # where a stream breaks into pieces is chance
                lines = text_of(kept.pop()["text"]) + lines
            kept.append({"name": "stdout", "output_type": "stream", "text": normalize_text(lines)})
        elif kind == "error":
            trace = text_of(normalize_text("\n".join(output["traceback"]))).split("\n")
            kept.append({**output, "evalue": text_of(normalize_text(output["evalue"])), "traceback": trace})
        else:
            dropped = {WIDGET, "image/jpeg"} if "image/png" in data else {WIDGET}  # a PIL picture comes as both
            data = {mime: value for mime, value in data.items() if mime not in dropped}
            data = {mime: normalize_text(value) if mime.startswith("text/") else value for mime, value in data.items()}
            number = {"execution_count": count} if kind == "execute_result" else {}
            kept.append({"data": data, "metadata": picture_sizes(output, data), "output_type": kind, **number})
    return kept


def clean_notebook(notebook: dict) -> dict:
    """A copy of a notebook (as read from its file) without anything that changes by itself."""
    cells, count, ids = [], 0, set()
    for number, old in enumerate(notebook["cells"], start=1):
        name = old.get("id") or f"cell-{number}"
        name = f"{name}-{number}" if name in ids else name
        ids.add(name)
        metadata = {k: v for k, v in old["metadata"].items() if k in CELL_METADATA and v}
        cell = {"cell_type": old["cell_type"], "id": name, "metadata": metadata}
        cell["source"] = text_of(old["source"]).splitlines(keepends=True)
        if old["cell_type"] == "code":
            was_run = bool(old.get("execution_count") or old["outputs"])
            count += was_run
            cell["execution_count"] = count if was_run else None
            cell["outputs"] = clean_outputs(old["outputs"], count)
        cells.append(cell)
    metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    metadata |= {k: v for k, v in notebook["metadata"].items() if k == DRAWN_BY}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def to_json(notebook: dict) -> str:
    """A notebook file, laid out as Jupyter itself does."""
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def write_notebook(path: Path, notebook: dict) -> bool:
    """Store a notebook if it changed, whole or not at all."""
    text = to_json(notebook)
    if path.read_text("utf-8") == text:
        return False
    with replace_file(path) as draft:
        draft.write_text(text, "utf-8", newline="\n")
    return True


def same_picture(new: str, stored: str) -> bool:
    """Whether no pixel of two encoded pictures differs by more than `MOST_LEVELS`."""
    if new == stored:
        return True
    one, other = (Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGBA") for picture in (new, stored))
    if one.size != other.size:
        return False
    return all(most <= MOST_LEVELS for _, most in ImageChops.difference(one, other).getextrema())


def keep_stored(new: dict, stored: dict) -> None:
    """Put back into a cleaned notebook what differs though nothing has changed: see the top of this file."""
    same = new["metadata"].get(DRAWN_BY) == stored["metadata"].get(DRAWN_BY)
    before = {cell["id"]: cell for cell in stored["cells"] if cell["cell_type"] == "code"}
    for cell in new["cells"]:
        old = before.get(cell["id"])
        if old is None or cell["cell_type"] != "code":
            continue
        if same and "varies" in tags_of(cell):
            cell["outputs"] = clean_outputs(old["outputs"], cell["execution_count"])
            continue
        if len(cell["outputs"]) != len(old["outputs"]):
            continue
        for output, known in zip(cell["outputs"], old["outputs"]):
            for mime in {"image/png", "image/jpeg"} & output.get("data", {}).keys() & known.get("data", {}).keys():
                if same_picture(text_of(output["data"][mime]), text_of(known["data"][mime])):
                    output["data"][mime] = known["data"][mime]


def run_notebook(path: Path, timeout: int = 600) -> dict:
    """A notebook with the outputs of a fresh run, top to bottom, in its own folder; the file stays."""
    import nbformat  # here, because importing these takes seconds
    from nbclient import NotebookClient
    from nbclient.exceptions import CellControlSignal, DeadKernelError

    stored = clean_notebook(json.loads(path.read_text("utf-8")))
    notebook = nbformat.reads(json.dumps(stored), as_version=4)
    for cell in notebook.cells:  # nbclient knows these two by tags of its own
        tags = tags_of(cell)
        skip = ["skip-execution"] if "nbval-skip" in tags else []
        raises = ["raises-exception"] if "nbval-raises-exception" in tags else []
        cell.metadata["tags"] = [*tags, *skip, *raises]
    client = NotebookClient(
        notebook, timeout=timeout, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}},
        record_timing=False, store_widget_state=False, extra_arguments=["--log-level=ERROR"],
    )  # fmt: skip
    try:
        client.execute(env=os.environ | ENVIRONMENT)
    except (CellControlSignal, DeadKernelError) as error:
        raise RunError(re.sub(r"\x1b\[[\d;]*m", "", str(error))) from None
    for cell, before in zip(notebook.cells, stored["cells"]):
        cell.metadata = before["metadata"]
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr" and "\r" not in output["text"]:
                where = f"{path.name}, code cell {cell.execution_count}"
                print(f"{where} wrote to stderr, not kept: {output['text'].rstrip()}", file=sys.stderr)
    notebook.metadata[DRAWN_BY] = fingerprints(stored)
    new = clean_notebook(json.loads(json.dumps(notebook)))
    keep_stored(new, stored)
    return new


def find_notebooks(names: list[str], root: Path = ROOT) -> list[Path]:
    """Notebook files by path, by name or by number; all of them, in reading order, if none is named."""
    made = {".ipynb_checkpoints", "live"}  # Jupyter's copies, and what the site makes
    every = sorted(p for p in (root / "notebooks").rglob("*.ipynb") if not made.intersection(p.relative_to(root).parts))
    chosen = []
    for name in names:
        found = [Path(name)] if Path(name).is_file() else []
        found = found or [p for p in every if Path(name).stem in (p.stem, p.stem[3:], p.stem[:2])]
        if not found:
            raise SystemExit(f"There is no notebook {name}: choose one of {', '.join(p.stem for p in every)}.")
        chosen += found
    return chosen or every


def run_and_store(path: Path, timeout: int) -> bool:
    """Run a notebook, store it, and say so; False if a cell failed."""
    start = time.perf_counter()
    try:
        notebook = run_notebook(path, timeout)
    except (RunError, ValueError) as error:
        print(f"{path.name} failed and was left as it was:\n{error}", file=sys.stderr)
        return False
    state = "changed" if write_notebook(path, notebook) else "unchanged"
    seconds = time.perf_counter() - start
    print(f"{path.name}: {state}, {path.stat().st_size / 1000:.0f} kB, {seconds:.1f} s", flush=True)
    return True


def stale_notebooks(paths: list[Path], root: Path) -> list[Path]:
    """Those whose stored outputs come from other code or weights; says which, and why."""
    changed = {path: what_changed(json.loads(path.read_text("utf-8"))) for path in paths}
    stale = [path for path in paths if changed[path]]
    for path in stale:
        print(f"{path.relative_to(root)} is to run: other {' and other '.join(changed[path])}", flush=True)
    print(f"{len(stale)} of {len(paths)} notebooks to run" + ("" if len(stale) == len(paths) else " (all: ALL=1)"))
    return stale


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="Run the book's notebooks, or tidy their stored outputs.")
    parser.add_argument("action", choices=["run", "clean", "list"])
    parser.add_argument("notebooks", nargs="*", metavar="NOTEBOOK", help="path, name or number (default: all)")
    parser.add_argument("--all", action="store_true", help="run those too of which nothing has changed")
    parser.add_argument("--timeout", type=int, default=600, help="seconds that one cell may take (default: 600)")
    options = parser.parse_args(argv)
    paths = find_notebooks(options.notebooks, root)
    if options.action == "list":
        print(*paths)
        return 0
    if options.action == "clean":
        for path in paths:
            tidied = write_notebook(path, clean_notebook(json.loads(path.read_text("utf-8"))))
            print(f"{path.name}: {'changed' if tidied else 'unchanged'}")
        return 0
    if not options.all and not options.notebooks:
        paths = stale_notebooks(paths, root)
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda path: run_and_store(path, options.timeout), paths))
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
