"""A model's configs: from its files to the chapters' dataclasses, or a sentence about what is not one of ours.

What each family's files say is in `families`; here is what is the same for all: which file is asked, that other
models are known by their names, and the configs of the released models.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..errors import UserError, printable
from .families import FAMILIES, KLEIN, Family, PartFormat, Shapes, family_of_config, family_of_tensors, find_prefix
from .families.taef2 import LAYER, own_name
from .fields import check_words
from .files import ModelFolder, WeightFiles, find_index, read_json
from .formats import check_packing
from .other_programs import find_mlx_folder
from .registry import MODELS

WRAPPER = re.compile(r"(^|\.)(_\w+\.)+")  # modules around modules: _orig_mod., _fsdp_wrapped_module.
# By the name of a size in the registry:
RELEASED_CONFIGS = {size: configs for family in FAMILIES for size, configs in family.released.items()}

# ---------------------------------------------------------------- the index


def open_folder(path: Path) -> ModelFolder:
    """A model's folder, with its index. Raises MissingFileError or UserError."""
    file = find_index(path)
    if not file.exists() and (saved := find_mlx_folder(path)):
        return saved
    index = read_json(file)
    check_supported(file, index)
    return ModelFolder(path, index)


def family_of_index(index: dict[str, Any]) -> Family:
    """The family that a model's index names; klein if it names none."""
    name = str(index.get("_class_name"))
    return next((family for family in FAMILIES if name.startswith(family.pipelines)), KLEIN)


# ---------------------------------------------------------------- other models

DISTINCTIVE_NAMES = {  # tensors and words that only these models have
    "FLUX.1": ("vector_in.in_layer.weight", "double_blocks.0.img_mod.lin.weight", "pooled_projection_dim"),
    "FLUX.2 [dev]": ("guidance_in.in_layer.weight", "time_guidance_embed.guidance_embedder.linear_1.weight"),
}
OTHER_CLASSES = {
    "FluxPipeline": "FLUX.1",
    "FluxTransformer2DModel": "FLUX.1",
    "Flux2Pipeline": "FLUX.2 [dev]",
    "Mistral3ForConditionalGeneration": "FLUX.2 [dev]'s text encoder, Mistral",
}
OUR_CLASSES = tuple(name for family in FAMILIES for name in (*family.pipelines, *family.classes)) + (
    "AutoencoderKLFlux2", "Qwen",
)  # fmt: skip


def find_other_model(values: dict[str, Any]) -> str | None:
    """The name of another model whose index, config or header this is; None if it may be one of ours."""
    if values.get("joint_attention_dim") == 15360 or values.get("num_single_layers") == 48:
        return "FLUX.2 [dev]"
    for model, names in DISTINCTIVE_NAMES.items():
        if any(word.endswith(names) for word in values):
            return model
    for name in (values.get("_class_name"), *(values.get("architectures") or ())):
        if name is None or (name == "AutoencoderKL" and "scaling_factor" in values):  # FLUX.1's, Z-Image's
            continue
        if name in OTHER_CLASSES:
            return OTHER_CLASSES[name]
        if not name.startswith(OUR_CLASSES):
            return f"a {printable(name)[:60]}"
    return None


def check_supported(path: Path, values: dict[str, Any]) -> None:
    """Refuse another model by its name. Raises UserError."""
    other = find_other_model(values)
    if other:
        *titles, last = (family.title for family in FAMILIES)
        raise UserError(
            f"{path} is {other}, and kleinlite runs {', '.join(titles)} and {last}: take {', '.join(MODELS)} or nano."
        )


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


# ---------------------------------------------------------------- a part's config


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
