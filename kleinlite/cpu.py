"""MLX at a good speed on a Linux CPU. Hand-written; on a Mac or with a GPU nothing here changes anything.

MLX is made for Apple's chips. Its Linux CPU build gives the same results, but four things in it are slow or large:

- matrix products, 30 to 100 times: the wheel brings the reference BLAS. `setup` puts OpenBLAS in its place;
- large arrays: each goes back to the kernel after every operation and has to be asked for again. `setup`
  tells the C library to keep them;
- exp, 5 to 8 times, and with it sigmoid, silu, softmax and attention: MLX works it out one value at a time.
  The functions below use an exp made of plain MLX operations, which run on several values at once;
- convolutions and attention, which are large: MLX lays out every pixel's neighbourhood, nine times the picture for a
  3 × 3 filter, or all scores at once, and starts on the next operation before the last is done. `conv2d` and
  `attention` work on a few rows at a time: the same result in less memory, in about the same time.

Inside `mx.compile` those operations become two or three loops; so compile a training step. (Under `mx.grad`
alone nothing is compiled, which is still quicker than MLX's own exp but half as quick as it could be. MLX
compiles with g++; where there is none, it runs the operations one by one.)

    python -m kleinlite.cpu     times this module against MLX's own operations
    KLEINLITE_CPU=off           switches all of it off
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import sys
import time

import mlx.core as mx

FAST = sys.platform == "linux" and mx.default_device() == mx.Device(mx.cpu) and os.environ.get("KLEINLITE_CPU") != "off"

# ---------------------------------------------------------------- exp, and what is built on it

LN2_HIGH, LN2_LOW = 0.693145751953125, 1.428606765330187e-06  # ln 2 in two parts; n * LN2_HIGH is exact
ROUND = 1.5 * 2**23 + 127  # float32 has no room left for fractions here, so adding this rounds


@mx.compile
def _exp(x: mx.array) -> mx.array:
    """exp(x) = 2^n · e^r, with n whole and |r| <= ln(2) / 2. Within 3e-7 of the value, relative.

    From -88 down it is 0, as for -inf in a mask; from 88.4 up it is inf (the true end is 88.7).
    """
    x = mx.clip(x, -88.0, 89.0)
    t = x * (1 / math.log(2)) + ROUND  # its lowest bits now hold n + 127 ...
    n = t - ROUND
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    r2 = r * r  # the polynomial is e^r to 1.1e-7: 1 + r + r²/2 + ..., nudged to spread the error evenly
    p = ((1 + r) + (0.49999231 + 0.16667115 * r) * r2) + (0.041890337 + 0.0083125015 * r) * (r2 * r2)
    return p * (t.view(mx.int32) << 23).view(mx.float32)  # ... and n + 127 is how float32 stores 2^n


@mx.compile
def _exp_of_difference(x: mx.array, top: mx.array) -> mx.array:
    return _exp(x - top)


@mx.custom_function
def _fast_exp(x):
    return _exp(x)


@_fast_exp.vjp
def _fast_exp_vjp(x, g, y):
    return g * y


@mx.custom_function
@mx.compile
def _fast_sigmoid(x):
    return 1 / (1 + _exp(-x))


@_fast_sigmoid.vjp
def _fast_sigmoid_vjp(x, g, y):
    return g * y * (1 - y)


@mx.custom_function
def _fast_softmax(x):
    e = _exp_of_difference(x, x.max(axis=-1, keepdims=True))
    return e * (1 / e.sum(axis=-1, keepdims=True))


@_fast_softmax.vjp
def _fast_softmax_vjp(x, g, y):
    return y * (g - (g * y).sum(axis=-1, keepdims=True))


def _fast(*arrays: mx.array) -> bool:
    return FAST and all(a.dtype == mx.float32 for a in arrays)


def exp(x: mx.array) -> mx.array:
    """e to the x, value by value."""
    return _fast_exp(x) if _fast(x) else mx.exp(x)


def sigmoid(x: mx.array) -> mx.array:
    """1 / (1 + exp(-x)), value by value."""
    return _fast_sigmoid(x) if _fast(x) else mx.sigmoid(x)


def silu(x: mx.array) -> mx.array:
    """x · sigmoid(x), value by value."""
    return x * sigmoid(x)


def softmax(x: mx.array, axis: int = -1) -> mx.array:
    """exp(x), scaled so that it adds up to 1 along `axis`."""
    if not _fast(x):
        return mx.softmax(x, axis=axis, precise=True)
    return _fast_softmax(x.swapaxes(axis, -1)).swapaxes(axis, -1)


SCORES = 32 * 2**20  # bytes of scores at a time


def attention(q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array | None = None) -> mx.array:
    """softmax(q kᵀ · scale) v: (b, nh, s, hd) and twice (b, nkv, s, hd) → (b, nh, s, hd).

    nh is a multiple of nkv: that many heads in a row share one head of keys and values.
    mask: True = may look; any shape that broadcasts to (b, nh, s, s).
    """
    if not _fast(q, k, v):
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
    b, nh, s, hd = q.shape
    rows = max(1, SCORES // (4 * b * nh * k.shape[2]))  # a query needs no other query
    if rows < s:
        whole = mask if mask is None else mx.broadcast_to(mask, (*mask.shape[:-2], s, k.shape[2]))
        mine = lambda i: whole if whole is None else whole[..., i : i + rows, :]
        parts = [attention(q[:, :, i : i + rows], k, v, scale, mine(i)) for i in range(0, s, rows)]
        return mx.concatenate(parts, axis=2)
    nkv = k.shape[1]
    # The heads that share keys go below each other, into one taller product: no copies of k and v.
    q = (q * scale).reshape(b, nkv, -1, hd)  # (b, nkv, nh/nkv * s, hd)
    scores = (q @ k.swapaxes(-1, -2)).reshape(b, nh, s, -1)  # (b, nh, s, s)
    if mask is not None:
        scores = scores + mx.where(mask, 0.0, -mx.inf)
    weights = _fast_softmax(scores).reshape(b, nkv, -1, k.shape[2])  # (b, nkv, nh/nkv * s, s)
    return (weights @ v).reshape(b, nh, s, hd)


# ---------------------------------------------------------------- convolutions

STRIP = 8 * 2**20  # bytes of neighbourhoods at a time: they stay in the processor's cache


def conv2d(x: mx.array, weight: mx.array, stride: int = 1, padding: int = 0) -> mx.array:
    """Convolution with zeros around: (b, H, W, c_in), filters (c_out, k, k, c_in) → (b, H', W', c_out).

    A row of the result only needs k rows of the picture. So we compute some rows, then the next ones, and join them.
    """
    b, H, W, c = x.shape
    k = weight.shape[1]
    height, width = ((side + 2 * padding - k) // stride + 1 for side in (H, W))
    rows = max(1, STRIP // (4 * b * width * k * k * c))
    if not _fast(x, weight) or k == 1 or rows >= height:
        return mx.conv2d(x, weight, stride, padding)
    if padding:
        x = mx.pad(x, [(0, 0), (padding, padding), (padding, padding), (0, 0)])
    last = lambda first: min(first + rows, height) - 1  # row of a strip
    strips = [x[:, first * stride : last(first) * stride + k] for first in range(0, height, rows)]
    return mx.concatenate([mx.conv2d(strip, weight, stride) for strip in strips], axis=1)


# ---------------------------------------------------------------- the matrix product
#
# libmlx.so calls the BLAS through a table of addresses, which the loader fills in when the program starts.
# We look up where in that table cblas_sgemm and its two sisters stand, and write other addresses there.
# No file is changed, and it does not matter whether mlx was imported before.

GEMMS = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")  # float32, float64, complex64: all that MLX calls
SLOT_KINDS = {"x86_64": (6, 7), "aarch64": (1025, 1026)}  # R_<machine>_GLOB_DAT and _JUMP_SLOT
PT_DYNAMIC, DT_PLTRELSZ, DT_STRTAB, DT_SYMTAB, DT_RELA, DT_RELASZ, DT_JMPREL = 2, 2, 5, 6, 7, 8, 23  # <elf.h>

_done = False
_blas: str | None = None
_slots: dict[str, int] = {}  # name → where its address stands in the table
_original: dict[str, int] = {}  # name → the address that stood there before


class _Segment(ctypes.Structure):  # Elf64_Phdr
    _fields_ = [("type", ctypes.c_uint32), ("flags", ctypes.c_uint32)] + [
        (name, ctypes.c_uint64) for name in ("offset", "vaddr", "paddr", "filesz", "memsz", "align")
    ]


class _Library(ctypes.Structure):  # the beginning of dl_phdr_info
    _fields_ = [
        ("base", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("segments", ctypes.POINTER(_Segment)),
        ("count", ctypes.c_uint16),
    ]


def _slots_of(library: _Library) -> dict[str, int]:
    """Where the addresses of GEMMS stand in a loaded library's table, by its own list of what to fill in."""
    kinds = SLOT_KINDS[platform.machine()]
    base = library.base
    dynamic = next(s for s in library.segments[: library.count] if s.type == PT_DYNAMIC)
    words = (ctypes.c_uint64 * (dynamic.memsz // 8)).from_address(base + dynamic.vaddr)
    info = dict(zip(words[::2], words[1::2]))
    # Addresses in there count from the library's start, unless the loader has already added that.
    at = {tag: value if value >= base else base + value for tag, value in info.items()}
    slots = {}
    for start, size in ((DT_JMPREL, DT_PLTRELSZ), (DT_RELA, DT_RELASZ)):
        if start not in info:
            continue
        entries = (ctypes.c_uint64 * (info[size] // 8)).from_address(at[start])[:]
        for offset, what in zip(entries[::3], entries[1::3]):  # the third word is 0 for these kinds
            symbol, kind = what >> 32, what & 0xFFFFFFFF
            if kind in kinds:
                name = ctypes.c_uint32.from_address(at[DT_SYMTAB] + 24 * symbol).value
                name = ctypes.string_at(at[DT_STRTAB] + name).decode()
                if name in GEMMS:
                    slots[name] = base + offset
    return slots


def _find_slots() -> dict[str, int]:
    """`_slots_of` libmlx.so, wherever it is loaded."""
    found = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Library), ctypes.c_size_t, ctypes.c_void_p)
    def visit(library, size, data):  # an exception could not leave this function, so it does very little
        if os.path.basename(library.contents.name or b"").startswith(b"libmlx.so"):
            found.append(_Library.from_buffer_copy(library.contents))
        return 0

    ctypes.CDLL(None).dl_iterate_phdr(visit, None)
    return _slots_of(found[0]) if found else {}


def _point_to(addresses: dict[str, int]) -> dict[str, int]:
    """Write these addresses into the table; returns those that stood there."""
    page = os.sysconf("SC_PAGESIZE")
    mprotect = ctypes.CDLL(None, use_errno=True).mprotect
    mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for name in addresses:
        if mprotect(_slots[name] // page * page, page, 1 | 2):  # read | write; some loaders seal the table
            raise OSError(ctypes.get_errno(), "mprotect")
    before = {}
    for name, address in addresses.items():
        word = ctypes.c_uint64.from_address(_slots[name])
        before[name], word.value = word.value, address
    return before


def _candidates():
    """Fast libraries that may be there, best first: what to call it, the file, what its names begin with."""
    yield "OpenBLAS (conda)", os.path.join(sys.prefix, "lib", "libopenblas.so.0"), ""
    yield "OpenBLAS (system)", "libopenblasp.so.0", ""  # Fedora: this one has threads
    yield "OpenBLAS (system)", "libopenblas.so.0", ""
    try:
        import scipy_openblas32 as wheel
    except ImportError:
        return
    yield "scipy-openblas32", os.path.join(wheel.get_lib_dir(), wheel.get_library(fullname=True)), "scipy_"


def _addresses(path: str, prefix: str) -> dict[str, int]:
    """Load a library (for us alone: its names stay out of everybody's sight) and look up GEMMS in it."""
    library = ctypes.CDLL(path)
    config = library[prefix + "openblas_get_config"]
    config.restype = ctypes.c_char_p
    if b"USE64BITINT" in config():
        raise OSError(f"{path} takes 64-bit sizes, MLX passes 32-bit ones")
    return {name: ctypes.cast(library[prefix + name], ctypes.c_void_p).value for name in _slots}


def _products_are_right() -> bool:
    """Whole numbers, so that right is exact; other ones each time, lest an old answer in memory pass."""
    keys = iter(mx.random.split(mx.random.key(time.time_ns()), 24))
    for dtype in (mx.float32, mx.float64, mx.complex64):
        for turn_a, turn_b in ((False, False), (False, True), (True, False), (True, True)):
            a = mx.random.randint(-9, 10, (40, 24) if turn_a else (24, 40), key=next(keys)).astype(dtype)
            b = mx.random.randint(-9, 10, (33, 40) if turn_b else (40, 33), key=next(keys)).astype(dtype)
            if dtype == mx.complex64:
                a, b = a * (2 + 1j), b * (1 - 3j)
            a, b = a.T if turn_a else a, b.T if turn_b else b
            if not mx.array_equal(a @ b, (a[:, :, None] * b).sum(axis=1)).item():
                return False
    return True


def _use_fast_blas() -> str | None:
    """Find a fast BLAS and make MLX call it; the name of what MLX calls from now on, None if its own."""
    _slots.update(_find_slots())
    if "cblas_sgemm" not in _slots:
        return None
    for name, path, prefix in _candidates():
        try:
            before = _point_to(_addresses(path, prefix))
        except (OSError, AttributeError):  # not there, or not what it seems
            continue
        right = False
        try:
            right = _products_are_right()
        finally:
            if not right:
                _point_to(before)
        if right:
            _original.update(before)
            return name
    return None


# ---------------------------------------------------------------- what the package calls


def setup() -> None:
    """Make MLX quick on a Linux CPU. Once is enough, more does no harm; elsewhere it does nothing."""
    global _done, _blas
    if _done or not FAST:
        return
    _done = True
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc: one arena, no mmap, nothing given back until the program ends
        for option, value in ((-8, 1), (-4, 0), (-1, 2**31 - 1)):  # M_ARENA_MAX, _MMAP_MAX, _TRIM_THRESHOLD
            libc.mallopt(option, value)
    try:
        _blas = _use_fast_blas()
    except Exception:  # whatever it was: the slow way works, and the line below says so
        _blas = None
    if _blas is None:
        print(
            "kleinlite: no fast BLAS found, so matrix products take 30 to 100 times as long as they need to. "
            "`pip install scipy-openblas32` (or `apt install libopenblas0-pthread`, or `conda install "
            "libopenblas`) and start Python again.",
            file=sys.stderr,
        )


def blas() -> str | None:
    """Where matrix products come from since `setup`, such as "OpenBLAS (system)"; None: MLX's own."""
    return _blas


# ---------------------------------------------------------------- python -m kleinlite.cpu


def _ratio(own, theirs, *args, rounds: int = 7) -> float:
    """Best time of `own` / best time of `theirs`, taken in turns, because other work comes and goes."""
    best = [math.inf, math.inf]
    for turn in range(rounds + 1):
        for i, f in enumerate((own, theirs)):
            start = time.perf_counter()
            mx.eval(f(*args))
            if turn > 0:  # the first turn compiles
                best[i] = min(best[i], time.perf_counter() - start)
    return best[0] / best[1]


def benchmark() -> None:
    """Print a table of ratios, time here / time of MLX's own operation: below 1 is faster."""
    print(f"time here / time of MLX's own operation ({blas() or 'no fast BLAS'}, {os.cpu_count()} cores)")
    print(f"{'':40}{'forward':>10}{'+ backward':>12}{'compiled':>10}")

    def row(title, own, theirs, *shapes):
        args = [mx.random.normal(shape) for shape in shapes]
        w = mx.random.normal(own(*args).shape)
        mx.eval(args, w)
        every = tuple(range(len(args)))
        steps = [mx.value_and_grad(lambda *args, f=f: (f(*args) * w).sum(), every) for f in (own, theirs)]
        ratios = _ratio(own, theirs, *args), _ratio(*steps, *args), _ratio(*map(mx.compile, steps), *args)
        print(f"{title:40}{ratios[0]:10.2f}{ratios[1]:12.2f}{ratios[2]:10.2f}", flush=True)

    large, small = (2048, 4096), (2176, 384)
    row(f"exp {large}", exp, mx.exp, large)
    row(f"softmax {large}", softmax, lambda x: mx.softmax(x, axis=-1), large)
    for shape in (small, large):
        row(f"silu(a) * b {shape}", lambda a, b: silu(a) * b, lambda a, b: a * mx.sigmoid(a) * b, shape, shape)
    for shape in ((32, 4, 68, 32), (8, 24, 256, 64)):
        for title, mask in (("", None), (" causal", mx.tri(shape[2]) > 0)):
            kinds = [
                lambda q, k, v, f=f, m=mask, s=shape[3] ** -0.5: f(q, k, v, scale=s, mask=m)
                for f in (attention, mx.fast.scaled_dot_product_attention)
            ]
            row(f"attention {shape}{title}", *kinds, shape, shape, shape)
    for shape, filters in (((1, 64, 64, 128), (128, 3, 3, 128)), ((1, 256, 256, 128), (128, 3, 3, 128))):
        own, theirs = (lambda x, w, f=f: f(x, w, 1, 1) for f in (conv2d, mx.conv2d))
        args = [mx.random.normal(shape), mx.random.normal(filters)]
        print(f"{f'convolution {shape}':40}{_ratio(own, theirs, *args):10.2f}", flush=True)
    if _original:
        a, b = mx.random.normal((256, 1024)), mx.random.normal((1024, 1024))
        mx.eval(a, b)

        def slow(a, b):
            ours = _point_to(_original)
            mx.eval(a @ b)
            _point_to(ours)

        ratio = _ratio(mx.matmul, slow, a, b, rounds=3)
        print(f"{'matrix product (256, 1024, 1024)':40}{ratio:10.3f}")


if __name__ == "__main__":
    from kleinlite import cpu  # not this copy of the module, which knows of no setup

    cpu.setup()
    cpu.benchmark()
