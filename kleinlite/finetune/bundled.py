"""The adapters that come with nano, trained again: run this when nano has new weights.

python -m kleinlite.finetune.bundled              both, into kleinlite/nano/loras/
python -m kleinlite.finetune.bundled cross        one of them
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from ..nano.adapters import ADAPTERS
from ..pipeline import Klein
from .folder import Example
from .settings import Settings
from .trainer import LoraTrainer

FOLDER = Path(__file__).parents[1] / "nano" / "loras"
COMMON = {"rank": 3, "batch": 8, "accumulate": 1}
PICTURES = {"cross": 33, "outlined": 97}  # one is held out
SETTINGS = {
    "cross": Settings(**COMMON, steps=1200, every=300, rate=3e-3, shift=6.0, held_out=1 / PICTURES["cross"]),
    "outlined": Settings(**COMMON, steps=900, every=300, rate=2e-3, shift=3.0, held_out=1 / PICTURES["outlined"]),
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
