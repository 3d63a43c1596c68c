"""Several machines.

Two computers with 16 GB each stand side by side. Can they draw one picture together, and for which cable between
them does it pay?

Letters: b pictures, s tokens = m text + n picture tokens, d width, N machines.

Sources: matrices cut in pairs: Shoeybi et al. 2019 (Megatron-LM), arXiv 1909.08053. Keys and values sent round: Liu
et al. 2023 (ring attention), arXiv 2310.01889.

Promoted from notebooks/18_several_machines.ipynb: edit there, then run `make promote`. (seal 8c675123)
"""

import math
import re
from functools import partial
from itertools import accumulate

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import shard_inplace
from mlx.utils import tree_flatten, tree_unflatten

from .errors import UserError
from .lora import linear_layers, matrix_shape
from .quantization import QuantizedLinear
from .sampling import Field, classifier_free_guidance

__all__ = [
    "CUTS", "find_cuts", "head_counts", "common_divisor", "check_shares", "held_share", "SummedLinear", "divide",
    "shard", "shared_guidance",
]  # fmt: skip

CUTS = {  # by name: along rows (0) or columns (1), and how many equally large matrices are fused in one
    "qkv": (0, 3),
    **dict.fromkeys(["img_mlp.0", "txt_mlp.0", "mlp_in"], (0, 2)),  # FLUX.2, FLUX 3
    **dict.fromkeys(["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3"], (0, 1)),  # Qwen3, Z-Image
    **dict.fromkeys(["proj", "img_mlp.2", "txt_mlp.2", "attn_out", "mlp_out"], (1, 1)),
    **dict.fromkeys(["o_proj", "down_proj", "out", "w2"], (1, 1)),
}


def find_cuts(network: nn.Module) -> dict[str, tuple[int, list[int]]]:
    """By path, every matrix that is divided: along which axis, and the sizes of its segments, each divided evenly."""
    cuts = {}
    for path, layer in linear_layers(network).items():
        name = re.findall(r"\w+?(?:\.\d+)?$", path)[0]  # the last name, with a number behind it if there is one
        d_out, d_in = matrix_shape(layer)
        if name == "linear1":  # queries, keys, values, the two halves of the MLP
            cuts[path] = 0, [d_in] * 3 + [(d_out - 3 * d_in) // 2] * 2
        elif name == "linear2":  # attention, MLP
            cuts[path] = 1, [d_out, d_in - d_out]
        elif name in CUTS:
            axis, count = CUTS[name]
            cuts[path] = axis, [(d_out, d_in)[axis] // count] * count
    return cuts


def head_counts(module: nn.Module) -> dict[str, int]:
    """The numbers of heads that a module works on: `heads`, and `kv_heads` where keys have fewer."""
    return {name: count for name, count in vars(module).items() if name in ("heads", "kv_heads")}


def common_divisor(network: nn.Module) -> int:
    """A network can be shared evenly by this many machines, and by each divisor of that number."""
    counts = [count for module in network.modules() for count in head_counts(module).values()]
    layers = linear_layers(network)
    for path, (axis, segments) in find_cuts(network).items():
        layer = getattr(layers[path], "layer", layers[path])  # without its adapters
        group = layer.spec.group if axis == 1 and isinstance(layer, QuantizedLinear) else 0
        counts += [segment // group if segment % group == 0 else 1 for segment in segments] if group else segments
    return math.gcd(*counts)


def check_shares(network: nn.Module, size: int) -> None:
    """Raises UserError if this many machines cannot share a network evenly."""
    divisor = common_divisor(network)
    if divisor % size:
        able = ", ".join(str(n) for n in range(1, divisor + 1) if divisor % n == 0)
        raise UserError(f"{size} machines cannot share this model's heads evenly: start one of {able}.")


def held_share(network: nn.Module, size: int) -> float:
    """The share of a network's weights that each of `size` machines holds: its part of what is cut, all the rest."""
    weights: dict[str, mx.array] = dict(tree_flatten(network.parameters()))
    layers = linear_layers(network)
    cut = sum(math.prod(matrix_shape(layers[path])) for path in find_cuts(network))
    return 1 - (1 - 1 / size) * cut / sum(w.size for w in weights.values())


class SummedLinear(nn.Module):
    """Some columns of a matrix, and the sum over all machines. (…, d_in / N) → (…, d_out), the same everywhere"""

    def __init__(self, part: nn.Module, group: mx.distributed.Group):
        super().__init__()
        self.part = part
        self._group = group

    def __call__(self, x: mx.array) -> mx.array:
        return mx.distributed.all_sum(self.part(x), group=self._group)


def divide(cut: tuple[int, list[int]], path: str, w: mx.array) -> int | tuple[int, list[int]] | None:
    """For `shard_inplace`: along which axis a tensor of a layer, LoRA or LoHa is divided, and where segments end."""
    axis, segments = cut
    with_rows = {"weight", "scales", "biases", "global_scale", "bias", "b", "a1", "a2"}
    with_columns = {"weight", "scales", "biases", "a", "b1", "b2"}
    if path.split(".")[-1] not in (with_rows, with_columns)[axis] or w.shape[axis] == 1:  # one scale for a row
        return None
    if len(segments) == 1 or "pieces" in path:  # an adapter of one segment
        return axis
    return axis, [end * w.shape[axis] // sum(segments) for end in accumulate(segments[:-1])]


def shard(network: nn.Module, group: mx.distributed.Group) -> nn.Module:
    """Leave in memory only what this machine needs: its heads and its part of every MLP. Returns the network.

    Adapters are attached before; all machines call the network with the same inputs. Raises UserError if uneven.
    """
    check_shares(network, group.size())
    layers = linear_layers(network)
    for path, cut in find_cuts(network).items():
        shard_inplace(layers[path], partial(divide, cut), group=group)
        mx.eval(layers[path].parameters())  # the whole matrix is forgotten before the next one is read
        if cut[0] == 1:
            network.update_modules(tree_unflatten([(path, SummedLinear(layers[path], group))]))
    for module in network.modules():
        for name, count in head_counts(module).items():
            setattr(module, name, count // group.size())
    return network


def shared_guidance(field: Field, guidance: float, group: mx.distributed.Group) -> Field:
    """Guidance on two machines, of which each knows one field: the first with the prompt, the second without."""

    def guided(x: mx.array, t: float, t_next: float) -> mx.array:
        with_prompt, without = mx.split(mx.distributed.all_gather(field(x, t, t_next), group=group), 2)
        return classifier_free_guidance(with_prompt, without, guidance)

    return guided
