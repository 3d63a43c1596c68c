"""Chapter 6's twenty lines draw what `Klein` draws: to the bit, or within a level where threads differ."""

import os

import mlx.core as mx
import numpy as np
import pytest
from stand_in_hub import TINY

from kleinlite import Klein
from kleinlite.pipeline import generate


def same(ours, theirs):
    """To the bit with one thread on a CPU. Klein's products take as many threads as there are idle cores."""
    most = np.abs(np.asarray(ours, int) - np.asarray(theirs, int)).max()
    exact = mx.default_device() == mx.Device(mx.cpu) and os.environ.get("OPENBLAS_NUM_THREADS") == "1"
    return most <= (0 if exact else 1)


@pytest.fixture(scope="module")
def nano():
    return Klein.from_pretrained("nano", keep_loaded=True)


@pytest.mark.parametrize(("seed", "size", "steps"), [(7, 96, 4), (8, 64, 3)])
def test_a_prompt(nano, seed, size, steps):
    ours = generate(nano, "a red house under a yellow sun", seed, size=size, steps=steps)
    theirs = nano("a red house under a yellow sun", seed=seed, width=size, height=size, steps=steps, progress=False)
    assert same(ours, theirs)


def test_edits(nano):
    """With one picture, and with two of other sizes."""
    house = nano("a red house under a yellow sun", seed=7, progress=False)
    wide = house.crop((0, 0, 90, 70))
    for images in ([house], [house, wide]):
        ours = generate(nano, "make it night", 3, images)
        theirs = nano("make it night", images=images, seed=3, width=96, height=96, progress=False)
        assert same(ours, theirs)


def test_guidance():
    base = Klein.from_pretrained("nano-base", keep_loaded=True)
    ours = generate(base, "a star", 3, steps=2, guidance=3.0)
    assert same(ours, base("a star", seed=3, steps=2, guidance=3.0, progress=False))


def test_another_model():
    tiny = Klein.from_pretrained(TINY, keep_loaded=True)
    ours = generate(tiny, "a circle", 1, size=64)
    assert same(ours, tiny("a circle", seed=1, width=64, height=64, progress=False))
