"""FLUX 3 Image Klein: notebooks/flux3.ipynb."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

from ...autoencoder import AutoencoderConfig
from ...checkpoints import Rule, swap_halves
from ...errors import UserError
from ...flux3 import Flux3Config, Flux3Transformer, encode_window, fill_canvas, flux3_velocity_field
from ...text_encoder import TextEncoderConfig
from ...z_image import PLAIN_TEMPLATE
from ..files import ModelFolder
from ..part_format import COUNT, Field, PartFormat, Shapes, Values, read_layout
from . import qwen3
from .family import Configs, Family, Variant, encode_each, shifted_schedule
from .klein import KLEIN

SHIFT = 6.93  # of the schedule of both models
WINDOW = 80  # a prompt is padded to a multiple of this many tokens
TEMPLATE_TOKENS = 8

# ---------------------------------------------------------------- the transformer

OWN_FIELDS = {
    "mode_blocks": Field("num_layers", *COUNT),
    "d_time": Field("timestep_channels", int, 2, 2**17),
    "flow_map": Field("flow_map", bool),
}
SHARED = ("single_blocks", "heads", "axes", "d_latent", "d_text", "mlp_ratio", "theta")  # with klein


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


# ---------------------------------------------------------------- the text encoder, the language half of Qwen3-VL

OUT_LAYERS = tuple(range(4, 33, 4))
MAX_LENGTH = 4096  # tokens; the makers cut a longer prompt, we refuse it
IMPLIED = {qwen3.OUT_LAYERS: OUT_LAYERS, "max_sequence_length": MAX_LENGTH}


def parse_text_encoder(path: Path, values: Values, index: Values) -> TextEncoderConfig:
    """Its numbers stand in `text_config`. Raises UserError."""
    numbers = values.get("text_config")
    if not isinstance(numbers, dict):
        wrong = f"{path} is no Qwen3-VL, with which FLUX 3 Image Klein reads"
        way_out = f"{wrong}: take all parts from one model, for example"
        raise UserError(f"{way_out} parts='flux3'.", shell=f"{way_out} --parts flux3.")
    tied = {name: values[name] for name in ("tie_word_embeddings",) if name in values}
    return qwen3.parse(path, tied | numbers, IMPLIED | index)


def is_read(cfg: TextEncoderConfig, name: str) -> bool:
    """False for the half that sees pictures, too: references reach the model through the autoencoder."""
    name = re.sub(r"^model\.(?=visual\.)|^(model\.)?language_model\.", "", name)
    return not name.startswith("visual.") and qwen3.is_used(cfg, name)


def count_window(prompt: str, max_length: int) -> int:
    """As many tokens as bytes: no token of Qwen's has less than one."""
    tokens = min(len(prompt.encode()) + TEMPLATE_TOKENS, max_length)
    return min(tokens + -tokens % WINDOW, max_length)


# ---------------------------------------------------------------- the family


schedule = partial(shifted_schedule, shift=SHIFT)


def list_notes(steps: int, distilled: bool, quantize: int | str | None) -> list[str]:
    """On few steps, as its makers say, and on few bits."""
    notes = []
    if steps < 8 and distilled:
        notes.append("FLUX 3 is grainy in so few steps, in its makers' own code too: 8 do, 16 are meant.")
    if quantize in (3, 4, "mxfp4", "nvfp4"):
        notes.append("FLUX 3 has 5 to 23 % more grain in 4 bits, as the makers of flux3-mlx report: try 6 or 8.")
    return notes


def read_variant(folder: ModelFolder, cfg: Flux3Config) -> Variant:
    """A flow map is the distilled model."""
    return Variant(distilled=cfg.flow_map, kv=False, schedule=schedule)


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

FLUX3 = Family(
    title="FLUX 3 Image Klein",
    example="flux3",
    pipelines=("Flux3",),
    classes=("Flux3Transformer",),
    transformer=PartFormat(
        config=Flux3Config,
        network=Flux3Transformer,
        fields=OWN_FIELDS | {name: KLEIN.transformer.fields[name] for name in SHARED},
        names=FLUX3_NAMES,
        anchor="early_stream_modulations.image.lin.weight",
        layout={"_class_name": "Flux3Transformer2DModel", "eps": 1e-6},
        repeated=lambda cfg: {
            "attention_head_dim": cfg.head_dim,
            "rope_theta": int(cfg.theta),
            "cond_in_channels": cfg.d_latent,
        },
        infer=infer_transformer,
        is_used=lambda cfg, name: not name.startswith("repa_projectors."),  # which only training needed
    ),
    text_encoder=replace(
        qwen3.QWEN3,
        names=QWEN3_VL_NAMES,
        own_parse=parse_text_encoder,
        own_format=lambda cfg: {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "text_config": qwen3.QWEN3.format(cfg),
        },
        is_used=is_read,
        computed={"model_type": "qwen3_vl", "text_config": read_layout("text_encoder/config.json") | qwen3.COMPUTED},
    ),
    autoencoder=KLEIN.autoencoder,
    released={
        name: Configs(
            Flux3Config(flow_map=flow_map),
            TextEncoderConfig(theta=5e6, out_layers=OUT_LAYERS, max_length=MAX_LENGTH),
            AutoencoderConfig(),
        )
        for name, flow_map in (("flux3", True), ("flux3-base", False))
    },
    defaults={True: (16, 1.0), False: (50, 3.5)},
    encode=partial(encode_each, encode_window),
    schedule=schedule,
    read_variant=read_variant,
    template=PLAIN_TEMPLATE,
    velocity_field=flux3_velocity_field,
    prepare_lone_reference=fill_canvas,
    count_window=count_window,
    float16=False,
    trains=False,
    notes=list_notes,
)
