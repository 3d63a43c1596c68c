"""A model's configs: from its files to the chapters' dataclasses, or a sentence about what is not one of ours.

What each family's files say is in `families`; here is what is the same for all: which file is asked, that other
models are known by their names, and the configs of the released models.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import UserError
from .families import FAMILIES, KLEIN, Family, family_of_config, family_of_tensors, own_names
from .files import WeightFiles, read_json
from .folders import check_supported
from .formats import check_packing
from .part_format import PartFormat, Shapes, check_words

# By the name of a size in the registry:
RELEASED_CONFIGS = {size: configs for family in FAMILIES for size, configs in family.released.items()}


def read_config(part: str, path: Path, index: dict[str, Any] | None = None, family: Family | None = None) -> Any:
    """The numbers of one part, from its folder's config.json, checked.

    part: "transformer", "text_encoder" or "autoencoder". index: what the model's model_index.json says. family: the
    transformer's; a transformer says its own, for the others it is klein if not given.
    Raises MissingFileError or UserError.
    """
    path = path / "config.json"
    return parse_config(part, read_json(path), index, path=path, family=family)


def parse_config(
    part: str, values: dict[str, Any], index: dict[str, Any] | None = None, *, path: Path = Path("config.json"),
    family: Family | None = None,
) -> Any:  # fmt: skip
    """The numbers of one part from what its config.json says, checked. Raises UserError about `path`."""
    check_supported(path, values)
    if family is None:
        family = family_of_config(values) if part == "transformer" else KLEIN
    form = family.parts[part]
    cfg = form.parse(path, values, index or {})
    check_config(path, cfg, form)
    check_words(path, values, form.format(cfg) | form.computed, {field.name for field in form.fields.values()})
    return cfg


def infer_config(
    part: str, weights: WeightFiles, family: Family | None = None, infer: Callable[[Shapes], Any] | None = None
) -> Any:
    """The numbers that the shapes in a file tell; `infer` says how if the family does not. Raises UserError."""
    path = weights.path
    check_packing(path, weights.tensors)
    tensors = {own: weights.tensors[name] for name, own in own_names(part, weights.tensors, family).items()}
    check_supported(path, tensors)
    if family is None:
        family = family_of_tensors(tensors) if part == "transformer" else KLEIN
    form = family.parts[part]
    infer = form.infer or infer
    if infer is None:
        raise UserError(f"{path} is one file; a {part.replace('_', ' ')} is a folder with config.json: give that.")
    shapes = Shapes({name: list(t["shape"]) for name, t in tensors.items()}, form.names)
    for name, tensor in tensors.items():
        if tensor["dtype"] == "U8" and name.endswith("weight") and tensor["shape"]:
            shapes[name][-1] *= 2  # two weights in a byte
    try:
        cfg = infer(shapes)
    except (LookupError, ValueError, ZeroDivisionError) as e:
        raise UserError(f"{path} has not the tensors of {family.title} ({e}): is this another kind of model?") from None
    check_config(path, cfg, form.of(cfg))
    return cfg


def check_config(path: Path, cfg: Any, form: PartFormat) -> None:
    wrong = form.contradictions(cfg)
    if wrong:
        raise UserError(f"{path} contradicts itself ({'; '.join(wrong)}): is this another kind of model?")
