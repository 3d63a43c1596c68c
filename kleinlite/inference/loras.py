"""The adapters of a model in use: which, how strong, and that they follow the transformer in and out of memory."""

import hashlib
import math
import numbers
import os
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path

from ..errors import UserError
from ..lora import attach, detach, rescale
from ..models.adapters import Adapter, find_adapter, open_adapter
from ..models.families import TransformerNumbers, family_of
from ..sharding import SummedLinear
from ..transformer import Transformer
from .request import describe
from .serialized import run_serialized

__all__ = ["Loras"]


class Loras(MutableMapping[str, float]):
    """Adapters by name, and their scales: `klein.loras`.

    >>> name = klein.loras.add("outlined", 0.8)  # a file, or one that comes with nano
    >>> klein.loras["outlined"] = 0.5
    >>> del klein.loras["outlined"]  # the weights are what they were, bit for bit
    """

    def __init__(self, cfg: TransformerNumbers):
        self._cfg = cfg
        self._adapters: dict[str, tuple[str, Adapter, float]] = {}  # name → key inside the network, file, scale
        self._net: Transformer | None = None  # to which they are attached
        self._count = 0

    def add(self, file: str | Path | Adapter, scale: float = 1.0) -> str:
        """Add an adapter, and return the name that it has here; `del klein.loras[name]` takes it away again.

        file: a file's name, one that comes with nano, or what `open_adapter` has read. A file that is among them
        already is read anew in its place, with this scale.

        Raises FileError if there is no such file, and UserError, with names, if it does not fit.
        """
        return run_serialized(self._add, file, scale)

    def _add(self, file: str | Path | Adapter, scale: float) -> str:
        if self._net is not None and any(isinstance(layer, SummedLinear) for layer in self._net.modules()):
            way_out = "name adapters where the model is opened, or call release() first"
            raise UserError(f"The model is divided over several machines already: {way_out}.")
        if not isinstance(file, str | os.PathLike | Adapter):
            raise UserError(f"An adapter is a file's name, or one that comes with nano, not {describe(file)}.")
        adapter = file if isinstance(file, Adapter) else open_adapter(file, family_of(self._cfg))
        check_scale(adapter, scale)
        adapter.check(self._cfg)
        path = adapter.path.resolve()
        for name in [name for name, (_, other, _) in self._adapters.items() if other.path.resolve() == path]:
            del self[name]
        name = adapter.name
        number = 2
        while name in self._adapters:
            name = f"{adapter.name}-{number}"
            number = number + 1
        self._count += 1
        key = f"lora{self._count}"
        self._adapters[name] = key, adapter, float(scale)
        if self._net is not None:
            self._attach(name)
        return name

    def _attach(self, name: str) -> None:
        key, adapter, scale = self._adapters[name]
        assert self._net is not None
        attach(self._net, key, adapter.deltas(self._net), scale)

    def _check(self, name: str) -> str:
        """The name itself. Raises KeyError, with those that there are."""
        if name not in self._adapters:
            raise KeyError(f"{name!r} is not among the adapters, {list(self._adapters)}: use loras.add(file, scale).")
        return name

    def __getitem__(self, name: str) -> float:
        return self._adapters[self._check(name)][2]

    def __setitem__(self, name: str, scale: float) -> None:
        key, adapter, _ = self._adapters[self._check(name)]
        check_scale(adapter, scale)
        self._adapters[name] = key, adapter, float(scale)
        if self._net is not None:
            run_serialized(rescale, self._net, key, float(scale))

    def __delitem__(self, name: str) -> None:
        key, *_ = self._adapters.pop(self._check(name))
        if self._net is not None:
            run_serialized(detach, self._net, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._adapters)

    def __len__(self) -> int:
        return len(self._adapters)

    def __repr__(self) -> str:
        return repr(dict(self))


# What the package asks of them. No methods: Tab on `klein.loras` shows what a user calls.


def add_loras(loras: Loras, files: Sequence[str | Path | tuple[str | Path | Adapter, float]]) -> None:
    for file in files:
        loras.add(*(file if isinstance(file, tuple | list) else (file,)))


def follow(loras: Loras, net: Transformer | None) -> None:
    """Attach them to a transformer that has been read; None: it was released, and the next one gets them."""
    loras._net = net
    if net is not None:
        for name in loras:
            loras._attach(name)


def lora_bytes(loras: Loras) -> int:
    return sum(adapter.nbytes for _, adapter, _ in loras._adapters.values())


def record_loras(loras: Loras) -> list[dict]:
    """What a picture remembers: the files' names, their scales, and the beginning of their SHA-256."""
    return [
        {"file": adapter.source, "scale": scale, "sha256": adapter.sha256[:16]}
        for _, adapter, scale in loras._adapters.values()
    ]


def check_scale(adapter: Adapter, scale: float) -> None:
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real) or not math.isfinite(scale):
        raise UserError(f"The scale of {adapter.path} is a number, such as 1 or 0.7, not {describe(scale)}.")
    if "DoRA" in adapter.kind and scale != 1:
        raise UserError(f"{adapter.path} is a DoRA, for which only the scale 1 has a meaning, not {scale:g}.")


def find_recorded_loras(made: dict, picture: str | Path) -> list[tuple[Path, float]]:
    """The files with which a picture was made, from its metadata: bundled, here, or beside it. Raises UserError."""
    found = []
    for lora in made.get("loras", ()):
        name = lora["file"]
        places = [path for path in (find_adapter(name), Path(picture).parent / name) if os.path.isfile(path)]
        hashes = {hashlib.sha256(path.read_bytes()).hexdigest()[:16]: path for path in places}
        path = hashes.get(lora["sha256"])
        if path is None:
            what = "only another file of that name is here" if places else "which is not here"
            raise UserError(f"{picture} was made with {name}, {what}: name the file with --lora.")
        found.append((path, lora["scale"]))
    return found
