"""What the tests of the trainer share: a folder of crosses, and a training that has not begun."""

import pytest
from trainings import QUICK

from kleinlite.klein import Klein
from kleinlite.nano.crosses import cross
from kleinlite.trainer import adapter as trainer_module
from kleinlite.trainer.adapter import LoraTrainer
from kleinlite.trainer.folder import read_folder


@pytest.fixture(autouse=True)
def quick_samples(monkeypatch):
    monkeypatch.setattr(trainer_module, "SAMPLES", 1)
    monkeypatch.setattr(trainer_module, "SAMPLE_STEPS", 1)


@pytest.fixture
def folder(tmp_path):
    """Six crosses with captions."""
    folder = tmp_path / "crosses"
    folder.mkdir()
    for seed in range(6):
        picture, caption = cross(seed)
        picture.save(folder / f"{seed}.png")
        (folder / f"{seed}.txt").write_text(f"{caption}\n")
    return folder


@pytest.fixture
def trainer(folder, tmp_path) -> LoraTrainer:
    """One that has not begun."""
    return LoraTrainer(Klein.from_pretrained("nano-base"), read_folder(folder), tmp_path / "x.safetensors", QUICK)
