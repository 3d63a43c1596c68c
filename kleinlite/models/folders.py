"""A model's folder is found and opened, or refused as another model's, by its name."""

from pathlib import Path
from typing import Any

from ..errors import UserError, printable
from .families import FAMILIES
from .files import ModelFolder, read_json
from .other_programs import find_mlx_folder
from .registry import MODELS

INDEX = "model_index.json"
INDEXES = (INDEX, "modular_model_index.json")  # diffusers has two ways to write a pipeline


def find_index(folder: Path) -> Path:
    """A model's index, under either name; the usual one if there is none."""
    return next((folder / name for name in INDEXES if (folder / name).exists()), folder / INDEX)


def open_folder(path: Path) -> ModelFolder:
    """A model's folder, with its index. Raises MissingFileError or UserError."""
    file = find_index(path)
    if not file.exists() and (saved := find_mlx_folder(path)):
        return saved
    index = read_json(file)
    check_supported(file, index)
    return ModelFolder(path, index)


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
    classes = values.get("architectures")
    classes = classes if isinstance(classes, list) else [classes]
    for name in [str(name) for name in (values.get("_class_name"), *classes) if name is not None]:
        if name == "AutoencoderKL" and "scaling_factor" in values:  # FLUX.1's, Z-Image's
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
