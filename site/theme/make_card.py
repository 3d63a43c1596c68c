"""Writes the pictures that stand for the book elsewhere: notebooks/images/card.png, which others show beside a link to
it, drawn by klein-nano; and site/theme/favicon.png, for browsers that do not take favicon.svg.

    python site/theme/make_card.py
"""

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from kleinlite import Klein

ROOT = Path(__file__).resolve().parents[2]
CARD, FAVICON = ROOT / "notebooks" / "images" / "card.png", ROOT / "site" / "theme" / "favicon.png"
SIZE, TILE, GAP = (1200, 630), 192, 13
PAPER, INK, RED, BLUE = "#fffefb", "#1d1f24", "#d8342c", "#2458a6"
PROMPTS = [
    "a red circle above a blue square", "a red house under a yellow sun", "a white boat on a blue sea at sunset",
    "a yellow sun over a blue sea", "a green tree on white snow at night",
    "an orange tree left of a red house under an orange sun",
    "a black diamond on a pink background", "a blue house on yellow dunes by day",
    "a yellow star on a purple background",
]  # fmt: skip
WORDS = "FLUX.2 [klein]\nbuilt from scratch\nin Apple MLX,\none notebook at a time"


def mark(side: int) -> Image.Image:
    """The book's sign, favicon.svg: drawn large and shrunk, for smooth edges."""
    large = Image.new("RGBA", (1024, 1024))
    pen = ImageDraw.Draw(large)
    pen.rounded_rectangle((0, 0, 1023, 1023), 224, fill="#f6efe2")
    pen.ellipse((304, 144, 719, 559), fill=RED)
    pen.rounded_rectangle((288, 576, 735, 927), 48, fill=BLUE)
    return large.resize((side, side), Image.Resampling.LANCZOS)


def main() -> None:
    card = Image.new("RGB", SIZE, PAPER)
    pen = ImageDraw.Draw(card)
    sign = mark(150)
    card.paste(sign, (64, 56), sign)
    mark(64).save(FAVICON, optimize=True)
    pen.text((62, 226), "kleinlite", fill=INK, font=ImageFont.load_default(88))
    pen.multiline_text((66, 352), WORDS, fill=INK, font=ImageFont.load_default(36), spacing=12)
    pictures = Klein.from_pretrained()(PROMPTS, seed=[7] * len(PROMPTS), progress=False)
    left, top = SIZE[0] - 3 * TILE - 3 * GAP - 1, (SIZE[1] - 3 * TILE - 2 * GAP) // 2
    for i, picture in enumerate(pictures):
        at = left + i % 3 * (TILE + GAP), top + i // 3 * (TILE + GAP)
        card.paste(picture.resize((TILE, TILE), Image.Resampling.BICUBIC), at)
    card.quantize(256, dither=Image.Dither.FLOYDSTEINBERG).save(CARD, optimize=True)
    for file in (CARD, FAVICON):
        print(f"{file.relative_to(ROOT)}: {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
