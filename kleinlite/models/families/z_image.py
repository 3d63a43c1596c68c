"""Z-Image: chapter 15."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from ...autoencoder import AutoencoderConfig
from ...checkpoints import Rule
from ...text_encoder import TextEncoder, TextEncoderConfig
from ...z_image import (
    Flux1Autoencoder,
    Flux1AutoencoderConfig,
    ZImageConfig,
    ZImageTransformer,
    encode_caption,
    z_image_velocity_field,
)
from ..fields import AXIS, BASE, COUNT, EPS, WIDTH, Field, check_words, format_fields, read_fields, read_layout
from ..files import ModelFolder
from ..names import AUTOENCODER_NAMES
from .family import Configs, Family, Features, LoraNames, PartFormat, Shapes, Values, Variant, shifted_schedule
from .klein import AUTOENCODER_FIELDS, AUTOENCODER_WORDS, find_odd_axes, find_uneven_groups, read_scheduler
from .qwen3 import QWEN3, parse_last_but_one

TURBO_SHIFT = 3.0  # of Turbo's schedule; another number is another model's

# ---------------------------------------------------------------- the transformer

TRANSFORMER_FIELDS = {
    "layers": Field("n_layers", *COUNT),
    "refiners": Field("n_refiner_layers", int, 0, 1000),
    "heads": Field("n_heads", *COUNT),
    "axes": Field("axes_dims", *AXIS, (3, 3)),
    "d_latent": Field("in_channels", *WIDTH),  # of one of a patch's four cells
    "d_text": Field("cap_feat_dim", *WIDTH),
    "theta": Field("rope_theta", *BASE),
    "eps": Field("norm_eps", *EPS),
}


def parse_transformer(path: Path, values: Values, index: Values) -> ZImageConfig:
    numbers = read_fields(path, values, TRANSFORMER_FIELDS)
    return ZImageConfig(**numbers | {"d_latent": 4 * numbers["d_latent"]})


def infer_transformer(shapes: Shapes) -> ZImageConfig:
    """What no shape shows (θ, epsilon) is the released model's."""
    d, d_latent = shapes["x_embedder.weight"]
    hd = shapes["layers.0.attention.q_norm.weight"][0]
    return ZImageConfig(
        layers=shapes.count("layers.{}.feed_forward.w1.weight"),
        refiners=shapes.count("noise_refiner.{}.feed_forward.w1.weight"),
        heads=d // hd,
        axes=(hd // 4, 3 * hd // 8, 3 * hd // 8),
        d_latent=d_latent,
        d_text=shapes["cap_embedder.0.weight"][0],
    )


def format_transformer(cfg: ZImageConfig) -> Values:
    numbers = {"dim": cfg.d, "in_channels": cfg.d_latent // 4, "n_kv_heads": cfg.heads}
    return read_layout("transformer/z_image.json") | format_fields(cfg, TRANSFORMER_FIELDS) | numbers


def is_used(cfg: ZImageConfig, name: str) -> bool:
    """False for a norm that some files have and nobody applies."""
    return not name.endswith("norm_final.weight")


# ---------------------------------------------------------------- the autoencoder, which is FLUX.1's

FLUX1_AUTOENCODER_FIELDS = {
    **{name: AUTOENCODER_FIELDS[name] for name in ("channels", "layers", "latent_channels", "groups")},
    "scale": Field("scaling_factor", float, 1e-6, 1e6),
    "shift": Field("shift_factor", float, -1e6, 1e6),
}


def infer_autoencoder(shapes: Shapes) -> Flux1AutoencoderConfig:
    """What no shape shows (scale, shift) is the released model's."""
    channels = tuple(shapes[f"encoder.down.{i}.block.0.conv1.weight"][0] for i in range(4))
    return Flux1AutoencoderConfig(
        channels,
        layers=shapes.count("encoder.down.0.block.{}.conv1.weight"),
        latent_channels=shapes["encoder.conv_out.weight"][0] // 2,
        groups=math.gcd(AutoencoderConfig.groups, *channels),
    )


def format_autoencoder(cfg: Flux1AutoencoderConfig) -> Values:
    words = {"_class_name": "AutoencoderKL", "use_quant_conv": False, "use_post_quant_conv": False}
    return read_layout("vae/config.json") | format_fields(cfg, FLUX1_AUTOENCODER_FIELDS) | words


# ---------------------------------------------------------------- the family


def encode(encoder: TextEncoder, tokenizer: Tokenizer, prompts: list[str], max_length: int) -> Features:
    return [encode_caption(encoder, tokenizer, prompt, max_length) for prompt in prompts]


def read_variant(folder: ModelFolder, cfg: ZImageConfig) -> Variant:
    says = read_scheduler(folder)
    check_words(folder.part("scheduler"), says, {"use_dynamic_shifting": False}, says.keys() - {"use_dynamic_shifting"})
    shift = says["shift"]
    return Variant(distilled=shift == TURBO_SHIFT, kv=False, schedule=partial(shifted_schedule, shift=shift))


BLOCK_MATRICES = (
    "attention.qkv", "attention.out", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3", "adaLN_modulation.0",
)  # fmt: skip
Z_IMAGE_NAMES: list[Rule] = [  # our own names are those of ComfyUI's single file
    Rule(r"^x_embedder", ["all_x_embedder.2-1"]),
    Rule(r"^final_layer", ["all_final_layer.2-1"]),
    Rule(r"attention\.qkv", ["attention.to_q", "attention.to_k", "attention.to_v"]),
    Rule(r"attention\.out", ["attention.to_out.0"]),
    Rule(r"attention\.(q|k)_norm", [r"attention.norm_\1"]),
]

LORA_NAMES = LoraNames(
    matrices=(
        *(f"{b}.{{i}}.{m}" for b in ("layers", "noise_refiner", "context_refiner") for m in BLOCK_MATRICES),
        "cap_embedder.1", "t_embedder.mlp.0", "t_embedder.mlp.2",
    ),
    aliases={},
    distinctive=r"(noise|context)_refiner|cap_embedder|(^|[._])layers[._]\d+[._](attention|feed_forward|adaLN)",
    widths={3840: "Z-Image"},
    readers=("attention.qkv",),
    duplicates=(
        (r"attention([._])out$", r"attention\1to_out\g<1>0"),
        (r"attention([._])qkv$", r"attention\1to_q"),
    ),
)  # fmt: skip
Z_IMAGE = Family(
    title="Z-Image",
    example="z-image-turbo",
    pipelines=("ZImage",),
    classes=("ZImageTransformer",),
    transformer=PartFormat(
        config=ZImageConfig,
        network=ZImageTransformer,
        fields=TRANSFORMER_FIELDS,
        names=Z_IMAGE_NAMES,
        anchor="layers.0.adaLN_modulation.0.weight",
        computed={"siglip_feat_dim": None},
        own_parse=parse_transformer,
        format=format_transformer,
        infer=infer_transformer,
        contradictions=find_odd_axes,
        is_used=is_used,
    ),
    text_encoder=replace(QWEN3, own_parse=parse_last_but_one),
    autoencoder=PartFormat(
        config=Flux1AutoencoderConfig,
        network=Flux1Autoencoder,
        fields=FLUX1_AUTOENCODER_FIELDS,
        names=AUTOENCODER_NAMES,
        anchor="decoder.conv_in.weight",
        computed=AUTOENCODER_WORDS,
        format=format_autoencoder,
        infer=infer_autoencoder,
        contradictions=find_uneven_groups,
    ),
    lora=LORA_NAMES,
    released={"z-image": Configs(ZImageConfig(), TextEncoderConfig(out_layers=(35,)), Flux1AutoencoderConfig())},
    defaults={True: (8, 0.0), False: (50, 4.0)},
    no_guidance=0.0,
    guidance_fixed=False,
    edits=False,
    encode=encode,
    schedule=partial(shifted_schedule, shift=TURBO_SHIFT),
    read_variant=read_variant,
    velocity_field=z_image_velocity_field,
    trains=False,
)
