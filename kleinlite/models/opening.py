"""A model is opened: name → files → configs → weights → parts. Hand-written; chapter 8 shows the heart of it.

`open_checkpoint` reads configs and headers only, so that a model that cannot work is refused before gigabytes are read.
"""

import re
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from tokenizers import Tokenizer

from ..autoencoder import Autoencoder, AutoencoderConfig
from ..checkpoints import match, rename, to_mlx
from ..errors import printable
from ..quantisation import PACKINGS, Packed, Packing
from ..text_encoder import PAD, TextEncoder, TextEncoderConfig
from ..transformer import Transformer, TransformerConfig
from ..z_image import ZImageConfig, ZImageTransformer, static_schedule
from .configs import SAMPLE_SIZE, SCHEDULE_SHIFT, Config, read_config, read_index, shorten
from .download import fetch_model, fetch_parts
from .families import KLEIN, Z_IMAGE, Family, family_of, network_of
from .files import check_file, list_weights_files, load_arrays, read_json, read_metadata
from .formats import assemble, find_packing, load_weights
from .names import AUTOENCODER_NAMES, TEXT_ENCODER_NAMES
from .packing import join, quantize as pack_module
from .registry import BUNDLED, PARTS

SMALL_PART_BYTES = 2**28  # smaller parts (nano's, the autoencoder) are cast once, when they are loaded

# ---------------------------------------------------------------- name → files


def find_model(name: str) -> Path:
    """Where a model's files are: a bundled model, a local folder or single file, or a download from the hub."""
    if name in BUNDLED:
        return Path(str(files("kleinlite"))) / BUNDLED[name]
    if Path(name).exists():
        if not Path(name).is_dir():
            check_file(Path(name))
        return Path(name)
    return fetch_model(name)


def part_folder(folder: Path, part: str) -> Path:
    """The folder of one part. nano-base, in `nano/base`, has its own transformer and takes the rest from nano."""
    beside = folder.parent / part
    shared = folder.name == "base" and beside.is_dir() and not (folder / part).is_dir()
    return beside if shared else folder / part


def find_parts(name: str, parts: str | Path | dict[str, str | Path] | None = None) -> tuple[Path, dict[str, Path]]:
    """The folder with the model's index and tokenizer, and where each part lies: a folder or a single file."""
    path = find_model(name)
    parts = None if parts == {} else parts
    chosen = parts if isinstance(parts, dict) else {}
    if unknown := set(chosen) - set(PARTS):
        raise ValueError(f"parts names {', '.join(map(repr, unknown))}; a model's parts are {', '.join(PARTS)}.")
    if path.is_dir():
        if parts is not None and not chosen:
            raise ValueError(
                f"{name} is a whole model; a name as parts is for a model that is one file. To replace a part, say "
                'which: parts={"vae": …}.'
            )
        folder = path
    elif parts is not None and not chosen:
        here = parts in BUNDLED or Path(parts).exists()  # else fetched, without another transformer's weights
        folder = find_model(str(parts)) if here else fetch_parts(str(parts))
    elif (path.parent / "model_index.json").exists():
        folder = path.parent
    elif not Path(name).exists():  # a released single file: the registry knows where the rest is
        folder = fetch_parts(name)
    else:
        raise ValueError(
            f'{path} holds a transformer alone. Say where the text encoder and the autoencoder are: parts="4b" or '
            "another model's name or folder."
        )
    paths = {part: part_folder(folder, part) for part in PARTS} | ({"transformer": path} if path.is_file() else {})
    for part, place in chosen.items():
        place = find_model(str(place))
        paths[part] = place / part if (place / part).is_dir() else place
    return folder, paths


# ---------------------------------------------------------------- files → configs, checked against each other


@dataclass(frozen=True)
class ModelInfo:
    """What the pipeline needs to know beside the weights; read from the model's own files."""

    name: str
    distilled: bool  # few steps, no guidance
    size: int  # default height and width in pixels
    tokens: int  # text tokens per prompt
    kv: bool = False  # the KV variant: reference pictures are computed once, not in every step
    d_latent: int = field(default=128, repr=False)  # numbers per image token
    family: Family = field(default=KLEIN, repr=False)

    @property
    def steps(self) -> int:
        return self.family.defaults[self.distilled][0]

    @property
    def guidance(self) -> float:
        return self.family.defaults[self.distilled][1]


def read_model_info(
    name: str, folder: Path, paths: dict[str, Path], index: dict, configs: dict[str, object]
) -> ModelInfo:
    """What the files say about themselves; a single file only has its name to tell a base or a KV model by."""
    tokens, cfg = configs["text_encoder"].tokens, configs["transformer"]
    family, config = family_of(cfg), part_folder(folder, "vae") / "config.json"
    size = read_json(config).get("sample_size", 1024)
    SAMPLE_SIZE.check(config, size)
    if family is Z_IMAGE:  # Turbo's schedule is shifted by 3; another number is another model's
        config = part_folder(folder, "scheduler") / "scheduler_config.json"
        shift = read_json(config).get("shift", 3.0)
        SCHEDULE_SHIFT.check(config, shift)
        family = replace(family, schedule=lambda steps, n: static_schedule(steps, shift))
        return ModelInfo(name, shift == 3.0, size, tokens, d_latent=cfg.d_latent, family=family)
    file, distilled = paths["transformer"], index.get("is_distilled", False)
    if file.is_file() and "klein" in file.name.lower():
        distilled = "base" not in file.name.lower()
    names = Path(name).name, file.name if file.is_file() else folder.name
    kv = any(re.search(r"-kv\b", name.lower()) for name in names)
    kv = kv or (file.is_dir() and index.get("_class_name") == "Flux2KleinKVPipeline")
    return ModelInfo(name, distilled, size, tokens, kv, cfg.d_latent, family)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model's folder. Raises FileNotFoundError or ValueError with a sentence."""
    path = part_folder(folder, "tokenizer") / "tokenizer.json"
    check_file(path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as e:  # the library has no error of its own
        raise ValueError(f"{path} is not a tokenizer ({printable(str(e))[:100]}): download it again.") from None
    tokenizer.no_padding()  # chapter 3 pads and counts
    tokenizer.no_truncation()
    if tokenizer.token_to_id(PAD) is None:
        raise ValueError(f"{path} has no {PAD} token, with which prompts are filled up: it is not Qwen's.")
    return tokenizer


# Text features per token → the transformer that reads them; width of the text encoder → its name.
TRANSFORMERS = {7680: ("4B", "Qwen3-4B"), 12288: ("9B", "Qwen3-8B")}
TEXT_ENCODERS = {2560: ("Qwen3-4B", "4B"), 4096: ("Qwen3-8B", "9B")}


def check_family(file: Path, cfg: TransformerConfig | ZImageConfig, folder: Path, index: dict) -> None:
    """Refuse a transformer of one family among the parts of another."""
    other = Z_IMAGE if str(index.get("_class_name")).startswith("ZImage") else KLEIN
    if family_of(cfg) is not other:
        parts = "z-image-turbo" if other is KLEIN else "4b"
        raise ValueError(
            f"{file} is a transformer of {family_of(cfg).title}, and {folder} has the parts of {other.title}: take "
            f"all from one model, for example parts={parts!r}."
        )


def check_parts(
    folder: Path,
    cfg: TransformerConfig | ZImageConfig,
    vae_cfg: AutoencoderConfig,
    text_cfg: TextEncoderConfig,
    tokenizer: Tokenizer,
) -> None:
    """Refuse parts that were not made for each other, before gigabytes are read."""
    text_width, latent = len(text_cfg.taps) * text_cfg.d, 4 * vae_cfg.latent_channels
    size, right = TRANSFORMERS.get(cfg.d_text, (None, None))
    wrong, its_size = TEXT_ENCODERS.get(text_cfg.d, (None, None))
    if size and its_size and size != its_size:
        raise ValueError(
            f"The transformer in {folder} is the {size}, which reads {right}, and the text encoder is {wrong}, which "
            f"belongs to the {its_size}: take both from one model, for example parts={size.lower()!r}."
        )
    for what, wanted, but, there in (
        ("transformer reads", cfg.d_text, "text features per token and the text encoder gives", text_width),
        ("transformer works on", cfg.d_latent, "latent channels and the autoencoder makes", latent),
    ):
        if wanted != there:
            raise ValueError(f"The {what} {wanted} {but} {there}: the parts in {folder} belong to different models.")
    # All ids that it can give, added tokens and those around every text included.
    highest = max(*tokenizer.get_vocab(with_added_tokens=True).values(), *tokenizer.encode("a").ids)
    if max(text_cfg.taps) > text_cfg.layers or highest >= text_cfg.vocab:
        raise ValueError(
            f"The text encoder in {folder} has {text_cfg.layers} layers and {text_cfg.vocab} tokens; model_index.json "
            f"wants layer {max(text_cfg.taps)}, the tokenizer has {highest + 1} tokens: parts of different models."
        )


# ---------------------------------------------------------------- weights


# A counter of the batch norm, and a norm that nobody applies, in some files of Z-Image.
UNUSED_TENSORS = ("num_batches_tracked", "norm_final.weight")


def place_weights(
    module: nn.Module, arrays: dict[str, mx.array | Packed], rules: list[tuple[str, ...]]
) -> dict[str, mx.array | Packed]:
    """Give every parameter of `module` its tensor, whatever layout the files have. Raises ValueError on what is off.

    rules: what the released folders call our tensors, see `names`; a single file has our own names already.
    """
    prefix = "model.diffusion_model."
    arrays = {name.removeprefix(prefix): w for name, w in arrays.items()}
    arrays = {name: w for name, w in arrays.items() if not name.endswith(UNUSED_TENSORS)}
    ours = dict(tree_flatten(module.parameters()))
    theirs = [rename(name, rules) for name in ours]
    if sum(name in arrays for name in ours) > sum(all(name in arrays for name in names) for names in theirs):
        rules = []
    for name, target in ours.items():  # some files keep the autoencoder's attention as 1×1 convolutions
        if target.ndim == 2 and name in arrays and arrays[name].shape[2:] == (1, 1):
            arrays[name] = arrays[name].squeeze((2, 3))
    weights = match(module, arrays, rules, convert_packed)
    check_packed(weights)
    return weights


def convert_packed(names: list[str], tensors: list[mx.array | Packed]) -> mx.array | Packed:
    """Chapter 8's `to_mlx`, for packed matrices too."""
    if len({w.shape[1:] for w in tensors}) > 1:
        return tensors[0]  # they cannot be joined; alone it has not the shape that is asked for, and `match` says so
    if not any(isinstance(w, Packed) for w in tensors):
        return to_mlx(names, tensors)
    if len({(type(w), getattr(w, "packing", None)) for w in tensors}) > 1:
        return to_mlx(names, [w.decode() if isinstance(w, Packed) else w for w in tensors])
    return join(tensors).map(lambda rows: to_mlx(names, [rows]))


def load_part(module: nn.Module, path: Path, rules: list[tuple[str, ...]], dtype: mx.Dtype) -> nn.Module:
    """Fill `module` from a part's folder or file, floating-point weights as `dtype`. Returns the module."""
    return load_weights(module, place_weights(module, load_arrays(path), rules), dtype)


def read_packing(path: Path) -> Packing | None:
    """What a folder's config.json says of its quantised matrices, in the words of MLX's own tools."""
    config = path / "config.json"
    found = read_json(config).get("quantization") if config.exists() else None
    if found is None:
        return None
    if isinstance(found, dict):
        packing = Packing(found.get("mode", "affine"), found.get("bits"), found.get("group_size"))
        affine = packing.mode == "affine" and packing.bits in (2, 3, 4, 5, 6, 8) and packing.group in (32, 64, 128)
        if affine or packing in PACKINGS.values():
            return packing
    raise ValueError(
        f"{config} says that it is quantised by {shorten(found)}, which kleinlite does not know: take another model."
    )


def check_packed(weights: dict[str, mx.array | Packed]) -> None:
    """Refuse packed matrices whose scales do not belong to their codes. Raises ValueError."""
    for name, w in weights.items():
        if isinstance(w, Packed) and w.packing.group:
            rows, groups = w.shape[0], w.shape[1] // w.packing.group
            expected = {"weight": (rows, w.shape[1] * w.packing.bits // 32), "global_scale": (rows, 1)}
            wrong = [k for k, t in w.tensors.items() if tuple(t.shape) != expected.get(k, (rows, groups))]
            if wrong or w.tensors["weight"].dtype != mx.uint32 or w.shape[1] % w.packing.group:
                raise ValueError(
                    f"{name} is packed, and its {' and '.join(wrong) or 'codes'} do not fit: download it again."
                )


def is_float32_matrix(w: mx.array | Packed) -> bool:
    """Is this a matrix in float32, as in Z-Image's files? All other released models are in bfloat16 or less."""
    return isinstance(w, mx.array) and w.ndim == 2 and w.dtype == mx.float32


def only_for_language(name: str, layers: int) -> bool:
    """Is this tensor of Qwen3 one that only the language model needs: a layer from `layers` on, last norm or head?"""
    found = re.match(r"(?:model\.)?(?:layers\.(\d+)|norm|lm_head)\.", name)
    return bool(found) and (found[1] is None or int(found[1]) >= layers)


# ---------------------------------------------------------------- parts


@dataclass(frozen=True)
class Checkpoint:
    """A model's files, found and checked. Only configs and headers are read; each `load_` builds its part afresh."""

    info: ModelInfo
    folder: Path  # where model_index.json and the tokenizer are
    parts: dict[str, tuple[Config, Path]]  # "transformer", … → its numbers, and the folder or file with its weights
    dtype: mx.Dtype  # in which the transformer and the text encoder compute
    packing: Packing | None = None  # in which they are to be packed when they are loaded
    packed: bool = False  # whether they are so in their files, and so cannot be packed again
    chosen: str | dict[str, str] | None = None  # `parts` of `open_checkpoint`, as text

    @property
    def quantize(self) -> int | str | None:
        """The packing in the words of a call, if there is one."""
        return next((word for word, packing in PACKINGS.items() if packing == self.packing), None)

    @property
    def configs(self) -> tuple[Config, ...]:
        """The numbers of the transformer, the text encoder and the autoencoder."""
        return tuple(self.parts[part][0] for part in PARTS)

    def load_tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.folder)

    def load_text_encoder(self) -> TextEncoder:
        """Qwen3 up to the highest layer that we tap; what lies above is neither built nor read."""
        return self._load("text_encoder")

    def load_transformer(self) -> Transformer | ZImageTransformer:
        return self._load("transformer")

    def load_autoencoder(self) -> Autoencoder:
        """In float32 as in the makers' own code, and never packed: it is small, and bfloat16 leaves bands in skies."""
        return load_weights(*self._match_weights("vae"), mx.float32)

    def _load(self, part: str) -> nn.Module:
        module, weights = self._match_weights(part)
        keep = self.packing is not None or self.nbytes(part) >= SMALL_PART_BYTES
        load_weights(module, weights, self.dtype, keep)
        del weights  # so that a matrix is forgotten once it is packed
        if self.packing:
            return pack_module(module, self.packing, self.dtype)
        if keep and any(is_float32_matrix(w) for w in load_arrays(self.parts[part][1]).values()):
            for _, w in tree_flatten(module.parameters()):
                mx.eval(w)  # cast one after the other: never all of them in two widths
        return module

    def weights(self, part: str) -> dict[str, mx.array | Packed]:
        """What belongs into a part, under our names, as stored and not yet read."""
        return self._match_weights(part)[1]

    def _match_weights(self, part: str) -> tuple[nn.Module, dict[str, mx.array | Packed]]:
        """A part with the weights that belong into it, none of them read."""
        cfg, path = self.parts[part]
        arrays = load_arrays(path)
        if part == "vae":
            module = network_of(cfg)(cfg)
            return module, place_weights(module, arrays, AUTOENCODER_NAMES)
        arrays = assemble(arrays, read_metadata(path), read_packing(path))
        if self.nbytes(part) >= SMALL_PART_BYTES:
            arrays = {name: w.astype(mx.bfloat16) if is_float32_matrix(w) else w for name, w in arrays.items()}
        if part == "transformer":
            module, rules = network_of(cfg)(cfg), family_of(cfg).transformer_names
        else:
            module, rules = TextEncoder(replace(cfg, layers=max(cfg.taps), tied=True)), TEXT_ENCODER_NAMES
            del module.norm  # it comes after the last layer
            arrays = {name: w for name, w in arrays.items() if not only_for_language(name, max(cfg.taps))}
        return module, place_weights(module, arrays, rules)

    def nbytes(self, part: str) -> int:
        """Bytes of a part's weights on disk."""
        return sum(file.stat().st_size for file in list_weights_files(self.parts[part][1]))


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
    packing = find_packing(quantize)
    folder, paths = find_parts(str(name), parts)
    index = read_index(folder)
    configs = {part: read_config(part, paths[part], index) for part in PARTS}
    check_family(paths["transformer"], configs["transformer"], folder, index)
    check_parts(folder, configs["transformer"], configs["vae"], configs["text_encoder"], load_tokenizer(folder))
    info = read_model_info(str(name), folder, paths, index, configs)
    chosen = {part: str(place) for part, place in parts.items()} if isinstance(parts, dict) else parts and str(parts)
    found = {part: (configs[part], paths[part]) for part in PARTS}
    checkpoint = Checkpoint(info, folder, found, dtype, packing, chosen=chosen)
    for part in PARTS:
        weights = checkpoint.weights(part).values()  # every tensor has its place, or this says which has not
        packed = next((w.packing for w in weights if isinstance(w, Packed) and w.packing.mode != "fp8"), None)
        if packing and packed:
            raise ValueError(f"{name} is quantised already ({packed.mode}, {packed.bits} bits): leave quantize out.")
        checkpoint = replace(checkpoint, packed=checkpoint.packed or packed is not None)
    return checkpoint
