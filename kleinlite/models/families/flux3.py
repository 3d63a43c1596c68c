"""FLUX 3 Image Klein: chapter 16."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from ...autoencoder import AutoencoderConfig
from ...checkpoints import Rule, swap_halves
from ...errors import UserError
from ...flux3 import Flux3Config, Flux3Transformer, encode_window, fill_canvas, flux3_velocity_field
from ...text_encoder import TextEncoder, TextEncoderConfig
from ..fields import AXIS, BASE, COUNT, FOUR, WIDTH, Field, format_fields, read_layout
from ..files import ModelFolder
from . import qwen3
from .family import Configs, Family, Features, LoraNames, PartFormat, Shapes, Values, Variant, shifted_schedule
from .klein import KLEIN, find_odd_axes

SHIFT = 6.93  # of the schedule of both models
WINDOW = 80  # a prompt is padded to a multiple of so many tokens
TEMPLATE_TOKENS = 8

# ---------------------------------------------------------------- the transformer

TRANSFORMER_FIELDS = {
    "mode_blocks": Field("num_layers", *COUNT),
    "single_blocks": Field("num_single_layers", *COUNT),
    "heads": Field("num_attention_heads", *COUNT),
    "axes": Field("axes_dims_rope", *AXIS, FOUR),
    "d_latent": Field("in_channels", *WIDTH),
    "d_text": Field("joint_attention_dim", *WIDTH),
    "mlp_ratio": Field("mlp_ratio", float, 0.01, 100),
    "theta": Field("rope_theta", *BASE),
    "d_time": Field("timestep_channels", int, 2, 2**17),
    "flow_map": Field("flow_map", bool),
}


def infer_transformer(shapes: Shapes) -> Flux3Config:
    """What no shape shows, θ, is the released models'."""
    hd = shapes["single_blocks.0.norm.query_norm.scale"][0]
    d, d_latent = shapes["emb_in.image.weight"]
    return Flux3Config(
        mode_blocks=shapes.count("txt_mode_blocks.{}.q_proj.weight"),
        single_blocks=shapes.count("single_blocks.{}.q_proj.weight"),
        heads=d // hd,
        axes=(hd // 4,) * 4,
        d_latent=d_latent,
        d_text=shapes["txt_in.weight"][1],
        mlp_ratio=shapes["single_blocks.0.mlp_out.weight"][1] / d,
        d_time=shapes["time_in.in_layer.weight"][1],
        flow_map=shapes.has("ref_time_in.in_layer.weight"),
    )


def format_transformer(cfg: Flux3Config) -> Values:
    numbers = {"attention_head_dim": cfg.head_dim, "rope_theta": int(cfg.theta), "cond_in_channels": cfg.d_latent}
    return {"_class_name": "Flux3Transformer2DModel", "eps": 1e-6} | format_fields(cfg, TRANSFORMER_FIELDS) | numbers


def is_used(cfg: Flux3Config, name: str) -> bool:
    """False for what only training needed."""
    return not name.startswith("repa_projectors.")


# ---------------------------------------------------------------- the text encoder, the language half of Qwen3-VL

OUT_LAYERS = tuple(range(4, 33, 4))
MAX_LENGTH = 4096  # tokens; the makers cut a longer prompt, we refuse it
IMPLIED = {qwen3.OUT_LAYERS: OUT_LAYERS, "max_sequence_length": MAX_LENGTH}


def parse_text_encoder(path: Path, values: Values, index: Values) -> TextEncoderConfig:
    """Its numbers stand in `text_config`. Raises UserError."""
    numbers = values.get("text_config")
    if not isinstance(numbers, dict):
        raise UserError(
            f"{path} is no Qwen3-VL, with which FLUX 3 Image Klein reads: take all parts from one model, for example "
            "parts='flux3'."
        )
    tied = {name: values[name] for name in ("tie_word_embeddings",) if name in values}
    return qwen3.parse(path, tied | numbers, IMPLIED | index)


def format_text_encoder(cfg: TextEncoderConfig) -> Values:
    return {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": qwen3.format(cfg)}


def is_read(cfg: TextEncoderConfig, name: str) -> bool:
    """False for the half that sees pictures, too: references reach the model through the autoencoder."""
    name = re.sub(r"^model\.(?=visual\.)|^(model\.)?language_model\.", "", name)
    return not name.startswith("visual.") and qwen3.is_used(cfg, name)


def encode(encoder: TextEncoder, tokenizer: Tokenizer, prompts: list[str], max_length: int) -> Features:
    return [encode_window(encoder, tokenizer, prompt, max_length) for prompt in prompts]


def count_window(prompt: str, max_length: int) -> int:
    """As many tokens as bytes: no token of Qwen's has less than one."""
    tokens = min(len(prompt.encode()) + TEMPLATE_TOKENS, max_length)
    return min(tokens + -tokens % WINDOW, max_length)


# ---------------------------------------------------------------- the family


schedule = partial(shifted_schedule, shift=SHIFT)


def read_variant(folder: ModelFolder, cfg: Flux3Config) -> Variant:
    """A flow map is the distilled model."""
    return Variant(distilled=cfg.flow_map, kv=False, schedule=schedule)


BLOCK_MATRICES = ("q_proj", "k_proj", "v_proj", "attn_out", "mlp_in", "mlp_out")
BLOCKS = ("content_mode_blocks.image", "content_mode_blocks.image_cond", "txt_mode_blocks", "single_blocks")
MODES = ("txt", "image", "image_cond")
FLUX3_NAMES: list[Rule] = [
    Rule(r"^txt_in", ["context_embedder"]),
    Rule(r"^emb_in", ["x_embedders"]),
    Rule(r"^ref_time_in", ["target_timestep_embedder"]),
    Rule(r"^time_in", ["timestep_embedder"]),
    Rule(r"embedder\.in_layer", ["embedder.linear_1"]),
    Rule(r"embedder\.out_layer", ["embedder.linear_2"]),
    Rule(r"(_modulations.*)\.lin\.", [r"\1.linear."]),
    Rule(r"^content_mode_blocks", ["mode_blocks"]),
    Rule(r"^single_blocks", ["single_transformer_blocks"]),
    Rule(r"\.(q|k|v)_proj", [r".attn.to_\1"]),
    Rule(r"attn_out", ["attn.to_out.0"]),
    Rule(r"mlp_in", ["ff.linear_in"]),
    Rule(r"mlp_out", ["ff.linear_out"]),
    Rule(r"norm\.query_norm\.scale", ["attn.norm_q.weight"]),
    Rule(r"norm\.key_norm\.scale", ["attn.norm_k.weight"]),
    Rule(r"^final_layer\.image\.adaLN_modulation\.1", ["norm_out.linear"], swap_halves),
    Rule(r"^final_layer\.image\.linear", ["proj_out"]),
]

QWEN3_VL_NAMES: list[Rule] = [Rule(r"^(?!lm_head)", ["model.language_model."])]

LORA_NAMES = LoraNames(
    matrices=(
        *(f"{blocks}.{{i}}.{matrix}" for blocks in BLOCKS for matrix in BLOCK_MATRICES),
        *(f"{kind}_stream_modulations.{mode}.lin" for kind in ("early", "single") for mode in MODES),
        "emb_in.image", "emb_in.image_cond", "txt_in", "time_in.in_layer", "time_in.out_layer",
        "ref_time_in.in_layer", "ref_time_in.out_layer", "final_layer.image.linear",
        "final_layer.image.adaLN_modulation.1",
    ),
    aliases={},
    distinctive=r"mode_blocks|emb_in[._]|x_embedders|ref_time_in|target_timestep|stream_modulations|final_layer[._]image"
    r"|single_blocks[._]\d+[._](q_proj|k_proj|v_proj|attn_out|mlp_in|mlp_out)"
    r"|single_transformer_blocks[._]\d+[._](ff[._]linear_|attn[._]to_out[._]0)",
    widths={},  # as wide as klein 4B: names tell it
    readers=("q_proj", "k_proj", "v_proj", "mlp_in"),
)  # fmt: skip
FLUX3 = Family(
    title="FLUX 3 Image Klein",
    example="flux3",
    pipelines=("Flux3",),
    classes=("Flux3Transformer",),
    transformer=PartFormat(
        config=Flux3Config,
        network=Flux3Transformer,
        fields=TRANSFORMER_FIELDS,
        names=FLUX3_NAMES,
        anchor="early_stream_modulations.image.lin.weight",
        format=format_transformer,
        infer=infer_transformer,
        contradictions=find_odd_axes,
        is_used=is_used,
    ),
    text_encoder=replace(
        qwen3.QWEN3,
        names=QWEN3_VL_NAMES,
        own_parse=parse_text_encoder,
        format=format_text_encoder,
        is_used=is_read,
        computed={"model_type": "qwen3_vl", "text_config": read_layout("text_encoder/config.json") | qwen3.COMPUTED},
    ),
    autoencoder=KLEIN.autoencoder,
    lora=LORA_NAMES,
    released={
        name: Configs(
            Flux3Config(flow_map=flow_map),
            TextEncoderConfig(theta=5e6, out_layers=OUT_LAYERS, max_length=MAX_LENGTH),
            AutoencoderConfig(),
        )
        for name, flow_map in (("flux3", True), ("flux3-base", False))
    },
    defaults={True: (16, 1.0), False: (50, 3.5)},
    no_guidance=1.0,
    guidance_fixed=True,
    edits=True,
    encode=encode,
    schedule=schedule,
    read_variant=read_variant,
    velocity_field=flux3_velocity_field,
    prepare_lone_reference=fill_canvas,
    count_window=count_window,
    float16=False,
    trains=False,
)
