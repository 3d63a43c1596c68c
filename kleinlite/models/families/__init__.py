"""The families of models that kleinlite runs, each in its own file: what they share and in what they differ."""

from collections.abc import Iterable
from typing import Any

import mlx.nn as nn

from ...checkpoints import rename
from .family import Box, Configs, Family, Features, PartFormat, Shapes, TransformerNumbers
from .flux3 import FLUX3
from .klein import KLEIN
from .z_image import Z_IMAGE

__all__ = [
    "Box", "Configs", "FAMILIES", "Family", "Features", "KLEIN", "PartFormat", "Shapes", "TransformerNumbers",
    "Z_IMAGE", "family_of", "family_of_config", "family_of_tensors", "find_prefix", "network_of",
]  # fmt: skip

FAMILIES = (KLEIN, Z_IMAGE, FLUX3)


def family_of(cfg: TransformerNumbers) -> Family:
    return next(family for family in FAMILIES if family.transformer.config is type(cfg))


def network_of(cfg: Any) -> type[nn.Module]:
    formats = (form for family in FAMILIES for part in family.parts.values() for form in (part, *part.others))
    return next(form.network for form in formats if form.config is type(cfg))


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
