"""Adapter files: LoRA, LoKr, LoHa and DoRA in every spelling that is about, read into deltas of our matrices.

A file is read once, and understood as a whole or refused: each tensor must find its one place, each module must be
complete, finite and of the right shape, or one sentence names what is wrong and the model that the file seems to be
for. The spellings are said in `families`; LoRA's formula is chapter 14's, the others are in `lora_variants`.
"""

import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from ..checkpoints import find_conversion, rename, swap_halves
from ..errors import MissingFileError, UserError, clip, first_few
from ..files import replace_file
from ..lora import LoRA, linear_layers, matrix_shape
from ..lora_variants import DoRA, Hadamard, Kronecker, SplitAdapter, weight_of
from .families import FAMILIES, KLEIN, Family, family_of
from .fields import check_words, say_once
from .files import list_files, open_weight_file, read_json

Size = tuple[int, int]  # rows and columns of a matrix
REAL_TYPES = {"F16", "BF16", "F32"}  # in which a file may have its matrices
ALPHA_TYPES = REAL_TYPES | {"I16", "I32", "I64"}
LARGEST_ALPHA = 1e30  # far beyond any use, and float32 holds it

# ---------------------------------------------------------------- names of modules

BLOCKS = 100  # names are known for so many blocks; whether a model has them is asked later
PREFIXES = re.compile(
    r"^(base_model\.model\.|(model\.)?diffusion_model\.|transformer\.|lora_unet_|lora_transformer_|lycoris_)+"
)
TEXT_ENCODER = re.compile(r"^(text_encoders?\.|lora_te\d?_|te\d_|lycoris_text|base_model\.model\.text_encoder)")
TENSOR_NAME = re.compile(
    r"\.(?:(?P<low>lora[_.](?:A|B|down|up|magnitude_vector))(?:(?:\.(?P<adapter>\w+))?\.weight)?"
    r"|(?P<other>alpha|dora_scale|lokr_w[12](?:_[ab])?|hada_w[12]_[ab]))$"
)
TENSOR_KINDS = {
    "lora_A": "down", "lora_B": "up", "lora_down": "down", "lora_up": "up", "lora_magnitude_vector": "magnitude",
    "dora_scale": "magnitude",
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """Where a module of a file belongs: a matrix of ours, or a third of one, and whether its halves change places."""

    path: str
    third: int | None = None
    swapped: bool = False


def numbered(name: str) -> list[str]:
    """`blocks.{i}.x` for every block that there may be."""
    return [name.replace("{i}", str(i)) for i in range(BLOCKS)] if "{i}" in name else [name]


@cache
def list_targets(title: str) -> dict[str, Target]:
    """Every name of every matrix of a family, by its title, with `_` for `.`, and the matrix that it means."""
    family = next(family for family in FAMILIES if family.title == title)
    targets = {}
    for path in [path for pattern in family.lora.matrices for path in numbered(pattern)]:
        names = [name.removesuffix(".weight") for name in rename(f"{path}.weight", family.transformer.names)]
        swapped = find_conversion(f"{path}.weight", family.transformer.names) is swap_halves
        targets[path] = Target(path)
        for i, name in enumerate(names):
            targets[name] = Target(path, i if len(names) == 3 else None, swapped)
    for alias, path in family.lora.aliases.items():
        targets |= {name: Target(own) for name, own in zip(numbered(alias), numbered(path))}
    return {name.replace(".", "_"): target for name, target in targets.items()}


def find_target(module: str, family: Family = KLEIN) -> Target | None:
    """The matrix that a file for this family means by this name, in any spelling."""
    name = re.sub(r"^sformer_blocks", "transformer_blocks", PREFIXES.sub("", module))
    return list_targets(family.title).get(name.replace(".", "_"))


# ---------------------------------------------------------------- whose file it is

DISTINCTIVE_NAMES = {  # what only one model's names have: those that kleinlite runs, and others
    **{family.title: family.lora.distinctive for family in FAMILIES},
    "FLUX.1": r"(img|txt)_mod[._]lin|single_blocks[._]\d+[._]modulation[._]lin|vector_in|ff\.net\.|ff_net_|proj_mlp|"
    r"single_transformer_blocks[._]\d+[._]norm\b",
    "FLUX.2 [dev]": r"guidance_in|guidance_embedder",
    "Qwen-Image": r"transformer_blocks[._]\d+[._](img|txt)_(mod|mlp)[._]",
    "Stable Diffusion": r"(down|up|mid|input|output|middle)_blocks?[._]",
    "FLUX.1 or FLUX 3 Image Klein": r"single_transformer_blocks[._]\d+[._]attn[._]to_[qkv]\b",  # alone, it is either's
}
WIDTHS = {6144: "FLUX.2 [dev]"} | {d: name for family in FAMILIES for d, name in family.lora.widths.items()}


def guess_model(modules: Iterable[str], width: int | None) -> str | None:
    """The model for which a file seems to be, by names that only one has, else by the width of its matrices."""
    modules = list(modules)
    for name, pattern in DISTINCTIVE_NAMES.items():
        if any(re.search(pattern, module) for module in modules):
            return name
    return None if width is None else WIDTHS.get(width)


# ---------------------------------------------------------------- the four kinds

Factors = tuple[tuple[str, ...], ...]
LOKR = [(first, second) for first in (("lokr_w1",), ("lokr_w1_a", "lokr_w1_b"))
        for second in (("lokr_w2",), ("lokr_w2_a", "lokr_w2_b"))]  # fmt: skip
# Kind, names of the matrices that are multiplied with each other, and of further tensors.
KINDS: list[tuple[str, Factors, tuple[str, ...]]] = [
    ("LoRA", (("up", "down"),), ()),
    ("DoRA", (("up", "down"),), ("magnitude",)),
    ("LoHa", (("hada_w1_a", "hada_w1_b"), ("hada_w2_a", "hada_w2_b")), ()),
    *(("LoKr", factors, ()) for factors in LOKR),
]


@dataclass(frozen=True)
class Tensors:
    """The tensors of one module of a file, sorted into the formula of their kind.

    LoRA: up (d_out, r), down (r, d_in). DoRA: also magnitude, (d_out,) or (d_out, 1), a length for each row, or
    (1, d_in), for each column. LoHa: two pairs as LoRA's, whose products are multiplied number by number. LoKr: two
    matrices, each whole or as a pair, whose Kronecker product it is.
    """

    kind: str
    arrays: dict[str, mx.array]
    factors: Factors

    @property
    def rank(self) -> int | None:
        """The number that alpha is divided by; None for a LoKr with both factors whole, whose alpha means nothing."""
        pairs = [names for names in self.factors if len(names) == 2]
        return self.arrays[pairs[-1][1]].shape[0] if pairs else None

    @property
    def sizes(self) -> str:
        """The tensors' names and shapes, for a sentence."""
        return ", ".join(f"{name} {tuple(a.shape)}" for name, a in self.arrays.items() if name != "alpha")

    @property
    def shape(self) -> Size | None:
        """Rows and columns of the delta; None if the tensors do not fit each other."""
        sizes = [product_shape([self.arrays[name] for name in names]) for names in self.factors]
        first = sizes[0]
        second = sizes[-1]
        if first is None or second is None:
            return None
        if self.kind == "LoKr":
            return first[0] * second[0], first[1] * second[1]
        d_out, d_in = first
        lengths = self.arrays["magnitude"].shape if self.kind == "DoRA" else (d_out,)
        return first if first == second and lengths in ((d_out,), (d_out, 1), (1, d_in)) else None

    def swap_halves(self, path: Path) -> "Tensors":
        """The two halves of the delta's rows in each other's place. Raises UserError if there are no halves."""
        names = [factor[0] for factor in self.factors]
        if self.kind == "LoKr":  # the first factor's rows are blocks of rows; where it is one block, the second's count
            names = names[:1] if len(self.arrays[names[0]]) > 1 else names[1:]
        rows = {name: w for name, w in self.arrays.items() if name in (*names, "magnitude") and len(w) > 1}
        if any(len(w) % 2 for w in rows.values()):
            raise UserError(
                f"{path}: the change of the final modulation has no two halves of rows, so it cannot be read."
            )
        return replace(self, arrays=self.arrays | {name: swap_halves(w) for name, w in rows.items()})

    def delta(self, scaling: float, weight: Callable[[], mx.array]) -> nn.Module:
        """The module that computes it. weight: the matrix that it stands beside, which only DoRA asks for."""
        factors = [[self.arrays[name] for name in names] for names in self.factors]
        if self.kind == "LoKr":
            first, second = map(product, factors)
            return Kronecker(first, second, scaling)
        if self.kind == "LoHa":
            [a1, b1], [a2, b2] = factors
            return Hadamard(a1, b1, a2, b2, scaling)
        [[up, down]] = factors
        low = LoRA(down, up, scaling)
        return DoRA(low, self.arrays["magnitude"], weight()) if self.kind == "DoRA" else low


def product_shape(matrices: list[mx.array]) -> Size | None:
    shapes = [matrix.shape for matrix in matrices]
    if any(len(shape) != 2 for shape in shapes) or (len(shapes) == 2 and shapes[0][1] != shapes[1][0]):
        return None
    return shapes[0][0], shapes[-1][1]


def product(matrices: list[mx.array]) -> mx.array:
    """A matrix as it is, or two multiplied in float32."""
    return matrices[0] if len(matrices) == 1 else matrices[0].astype(mx.float32) @ matrices[1].astype(mx.float32)


def parse_module(path: Path, module: str, arrays: dict[str, mx.array]) -> Tensors:
    """One of the four kinds. Raises UserError for half a pair, two kinds in one, and matrices that do not fit."""
    if "alpha" in arrays and arrays["alpha"].size != 1:
        raise UserError(f"{path}: the alpha of {clip(module)} is not one number.")
    for kind, factors, others in KINDS:
        if arrays.keys() - {"alpha"} == {name for names in (*factors, others) for name in names}:
            tensors = Tensors(kind, arrays, factors)
            if tensors.shape is None:
                raise UserError(
                    f"{path}: {clip(module)} is tensors that do not go together ({clip(tensors.sizes, 100)})."
                )
            return tensors
    raise UserError(f"{path}: {clip(module)} is not complete, it only has {first_few(sorted(arrays))}: get it anew.")


# ---------------------------------------------------------------- a file


@dataclass(frozen=True)
class Adapter:
    """An adapter file, read and understood; whether it fits a model, `check` tells."""

    name: str  # the file's, without its ending, or that of PEFT's folder
    path: Path
    modules: dict[str, Tensors]  # by the names in the file
    metadata: dict[str, str]
    config: dict[str, Any]  # what is said of its strength, see `read_config`
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

    @cached_property
    def families(self) -> list[Family]:
        """The families all of whose names it may have: one, but for spellings that two families share."""
        return [family for family in FAMILIES if len(self.targets(family)) == len(self.modules)]

    def targets(self, family: Family) -> dict[str, Target]:
        """What each module changes, in a model of this family."""
        found = {module: find_target(module, family) for module in self.modules}
        return {module: target for module, target in found.items() if target is not None}

    @property
    def width(self) -> int | None:
        """Columns of the matrices that read the stream, which is the width of the model."""
        family = self.families[0]
        for module, target in self.targets(family).items():
            if target.path.endswith(family.lora.readers):
                return (self.modules[module].shape or (0, 0))[1]
        return None

    @property
    def model(self) -> str | None:
        return guess_model(self.modules, self.width)

    def scaling(self, module: str) -> float:
        """alpha / r, or alpha / √r: alpha from the module's tensor, else from what is said of the file; else 1."""
        tensors = self.modules[module]
        r = tensors.rank
        alpha = match_pattern(self.config.get("alpha_pattern"), module, self.config.get("lora_alpha"))
        if r is None:
            return 1.0
        if "alpha" in tensors.arrays:
            return cast(float, tensors.arrays["alpha"].item()) / r
        if alpha is None:
            return 1.0
        return alpha / (math.sqrt(r) if self.config.get("use_rslora") else r)

    @property
    def trained_on(self) -> str | None:
        """The model on which it was trained, if the header says so, in its own words."""
        own = read_words(self.metadata.get("kleinlite", "{}")) or {}
        said = [own.get("model")]
        said += [self.metadata.get(name) for name in ("ss_base_model_version", "modelspec.architecture", "model")]
        return next((clip(words) for words in said if isinstance(words, str) and words), None)

    def check(self, cfg: Any) -> None:
        """Refuse a model of this config if not every module fits. Nothing is built. Raises UserError."""
        self._place(family_of(cfg), matrix_shapes(cfg))

    def deltas(self, net: Any) -> dict[str, nn.Module]:
        """The deltas of a network's matrices, by path, for chapter 14's `attach`. Raises UserError if not all fit."""
        layers = linear_layers(net)
        shapes = {path: matrix_shape(layer) for path, layer in layers.items()}
        family = next(family for family in FAMILIES if isinstance(net, family.transformer.network))
        deltas: dict[str, nn.Module] = {}
        targets = self.targets(family)
        for path, modules in self._place(family, shapes).items():
            thirds = {third: self._delta(module, targets[module], layers[path]) for third, module in modules.items()}
            whole = thirds.pop(None, None)
            deltas[path] = whole or SplitAdapter({third: d for third, d in thirds.items() if third is not None}, 3)
        return deltas

    def _place(self, family: Family, shapes: dict[str, Size]) -> dict[str, dict[int | None, str]]:
        """Matrix → third, or None for all of it → module. Raises UserError for what does not fit these shapes."""
        if family not in self.families:
            title = guess_model(self.modules, None) or self.families[0].title
            raise UserError(f"{self.path} is an adapter for {title}, and this model is {family.title}.")
        targets = self.targets(family)
        hint = f": it looks like an adapter for {self.model}" if self.model else ""
        absent = [module for module, target in targets.items() if target.path not in shapes]
        if absent:
            raise UserError(f"{self.path} changes blocks that this model does not have ({list_names(absent)}){hint}.")
        places: dict[str, dict[int | None, str]] = {}
        for module, target in targets.items():
            thirds = places.setdefault(target.path, {})
            if target.third in thirds or (thirds and None in (target.third, *thirds)):
                raise UserError(f"{self.path} changes {target.path} twice ({clip(module)}): write it again.")
            thirds[target.third] = module
            d_out, d_in = shapes[target.path]
            size = (d_out // 3 if target.third is not None else d_out, d_in)
            tensors = self.modules[module]
            if tensors.shape != size:
                raise UserError(
                    f"{self.path}: {clip(module)} is a change of {' × '.join(map(str, tensors.shape or ()))} "
                    f"({clip(tensors.sizes, 100)}) and the matrix here is {size[0]} × {size[1]}{hint}."
                )
        return places

    def _delta(self, module: str, target: Target, layer: nn.Module) -> nn.Module:
        """One module of the file as one of ours, beside a layer or a third of it."""
        tensors = self.modules[module]
        if target.swapped:
            tensors = tensors.swap_halves(self.path)

        def weight() -> mx.array:
            whole = weight_of(layer)
            return whole if target.third is None else mx.split(whole, 3)[target.third]

        return tensors.delta(self.scaling(module), weight)


@cache
def matrix_shapes(cfg: Any) -> dict[str, Size]:
    """The shapes of the matrices of a transformer, by path. MLX is lazy: no weight is made."""
    layers = linear_layers(family_of(cfg).transformer.network(cfg))
    return {path: matrix_shape(layer) for path, layer in layers.items()}


ALPHA_WORD = re.compile(r"(?<!conv)(?<!conv[._])alpha$", re.IGNORECASE)
PEFT_WORDS = {  # by which PEFT computes something else
    "peft_type": ("LORA", "LOKR", "LOHA", None), "use_qalora": (False, None), "lora_bias": (False, None),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", None), "layer_replication": None,
    "alora_invocation_tokens": None, "arrow_config": None,
}  # fmt: skip


def read_config(path: Path, metadata: dict[str, str], modules: Iterable[str]) -> dict[str, Any]:
    """What is said of an adapter's strength: `lora_alpha`, `alpha_pattern`, `use_rslora`. Raises UserError.

    PEFT's words stand in adapter_config.json beside its file, or in the header; other programs' in the header, plain.
    """
    where = "its header says (lora_adapter_metadata)"
    beside = path.with_name("adapter_config.json")
    texts = [text for name, text in metadata.items() if '"lora_alpha"' in text and name != "kleinlite"]
    if path.name.startswith("adapter_model.") and beside.is_file():
        where = f"{beside.name} says"
        words: dict[str, Any] | None = read_json(beside)
    elif "lora_adapter_metadata" in metadata or texts:
        words = read_words(metadata.get("lora_adapter_metadata", *texts[:1]))
    else:
        where = "its header says of alpha"
        words = {"lora_alpha": read_plain_alpha(metadata, modules)}
    if words is not None:
        words = {name.removeprefix("transformer."): value for name, value in words.items()}
        if words.get("lora_alpha") is None:
            words["lora_alpha"] = words.get("alpha")  # of LoKr and LoHa
        patterns = words.get("alpha_pattern") or {}
        alphas = [] if words["lora_alpha"] is None else [words["lora_alpha"]]
        plain = isinstance(patterns, dict) and all(map(PLAIN_PATTERN.fullmatch, patterns))
        if plain and all(map(is_alpha, [*alphas, *patterns.values()])):
            check_words(path, words, PEFT_WORDS, words.keys() - PEFT_WORDS)
            return words
    raise UserError(
        f"{path}: what {where} is damaged, or has a pattern in place of a matrix's name: write the adapter again."
    )


def read_plain_alpha(metadata: dict[str, str], modules: Iterable[str]) -> Any:
    """The one alpha of a header, whatever it is called there; its text if that is no number, None if there is none."""
    said = {
        name: text for name, text in metadata.items() if ALPHA_WORD.search(name) and text.lower() not in ("", "none")
    }
    if any(name.startswith("diffusion_model.") for name in modules):
        for name in [name for name in said if name.startswith("ss_")]:
            text = said.pop(name)
            say_once(f"{name} is {text}, which musubi's converter has put into the matrices: it is not counted again.")
    try:
        alphas = {float(text) for text in said.values()}
    except ValueError:
        return " and ".join(said.values())
    return next(iter(alphas), None) if len(alphas) < 2 else " and ".join(said.values())


def read_words(text: str) -> dict[str, Any] | None:
    """What JSON in a header says; None if it is damaged."""
    words = None
    with contextlib.suppress(ValueError, RecursionError):
        words = json.loads(text)
    return words if isinstance(words, dict) else None


def is_alpha(value: object) -> bool:
    """Whether this is a number that may stand for alpha; NaN is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_ALPHA


# PEFT takes regular expressions. What it and diffusers write are names, some after a ^, which asks for the whole name.
# No pattern from a file is run here: one can be made that never ends.
PLAIN_PATTERN = re.compile(r"\^?[\w.]+")


def match_pattern(patterns: dict[str, float] | None, module: str, default: float | None) -> float | None:
    """PEFT's exceptions: the value of the first name among them that is the module's, or its end after a dot."""
    words = PREFIXES.sub("", module).split(".")
    ends = {".".join(words[i:]) for i in range(len(words))} | {"^" + ".".join(words)}
    return next((value for name, value in (patterns or {}).items() if name in ends), default)


def describe_adapter(adapter: Adapter) -> dict[str, str]:
    """What an adapter is, and what it would change, in words."""
    blocks: dict[str, set[int]] = {}
    matrices: dict[str, set[str]] = {}
    for target in adapter.targets(adapter.families[0]).values():
        stream = re.match(r"(\w+)_blocks\.(?:[a-z]\w*\.)?(\d+)\.", target.path)
        if stream:
            blocks.setdefault(stream[1], set()).add(int(stream[2]))
        matrices.setdefault(re.sub(r"(blocks(?:\.[a-z]\w*)?)\.\d+\.", r"\1.", target.path), set()).add(target.path)
    ranks = sorted({tensors.rank for tensors in adapter.modules.values() if tensors.rank})
    scalings = sorted({adapter.scaling(module) for module in adapter.modules})
    size = sum(a.size for tensors in adapter.modules.values() for a in tensors.arrays.values())
    return {
        "adapter": str(adapter.path),
        "kind": adapter.kind,
        "for": adapter.model or (f"a model {adapter.width} wide" if adapter.width else "unknown"),
        "rank": first_few(ranks) or "none",
        "alpha / rank": first_few(f"{scaling:g}" for scaling in scalings),
        "trained on": adapter.trained_on or "not said",
        "changes": f"{sum(map(len, matrices.values()))} matrices, by {size:,} numbers",
        **{f"{name} blocks": ", ".join(map(str, sorted(numbers))) for name, numbers in sorted(blocks.items())},
        "matrices": ", ".join(f"{name} ({len(paths)})" for name, paths in matrices.items()),
    }


# ---------------------------------------------------------------- reading


def bundled_adapters() -> dict[str, Path]:
    """The adapters that come with nano, by name."""
    folder = Path(str(files("kleinlite"))) / "nano" / "weights" / "loras"
    return {path.stem: path for path in list_files(folder, "*.safetensors")}


def find_adapter(name: str | Path) -> Path:
    """The file of this name, in a folder that PEFT has written, or of the adapter of this name that nano has."""
    path = Path(name)
    if os.path.isdir(name) and str(name) not in bundled_adapters():
        found = [path / f"{stem}.safetensors" for stem in ("adapter_model", "pytorch_lora_weights")]
        return next((file for file in found if file.is_file()), path)
    return path if os.path.isfile(name) else bundled_adapters().get(str(name), path)


def open_adapter(path: str | Path) -> Adapter:
    """Read an adapter file and understand every name in it, or say in a sentence why it cannot be one of ours.

    path: a file, a folder of PEFT's, or the name of an adapter that comes with nano: "cross", "outlined".
    Raises MissingFileError or UserError.
    """
    name = Path(path).name if os.path.isdir(path) else None
    path = find_adapter(path)
    if not os.path.isfile(path):  # False for a name that no file can have, too
        bundled = ", ".join(bundled_adapters())
        what = "no adapter_model.safetensors in the folder" if name else "no file"
        raise MissingFileError(
            f"There is {what} {clip(str(path), 160)}: name a .safetensors file, or one that comes with nano: {bundled}."
        )
    file = open_weight_file(path)
    types = {name: str(tensor["dtype"]) for name, tensor in file.tensors.items()}
    names = sort_names(path, types)
    allowed = {name: ALPHA_TYPES if name.endswith(".alpha") else REAL_TYPES for name in types}
    coded = sorted({kind for name, kind in types.items() if kind not in allowed[name]})
    if coded:
        raise UserError(f"{path} has numbers of the type {', '.join(coded)}: save it in bfloat16 or float16.")
    arrays, metadata = file.load()  # a whole model, of gigabytes, is refused by now
    mx.eval(arrays)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    modules = {module: {kind: arrays[name] for kind, name in tensors.items()} for module, tensors in names.items()}
    parsed = {module: parse_module(path, module, tensors) for module, tensors in modules.items()}
    bad = [m for m, tensors in modules.items() if not all(mx.isfinite(a).all().item() for a in tensors.values())]
    if bad:
        raise UserError(f"{path} has numbers that are not finite ({list_names(bad)}): its training has failed.")
    config = read_config(path, metadata, parsed)
    return Adapter(name or path.stem, path, parsed, metadata, config, sha256)


def sort_names(path: Path, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Module → kind of tensor → its name in the file, if all names have one place each. Raises UserError."""
    modules: dict[str, dict[str, str]] = {}
    unknown = []
    adapters = set()
    for name in sorted(names):
        tensor = TENSOR_NAME.search(name)
        if tensor is None:
            unknown.append(name)
            continue
        low = (tensor["low"] or tensor["other"]).replace(".", "_")
        place = modules.setdefault(name[: tensor.start()], {})
        other = place.setdefault(TENSOR_KINDS.get(low, low), name)
        adapters |= {tensor["adapter"]} - {None}
        if other != name and len(adapters) < 2:
            raise UserError(f"{path} has two tensors for one place ({list_names([other, name])}): write it again.")
    if len(adapters) > 1:
        raise UserError(f"{path} holds several adapters ({list_names(sorted(adapters))}): save one of them alone.")
    modules = {module: tensors for module, tensors in modules.items() if not is_duplicate(module, modules)}
    check_names(path, names, modules, unknown)
    return modules


def is_duplicate(module: str, modules: dict[str, Any]) -> bool:
    """Does the file also have this matrix in another spelling? Some files have both."""
    rules = [rule for family in FAMILIES for rule in family.lora.duplicates]
    others = {re.sub(pattern, replacement, module) for pattern, replacement in rules} - {module}
    return not others.isdisjoint(modules)


def check_names(path: Path, arrays: Iterable[str], modules: Iterable[str], unknown_names: list[str]) -> None:
    """Refuse a file with names that mean nothing here. Raises UserError."""
    modules = list(modules)
    if not modules:
        is_model = any(name.endswith(".weight") for name in arrays)
        whole = "whole weights, not an adapter: it is for from_pretrained itself, or --model"
        raise UserError(f"{path} holds {whole if is_model else 'nothing of an adapter'} ({list_names(arrays)}).")
    text = [name for name in modules if TEXT_ENCODER.match(name)]
    if text:
        raise UserError(f"{path} changes a text encoder ({list_names(text)}), as no adapter of klein does.")
    unknown = min(([name for name in modules if not find_target(name, family)] for family in FAMILIES), key=len)
    if unknown or unknown_names:
        model = guess_model(modules + unknown_names, None)
        looks = f"it looks like an adapter for {model}" if model else "it may be another model's"
        raise UserError(f"{path} has names that klein does not know ({list_names(unknown + unknown_names)}): {looks}.")


def list_names(names: Iterable[str]) -> str:
    """The first of a file's names, for a sentence."""
    return first_few(map(clip, names), 2)


# ---------------------------------------------------------------- writing


LAYOUTS = ("diffusers", "comfy")


def write_adapter(
    path: str | Path, deltas: dict[str, LoRA], *, layout: str = "diffusers", dtype: mx.Dtype = mx.bfloat16,
    trained: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Write low-rank deltas of klein's matrices, by path, as an adapter file; in one move.

    layout: "diffusers", whose loader (and ours) takes alpha from the header; or "comfy", in the names that ComfyUI
    reads and with B already scaled, since it does not look there. trained: what the header shall say of the training.
    """
    tensors = {}
    alphas = {}  # by PEFT's names of the modules
    ranks = {}
    for matrix, delta in deltas.items():
        names = [name.removesuffix(".weight") for name in rename(f"{matrix}.weight", KLEIN.transformer.names)]
        conversion = find_conversion(f"{matrix}.weight", KLEIN.transformer.names)
        b = conversion(delta.b) if conversion and layout == "diffusers" else delta.b
        if layout == "comfy":
            names = [matrix]
            b = delta.scaling * b
        for name, rows in zip(names, mx.split(b, len(names))):
            prefix = "transformer" if layout == "diffusers" else "diffusion_model"
            tensors[f"{prefix}.{name}.lora_A.weight"] = delta.a.astype(dtype)
            tensors[f"{prefix}.{name}.lora_B.weight"] = rows.astype(dtype)
            ranks[name] = len(delta.a)
            alphas[name] = delta.scaling * len(delta.a)
    metadata = {"format": "pt", "kleinlite": json.dumps(trained or {})}
    if layout == "diffusers":
        words: dict[str, Any] = {"target_modules": sorted(ranks)}  # of PEFT's LoraConfig
        for name, pattern, values in (("r", "rank_pattern", ranks), ("lora_alpha", "alpha_pattern", alphas)):
            words[name] = max(values.values())
            words[pattern] = {module: value for module, value in values.items() if value != words[name]}
        words = {f"transformer.{name}": value for name, value in words.items()}
        metadata["lora_adapter_metadata"] = json.dumps(words)
    with replace_file(Path(path)) as draft:
        mx.save_safetensors(str(draft), tensors, metadata)
