"""The text encoder that FLUX.2 [klein] and Z-Image share: Qwen3, of which only some layers are used."""

import re
from dataclasses import replace
from pathlib import Path

import mlx.nn as nn

from ...checkpoints import Rule
from ...errors import UserError
from ...text_encoder import TextEncoder, TextEncoderConfig
from ..part_format import AXIS, BASE, COUNT, EPS, WIDTH, Field, PartFormat, Values, read_fields, read_layout

TEXT_ENCODER_NAMES: list[Rule] = [Rule(r"^(?!lm_head)", ["model."])]
# Of model_index.json, and what is implied where it is silent:
OUT_LAYERS = "text_encoder_out_layers"
IMPLIED: Values = {OUT_LAYERS: (9, 18, 27), "max_sequence_length": 512}
TEXT_ENCODER_FIELDS = {
    "vocab": Field("vocab_size", int, 1, 2**24),
    "d": Field("hidden_size", *WIDTH),
    "d_mlp": Field("intermediate_size", int, 1, 2**20),
    "layers": Field("num_hidden_layers", *COUNT),
    "heads": Field("num_attention_heads", *COUNT),
    "kv_heads": Field("num_key_value_heads", *COUNT),
    "head_dim": Field("head_dim", *AXIS),
    "theta": Field("rope_theta", *BASE),
    "eps": Field("rms_norm_eps", *EPS),
    "tied": Field("tie_word_embeddings", bool),
}
INDEX_FIELDS = {
    "out_layers": Field(OUT_LAYERS, *COUNT, (1, 16)),
    "max_length": Field("max_sequence_length", int, 1, 2**16),
}
# One rotation for all layers, as it is; the sections of Qwen3-VL turn alike where there is text alone.
ROPE = {"rope_type": ("default", None), "type": ("default", "mrope", None), "partial_rotary_factor": (1.0, None)}
ROPES = ("rope_parameters", "rope_scaling")
COMPUTED = {
    "model_type": ("qwen3", "qwen3_vl", "qwen3_vl_text"), "hidden_act": ("silu", "swish"), "mlp_bias": False,
    "layer_types": ("full_attention", None), "partial_rotary_factor": (1.0, None), **dict.fromkeys(ROPES, ROPE),
}  # fmt: skip


def parse(path: Path, values: Values, index: Values) -> TextEncoderConfig:
    """What config.json and model_index.json say of the text encoder. Raises UserError."""
    if "text_config" in values:
        raise UserError(f"{path} is Qwen3-VL, which belongs to FLUX 3 Image Klein: take all parts from one model.")
    # In a dictionary since transformers 5, under either name; the released files have rope_theta at the top.
    moved = {}
    for rope in map(values.get, ROPES):
        if isinstance(rope, dict) and "rope_theta" in rope:
            moved["rope_theta"] = rope["rope_theta"]
    given = {name: index.get(name, implied) for name, implied in IMPLIED.items()}
    numbers = read_fields(path, values | moved, TEXT_ENCODER_FIELDS) | read_fields(path, given, INDEX_FIELDS)
    return TextEncoderConfig(**numbers)


def parse_last_but_one(path: Path, values: Values, index: Values) -> TextEncoderConfig:
    """The same for Z-Image, whose features are the output of the last layer but one. Raises UserError."""
    layers = values.get("num_hidden_layers")
    if OUT_LAYERS not in index and type(layers) is int:
        index = index | {OUT_LAYERS: (layers - 1,)}
    return parse(path, values, index)


def build(cfg: TextEncoderConfig) -> nn.Module:
    """Qwen3 up to the highest layer whose output becomes features; the norm after the last layer goes, too."""
    network = TextEncoder(replace(cfg, layers=max(cfg.out_layers), tied=True))
    del network.norm
    return network


def is_used(cfg: TextEncoderConfig, name: str) -> bool:
    """False for what only the language model needs: layers above the highest in use, the last norm, the head."""
    match = re.match(r"(?:model\.)?(?:layers\.(\d+)|norm|lm_head)\.", name)
    return not match or (match[1] is not None and int(match[1]) < max(cfg.out_layers))


QWEN3 = PartFormat(
    config=TextEncoderConfig,
    network=TextEncoder,
    fields=TEXT_ENCODER_FIELDS,
    names=TEXT_ENCODER_NAMES,
    anchor="embed_tokens.weight",
    computed=COMPUTED,
    own_parse=parse,
    layout=read_layout("text_encoder/config.json"),
    is_used=is_used,
    build=build,
)
