"""What a training takes, before it begins."""

from pathlib import Path

import mlx.core as mx
import pytest
from PIL import Image
from trainings import QUICK

from benchmarks.training import measure, plan_table
from kleinlite.lora import new_deltas
from kleinlite.models.configs import RELEASED_CONFIGS
from kleinlite.models.describe import describe
from kleinlite.trainer import memory_plan as plan_module
from kleinlite.trainer.folder import read_folder
from kleinlite.trainer.memory_plan import (
    COPIES,
    TrainingPlan,
    adapter_size,
    check_plan,
    plan_model_training,
    plan_training,
)
from kleinlite.transformer import Transformer, TransformerConfig


def test_base_4b_in_four_bits_fits_into_twelve_gigabytes():
    plan = plan_training(*RELEASED_CONFIGS["4b"], width=512, height=512, bits=4.5, cpu=False)
    assert 3e9 < plan.peak_bytes < 12e9
    larger = plan_training(*RELEASED_CONFIGS["4b"], width=1024, height=1024, bits=16, cpu=False)
    assert larger.peak_bytes > 2 * plan.peak_bytes


PLAN = TrainingPlan(features=1, latents=1, weights=3, adapter=1, activations=1)


@pytest.mark.parametrize(
    "plan, ways",
    [
        (PLAN, "quantize the weights with --quantize 4, or take smaller pictures with --size"),
        (PLAN._replace(quantizable=False), "take smaller pictures with --size"),
        (PLAN._replace(quantizable=False, adapter=4), "take a smaller --rank, or take smaller pictures with --size"),
        (PLAN._replace(quantizable=False, adapter=4, features=9), "take smaller pictures with --size"),
        (
            PLAN._replace(quantizable=False, weights=1, features=9),
            "take smaller pictures with --size",
        ),  # the largest stage
        (PLAN._replace(quantizable=False, weights=1, latents=9), "take smaller pictures with --size"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_ways_out(monkeypatch, plan, ways):
    monkeypatch.setattr(plan_module, "machine_memory", lambda held=0: (4, 3))
    with pytest.raises(MemoryError, match=f"GB: {ways}\\.$"):
        check_plan(plan)


@pytest.mark.parametrize(
    "model, quantize, quantizable",
    [("base-4b", None, True), ("base-4b", 8, True), ("base-4b", 4, False), ("base-4b-nvfp4", None, False)],
)
def test_four_bits_are_offered_where_they_are_fewer(folder, model, quantize, quantizable):
    plan = plan_model_training(describe(model, quantize), read_folder(folder), QUICK, quantize=quantize)
    assert plan.quantizable == quantizable


def test_pictures_that_are_kept_count(folder):
    """Three bytes a pixel of each example, references too."""
    Image.new("RGB", (64, 96)).save(folder / "0_ref.png")
    for seed in range(1, 6):
        Image.new("RGB", (64, 96)).save(folder / f"{seed}_ref.png")
    plan = plan_model_training(describe("base-4b"), read_folder(folder), QUICK)
    assert plan.pictures == 3 * 6 * (96 * 96 + 64 * 96)
    assert plan.peak_bytes == plan._replace(pictures=0).peak_bytes + plan.pictures


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
    plan = plan_training(cfg, *RELEASED_CONFIGS["4b"][1:], width=128, height=128, bits=32, cpu=True)
    _, above, _ = measure(cfg, 128, 512, 16, None)
    assert 0.6 < above / (plan.adapter / COPIES + plan.activations) < 1.4
