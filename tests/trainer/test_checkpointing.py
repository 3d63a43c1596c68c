"""Checkpointing: the same gradients in less memory."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from test_lora import answer, apart, deltas_of, small_net  # noqa: F401, a fixture

from kleinlite.lora import attach, freeze_except
from kleinlite.position_ids import image_ids, text_ids
from kleinlite.trainer.checkpointing import Checkpointed, enable_gradient_checkpointing
from kleinlite.transformer import Transformer, TransformerConfig


def test_gradients_with_checkpointing_are_the_same(net):
    def loss(model):
        return (answer(model) ** 2).mean()

    value, gradients = nn.value_and_grad(net, loss)(net)
    enable_gradient_checkpointing(net)
    again, recomputed = nn.value_and_grad(net, loss)(net)
    assert value.item() == pytest.approx(again.item(), rel=1e-6)
    recomputed = {name.replace(".block.", "."): g for name, g in tree_flatten(recomputed)}
    for name, g in tree_flatten(gradients):
        assert apart(g, recomputed[name]) <= 1e-5 * max(1, mx.abs(g).max().item()), name


def test_checkpointing_is_done_with_one_block_before_the_next(monkeypatch):
    """Memory of the gradients of an adapter on eight blocks, while MLX waits for each operation."""

    def megabytes(call) -> float:
        monkeypatch.setattr(Checkpointed, "__call__", call)
        net = Transformer(TransformerConfig(double_blocks=0, single_blocks=8, heads=2, axes=(8, 8, 8, 8), d_text=64))
        deltas = deltas_of(net)
        attach(net, "x", deltas)
        freeze_except(net, deltas)
        enable_gradient_checkpointing(net)
        x, txt = mx.random.normal((8, 36, 128)), mx.random.normal((8, 12, 64))
        mx.eval(net.parameters(), x, txt)
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(nn.value_and_grad(net, lambda net: net(x, txt, 0.7, image_ids(6, 6), text_ids(12)).sum())(net))
        return (mx.get_peak_memory() - before) / 1e6

    usual = mx.set_memory_limit(1)
    try:
        in_any_order = megabytes(lambda self, *inputs: nn.utils.checkpoint(self.block)(*inputs))
        monkeypatch.undo()
        assert megabytes(Checkpointed.__call__) < 0.7 * in_any_order
    finally:
        mx.set_memory_limit(usual)
