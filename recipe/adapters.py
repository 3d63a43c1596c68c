"""Trains the adapters that come with nano, `cross` and `outlined`: `python -m recipe.adapters`."""

import argparse
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from PIL import Image

from kleinlite import Klein, nano
from kleinlite.nano.crosses import cross
from kleinlite.trainer.folder import Example
from kleinlite.trainer.lora import LoraTrainer
from kleinlite.trainer.settings import Settings

from .outlines import outlined

ADAPTERS: dict[str, Callable[[int], tuple[Image.Image, str]]] = {"cross": cross, "outlined": outlined}

FOLDER = Path(nano.__file__).parent / "weights" / "loras"
COMMON = Settings(rank=3, batch=8, accumulate=1, every=300)
PICTURES = {"cross": 33, "outlined": 97}  # one is held out
SETTINGS = {
    "cross": replace(COMMON, steps=1200, rate=3e-3, shift=6.0, held_out=1 / PICTURES["cross"]),
    "outlined": replace(COMMON, steps=900, rate=2e-3, shift=3.0, held_out=1 / PICTURES["outlined"]),
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train the adapters that come with nano.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{' or '.join(SETTINGS)} (default: all)")
    chosen = parser.parse_args(argv).names or list(SETTINGS)
    FOLDER.mkdir(exist_ok=True)
    for name in chosen:
        examples = [Example(f"{seed:02}", *ADAPTERS[name](seed)) for seed in range(PICTURES[name])]
        with tempfile.TemporaryDirectory() as folder:
            made = LoraTrainer(
                Klein.from_pretrained("nano-base"), examples, Path(folder) / name, SETTINGS[name]
            ).train()
            shutil.copyfile(made, FOLDER / f"{name}.safetensors")
        print(f"{name}.safetensors: {(FOLDER / f'{name}.safetensors').stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
