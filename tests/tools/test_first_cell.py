"""The first cell: nothing in the book's folder, a clone and an installation elsewhere."""

import json
import os
import shutil
import subprocess
import sys
import venv

import pytest

from tools import workbook
from tools.first_cell import FIRST_CELL, REPOSITORY, insert
from tools.notebooks import ROOT, clean_notebook, fingerprints


@pytest.fixture
def ran(monkeypatch) -> list:
    """What the cell would have run."""
    ran = []
    monkeypatch.setattr("subprocess.run", lambda command, check: ran.append(command))
    monkeypatch.setattr("os.chdir", ran.append)
    monkeypatch.setattr("sys.path", [*sys.path])
    return ran


def test_in_the_books_folder_it_does_nothing(ran, monkeypatch):
    monkeypatch.setattr("os.path.isfile", lambda path: (ROOT / "notebooks" / path).is_file())
    exec(FIRST_CELL, {})
    assert ran == []


def test_elsewhere_it_fetches_the_book(ran, monkeypatch):
    monkeypatch.setattr("os.path.isfile", lambda path: False)
    monkeypatch.setattr("os.path.isdir", lambda path: False)
    monkeypatch.setattr("os.path.abspath", lambda path: f"/content/{path}")
    exec(FIRST_CELL, {})
    assert ran[0][:3] == ["git", "clone", "-q"] and ran[1][1:4] == ["-m", "pip", "install"]
    assert ran[2] == "/content/kleinlite/notebooks" and sys.path[0] == "/content/kleinlite"
    ran.clear()
    monkeypatch.setattr("os.path.isdir", lambda path: path == "/content/kleinlite")
    exec(FIRST_CELL, {})  # Restart and run all
    assert ran[0][1:4] == ["-m", "pip", "install"]


def test_no_chapter_has_to_run_again_for_it():
    notebook = json.loads((ROOT / "notebooks/04_sampling.ipynb").read_text("utf-8"))
    plain = {**notebook, "cells": [cell for cell in notebook["cells"] if cell["id"] != "first-cell"]}
    with_cell = insert(plain)
    assert with_cell["cells"][0] == plain["cells"][0] and insert(with_cell) == with_cell
    assert fingerprints(with_cell) == fingerprints(plain)
    assert clean_notebook(with_cell)["cells"][2:] == clean_notebook(plain)["cells"][1:], "runs are counted as before"


def test_a_workbook_begins_with_it_once():
    notebook = json.loads((ROOT / "notebooks/04_sampling.ipynb").read_text("utf-8"))
    for chapter in (notebook, insert(notebook)):
        made = workbook.make_workbook(chapter, "04_sampling")["cells"]
        assert [cell["id"] for cell in made].count("first-cell") == 1 and made[2]["id"] == "first-cell"


@pytest.mark.slow
def test_a_chapter_alone_runs_twice(tmp_path):
    """In an empty environment and an empty folder, by papermill, as Colab's *Restart and run all* does."""
    pytest.importorskip("ensurepip", reason="Debian: apt install python3-venv")
    venv.create(tmp_path / "environment", with_pip=True)
    python = tmp_path / "environment" / "bin" / "python"
    if subprocess.run([python, "-m", "pip", "install", "-q", "papermill", "ipykernel"]).returncode:
        pytest.skip("needs an index to install papermill from")
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(ROOT / "notebooks" / "04_sampling.ipynb", folder)
    ours = {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{ROOT.as_uri()}.insteadOf",
        "GIT_CONFIG_VALUE_0": REPOSITORY,
    }
    for _ in range(2):
        command = [python, "-m", "papermill", "--no-progress-bar", "04_sampling.ipynb", "ran.ipynb"]
        end = subprocess.run(command, cwd=folder, env=os.environ | ours, capture_output=True, text=True)
        assert end.returncode == 0, end.stderr
    assert (folder / "kleinlite" / "notebooks" / "04_sampling.ipynb").exists()
