"""nano's last stage again, from the bundled weights, and all that follows from new ones. `make nano` runs every step.

    python -m recipe.bundle RUNS              all steps that RUNS has not done yet, in this order:
        repair      the recipe's stage, beginning with the bundled nano as what redraw left
        measure     lone things, captions and edits of the new one, on the development set
        install     the new transformer into kleinlite/nano/weights
        adapters    those that were taught by nano itself: kv-edits, one-look
        pictures    README's gallery, the run that the site shows before anything is loaded
        accuracy    notebooks/accuracy.json
        notebooks   all of them, from top to bottom
    python -m recipe.bundle RUNS repair …     these steps only, even if they are done

What compares with diffusers needs it installed: `python tests/goldens/make_nano_golden.py` and
`make_nano_lora_golden.py` are for the end. Numbers in prose are for whoever reads the pages again.
notebooks/judge-labels.json needs eyes: `python -m recipe.judge_labels` draws the new nano's pictures to be labeled.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kleinlite.autoencoder import Autoencoder
from kleinlite.cpu import setup
from kleinlite.klein import Klein
from kleinlite.text_encoder import TextEncoder
from kleinlite.trainer.run import lock_folder
from kleinlite.transformer import Transformer
from recipe.saving import save_transformer
from recipe.stages import load_average
from recipe.training import Recipe, RecipeConfig

ROOT = Path(__file__).resolve().parents[1]
WEIGHTS = ROOT / "kleinlite" / "nano" / "weights"


class BundledRecipe(Recipe):
    """The recipe, with the bundled models in place of what its first stages would have left."""

    def __init__(self, folder: Path, cfg: RecipeConfig | None = None):
        super().__init__(folder, cfg)
        setup()
        self.nano = Klein.from_pretrained("nano", keep_loaded=True)
        self.base = Klein.from_pretrained("nano-base", keep_loaded=True)

    def load(self, name: str, module: Any) -> Any:
        """A part as it is bundled, frozen; what RUNS has itself, from there."""
        bundled = {"transformer": self.base, "redraw": self.nano}
        if name not in bundled:
            return super().load(name, module)
        module.update(bundled[name].transformer.parameters())
        module.freeze()
        return module

    def load_autoencoder(self) -> Autoencoder:
        return self.nano.autoencoder

    def load_text_encoder(self) -> TextEncoder:
        return self.nano.text_encoder

    def load_tokenizer(self) -> Tokenizer:
        return self.nano.tokenizer


def repair(folder: Path) -> None:
    """RUNS/nano, a folder to draw with: the bundled parts and the new transformer."""
    recipe = BundledRecipe(folder)
    recipe.repair()
    student = load_average(recipe.file("repair"), Transformer(recipe.cfg.transformer))
    shutil.copytree(WEIGHTS, folder / "nano", dirs_exist_ok=True, ignore=shutil.ignore_patterns("base", "loras"))
    save_transformer(folder / "nano", student, recipe.nano.text_encoder.cfg, distilled=True)


def measure(folder: Path) -> None:
    for question in ("--lone", "--edits", "--no-op", "--shapes"):
        run("recipe.evaluate", question, "--model", folder / "nano")
    run("recipe.evaluate", "--model", folder / "nano")


def install(folder: Path) -> None:
    shutil.copytree(folder / "nano" / "transformer", WEIGHTS / "transformer", dirs_exist_ok=True)


def adapters(folder: Path) -> None:
    for name in ("kv_edits", "one_look"):
        run(f"recipe.{name}")


def pictures(folder: Path) -> None:
    run("recipe.evaluate", "--gallery", "notebooks/images/nano.jpg")
    run("recipe.evaluate", "--count", "48", "--grid", "notebooks/images/nano-48.jpg")
    subprocess.run([sys.executable, ROOT / "site" / "live.py"], cwd=ROOT, check=True)


def accuracy(folder: Path) -> None:
    run("recipe.evaluate", "--sweep", "notebooks/accuracy.json", "--count", "100")


def notebooks(folder: Path) -> None:
    run("tools.notebooks", "run", "--all")


STEPS: dict[str, Callable[[Path], None]] = {
    step.__name__: step for step in (repair, measure, install, adapters, pictures, accuracy, notebooks)
}


def run(module: str, *arguments: object) -> None:
    """Another program of this repository; its failure is ours."""
    print(f"$ python -m {module}", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", module, *map(str, arguments)], cwd=ROOT, check=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, metavar="RUNS")
    parser.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(STEPS))
    options = parser.parse_args(argv)
    unknown = [step for step in options.steps if step not in STEPS]
    if unknown:
        parser.error(f"there is no step {unknown[0]}: choose from {', '.join(STEPS)}")
    folder = options.folder.absolute()
    with lock_folder(folder):
        done = folder / "done"
        finished = done.read_text("utf-8").split() if done.exists() else []
        for step in options.steps or [name for name in STEPS if name not in finished]:
            STEPS[step](folder)
            finished.append(step)
            done.write_text("\n".join(dict.fromkeys(finished)) + "\n", "utf-8")


if __name__ == "__main__":
    main()
