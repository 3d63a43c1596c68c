"""Whole networks in fewer bits: which matrices are quantized, in which order, what stands in for them.

Chapter 7 quantizes one matrix and one linear layer; here are the embedding, matrices that are quantized already, and
the order that never has more than one matrix in memory in both forms.
"""

import math

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ..quantization import UNQUANTIZED, QuantizedLinear, QuantizedMatrix, QuantSpec, quantize_matrix


class QuantizedEmbedding(QuantizedLinear):
    """A table of rows kept in fewer bits, of which only those asked for are decoded. (…) of whole numbers → (…, d)"""

    def __init__(self, quantized: QuantizedMatrix, dtype: mx.Dtype):
        super().__init__(quantized)
        self._dtype = dtype

    def __call__(self, ids: mx.array) -> mx.array:
        return self.matrix.map(lambda w: w[ids]).decode(self._dtype)


def quantized_layer(layer: nn.Module, quantized: QuantizedMatrix, dtype: mx.Dtype) -> nn.Module:
    """What stands in for a linear layer or an embedding."""
    embedding = isinstance(layer, (nn.Embedding, QuantizedEmbedding))
    return QuantizedEmbedding(quantized, dtype) if embedding else QuantizedLinear(quantized, layer.get("bias"))


def join(parts: list[QuantizedMatrix]) -> QuantizedMatrix:
    """Matrices of the same width and format, one below the other."""
    return QuantizedMatrix({k: mx.concatenate([p.tensors[k] for p in parts]) for k in parts[0].tensors}, parts[0].spec)


def plain_matrix(w: mx.array | QuantizedMatrix) -> mx.array:
    """A matrix to be quantized (again): as stored, or decoded from FP8."""
    if isinstance(w, QuantizedMatrix):
        return w.tensors["weight"] if w.spec == UNQUANTIZED else w.decode(mx.bfloat16)
    return w


def matrix_of(layer: nn.Module) -> mx.array | QuantizedMatrix:
    """The matrix of a linear layer or an embedding, quantized or not."""
    return layer.matrix if isinstance(layer, QuantizedLinear) else layer.weight


def should_quantize(shape: tuple[int, ...], total: int, p: QuantSpec) -> bool:
    """Whole groups in every row, and not so small against `total` weights that it would save nothing.

    MLX packs NVFP4, whose groups have 16 weights, 32 at a time, so that there has to be an even number of groups.
    """
    weights = shape[0] * shape[1]
    return shape[1] % p.group == 0 and weights % 32 == 0 and weights * 2000 >= total


def quantize(module: nn.Module, p: QuantSpec, dtype: mx.Dtype, lazy: bool = False) -> nn.Module:
    """Quantize a module's matrices, one after the other; what is not quantized computes in `dtype`. Returns the module.

    The largest comes first: while it is there in both forms, the others are not yet in memory.
    lazy: compute nothing yet; the first use of a matrix quantizes it.
    """
    kinds = (nn.Linear, nn.Embedding, QuantizedLinear)
    layers = {path: m for path, m in module.named_modules() if isinstance(m, kinds)}
    sizes = {path: math.prod(matrix_of(layer).shape) for path, layer in layers.items()}
    for path in sorted(layers, key=sizes.__getitem__, reverse=True):
        layer = layers.pop(path)  # nobody else holds it once the module has its quantized form
        if should_quantize(matrix_of(layer).shape, sum(sizes.values()), p):
            quantized = quantize_matrix(plain_matrix(matrix_of(layer)), p)
            if not lazy:
                mx.eval(quantized.tensors)
            module.update_modules(tree_unflatten([(path, quantized_layer(layer, quantized, dtype))]))
    return module
