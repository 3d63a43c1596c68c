"""Changing a part of a picture: what stays is equal to the bit, nothing is shifted, and diffusers' numbers come out."""

import json
from functools import cache
from pathlib import Path

import mlx.core as mx
import pytest
from PIL import Image, ImageDraw, ImageFilter

from kleinlite import Klein, pipeline
from kleinlite.inference.masks import count_skipped, plan_change
from kleinlite.pipeline import to_pixels

INPAINT = Path(__file__).parents[1] / "pipelines" / "inpaint"
META = json.loads((INPAINT / "meta.json").read_text(encoding="utf-8"))
PROMPT = "make the circle yellow"


@cache
def nano() -> Klein:
    return Klein.from_pretrained("nano", dtype=mx.float32)


@cache
def source() -> Image.Image:
    return nano()("a red circle above a blue square", seed=7, progress=False)


def half_mask(size: tuple[int, int] = (96, 96), soft: int = 0) -> Image.Image:
    """White in the upper half."""
    mask = Image.new("L", size)
    ImageDraw.Draw(mask).rectangle((0, 0, size[0], size[1] // 2 - 1), fill=255)
    return mask.filter(ImageFilter.BoxBlur(soft)) if soft else mask


def thin_mask() -> Image.Image:
    """White between two squares of 16 pixels, of whose middles it covers none."""
    mask = Image.new("L", (96, 96))
    mask.paste(255, (0, 44, 96, 52))
    return mask


def open_stored(name: str) -> Image.Image:
    return Image.open(INPAINT / name)


# ---------------------------------------------------------------- diffusers


@pytest.fixture(scope="module")
def tiny() -> Klein:
    return Klein.from_pretrained(INPAINT / "model", dtype=mx.float32)


def largest(x: mx.array) -> float:
    return mx.abs(x.astype(mx.float32)).max().item()


@pytest.mark.parametrize("name", META["runs"])
def test_as_in_diffusers(tiny, name):
    run = META["runs"][name]
    expected = mx.load(str(INPAINT / "expected.safetensors"))
    want = {key.removeprefix(f"{name}."): w for key, w in expected.items() if key.startswith(f"{name}.")}
    images = [open_stored("source.png"), *([open_stored("ref.png")] if run["ref"] else [])]
    mask = open_stored(run["mask"]) if run["mask"] else None
    options = {"images": images, "mask": mask, "strength": run["strength"], "steps": run["steps"]}
    change = plan_change(images, options)
    steps = list(tiny.stream(run["prompt"], **options, noise=want["noise"], progress=False))
    assert [step.t for step in steps] == pytest.approx(want["sigmas"].tolist(), abs=1e-6)
    latents = mx.stack([step.latents for step in steps])
    assert largest(latents - want["steps"]) < 1e-4 * largest(want["steps"])
    drawn = 1.0 if change.token_mask() is None else change.token_mask() == 1  # elsewhere the velocity is the way back
    assert largest((steps[0].velocity - want["velocity0"]) * drawn) < 1e-4 * largest(want["velocity0"])
    grid = steps[-1].latents.reshape(1, 5, 6, 128)
    pixels = to_pixels(pipeline.to_images(tiny.autoencoder.decode(grid))[0])[0]
    assert largest(pixels - (2 * (want["image"].astype(mx.float32) / 255) - 1)) * 127.5 < 1.01


# ---------------------------------------------------------------- what stays


@pytest.mark.parametrize("size", [(96, 96), (90, 75), (67, 101)])
@pytest.mark.parametrize("extend", [None, (0, 0, 20, 0), (5, 9, 0, 33)])
def test_what_is_black_is_equal_to_the_bit(size, extend):
    picture = source().resize(size)
    mask = half_mask(size, soft=4)
    drawn = nano()(PROMPT, images=[picture], mask=mask, extend=extend, seed=1, steps=1, progress=False)
    left, top, right, bottom = extend or (0, 0, 0, 0)
    assert drawn.size == (size[0] + left + right, size[1] + top + bottom)
    inner = drawn.crop((left, top, left + size[0], top + size[1]))
    off = mx.abs(to_pixels(inner) - to_pixels(picture)).max(axis=-1)[0]
    levels = mx.array(memoryview(mask.tobytes())).reshape(size[1], size[0])
    assert mx.where(levels == 0, off, 0).max().item() == 0
    assert mx.where(levels == 255, off, 0).max().item() > 0.1


def test_an_extension_alone_keeps_all_of_the_picture():
    drawn = nano()("a red circle", images=[source()], extend=(16, 0, 0, 7), seed=1, steps=1, progress=False)
    assert drawn.size == (112, 103)
    assert drawn.crop((16, 0, 112, 96)).tobytes() == source().tobytes()


def test_a_soft_mask_blends_its_seam():
    picture = Image.new("RGB", (96, 96), "black")
    change = plan_change([picture], {"mask": half_mask(soft=8)})
    pasted = change.paste(Image.new("RGB", (96, 96), "white"))
    column = [pasted.getpixel((40, y))[0] for y in range(96)]
    assert column == [half_mask(soft=8).getpixel((40, y)) for y in range(96)] and len(set(column)) > 15


# ---------------------------------------------------------------- nothing is shifted


def shift(a: Image.Image, b: Image.Image) -> tuple[int, int]:
    """How far b's content lies below and to the right of a's, in pixels: the peak of their phase correlation.

    Kuglin and Hines 1975.
    """
    fa, fb = (mx.fft.fft2(to_pixels(image)[0].mean(axis=-1)) for image in (a, b))
    cross = mx.conjugate(fa) * fb
    peak = mx.fft.ifft2(cross / (mx.abs(cross) + 1e-6)).real
    row, column = divmod(int(peak.argmax().item()), a.width)
    return (row + a.height // 2) % a.height - a.height // 2, (column + a.width // 2) % a.width - a.width // 2


def test_an_edit_of_an_odd_size_is_not_shifted():
    picture = source().resize((110, 110)).crop((0, 0, 107, 93))
    plain = nano()(PROMPT, images=[picture], seed=3, progress=False)
    changed = nano()(PROMPT, images=[picture], strength=1.0, seed=3, progress=False)
    assert shift(picture, picture.transform(picture.size, Image.Transform.AFFINE, (1, 0, -3, 0, 1, -2))) == (2, 3)
    assert changed.size == picture.size and shift(picture, changed) == (0, 0)
    assert plain.size == (96, 80), "as diffusers: the edges are cut evenly"
    canvas = Image.new("RGB", picture.size)
    canvas.paste(plain)
    rows, columns = shift(picture, canvas)
    assert rows <= -5 and columns <= -5, "cut off: 6.5 and 5.5 pixels"


# ---------------------------------------------------------------- strength


def test_strength_counts_as_in_diffusers():
    def taken(steps, strength):
        return steps - count_skipped(steps, strength)

    assert [taken(4, s / 100) for s in (100, 76, 75, 51, 50, 26, 25, 1)] == [4, 4, 3, 3, 2, 2, 1, 1]
    assert taken(10, 0.3) == 3 and taken(50, 0.6) == 30 and taken(1, 0.1) == taken(4, 1e-20) == 1


def test_a_lower_strength_keeps_more():
    night = "a red circle above a green star"
    row = [nano()(night, images=[source()], strength=s, seed=5, progress=False) for s in (0.25, 0.5, 0.75, 1.0)]
    off = [mx.abs(to_pixels(image) - to_pixels(source())).mean().item() for image in row]
    assert off[0] < off[-1]
    steps = list(nano().stream(night, images=[source()], strength=0.5, seed=5, progress=False))
    assert len(steps) == 2 and steps[0].t < 1


# ---------------------------------------------------------------- mistakes, and what a picture remembers


CLEAR = Image.new("RGBA", (96, 96), (255, 255, 255, 0))
WRONG = {
    "size": ({"mask": half_mask((64, 64))}, "the mask is 64×64 and the picture 96×96"),
    "black": ({"mask": Image.new("L", (96, 96))}, "of the mask is 0 of 255"),
    "faint": ({"mask": Image.new("L", (96, 96), 127)}, "of the mask is 127 of 255, and nothing below 128"),
    "faint, with more room": ({"mask": Image.new("L", (96, 96), 1), "extend": (16, 0, 0, 0)}, "mask is 1 of 255"),
    "0 and 1": ({"mask": half_mask().convert("I").point(lambda level: level / 255)}, "no known white"),
    "red": ({"mask": Image.new("RGB", (96, 96), "red")}, "of the mask is 76 of 255"),
    "thin": ({"mask": thin_mask()}, "too thin"),
    "clear": ({"mask": CLEAR}, "transparent"),
    "no picture": ({"mask": "mask.png"}, "must be a picture"),
    "strength": ({"strength": 0}, "above 0"),
    "strength text": ({"strength": "0.5"}, "is a number"),
    "strength nan": ({"strength": float("nan")}, "above 0"),
    "three sides": ({"extend": (1, 2, 3)}, "four whole numbers"),
    "negative": ({"extend": (0, 0, -16, 0)}, "negative"),
    "text": ({"extend": "abcd"}, "four whole numbers"),
    "width": ({"strength": 0.5, "width": 64}, "the picture says the size, 96×96: leave width"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_told(name):
    options, sentence = WRONG[name]
    with pytest.raises(ValueError, match=f"(?i){sentence}") as told:
        nano()(PROMPT, images=[source()], progress=False, **options)
    assert str(told.value)[-1] == "."


@pytest.mark.parametrize("options", [{"mask": half_mask()}, {"strength": 0.5}, {"extend": (0, 0, 16, 0)}])
def test_there_must_be_a_picture(options):
    with pytest.raises(ValueError, match="there is none"):
        nano()(PROMPT, progress=False, **options)


def test_a_picture_remembers_it():
    options = {"mask": half_mask(), "strength": 0.5, "extend": (0, 0, 16, 0)}
    made = nano()(PROMPT, images=[source()], seed=1, progress=False, **options).info["kleinlite"]
    assert (made["mask"], made["strength"], made["extend"]) == (True, 0.5, [0, 0, 16, 0])
    assert (made["width"], made["height"], made["references"]) == (112, 96, 1)


def test_modes_of_masks():
    grey = half_mask()
    palette, deep = grey.convert("P"), grey.convert("I;16").point(lambda level: level * 257)
    ones, wide = grey.convert("F").point(lambda level: level * (1.0001 / 255) + 0.0), grey.convert("I")
    for mask in (grey, grey.convert("1"), grey.convert("RGB"), grey.convert("RGBA"), palette, deep, ones, wide):
        assert plan_change([source()], {"mask": mask}).mask.tobytes() == grey.tobytes(), mask.mode
