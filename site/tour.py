"""Still pictures of the tour on the page *Look inside*, for print, for phones and where no script runs.

    make book
    python site/tour.py        takes the tour on the built site and stores what every stop shows

Run it again when the page or the weights have changed. It drives the Chromium of this system; CHROMIUM names another.
"""

import io
from pathlib import Path

import numpy as np
from PIL import Image
from playwright.sync_api import sync_playwright

from tools.chromium import launch, serving

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "notebooks" / "images"
WIDTH, HEIGHT = 760, 560  # pixels of a still, at most: the page is as wide as a column of text
GAP = 5  # rows of the page's color between two lines
LONG = 120_000  # milliseconds


def take_tour(address: str) -> list[bytes]:
    """A PNG of what is seen at each stop: what the page says of it, its controls and its pictures."""
    with sync_playwright() as playwright:
        page = launch(playwright).new_page(viewport={"width": WIDTH + 100, "height": 900}, reduced_motion="reduce")
        page.goto(f"{address}/inside.html")
        stops = page.locator("ol.tour > li").count()
        page.click("text=Take the tour")
        stills = []
        for stop in range(1, stops + 1):
            page.wait_for_function(
                f"document.querySelector('.stop .count')?.innerText === '{stop} of {stops}'", timeout=LONG
            )
            page.wait_for_function("!document.querySelector('.columns').innerText.includes('Drawing')", timeout=LONG)
            page.wait_for_timeout(500)  # what is drawn on canvases is there
            stills.append(page.locator(".columns").screenshot())
            if stop < stops:
                page.click(".stop >> text=Next")
        return stills


def blank_row(picture: Image.Image) -> int:
    """Where to cut a picture below at most `HEIGHT` rows: between two lines, not through one."""
    rows = np.asarray(picture)
    if len(rows) <= HEIGHT:
        return len(rows)
    blank = (np.ptp(rows, axis=1) < 8).all(axis=1)
    return next(row for row in range(HEIGHT, 0, -1) if blank[row - GAP : row].all())


def main() -> None:
    with serving(ROOT / "book") as address:
        stills = take_tour(address)
    for stop, still in enumerate(stills, start=1):
        picture = Image.open(io.BytesIO(still)).convert("RGB")
        picture = picture.crop((0, 0, picture.width, blank_row(picture)))
        picture.save(IMAGES / f"tour-{stop}.jpg", quality=70, optimize=True)
        print(f"tour-{stop}.jpg: {picture.width} × {picture.height}")


if __name__ == "__main__":
    main()
