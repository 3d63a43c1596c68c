"""The README's moving picture: a sentence is typed on the page Draw, and the picture follows.

    make book
    python site/record.py      types on the built site, and writes notebooks/images/typing.webp

Run it again when the page or the weights have changed. Every frame is a screenshot of the page at work. Time is a
typist's: the recording waits until a word is drawn before it types the next letter, so that a busy machine makes the
same film as an idle one. It drives the Chromium of this system; CHROMIUM names another.
"""

import io
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from tools.chromium import launch, serving

ROOT = Path(__file__).resolve().parents[1]
FILM = ROOT / "notebooks" / "images" / "typing.webp"
SENTENCE = "a yellow critter with one eye that laughs"
WIDTH, MARGIN = 640, 8  # pixels: of a frame, and around what it shows
KEY, FIRST, LAST = 110, 900, 2600  # milliseconds: a letter, the stored run before the first one, the finished picture
PADDING = 20  # pixels of the page, left and right
MOST = 1_500_000  # bytes
LONG = 120_000  # milliseconds
CANVAS = "document.querySelector('.layers > canvas')"


def record(address: str) -> list[tuple[Image.Image, int]]:
    """Frames and how many milliseconds each stands."""
    with sync_playwright() as playwright:
        browser = launch(playwright)
        page = browser.new_page(viewport={"width": WIDTH + 2 * (PADDING - MARGIN), "height": 900})
        page.goto(f"{address}/draw.html?embed&world=critters")
        page.focus("[name=prompt]")
        page.wait_for_function("document.querySelector('output').value.startsWith('The model is here')", timeout=LONG)
        frames = [(shoot(page), FIRST)]
        page.fill("[name=prompt]", "")
        frames.append((shoot(page), KEY))
        for i, letter in enumerate(SENTENCE, start=1):
            page.keyboard.type(letter)
            if letter == " ":  # a word is complete
                wait_for(page, SENTENCE[: i - 1])
            frames.append((shoot(page), KEY))
        wait_for(page, SENTENCE)
        frames.append((shoot(page), 3 * KEY))
        page.wait_for_function("document.querySelector('output').value.startsWith('Drawn in')", timeout=LONG)
        frames.append((shoot(page), LAST))
        browser.close()
        return frames


def wait_for(page: Page, sentence: str) -> None:
    """Until a sentence is drawn, in two steps or in four."""
    page.wait_for_function(f"text => {CANVAS}.ariaLabel.endsWith(`: ${{text}}`)", arg=sentence, timeout=LONG)


def shoot(page: Page) -> Image.Image:
    """From the form to the end of the picture."""
    form, picture = (page.locator(part).bounding_box() for part in ("#wish", ".layers"))
    top, bottom = form["y"] - MARGIN, picture["y"] + picture["height"] + MARGIN / 2
    clip = {"x": form["x"] - MARGIN, "y": top, "width": WIDTH, "height": round(bottom - top)}
    return Image.open(io.BytesIO(page.screenshot(clip=clip, caret="initial"))).convert("RGB")


def main() -> None:
    with serving(ROOT / "book") as address:
        frames = record(address)
    first, *others = (frame for frame, _ in frames)
    times = [time for _, time in frames]
    first.save(
        FILM, save_all=True, append_images=others, duration=times, loop=0, quality=80, method=6, minimize_size=True
    )
    size = FILM.stat().st_size
    print(f"{FILM.name}: {first.width} × {first.height}, {sum(times) / 1000:.1f} s, {size:,} bytes")
    if size > MOST:
        raise SystemExit(f"{FILM.name} may have {MOST:,} bytes: choose a lower quality")


if __name__ == "__main__":
    main()
