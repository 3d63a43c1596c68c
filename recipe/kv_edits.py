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
import mlx.nn as nn
import mlx.optimizers as optim
from tqdm.auto import tqdm

from kleinlite import Klein
from kleinlite.kv_cache import cached_velocity, extract_kv
from kleinlite.lora import attach, freeze_except, new_deltas
from kleinlite.models.lora_files import write_adapter
from kleinlite.nano.data import draw_scenes
from kleinlite.pipeline import velocity_field
from kleinlite.position_ids import Rope, image_ids, reference_ids, text_ids
from kleinlite.sampling import euler, schedule
from kleinlite.training import learning_rate
from kleinlite.transformer import Transformer
from recipe.curriculum import edit_allowed
from recipe.edits import sample_edit

NAME = "kv-edits"
FILE = Path(__file__).parent / "weights" / f"{NAME}.safetensors"
RANK = 16
STEPS = 400
BATCH = 12
GRID = (6, 6)
TOKENS = 36


def lesson(klein: Klein, step: int) -> tuple[mx.array, ...]:
    """References (b, r, 128), features, and of one of nano's four steps the latents, the time and its answer.

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
    start = mx.random.normal((BATCH, TOKENS, 128), key=mx.random.key(step))
    times = schedule(4, TOKENS)
    which = rng.randrange(4)
    steps = list(itertools.islice(euler(field, start, times), which + 1))
    x = start if which == 0 else steps[-2].latents
    return references, txt, x, mx.array([float(times[which])]), steps[-1].velocity


def cached_loss(
    net: Transformer, references: mx.array, txt: mx.array, x: mx.array, t: mx.array, velocity: mx.array, rope: Rope
) -> mx.array:
    """How far the answer with a cache is from the plain one."""
    cache = extract_kv(net, references, reference_ids([GRID] * (references.shape[1] // TOKENS)))
    return ((cached_velocity(net, x, txt, t, rope, cache) - velocity) ** 2).mean()


def main() -> None:
    teacher = Klein.from_pretrained("nano")
    net = Klein.from_pretrained("nano").transformer
    deltas = new_deltas(net, RANK, mx.random.key(0))
    attach(net, NAME, deltas)
    freeze_except(net, deltas)
    rope = net.rope(image_ids(*GRID), text_ids(teacher.info.max_length))
    rate = learning_rate(2e-3, STEPS, warmup=20)
    optimizer = optim.AdamW(rate, betas=[0.9, 0.99], weight_decay=0.0, bias_correction=True)
    value_and_grad = nn.value_and_grad(net, cached_loss)
    bar = tqdm(range(STEPS), desc=NAME)
    for step in bar:
        loss, gradients = value_and_grad(net, *lesson(teacher, step), rope)
        optimizer.update(net, gradients)
        mx.eval(net.trainable_parameters(), optimizer.state)
        bar.set_postfix(loss=f"{loss.item():.4f}")
    write_adapter(FILE, deltas, trained={"model": "nano", "steps": STEPS, "rank": RANK})


if __name__ == "__main__":
    main()
