"""An adapter file: LoRA, LoKr, LoHa or DoRA, read into deltas of our matrices.

A file is read once, and understood as a whole or refused: each tensor must find its one place, each module must be
complete, finite and of the right shape, or one sentence names what is wrong and the model that the file seems to be
for. LoRA's formula is chapter 14's, the others are in `variants`.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from ...checkpoints import swap_halves
from ...errors import MissingFileError, UserError, clip, first_few
from ...lora import LoRA, linear_layers
from ..families import KLEIN, Family, family_of
from ..files import list_files, open_weight_file, read_json
from ..part_format import check_words
from .names import PREFIXES, Size, Target, find_targets, list_names, matrix_shapes, sort_names
from .variants import DoRA, Hadamard, Kronecker, SplitAdapter, weight_of

REAL_TYPES = {"F16", "BF16", "F32"}  # in which a file may have its matrices
KINDS = {  # by the names of a module's tensors, in the order of the alphabet; a magnitude makes DoRA of each
    "down up": "LoRA",
    "hada_w1_a hada_w1_b hada_w2_a hada_w2_b": "LoHa",
    "lokr_w1 lokr_w2": "LoKr",
    "lokr_w1 lokr_w2_a lokr_w2_b": "LoKr",
    "lokr_w1_a lokr_w1_b lokr_w2": "LoKr",
    "lokr_w1_a lokr_w1_b lokr_w2_a lokr_w2_b": "LoKr",
}


@dataclass(frozen=True)
class Tensors:
    """The tensors of one module of a file, sorted into the formula of their kind.

    LoRA: up (d_out, r), down (r, d_in). LoHa: two pairs as LoRA's, whose products are multiplied number by number.
    LoKr: two matrices, each whole or as a pair, whose Kronecker product it is. With a magnitude each is a DoRA:
    (d_out,) or (d_out, 1), a length for each row, or (1, d_in), for each column.
    """

    target: Target
    kind: str
    arrays: dict[str, mx.array]

    @property
    def rank(self) -> int | None:
        """The number that alpha is divided by; None for a LoKr with both factors whole, whose shapes do not tell."""
        lower = [name for name in ("down", "hada_w2_b", "lokr_w2_b", "lokr_w1_b") if name in self.arrays]
        return len(self.arrays[lower[0]]) if lower else None

    @property
    def sizes(self) -> str:
        """The tensors' names and shapes, for a sentence."""
        return ", ".join(f"{name} {tuple(a.shape)}" for name, a in self.arrays.items() if name != "alpha")

    def product(self, name: str) -> mx.array:
        """A matrix as it is in the file, or its two factors multiplied in float32."""
        w = self.arrays
        return w[name] if name in w else w[f"{name}_a"].astype(mx.float32) @ w[f"{name}_b"].astype(mx.float32)

    @property
    def shape(self) -> Size | None:
        """Rows and columns of the delta; None if the tensors do not fit each other."""
        w = self.arrays
        with suppress(ValueError):  # of what MLX, which is lazy, does not multiply, or of what has no two dimensions
            if self.kind.startswith("LoKr"):
                (o1, i1), (o2, i2) = (self.product(name).shape for name in ("lokr_w1", "lokr_w2"))
                d_out = o1 * o2
                d_in = i1 * i2
            elif self.kind.startswith("LoHa"):
                [(d_out, d_in)] = {self.product("hada_w1").shape, self.product("hada_w2").shape}
            else:
                d_out, d_in = (w["up"] @ w["down"]).shape
            if "magnitude" not in w or w["magnitude"].shape in ((d_out,), (d_out, 1), (1, d_in)):
                return d_out, d_in
        return None

    def delta(self, scaling: float, weight: mx.array) -> nn.Module:
        """The module that computes it. weight: the matrix that it stands beside, of which only DoRA makes use."""

        def turn(rows: mx.array) -> mx.array:
            return swap_halves(rows) if self.target.swapped and len(rows) > 1 else rows

        w = self.arrays
        change: LoRA | Kronecker | Hadamard
        if self.kind.startswith("LoKr"):
            first, second = map(self.product, ("lokr_w1", "lokr_w2"))
            if self.target.swapped:  # its rows are blocks of rows, of which there may be an odd number
                first, second = mx.ones((1, 1)), turn(mx.kron(first, second))
            change = Kronecker(first, second, scaling)
        elif self.kind.startswith("LoHa"):
            change = Hadamard(turn(w["hada_w1_a"]), w["hada_w1_b"], turn(w["hada_w2_a"]), w["hada_w2_b"], scaling)
        else:
            change = LoRA(w["down"], turn(w["up"]), scaling)
        return DoRA(change, turn(w["magnitude"]), weight) if "magnitude" in w else change


def parse_module(path: Path, module: str, arrays: dict[str, mx.array], target: Target) -> Tensors:
    """One of the four kinds. Raises UserError for half a pair, two kinds in one, and matrices that do not fit."""
    if "alpha" in arrays and arrays["alpha"].size != 1:
        raise UserError(f"{path}: the alpha of {clip(module)} is not one number.")
    kind = KINDS.get(" ".join(sorted(arrays.keys() - {"alpha", "magnitude"})))
    if kind is None:
        there = first_few(sorted(arrays))
        raise UserError(f"{path}: {clip(module)} is not complete, it only has {there}: get it anew.")
    if "magnitude" in arrays:
        kind = "DoRA" if kind == "LoRA" else f"{kind} with magnitudes"
    tensors = Tensors(target, kind, arrays)
    if tensors.shape is None:
        raise UserError(f"{path}: {clip(module)} is tensors that do not go together ({clip(tensors.sizes, 100)}).")
    return tensors


@dataclass(frozen=True)
class Adapter:
    """An adapter file, read and understood; whether it fits a model, `check` tells."""

    name: str  # the file's, without its ending, or that of PEFT's folder
    path: Path
    family: Family
    modules: dict[str, Tensors]  # by the names in the file
    metadata: dict[str, str]
    config: dict[str, Any]  # what is said of its strength, see `read_strength`
    sha256: str

    @property
    def source(self) -> str:
        """What to call it by: the name of a bundled one, else the file's."""
        return self.name if bundled_adapters().get(self.name) == self.path else self.path.name

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return sum(array.nbytes for tensors in self.modules.values() for array in tensors.arrays.values())

    @property
    def kind(self) -> str:
        """LoRA, DoRA, LoKr or LoHa; several if it mixes them."""
        return " and ".join(sorted({tensors.kind for tensors in self.modules.values()}))

    @property
    def model(self) -> str | None:
        """The model of its family for which it seems to be, by the columns of its matrices."""
        columns = sorted({tensors.shape[1] for tensors in self.modules.values() if tensors.shape}, reverse=True)
        return next((self.family.lora_widths[d] for d in columns if d in self.family.lora_widths), None)

    def scaling(self, module: str) -> float:
        """alpha / r, or alpha / √r: alpha from the module's tensor, else from what is said of the file; else 1."""
        tensors = self.modules[module]
        if "alpha" in tensors.arrays:
            alpha = tensors.arrays["alpha"]
            dim = self.metadata.get("ss_network_dim", "")
            r = tensors.rank or (int(dim) if re.fullmatch("[1-9][0-9]{,8}", dim) else 0)
            # With whole factors, LyCORIS writes r as alpha, which a narrow type rounds, and others what means nothing.
            return (
                cast(float, alpha.item()) / r if r and alpha.item() != mx.array(r).astype(alpha.dtype).item() else 1.0
            )
        alpha = self.said(module, "lora_alpha", "alpha_pattern")
        rank = self.said(module, "r", "rank_pattern") or tensors.rank
        if alpha is None or rank is None:
            return 1.0
        return cast(float, alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank))

    def said(self, module: str, word: str, patterns: str) -> Any:
        """What PEFT's words say of a module: by a pattern, which is its whole name or the end of it, or of all."""
        name = "." + PREFIXES.sub("", module)
        own = self.config.get(patterns) or {}
        return next((own[p] for p in own if name.endswith(f".{p}") or p == f"^{name[1:]}"), self.config.get(word))

    @property
    def trained_on(self) -> str | None:
        """The model on which it was trained, if the header says so, in its own words."""
        own = read_words(self.metadata.get("kleinlite", ""))
        said = [own.get("model")]
        said += [self.metadata.get(name) for name in ("ss_base_model_version", "modelspec.architecture", "model")]
        return next((clip(words) for words in said if isinstance(words, str) and words), None)

    def check(self, cfg: Any) -> None:
        """Refuse a model of this config if not every module fits. Nothing is built. Raises UserError."""
        family = family_of(cfg)
        if family is not self.family:
            raise UserError(f"{self.path} is an adapter for {self.family.title}, and this model is {family.title}.")
        shapes = matrix_shapes(cfg)
        hint = f": it looks like an adapter for {self.model}" if self.model else ""
        absent = [module for module, tensors in self.modules.items() if tensors.target.path not in shapes]
        if absent:
            raise UserError(f"{self.path} changes blocks that this model does not have ({list_names(absent)}){hint}.")
        for module, tensors in self.modules.items():
            rows, columns = shapes[tensors.target.path]
            size = (rows if tensors.target.third is None else rows // 3, columns)
            if tensors.shape != size:
                raise UserError(
                    f"{self.path}: {clip(module)} is a change of {' × '.join(map(str, tensors.shape or ()))} "
                    f"({clip(tensors.sizes, 100)}) and the matrix here is {size[0]} × {size[1]}{hint}."
                )

    def deltas(self, net: Any) -> dict[str, nn.Module]:
        """The deltas of a network's matrices, by path, for chapter 14's `attach`. Raises UserError if not all fit."""
        self.check(net.cfg)
        layers = linear_layers(net)
        deltas: dict[str, nn.Module] = {}
        thirds: dict[str, dict[int, nn.Module]] = {}
        for module, tensors in self.modules.items():
            path = tensors.target.path
            third = tensors.target.third
            weight = weight_of(layers[path])
            if third is None:
                deltas[path] = tensors.delta(self.scaling(module), weight)
            else:
                delta = tensors.delta(self.scaling(module), mx.split(weight, 3)[third])
                thirds.setdefault(path, {})[third] = delta
        return deltas | {path: SplitAdapter(pieces, 3) for path, pieces in thirds.items()}


# PEFT takes regular expressions. What it and diffusers write are names, some after a ^, which asks for the whole name.
# No pattern from a file is run here: one can be made that never ends.
PLAIN_PATTERN = re.compile(r"\^?[\w.]+")
ALPHA_WORD = re.compile(r"(?<!conv)(?<!conv[._])alpha$", re.IGNORECASE)
PEFT_WORDS: dict[str, Any] = {  # by which PEFT computes something else
    "peft_type": ("LORA", "LOKR", "LOHA", None), "use_qalora": (False, None), "lora_bias": (False, None),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", None), "layer_replication": None,
    "alora_invocation_tokens": None, "arrow_config": None, "bias": ("none", None), "fan_in_fan_out": (False, None),
    "use_bdlora": None, "kasa_config": None, "monteclora_config": None, "target_parameters": (None, []),
    "trainable_token_indices": None,
}  # fmt: skip
PEFT_READ = {  # or without effect on what is computed
    "alpha", "alpha_pattern", "auto_mapping", "base_model_name_or_path", "corda_config", "decompose_both",
    "decompose_factor", "ensure_weight_tying", "eva_config", "exclude_modules", "inference_mode", "init_weights",
    "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config",
    "megatron_config", "megatron_core", "module_dropout", "modules_to_save", "peft_version", "qalora_group_size", "r",
    "rank_dropout", "rank_dropout_scale", "rank_pattern", "revision", "runtime_config", "target_modules", "task_type",
    "use_dora", "use_effective_conv2d", "use_rslora", "velora_config",
}  # fmt: skip


def read_strength(path: Path, metadata: dict[str, str], modules: Iterable[str]) -> dict[str, Any]:
    """What is said of its strength: `lora_alpha`, `r`, their patterns, `use_rslora`. Raises UserError.

    PEFT's words stand in adapter_config.json beside its file, or in the header; other programs' in the header, plain.
    """
    beside = path.with_name("adapter_config.json")
    others = [text for name, text in metadata.items() if '"lora_alpha"' in text]
    texts = [metadata["lora_adapter_metadata"]] if "lora_adapter_metadata" in metadata else others
    is_pefts = texts is not others
    if path.name.startswith("adapter_model.") and beside.is_file():
        is_pefts = True
        where = f"{beside.name} says"
        words = read_json(beside)
    elif texts:
        where = "its header says (lora_adapter_metadata)"
        words = read_words(texts[0]) or {"lora_alpha": texts[0]}
    else:
        where = "its header says of alpha"
        words = {"lora_alpha": read_plain_alpha(metadata, modules)}
    words = {name.removeprefix("transformer."): value for name, value in words.items()}
    if words.get("lora_alpha") is None:
        words["lora_alpha"] = words.get("alpha")  # of LoKr and LoHa
    alphas, ranks = (words.get(name) or {} for name in ("alpha_pattern", "rank_pattern"))
    plain = all(isinstance(own, dict) and all(map(PLAIN_PATTERN.fullmatch, own)) for own in (alphas, ranks))
    numbers = plain and all(map(is_alpha, [words["lora_alpha"], *alphas.values()]))
    if not (numbers and all(map(is_rank, [words.get("r"), *ranks.values()]))):
        raise UserError(
            f"{path}: what {where} is damaged, or has a pattern in place of a matrix's name: write the adapter again."
        )
    check_words(path, words, PEFT_WORDS, PEFT_READ if is_pefts else words.keys() - PEFT_WORDS)
    return words


def read_plain_alpha(metadata: dict[str, str], modules: Iterable[str]) -> float | str | None:
    """The one alpha of a header, whatever it is called there; its text if that is no number, None if there is none."""
    said = {name: text for name, text in metadata.items() if ALPHA_WORD.search(name)}
    if any(name.startswith("diffusion_model.") for name in modules):  # musubi's converter has put its own into them
        said = {name: text for name, text in said.items() if not name.startswith("ss_")}
    texts = {text for text in said.values() if text.lower() not in ("", "none")}
    with suppress(ValueError):
        alphas = set(map(float, texts))
        if len(alphas) < 2:
            return next(iter(alphas), None)
    return " and ".join(sorted(texts))


def read_words(text: str) -> dict[str, Any]:
    """What JSON in a header says; nothing if it is damaged."""
    words = None
    with suppress(ValueError, RecursionError):
        words = json.loads(text)
    return words if isinstance(words, dict) else {}


def is_alpha(value: object) -> bool:
    """Whether this may stand for alpha: None, or a number that float32 holds, which NaN is not."""
    return value is None or (type(value) in (int, float) and abs(cast(float, value)) <= 1e30)


def is_rank(value: object) -> bool:
    """Whether this may stand for a rank: None, or a whole number from 1 on."""
    return value is None or (type(value) is int and 1 <= value <= 10**6)


def describe_adapter(adapter: Adapter) -> dict[str, str]:
    """What an adapter is, and what it would change, in words."""
    matrices: dict[str, set[str]] = {}
    for tensors in adapter.modules.values():
        kind = re.sub(r"(blocks(?:\.[a-z]\w*)?)\.\d+\.", r"\1.", tensors.target.path)  # in all blocks
        matrices.setdefault(kind, set()).add(tensors.target.path)
    ranks = sorted({tensors.rank for tensors in adapter.modules.values() if tensors.rank})
    scalings = sorted({adapter.scaling(module) for module in adapter.modules})
    size = sum(a.size for tensors in adapter.modules.values() for a in tensors.arrays.values())
    return {
        "adapter": str(adapter.path),
        "kind": adapter.kind,
        "for": adapter.model or adapter.family.title,
        "rank": first_few(ranks) or "none",
        "alpha / rank": first_few(f"{scaling:g}" for scaling in scalings),
        "trained on": adapter.trained_on or "not said",
        "changes": f"{sum(map(len, matrices.values()))} matrices, by {size:,} numbers",
        "matrices": ", ".join(f"{name} ({len(paths)})" for name, paths in matrices.items()),
    }


NANO_ADAPTERS = Path(__file__).parents[2] / "nano" / "weights" / "loras"


def bundled_adapters() -> dict[str, Path]:
    """The adapters that come with nano, by name."""
    return {path.stem: path for path in list_files(NANO_ADAPTERS, "*.safetensors")}


def find_adapter(name: str | Path) -> Path:
    """The file of this name, in a folder that PEFT has written, or of the adapter of this name that nano has."""
    path = Path(name).expanduser()
    if os.path.isdir(path) and str(name) not in bundled_adapters():
        found = [path / f"{stem}.safetensors" for stem in ("adapter_model", "pytorch_lora_weights")]
        return next((file for file in found if file.is_file()), path)
    return path if os.path.isfile(path) else bundled_adapters().get(str(name), path)


def open_adapter(path: str | Path, first: Family = KLEIN) -> Adapter:
    """Read an adapter file and understand every name in it, or say in a sentence why it cannot be one of ours.

    path: a file, a folder of PEFT's, or the name of an adapter that comes with nano: "cross", "outlined". first: the
    family whose it may be, asked before the others.
    Raises MissingFileError or UserError.
    """
    name = Path(path).name if os.path.isdir(path) else None
    path = find_adapter(path)
    if not os.path.isfile(path):  # False for a name that no file can have, too
        if os.path.isdir(path / "transformer"):
            raise UserError(f"{path} is a whole model, not an adapter: it is for from_pretrained itself, or --model.")
        bundled = ", ".join(bundled_adapters())
        what = "no adapter_model.safetensors in the folder" if name else "no file"
        raise MissingFileError(
            f"There is {what} {clip(str(path), 160)}: name a .safetensors file, or one that comes with nano: {bundled}."
        )
    file = open_weight_file(path)
    names = sort_names(path, file.tensors)
    types = {str(tensor["dtype"]) for name, tensor in file.tensors.items() if not name.endswith(".alpha")} - REAL_TYPES
    if types:
        raise UserError(f"{path} has numbers of the type {', '.join(types)}: save it in bfloat16 or float16.")
    family, targets = find_targets(path, list(names), first)
    arrays, metadata = file.load()  # a whole model, of gigabytes, is refused by now
    mx.eval(arrays)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    modules = {}
    for module, tensors in names.items():
        own = {kind: arrays[name] for kind, name in tensors.items()}
        modules[module] = parse_module(path, module, own, targets[module])
    strength = read_strength(path, metadata, names)
    adapter = Adapter(name or path.stem, path, family, modules, metadata, strength, sha256)
    for module, read in modules.items():
        used = [w for kind, w in read.arrays.items() if kind != "alpha"] + [mx.array(adapter.scaling(module))]
        if not all(mx.isfinite(w).all().item() for w in used):
            raise UserError(f"{path} has numbers that are not finite ({clip(module)}): its training has failed.")
    return adapter
