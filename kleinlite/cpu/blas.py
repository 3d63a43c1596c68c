"""A fast matrix product for MLX's Linux CPU build: OpenBLAS in place of the wheel's reference BLAS.

libmlx.so calls the BLAS through a table of addresses, which the loader fills in when the program starts.
We look up where in that table cblas_sgemm and its two sisters stand, and write other addresses there.
No file is changed, and it does not matter whether mlx was imported before.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time

import mlx.core as mx

from .operations import FAST

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


def blas_name() -> str | None:
    """Where matrix products come from since `setup`, such as "OpenBLAS (system)"; None: MLX's own."""
    return _blas
