"""The families of models that kleinlite runs, each in its own file: what they share and in what they differ."""

import re
from collections.abc import Iterable
from typing import Any

import mlx.nn as nn

from ...checkpoints import rename
from ..part_format import PartFormat
from .family import Box, Configs, Family, Features, TransformerNumbers
from .flux3 import FLUX3
from .klein import KLEIN
from .taef2 import LAYER, own_name
from .z_image import Z_IMAGE

__all__ = [
    "Box", "Configs", "FAMILIES", "Family", "Features", "KLEIN", "TransformerNumbers", "Z_IMAGE", "family_of",
    "family_of_config", "family_of_index", "family_of_tensors", "find_parts", "network_of", "own_names",
]  # fmt: skip

FAMILIES = (KLEIN, Z_IMAGE, FLUX3)
WRAPPER = re.compile(r"(^|\.)(_\w+\.)+")  # modules around modules: _orig_mod., _fsdp_wrapped_module.


def family_of(cfg: TransformerNumbers) -> Family:
    name = type(cfg).__name__  # the class itself may be another than before: %autoreload makes it anew
    return next(family for family in FAMILIES if family.transformer.config.__name__ == name)


def network_of(cfg: Any) -> type[nn.Module]:
    formats = (form for family in FAMILIES for part in family.parts.values() for form in (part, *part.others))
    return next(form.network for form in formats if form.config.__name__ == type(cfg).__name__)


def family_of_index(index: dict[str, Any]) -> Family:
    """The family that a model's index names; klein if it names none."""
    name = str(index.get("_class_name"))
    return next((family for family in FAMILIES if name.startswith(family.pipelines)), KLEIN)


def family_of_config(values: dict[str, Any]) -> Family:
    """The family that a transformer's config.json names; klein's, whose fields then say what is missing, if none."""
    name = values.get("_class_name")
    return next((family for family in FAMILIES if isinstance(name, str) and name.startswith(family.classes)), KLEIN)


def family_of_tensors(names: Iterable[str]) -> Family:
    """The family of a single file with a transformer; klein, whose names then say what is missing, if none."""
    names = list(names)
    return next((family for family in FAMILIES if find_prefix(family.transformer, names) is not None), KLEIN)


def find_prefix(form: PartFormat, names: Iterable[str]) -> str | None:
    """What stands before every name of a part in a file (`model.diffusion_model.`, `vae.`); None if it is not there.

    Each program wraps the network in modules of its own, so we look for a name that the part must have.
    """
    anchors = (form.anchor, rename(form.anchor, form.names)[0])
    ends = [name.removesuffix(anchor) for name in names for anchor in anchors if name.endswith(anchor)]
    return min((end for end in ends if not end or end.endswith(".")), key=len, default=None)


def find_parts(names: Iterable[str], family: Family | None = None) -> dict[str, str]:
    """The parts in a file, and what stands before the names of each: a file may hold a whole model."""
    names = [WRAPPER.sub(r"\1", name) for name in names]
    found = {part: find_prefix(form, names) for part, form in (family or family_of_tensors(names)).parts.items()}
    return {part: prefix for part, prefix in found.items() if prefix is not None}


def own_names(part: str, names: Iterable[str], family: Family | None = None) -> dict[str, str]:
    """The names in a file that belong to a part, and each without what stands before it. Other parts' are left out."""
    prefixes = find_parts(names, family)
    prefix = prefixes.pop(part, "")
    others = tuple(other.partition(".")[0] + "." for other in prefixes.values() if other)
    plain = {name: WRAPPER.sub(r"\1", name) for name in names}
    if part == "autoencoder" and all(map(LAYER.fullmatch, plain.values())):
        return {name: own_name(layer) for name, layer in plain.items()}
    return {
        name: own.removeprefix(prefix)
        for name, own in plain.items()
        if (prefix and own.startswith(prefix)) or not own.startswith(others)
    }
