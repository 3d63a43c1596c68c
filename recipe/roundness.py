"""How round, how well drawn and how varied are shapes? By the second judge, whom no training has asked.

    python -m recipe.roundness                     nano and the drawn scenes, as they are and through its autoencoder,
                                                  on the development set
    python -m recipe.roundness FOLDER --test       another model, on the test set: other seeds and other captions

*dents*: the outline of a red circle against its radius, large ones alone and small ones above a square, 48 pictures
each. *spread*: how far middles and radii of those circles lie apart, in pixels, to the right, down and in radius; for
all and for the mean of the three. *fit*: the overlap of single shapes with the drawing that fits best, its worst tenth,
and how many of them are the right kind by the first judge. ± is one standard error.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from PIL import Image

from kleinlite.klein import Klein
from kleinlite.measuring import bootstrap_error, mean_and_error
from kleinlite.nano.evaluate import DEVELOPMENT, SIZE, TEST, draw_all
from kleinlite.scenes import Scene, Thing, captions, draw, with_article

from .evaluate import there_and_back
from .one_shape import one_shape, one_shape_cases
from .second_judge import dents, fit

COUNT = 48
COLOURS = {DEVELOPMENT: ("red", "blue", "blue"), TEST: ("green", "orange", "yellow")}  # circle, square, paper


def circle_scenes(first: int) -> dict[str, tuple[Scene, str]]:
    """A large circle and a small one, with their captions; a development or a test set has its own colors."""
    circle, square, paper = COLOURS[first]
    small = (Thing("circle", circle, "top"), Thing("square", square, "bottom"))
    return {
        "large": (Scene((replace(small[0], place="centre"),), background=paper),
                  f"a {circle} circle on a {paper} background"),
        "small": (Scene(small, background="white"), f"a {circle} circle above {with_article(square)} square"),
    }  # fmt: skip


def shape_cases(first: int) -> list[tuple[Scene, str]]:
    """168 prompts of one shape; of the test set in other captions."""
    cases = one_shape_cases()
    return cases * 2 if first == DEVELOPMENT else [(s, captions(s)[-1]) for s, _ in cases] * 2


def worst_tenth(values: Sequence[float]) -> float:
    return statistics.fmean(sorted(values)[: max(1, len(values) // 10)])


def report(name: str, pictures: dict[str, list[Image.Image]], first: int) -> None:
    """Print what the judges say of pictures of large and small circles, and of the cases of single shapes."""
    print(name)
    for size, (scene, _) in circle_scenes(first).items():
        mean, error = mean_and_error([dents(picture, scene.things) for picture in pictures[size]])
        spots = SIZE * np.array([fit(picture, scene.things)[1] for picture in pictures[size]])
        x, y, r = spots.std(axis=0, ddof=1)
        print(f"  {size} circles: dents {mean:.4f} ± {error:.4f}; spread {x:.2f}, {y:.2f}, {r:.2f} px")
    cases = shape_cases(first)
    fits = [fit(picture, scene.things)[0] for picture, (scene, _) in zip(pictures["shapes"], cases)]
    right = sum(one_shape(picture, scene.things[0])[0] for picture, (scene, _) in zip(pictures["shapes"], cases))
    mean, error = mean_and_error(fits)
    worst = worst_tenth(fits)
    print(f"  single shapes: fit {mean:.3f} ± {error:.3f}, worst tenth {worst:.3f} ± "
          f"{bootstrap_error(worst_tenth, fits):.3f}; right kind and colour {right} of {len(cases)}")  # fmt: skip


def drawn_scenes(first: int) -> dict[str, list[Image.Image]]:
    found = {name: [draw(replace(scene, jitter=i)) for i in range(COUNT)]
             for name, (scene, _) in circle_scenes(first).items()}  # fmt: skip
    shapes = [draw(replace(scene, jitter=i)) for i, (scene, _) in enumerate(shape_cases(first))]
    return found | {"shapes": shapes}


def model_pictures(klein: Klein, first: int) -> dict[str, list[Image.Image]]:
    """Seeds 0, 1, … for the development set, others for the test set."""
    offset = 0 if first == DEVELOPMENT else 100_000

    def draw_these(prompts):
        return draw_all(klein, prompts, offset)

    found = {name: draw_these([caption] * COUNT) for name, (_, caption) in circle_scenes(first).items()}
    return found | {"shapes": draw_these([caption for _, caption in shape_cases(first)])}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("models", nargs="*", default=["nano"], metavar="MODEL", help="names or folders")
    parser.add_argument("--test", dest="first", action="store_const", const=TEST, default=DEVELOPMENT,
                        help="the test set: look once")  # fmt: skip
    options = parser.parse_args(argv)
    drawn = drawn_scenes(options.first)
    report("drawn", drawn, options.first)
    for model in options.models:
        klein = Klein.from_pretrained(model)
        seen = {name: there_and_back(klein.autoencoder, pictures) for name, pictures in drawn.items()}
        report(f"drawn, through the autoencoder of {model}", seen, options.first)
        report(model, model_pictures(klein, options.first), options.first)


if __name__ == "__main__":
    main()
