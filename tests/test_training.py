"""The training code: batches depend on the step alone, runs resume exactly, losses mean what they say."""

import json

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten

from kleinlite.autoencoder import Autoencoder, AutoencoderConfig, pack
from kleinlite.export import save_encoders, save_transformer
from kleinlite.pipeline import Klein
from kleinlite.sampling import guide, schedule
from kleinlite.scenes import captions, held_out, sample_edit
from kleinlite.text_encoder import TextEncoder, TextEncoderConfig, tokenize
from kleinlite.training import (
    FlowData,
    Run,
    autoencoder_batch,
    autoencoder_loss,
    distill_loss,
    encode_training_set,
    flow_ids,
    flow_loss,
    flow_optimizer,
    initialise,
    measure_latents,
    pictures,
    psnr,
    sentence,
    shifted_times,
    text_batch,
    text_encoder_loss,
    train_tokenizer,
)
from kleinlite.transformer import Transformer, TransformerConfig

GRID = (6, 6)
CONFIG = AutoencoderConfig(channels=(8, 8, 16, 16), layers=1, groups=4)


@pytest.fixture(scope="module")
def world():
    """Tokenizer, autoencoder, text encoder, transformer and data, small and untrained."""
    tokenizer = train_tokenizer()
    text = TextEncoderConfig(tokenizer.get_vocab_size(), 24, 40, 4, 4, 2, 8, taps=(1, 2, 3), tokens=32)
    parts = Autoencoder(CONFIG), TextEncoder(text), Transformer(TransformerConfig(1, 1, 2, (4, 4, 4, 4), d_text=72))
    for i, part in enumerate(parts):
        initialise(part, mx.random.key(i))
    data = FlowData(encode_training_set(parts[0], 96, 16, 300), tokenizer, 32, batch=6)
    return tokenizer, *parts, data


def weights(module):
    return dict(tree_flatten(module.parameters()))


def test_a_batch_depends_on_its_step_alone(world):
    tokenizer, *_, data = world
    for step in (0, 3, 11):
        for a, b in zip(data(step), data(step)):
            assert mx.array_equal(a, b)
    assert mx.array_equal(autoencoder_batch(5, 2, 96, 32)[0], autoencoder_batch(5, 2, 96, 32)[0])
    assert mx.array_equal(text_batch(tokenizer, 32, 4, 8)[0], text_batch(tokenizer, 32, 4, 8)[0])


def test_references_come_with_edits_and_pairs(world):
    data = world[-1]
    assert [data(step)[1].shape[1] for step in (0, 3, 11)] == [0, 36, 72]
    seeds = [s for s in range(300) if len(sample_edit(s)[0]) == 2]
    assert seeds == list(data.row_of)


def test_nothing_held_out_is_trained_on(world):
    tokenizer, *_, data = world
    import random

    for step in range(0, 40):
        rng = random.Random(step)
        text = sentence(rng, step)
        assert not held_out(text) or text in {sample_edit(s)[1] for s in range(300)}
    for seed in data.ones + data.pairs:
        references, text, _ = data.edits[seed]
        assert not held_out(f"{captions(references[0])[-1]}: {text}")
    said = set()
    for step in (s for s in range(40) if s % 4 != 3):
        ids, mask = data(step)[2:4]
        words = [tokenizer.decode(row[: sum(real)]) for row, real in zip(ids.tolist(), mask.tolist())]
        said |= {w.split("user\n")[1].split("\nassistant")[0] for w in words} - {""}
    assert len(said) > 20 and not any(map(held_out, said))


def test_a_resumed_run_is_the_same_run(tmp_path, world):
    *_, transformer, data = world
    encoder = world[2]
    loss = lambda model, *batch: flow_loss(model, encoder, GRID, *batch)

    def new(path):
        net = Transformer(transformer._cfg)
        initialise(net, mx.random.key(9))
        return Run(path, net, flow_optimizer(20))

    straight = new(tmp_path / "a.safetensors")
    losses = list(straight.steps(6, loss, data))
    first = new(tmp_path / "b.safetensors")
    assert list(first.steps(3, loss, data)) == pytest.approx(losses[:3], abs=1e-5)
    first.save()
    second = new(tmp_path / "b.safetensors")
    assert second.step == 3
    list(second.steps(6, loss, data))
    for tree in ("model", "average"):
        a, b = (getattr(run, tree) for run in (straight, second))
        a, b = (dict(tree_flatten(t.parameters() if isinstance(t, nn.Module) else t)) for t in (a, b))
        assert all(mx.allclose(a[k], b[k], atol=1e-5) for k in a)
    assert [p.name for p in tmp_path.iterdir()] == ["b.safetensors"], "nothing half-written is left"


def test_learning_moves_the_loss(tmp_path, world):
    model = Autoencoder(CONFIG)
    initialise(model, mx.random.key(0), damp=("conv2", "proj_out"))
    run = Run(tmp_path / "a.safetensors", model, optim.AdamW(3e-3))
    losses = list(run.steps(25, autoencoder_loss, lambda step: autoencoder_batch(step, 2, 96, 32)))
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_measured_latents_are_normal(world):
    model = Autoencoder(CONFIG)
    initialise(model, mx.random.key(0))
    measure_latents(model, 96, 32)
    z = model.encode(pictures(range(32), 96))
    assert mx.abs(z.mean(axis=(0, 1, 2))).max().item() < 1e-2
    assert mx.abs(z.var(axis=(0, 1, 2)) - 1).max().item() < 2e-2
    raw = pack(mx.split(model.encoder(pictures(range(4), 96)), 2, axis=-1)[0])
    assert mx.allclose(model.bn.denormalise(z[:4]), raw, atol=1e-3)


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


def test_distillation_has_nothing_to_learn_from_a_constant_field(world):
    """Where teacher and student answer the same constant, guided or not, the student is already right."""
    _, _, encoder, transformer, data = world
    empty = encoder(*tokenize(world[0], [""], 32))

    class Constant:
        rope = transformer.rope

        def __init__(self, value):
            self.value = value

        def __call__(self, img, txt, t, rope):
            return mx.full(img.shape, self.value)

    Constant.rope = lambda self, img_ids, txt_ids: transformer.rope(img_ids, txt_ids)
    loss = lambda student: distill_loss(student, Constant(0.5), encoder, empty, 3.0, GRID, *data(3)).item()
    assert loss(Constant(0.5)) < 1e-9
    assert loss(Constant(1.5)) == pytest.approx(1.0, abs=1e-4)


def test_distillation_learns_the_guided_answer(world):
    """The teacher answers by prompt; the student must be told the guided mean, cond + 2·(cond − uncond) for g = 3."""
    _, _, encoder, transformer, data = world
    empty = encoder(*tokenize(world[0], [""], 32))
    batch = data(1)

    class ByPrompt:
        def rope(self, img_ids, txt_ids):
            return transformer.rope(img_ids, txt_ids)

        def __call__(self, img, txt, t, rope):
            asked = mx.any(txt != empty, axis=(1, 2)).astype(mx.float32)
            return mx.ones(img.shape) * asked[:, None, None]

    class Guided(ByPrompt):
        def __call__(self, img, txt, t, rope):
            cond = super().__call__(img, txt, t, rope)
            return guide(cond, mx.zeros_like(cond), 3.0)

    assert distill_loss(Guided(), ByPrompt(), encoder, empty, 3.0, GRID, *batch).item() < 1e-9
    assert distill_loss(ByPrompt(), ByPrompt(), encoder, empty, 3.0, GRID, *batch).item() > 0.5


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
        assert stored.keys() == ours.keys()
        assert all(mx.allclose(stored[k], ours[k], atol=2e-3, rtol=1e-3) for k in ours)
    assert (klein.info.steps, base.info.steps, base.info.guidance) == (4, 50, 4.0)
    assert klein("a tree", seed=1, progress=False).size == (96, 96)


def test_psnr():
    assert psnr(mx.zeros((2, 2)), mx.full((2, 2), 0.2)) == pytest.approx(20.0, abs=1e-3)
