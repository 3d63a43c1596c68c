"""The names in an adapter file, in every spelling that is about: which matrix of which family each of them means.

A name has one place or the file is refused, with the model that it seems to be for. The spellings are said in
`families`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from ...checkpoints import find_conversion, rename, swap_halves
from ...errors import UserError, clip, first_few
from ...lora import linear_layers, matrix_shape
from ..families import FAMILIES, KLEIN, Family, family_of

Size = tuple[int, int]  # rows and columns of a matrix
BLOCKS = 100  # names are known for this many blocks; whether a model has them is asked later
PREFIXES = re.compile(
    r"^(base_model\.model\.|(model\.)?diffusion_model\.|transformer\.|lora_unet_|lora_transformer_|lycoris_"
    r"|(module|_orig_mod|net|unet|dit|pipe\.dit)\.)+"
)
TENSOR_NAME = re.compile(
    r"\.(?:(?P<low>lora[_.](?:A|B|down|up|magnitude_vector))(?:(?:\.(?P<adapter>\w+))?\.weight)?"
    r"|(?P<other>alpha|dora_scale|magnitude|lokr_w[12](?:_[ab])?|hada_w[12]_[ab]))$"
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


@cache
def matrix_shapes(cfg: Any) -> dict[str, Size]:
    """The shapes of the matrices of a transformer, by path. MLX is lazy: no weight is made."""
    layers = linear_layers(family_of(cfg).transformer.network(cfg))
    return {path: matrix_shape(layer) for path, layer in layers.items()}


@cache
def list_targets(family: Family) -> dict[str, Target]:
    """Every name of every matrix of a family, with `_` for `.`, and the matrix that it means."""
    rules = family.transformer.names
    own = {re.sub(r"\.\d+\.", ".{i}.", path) for path in matrix_shapes(family.transformer.config())}
    targets = {}
    for path in {name.replace("{i}", str(i)) for name in own for i in range(BLOCKS)}:
        names = [name.removesuffix(".weight") for name in rename(f"{path}.weight", rules)]
        swapped = find_conversion(f"{path}.weight", rules) is swap_halves
        targets[path] = Target(path)
        for third, name in enumerate(names):
            targets[name] = Target(path, third if len(names) == 3 else None, swapped)
    for alias, path in family.lora_aliases.items():
        for i in map(str, range(BLOCKS)):
            targets[alias.replace("{i}", i)] = Target(path.replace("{i}", i))
    return {name.replace(".", "_"): target for name, target in targets.items()}


def find_target(module: str, family: Family = KLEIN) -> Target | None:
    """The matrix that a file for this family means by this name, in any spelling."""
    name = re.sub(r"^sformer_blocks", "transformer_blocks", PREFIXES.sub("", module))
    return list_targets(family).get(name.replace(".", "_"))


FOREIGN = {  # how the names of their tensors end → kinds that are not read; PEFT's own say it, as vera_lambda_b does
    r"\.(diff|diff_b|set_weight|w_norm|b_norm)": "whole changes of weights",
    r"\.([ab][12]|bm)\.weight": "GLoRA",
    r"\.on_input": "(IA)³",
    r"\.lora_E(\.\w+)?": "AdaLoRA",
    r"(lora_mid(\.weight)?|(hada|lokr)_t[12]?)": "an adapter of convolutions",
    r"\.lora_[AB](\.\w+)?\.bias": "a LoRA with biases",
}
OTHERS = {  # what only the names of adapters have that are not for our transformers
    "a text encoder": r"^(text_encoders?\.|lora_te\d?_|te\d_|lycoris_text|base_model\.model\.text_encoder)",
    "FLUX.1": r"(img|txt)_mod[._]lin|single_blocks[._]\d+[._]modulation[._]lin|vector_in|ff\.net\.|ff_net_|proj_mlp|"
    r"single_transformer_blocks[._]\d+[._]norm\b",
    "FLUX.2 [dev]": r"guidance_in|guidance_embedder",
    "Qwen-Image": r"transformer_blocks[._]\d+[._](img|txt)_(mod|mlp)[._]",
    "Stable Diffusion": r"(down|up|mid|input|output|middle)_blocks?[._]",
    "FLUX.1 or FLUX 3 Image Klein": r"single_transformer_blocks[._]\d+[._]attn[._]to_[qkv]\b",
}


def foreign_kind(name: str) -> str | None:
    """The kind of adapter that has a tensor of this name, if it is another than ours."""
    for pattern, title in FOREIGN.items():
        if re.search(f"{pattern}$", name):
            return title
    parts = name.removesuffix(".weight").split(".")
    for i in (-1, -2)[: len(parts) - 1]:  # an adapter's own name may stand behind it
        method, _, rest = parts[i].partition("_")
        known = any(find_target(".".join(parts[:i]), family) for family in FAMILIES)
        if rest and known and method not in ("lora", "lokr", "hada"):
            return method.upper()
    return None


def guess_model(names: list[str], others: Iterable[str] = ()) -> str | None:
    """The model that has one of these names. others: what else is in the file."""
    for model, pattern in OTHERS.items():
        if any(re.search(pattern, name) for name in (*names, *others)):
            return model
    return next((family.title for family in FAMILIES if any(find_target(name, family) for name in names)), None)


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
    if kinds := {kind for name in unknown if (kind := foreign_kind(name))}:
        raise UserError(
            f"{path} is {first_few(sorted(kinds))}, which kleinlite does not read ({list_names(unknown)}): it reads "
            "LoRA, DoRA, LoHa and LoKr."
        )
    if not modules:
        is_model = any(name.endswith(".weight") for name in unknown)
        whole = "whole weights, not an adapter: it is for from_pretrained itself, or --model"
        raise UserError(f"{path} holds {whole if is_model else 'nothing of an adapter'} ({list_names(unknown)}).")
    if unknown:
        refuse_names(path, unknown)
    return {module: tensors for module, tensors in modules.items() if not is_duplicate(module, modules)}


def is_duplicate(module: str, modules: dict[str, Any]) -> bool:
    """Does the file also have this matrix in another spelling? Some files have both."""
    rules = [rule for family in FAMILIES for rule in family.lora_duplicates]
    others = {re.sub(pattern, replacement, module) for pattern, replacement in rules} - {module}
    return not others.isdisjoint(modules)


def find_targets(path: Path, modules: list[str], first: Family = KLEIN) -> tuple[Family, dict[str, Target]]:
    """The family that knows all these names, and what each of them means there; `first` is asked before the others.

    Raises UserError.
    """
    families = sorted(FAMILIES, key=lambda family: family is not first)
    family = next((family for family in families if all(find_target(module, family) for module in modules)), None)
    if family is None:
        unknown = [[module for module in modules if find_target(module, family) is None] for family in families]
        refuse_names(path, min(unknown, key=len), modules)
    targets = {module: target for module in modules if (target := find_target(module, family))}
    taken: dict[str, set[int | None]] = {}
    for module, target in targets.items():
        thirds = taken.setdefault(target.path, set())
        if target.third in thirds or (thirds and None in (target.third, *thirds)):
            raise UserError(f"{path} changes {target.path} twice ({clip(module)}): write it again.")
        thirds.add(target.third)
    return family, targets


def refuse_names(path: Path, unknown: list[str], others: Iterable[str] = ()) -> NoReturn:
    model = guess_model(unknown, others)
    looks = f"it looks like an adapter for {model}" if model else "it may be another model's"
    raise UserError(f"{path} has names that klein does not know ({list_names(unknown)}): {looks}.")


def list_names(names: Iterable[str]) -> str:
    """The first of a file's names, for a sentence."""
    return first_few(map(clip, names), 2)
