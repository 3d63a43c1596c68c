"""The ladder: our small klein after each of the first chapters, trained with three seeds, and its picture.

    python -m recipe.ladder          all chapters, three seeds: about a quarter of an hour of two cores
    python -m recipe.ladder 02 03    these chapters only; the other rows stay as they are
    python -m recipe.ladder figure   the figure alone, from the rows that are stored

Each chapter's cells marked `#| ladder` (and those that are promoted) are run as they stand, so that the figure shows
what the chapters draw. Writes notebooks/ladder.json, notebooks/images/ladder-*.png, a row each, and ladder.png, the
figure of the README: a blank sheet, every row that rises above the one before, and klein-nano. Of three trainings the
figure shows the middle one's pictures, and what the judge counts in each.
"""

import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any
from unittest.mock import patch

import matplotlib
import mlx.core as mx
import mlx.nn as nn
from PIL import Image, ImageDraw, ImageFont

from kleinlite import Klein
from kleinlite.book import plots, world
from kleinlite.book.ladder import Block, PlainKlein, even_times, loss_on, to_patches, to_pictures, train, walk
from kleinlite.files import write_json
from kleinlite.nano.shapes import pixels

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
SEEDS = (0, 1, 2)
BLANK = "blank sheet"
LEAST_RISE = 3  # right kinds of 48, in the mean of the seeds: a smaller rise may be luck


def chapter_rows(notebook: Path, seed: int) -> list[world.Row]:
    """Run a chapter's marked cells; the rows that its judge gave."""
    names: dict[str, Any] = {"seed": seed, "__name__": "__main__"}
    rows: list[world.Row] = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and source.startswith(("#| default_exp", "#| export", "#| ladder")):
            plots.plt.close("all")
            exec(compile(source, notebook.name, "exec"), names)
            if names.get("row") not in (None, *rows[-1:]):
                rows.append(names["row"])
    return rows


def has_ladder(notebook: Path) -> bool:
    """Whether a chapter has cells marked `#| ladder`."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return any("".join(cell["source"]).startswith("#| ladder") for cell in cells)


def blank_sheets() -> mx.array:
    """Plain paper for every picture of the exam: (32, 48, 48, 3)."""
    pictures = world.make_exam().pictures
    return mx.broadcast_to(pictures[0, 0, 0], pictures.shape)


def mean_kinds(row: dict[str, Any]) -> float:
    """The right kinds of a stored row, in the mean of its seeds."""
    return sum(row["kinds"]) / len(row["kinds"])


def rising(ladder: dict[str, Any]) -> list[str]:
    """The blank sheet, and each row with at least `LEAST_RISE` more right kinds than the last one kept."""
    kept = [BLANK]
    for name in sorted(ladder.keys() - {BLANK}):
        if mean_kinds(ladder[name]) >= mean_kinds(ladder[kept[-1]]) + LEAST_RISE:
            kept.append(name)
    return kept


def strip(drawn: mx.array, side: int = 96) -> Image.Image:
    """The pictures of an exam (32, size, size, 3) that a page shows, side by side, enlarged without smoothing."""
    picture = Image.new("RGB", (side * len(world.SHOWN), side))
    for i, number in enumerate(world.SHOWN):
        values = ((drawn[number] + 1) * 127.5).astype(mx.uint8)
        shown = Image.frombytes("RGB", values.shape[:2], bytes(memoryview(values)))
        picture.paste(shown.resize((side, side), Image.Resampling.NEAREST), (i * side, 0))
    return picture


def figure(ladder: dict[str, Any]) -> Image.Image:
    """The rows that rise and, as the last one, klein-nano's; each with its name and how many of its kinds are right."""
    rows = []
    for name in rising(ladder):
        picture = strip(blank_sheets()) if name == BLANK else Image.open(NOTEBOOKS / "images" / ladder[name]["picture"])
        rows.append((name, sorted(ladder[name]["kinds"]), picture))
    exam = world.make_exam(96)
    drawn = Klein.from_pretrained("nano")(exam.sentences, seed=[7] * len(exam.sentences), progress=False)
    nano = mx.stack([pixels(picture) / 127.5 - 1 for picture in drawn])
    rows.append(("klein-nano", [world.count_right(list(nano), exam.scenes)[0]], strip(nano)))

    side = rows[0][2].height
    left, top, step = 172, 80, side + 4
    whole = Image.new("RGB", (left + rows[0][2].width, top + len(rows) * step), "white")
    pen = ImageDraw.Draw(whole)
    for i, number in enumerate(world.SHOWN):
        asked = textwrap.fill(exam.sentences[number], 14)
        place = (left + (i + 0.5) * side, top - 6)
        pen.multiline_text(place, asked, "black", ImageFont.load_default(12), anchor="md", align="center")
    for i, (name, kinds, picture) in enumerate(rows):
        whole.paste(picture, (left, top + i * step))
        middle = top + i * step + side / 2
        pen.text((6, middle - 9), name, "black", ImageFont.load_default(15), anchor="lm")
        counts = ", ".join(map(str, kinds))
        pen.text((6, middle + 11), f"{counts} of 48 kinds", "#555", ImageFont.load_default(12), anchor="lm")
    return whole


def draw_pixels() -> mx.array:
    """What chapter 0's network draws when a patch is 8 × 8 pixels: the opening of chapter 1."""
    seen = world.make_world(500, alone=True)
    kept = world.make_world(64, kept_back=True, alone=True)
    exam = world.make_exam()
    mx.random.seed(0)
    net = PlainKlein(192, nn.Embedding(16, 96), [Block() for _ in range(3)])
    train(net, to_patches(seen.pictures, 8), seen.labels)
    loss = loss_on(net, to_patches(kept.pictures, 8), kept.labels)
    drawn = to_pictures(walk(net, exam.labels, (32, 36, 192), even_times(20)), 8)
    return world.judge("pixels, 8 × 8", loss, drawn, exam).drawn


def measure(chapter: str, file: Path, ladder: dict[str, Any]) -> None:
    """Train a chapter's rows with each seed; store their numbers, and the pictures of the middle one."""
    notebook = next(NOTEBOOKS.glob(f"{chapter}_*.ipynb"))
    for seeds in zip(*(chapter_rows(notebook, seed) for seed in SEEDS)):
        middle = sorted(seeds, key=lambda row: row.kinds)[len(SEEDS) // 2]
        picture = f"ladder-{re.sub(r'[^a-z0-9]+', '-', middle.name)}.png"
        strip(middle.drawn).save(NOTEBOOKS / "images" / picture, optimize=True)
        ladder[middle.name] = {
            "loss": [round(row.loss, 4) for row in seeds],
            "kinds": [row.kinds for row in seeds],
            "colors": [row.colors for row in seeds],
            "picture": picture,
        }
    write_json(file, dict(sorted(ladder.items())))
    if chapter == "01":
        strip(draw_pixels()).save(NOTEBOOKS / "images" / "ladder-pixels.png", optimize=True)


def main(chapters: list[str]) -> None:
    matplotlib.use("Agg")
    file = NOTEBOOKS / "ladder.json"
    ladder: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if chapters else {}
    kinds, colors = world.count_right(list(blank_sheets()), world.make_exam().scenes)
    ladder[BLANK] = {"kinds": [kinds], "colors": [colors]}
    if chapters != ["figure"]:
        for chapter in chapters or [path.name[:2] for path in sorted(NOTEBOOKS.glob("0*.ipynb")) if has_ladder(path)]:
            measure(chapter, file, ladder)
    figure(ladder).save(NOTEBOOKS / "images" / "ladder.png", optimize=True)


if __name__ == "__main__":
    with patch.object(plots, "show_figure", lambda *_, **__: None):
        main(sys.argv[1:])
