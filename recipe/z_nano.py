"""z-nano: a small Z-Image that draws, for chapter 17. klein-nano shows it where its eight steps should lead.

    python -m recipe.z_nano RUNS

klein-nano draws captions of its curriculum, and its way from noise to picture is kept: five latents, joined by
straight lines. z-nano learns to go the same way by the eight levels of its own schedule. So it sees no drawing, only
what klein-nano has made of one: distillation into another architecture (Hinton et al. 2015, arXiv 1503.02531), from
pairs of noise and picture as reflow has them (Liu et al. 2022, arXiv 2209.03003).

Tokenizer, text encoder and autoencoder are klein-nano's. It can be stopped at any time and goes on where it was, and
several processes share the work as those of the recipe do.

b pictures · n image tokens · m caption tokens, pads included
"""

import argparse
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import mlx.core as mx
from tokenizers import Tokenizer
from tqdm.auto import tqdm

from kleinlite.book.z_nano import CONFIG, SPEC, turned
from kleinlite.distillation import STUDENT_STEPS, own_path
from kleinlite.errors import run_command
from kleinlite.klein import Klein
from kleinlite.models.export import quantize_weights
from kleinlite.position_ids import rope_table
from kleinlite.sampling import schedule
from kleinlite.text_encoder import PAD, TextEncoder, tokenize
from kleinlite.trainer.run import read_arrays, train_with_progress, write_arrays
from kleinlite.training import encode_batch, flow_optimizer, initialize
from kleinlite.transformer import sequential
from kleinlite.z_image import PLAIN_TEMPLATE, ZImageTransformer, caption_ids, static_schedule

from .curriculum import Curriculum
from .scene_lessons import GRID, make_lessons
from .shapes import WORLD
from .stages import (
    RANK_OFFSET,
    SharedRun,
    copy_from_rank_zero,
    is_rank_zero,
    leaves,
    load_average,
    lock_shared_folder,
    share,
)

FILE = Path(__file__).parent / "weights" / "z-nano.safetensors"
TOKENS = 32  # of a caption, pads included
STEPS = 8
WALKS = 16_000
HELD_OUT = 128  # of them
PICTURES = 22_000  # of the curriculum, whose captions are drawn
TRAINING_STEPS = 2_600  # of the bundled one the first 2,000 were made with a rate that would have fallen until 2,800
BATCH = 32
FIRST = 90_000_000  # seed of the first caption and the first noise
# How often each of the eight steps is learned: first more of those that draw outlines, then of those that decide what
# stands where, which take longest.
WEIGHTS = {0: (1, 1, 1, 1, 1, 2, 3, 4), 1_400: (4, 3, 2, 1, 1, 1, 1, 2)}  # from a step of the training on


def keep_walks(
    klein: Klein, number: int, progress: Callable[[Iterable[int]], Iterable[int]] = iter
) -> dict[str, mx.array]:
    """klein-nano's ways to `number` captions of its curriculum.

    path: its latents before and after each of its four steps, (number, 5, n, 128), float16. ids, mask: the tokens of
    the captions as Z-Image reads them, (number, m).
    """
    encoder = klein.text_encoder
    curriculum = captions_of_the_curriculum(klein.tokenizer)
    rows: dict[str, list[mx.array]] = {"path": [], "ids": [], "mask": []}
    for first in progress(range(0, number, 32)):
        texts = [caption(curriculum, FIRST + i) for i in range(first, first + 32)]
        eps = mx.random.normal((32, GRID[0] * GRID[1], 128), key=mx.random.key(FIRST + first))
        words = tokenize(klein.tokenizer, texts, encoder.cfg.max_length)
        batch = encode_batch(klein.transformer, encoder, GRID, eps, eps[:, :0], *words)
        rows["path"].append(mx.stack(own_path(klein.transformer, eps, batch), axis=1).astype(mx.float16))
        ids, mask = read_captions(klein.tokenizer, texts)
        rows["ids"].append(ids)
        rows["mask"].append(mask)
        mx.eval(rows)
    return {name: mx.concatenate(column) for name, column in rows.items()}


def captions_of_the_curriculum(tokenizer: Tokenizer) -> Curriculum:
    """klein-nano's pictures, of which only the words are asked for: their scenes are not encoded."""
    return Curriculum(WORLD, make_lessons(PICTURES, 0, 0), mx.zeros((0,)), tokenizer, TOKENS, batch=32)


def caption(curriculum: Curriculum, seed: int) -> str:
    """A caption of the curriculum, in some words."""
    rng = random.Random(seed)
    lesson = rng.choice(curriculum.lessons.pictures)
    return curriculum.say(rng, rng.choice(lesson.texts))


def read_captions(tokenizer: Tokenizer, texts: list[str]) -> tuple[mx.array, mx.array]:
    """Their tokens, filled up to `TOKENS`, and which of them are real: (b, m) each."""
    pads = tokenizer.encode(PAD * TOKENS).ids
    rows = [tokenizer.encode(PLAIN_TEMPLATE.format(text)).ids for text in texts]
    ids = [(row + pads)[:TOKENS] for row in rows]
    return mx.array(ids), mx.array([[i < len(row) for i in range(TOKENS)] for row in rows])


def levels_on_path(levels: Sequence[float]) -> mx.array:
    """Weights, (levels, 5), that make the latents at these noise levels from the five on a path of klein-nano."""
    knots = schedule(STUDENT_STEPS, GRID[0] * GRID[1])
    rows = []
    for t in levels:
        k = max(k for k in range(STUDENT_STEPS) if knots[k] >= t)
        share = (knots[k] - t) / (knots[k] - knots[k + 1])
        rows.append([0.0] * k + [1 - share, share] + [0.0] * (STUDENT_STEPS - 1 - k))
    return mx.array(rows)


def make_velocity(encoder: TextEncoder) -> Callable[..., mx.array]:
    """velocity(net, x (b, n, 128), ids, mask, t (b,)) → (b, n, 128), towards the noise: chapter 17's field for a batch
    in which all captions have `TOKENS` rows."""
    rope = ZImageTransformer(CONFIG).rope(GRID, TOKENS)
    caption_rope = rope_table(caption_ids(TOKENS), CONFIG.axes, CONFIG.theta)

    def velocity(net: ZImageTransformer, x: mx.array, ids: mx.array, mask: mx.array, t: mx.array) -> mx.array:
        features = mx.stop_gradient(encoder.hidden_states(ids, mask, max(encoder.cfg.out_layers))[-1])
        rows = mx.where(mask[..., None], sequential(net.cap_embedder, features), net.cap_pad_token)
        for block in net.context_refiner:
            rows = block(rows, caption_rope)
        return -net(x, rows, 1 - t, rope)

    return velocity


def new_network() -> ZImageTransformer:
    """Random weights."""
    net = ZImageTransformer(CONFIG)
    initialize(net, mx.random.key(3), damp=("final_layer.linear", "adaLN_modulation.0"), damping=0.2)
    return net


def train(folder: Path, steps: int = TRAINING_STEPS, walks: int = WALKS) -> None:
    """Everything, into a folder; `steps` of training on `walks` ways. The last 128 are held out. Raises UserError."""
    with lock_shared_folder(folder):
        klein = Klein.from_pretrained("nano")
        path = folder / "walks.safetensors"
        if is_rank_zero() and not path.exists():
            write_arrays(path, keep_walks(klein, walks, lambda rows: tqdm(rows, desc="klein-nano draws")))
        copy_from_rank_zero(path)
        kept = read_arrays(path)[0]
        mix = levels_on_path(static_schedule(STEPS))
        levels = mx.array(static_schedule(STEPS))
        velocity = make_velocity(klein.text_encoder)

        def loss(net: ZImageTransformer, path: mx.array, ids: mx.array, mask: mx.array, step: mx.array) -> mx.array:
            x, after = ((mix[i][:, :, None, None] * path).sum(axis=1) for i in (step, step + 1))
            target = (x - after) / (levels[step] - levels[step + 1])[:, None, None]
            return ((velocity(net, x, ids, mask, levels[step]) - target) ** 2).mean()

        def take(rows: mx.array, step: mx.array) -> tuple[mx.array, ...]:
            return kept["path"][rows].astype(mx.float32), kept["ids"][rows], kept["mask"][rows], step

        def batches(number: int) -> tuple[mx.array, ...]:
            rng = random.Random(number)
            k = share(BATCH)
            rows = rng.sample(range(len(kept["ids"]) - HELD_OUT), k)
            weights = WEIGHTS[max(first for first in WEIGHTS if first <= number % RANK_OFFSET)]
            return take(mx.array(rows), mx.array(rng.choices(range(STEPS), weights, k=k)))

        def report() -> str:
            averaged = load_average(run.path, ZImageTransformer(CONFIG))
            rows = mx.arange(len(kept["ids"]) - HELD_OUT, len(kept["ids"]))
            held = [loss(averaged, *take(rows, mx.full(rows.shape, i))).item() for i in range(STEPS)]
            return "held out, step by step: " + " ".join(f"{value:.3f}" for value in held)

        run = SharedRun(folder / "run.safetensors", new_network(), flow_optimizer(steps), decay=0.998)
        train_with_progress(run, steps, loss, batches, report, log=folder / "log")
        if is_rank_zero():
            write_bundle(folder / FILE.name, load_average(run.path, ZImageTransformer(CONFIG)))


def write_bundle(path: Path, net: ZImageTransformer) -> None:
    """The weights as the book keeps them: matrices in six bits, the rest in float16."""
    weights = {name: turned(name, w).astype(mx.float16) for name, w in leaves(net.parameters())}
    write_arrays(path, quantize_weights(dict(weights), SPEC))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipe.z_nano", description=__doc__.partition(chr(10))[0])
    parser.add_argument("folder", type=Path, metavar="RUNS", help="where the run is kept")
    return run_command(train, parser.parse_args(argv).folder)


if __name__ == "__main__":
    sys.exit(main())
