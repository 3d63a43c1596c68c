"""A training run that can be stopped at any time, alone or shared by several processes.

A `Run` keeps weights, their moving average, the optimizer's state and the step in one file, written in one move.
Under `mlx.launch` every process works out the gradient of its own batch, the gradients are averaged, and so all make
the same step. The one trap: all must exchange the same arrays in the same order, or all wait for ever.
"""

import math
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from tqdm.auto import tqdm

from ..cpu import setup
from ..errors import ExistingFileError, UserError
from ..files import lock, replace_file
from ..models.files import open_weight_file
from ..training import training_step

M = TypeVar("M", bound=nn.Module)
WARM_STEPS = 2  # the first one compiles
TIMED_STEPS = 12  # after so many the time of all is told
RANK_OFFSET = 72_000  # process r takes the batches from step r · RANK_OFFSET on: other ones, of the same kinds
DAMAGED = "{} is damaged or cut short: delete it, and its stage starts again."
ANOTHER = "{} holds another network than this one: delete it, or use another folder."
MISSING = "{} is missing: train that stage first (or leave out --stage to train all)."

# ---------------------------------------------------------------- several processes


def is_rank_zero() -> bool:
    """Whether this process is the one that writes and prints: always, unless `mlx.launch` started several."""
    return mx.distributed.init().rank() == 0


def leaves(tree: Any) -> list[tuple[str, mx.array]]:
    """A tree's arrays, each with its path."""
    flat: dict[str, mx.array] = tree_flatten(tree, destination={})  # type: ignore[assignment]
    return list(flat.items())


def broadcast_from_rank_zero(tree: Any) -> Any:
    """The first process's arrays, on every process that `mlx.launch` started; alone, the arrays themselves."""
    rank = mx.distributed.init().rank()
    shared: list[tuple[str, mx.array]] = []
    for name, a in sorted(leaves(tree)):  # MLX is lazy, and left to itself each might choose its own order
        shared.append((name, mx.distributed.all_sum(a if rank == 0 else mx.zeros_like(a))))
        mx.eval(shared)
    return tree_unflatten(shared)


def copy_from_rank_zero(path: Path) -> None:
    """Bring the first process's file to machines where it is missing or another. All processes call this together."""
    group = mx.distributed.init()
    if group.size() == 1:
        return
    content = path.read_bytes() if path.exists() else b""
    own = mx.array([len(content), zlib.crc32(content)], dtype=mx.int64)
    size, check = broadcast_from_rank_zero(own).tolist()
    differs = zlib.crc32(content) != check
    if mx.distributed.all_sum(mx.array(int(differs))).item() == 0:
        return
    mine = mx.array(np.frombuffer(content, dtype=np.uint8)) if is_rank_zero() else mx.zeros((size,), dtype=mx.uint8)
    data = broadcast_from_rank_zero(mine)
    if differs:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as draft:
            draft.write_bytes(bytes(memoryview(data)))


# ---------------------------------------------------------------- files


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Make a folder and keep other trainings out of it. Raises UserError, on every process, if one is at work there."""
    with ExitStack() as stack:
        free = True
        if is_rank_zero():
            folder.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(lock(folder / ".lock"))
            except ExistingFileError:
                free = False
        if not broadcast_from_rank_zero(mx.array(int(free))).item():
            raise UserError(f"Another training is at work in {folder}: wait until it ends, or name another folder.")
        yield


def read_arrays(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    """A file's arrays and metadata; UserError if it is damaged, or no plain file."""
    if not path.is_file():  # a pipe would wait for ever
        raise UserError(DAMAGED.format(path))
    try:
        return open_weight_file(path).load()
    except UserError:
        raise UserError(DAMAGED.format(path)) from None


def write_arrays(path: Path, arrays: dict[str, mx.array], metadata: dict[str, str] | None = None) -> None:
    """In one move, so that a stop in the middle leaves the old file or none. Raises FileError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as draft:
        mx.save_safetensors(str(draft), arrays, metadata)


def read_step(path: Path) -> int:
    """How far the run in a file is, 0 if there is none."""
    if not path.exists():
        return 0
    step = read_arrays(path)[1].get("step", "")
    if not (step.isascii() and step.isdigit() and len(step) < 10):
        raise UserError(DAMAGED.format(path))
    return int(step)


def read_run(path: Path, expected: dict[str, mx.array]) -> tuple[Any, int]:
    """The trees and the step in a run's file; ValueError if it is damaged or belongs to another network."""
    step = read_step(path)
    arrays, _ = read_arrays(path)
    if {k: v.shape for k, v in arrays.items()} != {k: v.shape for k, v in expected.items()}:
        raise UserError(ANOTHER.format(path))
    check_finite(path, arrays)
    return tree_unflatten(list(arrays.items())), step


def load_average(path: Path, module: M) -> M:
    """The module with a run's moving average as its weights."""
    if not path.exists():
        raise UserError(MISSING.format(path))
    prefix = "average."
    arrays, _ = read_arrays(path)
    average = {k[len(prefix) :]: w for k, w in arrays.items() if k.startswith(prefix)}
    shapes = {k: w.shape for k, w in leaves(module.parameters())}
    if not average or any(shapes.get(k) != w.shape for k, w in average.items()):  # a stage may train only a part
        raise UserError(ANOTHER.format(path))
    check_finite(path, average)
    module.update(tree_unflatten(list(average.items())))
    return module


def check_finite(path: Path, arrays: dict[str, mx.array]) -> None:
    """ValueError if a weight is infinite or not a number."""
    if not all(mx.isfinite(a).all().item() for a in arrays.values()):
        raise UserError(f"{path} holds weights that are not finite: delete it, and its stage starts again.")


# ---------------------------------------------------------------- the run


class Run:
    """A training run that can be stopped at any time: weights, their moving average, optimizer and step in one file.

    Under `mlx.launch` each process trains on batches of its own and the gradients are averaged: n processes make one
    run with batches n times as large. The first one reads and writes the file; the others are told what is in it.
    """

    def __init__(self, path: Path, model: nn.Module, optimizer: optim.Optimizer, decay: float = 0.999):
        setup()  # before the first large array: a fast matrix product where MLX's own is slow
        self.path = Path(path)
        self.model = model
        self.optimizer = optimizer
        self.decay = decay
        self.group = mx.distributed.init()
        self.step = 0
        optimizer.init(model.trainable_parameters())
        self.average = tree_map(lambda w: w + 0, model.trainable_parameters())
        trees = self._trees()
        if self.group.rank() == 0 and self.path.exists():
            trees, self.step = read_run(self.path, dict(tree_flatten(trees)))
        trees = broadcast_from_rank_zero(trees)
        self.step = broadcast_from_rank_zero(mx.array(self.step)).item()
        model.update(trees["model"])
        optimizer.state = trees["optimizer"]
        self.average = trees["average"]

    def _trees(self) -> dict[str, Any]:
        """Everything that a later start needs."""
        weights = self.model.trainable_parameters()
        return {"model": weights, "optimizer": self.optimizer.state, "average": self.average}

    def save(self) -> None:
        """Write the file in one move, so that a stop in the middle leaves the old one."""
        if self.group.rank() == 0:
            write_arrays(self.path, dict(tree_flatten(self._trees())), {"step": str(self.step)})

    def steps(
        self, until: int, loss: Callable[..., mx.array], batches: Callable[[int], Iterable[Any]],
        make_step: Callable[..., Callable[..., mx.array]] = training_step,
    ) -> Iterator[float]:  # fmt: skip
        """Train until step `until`, yielding each step's loss. `batches(step)` makes the arguments of `loss(model, …)`.

        A batch depends on the step alone, so a resumed run sees what an uninterrupted one would have seen.
        Raises UserError as soon as a loss is not finite: no later step would mend the weights.
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
            number = float(value)
            if not math.isfinite(number):  # the same on all machines, so all stop
                raise UserError(
                    f"The loss of step {self.step} is not finite: take a smaller learning rate. What was saved before "
                    "stays as it is."
                )
            yield number


@contextmanager
def catch_interrupts() -> Iterator[list[int]]:
    """A list that is no longer empty once Ctrl-C was pressed. Pressed again, it ends the program at once."""
    pressed: list[int] = []

    def note(number: int, frame: object) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def train_with_progress(
    run: Run, until: int, loss: Callable[..., mx.array], batches: Callable[[int], Iterable[Any]],
    report: Callable[[], str], every: int = 200, make_step: Callable[..., Callable[..., mx.array]] = training_step,
    title: str = "",
) -> None:  # fmt: skip
    """Train with a progress bar; save and report every so many steps. Ctrl-C saves after the step, then raises.

    After a few steps it says how long all of them will take. title: of the bar; the file's name if not given.
    """
    title = title or run.path.stem
    first = run.group.rank() == 0
    several = run.group.size() > 1
    quiet = not (first and sys.stderr.isatty())  # in a log the lines below are enough
    bar = tqdm(total=until, initial=run.step, desc=title, smoothing=0.05, disable=quiet)
    begin = run.step
    recent = 0.0
    with catch_interrupts() as pressed:
        for value in run.steps(until, loss, batches, make_step):
            recent = value if recent == 0 else 0.98 * recent + 0.02 * value
            bar.update()
            if run.step == begin + WARM_STEPS:
                start = time.perf_counter()
            if run.step == begin + TIMED_STEPS and first:
                seconds = (time.perf_counter() - start) / (TIMED_STEPS - WARM_STEPS) * (until - run.step)
                bar.write(f"{title}: about {max(1, round(seconds / 60))} min for {until - run.step} more steps")
            # Whichever was interrupted, all stop after the same step: one that went on would wait for the others.
            stop = mx.distributed.all_sum(mx.array(len(pressed))).item() if several else pressed
            due = run.step % every == 0 or run.step == until
            if stop or due:
                run.save()
            if stop:
                bar.close()
                raise KeyboardInterrupt
            if due and first:
                bar.write(f"{title} {run.step}: loss {recent:.4f}, {report()}")
    bar.close()
