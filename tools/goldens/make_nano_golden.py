"""Draw with the bundled models' files in diffusers' own pipeline, and keep the pictures for tests/nano/test_nano.py.

    pip install -e ".[dev]"
    python -m tools.goldens.make_nano_golden            # for all
    python -m tools.goldens.make_nano_golden critters   # for one world: nano (and its base), or critters

From the noise of kleinlite's seed 7, float32, on a CPU. Run it again whenever the weights change.
"""

import shutil
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
import torch

from kleinlite.models.checkpoint import resolve_model
from kleinlite.models.folders import open_folder
from kleinlite.sampling import noise
from tools.goldens import GOLDENS
from tools.goldens.run_diffusers import draw, load

PARTS = ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")
# file → picture → model, prompt, size, steps, guidance, references (names of earlier pictures)
CASES = {
    "nano": {
        "pair": ("nano", "a red circle above a blue square", (96, 96), None, None, ()),
        "sea": ("nano", "a yellow sun over a blue sea", (128, 96), None, None, ()),
        "edit": ("nano", "make the circle yellow", (96, 96), None, None, ("pair",)),
        "two": ("nano", "put both together", (96, 96), None, None, ("pair", "edit")),
        "base": ("nano-base", "a red house under a yellow sun", (96, 96), 6, 3.0, ()),
    },
    "critters": {
        "laughs": (
            "critters", "a yellow critter with horns and one eye that laughs on a purple background",
            (96, 96), None, None, (),
        ),
        "frowns": ("critters", "make it frown", (96, 96), None, None, ("laughs",)),
    },
}  # fmt: skip


def whole(name: str, to: Path) -> Path:
    """A folder with all parts, as diffusers wants them: nano-base's own and those it shares with nano."""
    folder = resolve_model(name)
    shutil.copy(folder / "model_index.json", to)
    for p in PARTS:
        shutil.copytree(open_folder(folder).part(p), to / p)
    return to


def make(file: str) -> None:
    pictures, pipelines = {}, {}
    for name, (model, prompt, (width, height), steps, guidance, references) in CASES[file].items():
        if model not in pipelines:
            with tempfile.TemporaryDirectory() as folder:
                pipelines[model] = load(whole(model, Path(folder)))
        start = torch.tensor(noise(7, width * height // 256).tolist())
        pictures[name] = draw(
            *pipelines[model], prompt, size=(width, height), steps=steps, guidance=guidance, noise=start,
            images=[pictures[r] for r in references],
        )  # fmt: skip
    rows = {name: mx.array(memoryview(p.tobytes())).reshape(p.height, p.width, 3) for name, p in pictures.items()}
    mx.save_safetensors(str(GOLDENS / f"{file}.safetensors"), rows)
    print(f"wrote {file}:", ", ".join(pictures))


def main() -> None:
    for file in sys.argv[1:] or CASES:
        make(file)


if __name__ == "__main__":
    main()
