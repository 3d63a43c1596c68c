"""What every try is given: nano's frozen parts, scenes with captions, a seed and a clock. No try may edit it.

`train.py` meets the rest of the repository only here and in the modules that `rules.py` lists.
"""

import time
from pathlib import Path

from tqdm.auto import tqdm

from kleinlite.files import write_json
from kleinlite.klein import Klein
from kleinlite.nano.data import encode_scenes
from kleinlite.nano.evaluate import SIZE
from kleinlite.text_encoder import TextEncoder
from kleinlite.trainer.run import read_arrays, write_arrays
from kleinlite.transformer import Transformer

from ..curriculum import Curriculum
from ..scene_lessons import GRID, make_lessons
from ..speedrun import count_weights, picture_curriculum, save_model

__all__ = ["Given"]

SCENES = 6000


def encode_once(folder: Path, scenes: int = SCENES) -> Path:
    """The file with the latents of all scenes, written by the first try in this folder."""
    path = folder / "latents.safetensors"
    if not path.exists():
        drawn = make_lessons(scenes, 0, 0).scenes
        autoencoder = Klein.from_pretrained("nano-base").autoencoder
        write_arrays(path, {"latents": encode_scenes(autoencoder, drawn, SIZE, lambda i: tqdm(i, "encoding scenes"))})
    return path


class Given:
    """seed: of the weights. The clock starts once everything is loaded."""

    grid = GRID

    def __init__(self, folder: Path, minutes: float, seed: int):
        self.seed = seed
        self._folder = folder
        self._klein = Klein.from_pretrained("nano-base", keep_loaded=True)
        self._latents = read_arrays(encode_once(folder))[0]["latents"]
        self._seconds = 60 * minutes
        self._started = time.monotonic()

    @property
    def share(self) -> float:
        """How much of the time has passed, from 0 to 1, where the training has to be over."""
        return (time.monotonic() - self._started) / self._seconds

    @property
    def text_encoder(self) -> TextEncoder:
        """Frozen."""
        return self._klein.text_encoder

    def curriculum(self, batch: int, scenes: int = SCENES) -> Curriculum:
        """Batches of captions and latents of the first `scenes` scenes; nothing that is held out is among them."""
        return picture_curriculum(self._klein, self._latents[:scenes], batch)

    def save(self, transformer: Transformer, draw_steps: int, guidance: float, steps: int) -> None:
        """The result, as a model's folder, with how it wants to be drawn and the number of its training steps."""
        count_weights(transformer)
        save_model(self._folder / "model", transformer, self._klein)
        write_json(self._folder / "drawing.json", {"draw_steps": draw_steps, "guidance": guidance, "steps": steps})
