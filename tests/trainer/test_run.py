"""Runs resume exactly, are shared by processes, and refuse what is damaged."""

import json
import subprocess
import sys

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten
from small_nano import CONFIG, GRID, launch, small_world  # noqa: F401, a fixture

from kleinlite.autoencoder import Autoencoder
from kleinlite.errors import UserError
from kleinlite.trainer.run import Run, lock_folder, train_with_progress
from kleinlite.training import encode_batch, flow_loss, flow_optimizer, initialize
from kleinlite.transformer import Transformer
from recipe.data import autoencoder_batch
from recipe.shapes import WORLD
from recipe.stages import load_average
from recipe.training import autoencoder_loss


@pytest.mark.slow
def test_a_resumed_run_is_the_same_run(tmp_path, world):
    *_, transformer, data = world
    encoder = world[2]

    def loss(model, *batch):
        return flow_loss(model, encode_batch(model, encoder, GRID, *batch[:-1]), batch[-1])

    def new(path):
        net = Transformer(transformer.cfg)
        initialize(net, mx.random.key(9))
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


def test_a_young_average_forgets_its_start(tmp_path):
    line = nn.Linear(1, 1, bias=False)
    line.weight = mx.array([[100.0]])
    run = Run(tmp_path / "a.safetensors", line, optim.SGD(0.5))
    weights = [
        line.weight.item() for _ in run.steps(3, lambda model, x: (model(x) ** 2).mean(), lambda _: (mx.ones((1, 1)),))
    ]
    average, decays = 100.0, (1 / 10, 2 / 11, 3 / 12)
    for weight, decay in zip(weights, decays):
        average = decay * average + (1 - decay) * weight
    assert run.average["weight"].item() == pytest.approx(average, abs=1e-5)


def test_progress_is_saved_every_so_many_steps_and_at_the_end(tmp_path):
    path = tmp_path / "a.safetensors"
    run = Run(path, nn.Linear(1, 1), optim.SGD(0.1))
    saved = []

    def report():
        saved.append((run.step, Run(path, nn.Linear(1, 1), optim.SGD(0.1)).step))
        return "well"

    def loss(model, x):
        return (model(x) ** 2).mean()

    train_with_progress(run, 5, loss, lambda _: (mx.ones((1, 1)),), report, every=2, log=tmp_path / "log")
    assert saved == [(2, 2), (4, 4), (5, 5)]
    assert (tmp_path / "log").read_text("utf-8").count("well") == 3


@pytest.mark.slow
def test_learning_moves_the_loss(tmp_path, world):
    model = Autoencoder(CONFIG)
    initialize(model, mx.random.key(0), damp=("conv2", "proj_out"))
    run = Run(tmp_path / "a.safetensors", model, optim.AdamW(3e-3))
    losses = list(run.steps(25, autoencoder_loss, lambda step: autoencoder_batch(WORLD, step, 2, 32)))
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_a_damaged_or_foreign_file_is_refused_in_a_sentence(tmp_path):
    path, line = tmp_path / "a.safetensors", nn.Linear(3, 2)
    Run(path, line, optim.Adam(0.1)).save()
    with pytest.raises(ValueError, match=r"a\.safetensors holds another network than this one: delete it"):
        Run(path, nn.Linear(4, 2), optim.Adam(0.1))
    for other in (nn.Linear(4, 2), nn.RMSNorm(3)):  # another shape, and other names
        with pytest.raises(ValueError, match=r"a\.safetensors holds another network than this one: delete it"):
            load_average(path, other)
    mx.save_safetensors(str(tmp_path / "bare.safetensors"), {"weight": mx.zeros((2, 3))}, {"step": "1"})
    with pytest.raises(ValueError, match=r"bare\.safetensors holds another network than this one"):
        load_average(tmp_path / "bare.safetensors", nn.Linear(3, 2))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"a\.safetensors is damaged or cut short: delete it"):
        Run(path, line, optim.Adam(0.1))


def test_a_header_that_is_off_by_a_byte_is_refused(tmp_path):
    """MLX reads such a file, every weight shifted; the library knows that it does not add up."""
    path = tmp_path / "a.safetensors"
    Run(path, nn.Linear(3, 2), optim.Adam(0.1)).save()
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    text = content[8 : 8 + length].rstrip(b" ") + b" "
    path.write_bytes(len(text[:-1]).to_bytes(8, "little") + text + content[8 + length :])
    with pytest.raises(ValueError, match="damaged or cut short"):
        Run(path, nn.Linear(3, 2), optim.Adam(0.1))


LOCK = """
import sys
from pathlib import Path
from kleinlite.trainer.run import lock_folder

with lock_folder(Path(sys.argv[1])):
    pass
"""


def test_one_training_in_a_folder(tmp_path):
    other = [sys.executable, "-c", LOCK, tmp_path / "runs"]
    with lock_folder(tmp_path / "runs"):
        end = subprocess.run(other, capture_output=True, text=True)
        assert end.returncode == 1 and f"Another training is at work in {tmp_path / 'runs'}: wait" in end.stderr
    subprocess.run(other, check=True)  # free again


# ---------------------------------------------------------------- several processes

TWO = """
import json, sys
from pathlib import Path
import mlx.core as mx
from recipe.stages import RANK_OFFSET, SharedRun
from kleinlite.training import encode_batch, flow_loss, flow_optimizer, initialize
from kleinlite.transformer import Transformer, TransformerConfig
from mlx.utils import tree_flatten

group, out = mx.distributed.init(), Path(sys.argv[1])
path = out / f"{group.size()}-{group.rank()}" / "run.safetensors"
table = mx.random.normal((20, 12), key=mx.random.key(0))


def batch(step):
    keys = mx.random.split(mx.random.key(step), 3)
    ids = mx.random.randint(0, 20, (3, 5), key=keys[0])
    clean = mx.random.normal((3, 4, 128), key=keys[1])
    return clean, clean[:, :0], ids, mx.ones((3, 5)), keys[2]


def flow(model, *batch):
    *arrays, key = batch
    return flow_loss(model, encode_batch(model, lambda ids, mask: table[ids], (2, 2), *arrays), key)


if group.size() == 1:  # one process, the batches of both
    batches = lambda step: (*batch(step), *batch(step + RANK_OFFSET))
    loss = lambda model, *both: (flow(model, *both[:5]) + flow(model, *both[5:])) / 2
else:
    batches, loss = batch, flow


def new():
    net = Transformer(TransformerConfig(1, 1, 2, (4, 4, 4, 4), d_text=12))
    initialize(net, mx.random.key(group.rank()))  # the second process begins elsewhere, and must not stay there
    return SharedRun(path, net, flow_optimizer(20))


run = new()
losses = list(run.steps(4, loss, batches))
run.save()
run = new()  # the second process has no file
losses += run.steps(8, loss, batches)
total = sum(mx.abs(w).sum() for _, w in tree_flatten(run.average)).item()
(out / f"{group.size()}-{group.rank()}.json").write_text(json.dumps([losses, total]))
"""


@pytest.mark.slow
def test_two_processes_are_one_with_the_doubled_batch(tmp_path):
    (tmp_path / "two.py").write_text(TWO)
    launch(tmp_path, tmp_path / "two.py", tmp_path)
    subprocess.run([sys.executable, tmp_path / "two.py", tmp_path], check=True)
    first, second, alone = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("2-0", "2-1", "1-0"))
    assert first == second, "both processes see the same loss and end with the same weights"
    assert len(alone[0]) == 8 and alone[0][-1] < alone[0][0]
    assert first[0] == pytest.approx(alone[0], rel=1e-4) and first[1] == pytest.approx(alone[1], rel=1e-4)
    assert (tmp_path / "2-0").exists() and not (tmp_path / "2-1").exists(), "only the first process writes"


COPY = """
import sys
from pathlib import Path
import mlx.core as mx
from recipe.stages import copy_from_rank_zero

rank = mx.distributed.init().rank()
path = Path(sys.argv[1]) / str(rank) / "file"
path.parent.mkdir()
if rank == 0:
    path.write_bytes(bytes(range(256)) * 5)
copy_from_rank_zero(path)
copy_from_rank_zero(path)  # nothing to do
"""


def test_a_machine_without_a_file_is_given_the_first_ones(tmp_path):
    (tmp_path / "bring.py").write_text(COPY)
    launch(tmp_path, tmp_path / "bring.py", tmp_path)
    assert (tmp_path / "1" / "file").read_bytes() == bytes(range(256)) * 5
    assert [p.name for p in (tmp_path / "1").iterdir()] == ["file"]


def test_a_loss_that_is_not_finite_ends_the_training(tmp_path):
    """A rate that is far too high: the steps before stay saved, and no broken weights replace them."""
    run = Run(tmp_path / "r.safetensors", nn.Linear(2, 1), optim.SGD(1e30))
    run.save()
    saved = run.path.read_bytes()

    def loss(model, x):
        return (model(x) ** 2).mean()

    with pytest.raises(UserError, match="loss of step . is not finite: take a smaller learning rate"):
        list(run.steps(20, loss, lambda step: (mx.ones((1, 2)),)))
    assert run.path.read_bytes() == saved
