"""The site, built once for all files of tests that visit it."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from tools.chromium import serving

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """The book of this repository, built."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    mdbook = shutil.which("mdbook", path=path)
    if not mdbook:
        pytest.skip("mdbook is not installed: pip install -e '.[book]' brings it")
    workers = "PYTEST_XDIST_WORKER" in os.environ  # they share the folder above their own, and one of them builds
    folder = tmp_path_factory.getbasetemp().parent if workers else tmp_path_factory.getbasetemp()
    with FileLock(folder / "site.lock"):
        if not (folder / "site").exists():
            build(mdbook, path, folder / "site.new")
            (folder / "site.new").rename(folder / "site")
    return folder / "site"


def build(mdbook: str, path: str, target: Path) -> None:
    command = [mdbook, "build", "--dest-dir", str(target), str(ROOT)]
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert not re.search(r"\b(WARN|ERROR)\b", result.stderr), result.stderr


@pytest.fixture(scope="session")
def home(site) -> Iterator[str]:
    """The address at which the built site is served."""
    with serving(site) as address:
        yield address
