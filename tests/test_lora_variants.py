"""LoRA's variants: what a call adds is what the changed weight would have added."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from test_lora import apart, deltas_of, small_net  # noqa: F401, a fixture

from kleinlite.lora import LoRA, attach, detach, linear_layers, matrix_shape
from kleinlite.lora_variants import DoRA, Hadamard, Kronecker, SplitAdapter, weight_of
from kleinlite.models.quantize import quantize
from kleinlite.quantization import QUANT_SPECS


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


W = normal(12, 8)
KINDS = {
    "LoRA": LoRA(normal(2, 8, seed=1), normal(12, 2, seed=2), 0.5),
    "LoKr": Kronecker(normal(3, 2, seed=3), normal(4, 4, seed=4), 0.5),
    "LoHa": Hadamard(*(normal(*shape, seed=i) for i, shape in enumerate(((12, 2), (2, 8), (12, 2), (2, 8)))), 0.5),
    "DoRA, rows": DoRA(LoRA(normal(2, 8, seed=1), normal(12, 2, seed=2)), normal(12, seed=5), W),
    "DoRA, columns": DoRA(LoRA(normal(2, 8, seed=1), normal(12, 2, seed=2)), normal(1, 8, seed=5), W),
    "two of three pieces": SplitAdapter(
        {0: LoRA(normal(2, 8, seed=1), normal(4, 2, seed=2)), 2: Kronecker(normal(2, 2), normal(2, 4))}, 3
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_added_is_what_the_changed_weight_adds(kind):
    layer = nn.Linear(8, 12, bias=False)
    layer.weight = W
    x = normal(5, 8, seed=6)
    delta = KINDS[kind].delta(W)
    assert delta.shape == W.shape and delta.dtype == mx.float32
    assert apart(KINDS[kind](x, layer(x), layer), x @ delta.T) < 1e-4


def test_a_piece_without_an_adapter_stays():
    assert mx.abs(KINDS["two of three pieces"].delta(W)[4:8]).max().item() == 0


def test_a_dora_sets_the_length_of_each_row():
    magnitude = mx.abs(normal(12, seed=5))
    dora = DoRA(KINDS["LoRA"], magnitude, W)
    assert mx.allclose(mx.linalg.norm(W + dora.delta(W), axis=1), magnitude, atol=1e-5)


def test_shapes_and_weights_of_layers_in_every_form(net):
    """Plain, quantized, and with an adapter around: the same shape, and the weight without what the adapter adds."""
    path = "single_blocks.0.linear1"
    w = linear_layers(net)[path].weight
    attach(net, "x", deltas_of(net))
    assert matrix_shape(linear_layers(net)[path]) == w.shape and mx.array_equal(weight_of(linear_layers(net)[path]), w)
    detach(net, "x")
    quantize(net, QUANT_SPECS[8], mx.float32)
    layer = linear_layers(net)[path]
    assert matrix_shape(layer) == w.shape and apart(weight_of(layer), w) < 0.01
