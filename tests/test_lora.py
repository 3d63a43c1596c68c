"""Chapter 14: what adapters add, and that they leave no trace. Their files: `models/adapters/test_file`."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_map

from kleinlite.lora import MATRIX_KINDS, LoRA, attach, detach, freeze_except, linear_layers, new_deltas, rescale
from kleinlite.models.quantize_network import quantize
from kleinlite.position_ids import image_ids, text_ids
from kleinlite.quantization import QUANT_SPECS
from kleinlite.training import initialize
from kleinlite.transformer import Transformer, TransformerConfig


@pytest.fixture(name="net")
def small_net() -> Transformer:
    """A small random network with the names of the real one."""
    net = Transformer(TransformerConfig(double_blocks=2, single_blocks=3, heads=2, axes=(8, 8, 8, 8), d_text=64))
    initialize(net, mx.random.key(0))
    mx.eval(net.parameters())
    return net


def deltas_of(net: Transformer, seed: int = 0, rank: int = 2, scaling: float = 1.0) -> dict[str, LoRA]:
    """Deltas of every matrix of the blocks, none of them zero."""
    deltas = new_deltas(net, rank, mx.random.key(seed), scaling)
    for i, delta in enumerate(deltas.values()):
        delta.b = 0.1 * mx.random.normal(delta.b.shape, key=mx.random.key(seed + 100 + i))
    return deltas


def answer(net: Transformer) -> mx.array:
    x, txt = (mx.random.normal((1, 12, c), key=mx.random.key(c)) for c in (128, 64))
    return net(x, txt, 0.7, image_ids(3, 4), text_ids(12))


def apart(a: mx.array, b: mx.array) -> float:
    return mx.abs(a - b).max().item()


def test_a_new_adapter_changes_nothing_and_is_all_that_learns(net):
    before = answer(net)
    deltas = new_deltas(net, 3, mx.random.key(0))
    attach(net, "x", deltas)
    freeze_except(net, deltas)
    assert mx.array_equal(answer(net), before)
    names = dict(tree_flatten(net.trainable_parameters()))
    assert len(names) == 2 * len(deltas) and all(".deltas.x." in name for name in names)
    assert all("_blocks." in path and len(delta.a) == 3 for path, delta in deltas.items())


def test_ranks_by_kind_of_matrix(net):
    """Each kind has its own, one that is not named is left alone, and so is everything outside the blocks."""
    ranks = {path: len(delta.a) for path, delta in new_deltas(net, {"mlp": 3, "linear1": 5}, mx.random.key(0)).items()}
    mlps = {f"double_blocks.{i}.{stream}_mlp.{j}": 3 for i in range(2) for stream in ("img", "txt") for j in (0, 2)}
    assert ranks == mlps | {f"single_blocks.{i}.linear1": 5 for i in range(3)}
    assert new_deltas(net, dict.fromkeys(MATRIX_KINDS, 2), mx.random.key(0)).keys() == deltas_of(net).keys()


@pytest.mark.parametrize("bits", [8, 4, "mxfp4"])
def test_beside_packed_weights_as_merged_into_the_decoded_ones(net, bits):
    quantize(net, QUANT_SPECS[bits], mx.float32)
    changes = deltas_of(net)
    attach(net, "x", changes)
    got, packed = answer(net), linear_layers(net)
    plain = Transformer(net.cfg)
    detach(net, "x")
    for path, layer in linear_layers(plain).items():
        w = packed[path].layer if path in changes else packed[path]
        w = w.weight if isinstance(w, nn.Linear) else w.matrix.decode()
        layer.weight = w + changes[path].delta(w) if path in changes else w
    norms = {name: w for name, w in tree_flatten(net.parameters()) if name.endswith("_norm.scale")}
    plain.load_weights(list(norms.items()), strict=False)
    assert apart(got, answer(plain)) < 1e-4


def test_removed_is_removed(net):
    before, kept = answer(net), tree_map(lambda w: w, net.parameters())
    layers = linear_layers(net)
    for name in ("x", "y"):
        attach(net, name, deltas_of(net, seed=ord(name)), 0.7)
    assert apart(answer(net), before) > 1e-3
    detach(net, "x")
    detach(net, "y")
    assert linear_layers(net) == layers  # the very objects
    for (name, w), (_, was) in zip(tree_flatten(net.parameters()), tree_flatten(kept)):
        assert mx.array_equal(w, was), name
    assert mx.array_equal(answer(net), before)


def test_scales_order_and_halves(net):
    before, changes = answer(net), deltas_of(net)
    attach(net, "x", changes, 0.0)
    assert mx.array_equal(answer(net), before)
    rescale(net, "x", 1.0)
    once = answer(net)
    rescale(net, "x", 0.5)
    attach(net, "y", changes, 0.5)
    assert apart(answer(net), once) < 1e-5
    other = deltas_of(net, seed=5)
    attach(net, "z", other)
    first = answer(net)
    detach(net, "x")
    attach(net, "x", changes, 0.5)
    assert apart(answer(net), first) < 1e-5


def test_a_compiled_network_follows_the_scale(net):
    attach(net, "x", deltas_of(net))
    compiled = mx.compile(lambda: answer(net), inputs=net.state)
    for scale in (1.0, -0.5):
        rescale(net, "x", scale)
        assert apart(compiled(), answer(net)) < 1e-4
    full = answer(net)
    detach(net, "x")
    assert apart(full, answer(net)) > 1e-3
