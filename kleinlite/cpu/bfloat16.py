"""Products in bfloat16, on processors that multiply it (AVX512-BF16, AMX): oneDNN's, the library that torch calls too.

MLX's CPU build multiplies bfloat16 one value at a time. `pip install -e ".[bf16]"` brings oneDNN, which we call by
its C interface. Factors are rounded once per product, sums are float32. Without it, or on another processor, nothing
changes. Nor inside `mx.compile` and `mx.grad`: oneDNN reads memory, and there nothing has been computed yet.

Names and numbers are those of oneDNN 3: oneapi/dnnl/dnnl.h and dnnl_types.h.
"""

import ctypes
import itertools
import sysconfig
from contextlib import ExitStack, suppress
from functools import cache
from typing import Any

import mlx.core as mx

from ..errors import FileError
from .operations import FAST, SCORES

AVX512_BF16 = 0x80  # a bit of dnnl_cpu_isa_t, in AMX's number too: the processor multiplies bfloat16 itself
KINDS = {2: 2, 4: 3}  # bytes → dnnl_bf16, dnnl_f32


class Argument(ctypes.Structure):  # dnnl_exec_arg_t
    _fields_ = [("place", ctypes.c_int), ("memory", ctypes.c_void_p)]


class Library:
    """oneDNN, loaded."""

    def __init__(self, path: str):
        self.functions = ctypes.CDLL(path)
        self.functions.dnnl_set_primitive_cache_capacity(128)  # code for so many shapes, half a megabyte each
        self.stack = ExitStack()  # of what is to be destroyed
        self.engine = self.make("engine", "engine_create", 1, ctypes.c_size_t(0))  # dnnl_cpu
        self.stream = self.make("stream", "stream_create", self.engine, 1)  # dnnl_stream_in_order
        self.stack.pop_all()  # these two stay

    def call(self, name: str, *args: object) -> None:
        if self.functions[f"dnnl_{name}"](*args):
            raise FileError(f"oneDNN refuses {name}")

    def make(self, kind: str, name: str, *args: object) -> ctypes.c_void_p:
        """What a function creates and hands out by its first argument."""
        made = ctypes.c_void_p()
        self.call(name, ctypes.byref(made), *args)
        self.stack.callback(self.call, f"{kind}_destroy", made)
        return made

    def run(self, operation: str, *matrices: Any) -> None:
        """matmul: a, b and where a @ b goes. softmax_forward: x and where the softmax of its rows goes.

        Arrays (rows, columns), which may be parts of others, or turned; those of 16 bits are bfloat16 seen as uint16.
        """
        corners = [matrix[:1, :1] for matrix in matrices]
        mx.eval(matrices, corners)
        pair = ctypes.c_int64 * 2
        layouts = []
        memories = []
        with self.stack:  # oneDNN itself keeps the code for the next time
            for matrix, corner in zip(matrices, corners):
                view: Any = memoryview(matrix)
                strides = pair(*(stride // view.itemsize for stride in view.strides))
                where = (2, pair(*view.shape), KINDS[view.itemsize], strides)
                layouts.append(self.make("memory_desc", "memory_desc_create_with_strides", *where))
                address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(corner)))
                memories.append(self.make("memory", "memory_create", layouts[-1], self.engine, address))
            x, *other, y = layouts
            how: Any = (x, *other, None, y, None) if other else (96, 0x30000, x, y, 1, None)  # inference, accurate
            description = self.make("primitive_desc", f"{operation}_primitive_desc_create", self.engine, *how)
            code = self.make("primitive", "primitive_create", description)
            places = (1, 33, 17) if other else (1, 17)  # DNNL_ARG_SRC, _WEIGHTS, _DST
            arguments = (Argument * len(places))(*map(Argument, places, memories))
            self.call("primitive_execute", code, self.stream, len(places), arguments)
            self.call("stream_wait", self.stream)

    def product(self, x: mx.array, weight: mx.array) -> mx.array:
        """x @ weight.T, (…, d_in) and (d_out, d_in) → (…, d_out) in float32."""
        y = mx.zeros((*x.shape[:-1], len(weight)))
        rows = rounded(x).reshape(-1, x.shape[-1])
        self.run("matmul", rows, rounded(weight).T, y.reshape(len(rows), -1))
        return y

    def attention(self, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        """softmax(q kᵀ / √hd) v, three times (b, nh, s, hd) → (b, s, nh·hd). A few rows of scores at a time."""
        b, nh, s, hd = q.shape
        rows = min(s, max(1, SCORES // (4 * s)))
        q, k, v = map(rounded, (q * hd**-0.5, k, v))
        y = mx.zeros((b, s, nh, hd))
        scores = mx.zeros((rows, s))
        weights = mx.zeros((rows, s), dtype=mx.uint16)
        for i, head, row in itertools.product(range(b), range(nh), range(0, s, rows)):
            some = q[i, head, row : row + rows]
            n = len(some)
            self.run("matmul", some, k[i, head].T, scores[:n])
            self.run("softmax_forward", scores[:n], weights[:n])
            self.run("matmul", weights[:n], v[i, head], y[i, row : row + rows, head])
        return y.reshape(b, s, -1)


def rounded(x: mx.array) -> mx.array:
    """x in bfloat16, its bits seen as uint16."""
    return x.astype(mx.bfloat16).view(mx.uint16)


@cache
def find_library() -> Library | None:
    """oneDNN, if it is here and this processor multiplies bfloat16. Looked for once."""
    if FAST:
        with suppress(OSError, FileError):  # not here: float32 works
            library = Library(sysconfig.get_path("data") + "/lib/libdnnl.so.3")
            if library.functions.dnnl_get_effective_cpu_isa() & AVX512_BF16:
                return library
    return None


def bfloat16_name() -> str | None:
    """What multiplies bfloat16; None: nothing here does it quickly."""
    return "oneDNN" if find_library() else None


_calls: list[None] = []


@mx.compile
def _probe(arrays: list[mx.array]) -> list[mx.array]:
    _calls.append(None)
    return arrays


def library_for(*arrays: mx.array) -> Library | None:
    """`find_library`, unless one of these stands in for others, in a function that MLX compiles or differentiates.

    There MLX runs line by line what is compiled inside. Elsewhere it does not, after the first time.
    """
    for _ in range(2):
        _calls.clear()
        _probe([x.flatten()[:1] for x in arrays])
    return None if _calls else find_library()
