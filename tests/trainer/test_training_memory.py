"""What a training takes, before it begins."""

from pathlib import Path

import mlx.core as mx
import pytest

from benchmarks.training import measure, plan_table
from kleinlite.lora import new_deltas
from kleinlite.models.configs import RELEASED_CONFIGS
from kleinlite.trainer import training_memory as plan_module
from kleinlite.trainer.training_memory import (
    COPIES,
    TrainingPlan,
    adapter_size,
    check_plan,
    plan_training,
)
from kleinlite.transformer import Transformer, TransformerConfig


def test_base_4b_in_four_bits_fits_into_twelve_gigabytes():
    plan = plan_training(RELEASED_CONFIGS["4b"], (512, 512), bits=4.5, cpu=False)
    assert 3e9 < plan.peak_bytes < 12e9
    larger = plan_training(RELEASED_CONFIGS["4b"], (1024, 1024), bits=16, cpu=False)
    assert larger.peak_bytes > 2 * plan.peak_bytes


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_the_plan_is_for_the_numbers_that_this_processor_computes_with(monkeypatch, dtype):
    monkeypatch.setattr(plan_module, "compute_dtype", lambda: dtype)
    plan, on_cpu = (plan_training(RELEASED_CONFIGS["4b"], (512, 512), cpu=cpu) for cpu in (None, True))
    assert (plan.activations == on_cpu.activations) == (dtype == mx.float32)


def test_what_does_not_fit_is_refused_with_the_ways_out(monkeypatch):
    monkeypatch.setattr(plan_module, "machine_memory", lambda held=0: (4, 3))
    plan = TrainingPlan(adapter=1, activations=1, peak_bytes=4)
    check_plan(plan)
    with pytest.raises(MemoryError, match="quantize the weights with --quantize 4, or take smaller pictures with --si"):
        check_plan(plan._replace(peak_bytes=5))


def test_references_and_batches_take_more():
    alone, edited, many = (
        plan_training(RELEASED_CONFIGS["4b"], (512, 512), references, b=b).activations
        for references, b in (((), 1), ([(512, 512)], 1), ((), 2))
    )
    assert alone < edited and many == 2 * alone


def test_the_page_on_machines_has_the_plans():
    page = Path(__file__).parents[2] / "notebooks" / "machines.md"
    assert plan_table() in page.read_text(encoding="utf-8")


def test_the_size_of_an_adapter_with_ranks_by_kind():
    cfg = TransformerConfig(double_blocks=1, single_blocks=2, heads=2)
    ranks = {"proj": 2, "mlp": 3, "linear2": 5}
    deltas = new_deltas(Transformer(cfg), ranks, mx.random.key(0))
    assert adapter_size(cfg, ranks) == sum(delta.a.size + delta.b.size for delta in deltas.values())


def test_a_measured_step_is_near_its_plan():
    cfg = TransformerConfig(double_blocks=1, single_blocks=2, heads=2)
    plan = plan_training((cfg, *RELEASED_CONFIGS["4b"][1:]), (128, 128), bits=32, cpu=True)
    _, above, _ = measure(cfg, 128, 512, 16, None)
    assert 0.6 < above / (plan.adapter / COPIES + plan.activations) < 1.4
