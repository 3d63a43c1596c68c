"""Quantization.

The 4B's transformer has 3.9 billion weights. How many bits does a weight need?

Letters: d_in inputs of a layer, d_out outputs, a group: neighbors in a row that share one scale.

Sources: the MX formats: OCP Microscaling Formats v1.0, 2023. NVFP4: NVIDIA's format of E2M1 codes with an E4M3
scale for 16. FP8 (E4M3): Micikevicius et al. 2022, arXiv 2209.05433. Affine groups: as `mx.quantize` makes them.

Promoted from notebooks/07_quantization.ipynb: edit there, then run `make promote`. (seal 5742297f)
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

__all__ = [
    "QuantSpec", "UNQUANTIZED", "QUANT_SPECS", "QuantizedMatrix", "quantize_matrix", "quantized_product",
    "QuantizedLinear",
]  # fmt: skip


@dataclass(frozen=True)
class QuantSpec:
    """How a matrix is quantized: what a code means, its bits, and how many of them in a row share a scale."""

    mode: str  # "affine", "mxfp4", "mxfp8", "nvfp4"; "fp8": a scale per row; "stored": plain numbers, no codes
    bits: int
    group: int = 0  # 0: no groups

    @property
    def bits_per_weight(self) -> float:
        """With a group's scale, and its bias if affine: 16 bits each in affine groups, 8 bits in the others."""
        if not self.group:
            return self.bits
        return self.bits + (32 if self.mode == "affine" else 8) / self.group


UNQUANTIZED = QuantSpec("stored", 16)
QUANT_SPECS: dict[int | str, QuantSpec] = {
    **{bits: QuantSpec("affine", bits, 64) for bits in (3, 4, 5, 6, 8)},
    "mxfp4": QuantSpec("mxfp4", 4, 32),
    "mxfp8": QuantSpec("mxfp8", 8, 32),
    "nvfp4": QuantSpec("nvfp4", 4, 16),
}


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix (d_out, d_in) in fewer bits: arrays of d_out rows each, and how to read them."""

    tensors: dict[str, mx.array]  # "weight", and where the spec has them "scales", "biases", "global_scale"
    spec: QuantSpec

    @property
    def shape(self) -> tuple[int, int]:
        """(d_out, d_in): of the matrix, not of the words that hold its codes."""
        rows, columns = self.tensors["weight"].shape
        return rows, columns * 32 // self.spec.bits if self.spec.group else columns

    def decode(self, dtype: mx.Dtype = mx.float32) -> mx.array:
        """The matrix itself: (d_out, d_in), or with other leading axes if rows were chosen by `map`."""
        weight = self.tensors["weight"]
        if self.spec.mode == "stored":
            return weight.astype(dtype)
        if self.spec.mode == "fp8":
            return (mx.from_fp8(weight, mx.float32) * self.tensors["scales"]).astype(dtype)
        scales = self.tensors["scales"]
        biases = self.tensors.get("biases")
        if biases is not None:  # float16 groups are decoded in float32
            scales = scales.astype(mx.float32)
            biases = biases.astype(mx.float32)
        w = mx.dequantize(weight, scales, biases, self.spec.group, self.spec.bits, self.spec.mode, dtype=mx.float32)
        return (w * self.tensors.get("global_scale", 1.0)).astype(dtype)

    def map(self, f: Callable[[mx.array], mx.array]) -> "QuantizedMatrix":
        """The same for every array: choose or reorder rows."""
        return QuantizedMatrix({name: f(w) for name, w in self.tensors.items()}, self.spec)


def quantize_matrix(w: mx.array, spec: QuantSpec) -> QuantizedMatrix:
    """A matrix (d_out, d_in) in the bits of `spec`; d_in must be a multiple of the group."""
    if spec.mode != "nvfp4":
        arrays = mx.quantize(w, spec.group, spec.bits, spec.mode)
        return QuantizedMatrix(dict(zip(("weight", "scales", "biases"), arrays)), spec)
    largest = mx.maximum(mx.abs(w).max().astype(mx.float32), 1e-30) / (448 * 6)  # largest scale times largest code
    codes, scales, *_ = mx.quantize(w.astype(mx.float32) / largest, spec.group, spec.bits, spec.mode)
    global_scale = mx.full((w.shape[0], 1), largest)
    return QuantizedMatrix({"weight": codes, "scales": scales, "global_scale": global_scale}, spec)


def quantized_product(x: mx.array, matrix: QuantizedMatrix) -> mx.array:
    """x @ W.T, (…, d_in) → (…, d_out), in the type of x."""
    tensors = matrix.tensors
    mode = matrix.spec.mode
    if mode in ("stored", "fp8"):
        [weight] = mx.depends([tensors["weight"]], [x])  # no layer is decoded before its turn
        weight = weight.astype(x.dtype) if mode == "stored" else mx.from_fp8(weight, x.dtype)
        y = x @ weight.T
    else:
        codes = (tensors["weight"], tensors["scales"], tensors.get("biases"))
        y = mx.quantized_matmul(x, *codes, True, matrix.spec.group, matrix.spec.bits, mode)
    row_scale = tensors.get("scales") if mode == "fp8" else tensors.get("global_scale")
    return (y if row_scale is None else y * row_scale[:, 0]).astype(x.dtype)


class QuantizedLinear(nn.Module):
    """A linear layer whose matrix is kept in fewer bits; its bias, if any, is plain. (…, d_in) → (…, d_out)"""

    def __init__(self, matrix: QuantizedMatrix, bias: mx.array | None = None):
        super().__init__()
        for name, w in matrix.tensors.items():
            self[name] = w
        if bias is not None:
            self.bias = bias
        self.spec = matrix.spec
        self.freeze()

    @property
    def matrix(self) -> QuantizedMatrix:
        """The layer's matrix, without its bias."""
        return QuantizedMatrix({name: w for name, w in self.items() if name != "bias"}, self.spec)

    def __call__(self, x: mx.array) -> mx.array:
        y = quantized_product(x, self.matrix)
        return y + self.bias if "bias" in self else y
