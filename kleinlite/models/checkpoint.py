"""A model's name becomes loaded parts: name → files → configs → weights → parts. Chapter 8 shows the heart of it.

`open_checkpoint` reads configs and headers only, so that a model that cannot work is refused before gigabytes are read.
Each file is listed and checked once, each tensor matched once: what opening finds out, loading uses.
"""

from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from tokenizers import Tokenizer

from ..checkpoints import Conversion, match, rename, to_mlx
from ..errors import UserError, clip, first_few, printable
from ..quantization import QUANT_SPECS, QuantizedMatrix, QuantSpec
from ..text_encoder import PAD, TextEncoder
from .configs import (
    SAMPLE_SIZE,
    check_supported,
    family_of_index,
    find_parts,
    infer_config,
    open_folder,
    own_names,
    read_config,
)
from .download import ANYWHERE, Access, fetch_model, fetch_parts
from .families import KLEIN, Configs, Family, family_of
from .families.family import Rules
from .fields import say_once
from .files import ModelFolder, WeightFiles, check_file, find_index, open_weights, read_json
from .formats import GROUP, assemble, check_packing, find_quant_spec, load_weights
from .mlx_folders import MlxFiles, MlxFolder, infer_text_encoder, name_of_variant
from .quantize import join, quantize as quantize_module
from .registry import FOLDERS, PARTS, TAEF2_FILE, find_bundled, find_released

SMALL_PART_BYTES = 2**28  # smaller parts (nano's, the autoencoder) are cast once, when they are loaded
Weights = dict[str, mx.array | QuantizedMatrix]  # by our names
PartsArgument = str | Path | dict[str, str | Path] | None

# ---------------------------------------------------------------- name → files


def resolve_model(name: str, access: Access = ANYWHERE) -> Path:
    """Where a model's files are: a bundled model, a local folder or single file, or a download from the hub."""
    bundled = find_bundled(name)
    if bundled:
        return Path(str(files("kleinlite"))) / bundled
    path = Path(name)
    if not path.exists():
        return fetch_model(name, access)
    if not path.is_dir():
        check_file(path)
    return path


def resolve_parts(
    name: str, parts: PartsArgument = None, access: Access = ANYWHERE
) -> tuple[ModelFolder, dict[str, Path]]:
    """The folder with the model's index and tokenizer, and where each part lies: a folder or a single file."""
    replaced = check_parts_argument(parts)
    path = resolve_model(name, access)
    others = access._replace(revision=None)
    source = parts if parts and not replaced else None  # the model that has a single file's other parts
    tensors = {} if path.is_dir() else open_weights(path).tensors
    inside = find_parts(tensors)
    home = path if path.is_dir() else path.parent
    if home.name in FOLDERS.values() and not find_index(home).exists() and find_index(home.parent).exists():
        raise UserError(f"{path} is a part of a model: name the whole, {home.parent}.")
    if path.is_dir():
        if source is not None:
            raise UserError(
                f"{name} is a whole model; a name as parts is for a model that is one file. To replace a part, say "
                'which: parts={"vae": …}.'
            )
        folder = path
    elif source is not None:
        is_here = find_bundled(str(source)) or Path(source).exists()  # type: ignore[arg-type]
        folder = resolve_model(str(source)) if is_here else fetch_parts(str(source), others)
    elif find_index(path.parent).exists():
        folder = path.parent
    elif not Path(name).exists():  # a released single file: the registry knows where the rest is
        folder = fetch_parts(name, access)
    else:
        # Or the sentence would promise what more files cannot mend:
        check_supported(path, dict.fromkeys(own_names("transformer", tensors).values()))
        if inside and "transformer" not in inside:
            what = "a text encoder" if "text_encoder" in inside else "an autoencoder"
            raise UserError(f"{path} is {what}, not a model: name the model's folder, or its transformer's file.")
        whole = "text_encoder" in inside
        missing = "tokenizer and the text encoder's config" if whole else "text encoder and the autoencoder"
        raise UserError(
            f"{path} holds a {'model without a folder' if whole else 'transformer alone'}. Say where the {missing} "
            'are: parts="4b" or another model\'s name or folder.'
        )
    model = open_folder(folder)
    paths = {part: model.part(part) for part in PARTS}
    if path.is_file():
        paths |= {part: path for part in inside if part != "text_encoder"} | {"transformer": path}
        if "text_encoder" in inside:
            say_once(f"{path} holds a text encoder, too, which is not read: it is {folder}'s.")
    for part, place in replaced.items():
        paths[part] = resolve_replacement(part, str(place), others)
    return model, paths


def check_parts_argument(parts: PartsArgument) -> dict[str, str | Path]:
    """The parts that a call replaces, by our names: "vae", the folder's name, is the autoencoder. Raises UserError."""
    if not isinstance(parts, dict):
        return {}
    aliases = {folder: part for part, folder in FOLDERS.items()}
    unknown = set(parts) - {*PARTS, *aliases}
    if unknown:
        raise UserError(
            f"parts names {first_few((clip(repr(name)) for name in unknown), 2)}; a model's parts are "
            f"{', '.join(FOLDERS.values())}."
        )
    return {aliases.get(name, name): place for name, place in parts.items()}


def resolve_replacement(part: str, place: str, access: Access = ANYWHERE) -> Path:
    """Where a part is taken from: that part of a model, or the part's own folder or file."""
    path = resolve_model(place, access)
    if find_index(path).exists():
        return open_folder(path).part(part)
    own = path / FOLDERS[part]
    if own.is_dir():
        return own
    only = path / TAEF2_FILE
    return only if only.exists() else path


# ---------------------------------------------------------------- files → configs, checked against each other


@dataclass(frozen=True)
class ModelInfo:
    """What the pipeline needs to know beside the weights; read from the model's own files."""

    name: str
    distilled: bool  # few steps, no guidance
    size: int  # default height and width in pixels
    max_length: int  # text tokens per prompt
    kv: bool = False  # the KV variant: reference pictures are computed once, not in every step
    d_latent: int = field(default=128, repr=False)  # numbers per image token
    family: Family = field(default=KLEIN, repr=False)
    product: str | None = field(default=None, compare=False)  # what multiplies bfloat16 here, where that is quick

    @property
    def only_size(self) -> int | None:
        """The side of the pictures of a bundled model, which has learned from no others; None: there are many."""
        return self.size if find_bundled(self.name) else None

    @property
    def steps(self) -> int:
        return self.family.defaults[self.distilled][0]

    @property
    def guidance(self) -> float:
        return self.family.defaults[self.distilled][1]


def read_model_info(name: str, folder: ModelFolder, file: Path | None, configs: Configs) -> ModelInfo:
    """What the files say about themselves. file: the transformer's, if it is a single one: its name must tell, too."""
    cfg = configs.transformer
    family = family_of(cfg)
    path = folder.part("autoencoder") / "config.json"
    size = read_json(path).get("sample_size", 1024) if path.exists() else 1024
    SAMPLE_SIZE.check(path, size)
    distilled, kv, levels = family.read_variant(folder, cfg)
    family = replace(family, schedule=levels)
    by_name = family.read_file_name(file.name) if file and family.read_file_name else None
    if by_name and file:
        distilled, kv = by_name
        if not find_released(name):
            kinds = ["distilled" if distilled else "a base model"] + ["for cached references"] * kv
            say_once(f"{file.name} is taken for {' and '.join(kinds)}, by its name.")
    return ModelInfo(name, distilled, size, configs.text_encoder.max_length, kv, cfg.d_latent, family)


def load_tokenizer(folder: ModelFolder | Path) -> Tokenizer:
    """The tokenizer of a model's folder. Raises MissingFileError or UserError."""
    if isinstance(folder, Path):
        folder = ModelFolder(folder, {})
    path = folder.part("tokenizer") / "tokenizer.json"
    check_file(path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as e:  # the library has no error of its own
        raise UserError(f"{path} is not a tokenizer ({printable(str(e))[:100]}): download it again.") from None
    tokenizer.no_padding()  # chapter 3 pads and counts
    tokenizer.no_truncation()
    if tokenizer.token_to_id(PAD) is None:
        raise UserError(f"{path} has no {PAD} token, with which prompts are filled up: it is not Qwen's.")
    return tokenizer


def check_parts(folder: Path, configs: Configs, tokenizer: Tokenizer) -> None:
    """Refuse parts that were not made for each other, before gigabytes are read. Raises UserError."""
    cfg, text_cfg, autoencoder_cfg = configs
    features = len(text_cfg.out_layers) * text_cfg.d
    channels = 4 * autoencoder_cfg.latent_channels
    for what, wanted, but, there in (
        ("transformer reads", cfg.d_text, "text features per token and the text encoder gives", features),
        ("transformer works on", cfg.d_latent, "latent channels and the autoencoder makes", channels),
    ):
        if wanted != there:
            raise UserError(f"The {what} {wanted} {but} {there}: the parts in {folder} belong to different models.")
    # All ids that it can give, added tokens and those around every text included.
    highest = max(*tokenizer.get_vocab(with_added_tokens=True).values(), *tokenizer.encode("a").ids)
    if max(text_cfg.out_layers) > text_cfg.layers or highest >= text_cfg.vocab:
        raise UserError(
            f"The text encoder in {folder} has {text_cfg.layers} layers and {text_cfg.vocab} tokens; model_index.json "
            f"wants layer {max(text_cfg.out_layers)}, the tokenizer has {highest + 1} tokens: the parts belong to "
            "different models."
        )


# ---------------------------------------------------------------- weights


def match_weights(module: nn.Module, arrays: Weights, rules: Rules) -> Weights:
    """Give every parameter of `module` its tensor, whatever layout the files have. Raises UserError on what is off.

    rules: what the released folders call our tensors, see `names`; a single file has our own names already.
    """
    arrays = {name: w for name, w in arrays.items() if not name.endswith("num_batches_tracked")}  # of the batch norm
    parameters = dict(tree_flatten(module.parameters()))
    released_names = [rename(name, rules) for name in parameters]
    if sum(name in arrays for name in parameters) > sum(all(n in arrays for n in names) for names in released_names):
        rules = []
    for name, parameter in parameters.items():  # some files keep the autoencoder's attention as 1×1 convolutions
        array = arrays.get(name)
        if parameter.ndim == 2 and isinstance(array, mx.array) and array.shape[2:] == (1, 1):
            arrays[name] = array.squeeze((2, 3))
    weights = match(module, arrays, rules, convert_quantized)
    plain = {name: w for name, w in weights.items() if isinstance(w, mx.array)}
    wrong = [f"{name} ({w.dtype})" for name, w in plain.items() if not mx.issubdtype(w.dtype, mx.floating)]
    if wrong:
        raise UserError(f"{first_few(wrong)} should have real numbers: take another file of this model.")
    return weights


def convert_quantized(tensors: list[Any], conversion: Conversion | None) -> mx.array | QuantizedMatrix:
    """Chapter 8's `to_mlx`, for quantized matrices too."""
    if not any(isinstance(w, QuantizedMatrix) for w in tensors):
        return to_mlx(tensors, conversion)
    if len({(type(w), getattr(w, "spec", None)) for w in tensors}) > 1:
        return to_mlx([w.decode() if isinstance(w, QuantizedMatrix) else w for w in tensors], conversion)
    return join(tensors).map(lambda rows: to_mlx([rows], conversion))


def load_part(module: nn.Module, path: Path, rules: Rules, dtype: mx.Dtype) -> nn.Module:
    """Fill `module` from a part's folder or file, floating-point weights as `dtype`. Returns the module."""
    arrays, _ = open_weights(path).load()
    return load_weights(module, match_weights(module, dict(arrays), rules), dtype)


def read_quant_specs(path: Path) -> dict[str, QuantSpec]:
    """What a folder's config.json says of its quantized matrices, in the words of MLX's own tools, by layer.

    Under "" stands what holds for layers without words of their own. Raises UserError for what MLX cannot read.
    """
    config = path / "config.json"
    words = read_json(config).get("quantization") if config.exists() else None
    if not isinstance(words, dict):
        return {}
    layers = {name: own for name, own in words.items() if isinstance(own, dict)}
    for_all = {name: own for name, own in words.items() if name in ("mode", "bits", "group_size")}
    specs = {}
    for name, own in {"": for_all, **layers}.items():
        said = for_all | own
        spec = QuantSpec(said.get("mode", "affine"), said.get("bits", 0), said.get("group_size", 0))
        affine = spec.mode == "affine" and spec.bits in (2, 3, 4, 5, 6, 8) and spec.group in (32, 64, 128)
        if not affine and spec not in QUANT_SPECS.values():
            raise UserError(
                f"{config} says that {name or 'it'} is quantized by {clip(repr(own))}, which kleinlite does not know: "
                "take another model."
            )
        specs[name] = spec
    return specs


def narrow(w: mx.array | QuantizedMatrix) -> mx.array | QuantizedMatrix:
    """A matrix in float32, as in Z-Image's files, as bfloat16; anything else as it is."""
    if isinstance(w, mx.array) and w.ndim == 2 and w.dtype == mx.float32:
        return w.astype(mx.bfloat16)
    return w


# ---------------------------------------------------------------- parts


class Matched(NamedTuple):
    """A part without its weights, and those that belong into it, none of them read."""

    module: nn.Module
    weights: Weights
    wide: bool  # whether matrices of its files are narrowed


@dataclass(frozen=True)
class Checkpoint:
    """A model's files, listed and checked. Only configs and headers are read; each `load_` builds its part afresh."""

    info: ModelInfo
    configs: Configs
    home: ModelFolder  # where model_index.json and the tokenizer are
    files: dict[str, WeightFiles]  # by part
    dtype: mx.Dtype  # in which the transformer and the text encoder compute
    quant_spec: QuantSpec | None = None  # in which they are to be quantized when they are loaded
    is_quantized: bool = False  # whether they are so in their files, and so cannot be quantized again
    chosen: str | dict[str, str] | None = None  # `parts` of `open_checkpoint`, as text
    # What opening has worked out and the first load takes: lazy, since what is kept would stay in memory.
    _matched: dict[str, Matched] = field(default_factory=dict, repr=False, compare=False)
    _tokenizers: list[Tokenizer] = field(default_factory=list, repr=False, compare=False)

    @property
    def quantize(self) -> int | str | None:
        """`quant_spec` in the words of a call, if there is one."""
        return next((word for word, spec in QUANT_SPECS.items() if spec == self.quant_spec), None)

    @property
    def bits(self) -> tuple[float, float]:
        """Bits per weight of the transformer and of the text encoder, as they will be in memory, scales included."""
        return self._bits("transformer"), self._bits("text_encoder")

    def _bits(self, part: str) -> float:
        if self.quant_spec:
            return self.quant_spec.bits_per_weight
        widest = 8.0 * self.dtype.size  # at most: wider weights, and those of small parts, are cast
        if self.nbytes(part) < SMALL_PART_BYTES:
            return widest
        stored = count = 0
        for w in self.weights(part).values():
            rows = w.tensors.values() if isinstance(w, QuantizedMatrix) else (w,)
            stored += 8 * sum(array.nbytes for array in rows)
            count += w.shape[0] * w.shape[1] if isinstance(w, QuantizedMatrix) else w.size
        return min(widest, stored / count)

    def load_tokenizer(self) -> Tokenizer:
        return self._tokenizers.pop() if self._tokenizers else load_tokenizer(self.home)

    def load_text_encoder(self, lazy: bool = False) -> TextEncoder:
        """Up to the highest layer whose output becomes features; what lies above is neither built nor read."""
        return self._load("text_encoder", lazy)

    def load_transformer(self, lazy: bool = False) -> Any:
        """The family's network. lazy: no weight is read yet, so that a machine reads only what it is to hold."""
        return self._load("transformer", lazy)

    def load_autoencoder(self) -> Any:
        """In float32 as in the makers' own code, and never quantized: it is small; bfloat16 leaves bands in skies."""
        part = self.take("autoencoder")
        return load_weights(part.module, part.weights, mx.float32)

    def _load(self, part: str, lazy: bool) -> Any:
        module, weights, wide = self.take(part)
        keep = self.quant_spec is not None or self.nbytes(part) >= SMALL_PART_BYTES
        load_weights(module, weights, self.dtype, keep)
        del weights  # so that a matrix is forgotten once it is quantized
        if self.quant_spec:
            return quantize_module(module, self.quant_spec, self.dtype, lazy)
        if wide and not lazy:
            for parameter in tree_flatten(module.parameters()):
                mx.eval(parameter[1])  # cast one after the other: never all of them in two widths
        return module

    def weights(self, part: str) -> Weights:
        """What belongs into a part, under our names, as stored and not yet read."""
        if part not in self._matched:
            self._matched[part] = self._match(part)
        return self._matched[part].weights

    def take(self, part: str) -> Matched:
        """What opening has matched, for one load; matched anew for another."""
        return self._matched.pop(part, None) or self._match(part)

    def _match(self, part: str) -> Matched:
        """A part and its weights. Raises UserError if a tensor has no place, or a place no tensor."""
        family = family_of(self.configs.transformer)
        cfg = getattr(self.configs, part)
        form = family.parts[part].of(cfg)
        files = self.files[part]
        check_packing(files.path, files.tensors)
        everything, metadata = files.load()
        names = own_names(part, everything, family)
        tensors = {own: everything[name] for name, own in names.items()}
        arrays: Weights = dict(tensors)
        wide = False
        if part != "autoencoder":
            arrays = assemble(tensors, metadata, read_quant_specs(files.path))
            if files.nbytes >= SMALL_PART_BYTES:
                narrowed = {name: narrow(w) for name, w in arrays.items()}
                wide = any(narrowed[name] is not w for name, w in arrays.items())
                arrays = narrowed
        arrays = {own: w for own, w in arrays.items() if form.is_used(cfg, own)}
        module = (form.build or form.network)(cfg)
        return Matched(module, match_weights(module, arrays, form.names), wide)

    def nbytes(self, part: str) -> int:
        return self.files[part].nbytes


def open_checkpoint(
    name: str | Path, *, dtype: mx.Dtype, quantize: int | str | None = None, parts: PartsArgument = None,
    access: Access = ANYWHERE,
) -> Checkpoint:  # fmt: skip
    """Find a model and check that its parts are whole and fit together: cheap, since no weight is read.

    name: a bundled or released model, a hub repository, a folder, or a single file with a transformer.
    dtype: in which to compute. quantize: 3, 4, 5, 6, 8, "mxfp4", "mxfp8" or "nvfp4"; quantizes what is loaded.
    parts: for a single file, the model that has the other parts; or a dictionary that replaces parts, as in
    {"vae": "small-decoder"}.
    Raises UserError, FileError or HubError.
    """
    spec = find_quant_spec(quantize)
    folder, paths = resolve_parts(str(name), parts, access)
    configs, files = read_parts(folder, paths)
    tokenizer = load_tokenizer(folder)
    check_parts(folder.path, configs, tokenizer)
    if dtype == mx.float16 and not family_of(configs.transformer).float16:
        raise UserError(f"The numbers in {name} grow beyond float16's: take mx.bfloat16 or mx.float32 as dtype.")
    file = paths["transformer"] if paths["transformer"].is_file() else name_of_variant(folder)
    info = read_model_info(str(name), folder, file, configs)
    chosen = {part: str(place) for part, place in parts.items()} if isinstance(parts, dict) else parts and str(parts)
    checkpoint = Checkpoint(info, configs, folder, files, dtype, spec, chosen=chosen or None)
    checkpoint._tokenizers.append(tokenizer)
    weights = [w for part in PARTS for w in checkpoint.weights(part).values()]  # every tensor has its place
    quantized = next((w.spec for w in weights if isinstance(w, QuantizedMatrix) and w.spec.mode != "fp8"), None)
    if quantized and spec:
        raise UserError(f"{name} is quantized already ({quantized.mode}, {quantized.bits} bits): leave quantize out.")
    return replace(checkpoint, is_quantized=quantized is not None)


def read_parts(folder: ModelFolder, paths: dict[str, Path]) -> tuple[Configs, dict[str, WeightFiles]]:
    """The configs of all parts, and the files with their weights: the transformer first, which says the family."""
    configs: dict[str, Any] = {}
    files: dict[str, WeightFiles] = {}
    family: Family | None = None
    for part, path in paths.items():
        if path.is_file():
            files[part] = open_weights(path)
            configs[part] = infer_config(part, files[part], family)
        elif isinstance(folder, MlxFolder) and path == folder.part(part):
            spec = read_quant_specs(path).get("")
            files[part] = MlxFiles(path, open_weights(path).shards, folder.layout, spec.group if spec else GROUP)
            if part == "text_encoder" and (path / "config.json").exists():
                configs[part] = read_config(part, path, folder.index, family)
            else:
                configs[part] = infer_config(part, files[part], family, infer_text_encoder)
        else:
            configs[part] = read_config(part, path, folder.index, family)
        if family is None:
            family = family_of(configs[part])
            other = family_of_index(folder.index)
            if family is not other:
                raise UserError(
                    f"{path} is a transformer of {family.title}, and {folder.path} has the parts of {other.title}: "
                    f"take all from one model, for example parts={family.example!r}."
                )
    files |= {part: open_weights(path) for part, path in paths.items() if part not in files}
    return Configs(**configs), files
