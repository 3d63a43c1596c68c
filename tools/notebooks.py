"""Runs the book's notebooks and stores their outputs without noise: a second run leaves an empty git diff.

    python -m tools.notebooks run [NOTEBOOK ...]      restart each, run all, store clean outputs
    python -m tools.notebooks clean [NOTEBOOK ...]    only tidy what is stored, after a session in Jupyter

Readers on the web see stored outputs, so they are committed; reviewers read diffs, so nothing in them may
change on its own. Kept: text, tables, pictures (once, as PNG), and execution counts 1..n, which nbval
insists on. Dropped: time stamps, editor settings, progress bars and warnings, live widgets (nothing without a
kernel; the still picture beside one is kept). Made the same everywhere: memory addresses, and the names of folders
on this machine. Added by `run`: which bundled weights drew them, so that a test finds outputs of older ones.
Cells marked `# NBVAL_SKIP` (the released weights) are not run: they keep the outputs of the Mac that did.
"""

import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path

from kleinlite.files import replace_file

ROOT = Path(__file__).resolve().parents[1]
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
CELL_METADATA = ("alt", "jupyter", "tags")  # what a cell may say about itself; `alt` describes its pictures
WEIGHTS = "kleinlite-weights"
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


def bundled_weights() -> str:
    """The weights that come with the package, as a number: the start of a SHA-256 over all of their files."""
    digest = hashlib.sha256()
    for file in sorted((ROOT / "kleinlite" / "nano").rglob("*.safetensors")):
        digest.update(file.relative_to(ROOT).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:16]


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
    """How large a page shall show each picture; it may have more pixels than that."""
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
    metadata |= {k: v for k, v in notebook["metadata"].items() if k == WEIGHTS}
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


def run_notebook(path: Path, timeout: int = 600) -> dict:
    """A notebook with the outputs of a fresh run, top to bottom, in its own folder; the file stays."""
    import nbformat  # here, because importing these takes seconds
    from nbclient import NotebookClient
    from nbclient.exceptions import CellControlSignal, DeadKernelError

    os.environ["PYTHONHASHSEED"] = "0"  # sets print in the same order every time
    stored = clean_notebook(json.loads(path.read_text("utf-8")))
    notebook = nbformat.reads(json.dumps(stored), as_version=4)
    for cell in notebook.cells:  # nbclient knows these two by tags of its own
        tags = tags_of(cell)
        skip = ["skip-execution"] if "nbval-skip" in tags else []
        raises = ["raises-exception"] if "nbval-raises-exception" in tags else []
        cell.metadata["tags"] = [*tags, *skip, *raises]
    quiet, here = {"record_timing": False, "store_widget_state": False}, {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(notebook, timeout=timeout, kernel_name="python3", resources=here, **quiet)
    try:
        client.execute()
    except (CellControlSignal, DeadKernelError) as error:
        raise RunError(re.sub(r"\x1b\[[\d;]*m", "", str(error))) from None
    for cell, before in zip(notebook.cells, stored["cells"]):
        cell.metadata = before["metadata"]
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr" and "\r" not in output["text"]:
                where = f"{path.name}, code cell {cell.execution_count}"
                print(f"{where} wrote to stderr, not kept: {output['text'].rstrip()}", file=sys.stderr)
    notebook.metadata[WEIGHTS] = bundled_weights()
    return clean_notebook(json.loads(json.dumps(notebook)))


def find_notebooks(names: list[str], root: Path = ROOT) -> list[Path]:
    """Notebook files by path, by name or by number; all of them, in reading order, if none is named."""
    made = {".ipynb_checkpoints", "live"}  # Jupyter's copies, and what the site makes
    every = sorted(p for p in (root / "notebooks").rglob("*.ipynb") if not made.intersection(p.parts))
    chosen = []
    for name in names:
        found = [Path(name)] if Path(name).is_file() else []
        found = found or [p for p in every if Path(name).stem in (p.stem, p.stem[3:], p.stem[:2])]
        if not found:
            raise SystemExit(f"There is no notebook {name}: choose one of {', '.join(p.stem for p in every)}.")
        chosen += found
    return chosen or every


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="Run the book's notebooks, or tidy their stored outputs.")
    parser.add_argument("action", choices=["run", "clean"])
    parser.add_argument("notebooks", nargs="*", metavar="NOTEBOOK", help="path, name or number (default: all)")
    parser.add_argument("--timeout", type=int, default=600, help="seconds that one cell may take (default: 600)")
    options = parser.parse_args(argv)
    failed = 0
    for path in find_notebooks(options.notebooks, root):
        start = time.perf_counter()
        try:
            if options.action == "run":
                notebook = run_notebook(path, options.timeout)
            else:
                notebook = clean_notebook(json.loads(path.read_text("utf-8")))
        except (RunError, ValueError) as error:
            print(f"{path.name} failed and was left as it was:\n{error}", file=sys.stderr)
            failed += 1
            continue
        state = "changed" if write_notebook(path, notebook) else "unchanged"
        seconds, size = time.perf_counter() - start, path.stat().st_size / 1000
        print(f"{path.name}: {state}, {size:.0f} kB, {seconds:.1f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
