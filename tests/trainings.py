"""A quick training, for the tests of the trainer."""

from kleinlite.klein import Klein
from kleinlite.trainer.adapter import LoraTrainer
from kleinlite.trainer.folder import read_folder
from kleinlite.trainer.settings import Settings

QUICK = Settings(rank=2, steps=4, rate=1e-3, batch=2, accumulate=2, every=2)


def trained(folder, out, settings=QUICK, **how) -> LoraTrainer:
    trainer = LoraTrainer(Klein.from_pretrained("nano-base", **how), read_folder(folder), out, settings)
    trainer.train()
    return trainer
