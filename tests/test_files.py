"""Files are written whole or not at all."""

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import mlx.core as mx
import pytest
from stand_in_hub import TINY

from kleinlite import Klein
from kleinlite.errors import ExistingFileError, FileError, UserError
from kleinlite.files import check_disk_space, lock, replace_file, write_json
from kleinlite.models.adapters import find_adapter
from kleinlite.models.download import Repository, remove_damaged
from kleinlite.trainer.adapter import check_output
from kleinlite.trainer.run import write_arrays


def test_a_file_is_replaced_and_keeps_its_permissions(tmp_path):
    path = tmp_path / "x.bin"
    path.write_bytes(b"old")
    path.chmod(0o600)
    with replace_file(path) as draft:
        assert draft.parent == tmp_path and draft.suffix == ".bin"
        draft.write_bytes(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new" and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["x.bin"]


def test_a_failure_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.bin"
    path.write_bytes(b"old")
    with pytest.raises(KeyError), replace_file(path) as draft:
        draft.write_bytes(b"half")
        raise KeyError
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["x.bin"]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("precious", path)])
def test_only_plain_files_are_replaced(tmp_path, make):
    (tmp_path / "precious").write_text("precious")
    make(tmp_path / "x")
    with pytest.raises(ExistingFileError, match="x is there and is not a plain file: name another"), \
            replace_file(tmp_path / "x"):  # fmt: skip
        pass
    assert sorted(os.listdir(tmp_path)) == ["precious", "x"] and (tmp_path / "precious").read_text() == "precious"


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "draft"),
        RuntimeError("[write] Unable to write 5488 bytes to file."),
        Exception("No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_a_sentence(tmp_path, error):
    with pytest.raises(FileError, match="x.bin.*(No space left|Unable to write)"), replace_file(tmp_path / "x.bin"):
        raise error
    assert os.listdir(tmp_path) == []


def test_other_errors_stay_what_they_are(tmp_path):
    with pytest.raises(RuntimeError, match="a bug"), replace_file(tmp_path / "x"):
        raise RuntimeError("a bug")
    with pytest.raises(FileError, match="missing/x: No such file"), replace_file(tmp_path / "missing" / "x"):
        pass


def test_leftovers_of_killed_processes_go(tmp_path):
    for name, age in ((".kleinlite-1.partial.png", 0), (".kleinlite-2.partial.png", 1), (".y.partial", 0)):
        (tmp_path / name).touch()
        if not age:
            os.utime(tmp_path / name, (0, 0))
    write_json(tmp_path / "x.json", {"a": 1})
    assert sorted(os.listdir(tmp_path)) == [".kleinlite-2.partial.png", ".y.partial", "x.json"]


def test_a_lock_is_held_by_one_process(tmp_path):
    code = "import sys; from kleinlite.files import lock\nwith lock(sys.argv[1]): pass"
    with lock(tmp_path / "lock"):
        end = subprocess.run([sys.executable, "-c", code, tmp_path / "lock"], capture_output=True, text=True)
        assert end.returncode == 1 and "ExistingFileError: Another program is using" in end.stderr
    subprocess.run([sys.executable, "-c", code, tmp_path / "lock"], check=True)
    assert os.listdir(tmp_path) == []


def test_a_lock_ends_where_an_open_file_cannot_be_removed(tmp_path, monkeypatch):
    with monkeypatch.context() as windows, lock(tmp_path / "lock"):
        windows.setattr(Path, "unlink", Mock(side_effect=PermissionError))
    with lock(tmp_path / "lock"):
        pass


def test_the_disk_is_asked_first(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    check_disk_space(tmp_path / "not" / "yet", 1000)
    with pytest.raises(FileError, match="will take 0.0 MB and its disk has 0.0 MB left"):
        check_disk_space(tmp_path, 1001)


def test_a_name_that_mlx_does_not_take_is_told_and_nothing_is_removed(tmp_path):
    """caf\xe9, of a Latin-1 disk or an old ZIP; Python carries its byte."""
    odd = os.fsdecode(b"caf\xe9")
    try:
        model = shutil.copytree(TINY, tmp_path / odd)
    except OSError:
        pytest.skip("this disk has no such names")
    adapter = shutil.copy2(find_adapter("outlined"), tmp_path / f"{odd}.safetensors")
    repository = Repository("some/body")
    for use in (
        lambda: Klein.from_pretrained(model),
        lambda: Klein.from_pretrained(TINY, parts={"autoencoder": model}),
        lambda: Klein.from_pretrained("nano", loras=[adapter]),
        lambda: check_output(tmp_path / f"{odd}-new.safetensors"),
        lambda: write_arrays(model / "x.safetensors", {"x": mx.zeros(1)}),
        lambda: remove_damaged(repository, model),
    ):
        with pytest.raises(UserError, match=r"The name of .*caf\\udce9.* is not UTF-8, and MLX opens no other: rename"):
            use()
    assert sorted(os.listdir(model)) == sorted(os.listdir(TINY)) and Path(adapter).exists()


def test_json(tmp_path):
    write_json(tmp_path / "x.json", {"a": [1, "é"]})
    assert json.loads((tmp_path / "x.json").read_text("utf-8")) == {"a": [1, "é"]}
