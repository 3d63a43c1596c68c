"""A transformer's training step on two cores of a Linux CPU. Hand-written; elsewhere it is the step that it was.

Inside `kleinlite.cpu.two_streams` a block works on one half of the batch here and on the other there, and Muon on one
matrix here and the next one there: the same numbers, apart from how rows are added up. Names of weights stay.
"""

import mlx.core as mx
import mlx.optimizers as optim

from ..cpu import by_halves, by_turns
from ..transformer import DoubleBlock, SingleBlock, Transformer


class SharedDoubleBlock(DoubleBlock):
    def __call__(self, img, txt, img_mod, txt_mod, rope, attend=None) -> tuple[mx.array, mx.array]:
        k, block = len(img_mod), super().__call__
        half = lambda img, txt, *mods: block(img, txt, mods[:k], mods[k:], rope, attend)
        return by_halves(half, img, txt, *img_mod, *txt_mod)


class SharedSingleBlock(SingleBlock):
    def __call__(self, x: mx.array, mod: list[mx.array], rope, attend=None) -> mx.array:
        block = super().__call__
        return by_halves(lambda x, *mod: block(x, mod, rope, attend), x, *mod)


class SharedMuon(optim.Muon):
    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict) -> mx.array:
        with by_turns():
            return super().apply_single(gradient, parameter, state)


SHARED = {DoubleBlock: SharedDoubleBlock, SingleBlock: SharedSingleBlock, optim.Muon: SharedMuon}


def share_blocks(net: Transformer) -> Transformer:
    """The network itself, with blocks that share the cores."""
    for block in (*net.double_blocks, *net.single_blocks):
        block.__class__ = SHARED[type(block)]
    return net


def share_matrices(optimizer: optim.MultiOptimizer) -> optim.MultiOptimizer:
    """The optimizer itself, its Muon sharing the cores."""
    for part in optimizer.optimizers:
        part.__class__ = SHARED.get(type(part), type(part))
    return optimizer
