"""Whole networks in fewer bits: which layers are quantized, in which order, and what stands in for them."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from packings import ERROR, error, matrix

from kleinlite.models.quantize_network import QuantizedEmbedding, join, quantize
from kleinlite.quantization import QUANT_SPECS, QuantizedLinear, quantize_matrix


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.odd = nn.Embedding(300, 128), nn.Linear(100, 128, bias=False)
        self.layers = [nn.Linear(128, 128, bias=False) for _ in range(3)]
        self.large, self.small = nn.Linear(128, 40_000, bias=False), nn.Linear(128, 8, bias=False)
        self.norm = nn.RMSNorm(128)


@pytest.mark.parametrize("name", QUANT_SPECS)
def test_which_layers_are_quantized(name):
    model = Model()
    before = dict(tree_flatten(model.parameters()))
    quantize(model, QUANT_SPECS[name], mx.float32)
    packed = {path for path, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    assert packed == {"table", "large", "layers.0", "layers.1", "layers.2"}  # too odd: 100 wide; too small: 8 × 128
    assert isinstance(model.table, QuantizedEmbedding)
    ids = mx.array([[3, 299], [0, 3]])
    assert error(model.table(ids), before["table.weight"][ids]) < 2 * ERROR[name]
    assert model.table(ids).dtype == mx.float32
    x = matrix(2, 3, 128)
    assert error(model.layers[1](x), x @ before["layers.1.weight"].T) < 2 * ERROR[name]
    assert model.trainable_parameters().keys() >= {"odd", "norm"} and not model.trainable_parameters()["large"]


def test_the_largest_is_packed_first(monkeypatch):
    """While it is there in both forms, nothing else should be in memory yet."""
    net = nn.Sequential(nn.Linear(64, 64), nn.Embedding(1000, 64), nn.Linear(64, 128))
    order = []

    def note(w, p):
        order.append(w.shape[0])
        return quantize_matrix(w, p)

    monkeypatch.setattr("kleinlite.models.quantize_network.quantize_matrix", note)
    quantize(net, QUANT_SPECS[4], mx.float32)
    assert order == [1000, 128, 64]


def test_joined_and_turned():
    a, b = (quantize_matrix(matrix(64, 128, seed=i), QUANT_SPECS["nvfp4"]) for i in (1, 2))
    both = join([a, b])
    assert both.shape == (128, 128)
    assert mx.array_equal(both.decode(), mx.concatenate([a.decode(), b.decode()]))  # each keeps its own scale
    swapped = both.map(lambda w: mx.concatenate(mx.split(w, 2)[::-1]))
    assert mx.array_equal(swapped.decode()[:64], b.decode())


@pytest.mark.parametrize("rows, is_packed", [(295, False), (296, True)])
def test_an_odd_number_of_groups(rows, is_packed):
    """MLX packs NVFP4 32 weights at a time, two groups; what it cannot pack stays as it is."""
    net = nn.Sequential(nn.Embedding(rows, 16))
    quantize(net, QUANT_SPECS["nvfp4"], mx.float32)
    assert isinstance(net.layers[0], QuantizedEmbedding) == is_packed
    mx.eval(net(mx.array([0, rows - 1])))
