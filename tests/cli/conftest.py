"""A model to be damaged, and a command line that refuses."""

import shutil
from pathlib import Path

import pytest
from command import run, save_tiny


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def tiny(whole, tmp_path) -> Path:
    """A model in the working folder, to be damaged: `tiny`, with an undistilled one in `tiny/base`."""
    return Path(shutil.copytree(whole, tmp_path / "tiny")).relative_to(tmp_path)


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """refused("word word", "generate", …): the command line refuses, and its sentence has these words."""
    monkeypatch.chdir(tmp_path)

    def call(words: str, *argv):
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
        capsys.readouterr()
        status = run(*argv)  # a traceback would end the test here
        out, err = capsys.readouterr()
        assert err.startswith("kleinlite") and err.endswith((".\n", ")\n", "?\n")), err
        assert len(err.splitlines()) == 1 and 20 < len(err) < 700 and err[:-1].isprintable()
        missing = [word for word in words.split() if word not in err]
        assert not missing, err
        assert status == 2 and out == ""
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before

    return call
