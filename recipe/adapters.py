"""Trains the adapters that come with nano, `cross` and `outlined`: `python -m recipe.adapters`.

`teach` trains the other two, whose teacher is nano itself.
"""

import argparse
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from PIL import Image
from tqdm.auto import tqdm

from kleinlite import Klein, nano
from kleinlite.lora import attach, freeze_except, new_deltas
from kleinlite.models.adapters import write_adapter
from kleinlite.nano.crosses import cross
from kleinlite.trainer.adapter import LoraTrainer
from kleinlite.trainer.folder import Example
from kleinlite.trainer.settings import Settings
from kleinlite.training import learning_rate, make_optimizer

from .outlines import outlined

ADAPTERS: dict[str, Callable[[int], tuple[Image.Image, str]]] = {"cross": cross, "outlined": outlined}

FOLDER = Path(nano.__file__).parent / "weights" / "loras"
COMMON = Settings(rank=3, batch=8, accumulate=1, every=300)
PICTURES = {"cross": 32, "outlined": 96}
SHIFTS = {"cross": 6.0, "outlined": 3.0}  # of the noise levels, instead of the one for the pictures' size
SETTINGS = {
    "cross": replace(COMMON, steps=1200, rate=3e-3),
    "outlined": replace(COMMON, steps=900, rate=2e-3),
}


def teach(
    file: Path, loss: Callable[..., mx.array], lesson: Callable[[Klein, int], tuple[Any, ...]], rank: int, steps: int,
    rate: float,
) -> None:  # fmt: skip
    """Train a LoRA of nano on `loss(net, *lesson(nano, step))`, and write it."""
    teacher = Klein.from_pretrained("nano")
    net = Klein.from_pretrained("nano").transformer
    deltas = new_deltas(net, rank, mx.random.key(0))
    attach(net, file.stem, deltas)
    freeze_except(net, deltas)
    optimizer = make_optimizer(learning_rate(rate, steps, warmup=20))
    value_and_grad = nn.value_and_grad(net, loss)
    bar = tqdm(range(steps), desc=file.stem)
    for step in bar:
        value, gradients = value_and_grad(net, *lesson(teacher, step))
        optimizer.update(net, gradients)
        mx.eval(net.trainable_parameters(), optimizer.state)
        bar.set_postfix(loss=f"{value.item():.4f}")
    write_adapter(file, deltas, trained={"model": "nano", "steps": steps, "rank": rank})


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train the adapters that come with nano.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{' or '.join(SETTINGS)} (default: all)")
    chosen = parser.parse_args(argv).names or list(SETTINGS)
    FOLDER.mkdir(exist_ok=True)
    for name in chosen:
        examples = [Example(f"{seed:02}", *ADAPTERS[name](seed)) for seed in range(PICTURES[name])]
        file = f"{name}.safetensors"
        with tempfile.TemporaryDirectory() as folder:
            trainer = LoraTrainer(Klein.from_pretrained("nano-base"), examples, Path(folder) / file, SETTINGS[name])
            trainer.shift = SHIFTS[name]
            shutil.copyfile(trainer.train(), FOLDER / file)
        print(f"{file}: {(FOLDER / file).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
