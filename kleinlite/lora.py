"""LoRA.

Can two thin matrices teach a model a new shape? And what do they cost everything else that it draws?

Letters: a matrix W is (d_out, d_in), r is the rank of its change B A, with A (r, d_in) and B (d_out, r), in the
code `a` and `b`; n picture tokens, m text tokens, f the features of a text token.

Sources: LoRA: Hu et al. 2021, arXiv 2106.09685. Adapters beside quantized weights: QLoRA, Dettmers et al. 2023,
arXiv 2305.14314. LoRA and full training at long range: Biderman et al. 2024, arXiv 2405.09673; at each one's best
rate: Schulman et al. 2025, thinkingmachines.ai/blog/lora. Prior preservation: Ruiz et al. 2022, arXiv 2208.12242;
old answers: Li and Hoiem 2016, arXiv 1606.09282.

Promoted from notebooks/14_lora.ipynb: edit there, then run `make promote`. (seal c1ea2a10)
"""

from collections.abc import Callable, Mapping

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from .quantization import QuantizedLinear
from .transformer import Transformer

__all__ = [
    "LoRA", "AdaptedLinear", "linear_layers", "adapted_layers", "attach", "rescale", "detach", "MATRIX_KINDS",
    "matrix_shape", "rank_at", "new_deltas", "freeze_except",
]  # fmt: skip


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
