"""LoRA's variants: what a call adds is what the changed weight would have added."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from test_lora import apart, deltas_of, small_net  # noqa: F401, a fixture

from kleinlite.lora import LoRA, attach, detach, linear_layers, matrix_shape
from kleinlite.models.adapters.variants import DoRA, Hadamard, Kronecker, SplitAdapter, weight_of
from kleinlite.models.quantize_network import quantize
from kleinlite.quantization import QUANT_SPECS


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


W = normal(12, 8)
A, B, MORE_A, MORE_B = (normal(*shape, seed=i) for i, shape in enumerate(((2, 8), (12, 2), (2, 8), (12, 2))))
V = W + B @ A
W1, W2, SMALL, PIECE = normal(3, 2, seed=5), normal(4, 4, seed=6), normal(2, 2, seed=7), normal(4, 2, seed=8)
LENGTHS = mx.abs(normal(12, seed=9))
CASES = {  # and what each adds to the weight
    "LoKr": (Kronecker(W1, W2, 0.5), 0.5 * mx.kron(W1, W2)),
    "LoHa": (Hadamard(B, A, MORE_B, MORE_A, 0.5), 0.5 * (B @ A) * (MORE_B @ MORE_A)),
    "DoRA, rows": (DoRA(LoRA(A, B), LENGTHS, W), LENGTHS[:, None] * V / mx.linalg.norm(V, axis=1, keepdims=True) - W),
    "DoRA, columns": (DoRA(LoRA(A, B), LENGTHS[None, :8], W), LENGTHS[:8] * V / mx.linalg.norm(V, axis=0) - W),
    "two of three pieces": (
        SplitAdapter({0: LoRA(A, PIECE), 2: Kronecker(SMALL, A[:, :4])}, 3),
        mx.concatenate([PIECE @ A, mx.zeros((4, 8)), mx.kron(SMALL, A[:, :4])]),
    ),
}


@pytest.mark.parametrize("kind", CASES)
def test_what_is_added_is_what_the_changed_weight_adds(kind):
    adapter, delta = CASES[kind]
    layer = nn.Linear(8, 12, bias=False)
    layer.weight = W
    x = normal(5, 8, seed=6)
    assert apart(adapter(x, layer(x), layer), x @ delta.T) < 1e-4
    assert apart(adapter.delta(W), delta) < 1e-4 and adapter.delta(W).dtype == mx.float32


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
