"""What a model's numbers are called outside: config.json's words, shapes in a header, and the names of other models.

Hand-written, and dull on purpose: chapter 7 shows what it is for. Each part's config.json becomes the dataclass of its
chapter and, for writing a model, the way back; a single file has no config.json, so its shapes must tell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ..autoencoder import AutoencoderConfig
from ..checkpoints import read_header
from ..text_encoder import TextEncoderConfig
from ..transformer import TransformerConfig
from .files import check_weights_file, read_json
from .registry import MODELS

# ---------------------------------------------------------------- the released sizes

RELEASED_CONFIGS = {  # transformer and text encoder
    "4b": (TransformerConfig(), TextEncoderConfig()),
    "9b": (
        TransformerConfig(double_blocks=8, single_blocks=24, heads=32, d_text=12288),
        TextEncoderConfig(d=4096, d_mlp=12288, tied=False),
    ),
}

# ---------------------------------------------------------------- config.json → dataclass


def parse_autoencoder_config(c: dict) -> AutoencoderConfig:
    return AutoencoderConfig(
        channels=tuple(c["block_out_channels"]),
        decoder_channels=tuple(c["decoder_block_out_channels"]) if c.get("decoder_block_out_channels") else None,
        layers=c["layers_per_block"],
        latent_channels=c["latent_channels"],
        groups=c["norm_num_groups"],
        bn_eps=c["batch_norm_eps"],
    )


def parse_text_encoder_config(c: dict, index: dict) -> TextEncoderConfig:
    # transformers 5 moved rope_theta into a dictionary; the released files have it at the top.
    theta = c["rope_theta"] if "rope_theta" in c else c["rope_parameters"]["rope_theta"]
    return TextEncoderConfig(
        vocab=c["vocab_size"],
        d=c["hidden_size"],
        d_mlp=c["intermediate_size"],
        layers=c["num_hidden_layers"],
        heads=c["num_attention_heads"],
        kv_heads=c["num_key_value_heads"],
        hd=c["head_dim"],
        theta=theta,
        eps=c["rms_norm_eps"],
        tied=c["tie_word_embeddings"],
        taps=tuple(index.get("text_encoder_out_layers", (9, 18, 27))),
        tokens=index.get("max_sequence_length", 512),
    )


def parse_transformer_config(c: dict) -> TransformerConfig:
    return TransformerConfig(
        double_blocks=c["num_layers"],
        single_blocks=c["num_single_layers"],
        heads=c["num_attention_heads"],
        axes=tuple(c["axes_dims_rope"]),
        d_latent=c["in_channels"],
        d_text=c["joint_attention_dim"],
        mlp_ratio=c["mlp_ratio"],
        theta=c["rope_theta"],
        d_time=c["timestep_guidance_channels"],
    )


# ---------------------------------------------------------------- shapes → dataclass
# What no shape shows (θ, the groups of a norm, epsilons) is taken from the released models.


def count_numbered(names: Iterable[str], pattern: str) -> int:
    """How many numbers a list is numbered with: one more than the highest found in brackets."""
    return 1 + max((int(m[1]) for name in names if (m := re.match(pattern, name))), default=-1)


def infer_transformer_config(shapes: dict[str, list[int]]) -> TransformerConfig:
    """A transformer's numbers from the shapes in a single file."""
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
    levels = range(4)
    return AutoencoderConfig(
        channels=tuple(shapes[down.format(i)][0] for i in levels),
        decoder_channels=tuple(shapes[up.format(i if ours else 3 - i)][0] for i in levels),
        layers=count_numbered(shapes, r"encoder\.down(?:_blocks)?\.0\.(?:block|resnets)\.(\d+)\."),
        latent_channels=shapes["encoder.quant_conv.weight" if ours else "quant_conv.weight"][0] // 2,
    )


# ---------------------------------------------------------------- dataclass → config.json


def format_transformer_config(cfg: TransformerConfig) -> dict:
    return {
        "_class_name": "Flux2Transformer2DModel", "attention_head_dim": cfg.hd, "axes_dims_rope": list(cfg.axes),
        "eps": 1e-6, "guidance_embeds": False, "in_channels": cfg.d_latent, "joint_attention_dim": cfg.d_text,
        "mlp_ratio": cfg.mlp_ratio, "num_attention_heads": cfg.heads, "num_layers": cfg.double_blocks,
        "num_single_layers": cfg.single_blocks, "out_channels": None, "patch_size": 1, "rope_theta": int(cfg.theta),
        "timestep_guidance_channels": cfg.d_time,
    }  # fmt: skip


def format_autoencoder_config(cfg: AutoencoderConfig, size: int) -> dict:
    levels = len(cfg.channels)
    narrow = {"decoder_block_out_channels": list(cfg.decoder_channels)} if cfg.decoder_channels else {}
    return narrow | {
        "_class_name": "AutoencoderKLFlux2", "act_fn": "silu", "batch_norm_eps": cfg.bn_eps,
        "batch_norm_momentum": 0.1, "block_out_channels": list(cfg.channels),
        "down_block_types": ["DownEncoderBlock2D"] * levels, "up_block_types": ["UpDecoderBlock2D"] * levels,
        "in_channels": 3, "out_channels": 3, "latent_channels": cfg.latent_channels, "layers_per_block": cfg.layers,
        "mid_block_add_attention": True, "norm_num_groups": cfg.groups, "patch_size": [2, 2], "sample_size": size,
        "use_quant_conv": True, "use_post_quant_conv": True,
    }  # fmt: skip


def format_text_encoder_config(cfg: TextEncoderConfig) -> dict:
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": cfg.vocab, "hidden_size": cfg.d,
        "intermediate_size": cfg.d_mlp, "num_hidden_layers": cfg.layers, "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads, "head_dim": cfg.hd, "rope_theta": cfg.theta, "rms_norm_eps": cfg.eps,
        "tie_word_embeddings": cfg.tied, "attention_bias": False, "hidden_act": "silu",
        "max_position_embeddings": 40960, "use_sliding_window": False,
    }  # fmt: skip


def format_model_index(cfg: TextEncoderConfig, distilled: bool) -> dict:
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
    """The name of another model whose index, config or header this is; None if it may be klein's."""
    who = next((who for who, signs in SIGNS.items() if any(sign in found for sign in signs)), None)
    for name in (found.get("_class_name"), *(found.get("architectures") or ())):
        if isinstance(name, str):
            known = ("Flux2Klein", "Flux2Transformer", "AutoencoderKLFlux2", "Qwen")
            who = who or CLASSES.get(name) or (None if name.startswith(known) else f"a {name}")
    if found.get("joint_attention_dim") == 15360 or found.get("num_single_layers") == 48:
        who = "FLUX.2 [dev]"
    return who


def check_supported(path: Path, found: dict) -> None:
    """Refuse another model by its name."""
    if who := unsupported_model(found):
        raise ValueError(f"{path} is {who}, and kleinlite runs FLUX.2 [klein]: take {', '.join(MODELS)} or nano.")


# ---------------------------------------------------------------- files → dataclass


def read_config(
    part: str, path: Path, index: dict | None = None
) -> TransformerConfig | AutoencoderConfig | TextEncoderConfig:
    """The numbers of one part, from its folder's config.json or its single file's header.

    part: "transformer", "vae" or "text_encoder". index: what the model's model_index.json says.
    """
    if not path.is_file():
        return read_folder_config(part, path / "config.json", index or {})
    if part == "text_encoder":
        raise ValueError(f"{path} is one file; a text encoder is a folder with config.json: give that.")
    check_weights_file(path)
    header = {name.removeprefix("model.diffusion_model."): t for name, t in read_header(path).items()}
    check_supported(path, header)
    wide = {name: t["shape"][:-1] + [2 * t["shape"][-1]] for name, t in header.items() if t["dtype"] == "U8"}
    shapes = {name: t["shape"] for name, t in header.items()} | {k: s for k, s in wide.items() if k.endswith("weight")}
    return infer_transformer_config(shapes) if part == "transformer" else infer_autoencoder_config(shapes)


def read_folder_config(part: str, path: Path, index: dict) -> TransformerConfig | AutoencoderConfig | TextEncoderConfig:
    """The same from a config.json."""
    found = read_json(path)
    check_supported(path, found)
    if part == "text_encoder":
        return parse_text_encoder_config(found, index)
    return parse_transformer_config(found) if part == "transformer" else parse_autoencoder_config(found)
