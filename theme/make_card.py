"""Writes notebooks/images/card.png, the picture that others show beside a link to the book: drawn by klein-nano.

python theme/make_card.py
"""

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from kleinlite import Klein
from kleinlite.evaluate import SHOWCASE

CARD = Path(__file__).resolve().parent.parent / "notebooks" / "images" / "card.png"
SIZE, TILE, GAP = (1200, 630), 192, 13
PAPER, INK, RED, BLUE = "#f7f3ea", "#1d1f24", "#d8342c", "#2458a6"
CHOSEN = (0, 7, 9, 6, 8, 10, 3, 11, 1)  # of the showcase: nine, so that landscapes and shapes take turns
WORDS = "FLUX.2 [klein]\nbuilt from scratch\nin Apple MLX,\none notebook at a time"


def mark() -> Image.Image:
    """The book's sign, drawn large and shrunk, for smooth edges."""
    large = Image.new("RGB", (240, 496), PAPER)
    pen = ImageDraw.Draw(large)
    pen.ellipse((0, 0, 239, 239), fill=RED)
    pen.rounded_rectangle((10, 268, 229, 487), 24, fill=BLUE)
    return large.resize((60, 124), Image.Resampling.LANCZOS)


def main() -> None:
    card = Image.new("RGB", SIZE, PAPER)
    pen = ImageDraw.Draw(card)
    card.paste(mark(), (64, 70))
    pen.text((62, 226), "kleinlite", fill=INK, font=ImageFont.load_default(88))
    pen.multiline_text((66, 352), WORDS, fill=INK, font=ImageFont.load_default(36), spacing=12)
    prompts = [SHOWCASE[i] for i in CHOSEN]
    pictures = Klein.from_pretrained()(prompts, seed=[0] * len(prompts), progress=False)
    left, top = SIZE[0] - 3 * TILE - 3 * GAP - 1, (SIZE[1] - 3 * TILE - 2 * GAP) // 2
    for i, picture in enumerate(pictures):
        at = left + i % 3 * (TILE + GAP), top + i // 3 * (TILE + GAP)
        card.paste(picture.resize((TILE, TILE), Image.Resampling.BICUBIC), at)
    card.quantize(256, dither=Image.Dither.FLOYDSTEINBERG).save(CARD, optimize=True)
    print(f"{CARD.name}: {CARD.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
