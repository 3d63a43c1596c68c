"""The temporary folder in which MLX compiles: one that cannot be used is a sentence before anything is drawn."""

import os
import shutil
import subprocess
import sys

import mlx.core as mx
import pytest
from waiting import HANGS

from kleinlite.cpu import compiler

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or mx.default_device() != mx.Device(mx.cpu) or not shutil.which("g++"),
    reason="there MLX compiles nothing into a folder",
)
DRAW = """
import mlx.core as mx
from kleinlite.inference.serialized import run_serialized

for _ in range(2):
    try:
        print(run_serialized(lambda: mx.compile(lambda x: x * mx.exp(x) + 1)(mx.zeros((3, 3))).sum().item()))
    except OSError as error:
        print(error)
"""


def draw(folder, tmp_path) -> list[str]:
    """What two calls answer, while the temporary folder is this one."""
    env = os.environ | {"TMPDIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", DRAW], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=HANGS
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "name, trouble",
    [
        ("gone", "No such file or directory"),
        ("file", "Not a directory"),
        ("closed", "Not a directory"),
        ("x$(touch executed)", "a shell executes"),
        ("x`touch executed`", "a shell executes"),
        ("x$HOME", "a shell executes"),
        ('x"; touch executed; "', "a shell executes"),
    ],
)
def test_a_folder_in_which_nothing_can_be_compiled(tmp_path, name, trouble):
    """Each call says so, not the first alone; and nothing of its name is executed."""
    (tmp_path / "file").touch()
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed" / "mlx").touch()
    if name.startswith("x"):
        (tmp_path / name).mkdir()
    folder = tmp_path / name
    said = draw(folder, tmp_path)
    assert len(said) == 2 and said[0] == said[1]
    assert (
        f"MLX cannot compile in {str(folder)!r}" in said[0]
        and trouble in said[0]
        and said[0].endswith("TMPDIR=/a/folder.")
    )
    assert not (tmp_path / "executed").exists()


def test_a_library_that_was_cut_short_is_compiled_again(tmp_path):
    """As by a disk that was full. A folder with a blank in its name is one like others."""
    folder = tmp_path / "a b"
    folder.mkdir()
    right = ["9.0", "9.0"]
    assert draw(folder, tmp_path) == right
    libraries = sorted(folder.rglob("*.so"))
    assert libraries
    for damage in (lambda data: b"", lambda data: data[: len(data) // 2], lambda data: bytes(len(data))):
        for library in libraries:
            library.write_bytes(damage(library.read_bytes()))
        assert draw(folder, tmp_path) == right


def test_a_folder_of_another_user_is_left_alone(monkeypatch, tmp_path):
    """Twice, for the second time our own is there already."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(compiler.os, "access", lambda path, mode: False)
    (tmp_path / "shared" / "mlx").mkdir(parents=True)
    for _ in range(2):
        monkeypatch.setenv("TMPDIR", str(tmp_path / "shared"))
        monkeypatch.setattr(compiler.tempfile, "tempdir", None)  # where the name is kept once it is known
        compiler.prepare_compiler.__wrapped__()
        assert os.environ["TMPDIR"] == str(tmp_path / ".cache" / "kleinlite")
