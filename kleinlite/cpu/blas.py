"""A fast matrix product for MLX's Linux CPU build: OpenBLAS instead of the wheel's reference BLAS.

libmlx.so calls the BLAS through a table of addresses, which the loader fills in when mlx is imported. We look for the
addresses of cblas_sgemm and its two sisters in that library's memory, and write others in their place. No file is
changed.

Which OpenBLAS matters as much as having one: an older one does not know a newer processor, and is a fifth as fast. So
it is that of the wheel scipy-openblas32, which comes with this package.
"""

import ctypes
import importlib.util
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from .compiler import prepare_compiler
from .operations import FAST

GEMMS = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")  # float32, float64, complex64: all that MLX calls
PREFIX = "scipy_"  # of all names in the wheel's library
TRIED = ("0.32.4",)  # MLX's versions in which this has been seen to work, by tests/cpu/test_blas.py

_tried = False  # whether `setup` has run
_openblas: ctypes.CDLL | None = None  # once MLX calls it
_own: dict[int, int] = {}  # place in the table → the address that stood there before


def _load_openblas() -> ctypes.CDLL:
    wheel = importlib.util.find_spec("scipy_openblas32")  # importing it takes longer than loading the library
    if wheel is None or wheel.origin is None:
        raise OSError("it is not installed")
    return ctypes.CDLL(str(next(Path(wheel.origin).parent.glob("lib/libscipy_openblas*"))))


def _address(library: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(library[name], ctypes.c_void_p).value or 0


def _find_places() -> dict[int, str]:
    """Where libmlx.so, which mlx.core has loaded, keeps the addresses of GEMMS."""
    lines = Path("/proc/self/maps").read_text("utf-8").splitlines()
    regions = [line.split(maxsplit=5) for line in lines if line.endswith("/libmlx.so")]
    libmlx = ctypes.CDLL(regions[0][-1])
    places: dict[int, str] = {}
    for region, rights, *_ in regions:
        if not rights.startswith(("r--", "rw-")):  # there is code
            continue
        start, end = (int(number, 16) for number in region.split("-"))
        memory = ctypes.string_at(start, end - start)
        for name in GEMMS:
            word = _address(libmlx, name).to_bytes(8, "little")
            places |= {start + found.start(): name for found in re.finditer(re.escape(word), memory)}
    return places


def _write(words: dict[int, int]) -> dict[int, int]:
    """Write these addresses at these places; returns those that stood there."""
    page = os.sysconf("SC_PAGESIZE")
    mprotect = ctypes.CDLL(None, use_errno=True).mprotect
    mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    before = {}
    for place, word in words.items():
        if mprotect(place // page * page, page, 1 | 2):  # read | write; the loader has sealed the table
            raise OSError(ctypes.get_errno(), "mprotect")
        before[place] = ctypes.c_uint64.from_address(place).value
        ctypes.c_uint64.from_address(place).value = word
    return before


def _use_openblas() -> ctypes.CDLL:
    """Make MLX call OpenBLAS. Raises whatever goes wrong; then MLX keeps its own BLAS."""
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")  # threads without work sleep at once instead of spinning
    library = _load_openblas()
    places = _find_places()
    if "cblas_sgemm" not in places.values():
        raise OSError("libmlx.so calls no BLAS")
    _own.update(_write({place: _address(library, PREFIX + name) for place, name in places.items()}))
    return library


def setup() -> None:
    """Make MLX quick on a Linux CPU. Once is enough, more does no harm; elsewhere it does nothing.

    Raises FileError if MLX cannot compile.
    """
    global _tried, _openblas
    prepare_compiler()
    if _tried or not FAST:
        return
    _tried = True
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc: one arena, no mmap, nothing given back until the program ends
        for option, value in ((-8, 1), (-4, 0), (-1, 2**31 - 1)):  # M_ARENA_MAX, _MMAP_MAX, _TRIM_THRESHOLD
            libc.mallopt(option, value)
    try:
        _openblas = _use_openblas()
    except Exception as error:  # whatever it was: the slow way works, and the line below says so
        logging.getLogger("kleinlite").warning(
            "OpenBLAS could not be put in place (%s), so matrix products take 30 to 100 times as long as they need to: "
            "`pip install scipy-openblas32` and start Python again.",
            error,
        )
    if _openblas and version("mlx") not in TRIED:
        logging.getLogger("kleinlite").warning(
            "OpenBLAS computes the products of MLX %s, with which nobody has tried it: if pictures are wrong, set "
            "KLEINLITE_CPU=off and say so.",
            version("mlx"),
        )


def give_back() -> None:
    """Return to the system what glibc keeps for the next picture, as `setup` told it to."""
    if _tried and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def blas_name() -> str | None:
    """Where matrix products come from since `setup`; None: MLX's own."""
    return "scipy-openblas32" if _openblas else None


def count_idle_cores() -> int:
    """Cores on which nothing runs at this moment but this thread; 0 or less where programs wait for one."""
    running = Path("/proc/loadavg").read_text("utf-8").split()[3].partition("/")[0]
    return (os.cpu_count() or 1) - int(running) + 1


@contextmanager
def idle_cores_only() -> Iterator[None]:
    """Inside, a product takes no more threads than there are idle cores, and at least one.

    A small product is over in less time than a thread waits for a core that something else has.
    """
    if _openblas is None:
        yield
        return
    use = _openblas[PREFIX + "openblas_set_num_threads"]
    most = _openblas[PREFIX + "openblas_get_num_threads"]()
    use(max(1, min(most, count_idle_cores())))
    try:
        yield
    finally:
        use(most)
