"""A model's parts in memory: read when they are needed, released when what comes next needs the room."""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..cpu import give_back, speed_up
from ..errors import UserError
from ..models.checkpoint import Checkpoint
from ..models.families import Configs
from ..models.registry import PART_WORDS
from .cluster import Cluster
from .loras import Loras, follow
from .serialized import run_serialized
from .strips import use_strips

__all__ = ["PartStore", "Parts"]


WORDS = {"tokenizer": "tokenizer"} | PART_WORDS  # what a user may call a part → our word


@dataclass(eq=False)
class PartStore:
    """The parts of one model; `loaded` has those that are in memory, by name.

    A pinned part, such as `klein.text_encoder` once somebody asked for it, stays as it is, with what was changed in it.
    exact: float32 was asked for.
    """

    checkpoint: Checkpoint
    loras: Loras
    cluster: Cluster
    keep_loaded: bool
    exact: bool
    loaded: dict[str, Any] = field(default_factory=dict)
    pinned: set[str] = field(default_factory=set)

    def is_large(self, name: str) -> bool:
        """Whether a part's weights stay as they are in its files, and its layers are this machine's quick ones."""
        return self.checkpoint.files[name].is_large

    def load(self, name: str) -> Any:
        part = self.loaded.get(name)
        return run_serialized(self._read, name) if part is None else part

    def _read(self, name: str) -> Any:
        part: Any = self.loaded.get(name)  # another thread may have had its turn before
        if part is None:
            load = getattr(self.checkpoint, f"load_{name}")
            is_shared = name in ("transformer", "text_encoder") and self.cluster.machines > 1
            part = load(lazy=True) if is_shared else load()
            if isinstance(part, nn.Module) and self.is_large(name):
                if mx.metal.is_available():  # or macOS may page weights out between steps; mlx-lm does the same
                    mx.set_wired_limit(int(mx.device_info(mx.gpu)["max_recommended_working_set_size"]))
                # A small network runs the chapters' own code, so that a line changed there shows.
                speed_up(part, bfloat16=not self.exact)
            if name == "transformer":
                follow(self.loras, part)
            if is_shared:
                try:
                    self.cluster.share(part)
                except UserError:
                    follow(self.loras, None)
                    raise
            if name == "autoencoder":
                use_strips(part)
            self.loaded[name] = part
        return part

    def pin(self, name: str) -> Any:
        """A part that stays in memory until `release_all`: the caller may change it."""
        self.pinned.add(name)
        return self.load(name)

    def release(self, name: str) -> None:
        """Take a part out of memory, unless it is pinned or `keep_loaded` says that all parts stay."""
        if not self.keep_loaded and name not in self.pinned:
            self._drop(name)

    def release_all(self) -> None:
        self.pinned.clear()
        for name in list(self.loaded):
            self._drop(name)
        give_back()

    def _drop(self, name: str) -> None:
        if self.loaded.pop(name, None) is None:
            return
        if name == "transformer":
            follow(self.loras, None)
        mx.clear_cache()  # MLX keeps freed memory for itself; this hands it back


class Parts:
    """What is in memory, for those who build on it."""

    def __init__(self, store: PartStore):
        self._store = store

    @property
    def configs(self) -> Configs:
        """The numbers of the parts, which the files say."""
        return self._store.checkpoint.configs

    @property
    def loaded(self) -> dict[str, Any]:
        """The parts in memory, by name."""
        return self._store.loaded

    def load(self, name: str) -> Any:
        """A part, "transformer", "autoencoder", …: read if it is not in memory."""
        if name not in WORDS:
            raise UserError(f"There is no part {name!r}: a model has {', '.join(dict.fromkeys(WORDS.values()))}.")
        return self._store.load(WORDS[name])

    def release(self, name: str) -> None:
        """Take a part out of memory, unless somebody has asked for it as `klein.transformer` and the like."""
        self._store.release(WORDS.get(name, name))
