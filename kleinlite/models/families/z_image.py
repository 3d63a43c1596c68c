"""Z-Image: chapter 17."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from ...checkpoints import Rule
from ...text_encoder import TextEncoderConfig
from ...z_image import (
    PLAIN_TEMPLATE,
    Flux1Autoencoder,
    Flux1AutoencoderConfig,
    ZImageConfig,
    ZImageTransformer,
    encode_caption,
    z_image_velocity_field,
)
from ..files import ModelFolder
from ..part_format import (
    AXIS,
    BASE,
    COUNT,
    EPS,
    WIDTH,
    Field,
    PartFormat,
    Shapes,
    Values,
    check_words,
    read_fields,
    read_layout,
)  # fmt: skip
from .family import Configs, Family, Variant, encode_each, shifted_schedule
from .klein import KLEIN, infer_levels, read_scheduler
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


# ---------------------------------------------------------------- the autoencoder, which is FLUX.1's

FLUX1_AUTOENCODER_FIELDS = {
    **{name: KLEIN.autoencoder.fields[name] for name in ("channels", "layers", "latent_channels", "groups")},
    "scale": Field("scaling_factor", float, 1e-6, 1e6),
    "shift": Field("shift_factor", float, -1e6, 1e6),
}


# ---------------------------------------------------------------- the family


def read_variant(folder: ModelFolder, cfg: ZImageConfig) -> Variant:
    says = read_scheduler(folder)
    check_words(folder.part("scheduler"), says, {"use_dynamic_shifting": False}, says.keys() - {"use_dynamic_shifting"})
    shift = says["shift"]
    return Variant(distilled=shift == TURBO_SHIFT, kv=False, schedule=partial(shifted_schedule, shift=shift))


Z_IMAGE_NAMES: list[Rule] = [  # our own names are those of ComfyUI's single file
    Rule(r"^x_embedder", ["all_x_embedder.2-1"]),
    Rule(r"^final_layer", ["all_final_layer.2-1"]),
    Rule(r"attention\.qkv", ["attention.to_q", "attention.to_k", "attention.to_v"]),
    Rule(r"attention\.out", ["attention.to_out.0"]),
    Rule(r"attention\.(q|k)_norm", [r"attention.norm_\1"]),
]

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
        layout=read_layout("transformer/z_image.json"),
        repeated=lambda cfg: {"dim": cfg.d, "in_channels": cfg.d_latent // 4, "n_kv_heads": cfg.heads},
        infer=infer_transformer,
        is_used=lambda cfg, name: not name.endswith("norm_final.weight"),  # which some files have and nobody applies
    ),
    text_encoder=replace(QWEN3, own_parse=parse_last_but_one),
    autoencoder=replace(
        KLEIN.autoencoder,
        config=Flux1AutoencoderConfig,
        network=Flux1Autoencoder,
        fields=FLUX1_AUTOENCODER_FIELDS,
        layout=KLEIN.autoencoder.layout
        | {"_class_name": "AutoencoderKL", "use_quant_conv": False, "use_post_quant_conv": False},
        optional=(),
        infer=partial(infer_levels, config=Flux1AutoencoderConfig),
        others=(),
    ),
    released={"z-image": Configs(ZImageConfig(), TextEncoderConfig(out_layers=(35,)), Flux1AutoencoderConfig())},
    defaults={True: (8, 0.0), False: (50, 4.0)},
    template=PLAIN_TEMPLATE,
    no_guidance=0.0,
    guidance_fixed=False,
    edits=False,
    encode=partial(encode_each, encode_caption),
    schedule=partial(shifted_schedule, shift=TURBO_SHIFT),
    read_variant=read_variant,
    velocity_field=z_image_velocity_field,
    trains=False,
    lora_duplicates=(
        (r"attention([._])out$", r"attention\1to_out\g<1>0"),
        (r"attention([._])qkv$", r"attention\1to_q"),
    ),
)
