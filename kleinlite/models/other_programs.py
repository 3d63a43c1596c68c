"""Folders that other MLX programs have saved, mostly in few bits: mflux and mlx-gen, and flux3-mlx.

They have no model_index.json, and few configs or none. The numbers follow from shapes, and whether an mflux model is
distilled from what its record or its folder is called.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import UserError
from ..quantization import QuantizedMatrix
from ..text_encoder import TextEncoderConfig
from .families.klein import read_file_name
from .families.qwen3 import IMPLIED, OUT_LAYERS
from .files import ModelFolder, WeightFiles, list_files, open_weight_file, open_weights, read_json
from .formats import GROUP, assemble, read_quant_specs
from .part_format import Shapes

MFLUX_FILE = "transformer/model.safetensors.index.json"  # which no released folder has
MFLUX_RECORD = "mflux_model.json"  # in folders of newer versions
MFLUX = {"_class_name": "Flux2KleinPipeline"}  # what its model_index.json would say
FLUX3_MLX = {"_class_name": "Flux3KleinPipeline"}
RENAMED = {  # mflux's names → as the released folders have them; flux3-mlx has the authors'
    r"^time_guidance_embed\.": "time_guidance_embed.timestep_embedder.",
    r"^(transformer_blocks.*|.*attentions.*)\.to_out\.": r"\1.to_out.0.",
}


def released_name(name: str) -> str:
    for pattern, theirs in RENAMED.items():
        name = re.sub(pattern, theirs, name)
    return name


@dataclass(frozen=True)
class MlxFiles(WeightFiles):
    """A part's files, their tensors under the names of the released folder."""

    def load(self) -> tuple[dict[str, mx.array], dict[str, str]]:
        """The arrays, convolutions channels first; the few matrices of an autoencoder decoded, as it is not packed."""
        arrays, metadata = super().load()
        ours = {
            released_name(name): w.transpose(0, 3, 1, 2) if w.ndim == 4 else w
            for name, w in arrays.items()
            if name != "rotary_emb.inv_freq"  # computed
        }
        if self.path.name == "vae":
            parts = assemble(ours, metadata)
            ours = {name: w.decode() if isinstance(w, QuantizedMatrix) else w for name, w in parts.items()}
        return ours, metadata


def open_mlx_files(path: Path) -> MlxFiles:
    """A part's files. Of a packed matrix the shape that it stands for."""
    spec = read_quant_specs(path).get("")
    group = spec.group if spec else GROUP  # weights that share a scale
    files = open_weights(path)
    tensors: dict[str, dict[str, Any]] = {}
    for name, tensor in files.tensors.items():
        scales = files.tensors.get(re.sub(r"\.weight$", ".scales", name))
        if scales and tensor is not scales:
            *rows, groups = scales["shape"]
            tensor = tensor | {"shape": [*rows, groups * group]}
        tensors[released_name(name)] = tensor
    return MlxFiles(path, files.files, tensors)


@dataclass(frozen=True)
class MlxFolder(ModelFolder):
    """Such a folder, with the index that it would have."""

    def part(self, name: str) -> Path:
        path = super().part(name)
        makers = path / "ae.safetensors"  # as flux3-mlx has it
        return makers if makers.exists() else path


def find_mlx_folder(path: Path) -> MlxFolder | None:
    """A folder of one of these programs, None if it is not. Raises UserError for a model that is not read from such."""
    config = path / "config.json"
    if config.exists() and read_json(config).get("format") == "flux3-mlx":
        return MlxFolder(path, FLUX3_MLX)
    files = list_files(path / "transformer", "*.safetensors")
    if not files or "quantization_level" not in open_weight_file(files[0]).load()[1]:
        return None
    if "time_guidance_embed.linear_1.weight" not in open_weights(path / "transformer").tensors:
        raise UserError(
            f"{path} was saved by mflux or mlx-gen and is no FLUX.2 [klein], the one model that kleinlite reads from "
            "such a folder: take the released model, see `kleinlite models`."
        )
    return MlxFolder(path, MFLUX)


def name_of_variant(folder: ModelFolder) -> str | None:
    """What tells whether a model saved by mflux is distilled: its record, or the folder's name. Raises UserError."""
    if not isinstance(folder, MlxFolder) or folder.index != MFLUX:
        return None
    path = folder.path.absolute()
    file = path / MFLUX_RECORD
    record = read_json(file) if file.exists() else {}
    in_cache = path.parents[1] if path.parent.name == "snapshots" else path
    name = str(record.get("base_model") or record.get("model_name") or in_cache.name)
    if read_file_name(name) is None:
        raise UserError(
            f"{folder.path} was saved by mflux or mlx-gen, whose files do not say whether the model is distilled: let "
            "the folder's name say it, such as klein-4b-q4 or klein-base-4b-q4."
        )
    return name


def infer_text_encoder(shapes: Shapes) -> TextEncoderConfig:
    """What no shape shows, θ and ε, is the released models'."""
    heads, kv_heads, hd = (shapes[f"layers.0.self_attn.{x}.weight"][0] for x in ("q_proj", "k_proj", "q_norm"))
    vocab, d = shapes["embed_tokens.weight"]
    return TextEncoderConfig(
        vocab, d, d_mlp=shapes["layers.0.mlp.gate_proj.weight"][0], head_dim=hd, heads=heads // hd,
        kv_heads=kv_heads // hd, layers=shapes.count("layers.{}.mlp.gate_proj.weight"),
        out_layers=IMPLIED[OUT_LAYERS], max_length=IMPLIED["max_sequence_length"],
    )  # fmt: skip
