"""LoRA.

We teach nano a shape that it has never seen, in a minute and with a file of a few hundred kilobytes; and we read
the adapters that others have made for klein, whatever their spelling.

Letters: a matrix W is (d_out, d_in), r is the rank of its change B A, with A (r, d_in) and B (d_out, r), in the
code `a` and `b`; n counts picture tokens (in the strip below, r counts those of references), m text tokens, and f
the features of a text token.

Sources: LoRA: Hu et al. 2021, arXiv 2106.09685. DoRA: Liu et al. 2024, arXiv 2402.09353. LoKr and LoHa: LyCORIS,
Yeh et al. 2023, arXiv 2309.14859; LoHa is FedPara, Hyeon-Woo et al. 2021, arXiv 2108.06098. Adapters beside
quantized weights: QLoRA, Dettmers et al. 2023, arXiv 2305.14314. Gradient checkpointing: Chen et al. 2016, arXiv
1604.06174.

Promoted from notebooks/14_lora.ipynb: edit there, then run `make promote`. (seal 40d52290)
"""

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from .quantization import QuantizedLinear
from .transformer import Transformer

__all__ = [
    "LoRA",
    "AdaptedLinear",
    "linear_layers",
    "adapted_layers",
    "attach",
    "rescale",
    "detach",
    "MATRIX_KINDS",
    "matrix_shape",
    "rank_at",
    "new_deltas",
    "freeze_except",
    "weight_of",
    "SplitAdapter",
    "Kronecker",
    "Hadamard",
    "DoRA",
    "ordered",
    "Checkpointed",
    "enable_gradient_checkpointing",
]


class LoRA(nn.Module):
    """s·B(A x) is added to W x. a (r, d_in), b (d_out, r), scaling s = alpha / r. Hu et al. 2021, section 4.1"""

    def __init__(self, a: mx.array, b: mx.array, scaling: float = 1.0):
        super().__init__()
        self.a = a
        self.b = b
        self.scaling = scaling

    def __call__(self, x: mx.array, y: mx.array, layer: Callable[[mx.array], mx.array]) -> mx.array:
        """What is added to y = layer(x). (…, d_in) → (…, d_out)"""
        return self.scaling * ((x @ self.a.T.astype(x.dtype)) @ self.b.T.astype(x.dtype))

    def delta(self, w: mx.array | None) -> mx.array:
        """What is added to the layer's weight w, (d_out, d_in), in float32. Only DoRA's depends on w."""
        return self.scaling * (self.b.astype(mx.float32) @ self.a.astype(mx.float32))


class AdaptedLinear(nn.Module):
    """A linear layer, left as it is, and what adapters add to its answer, each by its name and scale."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer
        self.deltas: dict[str, nn.Module] = {}
        self._scales: dict[str, mx.array] = {}  # with an underscore: they are no parameters

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.layer(x)
        total = y
        for name, delta in self.deltas.items():
            total = total + self._scales[name].astype(y.dtype) * delta(x, y, self.layer)
        return total


def linear_layers(net: nn.Module) -> dict[str, nn.Module]:
    """Every matrix of the network by its path: as it was, or with adapters around it."""
    layers = {}
    for path, layer in net.named_modules():
        is_linear = isinstance(layer, (nn.Linear, QuantizedLinear, AdaptedLinear))
        if is_linear and not path.endswith(".layer"):  # those are inside an `AdaptedLinear`
            layers[path] = layer
    return layers


def adapted_layers(net: nn.Module, name: str) -> dict[str, AdaptedLinear]:
    """The layers that the adapter of this name changes, by path."""
    layers = {}
    for path, layer in linear_layers(net).items():
        if isinstance(layer, AdaptedLinear) and name in layer.deltas:
            layers[path] = layer
    return layers


def attach(net: nn.Module, name: str, deltas: Mapping[str, nn.Module], scale: float = 1.0) -> None:
    """Add an adapter's deltas to the layers at these paths; the layers themselves stay what they are.

    name: without dots, since it becomes part of the parameters' names.
    """
    layers = linear_layers(net)
    for path, delta in deltas.items():
        layer = layers[path]
        adapted = layer if isinstance(layer, AdaptedLinear) else AdaptedLinear(layer)
        adapted.deltas[name] = delta
        adapted._scales[name] = mx.array(scale)
        net.update_modules(tree_unflatten([(path, adapted)]))


def rescale(net: nn.Module, name: str, scale: float) -> None:
    """Let an adapter act more, less, or with a negative scale the other way round."""
    for layer in adapted_layers(net, name).values():
        layer._scales[name] = mx.array(scale)


def detach(net: nn.Module, name: str) -> None:
    """Take an adapter away. A layer that no other one changes is put back as the object that it was."""
    for path, layer in adapted_layers(net, name).items():
        del layer.deltas[name]
        del layer._scales[name]
        if not layer.deltas:
            net.update_modules(tree_unflatten([(path, layer.layer)]))


MATRIX_KINDS = ("qkv", "proj", "mlp", "linear1", "linear2")  # of matrices in the blocks


def matrix_shape(layer: nn.Module) -> tuple[int, int]:
    """(d_out, d_in) of a layer's matrix, not of the words that hold it if it is quantized."""
    layer = layer.layer if isinstance(layer, AdaptedLinear) else layer
    d_out, d_in = layer.matrix.shape if isinstance(layer, QuantizedLinear) else layer.weight.shape
    return d_out, d_in


def rank_at(path: str, rank: int | Mapping[str, int]) -> int:
    """The rank for the matrix at this path, 0 for none. rank: of all in the blocks, or by kind, see `MATRIX_KINDS`."""
    if "_blocks." not in path:
        return 0
    kind = "mlp" if "_mlp." in path else path.rpartition(".")[2]
    return rank.get(kind, 0) if isinstance(rank, Mapping) else rank


def new_deltas(net: Transformer, rank: int | Mapping[str, int], key: mx.array, scaling: float = 1.0) -> dict[str, LoRA]:
    """A LoRA for the matrices of the blocks, by path: A normal with variance 1/d_in, B zero. rank: see `rank_at`."""
    deltas = {}
    for path, layer in linear_layers(net).items():
        if r := rank_at(path, rank):
            d_out, d_in = matrix_shape(layer)
            key, subkey = mx.random.split(key)
            a = d_in**-0.5 * mx.random.normal((r, d_in), key=subkey)
            deltas[path] = LoRA(a, mx.zeros((d_out, r)), scaling)
    return deltas


def freeze_except(net: nn.Module, deltas: Mapping[str, nn.Module]) -> None:
    """Freeze the network except for these deltas."""
    net.freeze()
    for delta in deltas.values():
        delta.unfreeze()


def weight_of(layer: nn.Module) -> mx.array:
    """The matrix of a layer without what adapters add, decoded if it is quantized. (d_out, d_in), float32"""
    layer = layer.layer if isinstance(layer, AdaptedLinear) else layer
    if isinstance(layer, QuantizedLinear):
        return layer.matrix.decode()
    weight: mx.array = layer.weight
    return weight.astype(mx.float32)


class SplitAdapter(nn.Module):
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

    def delta(self, w: mx.array) -> mx.array:
        """What is added to the layer's weight w, (d_out, d_in), in float32."""
        added = []
        for i, part in enumerate(mx.split(w, self.count)):
            piece = self.pieces.get(str(i))
            added.append(mx.zeros(part.shape) if piece is None else piece.delta(part))
        return mx.concatenate(added)


class Kronecker(nn.Module):
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

    def delta(self, w: mx.array | None) -> mx.array:
        """What is added to the layer's weight, (d_out, d_in), in float32."""
        return self.scaling * mx.kron(self.w1.astype(mx.float32), self.w2.astype(mx.float32))


class Hadamard(nn.Module):
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
        return x @ self.delta(None).T.astype(x.dtype)  # made anew each time: kept, it would be as large as the weight

    def delta(self, w: mx.array | None) -> mx.array:
        """What is added to the layer's weight, (d_out, d_in), in float32."""
        first = self.a1.astype(mx.float32) @ self.b1.astype(mx.float32)
        second = self.a2.astype(mx.float32) @ self.b2.astype(mx.float32)
        return self.scaling * (first * second)


class DoRA(nn.Module):
    """V = W + the LoRA's change, and then every row (or column) of V as long as `magnitude` says. Liu et al. 2024

    magnitude: (d_out,) or (d_out, 1) for rows, (1, d_in) for columns. w: the weight that it stands beside.
    """

    def __init__(self, lora: LoRA, magnitude: mx.array, w: mx.array):
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

    def delta(self, w: mx.array) -> mx.array:
        """What is added to the layer's weight w, (d_out, d_in), in float32."""
        v = w.astype(mx.float32) + self.lora.delta(w)
        return v * (self.gain if self.by_columns else self.gain[:, None]) - w


@mx.custom_function
def ordered(params: Any, x: mx.array) -> tuple[Any, mx.array]:
    """Both as they are. In the backward pass the gradient of x waits until those of the parameters are there."""
    return params, x


@ordered.vjp
def _ordered_vjp(primals: Any, cotangents: Any, outputs: Any) -> tuple[Any, mx.array]:
    params, x = cotangents
    gradients: dict[str, mx.array] = dict(tree_flatten(params))
    return params, mx.depends(x, list(gradients.values()))


class Checkpointed(nn.Module):
    """A block that keeps only its inputs for the backward pass and computes the rest again. Chen et al. 2016"""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def __call__(self, x: mx.array, *others: Any) -> Any:
        def compute(params: Any, *inputs: Any) -> Any:
            self.block.update(params)
            return self.block(*inputs)

        params_and_x: Any = ordered(self.block.trainable_parameters(), x)
        return mx.checkpoint(compute)(*params_and_x, *others)


def enable_gradient_checkpointing(net: Transformer) -> None:
    """Train this network in little memory: see `Checkpointed`. Its paths get a `.block` in them."""
    for name in ("double_blocks", "single_blocks"):
        net.update_modules({name: [Checkpointed(block) for block in net[name]]})
