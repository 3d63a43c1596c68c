"""nano in one look: the adapter "one-look", for chapter 12; and one for two looks, which does not come with nano.

    python -m recipe.one_look                            train it, about forty minutes of one core, and write it
    python -m recipe.one_look --two FILE                 train the one for two looks, and write it to FILE
    python -m recipe.one_look --judge [--two FILE]       count right pictures with and without, on the test set

A LoRA of nano learns to land in one look, or in two, where nano's own four steps lead. Regression, and nothing else: no
discriminator, no data but captions that may be trained on. A step's lesson depends on its number alone.
"""

import argparse
import random
from collections.abc import Iterator
from itertools import count, islice, pairwise
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from tqdm.auto import tqdm

from kleinlite import Klein
from kleinlite.distillation import own_path
from kleinlite.lora import attach, freeze_except, new_deltas
from kleinlite.measuring import paired_difference, sign_test, wilson_interval
from kleinlite.models.lora_files import write_adapter
from kleinlite.nano.evaluate import TEST, draw_all, examine, held_out_captions
from kleinlite.position_ids import Rope, image_ids, text_ids
from kleinlite.sampling import schedule
from kleinlite.scenes import captions, held_out, sample, scene_held_out
from kleinlite.training import Batch, learning_rate
from kleinlite.transformer import Transformer
from recipe.z_nano import levels_on_path

from .adapters import FOLDER
from .curriculum import sample_one

NAME = "one-look"
FILE = FOLDER / f"{NAME}.safetensors"
RANK = 32
STEPS = 1200
BATCH = 16
GRID = (6, 6)
TOKENS = 36


def lesson_captions(step: int) -> Iterator[str]:
    """Captions of scenes that may be trained on; three in ten show one shape alone."""
    rng = random.Random(step)
    for seed in count(64 * step):
        scene = (sample if rng.random() < 0.7 else sample_one)(seed)
        texts = [text for text in captions(scene) if not held_out(text)]
        if texts and not scene_held_out(scene):
            yield rng.choice(texts)


def jump_loss(net: Transformer, path: mx.array, txt: mx.array, rope: Rope) -> mx.array:
    """How far looks are from the mean velocities along a path (b, looks + 1, n, 128), from noise to picture."""
    times = schedule(path.shape[1] - 1, TOKENS)
    total = mx.array(0.0)
    for i, (t, t_end) in enumerate(pairwise(times)):
        velocity = (path[:, i] - path[:, i + 1]) / (t - t_end)
        total = total + ((net(path[:, i], txt, t, rope=rope) - velocity) ** 2).mean()
    return total


def train(looks: int, file: Path) -> None:
    """Train the adapter for one or two looks and write it."""
    name = file.stem
    teacher = Klein.from_pretrained("nano")
    net = Klein.from_pretrained("nano").transformer
    deltas = new_deltas(net, RANK, mx.random.key(0))
    attach(net, name, deltas)
    freeze_except(net, deltas)
    mix = levels_on_path(schedule(looks, TOKENS))
    rope = net.rope(image_ids(*GRID), text_ids(teacher.info.max_length))
    rate = learning_rate(1e-3, STEPS, warmup=20)
    optimizer = optim.AdamW(rate, betas=[0.9, 0.99], weight_decay=0.0, bias_correction=True)
    value_and_grad = nn.value_and_grad(net, jump_loss)
    bar = tqdm(range(STEPS), desc=name)
    for step in bar:
        txt = teacher.encode_prompt(list(islice(lesson_captions(step), BATCH)))
        eps = mx.random.normal((BATCH, TOKENS, 128), key=mx.random.key(step))
        path = mx.stack(own_path(teacher.transformer, eps, Batch(eps, txt, rope)), axis=1)
        loss, gradients = value_and_grad(net, mx.einsum("lk,bknc->blnc", mix, path), txt, rope)
        optimizer.update(net, gradients)
        mx.eval(net.trainable_parameters(), optimizer.state)
        bar.set_postfix(loss=f"{loss.item():.4f}")
    write_adapter(file, deltas, trained={"model": "nano", "steps": STEPS, "rank": RANK})


def whole_pictures(cases: list, looks: int, loras: tuple[str, ...] = ()) -> list[bool]:
    """Which captions are answered in full."""
    klein = Klein.from_pretrained("nano", loras=loras)
    pictures = draw_all(klein, [caption for _, caption in cases], steps=looks)
    return [all(result.values()) for result in examine(pictures, cases)]


def judge(number: int, two: Path | None) -> None:
    """Print the share of whole pictures of each row, and its difference from nano's four looks by pairs."""
    cases = held_out_captions(number, TEST)
    four = whole_pictures(cases, 4)
    rows = {
        "four looks": four,
        "two looks": whole_pictures(cases, 2),
        "one look": whole_pictures(cases, 1),
        "one look, with one-look": whole_pictures(cases, 1, (NAME,)),
    }
    if two:
        rows["two looks, with their own"] = whole_pictures(cases, 2, (str(two),))
    print(f"nano, {number} captions of the test set")
    for title, right in rows.items():
        low, high = wilson_interval(sum(right), number)
        change, error = paired_difference(four, right)
        pairs = list(zip(four, right))
        p = sign_test(pairs.count((False, True)), pairs.count((True, False)))
        print(f"{title:26} {sum(right):4} whole, {100 * low:.0f} to {100 * high:.0f} %", end="; ")
        print(f"less than four looks by {-100 * change:.1f} ± {100 * error:.1f} points, p = {p:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train or judge the adapter for one look, or for two.")
    parser.add_argument("--two", type=Path, metavar="FILE", help="the adapter for two looks, to write or to judge")
    parser.add_argument("--judge", action="store_true", help="count right pictures with and without")
    parser.add_argument("--captions", type=int, default=300, metavar="N", help="for --judge (default: %(default)s)")
    options = parser.parse_args()
    if options.judge:
        judge(options.captions, options.two)
    elif options.two:
        train(2, options.two)
    else:
        train(1, FILE)


if __name__ == "__main__":
    main()
