"""z-nano: what it learns from, a short training, and the weights that come with the package."""

import random

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from kleinlite import Klein
from kleinlite.book.z_nano import CONFIG, load_z_nano
from kleinlite.nano.evaluate import examine, held_out_captions
from kleinlite.pipeline import to_images, velocity_field
from kleinlite.sampling import euler, noise, schedule
from kleinlite.z_image import encode_caption, static_schedule, z_image_velocity_field
from recipe import z_nano as sister
from recipe.z_nano import FILE, FIRST, GRID, STEPS, levels_on_path, make_velocity

N = GRID[0] * GRID[1]


@pytest.fixture(scope="module")
def klein():
    return Klein.from_pretrained("nano")


@pytest.fixture(scope="module")
def walks(klein):
    return sister.keep_walks(klein, 32)


def features(klein, prompt):
    """Of the last of nano's three layers."""
    return encode_caption(klein.text_encoder, klein.tokenizer, prompt)[..., -CONFIG.d_text :]


@pytest.mark.slow
def test_the_way_is_klein_nanos_own(klein, walks):
    prompt = sister.caption(sister.captions_of_the_curriculum(klein.tokenizer), FIRST + 5)
    field = velocity_field(klein.transformer, klein.encode_prompt(prompt), GRID)
    start = mx.random.normal((32, N, 128), key=mx.random.key(FIRST))[5:6]
    ends = [step.latents for step in euler(field, start, schedule(4, N))]
    assert mx.allclose(walks["path"][5:6, 0].astype(mx.float32), start, atol=2e-3)  # kept in float16
    for k, latents in enumerate(ends, start=1):
        assert mx.allclose(walks["path"][5:6, k].astype(mx.float32), latents, atol=1e-2)


def test_each_level_lies_on_the_way():
    mix, knots = levels_on_path(static_schedule(STEPS)), schedule(4, N)
    assert mix.shape == (STEPS + 1, 5) and mx.allclose(mix.sum(axis=1), mx.ones(STEPS + 1))
    assert mix[0].tolist() == [1, 0, 0, 0, 0] and mix[-1].tolist() == [0, 0, 0, 0, 1]
    assert mx.allclose(mix @ mx.array(knots), mx.array(static_schedule(STEPS)), atol=1e-6)


def test_a_batch_is_chapter_15s_field(klein):
    net = sister.new_network()
    prompts = ["a red circle", "a yellow sun over a blue sea"]
    ids, mask = sister.read_captions(klein.tokenizer, prompts)
    x = mx.random.normal((2, N, 128), key=mx.random.key(1))
    right = z_image_velocity_field(net, [features(klein, prompt) for prompt in prompts], GRID)(x, 0.6)
    batch = make_velocity(klein.text_encoder)(net, x, ids, mask, mx.full((2,), 0.6))
    assert mx.allclose(batch, right, atol=1e-4)


@pytest.mark.slow
def test_two_steps_of_training_and_one_more(tmp_path, walks, monkeypatch, capsys):
    monkeypatch.setattr(sister, "keep_walks", lambda *_: walks)
    monkeypatch.setattr(sister, "HELD_OUT", 8)
    monkeypatch.setattr(sister, "BATCH", 4)
    sister.train(tmp_path, steps=2, walks=32)
    assert "held out, step by step" in (tmp_path / "log").read_text()
    small = load_z_nano(tmp_path / FILE.name)
    sister.train(tmp_path, steps=3, walks=32)  # goes on
    other = load_z_nano(tmp_path / FILE.name)
    moved = [
        mx.abs(a - b).max().item() for (_, a), (_, b) in zip(*(tree_flatten(n.parameters()) for n in (small, other)))
    ]
    assert 0 < max(moved) < 0.2


def test_six_bits_are_near_enough(tmp_path):
    net = sister.new_network()
    sister.write_bundle(tmp_path / "z.safetensors", net)
    again = dict(tree_flatten(load_z_nano(tmp_path / "z.safetensors").parameters()))
    for name, w in tree_flatten(net.parameters()):
        if w.ndim == 2 and w.any():
            off = mx.sqrt(((again[name] - w) ** 2).mean() / (w**2).mean()).item()
            assert off < 0.03, name


def test_the_bundled_one_draws(klein):
    assert FILE.stat().st_size < 6e6
    net = load_z_nano(FILE)
    cases = held_out_captions(12)
    random.Random(0).shuffle(cases)
    texts = [features(klein, caption) for _, caption in cases]
    x = mx.concatenate([noise(seed, N) for seed in range(len(cases))])
    *_, last = euler(z_image_velocity_field(net, texts, GRID), x, static_schedule(STEPS))
    results = examine(to_images(klein.autoencoder.decode(last.latents.reshape(-1, *GRID, 128))), cases)
    assert sum(sum(result.values()) for result in results) > 0.8 * sum(map(len, results))
