"""The losses of chapter 11 mean what they say."""

import json

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from small_nano import CONFIG, GRID, small_world  # noqa: F401, a fixture

from kleinlite.models.export import save_encoders, save_transformer
from kleinlite.pipeline import Klein
from kleinlite.sampling import schedule
from kleinlite.text_encoder import tokenize
from kleinlite.training import flow_ids, flow_loss, shifted_times, text_encoder_loss


def weights(module):
    return dict(tree_flatten(module.parameters()))


def test_flow_loss_of_the_exact_answer_is_zero(world):
    """A network that knows the noise: the loss must vanish, so target, time and mixing agree."""
    _, _, encoder, _, data = world
    clean, references, ids, mask, key = data(0)
    k_noise, k_time = mx.random.split(key)
    eps, t = mx.random.normal(clean.shape, key=k_noise), shifted_times(k_time, clean.shape[0])

    def oracle(img, txt, time, img_ids, txt_ids):
        assert mx.allclose(time, t)
        assert mx.allclose(img[:, :36], (1 - t)[:, None, None] * clean + t[:, None, None] * eps, atol=1e-5)
        return eps - clean

    assert flow_loss(oracle, encoder, GRID, clean, references, ids, mask, key).item() < 1e-9


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
    save_transformer(tmp_path / "m", transformer, encoder._cfg, distilled=True)
    save_transformer(tmp_path / "m" / "base", transformer, encoder._cfg, distilled=False)
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
    _, _, encoder, _, data = world
    seen = []

    def net(img, txt, time, img_ids, txt_ids):
        seen.append(time)
        return img

    for shift in (1.0, 50.0):
        flow_loss(net, encoder, GRID, *data(0), shift=shift)
    assert mx.all(seen[1] > seen[0]) and seen[1].mean().item() > 0.8
