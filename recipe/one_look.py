"""nano in one step: the adapter "one-look", for chapter 12.

    python -m recipe.one_look              train it, about forty minutes of one core, and write it
    python -m recipe.one_look --judge      count right pictures with and without, on the test set

A LoRA of nano learns to land in one step where nano's own four steps lead. Regression, and nothing else: no
discriminator, no data but captions that may be trained on. A step's lesson depends on its number alone.
"""

import argparse
import random
from collections.abc import Iterator
from itertools import count, islice

import mlx.core as mx

from kleinlite import Klein
from kleinlite.distillation import own_path
from kleinlite.measuring import paired_difference, sign_test, wilson_interval
from kleinlite.nano.evaluate import TEST, draw_all, examine, held_out_captions
from kleinlite.position_ids import Rope, image_ids, text_ids
from kleinlite.scenes import captions, held_out, sample, scene_held_out
from kleinlite.training import Batch
from kleinlite.transformer import Transformer

from .adapters import FOLDER, teach
from .scene_lessons import GRID, sample_one

NAME = "one-look"
FILE = FOLDER / f"{NAME}.safetensors"
RANK = 32
STEPS = 1200
BATCH = 16


def lesson_captions(step: int) -> Iterator[str]:
    """Captions of scenes that may be trained on; three in ten show one shape alone."""
    rng = random.Random(step)
    for seed in count(64 * step):
        scene = (sample if rng.random() < 0.7 else sample_one)(seed)
        texts = [text for text in captions(scene) if not held_out(text)]
        if texts and not scene_held_out(scene):
            yield rng.choice(texts)


def jump_loss(net: Transformer, noise: mx.array, picture: mx.array, txt: mx.array, rope: Rope) -> mx.array:
    """Squared error of the velocity to the mean velocity of the whole path, from noise to picture (b, n, 128)."""
    return ((net(noise, txt, 1.0, rope=rope) - (noise - picture)) ** 2).mean()


def lesson(klein: Klein, step: int) -> tuple[mx.array | Rope, ...]:
    """Noise, the latents where nano's four steps lead, both (b, n, 128), features, and the rope."""
    txt = klein.encode_prompt(list(islice(lesson_captions(step), BATCH)))
    noise = mx.random.normal((BATCH, GRID[0] * GRID[1], 128), key=mx.random.key(step))
    rope = klein.transformer.rope(image_ids(*GRID), text_ids(klein.info.max_length))
    *_, picture = own_path(klein.transformer, noise, Batch(noise, txt, rope))
    return noise, picture, txt, rope


def whole_pictures(cases: list, steps: int, loras: tuple[str, ...] = ()) -> list[bool]:
    """Which captions are answered in full."""
    klein = Klein.from_pretrained("nano", loras=loras)
    pictures = draw_all(klein, [caption for _, caption in cases], steps=steps)
    return [all(result.values()) for result in examine(pictures, cases)]


def judge(number: int) -> None:
    """Print how many pictures of each row have everything right, and the paired difference from nano's four steps."""
    cases = held_out_captions(number, TEST)
    four = whole_pictures(cases, 4)
    rows = {
        "four steps": four,
        "two steps": whole_pictures(cases, 2),
        "one step": whole_pictures(cases, 1),
        "one step, with one-look": whole_pictures(cases, 1, (NAME,)),
    }
    print(f"nano, {number} captions of the test set")
    for title, right in rows.items():
        low, high = wilson_interval(sum(right), number)
        change, error = paired_difference(four, right)
        pairs = list(zip(four, right))
        p = sign_test(pairs.count((False, True)), pairs.count((True, False)))
        print(f"{title:26} {sum(right):4} whole, {100 * low:.0f} to {100 * high:.0f} %", end="; ")
        print(f"{-100 * change:.1f} ± {100 * error:.1f} points below four steps, p = {p:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train or judge the adapter for one step.")
    parser.add_argument("--judge", action="store_true", help="count right pictures with and without")
    if parser.parse_args().judge:
        judge(300)
    else:
        teach(FILE, jump_loss, lesson, RANK, STEPS, rate=1e-3)


if __name__ == "__main__":
    main()
