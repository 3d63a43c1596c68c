"""A training run that can be stopped at any time: a `Run` keeps all that it needs in one file, written in one move."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from tqdm.auto import tqdm

from ..cpu import setup
from ..errors import ExistingFileError, UserError, on_ctrl_c
from ..files import lock, replace_file, spell
from ..models.files import open_weight_file
from ..training import training_step

DAMAGED = "{} is damaged or cut short: delete it, and its stage starts again."
BUSY = "Another training is at work in {}: wait until it ends, or name another folder."
ANOTHER = "{} holds another network than this one: delete it, or use another folder."


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Make a folder and keep other trainings out of it. Raises UserError if one is at work there."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(lock(folder / ".lock"))
        except ExistingFileError:
            raise UserError(BUSY.format(folder)) from None
        yield


def read_arrays(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    """A file's arrays and metadata. Raises UserError if it is damaged."""
    try:
        return open_weight_file(path).load()
    except UserError:
        raise UserError(DAMAGED.format(path)) from None


def write_arrays(path: Path, arrays: dict[str, mx.array], metadata: dict[str, str] | None = None) -> None:
    """In one move, so that a stop in the middle leaves the old file or none. Raises FileError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as draft:
        mx.save_safetensors(spell(draft), arrays, metadata)


class Run:
    """A training run that can be stopped at any time: weights, their moving average, optimizer and step in one file.

    The recipe's `SharedRun` is one of several processes, and says otherwise where this one says `is_first`.
    """

    is_first = True  # whether it prints

    def __init__(self, path: Path, model: nn.Module, optimizer: optim.Optimizer, decay: float = 0.999):
        setup()  # before the first large array: a fast matrix product where MLX's own is slow
        self.path = Path(path)
        self.model = model
        self.optimizer = optimizer
        self.decay = decay
        self.step = 0
        optimizer.init(model.trainable_parameters())
        self.average = tree_map(lambda w: w + 0, model.trainable_parameters())
        self.restore()

    def restore(self) -> None:
        """Go on from the file, if there is one. Raises UserError if it is damaged or belongs to another network."""
        if not self.path.exists():
            return
        arrays, metadata = read_arrays(self.path)
        expected = dict(tree_flatten(self.trees()))
        if {k: w.shape for k, w in arrays.items()} != {k: w.shape for k, w in expected.items()}:
            raise UserError(ANOTHER.format(self.path))
        self.step = int(metadata["step"])
        self.use(tree_unflatten(list(arrays.items())))

    def use(self, trees: dict[str, Any]) -> None:
        """Take weights, optimizer and average from elsewhere."""
        self.model.update(trees["model"])
        self.optimizer.state = trees["optimizer"]
        self.average = trees["average"]

    def trees(self) -> dict[str, Any]:
        """Everything that a later start needs."""
        weights = self.model.trainable_parameters()
        return {"model": weights, "optimizer": self.optimizer.state, "average": self.average}

    def save(self) -> None:
        """Write the file in one move, so that a stop in the middle leaves the old one."""
        write_arrays(self.path, dict(tree_flatten(self.trees())), {"step": str(self.step)})

    def should_stop(self, pressed: bool) -> bool:
        """Whether this step is the last one, since somebody has pressed Ctrl-C."""
        return pressed

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
            value = update(*batches(self.step))
            # A young average forgets faster: with a fixed decay it would remember the random start.
            decay = min(self.decay, (1 + self.step) / (10 + self.step))
            weights = self.model.trainable_parameters()
            self.average = tree_map(lambda a, w, d=decay: d * a + (1 - d) * w, self.average, weights)
            mx.eval(value, self.model.state, self.optimizer.state, self.average)
            self.step += 1
            number = float(value)
            if not math.isfinite(number):
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

    with on_ctrl_c(note):
        yield pressed


def train_with_progress(
    run: Run, until: int, loss: Callable[..., mx.array], batches: Callable[[int], Iterable[Any]],
    report: Callable[[], str], every: int = 200, make_step: Callable[..., Callable[..., mx.array]] = training_step,
    title: str = "", log: Path | None = None,
) -> None:  # fmt: skip
    """Train with a progress bar; save and report after every `every` steps. Ctrl-C saves after the step, then raises.

    title: of the bar; the file's name if not given. log: a file that gets every report, too.
    """
    title = title or run.path.stem
    quiet = not (run.is_first and sys.stderr.isatty())  # in a log the lines below are enough
    bar = tqdm(total=until, initial=run.step, desc=title, smoothing=0.05, disable=quiet)
    recent = 0.0
    with catch_interrupts() as pressed:
        for value in run.steps(until, loss, batches, make_step):
            recent = value if recent == 0 else 0.98 * recent + 0.02 * value
            bar.update()
            stop = run.should_stop(bool(pressed))
            due = run.step % every == 0 or run.step == until
            if stop or due:
                run.save()
            if stop:
                bar.close()
                raise KeyboardInterrupt
            if due and run.is_first:
                line = f"{title} {run.step}: loss {recent:.4f}, {report()}"
                bar.write(line)
                if log:
                    with log.open("a", encoding="utf-8") as file:
                        file.write(f"{line}\n")
    bar.close()
