"""The training code: batches depend on the step alone, runs resume exactly, losses mean what they say."""

import json
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten

from kleinlite import cli
from kleinlite.autoencoder import Autoencoder, AutoencoderConfig, pack
from kleinlite.models.export import save_encoders, save_transformer
from kleinlite.nano import recipe
from kleinlite.pipeline import Klein
from kleinlite.sampling import guide, schedule
from kleinlite.scenes import edit_held_out, held_out, instruction, relatives, sample_edit
from kleinlite.text_encoder import TextEncoder, TextEncoderConfig, tokenize
from kleinlite.training import (
    FlowData,
    Run,
    autoencoder_batch,
    autoencoder_loss,
    decoder_batch,
    decoder_loss,
    distill_loss,
    encode_scenes,
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
    data = FlowData(encode_training_set(parts[0], 96, 16, 300, 6), tokenizer, 32, batch=8)
    return tokenizer, *parts, data


def weights(module):
    return dict(tree_flatten(module.parameters()))


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
    assert seeds == list(data.row_of)


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
        text = sentence(rng, step)
        assert not held_out(text) or text in {sample_edit(s)[1] for s in range(300)}
    for seed in data.ones + data.twos:
        references, text, _ = data.known[seed]
        assert not edit_held_out(references[0], text)
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
        unread = [k for k in ours if k not in stored]  # klein stops reading captions at the highest tap
        assert stored.keys() <= ours.keys() and all(k.startswith(("layers.3.", "norm.")) for k in unread)
        assert all(mx.allclose(stored[k], ours[k], atol=2e-3, rtol=1e-3) for k in stored)
    assert (klein.info.steps, base.info.steps, base.info.guidance) == (4, 50, 4.0)
    assert klein("a tree", seed=1, progress=False).size == (96, 96)


def test_psnr():
    assert psnr(mx.zeros((2, 2)), mx.full((2, 2), 0.2)) == pytest.approx(20.0, abs=1e-3)


def test_a_damaged_or_foreign_file_is_refused_in_a_sentence(tmp_path):
    path, line = tmp_path / "a.safetensors", nn.Linear(3, 2)
    Run(path, line, optim.Adam(0.1)).save()
    with pytest.raises(ValueError, match=r"a\.safetensors holds another network than this one: delete it"):
        Run(path, nn.Linear(4, 2), optim.Adam(0.1))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"a\.safetensors is damaged or cut short: delete it"):
        Run(path, line, optim.Adam(0.1))


def test_the_decoder_learns_from_noisy_latents_of_whole_pictures(world):
    autoencoder = world[1]
    x, z = decoder_batch(autoencoder, 3, 2, 96)
    assert mx.array_equal(x, pictures([6, 7], 96))
    assert (z - autoencoder.encode(x)).std().item() == pytest.approx(0.02, rel=0.1)

    class Exact:
        decode = staticmethod(lambda latents: x + 0.5)

    assert decoder_loss(Exact, x, z).item() == pytest.approx(0.3 * 0.5 + 4 * 0.25, abs=1e-5)


def test_flow_loss_takes_its_times_as_shifted_as_it_is_told(world):
    _, _, encoder, _, data = world
    seen = []

    def net(img, txt, time, img_ids, txt_ids):
        seen.append(time)
        return img

    for shift in (1.0, 50.0):
        flow_loss(net, encoder, GRID, *data(0), shift=shift)
    assert mx.all(seen[1] > seen[0]) and seen[1].mean().item() > 0.8


# ---------------------------------------------------------------- several processes

TWO = """
import json, os, sys, tempfile
from pathlib import Path
import mlx.core as mx
from kleinlite.training import SHARE, Run, flow_loss, flow_optimizer, initialise
from kleinlite.transformer import Transformer, TransformerConfig
from mlx.utils import tree_flatten

group, out = mx.distributed.init(), Path(sys.argv[1])
path = out / f"{group.size()}-{group.rank()}" / "run.safetensors"
table = mx.random.normal((20, 12), key=mx.random.key(0))
# MLX compiles into this folder: two processes must not write the same file there.
os.environ["TMPDIR"] = str(Path(tempfile.gettempdir()) / f"kleinlite-process-{group.rank()}")
os.makedirs(os.environ["TMPDIR"], exist_ok=True)


def batch(step):
    keys = mx.random.split(mx.random.key(step), 3)
    ids = mx.random.randint(0, 20, (3, 5), key=keys[0])
    clean = mx.random.normal((3, 4, 128), key=keys[1])
    return clean, clean[:, :0], ids, mx.ones((3, 5)), keys[2]


def flow(model, batch):
    return flow_loss(model, lambda ids, mask: table[ids], (2, 2), *batch)


if group.size() == 1:  # one process, the batches of both
    batches = lambda step: (batch(step), batch(step + SHARE))
    loss = lambda model, one, two: (flow(model, one) + flow(model, two)) / 2
else:
    batches, loss = lambda step: (batch(step),), flow


def new():
    net = Transformer(TransformerConfig(1, 1, 2, (4, 4, 4, 4), d_text=12))
    initialise(net, mx.random.key(group.rank()))  # the second process begins elsewhere, and must not stay there
    return Run(path, net, flow_optimizer(20))


run = new()
losses = list(run.steps(4, loss, batches))
run.save()
run = new()  # the second process has no file
losses += run.steps(8, loss, batches)
total = sum(mx.abs(w).sum() for _, w in tree_flatten(run.average)).item()
(out / f"{group.size()}-{group.rank()}.json").write_text(json.dumps([losses, total]))
"""


def launch(*command, processes=2):
    """The command under MLX's launcher, on this machine."""
    launcher = Path(sys.executable).with_name("mlx.launch")
    if not mx.distributed.is_available("ring") or not launcher.exists():
        pytest.skip("MLX has no ring of processes here: `mlx.launch` comes with its macOS and Linux wheels.")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ring = [str(launcher), "--backend", "ring", "-n", str(processes), "-p", str(port), "--python", sys.executable]
    ring += ["--env", "OPENBLAS_NUM_THREADS=1", "--"]
    return subprocess.run([*ring, *map(str, command)], capture_output=True, text=True, timeout=300)


def test_two_processes_are_one_with_the_doubled_batch(tmp_path):
    (tmp_path / "two.py").write_text(TWO)
    done = launch(tmp_path / "two.py", tmp_path)
    assert done.returncode == 0, done.stderr
    subprocess.run([sys.executable, tmp_path / "two.py", tmp_path], check=True, timeout=300)
    first, second, alone = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("2-0", "2-1", "1-0"))
    assert first == second, "both processes see the same loss and end with the same weights"
    assert len(alone[0]) == 8 and alone[0][-1] < alone[0][0]
    assert first[0] == pytest.approx(alone[0], rel=1e-4) and first[1] == pytest.approx(alone[1], rel=1e-4)
    assert (tmp_path / "2-0").exists() and not (tmp_path / "2-1").exists(), "only the first process writes"


MIRROR = """
import sys
from pathlib import Path
import mlx.core as mx
from kleinlite.nano.recipe import mirror

rank = mx.distributed.init().rank()
path = Path(sys.argv[1]) / str(rank) / "file"
path.parent.mkdir()
if rank == 0:
    path.write_bytes(bytes(range(256)) * 5)
mirror(path)
mirror(path)  # nothing to do
"""


def test_a_machine_without_a_file_is_given_the_first_ones(tmp_path):
    (tmp_path / "mirror.py").write_text(MIRROR)
    done = launch(tmp_path / "mirror.py", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "1" / "file").read_bytes() == bytes(range(256)) * 5
    assert [p.name for p in (tmp_path / "1").iterdir()] == ["file"]


# ---------------------------------------------------------------- the recipe


@pytest.fixture
def small(monkeypatch):
    """The recipe with few scenes and narrow networks; saves and reports every second step."""
    monkeypatch.setattr(recipe, "AUTOENCODER", CONFIG)
    monkeypatch.setattr(recipe, "TRANSFORMER", TransformerConfig(1, 1, 2, (4, 4, 4, 4), d_text=72))
    text = lambda tokenizer: TextEncoderConfig(
        tokenizer.get_vocab_size(), 24, 40, 4, 4, 2, 8, taps=(1, 2, 3), tokens=32
    )
    monkeypatch.setattr(recipe, "text_config", text)
    monkeypatch.setattr(recipe, "SCENES", 40)
    monkeypatch.setattr(recipe, "EDITS", 200)
    monkeypatch.setattr(recipe, "FAMILIES", 4)
    monkeypatch.setattr(recipe, "STEPS", dict.fromkeys(recipe.STEPS, 2))
    monkeypatch.setattr(recipe, "measure_latents", lambda model, size: measure_latents(model, size, 16))
    monkeypatch.setattr(recipe.follow, "__defaults__", (2,))


def test_the_whole_recipe_leaves_a_model_and_goes_on_where_it_was(tmp_path, small, monkeypatch, capsys):
    monkeypatch.setattr(recipe, "calibrate", lambda recipe, stages: None)
    folder = tmp_path / "runs"
    recipe.main([str(folder)])
    assert f"done: {folder / 'nano'}" in capsys.readouterr().out
    for model, distilled in (("nano", True), ("nano/base", False)):
        klein = Klein.from_pretrained(folder / model)
        assert klein.info.distilled == distilled and klein("a tree", seed=1, steps=1, progress=False).size == (96, 96)
    drawn = {"transformer.png", "sharpen.png", "edits.png", "distill.png"}
    assert {p.name for p in folder.glob("*.png")} == drawn and not list(folder.glob("*partial*"))
    before = {p: p.stat().st_mtime_ns for p in folder.glob("*.safetensors")}
    recipe.main([str(folder)])
    assert before == {p: p.stat().st_mtime_ns for p in folder.glob("*.safetensors")}, "nothing is trained twice"


def test_calibration_says_what_is_left_and_trains_nothing(tmp_path, small, capsys):
    folder = tmp_path / "runs"
    recipe.Recipe(folder, recipe.STEPS).text_encoder()
    recipe.main([str(folder), "--calibrate", "--stage", "text_encoder"])
    assert "done" in capsys.readouterr().out
    recipe.main([str(folder), "--calibrate", "--stage", "distill", "--steps", "5000"])
    head, encoding, distill, total = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["stage", "steps"] and encoding.startswith("encoding")
    assert distill.split()[:3] == ["distill", "5,000", "5,000"] and distill.endswith("GB") and total.startswith("all")
    assert {p.name for p in folder.iterdir()} == {"text_encoder.safetensors", "tokenizer"}


def test_control_c_saves_after_the_step_and_says_so(tmp_path, small, monkeypatch, capsys):
    monkeypatch.setattr(recipe, "calibrate", lambda recipe, stages: None)
    monkeypatch.setattr(recipe.follow, "__defaults__", (100,))

    def batch(tokenizer, tokens, step, count):
        if step == 3:
            signal.raise_signal(signal.SIGINT)
        return text_batch(tokenizer, tokens, step, count)

    monkeypatch.setattr(recipe, "text_batch", batch)
    command = [str(tmp_path), "--stage", "text_encoder", "--steps", "6"]
    assert cli.main(["train", *command]) == 130
    assert "goes on from here" in capsys.readouterr().err
    assert recipe.Recipe(tmp_path, recipe.STEPS).done("text_encoder") == 4, "the step that was under way is in the file"
    monkeypatch.setattr(recipe, "text_batch", text_batch)
    recipe.main(command)
    assert recipe.Recipe(tmp_path, recipe.STEPS).done("text_encoder") == 6


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["{}/file"], "file is a file: name a folder"),
        (["{}/new", "--stage", "sharpen"], "autoencoder.safetensors is missing: train that stage first"),
        (["{}/cut", "--stage", "autoencoder"], "autoencoder.safetensors is damaged or cut short: delete it"),
        (["{}", "--stage", "painting"], "invalid choice: 'painting'"),
        (["{}", "--steps", "5"], "--steps is a number from 1 on, and goes with the --stage"),
    ],
)
def test_mistakes_are_told_in_a_sentence(tmp_path, monkeypatch, capsys, command, sentence):
    if "sharpen" in command:
        monkeypatch.setattr(recipe, "calibrate", lambda recipe, stages: None)
    (tmp_path / "file").touch()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "autoencoder.safetensors").write_bytes(b"\0" * 5)
    try:
        status = cli.main(["train", *(word.format(tmp_path) for word in command)])
    except SystemExit as stop:
        status = stop.code
    error = capsys.readouterr().err
    assert status == 2 and sentence in error and "Traceback" not in error
