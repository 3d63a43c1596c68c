"""Checkpoints.

We open the files in which models are published, give every tensor its place, and refuse what does not fit.

Promoted from notebooks/07_checkpoints.ipynb: edit there, then run `make promote`. (seal 8d9ec581)
"""

import json
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from tokenizers import Tokenizer

from .autoencoder import Autoencoder, AutoencoderConfig
from .text_encoder import PAD, TextEncoder, TextEncoderConfig
from .transformer import Transformer, TransformerConfig

__all__ = [
    "read_header",
    "TRANSFORMER_NAMES",
    "AUTOENCODER_NAMES",
    "rename",
    "transformer_sources",
    "autoencoder_sources",
    "text_encoder_sources",
    "swap_halves",
    "read_json",
    "load_files",
    "match",
    "for_folder",
    "ModelInfo",
    "autoencoder_config",
    "text_encoder_config",
    "transformer_config",
    "BUNDLED",
    "HUB",
    "find_folder",
    "part",
    "load_tokenizer",
    "load_part",
    "check_parts",
    "load",
]


def read_header(path: Path) -> dict:
    """Names, dtypes and shapes of a safetensors file; complains if the file is damaged or was cut short."""
    size = path.stat().st_size
    with path.open("rb") as f:
        length = struct.unpack("<Q", f.read(8))[0] if size >= 8 else 0
        try:
            header = json.loads(f.read(length)) if 0 < length <= size - 8 else None
            header.pop("__metadata__", None)
            needed = 8 + length + max((t["data_offsets"][1] for t in header.values()), default=0)
        except (ValueError, AttributeError, KeyError, TypeError):  # no JSON, or JSON about something else
            needed = None
    if needed is None:
        raise ValueError(f"{path} is not a safetensors file, or its beginning is damaged: download it again.")
    if size < needed:
        raise ValueError(f"{path} has {size:,} of {needed:,} bytes, the rest is missing: download it again.")
    return header


# What we call a tensor → what the released folders call it. Each rule is a regular expression and its replacement.
TRANSFORMER_NAMES = [
    (r"^img_in", "x_embedder"),
    (r"^txt_in", "context_embedder"),
    (r"^time_in.in_layer", "time_guidance_embed.timestep_embedder.linear_1"),
    (r"^time_in.out_layer", "time_guidance_embed.timestep_embedder.linear_2"),
    (r"(_modulation.*)\.lin\.", r"\1.linear."),
    (r"^final_layer.adaLN_modulation.1", "norm_out.linear"),
    (r"^final_layer.linear", "proj_out"),
    (r"^single_blocks", "single_transformer_blocks"),
    (r"linear1", "attn.to_qkv_mlp_proj"),
    (r"linear2", "attn.to_out"),
    (r"(single.*)\.norm\.query_norm\.scale", r"\1.attn.norm_q.weight"),
    (r"(single.*)\.norm\.key_norm\.scale", r"\1.attn.norm_k.weight"),
    (r"^double_blocks", "transformer_blocks"),
    (r"img_attn.norm.query_norm.scale", "attn.norm_q.weight"),
    (r"img_attn.norm.key_norm.scale", "attn.norm_k.weight"),
    (r"txt_attn.norm.query_norm.scale", "attn.norm_added_q.weight"),
    (r"txt_attn.norm.key_norm.scale", "attn.norm_added_k.weight"),
    (r"img_attn.proj", "attn.to_out.0"),
    (r"txt_attn.proj", "attn.to_add_out"),
    (r"img_mlp.0", "ff.linear_in"),
    (r"img_mlp.2", "ff.linear_out"),
    (r"txt_mlp.0", "ff_context.linear_in"),
    (r"txt_mlp.2", "ff_context.linear_out"),
]

AUTOENCODER_NAMES = [
    (r"^encoder.quant_conv", "quant_conv"),
    (r"^decoder.post_quant_conv", "post_quant_conv"),
    (r"\.down\.(\d)", r".down_blocks.\1"),
    (
        r"\.up\.0",
        ".up_blocks.3",
    ),  # the folders count the decoder's levels from the coarse end, the single file
    (r"\.up\.1", ".up_blocks.2"),  # from the fine end
    (r"\.up\.2", ".up_blocks.1"),
    (r"\.up\.3", ".up_blocks.0"),
    (r"\.block\.(\d)", r".resnets.\1"),
    (r"\.downsample\.", ".downsamplers.0."),
    (r"\.upsample\.", ".upsamplers.0."),
    (r"mid\.block_1", "mid_block.resnets.0"),
    (r"mid\.block_2", "mid_block.resnets.1"),
    (r"mid\.attn_1\.norm", "mid_block.attentions.0.group_norm"),
    (r"mid\.attn_1\.proj_out", "mid_block.attentions.0.to_out.0"),
    (r"mid\.attn_1\.(q|k|v)\.", r"mid_block.attentions.0.to_\1."),
    (r"nin_shortcut", "conv_shortcut"),
    (r"norm_out", "conv_norm_out"),
]


def rename(name: str, rules: list[tuple[str, str]]) -> str:
    """Apply each rule that fits, in order."""
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def transformer_sources(name: str) -> list[str]:
    """The released folder's tensors that make up our tensor `name`: one, or three where ours is fused."""
    if name.endswith("img_attn.qkv.weight"):
        parts = ("to_q", "to_k", "to_v")
    elif name.endswith("txt_attn.qkv.weight"):
        parts = ("add_q_proj", "add_k_proj", "add_v_proj")
    else:
        return [rename(name, TRANSFORMER_NAMES)]
    return [f"transformer_blocks.{name.split('.')[1]}.attn.{part}.weight" for part in parts]


def autoencoder_sources(name: str) -> list[str]:
    return [rename(name, AUTOENCODER_NAMES)]


def text_encoder_sources(name: str) -> list[str]:
    return [name if name.startswith("lm_head") else f"model.{name}"]


def swap_halves(w: mx.array) -> mx.array:
    """The folder's final modulation is (scale, shift), the single file's and ours (shift, scale)."""
    return mx.concatenate(mx.split(w, 2)[::-1])


def read_json(path: Path) -> dict:
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: the folder is not a complete model in the released layout.")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{path} is not valid JSON ({e}): download it again.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is JSON, but not a list of names and their values: download it again.")
    return found


def load_files(folder: Path) -> dict[str, mx.array]:
    """All tensors of a part's folder, sharded or not. The arrays are lazy: nothing is read before it is used."""
    index = sorted(folder.glob("*.safetensors.index.json"))
    if index:
        shards = [folder / name for name in sorted(set(read_json(index[0]).get("weight_map", {}).values()))]
    else:
        shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise FileNotFoundError(
            f"There is no .safetensors file in {folder}: the model is not complete, download it again."
        )
    arrays = {}
    for file in shards:
        if not file.exists():
            raise FileNotFoundError(f"{file} is named in {index[0].name} but missing: download the model again.")
        read_header(file)
        try:
            arrays.update(mx.load(str(file)))
        except RuntimeError as e:
            raise ValueError(f"MLX cannot read {file} ({e}): download it again, or take another model.") from None
    return arrays


def match(module: nn.Module, arrays: dict[str, mx.array], sources: Callable[[str], list[str]]) -> dict[str, mx.array]:
    """Give every parameter of `module` its tensor, in our names and layout. Strict: none missing, none left over."""
    arrays = {name: w for name, w in arrays.items() if not name.endswith("num_batches_tracked")}  # counts, not weights
    prefix = "model.diffusion_model."
    arrays = {name.removeprefix(prefix): w for name, w in arrays.items()}
    ours = dict(tree_flatten(module.parameters()))
    single_file = sum(name in arrays for name in ours) > len(ours) / 2  # already in our names
    weights, used, missing, misshapen = {}, set(), [], []
    for name, target in ours.items():
        names = [name] if single_file else sources(name)
        absent = [n for n in names if n not in arrays]
        used.update(names)
        if absent:
            missing += absent
            continue
        try:
            w = arrays[names[0]] if len(names) == 1 else mx.concatenate([arrays[n] for n in names])
            if names[0] == "norm_out.linear.weight":
                w = swap_halves(w)
        except ValueError:  # they do not go together, or there are no two halves
            shapes = " and ".join(f"{n} {tuple(arrays[n].shape)}" for n in names)
            misshapen.append(f"{shapes}, expected {tuple(target.shape)} in all")
            continue
        if w.ndim == 4 and target.ndim == 4:
            w = w.transpose(0, 2, 3, 1)  # (out, in, kh, kw) → MLX's (out, kh, kw, in)
        elif w.ndim == 4 and w.shape[2:] == (1, 1):
            w = w.squeeze((2, 3))  # the single file keeps the autoencoder's attention as 1×1 convolutions
        if w.shape != target.shape:
            misshapen.append(f"{names[0]} is {tuple(w.shape)}, expected {tuple(target.shape)}")
        weights[name] = w
    extra = sorted(set(arrays) - used)
    if missing or extra or misshapen:
        lists = [("missing", missing), ("not expected", extra), ("of the wrong shape", misshapen)]
        told = "; ".join(f"{len(x)} {what}: {', '.join(x[:4])}{' …' if len(x) > 4 else ''}" for what, x in lists if x)
        raise ValueError(
            f"The {type(module).__name__.lower()}'s weights do not fit ({told}). Is this another model's file?"
        )
    return weights


def for_folder(module: nn.Module, sources: Callable[[str], list[str]], dtype: mx.Dtype) -> dict[str, mx.array]:
    """A module's weights under the released folder's names and in its layout: the way back from `match`."""
    arrays = {}
    for name, w in tree_flatten(module.parameters()):
        w = w.astype(dtype).transpose(0, 3, 1, 2) if w.ndim == 4 else w.astype(dtype)
        names = sources(name)
        if names[0] == "norm_out.linear.weight":
            w = swap_halves(w)
        arrays.update(zip(names, mx.split(w, len(names))))
    return arrays


@dataclass(frozen=True)
class ModelInfo:
    """What the pipeline needs to know beside the weights; read from the model's own files."""

    name: str
    distilled: bool  # few steps, no guidance
    size: int  # default height and width in pixels
    tokens: int  # text tokens per prompt

    @property
    def steps(self) -> int:
        return 4 if self.distilled else 50

    @property
    def guidance(self) -> float:
        return 1.0 if self.distilled else 4.0


def autoencoder_config(c: dict) -> AutoencoderConfig:
    return AutoencoderConfig(
        channels=tuple(c["block_out_channels"]),
        decoder_channels=tuple(c["decoder_block_out_channels"]) if c.get("decoder_block_out_channels") else None,
        layers=c["layers_per_block"],
        latent_channels=c["latent_channels"],
        groups=c["norm_num_groups"],
        bn_eps=c["batch_norm_eps"],
    )


def text_encoder_config(c: dict, index: dict) -> TextEncoderConfig:
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


def transformer_config(c: dict) -> TransformerConfig:
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


BUNDLED = {"nano": "nano", "nano-base": "nano/base"}  # the base shares nano's other parts


HUB = {
    "4b": "black-forest-labs/FLUX.2-klein-4B",
    "base-4b": "black-forest-labs/FLUX.2-klein-base-4B",
    "9b": "black-forest-labs/FLUX.2-klein-9B",
    "base-9b": "black-forest-labs/FLUX.2-klein-base-9B",
}


def find_folder(name: str) -> Path:
    """Where a model's files are: a bundled model, a local folder, or a download from the hub."""
    if name in BUNDLED:
        return Path(str(files("kleinlite"))) / BUNDLED[name]
    if Path(name).is_dir():
        return Path(name)
    repo = HUB.get(name.lower(), name if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith(".") else None)
    if repo is None:
        known = ", ".join([*BUNDLED, *HUB])
        raise ValueError(
            f"There is no model or folder called {name!r}. Known models: {known}; or give a hub repository "
            "(owner/name) or a folder in the released layout."
        )
    from huggingface_hub import snapshot_download  # slow to import, and most readers never need it

    parts = [f"{p}/*" for p in ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")]
    return Path(snapshot_download(repo, allow_patterns=["model_index.json", *parts]))


def part(folder: Path, name: str) -> Path:
    """The folder of one part. nano-base keeps only its own transformer and takes the rest from nano beside it."""
    beside = folder.parent / name
    return beside if beside.is_dir() and not (folder / name).is_dir() else folder / name


def load_tokenizer(folder: Path) -> Tokenizer:
    path = part(folder, "tokenizer") / "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: the folder is not a complete model in the released layout.")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as e:  # the library has no error of its own
        raise ValueError(f"{path} is not a tokenizer ({e}): download it again.") from None
    if tokenizer.token_to_id(PAD) is None:
        raise ValueError(f"{path} has no {PAD} token, with which prompts are filled up: it is not Qwen's.")
    return tokenizer


def load_part(module: nn.Module, folder: Path, sources: Callable[[str], list[str]], dtype: mx.Dtype) -> nn.Module:
    """Fill `module` from a folder, floating-point weights as `dtype`."""
    weights = match(module, load_files(folder), sources)
    module.update(tree_unflatten([(k, w.astype(dtype)) for k, w in weights.items()]))
    return module.eval()


def check_parts(
    folder: Path, cfg: TransformerConfig, vae_cfg: AutoencoderConfig, text_cfg: TextEncoderConfig, tokenizer: Tokenizer
) -> None:
    """Refuse parts that were not made for each other, before gigabytes are read."""
    text_width, latent, vocab = len(text_cfg.taps) * text_cfg.d, 4 * vae_cfg.latent_channels, tokenizer.get_vocab_size()
    misfits = [
        ("transformer reads", cfg.d_text, "text features per token and the text encoder gives", text_width),
        ("transformer works on", cfg.d_latent, "latent channels and the autoencoder makes", latent),
    ]
    for what, wanted, but, there in misfits:
        if wanted != there:
            raise ValueError(f"The {what} {wanted} {but} {there}: the parts in {folder} belong to different models.")
    if max(text_cfg.taps) > text_cfg.layers or vocab > text_cfg.vocab:
        raise ValueError(
            f"The text encoder in {folder} has {text_cfg.layers} layers and {text_cfg.vocab} tokens; model_index.json "
            f"wants layer {max(text_cfg.taps)}, the tokenizer has {vocab} tokens: parts of different models."
        )


def load(
    folder: Path, name: str, dtype: mx.Dtype
) -> tuple[Transformer, Autoencoder, TextEncoder, Tokenizer, ModelInfo]:
    """Everything a pipeline needs from a model's folder, weights mapped but not yet read."""
    index = read_json(folder / "model_index.json")
    configs = {p: read_json(part(folder, p) / "config.json") for p in ("transformer", "vae", "text_encoder")}
    try:
        text_cfg = text_encoder_config(configs["text_encoder"], index)
        cfg, vae_cfg = transformer_config(configs["transformer"]), autoencoder_config(configs["vae"])
    except KeyError as e:
        raise ValueError(f"A config.json in {folder} says nothing about {e}: is this another kind of model?") from None
    tokenizer = load_tokenizer(folder)
    check_parts(folder, cfg, vae_cfg, text_cfg, tokenizer)
    transformer = load_part(Transformer(cfg), part(folder, "transformer"), transformer_sources, dtype)
    # The autoencoder stays in float32 as in the makers' own code: it is small, and bfloat16 leaves bands in skies.
    autoencoder = load_part(Autoencoder(vae_cfg), part(folder, "vae"), autoencoder_sources, mx.float32)
    text_encoder = load_part(TextEncoder(text_cfg), part(folder, "text_encoder"), text_encoder_sources, dtype)
    info = ModelInfo(name, index.get("is_distilled", False), configs["vae"].get("sample_size", 1024), text_cfg.tokens)
    return transformer, autoencoder, text_encoder, tokenizer, info
