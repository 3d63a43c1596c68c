"""A model's name becomes loaded parts: name → files → configs → weights → parts. Chapter 8 shows the heart of it.

`open_checkpoint` reads configs and headers only, so that a model that cannot work is refused before gigabytes are read.
Each file is listed and checked once, each tensor matched once: what opening finds out, loading uses.
"""

import itertools
import math
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from tokenizers import Tokenizer

from ..errors import UserError, clip, first_few, say_once
from ..quantization import QuantizedMatrix, QuantSpec
from ..text_encoder import TextEncoder
from .configs import read_parts
from .download import ANYWHERE, Access, fetch_model, fetch_parts
from .families import KLEIN, Configs, Family, family_of, find_parts, own_names
from .files import ModelFolder, WeightFiles, open_weights, read_json
from .folders import check_supported, find_index, open_folder
from .formats import (
    Weights,
    assemble,
    check_packing,
    find_quant_spec,
    load_weights,
    match_weights,
    narrow,
    read_quant_specs,
)  # fmt: skip
from .other_programs import name_of_variant
from .part_format import Field, Rules
from .places import find_told, tell
from .quantize_network import quantize as quantize_module
from .registry import FOLDERS, PART_WORDS, PARTS, TAEF2_FILE, find_bundled, find_released
from .tokenizer import load_tokenizer

SIZE = Field("sample_size", int, 16, 2**16)
PartsArgument = str | Path | dict[str, str | Path] | None

# ---------------------------------------------------------------- name → files


def resolve_model(name: str, access: Access = ANYWHERE) -> Path:
    """Where a model's files are: a bundled model, a local folder or single file, or a download from the hub."""
    if not name.strip():
        raise UserError("The name of the model is empty: name one of `kleinlite models`, or leave it out for nano.")
    bundled = find_bundled(name)
    if bundled:
        return Path(str(files("kleinlite"))) / bundled
    path = Path(find_told(name, Path()) or name).expanduser()
    return path if path.exists() else fetch_model(name, access)


def name_parts(parts: dict[str, Any]) -> dict[str, Any]:
    """Parts to replace, by our words for them; a folder's word, vae, is taken too. Raises UserError."""
    unknown = [clip(repr(word)) for word in parts if word not in PART_WORDS]
    if unknown:
        raise UserError(f"parts names {first_few(unknown, 2)}; a model's parts are {', '.join(PARTS)}.")
    return {PART_WORDS[word]: place for word, place in parts.items()}


def resolve_parts(
    name: str, parts: PartsArgument = None, access: Access = ANYWHERE
) -> tuple[ModelFolder, dict[str, Path]]:
    """The folder with the model's index and tokenizer, and where each part lies: a folder or a single file."""
    own: dict[str, Path] = {}
    lender = None
    if isinstance(parts, dict):
        own = {part: resolve_replacement(part, str(place), access) for part, place in name_parts(parts).items()}
    elif parts is not None:
        lender = str(parts)
    folder = path = resolve_model(name, access)
    inside: dict[str, Path] = {}
    if path.is_file():
        folder, inside = resolve_file(name, path, lender, access)
    elif lender is not None:
        wrong = f"{name} is a whole model; a name as parts is for a model that is one file. To replace a part, say"
        raise UserError(f'{wrong} which: parts={{"autoencoder": …}}.', shell=f"{wrong} which: --decoder NAME.")
    model = open_folder(folder)
    return model, {part: model.part(part) for part in PARTS} | inside | own


def resolve_file(name: str, path: Path, lender: str | None, access: Access) -> tuple[Path, dict[str, Path]]:
    """Of a single file the folder with its other parts, and which parts lie in the file itself. Raises UserError."""
    tensors = open_weights(path).tensors
    check_supported(path, dict.fromkeys(own_names("transformer", tensors).values()))
    inside = find_parts(tensors)
    if inside and "transformer" not in inside:
        what = " and ".join(inside).replace("_", " ")
        raise UserError(f"{path} holds no transformer, but {what}: name the model's folder, or its transformer.")
    folder = find_lender(name, path, lender, access)
    if inside.pop("text_encoder", None) is not None:
        say_once(f"{path} holds a text encoder, too, which is not read: it is {folder}'s.")
    return folder, dict.fromkeys([*inside, "transformer"], path)


def find_lender(name: str, path: Path, lender: str | None, access: Access) -> Path:
    """The folder with a single file's other parts; of one that is not here all but the transformer is fetched."""
    if lender is not None:
        is_here = find_bundled(lender) or Path(lender).exists()
        return resolve_model(lender) if is_here else fetch_parts(lender, access._replace(revision=None))
    if find_index(path.parent).exists():
        return path.parent
    if not Path(name).expanduser().exists():  # a released single file: the registry knows where the rest is
        return fetch_parts(name, access)
    wrong = f"{path} is a single file: say which model has its tokenizer and its other parts:"
    others_too = "or another model's name or folder."
    raise UserError(f'{wrong} parts="4b" {others_too}', shell=f"{wrong} --parts 4b {others_too}")


def resolve_replacement(part: str, place: str, access: Access = ANYWHERE) -> Path:
    """Where a part is taken from: that part of a model, or the part's own folder or file."""
    path = resolve_model(place, access._replace(revision=None))
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
    """What the pipeline needs to know besides the weights; read from the model's own files."""

    name: str
    distilled: bool  # few steps, no guidance
    size: int  # default height and width in pixels
    max_length: int  # text tokens per prompt
    kv: bool = False  # the KV variant: reference pictures are computed once, not in every step
    d_latent: int = field(default=128, repr=False)  # numbers per image token
    family: Family = field(default=KLEIN, repr=False)
    product: str | None = field(default=None, compare=False)  # what multiplies bfloat16 here, where that is quick
    chosen: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)  # `quantize` and `parts`, if given

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


def read_model_info(name: str, folder: ModelFolder, file_name: str | None, configs: Configs) -> ModelInfo:
    """What the files say about themselves. file_name: of a single file, and of others that can tell no more."""
    cfg = configs.transformer
    family = family_of(cfg)
    path = folder.part("autoencoder") / "config.json"
    size = read_json(path).get("sample_size", 1024) if path.exists() else 1024
    SIZE.check(path, size)
    distilled, kv, levels = family.read_variant(folder, cfg)
    by_name = family.read_file_name(file_name) if file_name and family.read_file_name else None
    if by_name:
        distilled, kv = by_name
        if not find_released(name):
            kinds = ["distilled" if distilled else "a base model"] + ["for cached references"] * kv
            say_once(f"{file_name} is taken for {' and '.join(kinds)}, by its name.")
    family = replace(family, schedule=levels)
    return ModelInfo(name, distilled, size, configs.text_encoder.max_length, kv, cfg.d_latent, family)


def check_parts(folder: Path, configs: Configs, tokenizer: Tokenizer) -> None:
    """Refuse parts that were not made for each other, before gigabytes are read. Raises UserError."""
    cfg, text_cfg, autoencoder_cfg = configs
    features = len(text_cfg.out_layers) * text_cfg.d
    channels = 4 * autoencoder_cfg.latent_channels
    highest = max(tokenizer.get_vocab().values())
    wrong = None
    if cfg.d_text != features:
        wrong = f"transformer reads {cfg.d_text} text features per token and the text encoder gives {features}"
    elif cfg.d_latent != channels:
        wrong = f"transformer works on {cfg.d_latent} latent channels and the autoencoder makes {channels}"
    elif max(text_cfg.out_layers) > text_cfg.layers:
        wrong = f"text encoder has {text_cfg.layers} layers and model_index.json wants layer {max(text_cfg.out_layers)}"
    elif highest >= text_cfg.vocab:
        wrong = f"text encoder has {text_cfg.vocab} tokens and the tokenizer {highest + 1}"
    if wrong:
        raise UserError(f"The {wrong}: the parts in {folder} belong to different models.")


# ---------------------------------------------------------------- weights


def load_part(module: nn.Module, path: Path, rules: Rules, dtype: mx.Dtype) -> nn.Module:
    """Fill `module` from a part's folder or file, floating-point weights as `dtype`. Returns the module."""
    arrays, _ = open_weights(path).load()
    return load_weights(module, match_weights(module, dict(arrays), rules), dtype)


def match_part(part: str, configs: Configs, files: WeightFiles) -> tuple[nn.Module, Weights]:
    """A part and its weights, not yet read. Raises UserError if a tensor has no place, or a place no tensor."""
    cfg = getattr(configs, part)
    family = family_of(configs.transformer)
    form = family.parts[part].of(cfg)
    check_packing(files.path, files.tensors)
    everything, metadata = files.load()
    tensors = {own: everything[name] for name, own in own_names(part, everything, family).items()}
    arrays: Weights = dict(tensors)
    if part != "autoencoder":
        arrays = assemble(tensors, metadata, read_quant_specs(files.path))
        if files.is_wide:
            arrays = {name: narrow(w) for name, w in arrays.items()}
    arrays = {own: w for own, w in arrays.items() if form.is_used(cfg, own)}
    module = (form.build or form.network)(cfg)
    return module, match_weights(module, arrays, form.names)


# ---------------------------------------------------------------- parts


@dataclass
class Opened:
    """What opening a model has made, until the first load of each takes it out."""

    tokenizer: Tokenizer | None
    parts: dict[str, tuple[nn.Module, Weights]]  # see `match_part`


@dataclass(frozen=True)
class Checkpoint:
    """A model's files, listed and checked. Only configs and headers are read; each `load_` builds its part afresh."""

    info: ModelInfo
    configs: Configs
    home: ModelFolder  # where model_index.json and the tokenizer are
    files: dict[str, WeightFiles]  # by part
    dtype: mx.Dtype  # in which the transformer and the text encoder compute
    quant_spec: QuantSpec | None  # in which they are to be quantized when they are loaded
    is_quantized: bool  # whether they are so in their files, and so cannot be quantized again
    opened: Opened = field(repr=False, compare=False)

    @property
    def bits(self) -> tuple[float, float]:
        """Bits per weight of the transformer and of the text encoder, as they will be in memory, scales included."""
        return self._bits("transformer"), self._bits("text_encoder")

    def _bits(self, part: str) -> float:
        if self.quant_spec:
            return self.quant_spec.bits_per_weight
        widest = 8.0 * self.dtype.size  # at most: wider weights, and those of small parts, are cast
        if not self.files[part].is_large:
            return widest
        weights = self.weights(part).values()
        arrays = [w.tensors.values() if isinstance(w, QuantizedMatrix) else (w,) for w in weights]
        stored = 8 * sum(array.nbytes for array in itertools.chain(*arrays))
        return min(widest, stored / sum(math.prod(w.shape) for w in weights))

    def load_tokenizer(self) -> Tokenizer:
        tokenizer = self.opened.tokenizer or load_tokenizer(self.home, self.info.family.template)
        self.opened.tokenizer = None
        return tokenizer

    def load_text_encoder(self, lazy: bool = False) -> TextEncoder:
        """Up to the highest layer whose output becomes features; what lies above is neither built nor read."""
        return self._load("text_encoder", lazy)

    def load_transformer(self, lazy: bool = False) -> Any:
        """The family's network. lazy: no weight is read yet, so that a machine reads only what it is to hold."""
        return self._load("transformer", lazy)

    def load_autoencoder(self) -> Any:
        """In float32 as in the makers' own code, and never quantized: it is small; bfloat16 leaves bands in skies."""
        return load_weights(*self.take("autoencoder"), mx.float32)

    def _load(self, part: str, lazy: bool) -> Any:
        module, weights = self.take(part)
        keep_narrow = self.files[part].is_large or self.quant_spec is not None
        load_weights(module, weights, self.dtype, keep_narrow)
        del weights  # so that a matrix is forgotten once it is quantized
        if self.quant_spec:
            return quantize_module(module, self.quant_spec, self.dtype, lazy)
        if self.files[part].is_wide and not lazy:
            for parameter in tree_flatten(module.parameters()):
                mx.eval(parameter[1])  # cast one after the other: never all of them in two widths
        return module

    def weights(self, part: str) -> Weights:
        """What belongs into a part, under our names, as stored and not yet read."""
        if part not in self.opened.parts:
            self.opened.parts[part] = match_part(part, self.configs, self.files[part])
        return self.opened.parts[part][1]

    def take(self, part: str) -> tuple[nn.Module, Weights]:
        """A part without its weights, and those that belong into it: matched when opened, and anew after that."""
        return self.opened.parts.pop(part, None) or match_part(part, self.configs, self.files[part])


def open_checkpoint(
    name: str | Path, *, dtype: mx.Dtype, quantize: int | str | None = None, parts: PartsArgument = None,
    access: Access = ANYWHERE,
) -> Checkpoint:  # fmt: skip
    """Find a model and check that its parts are whole and fit together: cheap, since no weight is read.

    name: a bundled or released model, a hub repository, a folder, or a single file with a transformer.
    dtype: in which to compute. quantize: 3, 4, 5, 6, 8, "mxfp4", "mxfp8" or "nvfp4"; quantizes what is loaded.
    parts: for a single file, the model that has the other parts; or a dictionary that replaces parts, as in
    {"autoencoder": "small-decoder"}.
    Raises UserError, FileError or HubError.
    """
    spec = find_quant_spec(quantize)
    released = find_released(str(name))
    if spec and released and released.quantized and not Path(name).exists():  # before gigabytes are fetched
        raise UserError(f"{name} is quantized already: leave quantize out.")
    folder, paths = resolve_parts(str(name), parts, access)
    configs, files = read_parts(folder, paths)
    tokenizer = load_tokenizer(folder, family_of(configs.transformer).template)
    check_parts(folder.path, configs, tokenizer)
    if dtype == mx.float16 and not family_of(configs.transformer).float16:
        raise UserError(f"The numbers in {name} grow beyond float16's: take mx.bfloat16 or mx.float32 as dtype.")
    file = paths["transformer"]
    info = read_model_info(str(name), folder, file.name if file.is_file() else name_of_variant(folder), configs)
    places: Any = parts and tell(str(parts))
    if isinstance(parts, dict):
        places = {part: tell(str(place)) for part, place in name_parts(parts).items()}
    chosen = {word: value for word, value in (("quantize", quantize), ("parts", places)) if value}
    matched = {part: match_part(part, configs, files[part]) for part in PARTS}  # every tensor has its place
    weights = [w for _, arrays in matched.values() for w in arrays.values()]
    quantized = next((w.spec for w in weights if isinstance(w, QuantizedMatrix) and w.spec.mode != "fp8"), None)
    if quantized and spec:
        raise UserError(f"{name} is quantized already ({quantized.mode}, {quantized.bits} bits): leave quantize out.")
    opened = Opened(tokenizer, matched)
    info = replace(info, name=tell(str(name)), chosen=chosen)
    return Checkpoint(info, configs, folder, files, dtype, spec, quantized is not None, opened)
