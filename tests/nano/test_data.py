"""Batches: they depend on the step alone, hold nothing that is held out, and are what they say."""

import random

import mlx.core as mx
import pytest
from small_nano import CONFIG, small_world  # noqa: F401, a fixture

from kleinlite.autoencoder import Autoencoder, pack
from kleinlite.nano.data import (
    FlowData,
    autoencoder_batch,
    draw_samples,
    encode_scenes,
    measure_latents,
    psnr,
    sample_sentence,
    text_batch,
)
from kleinlite.nano.decoding import UNSEEN, decoder_batches, decoder_loss, decoder_scenes, sight, weights, written
from kleinlite.nano.lessons import lesson_loss
from kleinlite.scenes import edit_held_out, held_out, instruction, relatives, sample_edit
from kleinlite.training import initialize


def test_a_batch_depends_on_its_step_alone(world):
    tokenizer, *_, data = world
    for step in (0, 3, 23):
        for a, b in zip(data(step), data(step)):
            assert mx.array_equal(a, b)
    assert mx.array_equal(autoencoder_batch(5, 2, 96, 32)[0], autoencoder_batch(5, 2, 96, 32)[0])
    assert mx.array_equal(text_batch(tokenizer, 32, 4, 8)[0], text_batch(tokenizer, 32, 4, 8)[0])


def test_references_come_with_edits_and_pairs(world):
    data = world[-1]
    assert [data(step)[1].shape[1] for step in (0, 3, 23)] == [0, 36, 72]
    seeds = [s for s in range(300) if len(sample_edit(s)[0]) == 2]
    assert seeds == list(data.second_row)


def test_twins_are_two_edits_of_one_scene_one_for_each_thing(world):
    tokenizer, autoencoder, *_, data = world
    scenes = [scene for seed in range(6) for scene in relatives(seed)]
    assert len(data.families) == 6 and data.latents["relatives"].shape[0] == len(scenes)
    for row, *both in (choice for family in data.families for choice in family):
        for i, edits in enumerate(both[::-1]):  # the first list changes the first thing and keeps the second
            for text, after in edits:
                assert instruction(scenes[row], scenes[after]) == text and not edit_held_out(scenes[row], text)
                assert scenes[row].things[i] in scenes[after].things
    texts, clean, references = data.twins(random.Random(5))
    assert len(texts) == len(clean) == data.batch // 2
    assert mx.array_equal(references[::2], references[1::2]) and len(set(texts)) > 2
    found = [mx.abs(data.latents["relatives"] - row).sum(axis=(1, 2)).argmin().item() for row in references[:1]]
    after = encode_scenes(autoencoder, [s for s in scenes if instruction(scenes[found[0]], s) == texts[0]], 96)
    assert mx.abs(clean[0] - after).max(axis=(1, 2)).min().item() < 1e-2


def test_turns_say_what_each_step_is_of(world):
    data = world[-1]
    kinds = ("pictures", "twins", "pairs", "edits")
    turning = FlowData(data.latents, data.tokenizer, 32, batch=12, turns=kinds)
    assert [turning(step)[1].shape[:2] for step in range(8)] == 2 * [(12, 0), (6, 36), (4, 72), (6, 36)]


def test_nothing_held_out_is_trained_on(world):
    tokenizer, *_, data = world

    for step in range(0, 40):
        rng = random.Random(step)
        text = sample_sentence(rng, step)
        assert not held_out(text) or text in {sample_edit(s)[1] for s in range(300)}
    for seed in data.one_reference + data.two_references:
        references, text, _ = data.edits_by_seed[seed]
        assert not edit_held_out(references[0], text)
    said = set()
    for step in (s for s in range(40) if s % 4 != 3):
        ids, mask = data(step)[2:4]
        words = [tokenizer.decode(row[: sum(real)]) for row, real in zip(ids.tolist(), mask.tolist())]
        said |= {w.split("user\n")[1].split("\nassistant")[0] for w in words} - {""}
    assert len(said) > 20 and not any(map(held_out, said))


def test_measured_latents_are_normal(world):
    model = Autoencoder(CONFIG)
    initialize(model, mx.random.key(0))
    measure_latents(model, 96, 32)
    z = model.encode(draw_samples(range(32), 96))
    assert mx.abs(z.mean(axis=(0, 1, 2))).max().item() < 1e-2
    assert mx.abs(z.var(axis=(0, 1, 2)) - 1).max().item() < 2e-2
    raw = pack(mx.split(model.encoder(draw_samples(range(4), 96)), 2, axis=-1)[0])
    assert mx.allclose(model.bn.denormalise(z[:4]), raw, atol=1e-3)


def test_psnr():
    assert psnr(mx.zeros((2, 2)), mx.full((2, 2), 0.2)) == pytest.approx(20.0, abs=1e-3)


def test_the_decoder_learns_from_latents_as_the_flow_writes_them(world):
    tokenizer, autoencoder, text_encoder, flow, _ = world
    batches = decoder_batches(autoencoder, flow, text_encoder, tokenizer, 32, 8, 96)
    (x, z), (again, same) = batches(3), batches(3)
    assert mx.array_equal(x, again) and mx.array_equal(z, same)
    away = (z - autoencoder.encode(x)).std(axis=(1, 2, 3)).tolist()
    assert away[:3] == pytest.approx([0.02] * 3, rel=0.1)  # clean ones: 3 of 8
    assert min(away[3:]) > 0.04


def test_a_faint_picture_counts_three_times_as_much_for_the_decoder():
    x = mx.zeros((1, 4, 4, 3)) + 0.56 * (mx.arange(4) % 2)[:, None, None]  # as different as usual: 0.28 about its mean
    every = mx.concatenate([x, x / 2, x / 9, 2 * x])
    assert weights(every).tolist() == pytest.approx([1, 2, 3, 0.8], rel=1e-4)

    class Off:
        decode = staticmethod(lambda latents: every + 0.5 * (mx.arange(4) == 2)[:, None, None, None])

    want = 3 * (0.5 + 2 * 0.25) / 4
    assert decoder_loss(Off, every, None).item() == pytest.approx(want, rel=1e-4)


def test_errors_of_latents_count_as_the_decoder_shows_them():
    """A decoder that shows the first 32 of 128 channels, the first of them ten times as strongly."""
    strength = mx.concatenate([mx.array([10.0]), mx.ones((31,)), mx.zeros((96,))])

    class Plain:
        encode = staticmethod(lambda x: mx.zeros((1, 6, 6, 128)))
        decode = staticmethod(lambda z: (z * strength)[..., None])

    root = sight(Plain, mx.zeros((3, 6, 6, 128, 1)), mx.random.key(1))
    assert mx.allclose(root, root.T, atol=1e-5)
    off = (root**2).sum(axis=1)  # what an error of 1 in each channel counts
    assert off.sum().item() == pytest.approx(128, rel=1e-4)
    seen = (1 - UNSEEN) * 128 / 131
    assert off[0].item() == pytest.approx(100 * seen + UNSEEN, rel=1e-3)
    assert off[1:32].tolist() == pytest.approx([seen + UNSEEN] * 31, rel=1e-3)
    assert off[32:].tolist() == pytest.approx([UNSEEN] * 96, rel=1e-3)


def test_the_flow_loss_is_of_errors_as_they_are_seen(world):
    _, _, text_encoder, flow, data = world
    measured_by = lambda root: lesson_loss(flow, text_encoder, (6, 6), root, *data(0)).item()
    low, same = mx.diag((mx.arange(128) < 40).astype(mx.float32)), mx.eye(128)
    assert measured_by(2 * same) == pytest.approx(4 * measured_by(same), rel=1e-4)
    assert measured_by(low) + measured_by(same - low) == pytest.approx(measured_by(same), rel=1e-4)
    assert 0.1 < measured_by(low) / measured_by(same) < 0.6


def test_the_decoder_sees_circles_and_stars_more_often():
    chosen = decoder_scenes(random.Random(0), 0, 400)
    assert len(chosen) == 400 and len({str(scene) for scene in chosen}) > 390
    ones = [scene.things[0].kind for scene in chosen if len(scene.things) == 1 and not scene.is_landscape]
    count = lambda *kinds: sum(kind in kinds for kind in ones) / len(kinds)
    assert count("circle", "star") > 1.5 * count("square", "diamond", "heart")


def test_latents_without_noise_are_written_as_they_are(world):
    _, autoencoder, text_encoder, flow, _ = world
    z, txt = mx.random.normal((2, 6, 6, 128), key=mx.random.key(1)), mx.zeros((2, 32, 72))
    same = written(flow, txt, z, mx.zeros((2,)), mx.random.key(2))
    noisy = written(flow, txt, z, mx.full((2,), 0.7), mx.random.key(2))
    assert mx.allclose(same, z, atol=1e-6) and not mx.allclose(noisy, z, atol=0.1)
