"""How much of what was asked is in the picture? The judge's command line.

python -m recipe.evaluate --model nano --count 300 --grid grid.png
python -m recipe.evaluate --shapes                               one shape per picture, by its outline
python -m recipe.evaluate --reworded                               the captions in other words
python -m recipe.evaluate --edits --grid edits.png                 edits of held-out scenes
python -m recipe.evaluate --no-op                                  edits of what is not there
python -m recipe.evaluate --lone                                   one house, tree or boat: once, and as asked
python -m recipe.evaluate --test                                   scenes that chose nothing; also with --edits, …
python -m recipe.evaluate --sweep notebooks/accuracy.json          accuracy against steps and guidance

Of an edit it asks two things: was the asked change made, and was everything else kept? A model that copies its
reference keeps everything and changes nothing, so that score stands beside the model's own.
"""

import argparse
import itertools
import json
import math
import random
from pathlib import Path

import mlx.core as mx
from PIL import Image
from tqdm.auto import tqdm

from kleinlite.autoencoder import Autoencoder
from kleinlite.klein import Klein
from kleinlite.nano.evaluate import (
    DEVELOPMENT,
    SIZE,
    TEST,
    Attributes,
    detected,
    draw_all,
    draw_captions,
    examine,
    held_out_captions,
    judge,
    requested,
    tally,
)
from kleinlite.pipeline import to_images, to_pixels
from kleinlite.scenes import Scene, captions, draw, held_out, sample, scene_held_out

from .edits import held_out_edits
from .one_shape import one_shape, one_shape_cases, summary
from .rewordings import no_op_instruction, reword


def attributes(scene: Scene) -> Attributes:
    """Everything that a scene shows, place by place."""
    known = {f"{what} {t.place}": getattr(t, what) for t in scene.things for what in ("kind", "color")}
    for what in ("background", "sky", "ground", "sun_side"):
        if getattr(scene, what) is not None:
            known[what.replace("_", " ")] = getattr(scene, what)
    return known


def score_edit(seen: Scene, before: Scene, after: Scene) -> tuple[dict[str, bool], dict[str, bool]]:
    """Of an edit from `before` to `after`, given what the result shows: which changes were made, what was kept."""
    old = attributes(before)
    new = attributes(after)
    now = attributes(seen)
    made = {k: now.get(k) == new.get(k) for k in old.keys() | new.keys() if old.get(k) != new.get(k)}
    kept = {k: now.get(k) == v for k, v in new.items() if old.get(k) == v}
    kept |= dict.fromkeys(now.keys() - old.keys() - new.keys(), False)  # what came along unasked
    return made, kept


def contact_sheet(pictures: list[Image.Image]) -> Image.Image:
    """Pictures of the judge's size, twelve to a row."""
    columns = 12
    sheet = Image.new("RGB", (min(columns, len(pictures)) * SIZE, -(-len(pictures) // columns) * SIZE), "white")
    for i, picture in enumerate(pictures):
        sheet.paste(picture, (i % columns * SIZE, i // columns * SIZE))
    return sheet


def there_and_back(model: Autoencoder, images: list[Image.Image]) -> list[Image.Image]:
    """Pictures through the autoencoder."""
    rows = range(0, len(images), 12)
    batches = [mx.concatenate([to_pixels(image) for image in images[i : i + 12]]) for i in rows]
    return [picture for x in batches for picture in to_images(model.decode(model.encode(x)))]


def in_other_words(caption: str) -> str:
    """Another sentence that says the same."""
    rng = random.Random(caption)
    return next(said for said in (reword(rng, caption) for _ in range(1000)) if said != caption)


def report_captions(klein: Klein, options: argparse.Namespace) -> list[Image.Image]:
    """The model's pictures, and beside them the drawn scenes through its autoencoder: what is lost already there."""
    cases = held_out_captions(options.count, options.first)
    said = [in_other_words(caption) if options.reworded else caption for _, caption in cases]
    pictures = draw_all(klein, said, steps=options.steps, guidance=options.guidance)
    results = examine(pictures, cases)
    limits = examine(there_and_back(klein.autoencoder, [draw(scene, SIZE) for scene, _ in cases]), cases)

    def shares(results: list[dict[str, bool]]) -> dict[str, float]:
        by_kind, attributes, whole = tally(results)
        return dict(sorted(by_kind.items())) | {"all": attributes, "whole picture": whole}

    print(f"{options.model}, {options.count} held-out captions{' in other words' if options.reworded else ''}")
    print(f"{'':16}the model   drawn, through its autoencoder")
    most = shares(limits)
    for what, share in shares(results).items():
        print(f"  {what:13}{100 * share:8.1f} %{100 * most[what]:12.1f} %")
    return pictures


def report_edits(klein: Klein, options: argparse.Namespace) -> list[Image.Image]:
    """First references and results by turns, and a table; seeds 0, 1, …"""
    cases, pictures = held_out_edits(options.count, options.first), []
    rows = {"the model": ([], []), "copying": ([], [])}
    for i, (before, text, after) in enumerate(tqdm(cases, desc="editing", leave=False)):
        references = [draw(scene, SIZE) for scene in before]
        result = klein(
            text, images=references, seed=i, steps=options.steps, guidance=options.guidance, progress=False
        )  # fmt: skip
        pictures += [references[0], result]
        for name, picture in (("the model", result), ("copying", references[0])):
            made, kept = score_edit(judge(picture), before[0], after)
            rows[name][0].append(made)
            rows[name][1].append(kept)
    print(f"{options.model}, {options.count} held-out edits   changes made   rest kept   everything right")
    for name, (made, kept) in rows.items():
        whole = sum(all(m.values()) and all(k.values()) for m, k in zip(made, kept)) / len(cases)
        print(f"  {name:38} {100 * tally(made)[1]:8.1f} %  {100 * tally(kept)[1]:8.1f} %  {100 * whole:14.1f} %")
    by_how = {}
    for (_, text, _), made, kept in zip(cases, *rows["the model"]):
        how = " ".join(text.split()[:2] if text.startswith(("make it", "make the background")) else text.split()[:1])
        by_how.setdefault(how, []).append(all(made.values()) and all(kept.values()))
    for how, right in sorted(by_how.items()):
        print(f"    {how + ' …':36} {100 * sum(right) / len(right):38.1f} % of {len(right)}")
    return pictures


def report_no_op(klein: Klein, options: argparse.Namespace) -> list[Image.Image]:
    """Edits of things that are not there: how many pictures stay as they are. References and results by turns."""
    pictures, right = [], 0
    for i, (before, _, _) in enumerate(tqdm(held_out_edits(options.count, options.first), desc="editing", leave=False)):
        reference, text = draw(before[0], SIZE), no_op_instruction(random.Random(i), before[0])
        result = klein(text, images=[reference], seed=i, steps=options.steps, guidance=options.guidance, progress=False)
        right += all(score_edit(judge(result), before[0], before[0])[1].values())
        pictures += [reference, result]
    print(f"{options.model}: {right} of {options.count} ({100 * right / options.count:.1f} %) stay as they are")
    return pictures


def lone_cases(count: int, first: int) -> list[tuple[Scene, str]]:
    """Landscapes with one thing, of the seeds from `first` on, each with a caption that no training has seen."""
    rng = random.Random(first)
    lone = filter(lambda scene: scene.is_landscape and len(scene.things) == 1, map(sample, itertools.count(first)))
    unseen = ((scene, [text for text in captions(scene) if held_out(text) or scene_held_out(scene)]) for scene in lone)
    cases = itertools.islice(filter(lambda case: case[1], unseen), count)
    return [(scene, rng.choice(texts)) for scene, texts in cases]


def report_lone(klein: Klein, options: argparse.Namespace) -> list[Image.Image]:
    """Captions of one thing: how often it comes once and as asked, how often not at all, how often twice."""
    cases = lone_cases(options.count, options.first)
    pictures = draw_all(klein, [caption for _, caption in cases], steps=options.steps, guidance=options.guidance)
    seen = [judge(picture) for picture in pictures]
    right = sum(
        all(detected(found, scene, requested(scene, caption)).values())
        for found, (scene, caption) in zip(seen, cases)
    )  # fmt: skip
    error = math.sqrt(right * (options.count - right) / options.count) / options.count
    print(f"{options.model}, {options.count} captions of one house, tree or boat: {right} right "
          f"({100 * right / options.count:.1f} ± {100 * error:.1f} %)")  # fmt: skip
    numbers = [len(found.things) for found in seen]
    print(f"  none {numbers.count(0)}, one {numbers.count(1)}, more {sum(number > 1 for number in numbers)}")
    sides = [found.things[0].place for found, (_, caption) in zip(seen, cases)
             if len(found.things) == 1 and " on the " not in caption]  # fmt: skip
    print(f"  on the left, where no side is said: {sides.count('left')} of {len(sides)}")
    return pictures


def report_shapes(model: str | None) -> list[Image.Image]:
    """One shape per picture: how well it lies over the one that was asked for, from the drawing to the model."""
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


def sweep(path: Path, count: int) -> None:
    """Which pictures of nano and nano-base are right, by steps and guidance, as JSON for chapter 13's pairs."""
    points = [("nano", steps, None) for steps in (1, 2, 3, 4, 6, 8)]
    points += [("nano-base", steps, 3.0) for steps in (2, 4, 8, 20)]
    points += [("nano-base", 20, guidance) for guidance in (1.0, 2.0, 6.0)]
    models = {name: Klein.from_pretrained(name) for name in ("nano", "nano-base")}
    rows = []
    for model, steps, guidance in tqdm(points, desc="sweep"):
        _, results = draw_captions(models[model], count, steps, guidance)
        right = [int(all(result.values())) for result in results]  # picture by picture: pairs need them
        rows.append(json.dumps({"model": model, "steps": steps, "guidance": guidance, "right": right}))
    lines = ",\n  ".join(rows)
    path.write_text(f'{{\n "captions": {count},\n "points": [\n  {lines}\n ]\n}}\n')


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw held-out captions and count what is right.")
    parser.add_argument("--model", help="nano unless named; with --shapes all, unless one is named")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--guidance", type=float)
    parser.add_argument("--shapes", action="store_true", help="one shape per picture, compared with its outline")
    parser.add_argument("--reworded", action="store_true", help="the captions in other words")
    parser.add_argument("--edits", action="store_true", help="edit held-out scenes instead of drawing captions")
    parser.add_argument("--lone", action="store_true", help="captions of one house, tree or boat")
    parser.add_argument("--no-op", action="store_true", help="edits that ask for a thing that is not there")
    parser.add_argument(
        "--test", dest="first", action="store_const", const=TEST, default=DEVELOPMENT,
        help="captions or edits of the test set, instead of the development set",
    )  # fmt: skip
    parser.add_argument("--grid", help="write the pictures, side by side, to this file")
    parser.add_argument("--sweep", type=Path, help="accuracy against steps and guidance of both models, into this JSON")
    options = parser.parse_args(argv)
    if options.shapes:
        pictures = report_shapes(options.model)
        if options.grid:
            contact_sheet(pictures).save(options.grid)
        return
    options.model = options.model or "nano"
    if options.sweep:
        return sweep(options.sweep, options.count)
    report = report_captions
    for asked, other in ((options.edits, report_edits), (options.no_op, report_no_op), (options.lone, report_lone)):
        report = other if asked else report
    pictures = report(Klein.from_pretrained(options.model), options)
    if options.grid:
        contact_sheet(pictures).save(options.grid)


if __name__ == "__main__":
    main()
