"""LoRA.

We teach nano a shape that it has never seen, in a minute and with a file of a few hundred kilobytes; and we read
the adapters that others have made for klein, whatever their spelling.

Promoted from notebooks/13_lora.ipynb: edit there, then run `make promote`. (seal 2c7077f1)
"""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from .quantisation import PackedLinear
from .transformer import Transformer

__all__ = [
    "velocity_loss",
    "LowRank",
    "Adapted",
    "linear_layers",
    "adapted_layers",
    "attach",
    "rescale",
    "detach",
    "new_changes",
    "matrix_shape",
    "train_only",
    "weight_of",
    "Rows",
    "Kronecker",
    "Hadamard",
    "DoRA",
    "Recomputed",
    "recompute_blocks",
]


def velocity_loss(
    net: Transformer, clean: mx.array, references: mx.array, txt: mx.array, t: mx.array, eps: mx.array, *rope: mx.array
) -> mx.array:
    """Squared error of the velocity at noise levels t (b,), from clean latents and noise eps, both (b, n, 128).

    references (b, r, 128), r = 0 without any, stay clean and are not judged. txt (b, m, f); rope: `Transformer.rope`.
    """
    level = t[:, None, None].astype(clean.dtype)
    x = mx.concatenate([(1 - level) * clean + level * eps, references], axis=1)
    v = net(x, txt, t, rope=rope)[:, : clean.shape[1]]
    return ((v - (eps - clean)).astype(mx.float32) ** 2).mean()


class LowRank(nn.Module):
    """LoRA: f·B(A x) is added to W x. a (r, d_in), b (d_out, r), factor f = alpha / r"""

    def __init__(self, a: mx.array, b: mx.array, factor: float = 1.0):
        super().__init__()
        self.a, self.b, self._factor = a, b, factor

    def __call__(self, x: mx.array, y: mx.array, layer: Callable) -> mx.array:
        """What is added to y = layer(x). (…, d_in) → (…, d_out)"""
        return self._factor * ((x @ self.a.T.astype(x.dtype)) @ self.b.T.astype(x.dtype))

    def matrix(self, w: mx.array) -> mx.array:
        """What is added to the weight w (d_out, d_in), in float32."""
        return self._factor * (self.b.astype(mx.float32) @ self.a.astype(mx.float32))


class Adapted(nn.Module):
    """A linear layer, left as it is, and what adapters add to its answer, each by its name and scale."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer, self.changes, self._scales = layer, {}, {}

    def __call__(self, x: mx.array) -> mx.array:
        y = total = self.layer(x)
        for name, change in self.changes.items():
            total = total + self._scales[name].astype(y.dtype) * change(x, y, self.layer)
        return total


def linear_layers(net: Transformer) -> dict[str, nn.Module]:
    """Every matrix of the network by its path: as it was, or with adapters around it."""
    kinds = (nn.Linear, PackedLinear, Adapted)
    found = {path: m for path, m in net.named_modules() if isinstance(m, kinds)}
    return {path: m for path, m in found.items() if not path.endswith(".layer")}  # those are inside an `Adapted`


def adapted_layers(net: Transformer, name: str) -> dict[str, Adapted]:
    """The layers that the adapter of this name changes, by path."""
    return {p: m for p, m in linear_layers(net).items() if isinstance(m, Adapted) and name in m.changes}


def attach(net: Transformer, name: str, changes: dict[str, nn.Module], scale: float = 1.0) -> None:
    """Add an adapter's changes to the layers at these paths; the layers themselves stay what they are.

    name: without dots, since it becomes part of the parameters' names.
    """
    layers = linear_layers(net)
    for path, change in changes.items():
        layer = layers[path] if isinstance(layers[path], Adapted) else Adapted(layers[path])
        layer.changes[name], layer._scales[name] = change, mx.array(scale)
        net.update_modules(tree_unflatten([(path, layer)]))


def rescale(net: Transformer, name: str, scale: float) -> None:
    """Let an adapter act more, less, or the other way round."""
    for layer in adapted_layers(net, name).values():
        layer._scales[name] = mx.array(scale)


def detach(net: Transformer, name: str) -> None:
    """Take an adapter away. A layer that no other one changes is put back as the object that it was."""
    for path, layer in adapted_layers(net, name).items():
        del layer.changes[name], layer._scales[name]
        if not layer.changes:
            net.update_modules(tree_unflatten([(path, layer.layer)]))


def new_changes(net: Transformer, rank: int, key: mx.array, factor: float = 1.0) -> dict[str, LowRank]:
    """A low-rank change for every matrix of the blocks, by path: A normal with variance 1/d_in, B zero."""
    changes = {}
    for path, (d_out, d_in) in {p: matrix_shape(m) for p, m in linear_layers(net).items() if "_blocks." in p}.items():
        key, sub = mx.random.split(key)
        changes[path] = LowRank(d_in**-0.5 * mx.random.normal((rank, d_in), key=sub), mx.zeros((d_out, rank)), factor)
    return changes


def matrix_shape(layer: nn.Module) -> tuple[int, int]:
    """Rows and columns of a layer's matrix, (d_out, d_in), not of the words that it may be packed in."""
    layer = layer.layer if isinstance(layer, Adapted) else layer
    return layer.packed.shape if isinstance(layer, PackedLinear) else layer.weight.shape


def train_only(net: Transformer, changes: dict[str, nn.Module]) -> None:
    """Freeze the network except for these changes."""
    net.freeze()
    for change in changes.values():
        change.unfreeze()


def weight_of(layer: nn.Module) -> mx.array:
    """The matrix of a layer without what adapters add, decoded if it is packed. (d_out, d_in), float32"""
    layer = layer.layer if isinstance(layer, Adapted) else layer
    return layer.packed.decode() if isinstance(layer, PackedLinear) else layer.weight.astype(mx.float32)


class Rows(nn.Module):
    """Changes for some of the `count` equally tall pieces of a fused matrix: queries, keys, values. Others stay."""

    def __init__(self, pieces: dict[int, nn.Module], count: int):
        super().__init__()
        self.pieces, self._count = {str(i): change for i, change in pieces.items()}, count

    def _each(self, whole: list[mx.array], change: Callable[[nn.Module, int], mx.array]) -> list[mx.array]:
        found = {int(i): change(piece, int(i)) for i, piece in self.pieces.items()}
        return [found.get(i, mx.zeros_like(part)) for i, part in enumerate(whole)]

    def __call__(self, x: mx.array, y: mx.array, layer: Callable) -> mx.array:
        cut = lambda whole: mx.split(whole, self._count, axis=-1)
        parts = cut(y)
        added = self._each(parts, lambda piece, i: piece(x, parts[i], lambda z: cut(layer(z))[i]))
        return mx.concatenate(added, axis=-1)

    def matrix(self, w: mx.array) -> mx.array:
        parts = mx.split(w, self._count)
        return mx.concatenate(self._each(parts, lambda piece, i: piece.matrix(parts[i])))


class Kronecker(nn.Module):
    """LoKr: the change is f·(w1 ⊗ w2), and is never written out. w1 (o1, i1), w2 (o2, i2)"""

    def __init__(self, w1: mx.array, w2: mx.array, factor: float = 1.0):
        super().__init__()
        self.w1, self.w2, self._factor = w1, w2, factor

    def __call__(self, x: mx.array, y: mx.array, layer: Callable) -> mx.array:
        grid = x.reshape(*x.shape[:-1], self.w1.shape[1], self.w2.shape[1])  # (…, i1, i2)
        found = self.w1.astype(x.dtype) @ grid @ self.w2.T.astype(x.dtype)  # (…, o1, o2)
        return self._factor * found.reshape(y.shape)

    def matrix(self, w: mx.array) -> mx.array:
        return self._factor * mx.kron(self.w1.astype(mx.float32), self.w2.astype(mx.float32))


class Hadamard(nn.Module):
    """LoHa: the change is f·(a1 b1) ⊙ (a2 b2). a1, a2 (d_out, r), b1, b2 (r, d_in)"""

    def __init__(self, a1: mx.array, b1: mx.array, a2: mx.array, b2: mx.array, factor: float = 1.0):
        super().__init__()
        self.a1, self.b1, self.a2, self.b2, self._factor = a1, b1, a2, b2, factor

    def __call__(self, x: mx.array, y: mx.array, layer: Callable) -> mx.array:
        return x @ self.matrix().T.astype(x.dtype)  # made anew each time: kept, it would be as large as the weight

    def matrix(self, w: mx.array | None = None) -> mx.array:
        a1, b1, a2, b2 = (m.astype(mx.float32) for m in (self.a1, self.b1, self.a2, self.b2))
        return self._factor * ((a1 @ b1) * (a2 @ b2))


class DoRA(nn.Module):
    """The weight with its low-rank change, V, and then every row (or column) of V as long as `magnitude` says.

    magnitude: (d_out,) or (d_out, 1) for rows, (1, d_in) for columns. w: the weight that it stands beside.
    """

    def __init__(self, low: LowRank, magnitude: mx.array, w: mx.array):
        super().__init__()
        self.low, self._columns = low, magnitude.ndim == 2 and magnitude.shape[0] == 1
        v = w.astype(mx.float32) + low.matrix(w)
        length = mx.sqrt((v * v).sum(axis=0 if self._columns else 1))
        self.gain = magnitude.flatten().astype(mx.float32) / length

    def __call__(self, x: mx.array, y: mx.array, layer: Callable) -> mx.array:
        gain = self.gain.astype(x.dtype)
        if self._columns:
            return layer(gain * x) - y + self.low(gain * x, y, layer)
        return (self.gain - 1).astype(x.dtype) * y + gain * self.low(x, y, layer)

    def matrix(self, w: mx.array) -> mx.array:
        v = w.astype(mx.float32) + self.low.matrix(w)
        return v * (self.gain if self._columns else self.gain[:, None]) - w


class Recomputed(nn.Module):
    """A block that keeps only its inputs for the backward pass, and works out again what lies between."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def __call__(self, *inputs):
        return nn.utils.checkpoint(self.block)(*inputs)


def recompute_blocks(net: Transformer) -> None:
    """Train this network in little memory: see `Recomputed`. Its paths get a `.block` in them."""
    net.double_blocks = [Recomputed(block) for block in net.double_blocks]
    net.single_blocks = [Recomputed(block) for block in net.single_blocks]
