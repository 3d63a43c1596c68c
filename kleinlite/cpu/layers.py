"""Layers of the chapters with this folder's operations instead of MLX's, for networks loaded on a Linux CPU."""

from contextlib import suppress
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .. import text_encoder, transformer
from ..position_ids import Rope, apply_rope
from ..quantization import QuantizedLinear
from ..transformer import SwiGLU, Transformer
from .bfloat16 import find_library, library_for
from .operations import FAST, attention, silu
from .quantized_matmul import quantized_matmul


def speed_up(module: nn.Module, bfloat16: bool = True) -> None:
    """Let a network's layers use this room's attention, silu and quantized product; gradients are the same.

    It changes the classes of the layers, not their weights. A second call changes nothing, nor does one on another
    device than a Linux CPU.
    bfloat16: whether matrices kept in it may also multiply in it, with their network's attention, where that is quick.
    """
    layers = module.modules() if FAST else []
    for layer in layers:
        layer.__class__ = FAST_LAYERS.get(type(layer), type(layer))
    narrow = [m for m in layers if type(m) is FastQuantizedLinear and m.weight.dtype == mx.bfloat16]
    if bfloat16 and narrow and find_library():
        for layer in narrow:
            layer.__class__ = Bfloat16Linear
        if isinstance(module, FastTransformer):
            module.attention = rounded_attention


def roped_attention(q: mx.array, k: mx.array, v: mx.array, rope: Rope) -> mx.array:
    """As chapter 5's: queries and keys rotated by position, (b, nh, s, hd) → (b, s, d)"""
    q = apply_rope(q, rope)
    k = apply_rope(k, rope)
    return transformer.join_heads(attention(q, k, v, scale=q.shape[-1] ** -0.5))


def rounded_attention(q: mx.array, k: mx.array, v: mx.array, rope: Rope) -> mx.array:
    """The same with both products in bfloat16, where their factors are more than stand-ins."""
    library = library_for(q, k, v)
    if library is None:
        return roped_attention(q, k, v, rope)
    return library.attention(apply_rope(q, rope), apply_rope(k, rope), v)


class FastTransformer(Transformer):
    attention = staticmethod(roped_attention)

    def __call__(self, *args: Any, attention_fn: transformer.AttentionFn | None = None, **kwargs: Any) -> mx.array:
        return super().__call__(*args, attention_fn=attention_fn or self.attention, **kwargs)


class FastSwiGLU(SwiGLU):
    def __call__(self, x: mx.array) -> mx.array:
        gate, up = mx.split(x, 2, axis=-1)
        return silu(gate) * up


class FastAttention(text_encoder.Attention):
    def __call__(self, x: mx.array, mask: mx.array) -> mx.array:
        b, m, _ = x.shape

        def heads(y: mx.array) -> mx.array:
            return y.reshape(b, m, -1, self.head_dim).transpose(0, 2, 1, 3)

        def rotated(y: mx.array) -> mx.array:
            return mx.fast.rope(y, self.head_dim, traditional=False, base=self.theta, scale=1.0, offset=0)

        q = rotated(self.q_norm(heads(self.q_proj(x))))
        k = rotated(self.k_norm(heads(self.k_proj(x))))
        y = attention(q, k, heads(self.v_proj(x)), self.head_dim**-0.5, mask)
        projected: mx.array = self.o_proj(y.transpose(0, 2, 1, 3).reshape(b, m, -1))
        return projected


class FastMLP(text_encoder.MLP):
    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class FastQuantizedLinear(QuantizedLinear):
    def product(self, x: mx.array) -> mx.array:
        return quantized_matmul(x, self.matrix.tensors, self.spec.mode, self.spec.bits, self.spec.group)

    def __call__(self, x: mx.array) -> mx.array:
        y = self.product(x)
        with suppress(ValueError):  # inside `mx.compile` there is nothing to work out yet
            mx.eval(y)  # so that one decoded layer at a time is in memory
        return y + self.bias if "bias" in self else y


class Bfloat16Linear(FastQuantizedLinear):
    def product(self, x: mx.array) -> mx.array:
        library = library_for(x, self.weight)
        return super().product(x) if library is None else library.product(x, self.weight).astype(x.dtype)


FAST_LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    Transformer: FastTransformer,
    SwiGLU: FastSwiGLU,
    text_encoder.Attention: FastAttention,
    text_encoder.MLP: FastMLP,
    QuantizedLinear: FastQuantizedLinear,
}
