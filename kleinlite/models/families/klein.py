"""FLUX.2 [klein]: chapters 1 to 6."""

import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import Tokenizer

from ...autoencoder import Autoencoder, AutoencoderConfig
from ...sampling import schedule
from ...text_encoder import TextEncoder, TextEncoderConfig, tokenize
from ...transformer import Transformer, TransformerConfig
from ..fields import AXIS, BASE, COUNT, EPS, FOUR, WIDTH, Field, check_words, format_fields, read_fields, read_layout
from ..files import ModelFolder, read_json
from ..names import AUTOENCODER_NAMES, TRANSFORMER_NAMES
from .family import Configs, Family, LoraNames, PartFormat, Shapes, Values, Variant, shifted_schedule
from .qwen3 import QWEN3
from .taef2 import TAEF2, Taef2Config, infer_taef2, is_taef2

# ---------------------------------------------------------------- the transformer

TRANSFORMER_FIELDS = {
    "double_blocks": Field("num_layers", *COUNT),
    "single_blocks": Field("num_single_layers", *COUNT),
    "heads": Field("num_attention_heads", *COUNT),
    "axes": Field("axes_dims_rope", *AXIS, FOUR),
    "d_latent": Field("in_channels", *WIDTH),
    "d_text": Field("joint_attention_dim", *WIDTH),
    "mlp_ratio": Field("mlp_ratio", float, 0.01, 100),
    "theta": Field("rope_theta", *BASE),
    "d_time": Field("timestep_guidance_channels", int, 2, 2**17),
}


def infer_transformer(shapes: Shapes) -> TransformerConfig:
    """What no shape shows, θ, is the released models'."""
    hd = shapes["single_blocks.0.norm.query_norm.scale"][0]
    d = shapes["img_in.weight"][0]
    return TransformerConfig(
        double_blocks=shapes.count("double_blocks.{}.img_attn.qkv.weight"),
        single_blocks=shapes.count("single_blocks.{}.linear1.weight"),
        heads=d // hd,
        axes=(hd // 4,) * 4,
        d_latent=shapes["img_in.weight"][1],
        d_text=shapes["txt_in.weight"][1],
        mlp_ratio=shapes["double_blocks.0.img_mlp.0.weight"][0] / (2 * d),
        d_time=shapes["time_in.in_layer.weight"][1],
    )


def format_transformer(cfg: TransformerConfig) -> Values:
    numbers = {"attention_head_dim": cfg.head_dim, "rope_theta": int(cfg.theta)}
    return read_layout("transformer/config.json") | format_fields(cfg, TRANSFORMER_FIELDS) | numbers


def find_odd_axes(cfg: Any) -> list[str]:
    return [f"{a} channels of a position axis are odd" for a in cfg.axes if a % 2]


# ---------------------------------------------------------------- the autoencoder

AUTOENCODER_FIELDS = {
    "channels": Field("block_out_channels", *WIDTH, FOUR),
    "decoder_channels": Field("decoder_block_out_channels", *WIDTH, FOUR),
    "layers": Field("layers_per_block", int, 1, 64),
    "latent_channels": Field("latent_channels", int, 1, 4096),
    "groups": Field("norm_num_groups", *WIDTH),
    "bn_eps": Field("batch_norm_eps", *EPS),
}
AUTOENCODER_WORDS = {"act_fn": ("silu", "swish")}


def parse_autoencoder(path: Path, values: Values, index: Values) -> AutoencoderConfig:
    fields = dict(AUTOENCODER_FIELDS)
    if not values.get("decoder_block_out_channels"):
        del fields["decoder_channels"]
    return AutoencoderConfig(**read_fields(path, values, fields))


def infer_autoencoder(shapes: Shapes) -> AutoencoderConfig | Taef2Config:
    if is_taef2(shapes):
        return infer_taef2(shapes)
    down = [shapes[f"encoder.down.{i}.block.0.conv1.weight"][0] for i in range(4)]
    up = [shapes[f"decoder.up.{i}.block.0.conv1.weight"][0] for i in range(4)]
    return AutoencoderConfig(
        channels=tuple(down),
        decoder_channels=tuple(up),
        layers=shapes.count("encoder.down.0.block.{}.conv1.weight"),
        latent_channels=shapes["encoder.quant_conv.weight"][0] // 2,
        groups=math.gcd(AutoencoderConfig.groups, *down, *up),
    )


def format_autoencoder(cfg: AutoencoderConfig) -> Values:
    return read_layout("vae/config.json") | format_fields(cfg, AUTOENCODER_FIELDS)


def find_uneven_groups(cfg: AutoencoderConfig) -> list[str]:
    channels = {*cfg.channels, *(cfg.decoder_channels or ())}
    return [f"{c} channels are no whole number of {cfg.groups} groups" for c in channels if c % cfg.groups]


# ---------------------------------------------------------------- the scheduler

SHIFT = Field("shift", float, 0.01, 100)
DYNAMIC = Field("use_dynamic_shifting", bool)
LEFT_OUT = {"shift": 1.0, "use_dynamic_shifting": False, "_class_name": "FlowMatchEulerDiscreteScheduler"}
SCHEDULER = read_layout("scheduler/scheduler_config.json") | {"shift_terminal": (None, 0), "use_flow_sigmas": False}


def read_scheduler(folder: ModelFolder) -> Values:
    """What a model's scheduler says, with diffusers' values of what it leaves out. Raises UserError."""
    path = folder.part("scheduler") / "scheduler_config.json"
    says = LEFT_OUT | read_json(path)
    SHIFT.check(path, says["shift"])
    DYNAMIC.check(path, says["use_dynamic_shifting"])
    check_words(path, says, SCHEDULER, LEFT_OUT)
    wanted = LEFT_OUT["_class_name"]
    in_index = folder.index.get("scheduler")
    for name in (says["_class_name"], in_index[-1] if isinstance(in_index, list) and in_index else wanted):
        check_words(path, {"class": name}, {"class": wanted}, ())
    return says


# ---------------------------------------------------------------- the family


KV_PIPELINE = "Flux2KleinKVPipeline"


def encode(encoder: TextEncoder, tokenizer: Tokenizer, prompts: list[str], max_length: int) -> mx.array:
    return encoder(*tokenize(tokenizer, prompts, max_length))


def read_variant(folder: ModelFolder, cfg: TransformerConfig) -> Variant:
    kv = folder.index.get("_class_name") == KV_PIPELINE
    levels = schedule
    if (folder.part("scheduler") / "scheduler_config.json").exists():
        says = read_scheduler(folder)
        if not says["use_dynamic_shifting"]:
            levels = partial(shifted_schedule, shift=says["shift"])
    return Variant(folder.index.get("is_distilled", False), kv, levels)


def read_file_name(name: str) -> tuple[bool, bool] | None:
    """Whether a single file is distilled, and whether it is a KV model: its header says neither, so its name must."""
    name = name.lower()
    kv = re.search(r"(?<![a-z])kv(?![a-z])", name) is not None
    base = re.search(r"(?<![a-z])(klein)?base(?![a-z])", name) is not None  # not "baseball"
    return (not base, kv) if kv or "klein" in name else None


STREAM_MATRICES = ("attn.qkv", "attn.proj", "mlp.0", "mlp.2")
LORA_NAMES = LoraNames(
    matrices=(
        *(f"double_blocks.{{i}}.{stream}_{matrix}" for stream in ("img", "txt") for matrix in STREAM_MATRICES),
        "single_blocks.{i}.linear1", "single_blocks.{i}.linear2", "img_in", "txt_in", "time_in.in_layer",
        "time_in.out_layer", "double_stream_modulation_img.lin", "double_stream_modulation_txt.lin",
        "single_stream_modulation.lin", "final_layer.linear", "final_layer.adaLN_modulation.1",
    ),
    aliases={  # diffusers' names after it has fused the three
        "transformer_blocks.{i}.attn.to_qkv": "double_blocks.{i}.img_attn.qkv",
        "transformer_blocks.{i}.attn.to_added_qkv": "double_blocks.{i}.txt_attn.qkv",
    },
    distinctive=r"$^",
    widths={3072: "klein 4B", 4096: "klein 9B"},
    readers=("attn.qkv", "linear1", "mlp.0", "_modulation_img.lin"),
)  # fmt: skip
KLEIN = Family(
    title="FLUX.2 [klein]",
    example="4b",
    pipelines=("Flux2Klein",),
    classes=("Flux2Transformer",),
    transformer=PartFormat(
        config=TransformerConfig,
        network=Transformer,
        fields=TRANSFORMER_FIELDS,
        names=TRANSFORMER_NAMES,
        anchor="double_blocks.0.img_attn.qkv.weight",
        format=format_transformer,
        infer=infer_transformer,
        contradictions=find_odd_axes,
    ),
    text_encoder=QWEN3,
    autoencoder=PartFormat(
        config=AutoencoderConfig,
        network=Autoencoder,
        fields=AUTOENCODER_FIELDS,
        names=AUTOENCODER_NAMES,
        anchor="decoder.conv_in.weight",
        computed=AUTOENCODER_WORDS,
        own_parse=parse_autoencoder,
        format=format_autoencoder,
        infer=infer_autoencoder,
        others=(TAEF2,),
        contradictions=find_uneven_groups,
    ),
    lora=LORA_NAMES,
    released={
        "4b": Configs(TransformerConfig(), TextEncoderConfig(), AutoencoderConfig()),
        "9b": Configs(
            TransformerConfig(double_blocks=8, single_blocks=24, heads=32, d_text=12288),
            TextEncoderConfig(d=4096, d_mlp=12288, tied=False),
            AutoencoderConfig(),
        ),
    },
    defaults={True: (4, 1.0), False: (50, 4.0)},
    no_guidance=1.0,
    guidance_fixed=True,
    edits=True,
    encode=encode,
    schedule=schedule,
    read_variant=read_variant,
    read_file_name=read_file_name,
    kv_pipeline=KV_PIPELINE,
)
