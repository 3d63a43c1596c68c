"""Pictures to label by eye, so that the judge can be judged (chapter 13).

    python -m recipe.judge_labels notebooks/judge-labels.json sheets

nano draws a picture of each of 900 held-out captions and the judge sorts them. A stored seed picks 50 of those
that it refuses (all, if there are fewer) and 100 of those that it accepts. The file gets their captions and seeds in
shuffled order, and `sheets` gets contact sheets of ten, twice as large, which do not tell what the judge said.

Whoever looks at them writes "right" into the file: does the picture show all that the caption asks for, and nothing
else? "sure": was that plain at first sight? And "labeled_by": who looked.
"""

import argparse
import json
import random
import textwrap
from pathlib import Path

from PIL import Image, ImageDraw

from kleinlite.klein import Klein
from kleinlite.nano.evaluate import SIZE, TEST, draw_all, examine, held_out_captions

DRAWN = 900
FIRST = TEST - 1  # of 900 held-out captions, before the test set left out what the development set says
REFUSED = 50  # at most this many of those that the judge refuses
ACCEPTED = 100
SEED = 13


def choose(verdicts: list[bool]) -> list[int]:
    """Numbers of the pictures to label, shuffled."""
    rng = random.Random(SEED)
    refused = [i for i, accepted in enumerate(verdicts) if not accepted]
    accepted = [i for i, accepted in enumerate(verdicts) if accepted]
    chosen = rng.sample(refused, min(REFUSED, len(refused))) + rng.sample(accepted, ACCEPTED)
    rng.shuffle(chosen)
    return chosen


def contact_sheet(pictures: list[Image.Image], captions: list[str], first: int) -> Image.Image:
    """Two rows of five pictures, twice as large, each with its number and caption below."""
    tile, words = 2 * SIZE, 48
    sheet = Image.new("RGB", (5 * (tile + 12) + 12, 2 * (tile + words) + 12), "white")
    pen = ImageDraw.Draw(sheet)
    for i, (picture, caption) in enumerate(zip(pictures, captions)):
        x = 12 + i % 5 * (tile + 12)
        y = 8 + i // 5 * (tile + words)
        sheet.paste(picture.resize((tile, tile), Image.Resampling.BICUBIC), (x, y))
        pen.text((x, y + tile + 2), textwrap.fill(f"{first + i}: {caption}", 34), fill=(40, 40, 50), font_size=12)
    return sheet


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw pictures of held-out captions to be labeled by eye.")
    parser.add_argument("path", type=Path, help="captions, seeds and verdicts, into this JSON")
    parser.add_argument("sheets", type=Path, help="the pictures, ten to a sheet, into this folder")
    options = parser.parse_args(argv)
    cases = held_out_captions(DRAWN, FIRST)
    pictures = draw_all(Klein.from_pretrained("nano"), [caption for _, caption in cases])
    verdicts = [all(result.values()) for result in examine(pictures, cases)]
    chosen = choose(verdicts)
    options.sheets.mkdir(parents=True, exist_ok=True)
    for first in range(0, len(chosen), 10):
        ten = chosen[first : first + 10]
        sheet = contact_sheet([pictures[i] for i in ten], [cases[i][1] for i in ten], first)
        sheet.save(options.sheets / f"{first:03}.png")
    rows = [{"seed": i, "caption": cases[i][1], "accepted": verdicts[i], "right": None, "sure": True} for i in chosen]
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    options.path.write_text(
        f'{{\n "model": "nano",\n "drawn": {DRAWN},\n "first": {FIRST},\n "accepted": {sum(verdicts)},\n'
        f' "labeled_by": "",\n "pictures": [\n  {lines}\n ]\n}}\n'
    )


if __name__ == "__main__":
    main()
