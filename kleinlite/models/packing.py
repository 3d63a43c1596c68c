"""Whole networks in fewer bits: which matrices are packed, in which order, what stands in for them. Hand-written.

Chapter 7 packs one matrix and one linear layer; here are the embedding, matrices that are packed already, and the order
that never has more than one matrix in memory in both forms.
"""

import math

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ..quantisation import STORED, Packed, PackedLinear, Packing, pack_matrix


class PackedEmbedding(PackedLinear):
    """A table of rows kept in fewer bits, of which only those asked for are decoded. (…) of whole numbers → (…, d)"""

    def __init__(self, packed: Packed, dtype: mx.Dtype):
        super().__init__(packed)
        self._dtype = dtype

    def __call__(self, ids: mx.array) -> mx.array:
        return self.packed.map(lambda w: w[ids]).decode(self._dtype)


def packed_layer(layer: nn.Module, packed: Packed, dtype: mx.Dtype) -> nn.Module:
    """What stands in for a linear layer or an embedding."""
    embedding = isinstance(layer, (nn.Embedding, PackedEmbedding))
    return PackedEmbedding(packed, dtype) if embedding else PackedLinear(packed, layer.get("bias"))


def join(parts: list[Packed]) -> Packed:
    """Matrices of the same width and packing, one below the other."""
    if len({(p.packing, *p.tensors, p.shape[1]) for p in parts}) > 1:
        raise ValueError("Matrices that are packed in different ways cannot be joined.")
    return Packed({k: mx.concatenate([p.tensors[k] for p in parts]) for k in parts[0].tensors}, parts[0].packing)


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
