"""A training run that can be stopped at any time, alone or shared by several processes. Hand-written.

A `Run` keeps weights, their moving average, the optimizer's state and the step in one file, written in one move.
Under `mlx.launch` every process works out the gradient of its own batch, the gradients are averaged, and so all make
the same step. The one trap: all must exchange the same arrays in the same order, or all wait for ever.
"""

import os
import signal
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from filelock import FileLock, Timeout
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from safetensors import SafetensorError, deserialize
from tqdm.auto import tqdm

from ..training import training_step

RANK_OFFSET = 72_000  # process r takes the batches from step r · RANK_OFFSET on: other ones, of the same kinds
DAMAGED = "{} is damaged or cut short: delete it, and its stage starts again."
ANOTHER = "{} holds another network than this one: delete it, or use another folder."
MISSING = "{} is missing: train that stage first (or leave out --stage to train all)."

# ---------------------------------------------------------------- several processes


def is_rank_zero() -> bool:
    """Whether this process is the one that writes and prints: always, unless `mlx.launch` started several."""
    return mx.distributed.init().rank() == 0


def broadcast_from_rank_zero(tree: Any) -> Any:
    """The first process's arrays, on every process that `mlx.launch` started; alone, the arrays themselves."""
    rank, shared = mx.distributed.init().rank(), []
    for name, a in sorted(tree_flatten(tree)):  # MLX is lazy, and left to itself each might choose its own order
        shared.append((name, mx.distributed.all_sum(a if rank == 0 else mx.zeros_like(a))))
        mx.eval(shared)
    return tree_unflatten(shared)


def copy_from_rank_zero(path: Path) -> None:
    """Bring the first process's file to machines where it is missing or another. All processes call this together."""
    group = mx.distributed.init()
    if group.size() == 1:
        return
    content = path.read_bytes() if path.exists() else b""
    known = mx.array([len(content), zlib.crc32(content)], dtype=mx.int64)
    size, check = broadcast_from_rank_zero(known).tolist()
    differs = zlib.crc32(content) != check
    if mx.distributed.all_sum(mx.array(int(differs))).item() == 0:
        return
    mine = mx.array(bytearray(content), dtype=mx.uint8) if is_rank_zero() else mx.zeros((size,), dtype=mx.uint8)
    data = broadcast_from_rank_zero(mine)
    if differs:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".from-rank-zero-{group.rank()}")
        partial.write_bytes(bytes(memoryview(data)))
        os.replace(partial, path)


# ---------------------------------------------------------------- files


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Make a folder and keep other trainings out of it. ValueError, on every process, if one is at work there."""
    lock, free = FileLock(folder / ".lock"), True
    if is_rank_zero():
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            free = False
    if not broadcast_from_rank_zero(mx.array(int(free))).item():
        raise ValueError(f"Another training is at work in {folder}: wait until it ends, or name another folder.")
    try:
        yield
    finally:
        lock.release()


def read_arrays(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    """A file's arrays and metadata; ValueError if it is damaged."""
    try:
        return mx.load(str(path), return_metadata=True)
    except (RuntimeError, UnicodeDecodeError):
        raise ValueError(DAMAGED.format(path)) from None


def write_arrays(path: Path, arrays: dict[str, mx.array], metadata: dict[str, str] | None = None) -> None:
    """In one move, so that a stop in the middle leaves the old file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial.safetensors")
    mx.save_safetensors(str(partial), arrays, metadata)
    os.replace(partial, path)


def read_step(path: Path) -> int:
    """How far the run in a file is, 0 if there is none."""
    if not path.exists():
        return 0
    step = read_arrays(path)[1].get("step", "")
    if not (step.isascii() and step.isdigit() and len(step) < 10):
        raise ValueError(DAMAGED.format(path))
    return int(step)


def read_run(path: Path, expected: dict[str, mx.array]) -> tuple[dict, int]:
    """The trees and the step in a run's file; ValueError if it is damaged or belongs to another network."""
    step, (arrays, _) = read_step(path), read_arrays(path)
    try:
        deserialize(path.read_bytes())  # the library's own check: MLX reads some damaged headers with wrong numbers
    except SafetensorError:
        raise ValueError(DAMAGED.format(path)) from None
    if {k: v.shape for k, v in arrays.items()} != {k: v.shape for k, v in expected.items()}:
        raise ValueError(ANOTHER.format(path))
    check_finite(path, arrays)
    return tree_unflatten(list(arrays.items())), step


def load_average(path: Path, module: nn.Module) -> nn.Module:
    """The module with a run's moving average as its weights."""
    if not path.exists():
        raise ValueError(MISSING.format(path))
    prefix, (arrays, _) = "average.", read_arrays(path)
    average = {k[len(prefix) :]: w for k, w in arrays.items() if k.startswith(prefix)}
    shapes = {k: w.shape for k, w in tree_flatten(module.parameters())}
    if not average or any(shapes.get(k) != w.shape for k, w in average.items()):  # a stage may train only a part
        raise ValueError(ANOTHER.format(path))
    check_finite(path, average)
    module.update(tree_unflatten(list(average.items())))
    return module


def check_finite(path: Path, arrays: dict[str, mx.array]) -> None:
    """ValueError if a weight is infinite or not a number."""
    if not all(mx.isfinite(a).all().item() for a in arrays.values()):
        raise ValueError(f"{path} holds weights that are not finite: delete it, and its stage starts again.")


# ---------------------------------------------------------------- the run


class Run:
    """A training run that can be stopped at any time: weights, their moving average, optimizer and step in one file.

    Under `mlx.launch` each process trains on batches of its own and the gradients are averaged: n processes make one
    run with batches n times as large. The first one reads and writes the file; the others are told what is in it.
    """

    def __init__(self, path: Path, model: nn.Module, optimizer: optim.Optimizer, decay: float = 0.999):
        self.path, self.model, self.optimizer, self.decay = Path(path), model, optimizer, decay
        self.group, self.step = mx.distributed.init(), 0
        optimizer.init(model.trainable_parameters())
        self.average = tree_map(lambda w: w + 0, model.trainable_parameters())
        trees = self._trees()
        if self.group.rank() == 0 and self.path.exists():
            trees, self.step = read_run(self.path, dict(tree_flatten(trees)))
        trees = broadcast_from_rank_zero(trees)
        self.step = broadcast_from_rank_zero(mx.array(self.step)).item()
        model.update(trees["model"])
        optimizer.state, self.average = trees["optimizer"], trees["average"]

    def _trees(self) -> dict:
        """Everything that a later start needs."""
        weights = self.model.trainable_parameters()
        return {"model": weights, "optimizer": self.optimizer.state, "average": self.average}

    def save(self) -> None:
        """Write the file in one move, so that a stop in the middle leaves the old one."""
        if self.group.rank() == 0:
            write_arrays(self.path, dict(tree_flatten(self._trees())), {"step": str(self.step)})

    def steps(
        self, until: int, loss: Callable[..., mx.array], batches: Callable[[int], tuple],
        make_step: Callable[..., Callable[..., mx.array]] = training_step,
    ) -> Iterator[float]:  # fmt: skip
        """Train until step `until`, yielding each step's loss. `batches(step)` makes the arguments of `loss(model, …)`.

        A batch depends on the step alone, so a resumed run sees what an uninterrupted one would have seen.
        make_step: another way to make a step of a loss than `training_step`.
        """
        update = make_step(self.model, self.optimizer, loss)
        while self.step < until:
            value = update(*batches(self.step + RANK_OFFSET * self.group.rank()))
            # A young average forgets faster: with a fixed decay it would remember the random start.
            decay = min(self.decay, (1 + self.step) / (10 + self.step))
            weights = self.model.trainable_parameters()
            self.average = tree_map(lambda a, w, d=decay: d * a + (1 - d) * w, self.average, weights)
            mx.eval(value, self.model.state, self.optimizer.state, self.average)
            self.step += 1
            yield value.item()


@contextmanager
def catch_interrupts() -> Iterator[list[int]]:
    """A list that is no longer empty once Ctrl-C was pressed. Pressed again, it ends the program at once."""
    pressed = []

    def note(number, frame):
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def train_with_progress(
    run: Run, until: int, loss: Callable[..., mx.array], batches: Callable[[int], tuple],
    report: Callable[[], str], every: int = 200, make_step: Callable[..., Callable[..., mx.array]] = training_step,
) -> None:  # fmt: skip
    """Train with a progress bar; save and report every so many steps. Ctrl-C saves after the step, then raises."""
    first, several = run.group.rank() == 0, run.group.size() > 1
    bar = tqdm(total=until, initial=run.step, desc=run.path.stem, smoothing=0.05, disable=not first)
    recent = 0.0
    with catch_interrupts() as pressed:
        for value in run.steps(until, loss, batches, make_step):
            recent = value if recent == 0 else 0.98 * recent + 0.02 * value
            bar.update()
            # Whichever was interrupted, all stop after the same step: one that went on would wait for the others.
            stop = mx.distributed.all_sum(mx.array(len(pressed))).item() if several else pressed
            due = run.step % every == 0 or run.step == until
            if stop or due:
                run.save()
            if stop:
                bar.close()
                raise KeyboardInterrupt
            if due and first:
                bar.write(f"{run.path.stem} {run.step}: loss {recent:.4f}, {report()}")
    bar.close()
