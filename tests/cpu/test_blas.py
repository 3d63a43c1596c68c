"""The borrowed BLAS: found, tried, taken out again, and few threads beside other programs."""

import contextlib
import ctypes
import os
import subprocess
import sys

import mlx.core as mx
import pytest
from agreement import linux

from kleinlite import cpu
from kleinlite.cpu import blas


def now() -> dict[int, int]:
    """What stands in the library's table of addresses."""
    return {place: ctypes.c_uint64.from_address(place).value for place in blas._own}


@pytest.mark.parametrize("dtype", [mx.float32, mx.float64, mx.complex64])
@pytest.mark.parametrize("shape", [(1, 5, 3), (64, 64, 64), (200, 333, 129), (7, 1, 300)])
def test_products_are_right(shape, dtype):
    cpu.setup()
    m, k, n = shape
    with mx.stream(mx.cpu):
        a, b = (mx.random.randint(-9, 10, s, key=mx.random.key(1)).astype(dtype) for s in ((3, m, k), (3, k, n)))
        if dtype == mx.complex64:
            a, b = a * (1 + 2j), b * (3 - 1j)
        right = (a[..., None] * b[:, None]).sum(axis=2)  # whole numbers below 2^24: exact, so compared with ==
        turned = [mx.contiguous(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (a, b)]
        for p in (a, turned[0]):
            for q in (b, turned[1]):
                assert mx.array_equal(p @ q, right)
                assert mx.array_equal(p[1] @ q[2], (a[1, ..., None] * b[2]).sum(axis=1))


@linux
def test_setup_twice_changes_nothing(capfd):
    cpu.setup()
    assert cpu.blas_name() == "scipy-openblas32"
    table = now()
    cpu.setup()
    assert len(table) == 3 and now() == table and not set(table.values()) & set(blas._own.values())
    assert capfd.readouterr() == ("", "")


LOAD = """
import mlx.core as mx
from kleinlite import cpu
from kleinlite.cpu import blas
"""


def fresh(code: str, **environment: str) -> tuple[str, str]:
    """What this prints to stdout and stderr, with the module loaded but not set up."""
    env = {k: v for k, v in os.environ.items() if k != "KLEINLITE_CPU"} | environment
    done = subprocess.run([sys.executable, "-c", LOAD + code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@linux
def test_a_temporary_folder_that_is_another_users(tmp_path):
    (tmp_path / "mlx").mkdir()
    code = "os.access = lambda *_: False; cpu.setup(); print(os.environ['TMPDIR'])"
    said, _ = fresh(f"import os; {code}", TMPDIR=str(tmp_path), HOME=str(tmp_path))
    assert said == f"{tmp_path / '.cache' / 'kleinlite'}\n"


@linux
def test_memory_is_given_back_when_asked():
    code = """
import re
from pathlib import Path

def resident():
    return int(re.search(r"VmRSS:\\s+([0-9]+)", Path("/proc/self/status").read_text())[1])

cpu.setup()
x = mx.zeros((25_000_000,))
mx.eval(x)
del x
mx.clear_cache()
kept = resident()
cpu.give_back()
print(kept - resident() > 80_000)
"""
    assert fresh(code) == ("True\n", "")


@linux
def test_off_switch():
    code = """
cpu.setup()
x = mx.random.normal((50,)) * 9
print(cpu.FAST, cpu.blas_name(), blas._own, mx.array_equal(cpu.silu(x), x * mx.sigmoid(x)).item())
"""
    assert fresh(code, KLEINLITE_CPU="off") == ("False None {} True\n", "")


@linux
@pytest.mark.parametrize(
    "trouble",
    [
        "blas.importlib.util.find_spec = lambda name: None",
        "blas.Path.glob = lambda self, name: iter(['/nowhere/a.so'])",
        "blas.Path.glob = lambda self, name: iter(['libc.so.6'])",
        "blas._find_places = lambda: {}",
    ],
)
def test_one_line_when_there_is_no_fast_blas(trouble):
    out, err = fresh(
        trouble + "\ncpu.setup(); cpu.setup(); print(cpu.blas_name(), (mx.ones((9, 9)) @ mx.ones(9))[0].item())"
    )
    assert out == "None 9.0\n"
    assert err.count("\n") == 1 and "pip install scipy-openblas32" in err


@linux
def test_one_line_with_an_mlx_that_nobody_has_tried():
    assert mx.__version__ in blas.TRIED, "the tests above pass with it: add it"
    out, err = fresh("blas.TRIED = (); cpu.setup(); cpu.setup(); print(cpu.blas_name())")
    assert out == "scipy-openblas32\n"
    assert err.count("\n") == 1 and f"MLX {mx.__version__}" in err and "KLEINLITE_CPU=off" in err


@linux
def test_without_a_compiler(tmp_path):
    """No g++, and none of its earlier work in the temporary folder: MLX runs the operations one by one."""
    out, err = fresh(
        "x = mx.linspace(-80, 80, 101); print(mx.abs(cpu.silu(x) - x * mx.sigmoid(x)).max().item() < 1e-5,"
        "mx.abs(cpu.softmax(x) - mx.softmax(x)).max().item() < 1e-6)",
        PATH="/nowhere",
        TMPDIR=str(tmp_path),
    )
    assert (out, err) == ("True True\n", "")


@pytest.mark.parametrize(("running", "threads"), [(1, 4), (3, 2), (4, 1), (9, 1)])
def test_products_of_a_small_model_leave_busy_cores_alone(running, threads, monkeypatch):
    counts = [4]
    library = {"scipy_openblas_get_num_threads": lambda: counts[-1], "scipy_openblas_set_num_threads": counts.append}
    monkeypatch.setattr(blas, "_openblas", library)
    monkeypatch.setattr(blas.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(blas.Path, "read_text", lambda *_: f"0.5 0.6 0.7 {running}/123 4567\n")
    with cpu.idle_cores_only():
        assert counts[-1] == threads
    assert counts[-1] == 4
    with contextlib.suppress(KeyboardInterrupt), cpu.idle_cores_only():
        raise KeyboardInterrupt
    assert counts[-1] == 4


def test_cores_are_counted():
    if cpu.FAST:
        assert -10_000 < blas.count_idle_cores() <= os.cpu_count()
