"""The first cell of a notebook: away from the book's folder it fetches the book and installs what a chapter needs.

    python -m tools.first_cell    puts it into every chapter, behind the title, or brings it up to date

So a chapter runs in Colab, Kaggle, VS Code, papermill or nbconvert, wherever the file alone has been copied. Pages
leave it out, it is never stored as run, and no output depends on it: no chapter has to run again for it.
"""

import json
import re

from tools.notebooks import ROOT, write_notebook

REPOSITORY = re.search(r'^Repository = "(.+)"', (ROOT / "pyproject.toml").read_text("utf-8"), re.M)[1]
FIRST_CELL = f"""\
# In the book's folder this does nothing. Elsewhere (Colab, Kaggle, a download) it fetches the book and installs it.
import os
import subprocess
import sys

if not os.path.isfile("../kleinlite/errors.py"):
    folder = os.path.abspath("kleinlite")
    if not os.path.isdir(folder):
        clone = ["git", "clone", "-q", "--depth", "1", "{REPOSITORY}", folder]
        subprocess.run(clone, check=True)
    wanted = ["-e", folder, "matplotlib>=3.8", "ipywidgets>=8.1", "anywidget>=0.9"]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *wanted], check=True)
    sys.path.insert(0, folder)
    os.chdir(f"{{folder}}/notebooks")"""


def insert(notebook: dict) -> dict:
    """A chapter with the cell behind its title."""
    cells = [cell for cell in notebook["cells"] if cell["id"] != "first-cell"]
    cell = {
        "cell_type": "code",
        "id": "first-cell",
        "metadata": {"jupyter": {"source_hidden": True}, "tags": ["remove-cell"]},
    }
    cell |= {"source": FIRST_CELL.splitlines(keepends=True), "outputs": [], "execution_count": None}
    return {**notebook, "cells": [*cells[:1], cell, *cells[1:]]}


def main() -> None:
    for path in [*sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")), ROOT / "notebooks" / "flux3.ipynb"]:
        changed = write_notebook(path, insert(json.loads(path.read_text("utf-8"))))
        print(f"{path.name}: {'changed' if changed else 'unchanged'}")


if __name__ == "__main__":
    main()
