"""Training an adapter: what is trained, stopped, gone on with, written and refused."""

import json
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from damage import one_sentence
from mlx.utils import tree_flatten, tree_map
from PIL import ImageChops
from safetensors import safe_open
from tiers import slow
from trainings import QUICK, trained

from kleinlite.errors import FileError, UserError
from kleinlite.klein import Klein
from kleinlite.models.adapters import open_adapter
from kleinlite.models.checkpoint import Checkpoint
from kleinlite.text_encoder import TextEncoder
from kleinlite.trainer import training_memory as plan_module
from kleinlite.trainer.adapter import LoraTrainer, accumulating_step
from kleinlite.trainer.folder import Example, read_folder
from kleinlite.trainer.run import lock_folder
from kleinlite.trainer.settings import Settings
from kleinlite.training import learning_rate, velocity_loss


@pytest.mark.slow
def test_the_samples_are_named(folder, tmp_path, capsys):
    trainer = trained(folder, tmp_path / "x.safetensors")
    out = "".join(capsys.readouterr())
    assert "x 4: loss" in out and f"samples in {trainer.folder / 'samples-00004.png'}" in out


def test_all_matrices_of_the_blocks_are_trained_and_no_others(trainer):
    """By their names: the list that PEFT's makers of adapters for klein train."""
    double = [f"{stream}_{name}" for stream in ("img", "txt") for name in ("attn.qkv", "attn.proj", "mlp.0", "mlp.2")]
    cfg = trainer.net.cfg
    expected = {f"double_blocks.{i}.{name}" for i in range(cfg.double_blocks) for name in double}
    expected |= {f"single_blocks.{i}.{name}" for i in range(cfg.single_blocks) for name in ("linear1", "linear2")}
    assert set(trainer.deltas) == expected
    assert set(dict(tree_flatten(trainer.net.trainable_parameters()))) == {
        name for name, _ in tree_flatten(trainer.net.parameters()) if ".deltas.new." in name
    }
    numbers = sum(w.size for _, w in tree_flatten(trainer.net.trainable_parameters()))
    assert numbers == plan_module.adapter_size(cfg, QUICK.rank)


def test_training_draws_shifted_noise_levels(trainer):
    """What `batch` gives to the loss, against uniform levels from the same key.

    The makers' formula by hand: ln(shift) is 0.5 for 256 tokens and 1.15 for 4096, a straight line; for 36 tokens it is
    0.5 - 220/3840 · 0.65 = 0.46276.
    """
    assert trainer.shift == pytest.approx(1.5884527)
    usual = [trainer.batch(number)[2] for number in range(4)]
    trainer.shift = 1.0
    for number in range(4):
        plain = trainer.batch(number)[2]
        assert mx.allclose(usual[number], 1.5884527 * plain / (1 + 0.5884527 * plain), atol=1e-5)
        assert (usual[number] > plain).all()


def test_every_step_is_as_long_as_the_rate_says(trainer):
    """Under a steady gradient Adam moves every number by the rate: Kingma and Ba 2014, algorithm 1.

    Without its correction the second step would be 1.35 times as long, and the fourth 1.7 times.
    """
    net = trainer.net
    rates = learning_rate(QUICK.rate, QUICK.steps, warmup=1)
    steady = tree_map(mx.ones_like, net.trainable_parameters())
    for step in range(QUICK.steps):
        before = dict(tree_flatten(net.trainable_parameters()))
        trainer.run.optimizer.update(net, steady)
        for name, w in tree_flatten(net.trainable_parameters()):
            if name.endswith(".b"):
                assert mx.allclose(before[name] - w, rates(mx.array(step)), rtol=1e-3, atol=0)


def test_each_step_has_batches_of_its_own(trainer):
    """Neighboring steps share no batch: with the same rows they would still have other noise."""
    [first], [second] = trainer.batches(0), trainer.batches(1)
    noises = [batch[3] for batch in (*first, *second)]
    assert len(noises) == 4
    assert not any(mx.array_equal(a, b) for i, a in enumerate(noises) for b in noises[:i])
    assert all(mx.array_equal(noises[i], trainer.batch(i)[3]) for i in range(4))


def test_training_writes_an_adapter_that_its_model_takes(folder, tmp_path):
    trainer = trained(folder, tmp_path / "x.safetensors")
    adapter = open_adapter(trainer.out)
    assert adapter.trained_on == "nano-base" and adapter.kind == "LoRA"
    klein = Klein.from_pretrained("nano", loras=[trainer.out])
    assert klein("a red cross", steps=1, seed=1, progress=False).size == (96, 96)
    found = {path.name for path in trainer.folder.iterdir()}
    assert {"samples-00002.png", "samples-00004.png", "state.safetensors", "training.json"} <= found
    assert "text_encoder" not in trainer.klein.parts.loaded
    trainer.out.unlink()
    assert trained(folder, trainer.out).out.is_file()  # at its end already: only written again
    with safe_open(trainer.out, framework="np") as file:
        said = json.loads(file.metadata()["lora_adapter_metadata"])
    assert said["transformer.r"] == said["transformer.lora_alpha"] == 2


def test_stopped_and_gone_on_is_as_not_stopped(folder, tmp_path, monkeypatch):
    whole = trained(folder, tmp_path / "whole.safetensors")

    def stop(trainer):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LoraTrainer, "draw_samples", stop)
        with pytest.raises(KeyboardInterrupt):
            trained(folder, tmp_path / "halves.safetensors")
    halves = trained(folder, tmp_path / "halves.safetensors")
    assert halves.run.step == whole.run.step == 4
    a, b = (dict(tree_flatten(trainer.run.average)) for trainer in (whole, halves))
    assert a.keys() == b.keys() and all(mx.allclose(a[name], b[name], atol=1e-6) for name in a)


def test_the_adapter_is_the_moving_average(folder, tmp_path):
    trainer = trained(folder, tmp_path / "x.safetensors")
    net = Klein.from_pretrained("nano-base").parts.load("transformer")
    written = open_adapter(trainer.out).deltas(net)["single_blocks.0.linear2"].b
    name = "single_blocks.0.block.linear2.deltas.new.b"
    average, last = (
        dict(tree_flatten(tree))[name].astype(written.dtype)
        for tree in (trainer.run.average, trainer.net.trainable_parameters())
    )
    assert mx.array_equal(written, average) and not mx.array_equal(written, last)


def test_a_training_in_a_thread_ends_as_in_the_main_one(folder, tmp_path):
    """A server's, or a notebook's that goes on meanwhile: only the main thread can catch signals."""
    settings = replace(QUICK, steps=1, accumulate=1)
    with ThreadPoolExecutor(1) as pool:
        trainer = pool.submit(trained, folder, tmp_path / "thread.safetensors", settings).result()
    assert open_adapter(trainer.out).kind == "LoRA"


def test_samples_are_what_a_call_draws(folder, tmp_path):
    """With guidance; before the first step the adapter changes nothing."""
    trainer = LoraTrainer(Klein.from_pretrained("nano-base"), read_folder(folder), tmp_path / "x.safetensors", QUICK)
    caption = read_folder(folder)[0].caption
    drawn = Klein.from_pretrained("nano-base")(caption, seed=0, steps=1, guidance=4.0, progress=False)
    difference = ImageChops.difference(trainer.draw_samples(), drawn)
    assert max(high for _, high in difference.getextrema()) <= 1


def test_another_training_is_not_mixed_in(folder, tmp_path):
    trained(folder, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"other settings \(quantize\)"):
        trained(folder, tmp_path / "x.safetensors", quantize=8)
    (folder / "3.txt").write_text("a cross")
    with pytest.raises(ValueError, match=r"other settings \(examples\)"):
        trained(folder, tmp_path / "x.safetensors")


def test_a_start_that_was_refused_stands_in_nobodys_way(folder, tmp_path):
    (folder / "3.txt").write_text("a red cross " * 40)
    with pytest.raises(ValueError, match="tokens"):
        trained(folder, tmp_path / "x.safetensors")
    (folder / "3.txt").write_text("a red cross")
    assert trained(folder, tmp_path / "x.safetensors").out.is_file()


def test_one_start_at_a_time(folder, tmp_path):
    with lock_folder(tmp_path / "x.training"), pytest.raises(ValueError, match="Another training is at work"):
        trained(folder, tmp_path / "x.safetensors")
    assert not (tmp_path / "x.training" / "training.json").exists()


def test_gradients_of_batches_add_up(folder, tmp_path):
    """Two batches of two make the step, and tell the loss, that one batch of four makes, if the four are the same."""
    settings = Settings(rank=2, steps=1, rate=1e-3, batch=2, accumulate=2, every=1)
    trainer = LoraTrainer(Klein.from_pretrained("nano-base"), read_folder(folder), tmp_path / "x", settings)
    batches = list(trainer.batches(0)[0])
    joined = tuple(a if i == 4 else mx.concatenate([a, b]) for i, (a, b) in enumerate(zip(*batches)))
    start = trainer.net.trainable_parameters()
    found, losses = [], []
    for those in (batches, (joined,)):
        trainer.net.update(start)
        update = accumulating_step(trainer.net, optim.SGD(100), velocity_loss)
        losses.append(update(those).item())
        found.append(dict(tree_flatten(trainer.net.trainable_parameters())))
    assert all(mx.allclose(found[0][name], found[1][name], atol=1e-5) for name in found[0])
    assert any(not mx.allclose(found[0][name], w, atol=1e-3) for name, w in tree_flatten(start))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("bits", [4, *slow(8)])
def test_beside_packed_weights(folder, tmp_path, bits):
    trainer = trained(folder, tmp_path / "x.safetensors", Settings(rank=2, steps=2, rate=1e-3, every=2), quantize=bits)
    moved = [mx.abs(change.b).max().item() for change in trainer.deltas.values()]
    assert min(moved) > 0


def test_edits_are_learned_from_their_references(folder, tmp_path):
    examples = [Example(e.name, e.picture, "make it a cross", (e.picture.rotate(90),)) for e in read_folder(folder)]
    trainer = LoraTrainer(Klein.from_pretrained("nano-base"), examples, tmp_path / "x.safetensors", QUICK)
    clean, *_, references = trainer.batch(0)
    assert clean.shape == references.shape == (2, 36, 128)
    assert trainer.train().is_file()


def drafts(folder: Path) -> list[Path]:
    """What writers leave behind if they leave anything."""
    return [path for path in folder.rglob(".*") if "partial" in path.name]


@pytest.mark.parametrize("share", [0.6, *slow(0, 0.3, 0.9, 1)])
def test_a_full_disk_is_a_sentence_and_the_same_command_goes_on(folder, tmp_path, monkeypatch, share):
    """At the first file, in the middle, at the last; with room again the adapter is the same, byte for byte."""
    save = mx.save_safetensors
    count = 0
    last = None

    def write(path, *args):
        nonlocal count
        count += 1
        save(path, *args)
        if count == last:
            Path(path).write_bytes(Path(path).read_bytes()[:100])
            raise RuntimeError("[write] Unable to write 5488 bytes to file.")

    monkeypatch.setattr(mx, "save_safetensors", write)
    whole = trained(folder, tmp_path / "whole.safetensors").out.read_bytes()
    last = 1 + round(share * (count - 1))
    count = 0
    out = tmp_path / "x.safetensors"
    with pytest.raises(FileError, match=r"cannot be written .*: make room on its disk, or name another") as error:
        trained(folder, out)
    assert one_sentence(error.value) and not drafts(tmp_path)
    last = None
    assert trained(folder, out).out.read_bytes() == whole


def test_a_caption_that_is_too_long_is_told_by_its_file_and_leaves_nothing(folder, tmp_path):
    (folder / "3.txt").write_text("a red cross " * 40)
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(UserError, match=r"^3\.txt: The prompt has \d+ tokens"):
        trained(folder, tmp_path / "x.safetensors")
    assert {path.name for path in tmp_path.iterdir()} == before


def test_the_text_encoder_is_read_once_and_reads_one_caption_at_a_time(folder, tmp_path, monkeypatch):
    loaded = []
    rows = []
    load = Checkpoint.load_text_encoder
    read = TextEncoder.__call__
    monkeypatch.setattr(Checkpoint, "load_text_encoder", lambda self: loaded.append(self) or load(self))

    def noting(self, ids, *rest):
        return rows.append(len(ids)) or read(self, ids, *rest)

    monkeypatch.setattr(TextEncoder, "__call__", noting)
    LoraTrainer(Klein.from_pretrained("nano-base"), read_folder(folder), tmp_path / "x.safetensors", QUICK)
    assert len(loaded) == 1 and rows == [1] * 7  # six captions, and none for guidance


@pytest.mark.parametrize("name", ["1-caption", "1-pictures"])
def test_a_damaged_example_is_named_and_encoded_again_once_deleted(folder, trainer, name):
    path = trainer.folder / "encoded" / f"{name}.safetensors"
    right = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    path.write_bytes(right[path.name][:-8])
    with pytest.raises(UserError, match=f"{name}.safetensors is damaged or cut short: delete it"):
        trainer.train()
    path.unlink()
    LoraTrainer(trainer.klein, read_folder(folder), trainer.out, QUICK)
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == right and len(right) == 13


def test_few_files_are_open_at_a_time(folder, tmp_path):
    """A step reads accumulate × batch examples, and 256 open files are all that macOS allows."""
    settings = replace(QUICK, steps=1, every=1, batch=2, accumulate=24)
    trainer = LoraTrainer(Klein.from_pretrained("nano-base"), read_folder(folder), tmp_path / "x.safetensors", settings)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/dev/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 24, hard))
    try:
        assert trainer.train().is_file()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
