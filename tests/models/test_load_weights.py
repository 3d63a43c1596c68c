"""Giving modules their weights, and the word for a packing."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from packings import matrix

from kleinlite.models.checkpoint import open_checkpoint
from kleinlite.models.formats import find_quant_spec, load_weights
from kleinlite.models.quantize_network import quantize
from kleinlite.quantization import QUANT_SPECS, QuantizedLinear

CPU = pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="what is measured here is the CPU's way")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.large = nn.Embedding(300, 128), nn.Linear(128, 40_000, bias=False)
        self.norm = nn.RMSNorm(128)


@pytest.mark.parametrize("wish", [2, 7, 16, "4", "fp8", 4.5])
def test_wishes_that_cannot_be(wish):
    with pytest.raises(ValueError, match=f"quantize is one of 3, 4, 5, 6, 8, mxfp4, mxfp8, nvfp4 .*not {wish!r}"):
        find_quant_spec(wish)
    with pytest.raises(ValueError, match="quantize is one of"):
        open_checkpoint("nano", dtype=mx.float32, quantize=wish)


def test_stored():
    """A matrix in a narrower type than we compute in stays as it is; norms do not, and nothing is widened twice."""
    model, wide = Model(), Model()
    arrays = {k: w.astype(mx.bfloat16) for k, w in tree_flatten(model.parameters())}
    load_weights(model, arrays, mx.float32, keep_narrow=True)
    load_weights(wide, arrays, mx.float32)
    kinds = {k: w.dtype for k, w in tree_flatten(model.parameters())}
    assert {k for k, kind in kinds.items() if kind == mx.float32} == {"norm.weight"}
    x, ids = matrix(2, 3, 128), mx.array([1, 2])
    assert mx.allclose(model.large(x), wide.large(x), atol=1e-6) and mx.array_equal(model.table(ids), wide.table(ids))
    same = load_weights(Model(), arrays, mx.bfloat16, keep_narrow=True)
    assert not [m for m in same.modules() if isinstance(m, QuantizedLinear)]


@CPU
def test_one_whole_layer_at_a_time(tmp_path):
    """Quantising from a file never holds the file."""
    d = 1024
    mx.save_safetensors(
        str(tmp_path / "x.safetensors"), {f"m{i}.weight": matrix(d, d).astype(mx.bfloat16) for i in range(12)}
    )
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    model = nn.Module()
    for i in range(12):
        model[f"m{i}"] = nn.Linear(d, d, bias=False)
    arrays = mx.load(str(tmp_path / "x.safetensors"))
    load_weights(model, arrays, mx.float32, keep_narrow=True)
    del arrays
    quantize(model, QUANT_SPECS[4], mx.float32)
    packed = 12 * d * d * 4.5 / 8
    assert 0.95 * packed < mx.get_active_memory() - before < 1.05 * packed  # all of it, and nothing else
    assert mx.get_peak_memory() - before < packed + 2 * d * d + 2 * d * d  # one layer, and what packing it takes
