"""One matrix in place of the decoder: how near it comes, how little it takes, and that it is fitted once."""

import math

import mlx.core as mx
import pytest

from kleinlite import Klein
from kleinlite.inference import loaded_model
from kleinlite.inference.fast_preview import BLOCKS, preview_pixels, to_blocks
from kleinlite.memory import count_parameters
from kleinlite.pipeline import to_pixels
from kleinlite.transformer import Transformer, TransformerConfig

PROMPTS = ["a red circle above a blue square", "a yellow sun over a blue sea", "a green tree on green hills at sunset"]


@pytest.fixture(scope="module")
def klein() -> Klein:
    return Klein.from_pretrained("nano", dtype=mx.float32)


def decibels(a: mx.array, b: mx.array) -> float:
    """Peak signal to noise, of pixels in [-1, 1]."""
    return -10 * math.log10(mx.square(mx.clip(a, -1, 1) - b).mean().item() / 4)


def test_it_comes_near_the_decoder(klein):
    *_, last = klein.stream(PROMPTS, seed=3, progress=False)
    pixels = mx.concatenate([to_pixels(picture) for picture in last.preview()])
    grid = last.latents.reshape(3, 6, 6, 128)
    small = preview_pixels(klein._model.preview_matrix(), grid)
    blocks = to_blocks(pixels, 6).reshape(3, 6, 6, BLOCKS, BLOCKS, 3).transpose(0, 1, 3, 2, 4, 5).reshape(small.shape)
    assert decibels(small, blocks) > 25
    fast = mx.concatenate([to_pixels(picture) for picture in last.preview(fast=True)])
    assert fast.shape == pixels.shape and decibels(fast, pixels) > 22


def test_it_is_fitted_once(klein, monkeypatch):
    klein._model.preview_matrix()
    monkeypatch.setattr(loaded_model, "fit_preview", None)
    next(klein.stream("a red circle", seed=1, progress=False)).preview(fast=True)


def test_it_takes_next_to_nothing():
    """Of a step of the 4B's transformer, at any size: two operations per weight and token there, and here."""
    matrix = (128 + 1) * 3 * BLOCKS**2
    assert matrix / count_parameters(Transformer, TransformerConfig()) < 1e-5


def test_it_is_cropped_and_pasted_as_the_picture_is(klein):
    source = klein("a red circle", seed=1, progress=False).resize((90, 70))
    step = next(klein.stream("make it blue", images=[source], extend=(0, 0, 20, 0), seed=1, progress=False))
    preview = step.preview(fast=True)
    assert preview.size == (110, 70) and preview.crop((0, 0, 90, 70)).tobytes() == source.tobytes()
