"""How round are circles? By the second judge, whom no training has asked.

    python -m recipe.roundness                     nano and the drawn scenes, as they are and through its autoencoder,
                                                  on the development set
    python -m recipe.roundness FOLDER --test       another model, on the test set: other seeds and other captions

*dents*: the outline of a red circle against its radius, large ones alone and small ones above a square, 48 pictures
each. ± is one standard error.
"""

import argparse
from dataclasses import replace

from PIL import Image

from kleinlite.klein import Klein
from kleinlite.measuring import mean_and_error
from kleinlite.nano.evaluate import DEVELOPMENT, TEST, draw_all
from kleinlite.scenes import Scene, Thing, draw, with_article

from .evaluate import there_and_back
from .second_judge import dents

COUNT = 48
COLORS = {DEVELOPMENT: ("red", "blue", "blue"), TEST: ("green", "orange", "yellow")}  # circle, square, paper


def circle_scenes(first: int) -> dict[str, tuple[Scene, str]]:
    """A large circle and a small one, with their captions; a development or a test set has its own colors."""
    circle, square, paper = COLORS[first]
    small = (Thing("circle", circle, "top"), Thing("square", square, "bottom"))
    return {
        "large": (Scene((replace(small[0], place="center"),), background=paper),
                  f"a {circle} circle on a {paper} background"),
        "small": (Scene(small, background="white"), f"a {circle} circle above {with_article(square)} square"),
    }  # fmt: skip


def report(name: str, pictures: dict[str, list[Image.Image]], first: int) -> None:
    """Print the roundness error of large and of small circles, by the second judge."""
    print(name)
    for size, (scene, _) in circle_scenes(first).items():
        mean, error = mean_and_error([dents(picture, scene.things) for picture in pictures[size]])
        print(f"  {size} circles: dents {mean:.4f} ± {error:.4f}")


def drawn_scenes(first: int) -> dict[str, list[Image.Image]]:
    return {size: [draw(replace(scene, jitter=i)) for i in range(COUNT)]
            for size, (scene, _) in circle_scenes(first).items()}  # fmt: skip


def model_pictures(klein: Klein, first: int) -> dict[str, list[Image.Image]]:
    """Seeds 0, 1, … for the development set, others for the test set."""
    offset = 0 if first == DEVELOPMENT else 100_000
    return {size: draw_all(klein, [said] * COUNT, offset) for size, (_, said) in circle_scenes(first).items()}


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
