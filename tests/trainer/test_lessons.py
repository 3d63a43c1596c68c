"""What an adapter's training learns from: noise levels, batches, which matrices, what it is planned to take."""

import math

import mlx.core as mx
import pytest

from kleinlite.lora import linear_layers, new_deltas
from kleinlite.nano.loras import cross
from kleinlite.pipeline import Klein
from kleinlite.trainer import memory_plan as plan_module
from kleinlite.trainer.folder import Example
from kleinlite.trainer.lora import LoraTrainer
from kleinlite.trainer.memory_plan import TrainingPlan, check_plan
from kleinlite.trainer.settings import Settings
from kleinlite.training import shifted_times

SETTINGS = Settings(rank=2, steps=10, rate=1e-3, batch=2, accumulate=2, every=10, held_out=0.1)


@pytest.fixture
def trainer(tmp_path):
    examples = [Example(str(seed), *cross(seed)) for seed in range(6)]
    return LoraTrainer(Klein.from_pretrained("nano-base"), examples, tmp_path / "x", SETTINGS)


def test_the_shift_is_the_makers(trainer):
    """From 0.5 at 256 tokens to 1.15 at 4096, in the exponent; nano's pictures have 36."""
    assert trainer.shift == pytest.approx(math.exp(0.5 + 0.65 * (36 - 256) / 3840))


def test_noise_levels_are_shifted(trainer, monkeypatch):
    shifts = []
    monkeypatch.setattr(
        "kleinlite.trainer.lora.shifted_times",
        lambda key, b, shift: shifts.append(shift) or shifted_times(key, b, shift),
    )
    trainer.batch(0)
    assert shifts == [trainer.shift]


def test_no_two_steps_share_a_batch(trainer):
    """With two batches to a step, ten steps see twenty batches."""
    seen = [batch[3] for step in range(10) for batch in trainer.batches(step)[0]]
    assert len(seen) == 20 and not any(mx.array_equal(a, b) for i, a in enumerate(seen) for b in seen[:i])


def test_the_blocks_matrices_are_trained_and_no_others():
    net = Klein.from_pretrained("nano").transformer
    blocks = {path for path in linear_layers(net) if path.split(".")[0] in ("double_blocks", "single_blocks")}
    assert set(new_deltas(net, 2, mx.random.key(0))) == blocks
    assert {"img_in", "txt_in", "final_layer.linear"} <= set(linear_layers(net)) - blocks


@pytest.mark.parametrize("stage", ["features", "latents"])
def test_any_stage_may_be_the_one_that_does_not_fit(monkeypatch, stage):
    sizes = dict.fromkeys(("features", "latents", "weights", "adapter", "activations"), 10**9) | {stage: 10**11}
    monkeypatch.setattr(plan_module, "machine_memory", lambda: (10**10, 10**10))
    with pytest.raises(MemoryError, match="100.0 GB"):
        check_plan(TrainingPlan(**sizes))
