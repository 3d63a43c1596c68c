"""What is asked of klein-nano alone, by options of `python -m recipe.evaluate`: lone things, outlines, a sweep."""

import argparse
import itertools
import json
import random
from pathlib import Path

from PIL import Image
from tqdm.auto import tqdm

from kleinlite.klein import Klein
from kleinlite.nano.evaluate import (
    CASES,
    DEVELOPMENT,
    SIZE,
    TEST,
    detected,
    draw_all,
    draw_captions,
    judge,
    requested,
)
from kleinlite.scenes import Scene, captions, draw, held_out, sample, scene_held_out

from .evaluate import there_and_back, whole
from .one_shape import one_shape, one_shape_cases, summary

SWEEP = Path(__file__).resolve().parents[1] / "notebooks" / "accuracy.json"


def lone_cases(count: int, first: int) -> list[tuple[Scene, str]]:
    """Landscapes with one thing, of the seeds from `first` on, each with a caption that no training has seen.

    There are 77 such captions, so they repeat. The test set has none of the development set's.
    """
    rng = random.Random(first)
    known = {caption for _, caption in lone_cases(CASES, DEVELOPMENT)} if first == TEST else set()
    lone = filter(lambda scene: scene.is_landscape and len(scene.things) == 1, map(sample, itertools.count(first)))
    unseen = ((scene, [text for text in captions(scene) if held_out(text) or scene_held_out(scene)]) for scene in lone)
    cases = ((scene, rng.choice(texts)) for scene, texts in unseen if texts)
    return list(itertools.islice((case for case in cases if case[1] not in known), count))


def report_lone(options: argparse.Namespace) -> list[Image.Image]:
    """captions of one house, tree or boat: how often it comes once and as asked, not at all, or twice"""
    cases = lone_cases(options.count, TEST if options.test else DEVELOPMENT)
    model = options.model or "nano"
    klein = Klein.from_pretrained(model)
    pictures = draw_all(klein, [caption for _, caption in cases], steps=options.steps, guidance=options.guidance)
    seen = [judge(picture) for picture in pictures]
    asked = [detected(found, scene, requested(scene, caption)) for found, (scene, caption) in zip(seen, cases)]
    print(f"{model}, captions of one house, tree or boat: {whole(asked, [caption for _, caption in cases])} right")
    numbers = [len(found.things) for found in seen]
    print(f"  none {numbers.count(0)}, one {numbers.count(1)}, more {sum(number > 1 for number in numbers)}")
    sides = [found.things[0].place for found, (_, caption) in zip(seen, cases)
             if len(found.things) == 1 and " on the " not in caption]  # fmt: skip
    print(f"  on the left, where no side is said: {sides.count('left')} of {len(sides)}")
    return pictures


def report_shapes(options: argparse.Namespace) -> list[Image.Image]:
    """one shape per picture: how well it lies over the one that was asked for, from the drawing to the model"""
    model = options.model
    cases = one_shape_cases()
    originals, prompts = [draw(scene, SIZE) for scene, _ in cases], [prompt for _, prompt in cases]
    if model is None:
        nano, base = Klein.from_pretrained("nano"), Klein.from_pretrained("nano-base")
        rows = {
            "drawn": lambda: originals,
            "through the autoencoder": lambda: there_and_back(nano.autoencoder, originals),
            "nano-base, 20 steps": lambda: draw_all(base, prompts, steps=20, guidance=3.0),
            "nano, 4 steps": lambda: draw_all(nano, prompts),
        }
    else:
        rows = {model: lambda: draw_all(Klein.from_pretrained(model), prompts)}
    print(f"{f'{len(cases)} prompts of one shape':26}  right kind   overlap (IoU)   worst tenth   ripple")
    for name, make in rows.items():
        pictures = make()
        got = summary([one_shape(picture, scene.things[0]) for picture, (scene, _) in zip(pictures, cases)])
        kinds = f"{100 * got['right'] / got['count']:.0f} % ({got['right']})"
        print(f"{name:26}{kinds:>12}{got['iou']:16.3f}{got['worst']:14.3f}{got['ripple']:9.1f}", flush=True)
    return pictures


def sweep(options: argparse.Namespace) -> None:
    """which pictures of nano and nano-base are right, by steps and guidance, as the JSON of chapter 13"""
    points = [("nano", steps, None) for steps in (1, 2, 3, 4, 6, 8)]
    points += [("nano-base", steps, 3.0) for steps in (2, 4, 8, 20)]
    points += [("nano-base", 20, guidance) for guidance in (1.0, 2.0, 6.0)]
    models = {name: Klein.from_pretrained(name) for name in ("nano", "nano-base")}
    rows = []
    for model, steps, guidance in tqdm(points, desc="sweep"):
        _, results = draw_captions(models[model], options.count, steps=steps, guidance=guidance)
        right = [int(all(result.values())) for result in results]  # picture by picture: pairs need them
        rows.append(json.dumps({"model": model, "steps": steps, "guidance": guidance, "right": right}))
    lines = ",\n  ".join(rows)
    SWEEP.write_text(f'{{\n "captions": {options.count},\n "points": [\n  {lines}\n ]\n}}\n')
