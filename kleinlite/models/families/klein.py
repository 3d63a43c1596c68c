"""FLUX.2 [klein]: chapters 1 to 6.

Our own names of tensors are those of the authors' single files.
"""

import math
import re
from functools import partial

import mlx.core as mx
from tokenizers import Tokenizer

from ...autoencoder import Autoencoder, AutoencoderConfig
from ...checkpoints import Rule, swap_halves
from ...sampling import schedule
from ...text_encoder import TextEncoder, TextEncoderConfig, tokenize
from ...transformer import Transformer, TransformerConfig
from ..files import ModelFolder, read_json
from ..part_format import (
    AXIS,
    BASE,
    COUNT,
    EPS,
    FOUR,
    WIDTH,
    Field,
    PartFormat,
    Shapes,
    Values,
    check_words,
    read_layout,
)  # fmt: skip
from .family import Configs, Family, Variant, shifted_schedule
from .qwen3 import QWEN3
from .taef2 import TAEF2, infer_taef2, is_taef2

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

# What our tensors are called in the released folders. A rule with three targets: ours is three of theirs, stacked.
TRANSFORMER_NAMES: list[Rule] = [
    Rule(r"^img_in", ["x_embedder"]),
    Rule(r"^txt_in", ["context_embedder"]),
    Rule(r"^time_in.in_layer", ["time_guidance_embed.timestep_embedder.linear_1"]),
    Rule(r"^time_in.out_layer", ["time_guidance_embed.timestep_embedder.linear_2"]),
    Rule(r"(_modulation.*)\.lin\.", [r"\1.linear."]),
    Rule(r"^final_layer.adaLN_modulation.1", ["norm_out.linear"], swap_halves),  # it is its own way back
    Rule(r"^final_layer.linear", ["proj_out"]),
    Rule(r"^single_blocks", ["single_transformer_blocks"]),
    Rule(r"linear1", ["attn.to_qkv_mlp_proj"]),
    Rule(r"linear2", ["attn.to_out"]),
    Rule(r"(single.*)\.norm\.query_norm\.scale", [r"\1.attn.norm_q.weight"]),
    Rule(r"(single.*)\.norm\.key_norm\.scale", [r"\1.attn.norm_k.weight"]),
    Rule(r"^double_blocks", ["transformer_blocks"]),
    Rule(r"img_attn.qkv", ["attn.to_q", "attn.to_k", "attn.to_v"]),
    Rule(r"txt_attn.qkv", ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"]),
    Rule(r"img_attn.norm.query_norm.scale", ["attn.norm_q.weight"]),
    Rule(r"img_attn.norm.key_norm.scale", ["attn.norm_k.weight"]),
    Rule(r"txt_attn.norm.query_norm.scale", ["attn.norm_added_q.weight"]),
    Rule(r"txt_attn.norm.key_norm.scale", ["attn.norm_added_k.weight"]),
    Rule(r"img_attn.proj", ["attn.to_out.0"]),
    Rule(r"txt_attn.proj", ["attn.to_add_out"]),
    Rule(r"img_mlp.0", ["ff.linear_in"]),
    Rule(r"img_mlp.2", ["ff.linear_out"]),
    Rule(r"txt_mlp.0", ["ff_context.linear_in"]),
    Rule(r"txt_mlp.2", ["ff_context.linear_out"]),
]


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


# ---------------------------------------------------------------- the autoencoder

AUTOENCODER_FIELDS = {
    "channels": Field("block_out_channels", *WIDTH, FOUR),
    "decoder_channels": Field("decoder_block_out_channels", *WIDTH, FOUR),
    "layers": Field("layers_per_block", int, 1, 64),
    "latent_channels": Field("latent_channels", int, 1, 4096),
    "groups": Field("norm_num_groups", *WIDTH),
    "bn_eps": Field("batch_norm_eps", *EPS),
}

AUTOENCODER_NAMES: list[Rule] = [
    Rule(r"^encoder.quant_conv", ["quant_conv"]),
    Rule(r"^decoder.post_quant_conv", ["post_quant_conv"]),
    Rule(r"\.down\.(\d)", [r".down_blocks.\1"]),
    Rule(r"\.up\.0", [".up_blocks.3"]),  # the folders count the decoder's levels from the coarse end,
    Rule(r"\.up\.1", [".up_blocks.2"]),  # the single file from the fine end
    Rule(r"\.up\.2", [".up_blocks.1"]),
    Rule(r"\.up\.3", [".up_blocks.0"]),
    Rule(r"\.block\.(\d)", [r".resnets.\1"]),
    Rule(r"\.downsample\.", [".downsamplers.0."]),
    Rule(r"\.upsample\.", [".upsamplers.0."]),
    Rule(r"mid\.block_1", ["mid_block.resnets.0"]),
    Rule(r"mid\.block_2", ["mid_block.resnets.1"]),
    Rule(r"mid\.attn_1\.norm", ["mid_block.attentions.0.group_norm"]),
    Rule(r"mid\.attn_1\.proj_out", ["mid_block.attentions.0.to_out.0"]),
    Rule(r"mid\.attn_1\.(q|k|v)\.", [r"mid_block.attentions.0.to_\1."]),
    Rule(r"nin_shortcut", ["conv_shortcut"]),
    Rule(r"norm_out", ["conv_norm_out"]),
]


def infer_levels(shapes: Shapes, config: type[AutoencoderConfig] = AutoencoderConfig) -> AutoencoderConfig:
    """What no shape shows is the released model's. Z-Image's is of the same make."""
    down = [shapes[f"encoder.down.{i}.block.0.conv1.weight"][0] for i in range(4)]
    up = [shapes[f"decoder.up.{i}.block.0.conv1.weight"][0] for i in range(4)]
    return config(
        channels=tuple(down),
        decoder_channels=tuple(up),
        layers=shapes.count("encoder.down.0.block.{}.conv1.weight"),
        latent_channels=shapes["encoder.conv_out.weight"][0] // 2,
        groups=math.gcd(AutoencoderConfig.groups, *down, *up),
    )


# ---------------------------------------------------------------- the scheduler

SHIFT = Field("shift", float, 0.01, 100)
DYNAMIC = Field("use_dynamic_shifting", bool)
CLASS = "FlowMatchEulerDiscreteScheduler"
LEFT_OUT = {"shift": 1.0, "use_dynamic_shifting": False, "_class_name": CLASS}
SCHEDULER = read_layout("scheduler/scheduler_config.json") | {
    "shift_terminal": (None, 0), "use_flow_sigmas": False, "class": CLASS,
}  # fmt: skip


def read_scheduler(folder: ModelFolder) -> Values:
    """What a model's scheduler says, with diffusers' values of what it leaves out. Raises UserError."""
    path = folder.part("scheduler") / "scheduler_config.json"
    says = LEFT_OUT | read_json(path)
    SHIFT.check(path, says["shift"])
    DYNAMIC.check(path, says["use_dynamic_shifting"])
    named = folder.index.get("scheduler") or CLASS
    for name in (says["_class_name"], named[-1] if isinstance(named, list) else named):
        check_words(path, says | {"class": name}, SCHEDULER, LEFT_OUT)
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
    distilled = folder.index.get("is_distilled", False)
    Field("is_distilled", bool).check(folder.path / "model_index.json", distilled)
    return Variant(distilled, kv, levels)


def read_file_name(name: str) -> tuple[bool, bool] | None:
    """Whether a single file is distilled, and whether it is a KV model: its header says neither, so its name must."""
    name = name.lower()
    kv = re.search(r"(?<![a-z])(\d+b)?kv(?![a-z])", name) is not None
    base = re.search(r"(?<![a-z])(klein)?(\d+b)?base(?![a-z])", name) is not None  # not "baseball"
    return (not base, kv) if kv or "klein" in name else None


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
        layout=read_layout("transformer/config.json"),
        repeated=lambda cfg: {"attention_head_dim": cfg.head_dim, "rope_theta": int(cfg.theta)},
        infer=infer_transformer,
    ),
    text_encoder=QWEN3,
    autoencoder=PartFormat(
        config=AutoencoderConfig,
        network=Autoencoder,
        fields=AUTOENCODER_FIELDS,
        names=AUTOENCODER_NAMES,
        anchor="decoder.conv_in.weight",
        layout=read_layout("vae/config.json"),
        optional=("decoder_channels",),
        computed={"act_fn": ("silu", "swish")},
        infer=lambda shapes: infer_taef2(shapes) if is_taef2(shapes) else infer_levels(shapes),
        others=(TAEF2,),
    ),
    released={
        "4b": Configs(TransformerConfig(), TextEncoderConfig(), AutoencoderConfig()),
        "9b": Configs(
            TransformerConfig(double_blocks=8, single_blocks=24, heads=32, d_text=12288),
            TextEncoderConfig(d=4096, d_mlp=12288, tied=False),
            AutoencoderConfig(),
        ),
    },
    defaults={True: (4, 1.0), False: (50, 4.0)},
    encode=encode,
    schedule=schedule,
    read_variant=read_variant,
    read_file_name=read_file_name,
    kv_pipeline=KV_PIPELINE,
    lora_aliases={  # diffusers' names after it has fused the three
        "transformer_blocks.{i}.attn.to_qkv": "double_blocks.{i}.img_attn.qkv",
        "transformer_blocks.{i}.attn.to_added_qkv": "double_blocks.{i}.txt_attn.qkv",
    },
    lora_widths={256: "klein-nano", 3072: "klein 4B", 4096: "klein 9B", 6144: "FLUX.2 [dev]"},
)
