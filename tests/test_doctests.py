"""The examples in docstrings, run as they stand there."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

from kleinlite import Klein, save_picture

PACKAGE = Path(__file__).resolve().parents[1] / "kleinlite"
FILES = (
    "kleinlite",
    "kleinlite.klein",
    "kleinlite.inside",
    "kleinlite.inference.loras",
    "kleinlite.models.download",
)
NOT_RUN = {
    "kleinlite.book.widgets": "the panel is shown in a notebook; test_widgets.py opens it",
    "kleinlite.book.mistakes": "it goes on from a chapter's cells; test_mistakes.py compares",
}


@pytest.mark.parametrize("name", FILES)
def test_examples(name, tmp_path, monkeypatch, hub):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    names = {"Klein": Klein, "save_picture": save_picture, "klein": Klein.from_pretrained()}
    results = doctest.testmod(module, extraglobs=names)
    assert results.attempted and not results.failed


def test_every_example_is_run_or_listed():
    found = {path for path in PACKAGE.rglob("*.py") if re.search("^ *>>> ", path.read_text("utf-8"), re.M)}
    names = {".".join(["kleinlite", *path.relative_to(PACKAGE).with_suffix("").parts]) for path in found}
    assert {name.removesuffix(".__init__") for name in names} == {*FILES, *NOT_RUN}
