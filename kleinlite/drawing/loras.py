"""The adapters of a model in use: which, how strong, and that they follow the transformer in and out of memory."""

import hashlib
import math
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path

from mlx.utils import tree_flatten

from ..lora import attach, detach, rescale
from ..models.adapters import Adapter, find_adapter, open_adapter
from ..models.families import network_of
from ..transformer import Transformer, TransformerConfig
from .thread import in_turn

__all__ = ["Loras"]


class Loras(MutableMapping[str, float]):
    """Adapters by name, and their scales: `klein.loras`.

    >>> name = klein.loras.add("outlined", 0.8)  # a file, or one that comes with nano
    >>> klein.loras["outlined"] = 0.5
    >>> del klein.loras["outlined"]  # the weights are what they were, bit for bit
    """

    def __init__(self, cfg: TransformerConfig):
        self._cfg = cfg
        self._adapters: dict[str, tuple[str, Adapter, float]] = {}  # name → key inside the network, file, scale
        self._sha256: dict[str, str] = {}  # key → of the file as it was read: later it may be another, or gone
        self._net: Transformer | None = None  # to which they are attached
        self._count = 0

    def add(self, file: str | Path, scale: float = 1.0) -> str:
        """Add an adapter, and return the name that it has here. Raises ValueError, with names, if it does not fit."""
        return in_turn(self._add, file, scale)

    def _add(self, file: str | Path, scale: float) -> str:
        adapter = open_adapter(file)
        check_scale(adapter, scale)
        adapter.changes(self._net or network_of(self._cfg)(self._cfg))  # no weights, MLX is lazy: all must fit
        name, number = adapter.name, 2
        while name in self._adapters:
            name, number = f"{adapter.name}-{number}", number + 1
        self._count += 1
        key = f"lora{self._count}"
        self._adapters[name], self._sha256[key] = (key, adapter, float(scale)), fingerprint(adapter.path)
        if self._net is not None:
            self._attach(name)
        return name

    def add_all(self, files: Sequence[str | Path | tuple[str | Path, float]]) -> None:
        for file in files:
            self.add(*(file if isinstance(file, tuple | list) else (file,)))

    def attach_to(self, net: Transformer) -> None:
        """Called with a transformer that has just been loaded."""
        self._net = net
        for name in self._adapters:
            self._attach(name)

    def release(self) -> None:
        """Called when the transformer leaves memory."""
        self._net = None

    def _attach(self, name: str) -> None:
        key, adapter, scale = self._adapters[name]
        attach(self._net, key, adapter.changes(self._net), scale)

    @property
    def nbytes(self) -> int:
        """What the adapters take in memory."""
        return sum(a.nbytes for _, adapter, _ in self._adapters.values() for _, a in tree_flatten(adapter.modules))

    def metadata(self) -> list[dict]:
        """What a picture remembers: the files' names, their scales, and the beginning of their SHA-256."""
        return [
            {"file": adapter.source, "scale": scale, "sha256": self._sha256[key]}
            for key, adapter, scale in self._adapters.values()
        ]

    def __getitem__(self, name: str) -> float:
        return self._adapters[name][2]

    def __setitem__(self, name: str, scale: float) -> None:
        if name not in self._adapters:
            raise KeyError(f"{name!r} is not among the adapters, {list(self._adapters)}: use loras.add(file, scale).")
        key, adapter, _ = self._adapters[name]
        check_scale(adapter, scale)
        self._adapters[name] = key, adapter, float(scale)
        if self._net is not None:
            in_turn(rescale, self._net, key, float(scale))

    def __delitem__(self, name: str) -> None:
        key, *_ = self._adapters.pop(name)
        if self._net is not None:
            in_turn(detach, self._net, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._adapters)

    def __len__(self) -> int:
        return len(self._adapters)

    def __repr__(self) -> str:
        return repr(dict(self))


def check_scale(adapter: Adapter, scale: float) -> None:
    if not isinstance(scale, int | float) or not math.isfinite(scale):
        raise ValueError(f"The scale of {adapter.path} is a number, such as 1 or 0.7, not {scale!r}.")
    if "DoRA" in adapter.kind and scale != 1:
        raise ValueError(f"{adapter.path} is a DoRA, for which only the scale 1 has a meaning, not {scale:g}.")


def fingerprint(path: Path) -> str:
    """Sixteen letters that tell one file from another."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def find_recorded_loras(made: dict, picture: str | Path) -> list[tuple[Path, float]]:
    """The files with which a picture was made, from its metadata: bundled, here, or beside it. ValueError if not."""
    found = []
    for lora in made.get("loras", ()):
        name = lora["file"]
        places = [path for path in (find_adapter(name), Path(picture).parent / name) if path.is_file()]
        path = next((path for path in places if fingerprint(path) == lora["sha256"]), None)
        if path is None:
            what = "only another file of that name is here" if places else "which is not here"
            raise ValueError(f"{picture} was made with {name}, {what}: name the file with --lora.")
        found.append((path, lora["scale"]))
    return found
