"""FLUX.2 [klein]: chapters 1 to 6."""

import math
import re
from pathlib import Path

import mlx.core as mx
from tokenizers import Tokenizer

from ...autoencoder import Autoencoder, AutoencoderConfig
from ...sampling import schedule
from ...text_encoder import TextEncoder, TextEncoderConfig, tokenize
from ...transformer import Transformer, TransformerConfig
from ..fields import (
    AXIS,
    BASE,
    COUNT,
    EPS,
    FOUR,
    WIDTH,
    Field,
    count_numbered,
    format_fields,
    read_fields,
    read_layout,
)
from ..files import ModelFolder
from ..names import AUTOENCODER_NAMES, TRANSFORMER_NAMES
from .family import Configs, Family, LoraNames, PartFormat, Shapes, Values, Variant
from .qwen3 import QWEN3

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


def parse_transformer(path: Path, values: Values, index: Values) -> TransformerConfig:
    return TransformerConfig(**read_fields(path, values, TRANSFORMER_FIELDS))


def infer_transformer(shapes: Shapes) -> TransformerConfig:
    """What no shape shows, θ, is the released models'."""
    hd = shapes["single_blocks.0.norm.query_norm.scale"][0]
    d = shapes["img_in.weight"][0]
    return TransformerConfig(
        double_blocks=count_numbered(shapes, r"double_blocks\.(\d+)\."),
        single_blocks=count_numbered(shapes, r"single_blocks\.(\d+)\."),
        heads=d // hd,
        axes=(hd // 4,) * 4,
        d_latent=shapes["img_in.weight"][1],
        d_text=shapes["txt_in.weight"][1],
        mlp_ratio=shapes["double_blocks.0.img_mlp.0.weight"][0] / (2 * d),
        d_time=shapes["time_in.in_layer.weight"][1],
    )


def format_transformer(cfg: TransformerConfig) -> Values:
    numbers = {"attention_head_dim": cfg.hd, "rope_theta": int(cfg.theta)}
    return read_layout("transformer/config.json") | format_fields(cfg, TRANSFORMER_FIELDS) | numbers


def find_odd_axes(cfg: TransformerConfig) -> list[str]:
    wrong = [f"{a} channels of a position axis are odd" for a in cfg.axes if a % 2]
    if cfg.d > 2**17:
        wrong.append("the width is beyond reason")
    if cfg.d_time % 2:
        wrong.append("timestep channels are odd")
    return wrong


# ---------------------------------------------------------------- the autoencoder

AUTOENCODER_FIELDS = {
    "channels": Field("block_out_channels", *WIDTH, FOUR),
    "decoder_channels": Field("decoder_block_out_channels", *WIDTH, FOUR),
    "layers": Field("layers_per_block", int, 1, 64),
    "latent_channels": Field("latent_channels", int, 1, 4096),
    "groups": Field("norm_num_groups", *WIDTH),
    "bn_eps": Field("batch_norm_eps", *EPS),
}


def parse_autoencoder(path: Path, values: Values, index: Values) -> AutoencoderConfig:
    fields = dict(AUTOENCODER_FIELDS)
    if not values.get("decoder_block_out_channels"):
        del fields["decoder_channels"]
    return AutoencoderConfig(**read_fields(path, values, fields))


def infer_autoencoder(shapes: Shapes) -> AutoencoderConfig:
    """From a single file in its own names or in the folders', which count the decoder's levels from the coarse end."""
    if "encoder.down.0.block.0.conv1.weight" in shapes:
        down = [shapes[f"encoder.down.{i}.block.0.conv1.weight"][0] for i in range(4)]
        up = [shapes[f"decoder.up.{i}.block.0.conv1.weight"][0] for i in range(4)]
        moments = shapes["encoder.quant_conv.weight"][0]
    else:
        down = [shapes[f"encoder.down_blocks.{i}.resnets.0.conv1.weight"][0] for i in range(4)]
        up = [shapes[f"decoder.up_blocks.{3 - i}.resnets.0.conv1.weight"][0] for i in range(4)]
        moments = shapes["quant_conv.weight"][0]
    return AutoencoderConfig(
        channels=tuple(down),
        decoder_channels=tuple(up),
        layers=count_numbered(shapes, r"encoder\.down(?:_blocks)?\.0\.(?:block|resnets)\.(\d+)\."),
        latent_channels=moments // 2,
        groups=math.gcd(AutoencoderConfig.groups, *down, *up),
    )


def format_autoencoder(cfg: AutoencoderConfig) -> Values:
    return read_layout("vae/config.json") | format_fields(cfg, AUTOENCODER_FIELDS)


def find_uneven_groups(cfg: AutoencoderConfig) -> list[str]:
    channels = {*cfg.channels, *(cfg.decoder_channels or ())}
    return [f"{c} channels are no whole number of {cfg.groups} groups" for c in channels if c % cfg.groups]


# ---------------------------------------------------------------- the family


KV_PIPELINE = "Flux2KleinKVPipeline"


def encode(encoder: TextEncoder, tokenizer: Tokenizer, prompts: list[str], max_length: int) -> mx.array:
    return encoder(*tokenize(tokenizer, prompts, max_length))


def read_variant(folder: ModelFolder, cfg: TransformerConfig) -> Variant:
    kv = folder.index.get("_class_name") == KV_PIPELINE
    return Variant(folder.index.get("is_distilled", False), kv, schedule)


def read_file_name(name: str) -> tuple[bool, bool] | None:
    """Whether a single file is distilled, and whether it is a KV model: its header says neither, so its name must."""
    name = name.lower()
    kv = re.search(r"-kv\b", name) is not None
    return ("base" not in name, kv) if kv or "klein" in name else None


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
    signature="double_blocks.0.img_attn.qkv.weight",
    transformer=PartFormat(
        config=TransformerConfig,
        network=Transformer,
        fields=TRANSFORMER_FIELDS,
        names=TRANSFORMER_NAMES,
        parse=parse_transformer,
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
        parse=parse_autoencoder,
        format=format_autoencoder,
        infer=infer_autoencoder,
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
    sizes={7680: ("4B", "Qwen3-4B"), 12288: ("9B", "Qwen3-8B")},
    encoders={2560: ("Qwen3-4B", "4B"), 4096: ("Qwen3-8B", "9B")},
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
