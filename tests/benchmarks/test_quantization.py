"""The table of what quantising costs."""

import mlx.core as mx
from mlx.utils import tree_flatten
from packings import ERROR

from benchmarks import quantization
from kleinlite.models.checkpoint import open_checkpoint


def test_the_table_of_costs(capsys):
    [cost] = quantization.measure_costs("nano", (8,), prompts=quantization.PROMPTS[:1])
    assert cost.setting == 8 and cost.bits == 8.5 and 0 < cost.difference < 2
    assert max(cost.errors.values()) == cost.errors[cost.worst] < ERROR[8]
    assert len(cost.errors) == 34  # every matrix but txt_in, which is 288 wide
    packed = open_checkpoint("nano", dtype=mx.float16, quantize=8).load_transformer()
    assert cost.megabytes * 1e6 == sum(w.nbytes for _, w in tree_flatten(packed.parameters()))
    assert quantization.format_row(cost).startswith("| 8 | 8.50 | 6.9 | ") and quantization.HEADER.count("|") == 14
