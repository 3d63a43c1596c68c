"""How much of what was asked is in the picture? The judge's command line.

python -m recipe.evaluate --model nano --count 300 --grid grid.png
python -m recipe.evaluate --reworded                               the captions in other words
python -m recipe.evaluate --edits --grid edits.png                 edits of held-out scenes
python -m recipe.evaluate --no-op                                  edits of what is not there
python -m recipe.evaluate --test                                   scenes that chose nothing; also with --edits, …
python -m recipe.evaluate --world critters --model FOLDER          another world; --apart: parts that never met
python -m recipe.evaluate --lone                                   one house, tree or boat: once, and as asked
python -m recipe.evaluate --shapes                                 one shape per picture, by its outline
python -m recipe.evaluate --sweep --count 100                      notebooks/accuracy.json, by steps and guidance

Of an edit it asks two things: was the asked change made, and was everything else kept? A model that copies its
reference keeps everything and changes nothing, so that score stands beside the model's own.
"""

import argparse
import math
import random
from collections import Counter
from collections.abc import Sequence

import mlx.core as mx
from PIL import Image
from tqdm.auto import tqdm

from kleinlite.autoencoder import Autoencoder
from kleinlite.klein import Klein
from kleinlite.nano.evaluate import draw_all, tally
from kleinlite.pipeline import to_images, to_pixels

from .data import has_room
from .rewordings import with_article
from .world import World, find_world


def contact_sheet(pictures: list[Image.Image]) -> Image.Image:
    """Pictures of one size, twelve to a row."""
    columns = 12
    side = pictures[0].width
    sheet = Image.new("RGB", (min(columns, len(pictures)) * side, -(-len(pictures) // columns) * side), "white")
    for i, picture in enumerate(pictures):
        sheet.paste(picture, (i % columns * side, i // columns * side))
    return sheet


def there_and_back(model: Autoencoder, images: list[Image.Image]) -> list[Image.Image]:
    """Pictures through the autoencoder."""
    rows = range(0, len(images), 12)
    batches = [mx.concatenate([to_pixels(image) for image in images[i : i + 12]]) for i in rows]
    return [picture for x in batches for picture in to_images(model.decode(model.encode(x)))]


def in_other_words(klein: Klein, world: World, caption: str) -> str:
    """Another sentence that says the same, and for which the text encoder has room."""
    rng = random.Random(caption)
    tries = (world.reword(rng, caption) for _ in range(1000))
    return next(said for said in tries if said != caption and has_room(klein.tokenizer, said, klein.info.max_length))


def plainly(said: str) -> str:
    """The same sentence in lower case, and begun with the article that it may lack."""
    text = said.lower()
    return text if text.startswith(("a ", "an ", "draw ")) else with_article(text)


def whole(results: list[dict[str, bool]], captions: Sequence[str] = ()) -> str:
    """How many have everything right, and the standard error of that share.

    captions: where these repeat, pictures of one caption are one draw, so the error is theirs (Cameron and Miller 2015,
    doi 10.3368/jhr.50.2.317).
    """
    right = [float(all(result.values())) for result in results]
    share = sum(right) / len(right)
    apart: Counter[object] = Counter()
    for caption, ok in zip(captions or range(len(right)), right):
        apart[caption] += ok - share
    error = math.sqrt(sum(sum_ * sum_ for sum_ in apart.values()) * len(apart) / (len(apart) - 1)) / len(right)
    of = f", of {len(apart)} captions" if captions else ""
    return f"{sum(right):.0f} of {len(right)} ({100 * share:.1f} ± {100 * error:.1f} %{of})"


def report_captions(klein: Klein, world: World, options: argparse.Namespace) -> list[Image.Image]:
    """The model's pictures, and beside them the drawn scenes through its autoencoder: what is lost already there."""
    cases = world.cases(options.count, options.test, options.apart)
    said = [in_other_words(klein, world, caption) if options.reworded else caption for _, caption in cases]
    said = [plainly(text) for text in said] if options.plain else said
    pictures = draw_all(klein, said, steps=options.steps, guidance=options.guidance)
    drawn = there_and_back(klein.autoencoder, [world.draw(scene) for scene, _ in cases])
    results, limits = (
        [world.examine(picture, *case) for picture, case in zip(some, cases)] for some in (pictures, drawn)
    )
    print(f"{options.model}, {options.count} held-out captions{' in other words' if options.reworded else ''}")
    print(f"{'':16}the model   drawn, through its autoencoder")
    most = tally(limits)
    for what, share in sorted(tally(results)[0].items()):
        print(f"  {what:13}{100 * share:8.1f} %{100 * most[0][what]:12.1f} %")
    print(f"  {'all':13}{100 * tally(results)[1]:8.1f} %{100 * most[1]:12.1f} %")
    print(f"  everything right: {whole(results)}; drawn, through its autoencoder: {whole(limits)}")
    return pictures


def report_edits(klein: Klein, world: World, options: argparse.Namespace) -> list[Image.Image]:
    """First references and results by turns, and a table; seeds 0, 1, …"""
    cases = world.edit_cases(options.count, options.test)
    pictures: list[Image.Image] = []
    rows: dict[str, list[tuple[dict[str, bool], dict[str, bool]]]] = {"the model": [], "copying": []}
    for i, (before, text, after) in enumerate(tqdm(cases, desc="editing", leave=False)):
        references = [world.draw(scene) for scene in before]
        result = klein(
            text, images=references, seed=i, steps=options.steps, guidance=options.guidance, progress=False
        )  # fmt: skip
        pictures += [references[0], result]
        for name, picture in (("the model", result), ("copying", references[0])):
            rows[name].append(world.examine_edit(picture, before[0], after))
    print(f"{options.model}, {options.count} held-out edits   changes made   rest kept   everything right")
    for name, results in rows.items():
        made, kept = ([result[i] for result in results] for i in (0, 1))
        both = [{**m, **k} for m, k in results]
        print(f"  {name:38} {100 * tally(made)[1]:8.1f} %  {100 * tally(kept)[1]:8.1f} %  {whole(both)}")
    by_change: dict[str, list[bool]] = {}
    for made, kept in rows["the model"]:
        by_change.setdefault(", ".join(sorted(made)), []).append(all(made.values()) and all(kept.values()))
    for change, right in sorted(by_change.items()):
        print(f"    {change:36} {sum(right):38} of {len(right)}")
    return pictures


def report_no_op(klein: Klein, world: World, options: argparse.Namespace) -> list[Image.Image]:
    """Edits of things that are not there: how many pictures stay as they are. References and results by turns."""
    pictures: list[Image.Image] = []
    kept = []
    for i, (before, _, _) in enumerate(tqdm(world.edit_cases(options.count, options.test), "editing", leave=False)):
        reference = world.draw(before[0])
        text = world.no_op_instruction(random.Random(i), before[0])
        result = klein(text, images=[reference], seed=i, steps=options.steps, guidance=options.guidance, progress=False)
        kept.append(world.examine_edit(result, before[0], before[0])[1])
        pictures += [reference, result]
    print(f"{options.model}: {whole(kept)} stay as they are")
    return pictures


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw held-out captions and count what is right.")
    parser.add_argument("--world", default="shapes", help="what it has learned to draw (default: %(default)s)")
    parser.add_argument("--model", help="nano unless named; with --shapes all, unless one is named")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--guidance", type=float)
    parser.add_argument("--reworded", action="store_true", help="the captions in other words")
    parser.add_argument("--plain", action="store_true", help="in lower case, and begun with an article")
    parser.add_argument("--apart", action="store_true", help="captions that name what never met in training")
    parser.add_argument("--edits", action="store_true", help="edit held-out scenes instead of drawing captions")
    parser.add_argument("--no-op", action="store_true", help="edits that ask for a thing that is not there")
    parser.add_argument("--test", action="store_true", help="the test set, instead of the development set")
    parser.add_argument("--grid", help="write the pictures, side by side, to this file")
    world = find_world(parser.parse_known_args(argv)[0].world)
    for name, report in world.reports.items():
        parser.add_argument(f"--{name}", action="store_const", dest="report", const=report, help=report.__doc__)
    parser.set_defaults(report=None)
    options = parser.parse_args(argv)
    if options.report:
        pictures = options.report(options)
    else:
        options.model = options.model or "nano"
        report = report_edits if options.edits else report_no_op if options.no_op else report_captions
        pictures = report(Klein.from_pretrained(options.model), world, options)
    if options.grid and pictures:
        contact_sheet(pictures).save(options.grid)


if __name__ == "__main__":
    main()
