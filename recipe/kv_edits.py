"""nano for the key/value cache: the adapter "kv-edits", for chapter 10.

    python -m recipe.kv_edits              train it, about ten minutes of one core, and write it

A LoRA of nano learns to edit in the pattern of the 9b-kv models, where references attend to themselves alone. The plain
nano teaches: the lessons are what it sees and answers in its four steps of edits that may be trained on. The gradient
runs through the steps and through the cache, so that looking up and being looked up are learned together.
"""

import itertools
import random
from pathlib import Path

import mlx.core as mx

from kleinlite import Klein
from kleinlite.kv_cache import cached_velocity, extract_kv
from kleinlite.nano.data import draw_scenes
from kleinlite.pipeline import velocity_field
from kleinlite.position_ids import Rope, image_ids, reference_ids, text_ids
from kleinlite.sampling import euler, schedule
from kleinlite.transformer import Transformer

from .adapters import teach
from .edits import sample_edit
from .scene_lessons import GRID, edit_allowed

FILE = Path(__file__).parent / "weights" / "kv-edits.safetensors"
RANK = 16
STEPS = 400
BATCH = 12


def lesson(klein: Klein, step: int) -> tuple[mx.array | Rope, ...]:
    """References (b, r, 128), features, and of one of nano's four steps the latents, the time and its answer; the rope.

    One lesson in four has two references.
    """
    rng = random.Random(step)
    count = 2 if step % 4 == 3 else 1
    first = rng.randrange(10_000_000)
    edits = (edit for edit in map(sample_edit, itertools.count(first)) if len(edit[0]) == count and edit_allowed(edit))
    chosen = list(itertools.islice(edits, BATCH))
    shown = [draw_scenes([scenes[i] for scenes, *_ in chosen], 96) for i in range(count)]
    latents = [klein.autoencoder.encode(x) for x in shown]
    references = mx.concatenate([z.flatten(1, 2) for z in latents], axis=1)
    txt = klein.encode_prompt([text for _, text, _ in chosen])
    field = velocity_field(klein.transformer, txt, GRID, latents)
    start = mx.random.normal((BATCH, GRID[0] * GRID[1], 128), key=mx.random.key(step))
    times = schedule(4, GRID[0] * GRID[1])
    which = rng.randrange(4)
    steps = list(itertools.islice(euler(field, start, times), which + 1))
    x = start if which == 0 else steps[-2].latents
    rope = klein.transformer.rope(image_ids(*GRID), text_ids(klein.info.max_length))
    return references, txt, x, mx.array([float(times[which])]), steps[-1].velocity, rope


def cached_loss(
    net: Transformer, references: mx.array, txt: mx.array, x: mx.array, t: mx.array, velocity: mx.array, rope: Rope
) -> mx.array:
    """How far the answer with a cache is from the plain one."""
    cache = extract_kv(net, references, reference_ids([GRID] * (references.shape[1] // (GRID[0] * GRID[1]))))
    return ((cached_velocity(net, x, txt, t, rope, cache) - velocity) ** 2).mean()


if __name__ == "__main__":
    teach(FILE, cached_loss, lesson, RANK, STEPS, rate=2e-3)
