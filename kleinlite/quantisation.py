"""Quantisation.

We keep the weights in 8 bits or in 4, by a formula short enough to work out by hand, and multiply with them as they
are.

Promoted from notebooks/07_quantisation.ipynb: edit there, then run `make promote`. (seal cb793084)
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass

import mlx.core as mx
import mlx.nn as nn

from .cpu.packed import dequantize, packed_matmul

__all__ = ["Packing", "STORED", "PACKINGS", "Packed", "pack_matrix", "PackedLinear"]


@dataclass(frozen=True)
class Packing:
    """How a matrix is packed: what a code means, its bits, and how many of them in a row share a scale."""

    mode: str  # "affine", "mxfp4", "mxfp8", "nvfp4"; "fp8": a scale per row; "stored": plain numbers, no codes
    bits: int
    group: int = 0

    @property
    def bits_per_weight(self) -> float:
        """With scales (and biases, if affine): 16 bits each in affine groups, 8 bits in the others."""
        return self.bits + {"affine": 32, "mxfp4": 8, "mxfp8": 8, "nvfp4": 8}.get(self.mode, 0) / (self.group or 1)


STORED = Packing("stored", 16)
PACKINGS = {
    **{bits: Packing("affine", bits, 64) for bits in (3, 4, 5, 6, 8)},
    "mxfp4": Packing("mxfp4", 4, 32),
    "mxfp8": Packing("mxfp8", 8, 32),
    "nvfp4": Packing("nvfp4", 4, 16),
}


@dataclass(frozen=True)
class Packed:
    """A matrix (d_out, d_in) in fewer bits: arrays of d_out rows each, and how to read them."""

    tensors: dict[str, mx.array]  # "weight", and where the packing has them "scales", "biases", "global_scale"
    packing: Packing
    ndim = 2

    @property
    def shape(self) -> tuple[int, int]:  # of the matrix, not of its words
        rows, columns = self.tensors["weight"].shape
        return rows, columns * 32 // self.packing.bits if self.packing.group else columns

    def decode(self, dtype: mx.Dtype = mx.float32) -> mx.array:
        """The matrix itself, or rows of it: (…, d_in)"""
        return dequantize(self.tensors, *astuple(self.packing)).astype(dtype)

    def map(self, f: Callable[[mx.array], mx.array]) -> "Packed":
        """The same for every array: choose or reorder rows."""
        return Packed({name: f(w) for name, w in self.tensors.items()}, self.packing)


def pack_matrix(w: mx.array, p: Packing) -> Packed:
    """A matrix (d_out, d_in) in `p`'s bits; d_in must be a multiple of the group."""
    if p.mode != "nvfp4":
        return Packed(dict(zip(("weight", "scales", "biases"), mx.quantize(w, p.group, p.bits, p.mode))), p)
    largest = mx.maximum(mx.abs(w).max().astype(mx.float32), 1e-30) / (448 * 6)  # largest scale times largest code
    codes, scales = mx.quantize(w.astype(mx.float32) / largest, p.group, p.bits, p.mode)
    return Packed({"weight": codes, "scales": scales, "global_scale": mx.full((w.shape[0], 1), largest)}, p)


class PackedLinear(nn.Module):
    """A matrix kept in fewer bits; its bias, if it has one, is an array as ever. (…, d_in) → (…, d_out)"""

    def __init__(self, packed: Packed, bias: mx.array | None = None):
        super().__init__()
        for name, w in (packed.tensors if bias is None else packed.tensors | {"bias": bias}).items():
            self[name] = w
        self._packing = packed.packing
        self.freeze()

    @property
    def packed(self) -> Packed:
        return Packed({name: w for name, w in self.items() if name != "bias"}, self._packing)

    def __call__(self, x: mx.array) -> mx.array:
        y = packed_matmul(x, self.packed.tensors, *astuple(self._packing))
        return y + self.bias if "bias" in self else y
