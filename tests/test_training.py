"""The losses of chapter 11 mean what they say."""

import json

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from small_nano import CONFIG, GRID, small_world  # noqa: F401, a fixture

from kleinlite.klein import Klein
from kleinlite.sampling import schedule
from kleinlite.text_encoder import tokenize
from kleinlite.training import (
    Batch,
    encode_batch,
    flow_ids,
    flow_loss,
    shifted_times,
    velocity_loss,
)
from recipe.saving import save_encoders, save_transformer
from recipe.training import text_encoder_loss


def weights(module):
    return dict(tree_flatten(module.parameters()))


def test_flow_loss_of_the_exact_answer_is_zero(world):
    """A network that knows the noise: the loss must vanish, so target, time and mixing agree."""
    _, _, encoder, transformer, data = world
    clean, references, ids, mask, key = data(0)
    batch = encode_batch(transformer, encoder, GRID, clean, references, ids, mask)
    k_noise, k_time = mx.random.split(key)
    eps, t = mx.random.normal(clean.shape, key=k_noise), shifted_times(k_time, clean.shape[0])

    def oracle(img, txt, time, rope):
        assert mx.allclose(time, t)
        assert mx.allclose(img[:, :36], (1 - t)[:, None, None] * clean + t[:, None, None] * eps, atol=1e-5)
        return eps - clean

    assert flow_loss(oracle, batch, key).item() < 1e-9


def test_references_are_told_apart_by_t():
    ids = flow_ids((2, 3), mx.zeros((1, 12, 128)))
    assert ids[:, 0].tolist() == [0] * 6 + [10] * 6 + [20] * 6
    assert flow_ids((2, 3), mx.zeros((1, 0, 128))).shape == (6, 4)


def test_training_times_follow_the_schedule():
    t = mx.sort(shifted_times(mx.random.key(0), 4000))
    assert t[0].item() >= 0 and t[-1].item() <= 1
    assert t[2000].item() == pytest.approx(6 / 7, abs=0.01)  # half of them above what 0.5 becomes
    assert schedule(4, 36)[2] == pytest.approx(t[2000].item(), abs=0.04)


def test_language_model_loss_ignores_padding(world):
    tokenizer, _, encoder, *_ = world
    ids, mask = tokenize(tokenizer, ["a red circle"], 32)
    shorter = ids[:, : int(mask.sum().item())], mask[:, : int(mask.sum().item())]
    assert text_encoder_loss(encoder, ids, mask).item() == pytest.approx(
        text_encoder_loss(encoder, *shorter).item(), abs=1e-4
    )


def test_a_saved_model_loads_and_draws_the_same(tmp_path, world):
    tokenizer, autoencoder, encoder, transformer, _ = world
    save_encoders(tmp_path / "m", autoencoder, CONFIG, 96, encoder, tokenizer)
    save_transformer(tmp_path / "m", transformer, encoder.cfg, distilled=True)
    save_transformer(tmp_path / "m" / "base", transformer, encoder.cfg, distilled=False, shares=True)
    index = json.loads((tmp_path / "m" / "model_index.json").read_text())
    assert (
        index["is_distilled"] and index["max_sequence_length"] == 32 and index["text_encoder_out_layers"] == [1, 2, 3]
    )
    klein, base = Klein.from_pretrained(tmp_path / "m"), Klein.from_pretrained(tmp_path / "m" / "base")
    for name, part in (("transformer", transformer), ("autoencoder", autoencoder), ("text_encoder", encoder)):
        stored, ours = weights(getattr(klein, name)), weights(part)
        unread = [k for k in ours if k not in stored]  # klein stops reading captions at the highest tap
        assert stored.keys() <= ours.keys() and all(k.startswith(("layers.3.", "norm.")) for k in unread)
        assert all(mx.allclose(stored[k], ours[k], atol=2e-3, rtol=1e-3) for k in stored)
    assert (klein.info.steps, base.info.steps, base.info.guidance) == (4, 50, 4.0)
    assert klein("a tree", seed=1, progress=False).size == (96, 96)


def test_flow_loss_takes_its_times_as_shifted_as_it_is_told(world):
    _, _, encoder, transformer, data = world
    *arrays, key = data(0)
    batch = encode_batch(transformer, encoder, GRID, *arrays)
    times = []

    def net(img, txt, time, rope):
        times.append(time)
        return img

    for shift in (1.0, 50.0):
        flow_loss(net, batch, key, shift)
    assert mx.all(times[1] > times[0]) and times[1].mean().item() > 0.8


def test_references_stay_clean_and_are_not_judged():
    """The network sees noised tokens before clean references, and its answer for the references does not count."""
    clean, eps, references = (mx.random.normal((2, 4, 128), key=mx.random.key(i)) for i in range(3))
    t = mx.array([0.25, 0.75])

    def net(img, txt, time, rope):
        assert mx.array_equal(img[:, 4:], references)
        assert mx.allclose(img[1, :4], 0.25 * clean[1] + 0.75 * eps[1], atol=1e-6)
        return mx.concatenate([eps - clean + 1, 100 * references], axis=1)

    loss = velocity_loss(net, clean, mx.zeros((2, 1, 8)), t, eps, None, references)
    assert loss.item() == pytest.approx(1.0, abs=1e-5)


def test_the_loss_of_a_half_precision_batch_is_float32():
    """Batches of adapters' training are bfloat16: the network gets that type, and errors are squared in float32."""
    clean, eps = (mx.random.normal((1, 4, 128), key=mx.random.key(i)).astype(mx.bfloat16) for i in (0, 1))
    types = []

    def net(img, txt, time, rope):
        types.append(img.dtype)
        return img

    batch = Batch(clean, mx.zeros((1, 1, 8)), None)
    assert velocity_loss(net, *batch[:2], mx.array([0.5]), eps, batch.rope).dtype == mx.float32
    assert types == [mx.bfloat16]
