"""A trained model as a folder in the released layout, in float16, which diffusers loads as well."""

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from tokenizers import Tokenizer

from kleinlite.autoencoder import Autoencoder, AutoencoderConfig
from kleinlite.checkpoints import find_conversion, rename
from kleinlite.files import replace_file, write_json
from kleinlite.models.export import DIFFUSERS_STEM, write_config
from kleinlite.models.families import KLEIN, family_of
from kleinlite.models.folders import INDEX
from kleinlite.models.part_format import LAYOUT, PartFormat, Rules, read_layout
from kleinlite.text_encoder import TextEncoder, TextEncoderConfig
from kleinlite.transformer import Transformer


def to_released(module: nn.Module, rules: Rules, dtype: mx.Dtype) -> dict[str, mx.array]:
    """A module's weights under the released folder's names and in its layout: the way back from chapter 8's `match`."""
    arrays: dict[str, mx.array] = {}
    parameters: dict[str, mx.array] = dict(tree_flatten(module.parameters()))
    for name, w in parameters.items():
        w = w.astype(dtype).transpose(0, 3, 1, 2) if w.ndim == 4 else w.astype(dtype)
        names = rename(name, rules)
        conversion = find_conversion(name, rules)
        if conversion:  # each of them is its own way back
            w = conversion(w)
        arrays.update(zip(names, mx.split(w, len(names))))
    return arrays


def save_part(folder: Path, module: nn.Module, form: PartFormat, stem: str, config: dict[str, Any]) -> None:
    """One part of a model: config.json and its weights, float16, under the released folder's names."""
    write_config(folder, config)
    arrays = to_released(module, form.names, mx.float16)
    if "bn.running_mean" in arrays:
        arrays["bn.num_batches_tracked"] = mx.array(0, dtype=mx.int64)  # diffusers expects it
    with replace_file(folder / f"{stem}.safetensors") as draft:
        mx.save_safetensors(str(draft), arrays, {"format": "pt"})


def save_transformer(
    folder: Path, transformer: Transformer, text_cfg: TextEncoderConfig, distilled: bool, shares: bool = False
) -> None:
    """A transformer and the model_index.json that makes its folder a model; the other parts may be beside it.

    shares: whether they are in the folder above.
    """
    form = family_of(transformer.cfg).transformer
    save_part(folder / "transformer", transformer, form, DIFFUSERS_STEM, form.format(transformer.cfg))
    write_json(folder / INDEX, format_index(text_cfg, distilled, shares))


def save_encoders(
    folder: Path, autoencoder: Autoencoder, cfg: AutoencoderConfig, size: int,
    text_encoder: TextEncoder, tokenizer: Tokenizer,
) -> None:  # fmt: skip
    """The parts around klein's transformer, in the released layout that diffusers reads as well."""
    config = KLEIN.autoencoder.format(cfg) | {"sample_size": size}
    save_part(folder / "vae", autoencoder, KLEIN.autoencoder, DIFFUSERS_STEM, config)
    config = KLEIN.text_encoder.format(text_encoder.cfg)
    save_part(folder / "text_encoder", text_encoder, KLEIN.text_encoder, "model", config)
    for file in ("tokenizer/tokenizer_config.json", "tokenizer/chat_template.jinja", "scheduler/scheduler_config.json"):
        (folder / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(LAYOUT / file, folder / file)
    with replace_file(folder / "tokenizer" / "tokenizer.json") as draft:
        tokenizer.save(str(draft))


def format_index(cfg: TextEncoderConfig, distilled: bool, shares: bool = False) -> dict[str, Any]:
    """A klein's model_index.json, with the two fields that nano needs and the released files imply.

    shares: whether parts that are not in its folder are in the one above.
    """
    numbers = {"max_sequence_length": cfg.max_length, "text_encoder_out_layers": list(cfg.out_layers)}
    index = read_layout(INDEX) | {"is_distilled": distilled} | numbers
    return index | {"shares": ".."} if shares else index
