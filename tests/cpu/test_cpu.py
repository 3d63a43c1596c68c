"""The Linux CPU: the quick exp and what is built on it against MLX's own, and the borrowed BLAS."""

import contextlib
import ctypes
import math
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from kleinlite import cpu
from kleinlite.cpu import blas

linux = pytest.mark.skipif(not cpu.FAST, reason="kleinlite.cpu changes something on a Linux CPU only")


def close(a: mx.array, b: mx.array, tolerance: float = 3e-6) -> bool:
    """Same shape and type, no nan, and the largest difference small against the values."""
    assert a.shape == b.shape and a.dtype == b.dtype
    limit = tolerance * max(1.0, mx.abs(b).max().item())
    return mx.abs(a - b).max().item() <= limit  # False for nan, too


def agree(own, theirs, *args: mx.array, tolerance: float = 3e-6) -> bool:
    """Values and gradients, with and without mx.compile."""
    w = normal(*theirs(*args).shape, seed=9)

    def gradients(f):
        return mx.grad(lambda args: (f(*args) * w).sum())

    right = theirs(*args), *gradients(theirs)(list(args))
    plain = own(*args), *gradients(own)(list(args))
    compiled = right[0], *mx.compile(gradients(own))(list(args))  # `own` alone compiles itself
    return all(close(a, b, tolerance) for got in (plain, compiled) for a, b in zip(got, right))


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


# ---------------------------------------------------------------- exp, sigmoid, silu, softmax


@linux
@pytest.mark.parametrize("compiled", [True, False])
def test_exp_is_within_rounding_of_the_value(compiled):
    x = mx.concatenate([mx.linspace(-87, 88, 20011), mx.linspace(-1, 1, 4001), mx.linspace(-1e-6, 1e-6, 11)])
    if not compiled:  # as under mx.grad, or where there is no g++
        mx.disable_compile()
    try:
        y = cpu.exp(x).tolist()
    finally:
        mx.enable_compile()
    assert max(abs(b / math.exp(a) - 1) for a, b in zip(x.tolist(), y)) <= 3e-7


@linux
def test_exp_at_the_ends():
    inf = math.inf
    assert cpu.exp(mx.array([-inf, -3e38, -1000, -88, 0, 89, 1000, inf])).tolist() == [0] * 4 + [1] + [inf] * 3
    assert math.isnan(cpu.exp(mx.array(math.nan)).item())  # must not turn into a number
    assert mx.grad(lambda x: cpu.exp(x).sum())(mx.array([-inf, -1000.0, 0])).tolist() == [0, 0, 1]


@pytest.mark.parametrize("shape", [(), (7,), (3, 5, 17), (2, 0)])
def test_values_one_by_one(shape):
    x = 4 * normal(*shape)
    if x.size == 0:
        assert cpu.silu(x).shape == shape
        return
    assert agree(cpu.sigmoid, mx.sigmoid, x)
    assert agree(cpu.silu, lambda x: x * mx.sigmoid(x), x)
    row = [normal(*shape[-1:], seed=i) for i in (1, 2, 3)]
    assert agree(cpu.affine, lambda x, mean, scale, shift: (x - mean) * scale + shift, x, *row)
    assert agree(lambda x: cpu.exp(x / 4), lambda x: mx.exp(x / 4), x)


@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_softmax(axis):
    x = 5 * normal(4, 6, 9)
    assert agree(lambda x: cpu.softmax(x, axis), lambda x: mx.softmax(x, axis=axis), x)


def test_a_view_that_is_not_contiguous():
    x = normal(6, 10)
    assert close(cpu.silu(x[:, ::2].T), x[:, ::2].T * mx.sigmoid(x[:, ::2].T))
    assert close(cpu.softmax(x.T), mx.softmax(x.T, axis=-1))


def test_half_of_a_large_array():
    """As a gate is: copied before its exp."""
    x = normal(300, 2000)
    own, theirs = (
        lambda x: cpu.silu(x[:, :1000]) * x[:, 1000:],
        lambda x: x[:, :1000] * mx.sigmoid(x[:, :1000]) * x[:, 1000:],
    )
    assert agree(own, theirs, x)


def test_large_values_stay_numbers():
    x = mx.array([[-3e38, -1e4, -100, 0, 100, 1e4, 1e30]])
    for own, theirs in ((cpu.sigmoid, mx.sigmoid), (cpu.softmax, lambda x: mx.softmax(x, axis=-1))):
        for f in (lambda f, x: f(x), lambda f, x: mx.grad(lambda x: f(x).sum())(x)):
            assert close(f(own, x), f(theirs, x), 1e-7)
    assert cpu.silu(x).tolist()[0][3:] == x.tolist()[0][3:]
    assert close(cpu.softmax(mx.array([0.0, -mx.inf, 1.0])), mx.softmax(mx.array([0.0, -mx.inf, 1.0])))
    assert cpu.softmax(mx.array([0.0, -mx.inf, 1.0]))[1].item() == 0


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_other_types_are_left_to_mlx(dtype):
    x, q = normal(3, 8).astype(dtype), normal(1, 2, 5, 8).astype(dtype)
    assert mx.array_equal(cpu.exp(x), mx.exp(x)) and mx.array_equal(cpu.sigmoid(x), mx.sigmoid(x))
    assert mx.array_equal(cpu.softmax(x), mx.softmax(x, axis=-1, precise=True))
    theirs = mx.fast.scaled_dot_product_attention(q, q, q, scale=0.3, mask=None)
    assert mx.array_equal(cpu.attention(q, q, q, 0.3), theirs)


# ---------------------------------------------------------------- attention


def masks(b: int, nh: int, s: int) -> dict[str, mx.array | None]:
    causal, real = mx.tri(s) > 0, mx.arange(s) < mx.array([[s], [s - 3]])[:b]
    return {
        "none": None,
        "causal": causal,
        "padding": real[:, None, None, :],
        "both": causal & real[:, None, None, :],
        "per head": (normal(b, nh, s, s, seed=3) > 0) | (mx.eye(s) > 0),
    }


@pytest.mark.parametrize("nkv", [6, 2, 1])
@pytest.mark.parametrize("mask", masks(1, 1, 5))
@pytest.mark.parametrize("rows", [11, 4, 1])  # queries at a time
def test_attention(mask, nkv, rows, monkeypatch):
    b, nh, s, hd = 2, 6, 11, 8
    monkeypatch.setattr(cpu.operations, "SCORES", rows * 4 * b * nh * s)
    mask = masks(b, nh, s)[mask]
    q, k, v = normal(b, nh, s, hd), normal(b, nkv, s, hd, seed=1), normal(b, nkv, s, hd, seed=2)

    def own(q, k, v):
        return cpu.attention(q, k, v, hd**-0.5, mask)

    def theirs(q, k, v):
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=hd**-0.5, mask=mask)

    assert agree(own, theirs, q, k, v)
    assert agree(own, theirs, 6 * q, 6 * k, v, tolerance=2e-5)  # scores of 50: most weights are 0 or 1
    assert mx.isfinite(own(1e4 * q, 1e4 * k, v)).all()


@pytest.mark.parametrize("keys", [255, 272, 320, 1000])
def test_attention_over_long_rows(keys):
    """Rows whose maximum and sum are taken in folds, and rows that cannot be folded."""
    q, k, v = normal(1, 4, 5, 8), 3 * normal(1, 2, keys, 8, seed=1), normal(1, 2, keys, 8, seed=2)
    mask = mx.arange(keys) < keys - 7
    theirs = lambda q, k, v: mx.fast.scaled_dot_product_attention(q, k, v, scale=0.5, mask=mask)
    assert agree(lambda q, k, v: cpu.attention(q, k, v, 0.5, mask), theirs, q, k, v, tolerance=1e-5)


def test_attention_with_heads_behind_the_tokens():
    """As models call it: (b, s, nh, hd), turned; not contiguous."""
    q, k, v = (normal(2, 9, heads, 4, seed=i).swapaxes(1, 2) for i, heads in enumerate((4, 2, 2)))
    theirs = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.5, mask=None)
    assert close(cpu.attention(q, k, v, 0.5), theirs)


@linux
def test_attention_takes_little_memory(monkeypatch):
    """A few parts at a time, as far as MLX plans ahead, not the scores of all 64 heads."""
    q = normal(1, 64, 256, 8)
    monkeypatch.setattr(cpu.operations, "SCORES", 4 * 256 * 256)
    mx.eval(q)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(cpu.attention(q, q, q, 0.3))
    assert mx.get_peak_memory() - before < 32 * cpu.operations.SCORES


# ---------------------------------------------------------------- convolutions


@pytest.mark.parametrize("shape", [(1, 40, 30, 8), (2, 33, 17, 8), (1, 3, 5, 8)])
@pytest.mark.parametrize("k, stride, padding", [(3, 1, 1), (3, 2, 0), (3, 1, 0), (1, 1, 0), (5, 2, 2)])
@pytest.mark.parametrize("strip", [1, 20_000, 2**23])  # single rows, some rows, everything at once
def test_conv2d(shape, k, stride, padding, strip, monkeypatch):
    monkeypatch.setattr(cpu.convolution, "STRIP", strip)
    if k > min(shape[1:3]) + 2 * padding:
        return
    x, w, bias = normal(*shape), normal(6, k, k, 8, seed=1), normal(6, seed=2)
    right = mx.conv2d(cpu.silu(x), w, stride, padding) + bias
    assert close(cpu.conv2d(x, w, stride, padding, bias, before=cpu.silu), right)


@pytest.mark.parametrize("shape", [(1, 40, 30, 16), (2, 2, 6, 20)])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("strip", [1, 100_000, 2**23])
def test_conv2d_with_fewer_multiplications(shape, padding, strip, monkeypatch):
    """Winograd's algorithm: the numbers and the gradients of the plain way, in strips of two rows or more."""
    monkeypatch.setattr(cpu.convolution, "STRIP", strip)
    monkeypatch.setattr(cpu.convolution, "FEW", 0)
    if min(shape[1:3]) + 2 * padding < 4:
        return
    used = []
    own = cpu.convolution.winograd
    monkeypatch.setattr(cpu.convolution, "winograd", lambda *args: used.append(1) or own(*args))
    x, w = normal(*shape), normal(6, 3, 3, shape[-1], seed=1)
    assert agree(
        lambda x, w: cpu.conv2d(x, w, 1, padding), lambda x, w: mx.conv2d(x, w, 1, padding), x, w, tolerance=1e-5
    )
    assert bool(used) == cpu.FAST


@pytest.mark.parametrize("shape", [(1, 20, 15, 8), (2, 1, 3, 5)])
@pytest.mark.parametrize("strip", [1, 20_000, 2**23])
def test_upsample_conv2d(shape, strip, monkeypatch):
    monkeypatch.setattr(cpu.convolution, "STRIP", strip)
    theirs = lambda x, w: mx.conv2d(mx.repeat(mx.repeat(x, 2, axis=1), 2, axis=2), w, padding=1)
    x, w = normal(*shape), normal(6, 3, 3, shape[-1], seed=1)
    assert agree(cpu.upsample_conv2d, theirs, x, w, tolerance=1e-5)


@linux
@pytest.mark.parametrize("filters", [8, 32])  # as MLX multiplies, and with fewer multiplications
def test_conv2d_takes_little_memory(filters, monkeypatch):
    """The result and some strips: not nine times the picture."""
    monkeypatch.setattr(cpu.convolution, "STRIP", 2**18)
    x, w = normal(1, 256, 256, 32), normal(filters, 3, 3, 32, seed=1)
    monkeypatch.setattr(cpu.convolution, "FEW", 0 if filters == 32 else math.inf)
    peaks = []
    for f in (cpu.conv2d, mx.conv2d):
        mx.eval(x, w)
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(f(x, w, 1, 1))
        peaks.append(mx.get_peak_memory() - before)
    assert peaks[0] < 1.5 * x.nbytes < 9 * x.nbytes < peaks[1]


@linux
def test_filters_wait_for_their_turn(monkeypatch):
    """Forty convolutions in a row do not hold forty prepared filters, each nearly twice as large as the filter."""
    monkeypatch.setattr(cpu.convolution, "FEW", 0)
    x, w = normal(1, 8, 8, 64), [normal(64, 3, 3, 64, seed=i) / 24 for i in range(40)]
    mx.eval(x, w)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for i, filters in enumerate(w):
        x = cpu.upsample_conv2d(x, filters)[:, ::2, ::2] if i % 2 else cpu.conv2d(x, filters, 1, 1)
    mx.eval(x)
    assert mx.get_peak_memory() - before < 20 * w[0].nbytes


def test_by_rows():
    x = normal(2, 33, 8, 4)
    assert close(cpu.by_rows(lambda x: x.mean(axis=2), x), x.mean(axis=2))


# ---------------------------------------------------------------- the matrix product


@pytest.fixture
def table():
    """The library's table of addresses, put back afterwards; None where it could not be found."""
    cpu.setup()
    before = {name: ctypes.c_uint64.from_address(slot).value for name, slot in blas._slots.items()}
    yield before
    blas._point_to(before)


def installed() -> list[str]:
    """The fast libraries that can be loaded here, best first."""
    names = []
    for name, path, prefix in blas._candidates():
        with contextlib.suppress(OSError):
            blas._addresses(path, prefix)
            names.append(name)
    return names


def now() -> dict[str, int]:
    return {name: ctypes.c_uint64.from_address(slot).value for name, slot in blas._slots.items()}


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
@pytest.mark.parametrize("name, path, prefix", list(blas._candidates()))
def test_each_library_gives_right_products(name, path, prefix, table):
    try:
        addresses = blas._addresses(path, prefix)
    except OSError:
        pytest.skip(f"{path} is not installed")
    assert set(addresses) == {"cblas_sgemm", "cblas_dgemm", "cblas_cgemm"}
    blas._point_to(addresses)
    assert now() == addresses
    assert blas._products_are_right()


@linux
def test_a_wrong_library_is_noticed_and_taken_out_again(table, monkeypatch):
    blas._point_to(blas._original)
    does_nothing = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value
    monkeypatch.setattr(blas, "_candidates", lambda: [blas.Candidate("wrong", "", "")])
    for wrong in blas.GEMMS:  # one of the three is enough
        monkeypatch.setattr(blas, "_addresses", lambda path, prefix, name=wrong: {name: does_nothing})
        before = now()
        assert blas._use_fast_blas() is None
        assert now() == before
    assert blas._products_are_right()


@linux
def test_setup_twice_changes_nothing(table, capfd):
    name = cpu.blas_name()
    assert name in (installed() or [None])
    cpu.setup()
    assert cpu.blas_name() == name and now() == table
    assert capfd.readouterr() == ("", "")


# ---------------------------------------------------------------- in a fresh Python

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
def test_off_switch():
    code = """
cpu.setup()
x = mx.random.normal((50,)) * 9
print(cpu.FAST, cpu.blas_name(), blas._slots, mx.array_equal(cpu.exp(x), mx.exp(x)).item())
"""
    assert fresh(code, KLEINLITE_CPU="off") == ("False None {} True\n", "")


@linux
@pytest.mark.parametrize(
    "trouble",
    [
        "blas._candidates = lambda: []",
        "blas._candidates = lambda: [blas.Candidate('x', '/nowhere/a.so', ''), blas.Candidate('y', 'libc.so.6', '')]",
        "blas._find_slots = lambda: {}",
        "blas.platform.machine = lambda: 'abacus'",
        "blas._products_are_right = lambda: 1 / 0",
    ],
)
def test_one_line_when_there_is_no_fast_blas(trouble):
    out, err = fresh(
        trouble + "\ncpu.setup(); cpu.setup(); print(cpu.blas_name(), (mx.ones((9, 9)) @ mx.ones(9))[0].item())"
    )
    assert out == "None 9.0\n"
    assert err.count("\n") == 1 and "pip install scipy-openblas32" in err


@linux
def test_a_library_that_will_not_do_is_passed_over():
    if not installed():
        pytest.skip("no fast BLAS is installed; pip install scipy-openblas32")
    code = """
good = list(blas._candidates())
blas._candidates = lambda: [blas.Candidate("x", "/nowhere/a.so", ""), blas.Candidate("y", "libc.so.6", ""), *good]
cpu.setup(); print(cpu.blas_name())
"""
    name, err = fresh(code)
    assert name.strip() in installed() and not err


@linux
def test_with_two_libraries_called_libmlx_the_right_one_is_changed(tmp_path):
    """Another program's libmlx.so, loaded before: MLX's own table is the one that counts."""
    if not installed():
        pytest.skip("no fast BLAS is installed; pip install scipy-openblas32")
    own = Path(mx.__file__).parent / "lib" / "libmlx.so"
    (tmp_path / "libmlx.so").write_bytes(own.read_bytes())
    code = f"""
import ctypes
ctypes.CDLL({str(tmp_path / "libmlx.so")!r})
cpu.setup()
maps = [line.split() for line in open("/proc/self/maps")]
slot = blas._slots["cblas_sgemm"]
[where] = [m[-1] for m in maps if int(m[0].split("-")[0], 16) <= slot < int(m[0].split("-")[1], 16)]
print(where, len([m for m in maps if m[-1].endswith("libmlx.so")]) > 5, cpu.blas_name() is not None)
"""
    assert fresh(code) == (f"{own} True True\n", "")


@linux
def test_a_library_that_cannot_be_told_apart_is_left_alone():
    out, err = fresh("blas.mx.__file__ = '/elsewhere/core.so'; import ctypes, shutil, tempfile, glob, mlx\n"
        "from pathlib import Path; d = tempfile.TemporaryDirectory()\n"
        "shutil.copy(Path(list(mlx.__path__)[0]) / 'lib' / 'libmlx.so', d.name)\n"
        "ctypes.CDLL(d.name + '/libmlx.so'); cpu.setup(); print(cpu.blas_name())")  # fmt: skip
    assert out == "None\n" and err.count("\n") == 1 and "2 libraries are called libmlx.so" in err


@linux
def test_without_a_compiler(tmp_path):
    """No g++, and none of its earlier work in the temporary folder: MLX runs the operations one by one."""
    out, err = fresh(
        "x = mx.linspace(-80, 80, 101); print((mx.abs(cpu.exp(x) / mx.exp(x) - 1).max() < 1e-5).item(),"
        "mx.abs(cpu.softmax(x) - mx.softmax(x)).max().item() < 1e-6)",
        PATH="/nowhere",
        TMPDIR=str(tmp_path),
    )
    assert (out, err) == ("True True\n", "")


def test_the_table_names_what_this_room_makes_quick(monkeypatch, capsys):
    from kleinlite.cpu import __main__ as table

    monkeypatch.setattr(table, "time_ratio", lambda own, theirs, *args, **_: 1.0)
    monkeypatch.setattr(table.mx, "eval", lambda *_: None)
    table.benchmark()
    said = capsys.readouterr().out
    names = ("exp", "sigmoid", "softmax", "silu", "attention", "affine", "convolution", "upsampled", "4 bits")
    assert all(name in said for name in names)


@pytest.mark.parametrize(("running", "threads"), [(1, 4), (3, 2), (4, 1), (9, 1)])
def test_products_of_a_small_model_leave_busy_cores_alone(running, threads, monkeypatch):
    counts = [4]
    monkeypatch.setattr(blas, "_blas", blas.Candidate("a library", "", ""))
    monkeypatch.setattr(blas, "_threads", lambda candidate, count=1: (counts[-1], counts.append(count))[0])
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
