"""Quantisation.

We keep the weights in 8 bits or in 4, by a formula short enough to work out by hand, and multiply with them as they
are.

Promoted from notebooks/07_quantisation.ipynb: edit there, then run `make promote`. (seal 3b95a55c)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from .cpu.packed import packed_matmul

__all__ = [
    "Packing",
    "PACKINGS",
    "STORED",
    "Packed",
    "decode",
    "pack_matrix",
    "join",
    "multiply",
    "PackedLinear",
    "PackedEmbedding",
    "packed_layer",
    "unpacked",
    "worth_packing",
    "quantize",
]


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


PACKINGS = {
    **{bits: Packing("affine", bits, 64) for bits in (3, 4, 5, 6, 8)},
    "mxfp4": Packing("mxfp4", 4, 32),
    "mxfp8": Packing("mxfp8", 8, 32),
    "nvfp4": Packing("nvfp4", 4, 16),
}
STORED = Packing("stored", 16)


@dataclass(frozen=True)
class Packed:
    """A matrix (d_out, d_in) in fewer bits: arrays of d_out rows each, and how to read them."""

    tensors: dict[str, mx.array]  # "weight", and where the packing has them "scales", "biases", "global_scale"
    packing: Packing

    ndim = 2

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix, not of its words."""
        rows, columns = self.tensors["weight"].shape
        in_words = self.packing.mode not in ("stored", "fp8")
        return rows, columns * 32 // self.packing.bits if in_words else columns

    def map(self, f: Callable[[mx.array], mx.array]) -> "Packed":
        """The same for every array: choose or reorder rows."""
        return Packed({name: f(w) for name, w in self.tensors.items()}, self.packing)

    def decode(self, dtype: mx.Dtype = mx.float32) -> mx.array:
        """The matrix itself, or rows of it: (…, d_in)"""
        return decode(self.tensors, self.packing).astype(dtype)


def decode(tensors: dict[str, mx.array], p: Packing) -> mx.array:
    """The matrix, or some rows of it, from its tensors: (…, d_in), float32 unless stored otherwise."""
    weight, scales, biases = (tensors.get(name) for name in ("weight", "scales", "biases"))
    if p.mode == "stored":
        return weight
    if p.mode == "fp8":
        return mx.from_fp8(weight, mx.float32) * scales
    if p.mode == "affine":
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    w = mx.dequantize(weight, scales, biases, p.group, p.bits, p.mode, dtype=mx.float32)
    return w * tensors.get("global_scale", 1.0)


def pack_matrix(w: mx.array, p: Packing) -> Packed:
    """A matrix (d_out, d_in) in `p`'s bits; d_in must be a multiple of the group."""
    if p.mode != "nvfp4":
        return Packed(dict(zip(("weight", "scales", "biases"), mx.quantize(w, p.group, p.bits, p.mode))), p)
    largest = mx.maximum(mx.abs(w).max().astype(mx.float32), 1e-30) / (448 * 6)  # largest scale times largest code
    codes, scales = mx.quantize(w.astype(mx.float32) / largest, p.group, p.bits, p.mode)
    return Packed({"weight": codes, "scales": scales, "global_scale": mx.full((w.shape[0], 1), largest)}, p)


def join(parts: list[Packed]) -> Packed:
    """Matrices of the same width and packing, one below the other."""
    if len({(p.packing, *p.tensors, p.shape[1]) for p in parts}) > 1:
        raise ValueError("Matrices that are packed in different ways cannot be joined.")
    return Packed({k: mx.concatenate([p.tensors[k] for p in parts]) for k in parts[0].tensors}, parts[0].packing)


def multiply(x: mx.array, packed: Packed) -> mx.array:
    """x @ W.T with a packed W, (…, d_in) → (…, d_out), as x's type. Not inside `mx.compile` on a CPU: it evaluates."""
    t, p = packed.tensors, packed.packing
    if mx.default_device() == mx.Device(mx.cpu):
        y = packed_matmul(x.reshape(-1, x.shape[-1]).astype(mx.float32), t, p.mode, p.bits, p.group)
        y = y.reshape(*x.shape[:-1], -1).astype(x.dtype)
        mx.eval(y)  # so that one decoded layer at a time is in memory
        return y
    if p.mode in ("stored", "fp8"):
        [w] = mx.depends([t["weight"]], [x])  # so that no layer is decoded before its turn
        y = x @ (w.astype(x.dtype) if p.mode == "stored" else mx.from_fp8(w, x.dtype)).T
    else:
        y = mx.quantized_matmul(x, t["weight"], t["scales"], t.get("biases"), True, p.group, p.bits, p.mode)
    scale = t["scales"] if p.mode == "fp8" else t.get("global_scale")
    return (y if scale is None else y * scale[:, 0]).astype(x.dtype)


class PackedLinear(nn.Module):
    """A matrix kept in fewer bits; its bias, if it has one, is an array as ever. (…, d_in) → (…, d_out)"""

    def __init__(self, packed: Packed, bias: mx.array | None = None):
        super().__init__()
        for name, w in packed.tensors.items():
            self[name] = w
        if bias is not None:
            self.bias = bias
        self._packing = packed.packing
        self.freeze()

    @property
    def packed(self) -> Packed:
        return Packed({name: w for name, w in self.items() if name != "bias"}, self._packing)

    def __call__(self, x: mx.array) -> mx.array:
        y = multiply(x, self.packed)
        return y + self.bias if "bias" in self else y


class PackedEmbedding(PackedLinear):
    """A table of rows kept in fewer bits. (…) of whole numbers → (…, d)"""

    def __init__(self, packed: Packed, dtype: mx.Dtype):
        super().__init__(packed)
        self._dtype = dtype

    def __call__(self, ids: mx.array) -> mx.array:
        return self.packed.map(lambda w: w[ids]).decode(self._dtype)


def packed_layer(layer: nn.Module, packed: Packed, dtype: mx.Dtype) -> nn.Module:
    """What stands in for a linear layer or an embedding."""
    embedding = isinstance(layer, (nn.Embedding, PackedEmbedding))
    return PackedEmbedding(packed, dtype) if embedding else PackedLinear(packed, layer.get("bias"))


def unpacked(w: mx.array | Packed) -> mx.array:
    """A matrix to be packed (again): as stored, or decoded from FP8."""
    if isinstance(w, Packed):
        return w.tensors["weight"] if w.packing == STORED else w.decode(mx.bfloat16)
    return w


def worth_packing(shape: tuple[int, int], total: int, p: Packing) -> bool:
    """Whole groups in every row, and not so small against `total` weights that it would save nothing."""
    return shape[1] % p.group == 0 and shape[0] * shape[1] * 2000 >= total


def quantize(module: nn.Module, p: Packing, dtype: mx.Dtype) -> nn.Module:
    """Pack the matrices of a module, one after the other; what is not packed computes in `dtype`. Returns the module.

    The largest comes first: while it is there in both forms, the others are not yet in memory.
    """
    layers = {path: m for path, m in module.named_modules() if isinstance(m, (nn.Linear, nn.Embedding, PackedLinear))}
    matrix = lambda m: m.packed if isinstance(m, PackedLinear) else m.weight
    sizes = {path: math.prod(matrix(layer).shape) for path, layer in layers.items()}
    for path in sorted(layers, key=sizes.get, reverse=True):
        layer = layers.pop(path)  # nobody else holds it once the module has its packed form
        if worth_packing(matrix(layer).shape, sum(sizes.values()), p):
            packed = pack_matrix(unpacked(matrix(layer)), p)
            mx.eval(packed.tensors)
            module.update_modules(tree_unflatten([(path, packed_layer(layer, packed, dtype))]))
    return module
