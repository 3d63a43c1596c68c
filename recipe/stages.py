"""What the recipe's stages share: a run of several processes, its file on every machine, the average of its weights.

Under `mlx.launch` every process works out the gradient of its own batch, the gradients are averaged, and so all make
the same step. The one trap: all must exchange the same arrays in the same order, or all wait for ever.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from kleinlite.errors import UserError
from kleinlite.files import replace_file
from kleinlite.trainer.run import ANOTHER, BUSY, Run, lock_folder, read_arrays
from kleinlite.training import training_step

M = TypeVar("M", bound=nn.Module)
RANK_OFFSET = 72_000  # process r takes the batches from step r · RANK_OFFSET on
MISSING = "{} is missing: train that stage first (or leave out --stage to train all)."


def is_rank_zero() -> bool:
    """Whether this process is the one that writes and prints: always, unless `mlx.launch` started several."""
    return mx.distributed.init().rank() == 0


def share(batch: int) -> int:
    """How much of a batch each process takes: all of it, unless `mlx.launch` started several."""
    return max(1, batch // mx.distributed.init().size())


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


@contextmanager
def lock_shared_folder(folder: Path) -> Iterator[None]:
    """As `lock_folder`; the sentence comes on every process."""
    with ExitStack() as stack:
        free = True
        if is_rank_zero():
            try:
                stack.enter_context(lock_folder(folder))
            except UserError:
                free = False
        if not broadcast_from_rank_zero(mx.array(int(free))).item():
            raise UserError(BUSY.format(folder))
        yield


class SharedRun(Run):
    """A run of all processes. Each trains on batches of its own, and they average their gradients.

    The first one reads and writes the file; the others are told what is in it.
    """

    def __init__(self, path: Path, model: nn.Module, optimizer: optim.Optimizer, decay: float = 0.999):
        self.group = mx.distributed.init()
        self.is_first = self.group.rank() == 0
        super().__init__(path, model, optimizer, decay)

    def restore(self) -> None:
        if self.is_first:
            super().restore()
        self.step = broadcast_from_rank_zero(mx.array(self.step)).item()
        self.use(broadcast_from_rank_zero(self.trees()))

    def save(self) -> None:
        if self.is_first:
            super().save()

    def should_stop(self, pressed: bool) -> bool:
        """Whichever was interrupted, all stop after the same step: one that went on would wait for the others."""
        if self.group.size() == 1:
            return pressed
        return mx.distributed.all_sum(mx.array(int(pressed))).item() > 0

    def steps(
        self, until: int, loss: Callable[..., mx.array], batches: Callable[[int], Iterable[Any]],
        make_step: Callable[..., Callable[..., mx.array]] = training_step,
    ) -> Iterator[float]:  # fmt: skip
        shift = RANK_OFFSET * self.group.rank()
        return super().steps(until, loss, lambda step: batches(step + shift), make_step)


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


def load_average(path: Path, module: M) -> M:
    """The module with a run's moving average as its weights."""
    if not path.exists():
        raise UserError(MISSING.format(path))
    prefix = "average."
    arrays, _ = read_arrays(path)
    # The latents' statistics are measured, not trained: no average has them.
    average = {k[len(prefix) :]: w for k, w in arrays.items() if k.startswith(prefix)}
    shapes = {k: w.shape for k, w in leaves(module.parameters())}
    if not average or any(shapes.get(k) != w.shape for k, w in average.items()):
        raise UserError(ANOTHER.format(path))
    module.update(tree_unflatten(list(average.items())))
    return module
