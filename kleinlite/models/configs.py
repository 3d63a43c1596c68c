"""What a model's numbers are called outside: config.json's words, shapes in a header, and the names of other models.

Hand-written, and dull on purpose: chapter 8 shows what it is for. Each part's config.json becomes the dataclass of its
chapter and, for writing a model, the way back; a single file has no config.json, so its shapes must tell.
"""

import json
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
LAYOUT = Path(__file__).parent / "layout"

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


class Field(NamedTuple):
    """What config.json calls a number of ours, and what it may be: one of this kind, or so many in a list."""

    name: str
    kind: type[int | float | bool]
    low: float = 0
    high: float = 1
    count: tuple[int, int] | None = None  # at least and at most, of a list

    def check(self, path: Path, value: object) -> None:
        """Refuse a value of the wrong type or out of range. Raises ValueError."""
        types = (int, float) if self.kind is float else (self.kind,)
        fits = lambda v: type(v) in types and self.low <= v <= self.high
        if self.count is None:
            right = fits(value)
        else:
            right = isinstance(value, (list, tuple)) and self.count[0] <= len(value) <= self.count[1]
            right = right and all(map(fits, value))
        if not right:
            told = f"says that {self.name} is {shorten(value)}, and it must be {self.allowed}"
            raise ValueError(f"{path} {told}: is this another kind of model?")

    @property
    def allowed(self) -> str:
        """What it may be, in words."""
        whole = f"a whole number from {self.low:,} to {self.high:,}"
        one = {int: whole, float: f"a number from {self.low:g} to {self.high:g}", bool: "true or false"}[self.kind]
        if self.count is None:
            return one
        return f"a list of {' to '.join(str(n) for n in dict.fromkeys(self.count))}, each {one}"


WIDTH, COUNT, EPS, BASE = (int, 1, 2**17), (int, 1, 1000), (float, 1e-12, 0.1), (float, 1.0, 1e12)
AXIS, FOUR = (int, 2, 1024), (4, 4)

# By our own names: what config.json calls them, and what they may be.
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
AUTOENCODER_FIELDS = {
    "channels": Field("block_out_channels", *WIDTH, FOUR),
    "decoder_channels": Field("decoder_block_out_channels", *WIDTH, FOUR),
    "layers": Field("layers_per_block", int, 1, 64),
    "latent_channels": Field("latent_channels", int, 1, 4096),
    "groups": Field("norm_num_groups", *WIDTH),
    "bn_eps": Field("batch_norm_eps", *EPS),
}
Z_IMAGE_FIELDS = {
    "layers": Field("n_layers", *COUNT),
    "refiners": Field("n_refiner_layers", int, 0, 1000),
    "heads": Field("n_heads", *COUNT),
    "axes": Field("axes_dims", *AXIS, (3, 3)),
    "d_latent": Field("in_channels", *WIDTH),  # of a patch's four cells
    "d_text": Field("cap_feat_dim", *WIDTH),
    "theta": Field("rope_theta", *BASE),
    "eps": Field("norm_eps", *EPS),
}
SCALED_AUTOENCODER_FIELDS = {
    **{field: AUTOENCODER_FIELDS[field] for field in ("channels", "layers", "latent_channels", "groups")},
    "scale": Field("scaling_factor", float, 1e-6, 1e6),
    "shift": Field("shift_factor", float, -1e6, 1e6),
}
TEXT_ENCODER_FIELDS = {
    "vocab": Field("vocab_size", int, 1, 2**24),
    "d": Field("hidden_size", *WIDTH),
    "d_mlp": Field("intermediate_size", int, 1, 2**20),
    "layers": Field("num_hidden_layers", *COUNT),
    "heads": Field("num_attention_heads", *COUNT),
    "kv_heads": Field("num_key_value_heads", *COUNT),
    "hd": Field("head_dim", *AXIS),
    "theta": Field("rope_theta", *BASE),
    "eps": Field("rms_norm_eps", *EPS),
    "tied": Field("tie_word_embeddings", bool),
    "taps": Field("text_encoder_out_layers", *COUNT, (1, 16)),
    "tokens": Field("max_sequence_length", int, 1, 2**16),
}
IMPLIED = {"text_encoder_out_layers": (9, 18, 27), "max_sequence_length": 512}  # where model_index.json is silent
FIELDS = {
    TransformerConfig: TRANSFORMER_FIELDS,
    ZImageConfig: Z_IMAGE_FIELDS,
    AutoencoderConfig: AUTOENCODER_FIELDS,
    ScaledAutoencoderConfig: SCALED_AUTOENCODER_FIELDS,
    TextEncoderConfig: TEXT_ENCODER_FIELDS,
}
# Not of a network's config: in model_index.json, the autoencoder's and the scheduler's.
IS_DISTILLED, SAMPLE_SIZE = Field("is_distilled", bool), Field("sample_size", int, 16, 2**16)
SCHEDULE_SHIFT = Field("shift", float, 0.01, 100)


def shorten(value: object) -> str:
    """A value as text, for a sentence."""
    text = printable(repr(value))
    return text if len(text) <= 60 else f"{text[:60]}…"


def read_fields(path: Path, found: dict, fields: dict[str, Field]) -> dict:
    """Our fields from a config's words, each checked. Raises ValueError for what is missing or cannot be."""
    for field in fields.values():
        if field.name not in found:
            raise ValueError(f"{path} says nothing about {field.name!r}: is this another kind of model?")
        field.check(path, found[field.name])
    return {ours: tuple(found[f.name]) if f.count else found[f.name] for ours, f in fields.items()}


def check_config(path: Path, cfg: Config) -> None:
    """Refuse numbers that contradict each other, or that are out of range. Raises ValueError."""
    for ours, field in FIELDS[type(cfg)].items():
        if (value := getattr(cfg, ours)) is not None:
            field.check(path, value)
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


Z_IMAGE_TENSOR = "layers.0.adaLN_modulation.0.weight"  # a tensor that only the transformers of this family have


def infer_transformer_config(shapes: dict[str, list[int]]) -> TransformerConfig | ZImageConfig:
    """A transformer's numbers from the shapes in a single file."""
    if Z_IMAGE_TENSOR in shapes:
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
# What diffusers and transformers write beside our numbers is kept as they write it, in the folder `layout`.


def read_layout(file: str) -> dict:
    """A config.json of the released layout, without a model's own numbers."""
    return json.loads((LAYOUT / file).read_text("utf-8"))


def format_fields(cfg: Config) -> dict:
    """The numbers of a dataclass in config.json's words: the way back from `read_fields`."""
    values = {field.name: getattr(cfg, ours) for ours, field in FIELDS[type(cfg)].items()}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items() if v is not None}


def format_transformer_config(cfg: TransformerConfig | ZImageConfig) -> dict:
    """The transformer's config.json, as diffusers writes it."""
    if isinstance(cfg, ZImageConfig):
        numbers = {"dim": cfg.d, "in_channels": cfg.d_latent // 4, "n_kv_heads": cfg.heads}
        return read_layout("transformer/z_image.json") | format_fields(cfg) | numbers
    numbers = {"attention_head_dim": cfg.hd, "rope_theta": int(cfg.theta)}
    return read_layout("transformer/config.json") | format_fields(cfg) | numbers


def format_autoencoder_config(cfg: AutoencoderConfig, size: int) -> dict:
    """The autoencoder's config.json, as diffusers writes it. size: the model's default height and width in pixels."""
    return read_layout("vae/config.json") | format_fields(cfg) | {"sample_size": size}


def format_text_encoder_config(cfg: TextEncoderConfig) -> dict:
    """The text encoder's config.json, as transformers writes it."""
    numbers = {name: value for name, value in format_fields(cfg).items() if name not in IMPLIED}
    return read_layout("text_encoder/config.json") | numbers


def format_model_index(cfg: TextEncoderConfig, distilled: bool) -> dict:
    """A model's model_index.json, with the two fields that nano needs and the released files imply."""
    numbers = {"max_sequence_length": cfg.tokens, "text_encoder_out_layers": list(cfg.taps)}
    return read_layout("model_index.json") | {"is_distilled": distilled} | numbers


# ---------------------------------------------------------------- other models


DISTINCTIVE_NAMES = {  # tensors and words that only these models have
    "FLUX.1": ("vector_in.in_layer.weight", "double_blocks.0.img_mod.lin.weight", "pooled_projection_dim"),
    "FLUX.2 [dev]": ("guidance_in.in_layer.weight", "time_guidance_embed.guidance_embedder.linear_1.weight"),
}
OTHER_CLASSES = {
    "FluxPipeline": "FLUX.1",
    "FluxTransformer2DModel": "FLUX.1",
    "Flux2Pipeline": "FLUX.2 [dev]",
    "Mistral3ForConditionalGeneration": "FLUX.2 [dev]'s text encoder, Mistral",
}


def unsupported_model(found: dict) -> str | None:
    """The name of another model whose index, config or header this is; None if it may be one of ours."""
    who = next((who for who, signs in DISTINCTIVE_NAMES.items() if any(sign in found for sign in signs)), None)
    architectures = found.get("architectures")
    for name in (found.get("_class_name"), *(architectures if isinstance(architectures, list) else ())):
        if isinstance(name, str):
            known = ("Flux2Klein", "Flux2Transformer", "AutoencoderKLFlux2", "Qwen", "ZImage")
            known += ("AutoencoderKL",) * ("scaling_factor" in found)  # Z-Image's, which is FLUX.1's
            who = who or OTHER_CLASSES.get(name) or (None if name.startswith(known) else f"a {printable(name)[:60]}")
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
        IS_DISTILLED.check(path, index["is_distilled"])
    return index
