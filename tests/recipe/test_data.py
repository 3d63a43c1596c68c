"""Batches: they depend on the step alone, hold nothing that is held out, and are what they say."""

import mlx.core as mx
import pytest
from small_nano import CONFIG, small_world  # noqa: F401, a fixture

from kleinlite.autoencoder import Autoencoder, patchify
from kleinlite.nano.data import draw_samples
from kleinlite.training import initialize
from recipe.data import autoencoder_batch, measure_latents, psnr, text_batch
from recipe.shapes import WORLD


def test_a_batch_depends_on_its_step_alone(world):
    tokenizer, *_, data = world
    for step in (0, 3, 23):
        for a, b in zip(data(step), data(step)):
            assert mx.array_equal(a, b)
    assert mx.array_equal(autoencoder_batch(WORLD, 5, 2, 32)[0], autoencoder_batch(WORLD, 5, 2, 32)[0])
    assert mx.array_equal(text_batch(WORLD, tokenizer, 32, 4, 8)[0], text_batch(WORLD, tokenizer, 32, 4, 8)[0])


def test_measured_latents_are_normal(world):
    model = Autoencoder(CONFIG)
    initialize(model, mx.random.key(0))
    measure_latents(WORLD, model, 32)
    z = model.encode(draw_samples(range(32), 96))
    assert mx.abs(z.mean(axis=(0, 1, 2))).max().item() < 1e-2
    assert mx.abs(z.var(axis=(0, 1, 2)) - 1).max().item() < 2e-2
    raw = patchify(mx.split(model.encoder(draw_samples(range(4), 96)), 2, axis=-1)[0])
    assert mx.allclose(model.bn.denormalize(z[:4]), raw, atol=1e-3)


def test_psnr():
    assert psnr(mx.zeros((2, 2)), mx.full((2, 2), 0.2)) == pytest.approx(20.0, abs=1e-3)
