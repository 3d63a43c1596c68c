"""What adapter files hold besides plain LoRAs: LoKr, LoHa, DoRA, and changes of a part of a matrix's rows.

Each has the two methods of chapter 14's `LoRA`: a call returns what is added to y = layer(x), and `delta` returns what
that adds to the weight.

Sources: LoKr and LoHa: LyCORIS, Yeh et al. 2023, arXiv 2309.14859; LoHa is FedPara, Hyeon-Woo et al. 2021, arXiv
2108.06098. DoRA: Liu et al. 2024, arXiv 2402.09353.
"""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from ...lora import AdaptedLinear, LoRA
from ...quantization import QuantizedLinear

__all__ = ["weight_of", "SplitAdapter", "Kronecker", "Hadamard", "DoRA"]


def weight_of(layer: nn.Module) -> mx.array:
    """The matrix of a layer without what adapters add, decoded if it is quantized. (d_out, d_in), float32"""
    layer = layer.layer if isinstance(layer, AdaptedLinear) else layer
    if isinstance(layer, QuantizedLinear):
        return layer.matrix.decode()
    weight: mx.array = layer.weight
    return weight.astype(mx.float32)


class Variant(nn.Module):
    """What a call adds is linear in x, which tells the change of the weight."""

    def delta(self, w: mx.array) -> mx.array:
        """What is added to the layer's weight w, (d_out, d_in), in float32."""
        w = w.astype(mx.float32)
        return self(mx.eye(w.shape[1]), w.T, lambda x: x @ w.T).T


class SplitAdapter(Variant):
    """Adapters of some of the `count` equally tall pieces of a fused matrix: queries, keys, values.

    pieces: by the number of the piece. The other pieces stay as they are.
    """

    def __init__(self, pieces: dict[int, nn.Module], count: int):
        super().__init__()
        self.pieces = {str(i): piece for i, piece in pieces.items()}
        self.count = count

    def __call__(self, x: mx.array, y: mx.array, layer: Callable[[mx.array], mx.array]) -> mx.array:
        """What is added to y = layer(x). (…, d_in) → (…, d_out)"""
        added = []
        for i, part in enumerate(mx.split(y, self.count, axis=-1)):
            piece = self.pieces.get(str(i))
            if piece is None:
                added.append(mx.zeros_like(part))
            else:
                added.append(piece(x, part, lambda z, i=i: mx.split(layer(z), self.count, axis=-1)[i]))
        return mx.concatenate(added, axis=-1)


class Kronecker(Variant):
    """LoKr: the change is s·(w1 ⊗ w2), which is never written out. w1 (o1, i1), w2 (o2, i2). Yeh et al. 2023"""

    def __init__(self, w1: mx.array, w2: mx.array, scaling: float = 1.0):
        super().__init__()
        self.w1 = w1
        self.w2 = w2
        self.scaling = scaling

    def __call__(self, x: mx.array, y: mx.array, layer: Callable[[mx.array], mx.array]) -> mx.array:
        """What is added to y = layer(x). (…, i1·i2) → (…, o1·o2)"""
        grid = x.reshape(*x.shape[:-1], self.w1.shape[1], self.w2.shape[1])  # (…, i1, i2)
        product = self.w1.astype(x.dtype) @ grid @ self.w2.T.astype(x.dtype)  # (…, o1, o2)
        return self.scaling * product.reshape(y.shape)


class Hadamard(Variant):
    """LoHa: the change is s·(a1 b1) ⊙ (a2 b2). a1, a2 (d_out, r), b1, b2 (r, d_in). Hyeon-Woo et al. 2021"""

    def __init__(self, a1: mx.array, b1: mx.array, a2: mx.array, b2: mx.array, scaling: float = 1.0):
        super().__init__()
        self.a1 = a1
        self.b1 = b1
        self.a2 = a2
        self.b2 = b2
        self.scaling = scaling

    def __call__(self, x: mx.array, y: mx.array, layer: Callable[[mx.array], mx.array]) -> mx.array:
        """What is added to y = layer(x). (…, d_in) → (…, d_out)"""
        first = self.a1.astype(mx.float32) @ self.b1.astype(mx.float32)
        second = self.a2.astype(mx.float32) @ self.b2.astype(mx.float32)
        delta = self.scaling * (first * second)  # made anew each time: kept, it would be as large as the weight
        return x @ delta.T.astype(x.dtype)


class DoRA(Variant):
    """V = W + a LoRA's change, and then every row (or column) of V as long as `magnitude` says. Liu et al. 2024

    LyCORIS makes it of LoHa and LoKr as well.
    magnitude: (d_out,) or (d_out, 1) for rows, (1, d_in) for columns. w: the weight that it stands beside.
    """

    def __init__(self, lora: LoRA | Kronecker | Hadamard, magnitude: mx.array, w: mx.array):
        super().__init__()
        self.lora = lora
        self.by_columns = magnitude.ndim == 2 and magnitude.shape[0] == 1
        v = w.astype(mx.float32) + lora.delta(w)
        length = mx.sqrt((v * v).sum(axis=0 if self.by_columns else 1))
        self.gain = magnitude.flatten().astype(mx.float32) / length  # (d_out,) or (d_in,)

    def __call__(self, x: mx.array, y: mx.array, layer: Callable[[mx.array], mx.array]) -> mx.array:
        """What is added to y = layer(x). (…, d_in) → (…, d_out)"""
        gain = self.gain.astype(x.dtype)
        if self.by_columns:
            return layer(gain * x) - y + self.lora(gain * x, y, layer)
        return (self.gain - 1).astype(x.dtype) * y + gain * self.lora(x, y, layer)
