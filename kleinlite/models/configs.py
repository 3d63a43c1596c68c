"""What a model's numbers are called outside: config.json's words, shapes in a header, and the names of other models.

Hand-written, and dull on purpose: chapter 8 shows what it is for. Each part's config.json becomes the dataclass of its
chapter and, for writing a model, the way back; a single file has no config.json, so its shapes must tell.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ..autoencoder import AutoencoderConfig
from ..checkpoints import read_header
from ..errors import printable
from ..text_encoder import TextEncoderConfig
from ..transformer import TransformerConfig
from ..z_image import ScaledAutoencoderConfig, ZImageConfig
from .files import check_weights_file, read_json
from .registry import MODELS

Config = TransformerConfig | ZImageConfig | AutoencoderConfig | TextEncoderConfig
UNNAMED = Path("config.json")

# ---------------------------------------------------------------- the released sizes

RELEASED_CONFIGS = {  # transformer and text encoder
    "4b": (TransformerConfig(), TextEncoderConfig()),
    "9b": (
        TransformerConfig(double_blocks=8, single_blocks=24, heads=32, d_text=12288),
        TextEncoderConfig(d=4096, d_mlp=12288, tied=False),
    ),
    "z-image": (ZImageConfig(), TextEncoderConfig(taps=(35,))),
}
RELEASED_AUTOENCODERS = {"4b": AutoencoderConfig(), "9b": AutoencoderConfig(), "z-image": ScaledAutoencoderConfig()}

# ---------------------------------------------------------------- one gate: types and ranges


class Whole(NamedTuple):
    """A whole number, from `low` to `high`."""

    low: int
    high: int

    def check(self, value: object) -> bool:
        return type(value) is int and self.low <= value <= self.high

    def __str__(self) -> str:
        return f"a whole number from {self.low:,} to {self.high:,}"


class Real(NamedTuple):
    """A number, from `low` to `high`; not NaN."""

    low: float
    high: float

    def check(self, value: object) -> bool:
        return type(value) in (int, float) and self.low <= value <= self.high

    def __str__(self) -> str:
        return f"a number from {self.low:g} to {self.high:g}"


class Flag(NamedTuple):
    """True or false."""

    def check(self, value: object) -> bool:
        return type(value) is bool

    def __str__(self) -> str:
        return "true or false"


class Several(NamedTuple):
    """From `least` to `most` whole numbers of a kind."""

    least: int
    most: int
    kind: Whole

    def check(self, value: object) -> bool:
        several = isinstance(value, (list, tuple)) and self.least <= len(value) <= self.most
        return several and all(map(self.kind.check, value))

    def __str__(self) -> str:
        count = f"{self.least}" if self.least == self.most else f"{self.least} to {self.most}"
        return f"a list of {count}, each {self.kind}"


Field = tuple[str, Whole | Real | Flag | Several]
WIDTH, COUNT, EPS, BASE = Whole(1, 2**17), Whole(1, 1000), Real(1e-12, 0.1), Real(1.0, 1e12)

# Our field → what config.json calls it, and what it may be.
TRANSFORMER_FIELDS: dict[str, Field] = {
    "double_blocks": ("num_layers", COUNT),
    "single_blocks": ("num_single_layers", COUNT),
    "heads": ("num_attention_heads", COUNT),
    "axes": ("axes_dims_rope", Several(4, 4, Whole(2, 1024))),
    "d_latent": ("in_channels", WIDTH),
    "d_text": ("joint_attention_dim", WIDTH),
    "mlp_ratio": ("mlp_ratio", Real(0.01, 100)),
    "theta": ("rope_theta", BASE),
    "d_time": ("timestep_guidance_channels", Whole(2, 2**17)),
}
AUTOENCODER_FIELDS: dict[str, Field] = {
    "channels": ("block_out_channels", Several(4, 4, WIDTH)),
    "decoder_channels": ("decoder_block_out_channels", Several(4, 4, WIDTH)),
    "layers": ("layers_per_block", Whole(1, 64)),
    "latent_channels": ("latent_channels", Whole(1, 4096)),
    "groups": ("norm_num_groups", WIDTH),
    "bn_eps": ("batch_norm_eps", EPS),
}
Z_IMAGE_FIELDS: dict[str, Field] = {
    "layers": ("n_layers", COUNT),
    "refiners": ("n_refiner_layers", Whole(0, 1000)),
    "heads": ("n_heads", COUNT),
    "axes": ("axes_dims", Several(3, 3, Whole(2, 1024))),
    "d_latent": ("in_channels", WIDTH),  # of a patch's four cells
    "d_text": ("cap_feat_dim", WIDTH),
    "theta": ("rope_theta", BASE),
    "eps": ("norm_eps", EPS),
}
SCALED_AUTOENCODER_FIELDS: dict[str, Field] = {
    **{field: AUTOENCODER_FIELDS[field] for field in ("channels", "layers", "latent_channels", "groups")},
    "scale": ("scaling_factor", Real(1e-6, 1e6)),
    "shift": ("shift_factor", Real(-1e6, 1e6)),
}
TEXT_ENCODER_FIELDS: dict[str, Field] = {
    "vocab": ("vocab_size", Whole(1, 2**24)),
    "d": ("hidden_size", WIDTH),
    "d_mlp": ("intermediate_size", Whole(1, 2**20)),
    "layers": ("num_hidden_layers", COUNT),
    "heads": ("num_attention_heads", COUNT),
    "kv_heads": ("num_key_value_heads", COUNT),
    "hd": ("head_dim", Whole(2, 1024)),
    "theta": ("rope_theta", BASE),
    "eps": ("rms_norm_eps", EPS),
    "tied": ("tie_word_embeddings", Flag()),
    "taps": ("text_encoder_out_layers", Several(1, 16, COUNT)),
    "tokens": ("max_sequence_length", Whole(1, 2**16)),
}
IMPLIED = {"text_encoder_out_layers": (9, 18, 27), "max_sequence_length": 512}  # where model_index.json is silent
FIELDS = {
    TransformerConfig: TRANSFORMER_FIELDS,
    ZImageConfig: Z_IMAGE_FIELDS,
    AutoencoderConfig: AUTOENCODER_FIELDS,
    ScaledAutoencoderConfig: SCALED_AUTOENCODER_FIELDS,
    TextEncoderConfig: TEXT_ENCODER_FIELDS,
}
INDEX_FIELDS: dict[str, Field] = {  # of model_index.json, beside what is said about the text encoder
    "is_distilled": ("is_distilled", Flag()),
    "sample_size": ("sample_size", Whole(16, 2**16)),
    "shift": ("shift", Real(0.01, 100)),
}


def check_field(path: Path, field: Field, value: object) -> None:
    """Refuse a value of the wrong type or out of range. Raises ValueError."""
    name, kind = field
    if not kind.check(value):
        raise ValueError(
            f"{path} says that {name} is {shorten(value)}, and it must be {kind}: is this another kind of model?"
        )


def shorten(value: object) -> str:
    """A value as text, for a sentence."""
    text = printable(repr(value))
    return text if len(text) <= 60 else f"{text[:60]}…"


def read_fields(path: Path, found: dict, fields: dict[str, Field]) -> dict:
    """Our fields from a config's words, each checked. Raises ValueError for what is missing or cannot be."""
    values = {}
    for field, (name, kind) in fields.items():
        if name not in found:
            raise ValueError(f"{path} says nothing about {name!r}: is this another kind of model?")
        check_field(path, (name, kind), found[name])
        values[field] = tuple(found[name]) if isinstance(kind, Several) else found[name]
    return values


def check_config(path: Path, cfg: Config) -> None:
    """Refuse numbers that contradict each other, or that are out of range. Raises ValueError."""
    fields = FIELDS[type(cfg)]
    for field, (name, kind) in fields.items():
        if (value := getattr(cfg, field)) is not None:
            check_field(path, (name, kind), value)
    if isinstance(cfg, (TransformerConfig, ZImageConfig)):
        wrong = [f"{a} channels of a position axis are odd" for a in cfg.axes if a % 2]
        wrong += ["the width is beyond reason"] * (cfg.d > 2**17)
        wrong += ["timestep channels are odd"] * (isinstance(cfg, TransformerConfig) and cfg.d_time % 2)
    elif isinstance(cfg, AutoencoderConfig):
        channels = {*cfg.channels, *(cfg.decoder_channels or ())}
        wrong = [f"{c} channels are no whole number of {cfg.groups} groups" for c in channels if c % cfg.groups]
    else:
        wrong = [f"{cfg.heads} heads do not share {cfg.kv_heads}"] * (cfg.heads % cfg.kv_heads > 0)
        wrong += ["head_dim is odd"] * (cfg.hd % 2)
    if wrong:
        raise ValueError(f"{path} contradicts itself ({'; '.join(wrong)}): is this another kind of model?")


# ---------------------------------------------------------------- config.json → dataclass


def parse_transformer_config(found: dict, path: Path = UNNAMED) -> TransformerConfig | ZImageConfig:
    """What config.json says of the transformer. Raises ValueError with a sentence about `path`."""
    if found.get("_class_name") == "ZImageTransformer2DModel":
        fields = read_fields(path, found, Z_IMAGE_FIELDS)
        return ZImageConfig(**fields | {"d_latent": 4 * fields["d_latent"]})
    return TransformerConfig(**read_fields(path, found, TRANSFORMER_FIELDS))


def parse_autoencoder_config(found: dict, path: Path = UNNAMED) -> AutoencoderConfig:
    """What config.json says of the autoencoder. Raises ValueError with a sentence about `path`."""
    if found.get("_class_name") == "AutoencoderKL":
        return ScaledAutoencoderConfig(**read_fields(path, found, SCALED_AUTOENCODER_FIELDS))
    fields = dict(AUTOENCODER_FIELDS)
    if not found.get("decoder_block_out_channels"):
        del fields["decoder_channels"]
    return AutoencoderConfig(**read_fields(path, found, fields))


def parse_text_encoder_config(found: dict, index: dict, path: Path = UNNAMED) -> TextEncoderConfig:
    """What config.json and model_index.json say of the text encoder. Raises ValueError with a sentence about `path`."""
    rope = found.get("rope_parameters")  # in here since transformers 5; the released files have rope_theta at the top
    moved = {"rope_theta": rope["rope_theta"]} if isinstance(rope, dict) and "rope_theta" in rope else {}
    said = {name: index.get(name, implied) for name, implied in IMPLIED.items()}
    layers = found.get("num_hidden_layers")
    if index.get("_class_name") == "ZImagePipeline" and "text_encoder_out_layers" not in index and type(layers) is int:
        said["text_encoder_out_layers"] = (layers - 1,)
    return TextEncoderConfig(**read_fields(path, moved | found | said, TEXT_ENCODER_FIELDS))


# ---------------------------------------------------------------- shapes → dataclass
# What no shape shows (θ, the groups of a norm, epsilons) is taken from the released models.


def count_numbered(names: Iterable[str], pattern: str) -> int:
    """How many numbers a list is numbered with: one more than the highest found in brackets."""
    return 1 + max((int(m[1]) for name in names if (m := re.match(pattern, name))), default=-1)


Z_IMAGE_SIGN = "layers.0.adaLN_modulation.0.weight"  # a tensor that only the transformers of this family have


def infer_transformer_config(shapes: dict[str, list[int]]) -> TransformerConfig | ZImageConfig:
    """A transformer's numbers from the shapes in a single file."""
    if Z_IMAGE_SIGN in shapes:
        d, d_latent = shapes["x_embedder.weight"][0], shapes["x_embedder.weight"][1]
        hd = shapes["layers.0.attention.q_norm.weight"][0]
        return ZImageConfig(
            layers=count_numbered(shapes, r"layers\.(\d+)\."),
            refiners=count_numbered(shapes, r"noise_refiner\.(\d+)\."),
            heads=d // hd,
            axes=(hd // 4, 3 * hd // 8, 3 * hd // 8),
            d_latent=d_latent,
            d_text=shapes["cap_embedder.0.weight"][0],
        )
    hd, d = shapes["single_blocks.0.norm.query_norm.scale"][0], shapes["img_in.weight"][0]
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


def infer_autoencoder_config(shapes: dict[str, list[int]]) -> AutoencoderConfig:
    """An autoencoder's numbers from the shapes in a single file, in the file's own set of names or the folders'."""
    ours = "encoder.down.0.block.0.conv1.weight" in shapes
    down, up = "encoder.down.{}.block.0.conv1.weight", "decoder.up.{}.block.0.conv1.weight"
    if not ours:  # the folders count the decoder's levels from the coarse end
        down, up = "encoder.down_blocks.{}.resnets.0.conv1.weight", "decoder.up_blocks.{}.resnets.0.conv1.weight"
    channels = tuple(shapes[down.format(i)][0] for i in range(4))
    decoder_channels = tuple(shapes[up.format(i if ours else 3 - i)][0] for i in range(4))
    layers = count_numbered(shapes, r"encoder\.down(?:_blocks)?\.0\.(?:block|resnets)\.(\d+)\.")
    if not any("quant_conv" in name for name in shapes):
        latent = shapes["encoder.conv_out.weight"][0] // 2
        groups = math.gcd(AutoencoderConfig.groups, *channels)
        return ScaledAutoencoderConfig(channels, layers=layers, latent_channels=latent, groups=groups)
    return AutoencoderConfig(
        channels=channels,
        decoder_channels=decoder_channels,
        layers=layers,
        latent_channels=shapes["encoder.quant_conv.weight" if ours else "quant_conv.weight"][0] // 2,
        groups=math.gcd(AutoencoderConfig.groups, *channels, *decoder_channels),
    )


# ---------------------------------------------------------------- dataclass → config.json


def format_fields(cfg: Config) -> dict:
    """The numbers of a dataclass in config.json's words: the way back from `read_fields`."""
    values = {name: getattr(cfg, field) for field, (name, _) in FIELDS[type(cfg)].items()}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items() if v is not None}


def format_transformer_config(cfg: TransformerConfig | ZImageConfig) -> dict:
    """The transformer's config.json, as diffusers writes it."""
    if isinstance(cfg, ZImageConfig):
        return format_fields(cfg) | {
            "_class_name": "ZImageTransformer2DModel", "all_f_patch_size": [1], "all_patch_size": [2],
            "axes_lens": [1536, 512, 512], "dim": cfg.d, "in_channels": cfg.d_latent // 4, "n_kv_heads": cfg.heads,
            "qk_norm": True, "t_scale": 1000.0,
        }  # fmt: skip
    return format_fields(cfg) | {
        "_class_name": "Flux2Transformer2DModel", "attention_head_dim": cfg.hd, "eps": 1e-6, "guidance_embeds": False,
        "out_channels": None, "patch_size": 1, "rope_theta": int(cfg.theta),
    }  # fmt: skip


def format_autoencoder_config(cfg: AutoencoderConfig, size: int) -> dict:
    """The autoencoder's config.json, as diffusers writes it. size: the model's default height and width in pixels."""
    levels = len(cfg.channels)
    return format_fields(cfg) | {
        "_class_name": "AutoencoderKLFlux2", "act_fn": "silu", "batch_norm_momentum": 0.1,
        "down_block_types": ["DownEncoderBlock2D"] * levels, "up_block_types": ["UpDecoderBlock2D"] * levels,
        "in_channels": 3, "out_channels": 3, "mid_block_add_attention": True, "patch_size": [2, 2], "sample_size": size,
        "use_quant_conv": True, "use_post_quant_conv": True,
    }  # fmt: skip


def format_text_encoder_config(cfg: TextEncoderConfig) -> dict:
    """The text encoder's config.json, as transformers writes it."""
    numbers = {name: value for name, value in format_fields(cfg).items() if name not in IMPLIED}
    return numbers | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "hidden_act": "silu",
        "max_position_embeddings": 40960, "use_sliding_window": False,
    }  # fmt: skip


def format_model_index(cfg: TextEncoderConfig, distilled: bool) -> dict:
    """A model's model_index.json, with the two fields that nano needs and the released files imply."""
    return {
        "_class_name": "Flux2KleinPipeline", "_diffusers_version": "0.37.0", "is_distilled": distilled,
        "max_sequence_length": cfg.tokens, "text_encoder_out_layers": list(cfg.taps),
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen3ForCausalLM"], "tokenizer": ["transformers", "Qwen2Tokenizer"],
        "transformer": ["diffusers", "Flux2Transformer2DModel"], "vae": ["diffusers", "AutoencoderKLFlux2"],
    }  # fmt: skip


# ---------------------------------------------------------------- other models


SIGNS = {  # tensors and words that only these models have
    "FLUX.1": ("vector_in.in_layer.weight", "double_blocks.0.img_mod.lin.weight", "pooled_projection_dim"),
    "FLUX.2 [dev]": ("guidance_in.in_layer.weight", "time_guidance_embed.guidance_embedder.linear_1.weight"),
}
CLASSES = {
    "FluxPipeline": "FLUX.1",
    "FluxTransformer2DModel": "FLUX.1",
    "Flux2Pipeline": "FLUX.2 [dev]",
    "Mistral3ForConditionalGeneration": "FLUX.2 [dev]'s text encoder, Mistral",
}


def unsupported_model(found: dict) -> str | None:
    """The name of another model whose index, config or header this is; None if it may be one of ours."""
    who = next((who for who, signs in SIGNS.items() if any(sign in found for sign in signs)), None)
    architectures = found.get("architectures")
    for name in (found.get("_class_name"), *(architectures if isinstance(architectures, list) else ())):
        if isinstance(name, str):
            known = ("Flux2Klein", "Flux2Transformer", "AutoencoderKLFlux2", "Qwen", "ZImage")
            known += ("AutoencoderKL",) * ("scaling_factor" in found)  # Z-Image's, which is FLUX.1's
            who = who or CLASSES.get(name) or (None if name.startswith(known) else f"a {printable(name)[:60]}")
    if found.get("joint_attention_dim") == 15360 or found.get("num_single_layers") == 48:
        who = "FLUX.2 [dev]"
    return who


def check_supported(path: Path, found: dict) -> None:
    """Refuse another model by its name."""
    if who := unsupported_model(found):
        ours = f"take {', '.join(MODELS)} or nano"
        raise ValueError(f"{path} is {who}, and kleinlite runs FLUX.2 [klein] and Z-Image-Turbo: {ours}.")


# ---------------------------------------------------------------- files → dataclass


def read_config(part: str, path: Path, index: dict | None = None) -> Config:
    """The numbers of one part, from its folder's config.json or its single file's header, checked.

    part: "transformer", "vae" or "text_encoder". index: what the model's model_index.json says.
    """
    if path.is_file():
        cfg = infer_config(part, path)
    else:
        path = path / "config.json"
        found = read_json(path)
        check_supported(path, found)
        if part == "text_encoder":
            cfg = parse_text_encoder_config(found, index or {}, path)
        else:
            cfg = (parse_transformer_config if part == "transformer" else parse_autoencoder_config)(found, path)
    check_config(path, cfg)
    return cfg


def infer_config(part: str, path: Path) -> Config:
    """The numbers that the shapes in a single file tell."""
    if part == "text_encoder":
        raise ValueError(f"{path} is one file; a text encoder is a folder with config.json: give that.")
    check_weights_file(path)
    header = {name.removeprefix("model.diffusion_model."): t for name, t in read_header(path).items()}
    check_supported(path, header)
    shapes = {name: list(t["shape"]) for name, t in header.items()}
    for name, t in header.items():
        if t["dtype"] == "U8" and name.endswith("weight") and t["shape"]:
            shapes[name][-1] *= 2  # two weights in a byte
    try:
        return infer_transformer_config(shapes) if part == "transformer" else infer_autoencoder_config(shapes)
    except KeyError as e:
        raise ValueError(f"{path} says nothing about {e}: is this another kind of model?") from None
    except (IndexError, ZeroDivisionError):
        raise ValueError(f"{path} has tensors of shapes that klein has not: is this another kind of model?") from None


def read_index(folder: Path) -> dict:
    """What a model's model_index.json says, checked as far as we use it."""
    path = folder / "model_index.json"
    index = read_json(path)
    check_supported(path, index)
    if "is_distilled" in index:
        check_field(path, INDEX_FIELDS["is_distilled"], index["is_distilled"])
    return index
