"""A model's configs: from its files to the chapters' dataclasses, or a sentence about what is not one of ours.

What each family's files say is in `families`; here is what is the same for all: which file is asked, and the configs
of the released models.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import UserError
from .families import (
    FAMILIES,
    KLEIN,
    Configs,
    Family,
    family_of,
    family_of_config,
    family_of_index,
    family_of_tensors,
    own_names,
)  # fmt: skip
from .files import ModelFolder, WeightFiles, open_weights, read_json
from .folders import check_supported
from .formats import check_packing
from .other_programs import MlxFolder, infer_text_encoder, open_mlx_files
from .part_format import Shapes

# By the name of a size in the registry:
RELEASED_CONFIGS = {size: configs for family in FAMILIES for size, configs in family.released.items()}


def read_parts(folder: ModelFolder, paths: dict[str, Path]) -> tuple[Configs, dict[str, WeightFiles]]:
    """The configs of all parts, and the files with their weights; the transformer says the family. Raises UserError."""
    path = paths["transformer"]
    cfg, weights = read_part("transformer", path, folder)
    family = family_of(cfg)
    other = family_of_index(folder.index)
    if family is not other:
        wrong = f"{path} is a transformer of {family.title}, and {folder.path} has the parts of {other.title}"
        way_out = f"{wrong}: take all from one model, for example"
        raise UserError(f"{way_out} parts={family.example!r}.", shell=f"{way_out} --parts {family.example}.")
    text_encoder = read_part("text_encoder", paths["text_encoder"], folder, family)
    autoencoder = read_part("autoencoder", paths["autoencoder"], folder, family)
    files = {"transformer": weights, "text_encoder": text_encoder[1], "autoencoder": autoencoder[1]}
    return Configs(cfg, text_encoder[0], autoencoder[0]), files


def read_part(part: str, path: Path, folder: ModelFolder, family: Family | None = None) -> tuple[Any, WeightFiles]:
    """The config of a part and the files with its weights: of a single file, of a folder as released, or of MLX's."""
    if path.is_file():
        weights = open_weights(path)
        return infer_config(part, weights, family), weights
    if not (isinstance(folder, MlxFolder) and path == folder.part(part)):
        return read_config(part, path, folder.index, family), open_weights(path)
    weights = open_mlx_files(path)
    if part == "text_encoder" and (path / "config.json").exists():
        return read_config(part, path, folder.index, family), weights
    return infer_config(part, weights, family, infer_text_encoder), weights


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
    return family.parts[part].parse(path, values, index or {})


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
    form.of(cfg).check(path, cfg)
    return cfg
