"""Checkpoints.

We open the files in which models are published, give every tensor its place, and refuse what does not fit.

Promoted from notebooks/07_checkpoints.ipynb: edit there, then run `make promote`. (seal 63f35239)
"""

import json
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from tokenizers import Tokenizer

from .autoencoder import Autoencoder, AutoencoderConfig
from .models import download as hub
from .models.configs import (
    autoencoder_config,
    autoencoder_from,
    stranger,
    text_encoder_config,
    transformer_config,
    transformer_from,
)
from .models.formats import assemble, find_packing, load_weights
from .quantisation import Packed, Packing, join, quantize
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
    "weight_files",
    "load_files",
    "stacked",
    "match",
    "for_folder",
    "ModelInfo",
    "part_config",
    "BUNDLED",
    "find_folder",
    "part",
    "load_tokenizer",
    "load_part",
    "TRANSFORMERS",
    "TEXT_ENCODERS",
    "check_parts",
    "config_packing",
    "metadata",
    "SMALL",
    "Checkpoint",
    "above",
    "locate",
    "model_info",
    "open_checkpoint",
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


def weight_files(path: Path) -> list[Path]:
    """The files with a part's weights: all shards of a folder, or the one file. Complains if one is missing or cut."""
    if path.is_file():
        shards = [path]
    elif index := sorted(path.glob("*.safetensors.index.json")):
        shards = [path / name for name in sorted(set(read_json(index[0]).get("weight_map", {}).values()))]
    else:
        shards = sorted(path.glob("*.safetensors"))
    if not shards:
        raise FileNotFoundError(
            f"There is no .safetensors file in {path}: the model is not complete, download it again."
        )
    for file in shards:
        if not file.exists():
            raise FileNotFoundError(f"{file} is named in {index[0].name} but missing: download the model again.")
        read_header(file)
    return shards


def load_files(path: Path) -> dict[str, mx.array]:
    """All tensors of a part's folder or file. The arrays are lazy: nothing is read before it is used."""
    arrays = {}
    for file in weight_files(path):
        try:
            arrays.update(mx.load(str(file)))
        except RuntimeError as e:
            raise ValueError(f"MLX cannot read {file} ({e}): download it again, or take another model.") from None
    return arrays


def stacked(parts: list[mx.array | Packed]) -> mx.array | Packed:
    """Matrices one below the other."""
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(p, Packed) for p in parts):
        return join(parts)
    return mx.concatenate([p.decode() if isinstance(p, Packed) else p for p in parts])


def match(
    module: nn.Module, arrays: dict[str, mx.array | Packed], sources: Callable[[str], list[str]]
) -> dict[str, mx.array | Packed]:
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
            w = stacked([arrays[n] for n in names])
            if names[0] == "norm_out.linear.weight":
                w = w.map(swap_halves) if isinstance(w, Packed) else swap_halves(w)
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
    kv: bool = False  # the KV variant: reference pictures are computed once, not in every step

    @property
    def steps(self) -> int:
        return 4 if self.distilled else 50

    @property
    def guidance(self) -> float:
        return 1.0 if self.distilled else 4.0


def part_config(kind: str, path: Path, index: dict) -> TransformerConfig | AutoencoderConfig | TextEncoderConfig:
    """The numbers of one part, from its folder's config.json or its single file's header."""
    if not path.is_file():
        c = read_json(path / "config.json")
        stranger(path / "config.json", c)
        if kind == "text_encoder":
            return text_encoder_config(c, index)
        return transformer_config(c) if kind == "transformer" else autoencoder_config(c)
    if kind == "text_encoder":
        raise ValueError(f"{path} is one file; a text encoder is a folder with config.json: give that.")
    header = {name.removeprefix("model.diffusion_model."): t for name, t in read_header(path).items()}
    stranger(path, header)
    wide = {name: t["shape"][:-1] + [2 * t["shape"][-1]] for name, t in header.items() if t["dtype"] == "U8"}
    shapes = {name: t["shape"] for name, t in header.items()} | {k: s for k, s in wide.items() if k.endswith("weight")}
    return transformer_from(shapes) if kind == "transformer" else autoencoder_from(shapes)


BUNDLED = {"nano": "nano", "nano-base": "nano/base"}  # the base shares nano's other parts


def find_folder(name: str) -> Path:
    """Where a model's files are: a bundled model, a local folder or single file, or a download from the hub."""
    if name in BUNDLED:
        return Path(str(files("kleinlite"))) / BUNDLED[name]
    if Path(name).exists():
        return Path(name)
    return hub.fetch(name)


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


def load_part(module: nn.Module, path: Path, sources: Callable[[str], list[str]], dtype: mx.Dtype) -> nn.Module:
    """Fill `module` from a folder or file, floating-point weights as `dtype`."""
    return load_weights(module, match(module, load_files(path), sources), dtype)


# Text features per token → the transformer that reads them; width of the text encoder → its name.
TRANSFORMERS = {7680: ("4B", "Qwen3-4B"), 12288: ("9B", "Qwen3-8B")}
TEXT_ENCODERS = {2560: ("Qwen3-4B", "4B"), 4096: ("Qwen3-8B", "9B")}


def check_parts(
    folder: Path, cfg: TransformerConfig, vae_cfg: AutoencoderConfig, text_cfg: TextEncoderConfig, tokenizer: Tokenizer
) -> None:
    """Refuse parts that were not made for each other, before gigabytes are read."""
    text_width, latent, vocab = len(text_cfg.taps) * text_cfg.d, 4 * vae_cfg.latent_channels, tokenizer.get_vocab_size()
    size, right = TRANSFORMERS.get(cfg.d_text, (None, None))
    wrong, its_size = TEXT_ENCODERS.get(text_cfg.d, (None, None))
    if size and its_size and size != its_size:
        raise ValueError(
            f"The transformer in {folder} is the {size}, which reads {right}, and the text encoder is {wrong}, which "
            f"belongs to the {its_size}: take both from one model, for example parts={size.lower()!r}."
        )
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


def config_packing(path: Path) -> Packing | None:
    """What a folder's config.json says of its quantised matrices, in the words of MLX's own tools."""
    said = read_json(path / "config.json").get("quantization") if (path / "config.json").exists() else None
    return Packing(said.get("mode", "affine"), said["bits"], said["group_size"]) if said else None


def metadata(path: Path) -> dict[str, str]:
    """The words in the headers of a part's files."""
    return {k: v for file in weight_files(path) for k, v in mx.load(str(file), return_metadata=True)[1].items()}


SMALL = 2**28  # bytes; smaller parts (nano's, the autoencoder) are cast once, when they are loaded


@dataclass(frozen=True)
class Checkpoint:
    """A model's files, found and checked. Only configs and headers are read; each `load_` builds its part afresh."""

    info: ModelInfo
    folder: Path  # where model_index.json and the tokenizer are
    parts: dict[str, tuple]  # "transformer", "text_encoder", "vae" → config and the folder or file with the weights
    dtype: mx.Dtype  # in which the transformer and the text encoder compute
    packing: Packing | None = None  # in which they are to be packed when they are loaded

    def load_tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.folder)

    def load_text_encoder(self) -> TextEncoder:
        """Qwen3 up to the highest layer that we tap; what lies above is neither built nor read."""
        return self._load("text_encoder")

    def load_transformer(self) -> Transformer:
        return self._load("transformer")

    def load_autoencoder(self) -> Autoencoder:
        """In float32 as in the makers' own code, and never packed: it is small, and bfloat16 leaves bands in skies."""
        cfg, path = self.parts["vae"]
        return load_part(Autoencoder(cfg), path, autoencoder_sources, mx.float32)

    def _load(self, kind: str) -> nn.Module:
        module, weights = self._placed(kind)
        keep = self.packing is not None or self.nbytes(kind) >= SMALL
        load_weights(module, weights, self.dtype, keep)
        del weights  # so that a matrix is forgotten once it is packed
        return quantize(module, self.packing, self.dtype) if self.packing else module

    def weights(self, kind: str) -> dict[str, mx.array | Packed]:
        """What belongs into a part, under our names, as stored and not yet read."""
        return self._placed(kind)[1]

    def _placed(self, kind: str) -> tuple[nn.Module, dict[str, mx.array | Packed]]:
        """A part with the weights that belong into it, none of them read."""
        cfg, path = self.parts[kind]
        if kind == "vae":
            module = Autoencoder(cfg)
            return module, match(module, load_files(path), autoencoder_sources)
        arrays = assemble(load_files(path), metadata(path), config_packing(path))
        if kind == "transformer":
            module = Transformer(cfg)
            return module, match(module, arrays, transformer_sources)
        module = TextEncoder(replace(cfg, layers=max(cfg.taps), tied=True))
        del module.norm  # it comes after the last layer
        arrays = {name: w for name, w in arrays.items() if not above(name, max(cfg.taps))}
        return module, match(module, arrays, text_encoder_sources)

    def nbytes(self, kind: str) -> int:
        """Bytes of a part's weights on disk."""
        return sum(file.stat().st_size for file in weight_files(self.parts[kind][1]))


def above(name: str, layers: int) -> bool:
    """Is this tensor of Qwen3 one that only the language model needs: a layer from `layers` on, last norm or head?"""
    found = re.match(r"(?:model\.)?(?:layers\.(\d+)|norm|lm_head)\.", name)
    return bool(found) and (found[1] is None or int(found[1]) >= layers)


def locate(name: str, parts: str | Path | dict[str, str | Path] | None) -> tuple[Path, dict[str, Path]]:
    """The folder with the model's index and tokenizer, and where each part lies: a folder or a single file."""
    kinds, path = ("transformer", "vae", "text_encoder"), find_folder(name)
    chosen = parts if isinstance(parts, dict) else {}
    if unknown := set(chosen) - set(kinds):
        raise ValueError(f"parts names {', '.join(map(repr, unknown))}; a model's parts are {', '.join(kinds)}.")
    if path.is_dir():
        if parts is not None and not chosen:
            raise ValueError(
                f"{name} is a whole model; a name as parts is for a model that is one file. To replace a part, say "
                'which: parts={"vae": …}.'
            )
        folder = path
    elif parts is not None and not chosen:
        here = parts in BUNDLED or Path(parts).exists()  # else fetched, without another transformer's weights
        folder = find_folder(str(parts)) if here else hub.fetch_parts(str(parts))
    elif (path.parent / "model_index.json").exists():
        folder = path.parent
    elif not Path(name).exists():  # a released single file: the hub knows where the rest is
        folder = hub.fetch_parts(name)
    else:
        raise ValueError(
            f'{path} holds a transformer alone. Say where the text encoder and the autoencoder are: parts="4b" or '
            "another model's name or folder."
        )
    paths = {kind: part(folder, kind) for kind in kinds} | ({"transformer": path} if path.is_file() else {})
    for kind, place in chosen.items():
        place = find_folder(str(place))
        paths[kind] = place / kind if (place / kind).is_dir() else place
    return folder, paths


def model_info(name: str, folder: Path, paths: dict[str, Path], index: dict, tokens: int) -> ModelInfo:
    """What the files say about themselves; a single file only has its name to tell a base or a KV model by."""
    file, distilled = paths["transformer"], index.get("is_distilled", False)
    if file.is_file() and "klein" in file.name.lower():
        distilled = "base" not in file.name.lower()
    called = [Path(name).name, file.name] if file.is_file() else [Path(name).name, folder.name]
    kv = any(re.search(r"-kv\b", x.lower()) for x in called)
    if file.is_dir():
        kv = kv or index.get("_class_name") == "Flux2KleinKVPipeline"
    size = read_json(part(folder, "vae") / "config.json").get("sample_size", 1024)
    return ModelInfo(name, distilled, size, tokens, kv)


def open_checkpoint(
    name: str | Path,
    *,
    dtype: mx.Dtype,
    quantize: int | str | None = None,
    parts: str | Path | dict[str, str | Path] | None = None,
) -> Checkpoint:
    """Find a model and check that its parts are whole and fit together: cheap, since no weight is read.

    name: a bundled or released model, a hub repository, a folder, or a single file with a transformer.
    dtype: in which to compute. quantize: 3, 4, 5, 6, 8, "mxfp4", "mxfp8" or "nvfp4"; packs what is loaded.
    parts: for a single file, the model that has the other parts; or a dictionary that replaces parts, as in
    {"vae": "small-decoder"}.
    """
    wish = find_packing(quantize)
    folder, paths = locate(str(name), parts)
    index = read_json(folder / "model_index.json")
    stranger(folder / "model_index.json", index)
    configs = {}
    for kind in ("transformer", "vae", "text_encoder"):
        try:
            configs[kind] = part_config(kind, paths[kind], index)
        except KeyError as e:
            where = paths[kind] if paths[kind].is_file() else f"A config.json in {folder}"
            raise ValueError(f"{where} says nothing about {e}: is this another kind of model?") from None
    check_parts(folder, configs["transformer"], configs["vae"], configs["text_encoder"], load_tokenizer(folder))
    info = model_info(str(name), folder, paths, index, configs["text_encoder"].tokens)
    found = {kind: (configs[kind], paths[kind]) for kind in paths}
    checkpoint = Checkpoint(info, folder, found, dtype, wish)
    for kind in found:
        weights = checkpoint.weights(kind).values()  # every tensor has its place, or this says which has not
        packed = next((w.packing for w in weights if isinstance(w, Packed) and w.packing.mode != "fp8"), None)
        if wish and packed:
            raise ValueError(f"{name} is quantised already ({packed.mode}, {packed.bits} bits): leave quantize out.")
    return checkpoint
