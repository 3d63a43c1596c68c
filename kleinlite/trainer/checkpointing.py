"""Training in less memory: only the inputs of each block are kept, and the rest is computed again when it is due.

A third more work when all weights are trained, half more when they are frozen and an adapter learns. Gradient
checkpointing: Chen et al. 2016, arXiv 1604.06174.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..transformer import Transformer


@mx.custom_function
def ordered(params: Any, x: mx.array) -> tuple[Any, mx.array]:
    """Both as they are. In the backward pass the gradient of x waits until those of the parameters are there.

    Otherwise nothing needs the gradients of a block's adapters until the end, and MLX keeps what they are made of for
    several blocks at once.
    """
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
