"""The bundled models anew, and all that follows from their weights. `make nano RUNS=folder` runs every step.

    python -m recipe.bundle RUNS              all steps that RUNS has not done yet, in this order:
        train       the whole recipe, into RUNS/recipe: its folder nano is a model to draw with
        measure     the card's development column
        install     that model into kleinlite/nano/weights
        critters    the model of the second world, which begins with nano-base: trained in RUNS/critters, its words and
                    its weights without `base` installed into kleinlite/critters
        adapters    those that come with nano, and kv-edits
        sister      z-nano, which learns from what nano draws
        pictures    the card's 48, the ladder, the site's runs, fast preview, scores and card
        accuracy    notebooks/accuracy.json
        notebooks   all of them, from top to bottom
    python -m recipe.bundle RUNS measure …    these steps only, even if they are done

What compares with diffusers needs it installed: `python -m tools.goldens.make_nano_golden [critters]` and
`make_nano_lora_golden.py` are for the end. Numbers in prose are changed by hand.
notebooks/judge-labels.json needs eyes: `python -m recipe.judge_labels notebooks/judge-labels.json sheets` draws the new
nano's pictures to be labeled.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from kleinlite.files import write_json
from kleinlite.trainer.run import catch_interrupts, lock_folder
from recipe.z_nano import FILE as SISTER

ROOT = Path(__file__).resolve().parents[1]
WEIGHTS = ROOT / "kleinlite" / "nano" / "weights"
CRITTERS = ROOT / "kleinlite" / "critters"
STORED = ("03", "04", "11", "14", "15", "17")  # chapters that keep what long runs of nano gave


def train(folder: Path) -> None:
    run("recipe", "train", folder / "recipe")


def measure(folder: Path) -> None:
    model = folder / "recipe" / "nano"
    for question in ((), ("--reworded",), ("--lone",), ("--edits",), ("--no-op",), ("--shapes",)):
        run("recipe.evaluate", *question, "--model", model)


def install(folder: Path) -> None:
    shutil.copytree(folder / "recipe" / "nano", WEIGHTS, dirs_exist_ok=True)


def critters(folder: Path) -> None:
    run("recipe", "train", folder / "critters", "--world", "critters")
    from recipe.critters import say_limits  # here: of all steps, this one alone needs what draws them

    write_json(CRITTERS / "words.json", say_limits())
    without = shutil.ignore_patterns("base")
    shutil.copytree(folder / "critters" / "critters", CRITTERS / "weights", dirs_exist_ok=True, ignore=without)


def adapters(folder: Path) -> None:
    for name in ("adapters", "kv_edits", "one_look"):
        run(f"recipe.{name}")


def sister(folder: Path) -> None:
    run("recipe.z_nano", folder / "sister")
    shutil.copyfile(folder / "sister" / SISTER.name, SISTER)


def pictures(folder: Path) -> None:
    run("recipe.evaluate", "--count", "48", "--grid", "notebooks/images/nano-48.jpg")
    run("recipe.ladder", "03")
    run("recipe.attention_score")
    for script in ("live.py", "theme/make_card.py"):
        subprocess.run([sys.executable, ROOT / "site" / script], cwd=ROOT, check=True)


def accuracy(folder: Path) -> None:
    run("recipe.evaluate", "--sweep", "--count", "100")


def notebooks(folder: Path) -> None:
    run("tools.notebooks", "--timeout", 3600, "run", *STORED, KLEINLITE_RUNS="all")  # their stored trainings, too
    run("tools.notebooks", "run", "--all")


STEPS: dict[str, Callable[[Path], None]] = {
    step.__name__: step for step in (train, measure, install, critters, adapters, sister, pictures, accuracy, notebooks)
}


def run(module: str, *arguments: object, **variables: str) -> None:
    """Another program of this repository. It hears Ctrl-C too and saves first. If it fails, so do we."""
    print(f"$ python -m {module}", *arguments, flush=True)
    with catch_interrupts():
        command = [sys.executable, "-m", module, *map(str, arguments)]
        status = subprocess.run(command, cwd=ROOT, env=os.environ | variables).returncode
    if status:
        sys.exit(status)


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
