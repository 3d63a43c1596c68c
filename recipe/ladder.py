"""The ladder of chapters 0 to 5: their small kleins trained with three seeds, and a picture of each.

    python -m recipe.ladder          all rows, three seeds: about half an hour of two cores
    python -m recipe.ladder 02 03    these chapters only; the other rows stay as they are

Each chapter's cells marked `#| ladder` (and those that are promoted) are run as they stand, so that the figure shows
what the chapters draw. Writes notebooks/ladder.json, notebooks/images/ladder-*.png, a row each, and
ladder.png, the figure of the README: chapters 0, 1, 2, 3, 5 and klein-nano.
"""

import json
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

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
SEEDS = (0, 1, 2)


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


def strip(drawn: mx.array, side: int = 96) -> Image.Image:
    """The pictures of an exam (32, size, size, 3) that a page shows, side by side, enlarged without smoothing."""
    picture = Image.new("RGB", (side * len(world.SHOWN), side))
    for i, number in enumerate(world.SHOWN):
        pixels = ((drawn[number] + 1) * 127.5).astype(mx.uint8)
        shown = Image.frombytes("RGB", pixels.shape[:2], bytes(memoryview(pixels)))
        picture.paste(shown.resize((side, side), Image.Resampling.NEAREST), (i * side, 0))
    return picture


STEPS = {  # rows of the figure: the file's name, what is said beside it
    "0-pixels": "0 pixels", "1-latents": "1 latents", "2-positions": "2 positions", "3-sentences": "3 sentences",
    "5-two-streams": "5 klein's\nblocks",
}  # fmt: skip


def figure() -> Image.Image:
    """Rows of the ladder and, as the last one, klein-nano's pictures for the same sentences; with their names."""
    rows = {said: Image.open(NOTEBOOKS / "images" / f"ladder-{name}.png") for name, said in STEPS.items()}
    sentences = [world.make_exam().sentences[i] for i in world.SHOWN]
    side = rows["0 pixels"].height
    nano = Image.new("RGB", rows["0 pixels"].size)
    for i, picture in enumerate(Klein.from_pretrained("nano")(sentences, seed=[7] * len(sentences), progress=False)):
        nano.paste(picture, (i * side, 0))
    left, top, step = 104, 66, side + 4
    whole = Image.new("RGB", (left + nano.width, top + 6 * step), "white")
    pen = ImageDraw.Draw(whole)
    for i, sentence in enumerate(sentences):
        place = (left + (i + 0.5) * side, top - 6)
        pen.multiline_text(
            place, textwrap.fill(sentence, 14), "black", ImageFont.load_default(12), anchor="md", align="center"
        )
    for i, (said, row) in enumerate([*rows.items(), ("klein-nano", nano)]):
        whole.paste(row, (left, top + i * step))
        pen.multiline_text((6, top + i * step + side / 2), said, "black", ImageFont.load_default(15), anchor="lm")
    return whole


def draw_pixels() -> mx.array:
    """What chapter 0's network draws when a patch is 8 × 8 pixels: the opening of chapter 1."""
    seen = world.make_world(1500)
    exam = world.make_exam()
    kept = world.make_world(64, kept_back=True)
    mx.random.seed(0)
    net = PlainKlein(192, nn.Embedding(16, 96), [Block() for _ in range(3)])
    train(net, to_patches(seen.pictures, 8), seen.labels)
    loss = loss_on(net, to_patches(kept.pictures, 8), kept.labels)
    drawn = to_pictures(walk(net, exam.labels, (32, 36, 192), even_times(20)), 8)
    return world.judge("pixels, 8 × 8", loss, drawn, exam).drawn


def main(chapters: list[str]) -> None:
    matplotlib.use("Agg")
    file = NOTEBOOKS / "ladder.json"
    ladder: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for chapter in chapters or ["00", "01", "02", "03", "05"]:
        notebook = next(NOTEBOOKS.glob(f"{chapter}_*.ipynb"))
        for seed in SEEDS:
            for row in chapter_rows(notebook, seed):
                entry = ladder.setdefault(row.name, {"loss": [], "singles": [], "pairs": []})
                for key, value in (("loss", row.loss), ("singles", row.singles), ("pairs", row.pairs)):
                    entry[key] = [*entry[key][:seed], round(value, 4)]
                if seed == SEEDS[0]:
                    entry["picture"] = f"ladder-{row.name.replace(' ', '-').replace(',', '')}.png"
                    strip(row.drawn).save(NOTEBOOKS / "images" / entry["picture"], optimize=True)
            write_json(file, dict(sorted(ladder.items())))
        if chapter == "01":
            strip(draw_pixels()).save(NOTEBOOKS / "images" / "ladder-pixels.png", optimize=True)
    figure().save(NOTEBOOKS / "images" / "ladder.png", optimize=True)


if __name__ == "__main__":
    with patch.object(plots, "show_figure", lambda *_, **__: None):
        main(sys.argv[1:])
