"""A fast matrix product for MLX's Linux CPU build: OpenBLAS in place of the wheel's reference BLAS.

libmlx.so calls the BLAS through a table of addresses, which the loader fills in when the program starts.
We look up where in that table cblas_sgemm and its two sisters stand, and write other addresses there.
No file is changed, and it does not matter whether mlx was imported before.

Which OpenBLAS matters as much as having one: an older one does not know a newer processor, and is a fifth as fast. So
the wheel scipy-openblas32, which comes with this package, is taken first, others only where it is missing.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from .operations import FAST

GEMMS = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")  # float32, float64, complex64: all that MLX calls
SLOT_KINDS = {"x86_64": (6, 7), "aarch64": (1025, 1026)}  # R_<machine>_GLOB_DAT and _JUMP_SLOT
PT_DYNAMIC = 2  # <elf.h>
DT_PLTRELSZ = 2
DT_STRTAB = 5
DT_SYMTAB = 6
DT_RELA = 7
DT_RELASZ = 8
DT_JMPREL = 23

_tried = False  # whether `setup` has run
_blas: Candidate | None = None
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
    slots: dict[str, int] = {}
    for start, size in ((DT_JMPREL, DT_PLTRELSZ), (DT_RELA, DT_RELASZ)):
        if start not in info:
            continue
        entries = (ctypes.c_uint64 * (info[size] // 8)).from_address(at[start])[:]
        for offset, what in zip(entries[::3], entries[1::3]):  # the third word is 0 for these kinds
            symbol = what >> 32
            kind = what & 0xFFFFFFFF
            if kind in kinds:
                start = ctypes.c_uint32.from_address(at[DT_SYMTAB] + 24 * symbol).value
                name = ctypes.string_at(at[DT_STRTAB] + start).decode()
                if name in GEMMS:
                    slots[name] = base + offset
    return slots


def _find_slots() -> dict[str, int]:
    """`_slots_of` libmlx.so, which mlx.core has loaded."""
    found = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Library), ctypes.c_size_t, ctypes.c_void_p)
    def visit(library: Any, size: int, data: Any) -> int:  # no exception could leave it, so it does little
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
        before[name] = word.value
        word.value = address
    return before


class Candidate(NamedTuple):
    """A fast library that may be there."""

    name: str  # what to call it
    path: str  # a file, or a name that the loader knows
    prefix: str  # what the names in it begin with


def _candidates() -> list[Candidate]:
    wheel = importlib.util.find_spec("scipy_openblas32")  # importing it takes longer than loading the library
    files = Path(wheel.origin).parent.glob("lib/libscipy_openblas*") if wheel and wheel.origin else ()
    return [
        *(Candidate("scipy-openblas32", str(file), "scipy_") for file in files),
        Candidate("OpenBLAS (conda)", os.path.join(sys.prefix, "lib", "libopenblas.so.0"), ""),
        Candidate("OpenBLAS (system)", "libopenblasp.so.0", ""),  # Fedora: this one has threads
        Candidate("OpenBLAS (system)", "libopenblas.so.0", ""),
    ]


def _addresses(path: str, prefix: str) -> dict[str, int]:
    """Load a library (for us alone: its names stay out of everybody's sight) and look up GEMMS in it."""
    library = ctypes.CDLL(path)
    return {name: ctypes.cast(library[prefix + name], ctypes.c_void_p).value or 0 for name in _slots}


def _products_are_right() -> bool:
    """Whole numbers, so that right is exact; other ones each time, lest an old answer in memory pass."""
    keys = iter(mx.random.split(mx.random.key(time.time_ns()), 24))
    for dtype in (mx.float32, mx.float64, mx.complex64):
        for turn_a, turn_b in ((False, False), (False, True), (True, False), (True, True)):
            a = mx.random.randint(-9, 10, (40, 24) if turn_a else (24, 40), key=next(keys)).astype(dtype)
            b = mx.random.randint(-9, 10, (33, 40) if turn_b else (40, 33), key=next(keys)).astype(dtype)
            if dtype == mx.complex64:
                a = a * (2 + 1j)
                b = b * (1 - 3j)
            a = a.T if turn_a else a
            b = b.T if turn_b else b
            if not mx.array_equal(a @ b, (a[:, :, None] * b).sum(axis=1)).item():
                return False
    return True


def _use_fast_blas() -> Candidate | None:
    """Make MLX call the first library that is there and right; returns it, None if MLX keeps its own."""
    _slots.update(_find_slots())
    if "cblas_sgemm" not in _slots:
        return None
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")  # threads without work sleep at once instead of spinning
    for candidate in _candidates():
        try:
            addresses = _addresses(candidate.path, candidate.prefix)
        except (OSError, AttributeError):  # not there, or not what it seems
            continue
        before = _point_to(addresses)
        _original.update(_original or before)
        if _products_are_right():
            return candidate
        _point_to(before)
    return None


def setup() -> None:
    """Make MLX quick on a Linux CPU. Once is enough, more does no harm; elsewhere it does nothing."""
    global _tried, _blas
    if _tried or not FAST:
        return
    _tried = True
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc: one arena, no mmap, nothing given back until the program ends
        for option, value in ((-8, 1), (-4, 0), (-1, 2**31 - 1)):  # M_ARENA_MAX, _MMAP_MAX, _TRIM_THRESHOLD
            libc.mallopt(option, value)
    trouble = "no fast BLAS found"
    try:
        _blas = _use_fast_blas()
    except Exception as error:  # whatever it was: the slow way works, and the line below says so
        _blas = None
        trouble = f"a fast BLAS could not be put in place ({type(error).__name__}: {error})"
    if _blas is None:
        logging.getLogger("kleinlite").warning(
            "%s, so matrix products take 30 to 100 times as long as they need to: `pip install scipy-openblas32` "
            "(or `apt install libopenblas0-pthread`, or `conda install libopenblas`) and start Python again.",
            trouble,
        )


def blas_name() -> str | None:
    """Where matrix products come from since `setup`, such as "OpenBLAS (system)"; None: MLX's own."""
    return _blas and _blas.name


def count_idle_cores() -> int:
    """Cores on which nothing runs at this moment but this thread; 0 or less where programs wait for one."""
    running = Path("/proc/loadavg").read_text("utf-8").split()[3].partition("/")[0]
    return (os.cpu_count() or 1) - int(running) + 1


@contextmanager
def idle_cores_only() -> Iterator[None]:
    """Inside, a product takes no more threads than there are idle cores, and at least one.

    A small product is over in less time than a thread waits for a core that something else has.
    """
    if _blas is None:
        yield
        return
    library = ctypes.CDLL(_blas.path)
    use = library[_blas.prefix + "openblas_set_num_threads"]
    most = library[_blas.prefix + "openblas_get_num_threads"]()
    use(max(1, min(most, count_idle_cores())))
    try:
        yield
    finally:
        use(most)
