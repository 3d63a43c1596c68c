"""Adapter files: LoRA, LoKr, LoHa and DoRA in every spelling that is about, read into changes of our matrices.

A file is understood as a whole or refused: each name must find its target, each change must be complete, finite and of
the right shape, or one sentence names what is wrong and the model that the file seems to be for.
"""

import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from ..checkpoints import rename, swap_halves
from ..errors import first_few
from ..lora import DoRA, Hadamard, Kronecker, LowRank, Rows, linear_layers, matrix_shape, weight_of
from ..transformer import Transformer
from .files import check_weights_file
from .names import TRANSFORMER_NAMES, Z_IMAGE_NAMES

# ---------------------------------------------------------------- names of modules

DOUBLE = [f"{stream}_{m}" for stream in ("img", "txt") for m in ("attn.qkv", "attn.proj", "mlp.0", "mlp.2")]
SINGLE = ("linear1", "linear2")
OUTSIDE = (
    "img_in", "txt_in", "time_in.in_layer", "time_in.out_layer", "double_stream_modulation_img.lin",
    "double_stream_modulation_txt.lin", "single_stream_modulation.lin", "final_layer.linear",
    "final_layer.adaLN_modulation.1",
)  # fmt: skip
Z_IMAGE_BLOCKS = ("layers", "noise_refiner", "context_refiner")
Z_IMAGE = (
    "attention.qkv", "attention.out", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3", "adaLN_modulation.0",
)  # fmt: skip
Z_IMAGE_OUTSIDE = ("cap_embedder.1", "t_embedder.mlp.0", "t_embedder.mlp.2")
BLOCKS = 100  # names are known for so many blocks; whether a model has them is asked later
PREFIXES = re.compile(
    r"^(base_model\.model\.|(model\.)?diffusion_model\.|transformer\.|lora_unet_|lora_transformer_|lycoris_)+"
)
TEXT_ENCODER = re.compile(r"^(text_encoders?\.|lora_te\d?_|te\d_|lycoris_text|base_model\.model\.text_encoder)")
TENSOR_NAME = re.compile(
    r"\.(?:(?P<low>lora[_.](?:A|B|down|up|magnitude_vector))(?:\.\w+?)?(?:\.weight)?"
    r"|(?P<other>alpha|dora_scale|lokr_w[12](?:_[ab])?|hada_w[12]_[ab]))$"
)
PART_NAMES = {
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
def list_targets() -> dict[str, Target]:
    """Every name of every matrix, ours and the released folders', with `_` for `.`, and what it stands for."""
    numbers = range(BLOCKS)
    ours = [f"double_blocks.{i}.{name}" for i in numbers for name in DOUBLE] + [*OUTSIDE]
    ours += [f"single_blocks.{i}.{name}" for i in numbers for name in SINGLE]
    z_image = [f"{blocks}.{i}.{name}" for blocks in Z_IMAGE_BLOCKS for i in numbers for name in Z_IMAGE] + [
        *Z_IMAGE_OUTSIDE
    ]
    found = {}
    for path, rules in [*((path, TRANSFORMER_NAMES) for path in ours), *((path, Z_IMAGE_NAMES) for path in z_image)]:
        theirs = [name.removesuffix(".weight") for name in rename(f"{path}.weight", rules)]
        swapped = theirs == ["norm_out.linear"]
        found[path] = Target(path)
        found |= {name: Target(path, i if len(theirs) == 3 else None, swapped) for i, name in enumerate(theirs)}
    for i in numbers:  # diffusers' names after it has fused the three
        for fused, stream in (("to_qkv", "img"), ("to_added_qkv", "txt")):
            found[f"transformer_blocks.{i}.attn.{fused}"] = Target(f"double_blocks.{i}.{stream}_attn.qkv")
    return {name.replace(".", "_"): target for name, target in found.items()}


def find_target(module: str) -> Target | None:
    """The matrix that a file means by this name, in any spelling."""
    name = re.sub(r"^sformer_blocks", "transformer_blocks", PREFIXES.sub("", module))
    return list_targets().get(name.replace(".", "_"))


# ---------------------------------------------------------------- whose file it is

DISTINCTIVE_NAMES = {  # what only its names have
    "FLUX.1": r"(img|txt)_mod[._]lin|single_blocks[._]\d+[._]modulation[._]lin|vector_in|ff\.net\.|ff_net_|proj_mlp|"
    r"single_transformer_blocks[._]\d+[._](attn[._]to_[qkv]|norm)\b",
    "FLUX.2 [dev]": r"guidance_in|guidance_embedder",
    "Z-Image": r"(noise|context)_refiner|cap_embedder|(^|[._])layers[._]\d+[._](attention|feed_forward|adaLN)",
    "Qwen-Image": r"transformer_blocks[._]\d+[._](img|txt)_(mod|mlp)[._]",
    "Stable Diffusion": r"(down|up|mid|input|output|middle)_blocks?[._]",
}
WIDTHS = {3072: "klein 4B", 4096: "klein 9B", 6144: "FLUX.2 [dev]", 3840: "Z-Image"}


def guess_family(modules: Iterable[str], width: int | None) -> str | None:
    """The model for which a file seems to be, by names that only one has, else by the width of its matrices."""
    modules = list(modules)
    for name, signs in DISTINCTIVE_NAMES.items():
        if any(re.search(signs, module) for module in modules):
            return name
    return WIDTHS.get(width)


# ---------------------------------------------------------------- a file


@dataclass(frozen=True)
class Adapter:
    """An adapter file, read and understood; it fits a model only when `changes` says so."""

    name: str  # the file's, without its ending
    path: Path
    modules: dict[str, dict[str, mx.array]]  # name in the file → its tensors by part: "down", "up", "lokr_w1", …
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """What to call it by: the name of a bundled one, else the file's."""
        return self.name if bundled_adapters().get(self.name) == self.path else self.path.name

    @property
    def width(self) -> int | None:
        """Columns of the matrices that read the stream, which is the width of the model."""
        readers = ("attn.qkv", "attention.qkv", "linear1", "mlp.0", "_modulation_img.lin")
        found = [parts for name, parts in self.modules.items() if find_target(name).path.endswith(readers)]
        size = change_shape(found[0]) if found else None
        return size and size[1]

    @property
    def family(self) -> str | None:
        return guess_family(self.modules, self.width)

    def factor(self, module: str) -> float:
        """alpha / r: from the tensor, else the header, else 1."""
        parts = self.modules[module]
        r = find_rank(parts)
        if "alpha" in parts and r:
            return parts["alpha"].item() / r
        said = self.config if r else {}
        alpha = match_pattern(said.get("alpha_pattern"), module, said.get("lora_alpha"))
        if alpha is None:
            return 1.0
        return alpha / (math.sqrt(r) if said.get("use_rslora") else r)

    @property
    def config(self) -> dict:
        """PEFT's words about the adapter, from the header: `r`, `lora_alpha`, …"""
        try:
            said = json.loads(self.metadata.get("lora_adapter_metadata", "{}"))
            said = {name.removeprefix("transformer."): value for name, value in said.items()}
            alphas = [said.get("lora_alpha") or 0, *(said.get("alpha_pattern") or {}).values()]
            if all(math.isfinite(alpha) for alpha in alphas) and all(map(re.compile, said.get("alpha_pattern") or {})):
                return said
        except (ValueError, TypeError, AttributeError, re.error):
            pass
        raise ValueError(
            f"{self.path}: what its header says (lora_adapter_metadata) is damaged: write the adapter again."
        )

    @property
    def trained_on(self) -> str | None:
        """The model on which it was trained, if the header says so, in its own words."""
        try:
            ours = json.loads(self.metadata.get("kleinlite", "{}")).get("model")
        except (ValueError, AttributeError):
            ours = None
        names = ("ss_base_model_version", "modelspec.architecture", "model")
        return ours or next((self.metadata[name] for name in names if name in self.metadata), None)

    @property
    def kind(self) -> str:
        """LoRA, DoRA, LoKr or LoHa; several if it mixes them."""
        return " and ".join(sorted({kind_of(parts) for parts in self.modules.values()}))

    def changes(self, net: Transformer) -> dict[str, nn.Module]:
        """The changes of this model's matrices, by path. ValueError if they do not all fit. Nothing is attached yet."""
        layers, found = linear_layers(net), {}
        if absent := [m for m in self.modules if find_target(m).path not in layers]:
            raise ValueError(
                f"{self.path} changes blocks that this model does not have ({first_few(absent)}){self._hint()}."
            )
        for module in self.modules:
            target = find_target(module)
            thirds = found.setdefault(target.path, {})
            if target.third in thirds or (thirds and None in (target.third, *thirds)):
                raise ValueError(f"{self.path} changes {target.path} twice ({module}): write it again.")
            thirds[target.third] = self._change(module, target, layers[target.path])
        return {path: thirds[None] if None in thirds else Rows(thirds, 3) for path, thirds in found.items()}

    def _hint(self) -> str:
        return f": it looks like an adapter for {self.family}" if self.family else ""

    def _change(self, module: str, target: Target, layer: nn.Module) -> nn.Module:
        """One module's tensors as a change of a matrix, or of a third of it."""
        parts, w = self.modules[module], matrix_shape(layer)
        rows, cols = (w[0] // 3 if target.third is not None else w[0]), w[1]
        if (there := change_shape(parts)) != (rows, cols):
            told = f"a change of {there[0]} × {there[1]}" if there else "tensors that do not go together"
            sizes = ", ".join(f"{part} {tuple(a.shape)}" for part, a in parts.items() if a.ndim)
            raise ValueError(
                f"{self.path}: {module} is {told} ({sizes}) and the matrix here is {rows} × {cols}{self._hint()}."
            )
        if target.swapped:
            parts = swap_rows(self.path, parts)
        f = self.factor(module)
        if "up" in parts:
            low = LowRank(parts["down"], parts["up"], f)
            if "magnitude" not in parts:
                return low
            whole = weight_of(layer)
            return DoRA(low, parts["magnitude"], whole if target.third is None else mx.split(whole, 3)[target.third])
        first, second = ([parts[name] for name in names] for names in factors(parts))
        return Hadamard(*first, *second, f) if "hada_w1_a" in parts else Kronecker(product(first), product(second), f)


def describe_adapter(adapter: Adapter) -> dict[str, str]:
    """What an adapter is, and what it would change, in words."""
    by_kind, blocks, matrices = {}, {"double": set(), "single": set()}, set()
    for module in adapter.modules:
        path = find_target(module).path
        stream, number = re.match(r"(?:(double|single)_blocks\.(\d+)\.)?", path).groups()
        if stream:
            blocks[stream].add(int(number))
        matrices.add(path)
        by_kind.setdefault(re.sub(r"blocks\.\d+\.", "blocks.", path), []).append(path)
    ranks = sorted({r for parts in adapter.modules.values() if (r := find_rank(parts))})
    factors = sorted({adapter.factor(module) for module in adapter.modules})
    numbers = sum(a.size for parts in adapter.modules.values() for a in parts.values())
    return {
        "adapter": str(adapter.path),
        "kind": adapter.kind,
        "for": adapter.family or f"a model {adapter.width} wide" if adapter.width else "unknown",
        "rank": ", ".join(map(str, ranks)) or "none",
        "alpha / rank": ", ".join(f"{f:g}" for f in factors),
        "trained on": adapter.trained_on or "not said",
        "changes": f"{len(matrices)} matrices, by {numbers:,} numbers",
        **{f"{name} blocks": ", ".join(map(str, sorted(found))) for name, found in blocks.items() if found},
        "matrices": ", ".join(f"{name} ({len(set(paths))})" for name, paths in by_kind.items()),
    }


def match_pattern(patterns: dict[str, float] | None, module: str, default: float | None) -> float | None:
    """PEFT's exceptions: the value whose name, a regular expression, ends the module's name."""
    name = PREFIXES.sub("", module)
    return next((v for k, v in (patterns or {}).items() if re.match(rf"(.*\.)?({k})$", name)), default)


def factors(parts: dict[str, mx.array]) -> list[tuple[str, ...]]:
    """The tensors that make a change: a LoRA's pair, a LoHa's two pairs, a LoKr's two matrices, each one or a pair."""
    if "up" in parts:
        return [("up", "down")]
    if "hada_w1_a" in parts:
        return [("hada_w1_a", "hada_w1_b"), ("hada_w2_a", "hada_w2_b")]
    return [(name,) if name in parts else (f"{name}_a", f"{name}_b") for name in ("lokr_w1", "lokr_w2")]


def kind_of(parts: dict[str, mx.array]) -> str:
    """LoRA, DoRA, LoKr or LoHa."""
    if "hada_w1_a" in parts:
        return "LoHa"
    if "up" not in parts:
        return "LoKr"
    return "DoRA" if "magnitude" in parts else "LoRA"


def find_rank(parts: dict[str, mx.array]) -> int | None:
    """The number that alpha is divided by; None for a LoKr with both factors whole, whose alpha means nothing."""
    pairs = [names for names in factors(parts) if len(names) == 2]
    return parts[pairs[-1][1]].shape[0] if pairs else None


def product(matrices: list[mx.array]) -> mx.array:
    """A matrix as it is, or two multiplied in float32."""
    return matrices[0] if len(matrices) == 1 else matrices[0].astype(mx.float32) @ matrices[1].astype(mx.float32)


def change_shape(parts: dict[str, mx.array]) -> tuple[int, int] | None:
    """Rows and columns of the change; None if its tensors do not fit each other."""
    shapes = [[parts[name].shape for name in names] for names in factors(parts)]
    if any(len(size) != 2 for sizes in shapes for size in sizes):
        return None
    if any(left[1] != right[0] for sizes in shapes for left, right in zip(sizes, sizes[1:])):
        return None
    (rows, columns), *others = [(sizes[0][0], sizes[-1][1]) for sizes in shapes]
    if "hada_w1_a" in parts:
        return (rows, columns) if others == [(rows, columns)] else None
    if others:  # a Kronecker product
        return rows * others[0][0], columns * others[0][1]
    fits = "magnitude" not in parts or parts["magnitude"].shape in ((rows,), (rows, 1), (1, columns))
    return (rows, columns) if fits else None


def swap_rows(path: Path, parts: dict[str, mx.array]) -> dict[str, mx.array]:
    """The two halves of the change's rows in each other's target: only what has rows, never the side of the columns."""
    sides = [names[0] for names in factors(parts)]
    if kind_of(parts) == "LoKr":
        del sides[1]  # the rows of the first factor are blocks of whole rows
    if "magnitude" in parts and parts["magnitude"].shape[0] > 1:  # else it has one length per column
        sides.append("magnitude")
    if any(parts[name].shape[0] % 2 for name in sides):
        raise ValueError(f"{path}: the change of norm_out.linear has no two halves of rows, so it cannot be read.")
    return parts | {name: swap_halves(parts[name]) for name in sides}


# ---------------------------------------------------------------- reading


def bundled_adapters() -> dict[str, Path]:
    """The adapters that come with nano, by name."""
    folder = Path(str(files("kleinlite"))) / "nano" / "loras"
    return {path.stem: path for path in sorted(folder.glob("*.safetensors"))}


def find_adapter(name: str | Path) -> Path:
    return Path(name) if Path(name).is_file() else bundled_adapters().get(str(name), Path(name))


def open_adapter(path: str | Path) -> Adapter:
    """Read an adapter file and understand every name in it, or say in a sentence why it cannot be one of klein's.

    path: a file, or the name of an adapter that comes with nano: "cross", "outlined".
    """
    path = find_adapter(path)
    if not path.is_file():
        known = ", ".join(bundled_adapters())
        raise FileNotFoundError(
            f"There is no file {path}: name a .safetensors file, or one that comes with nano: {known}."
        )
    check_weights_file(path)
    arrays, metadata = mx.load(str(path), return_metadata=True)
    modules, unknown_names = {}, []
    for name, a in sorted(arrays.items()):
        found = TENSOR_NAME.search(name)
        if found is None:
            unknown_names.append(name)
            continue
        part = (found["low"] or found["other"]).replace(".", "_")
        modules.setdefault(name[: found.start()], {})[PART_NAMES.get(part, part)] = a
    modules = {name: parts for name, parts in modules.items() if not is_duplicate(name, modules)}
    check_names(path, arrays, modules, unknown_names)
    for module, parts in modules.items():
        check_complete(path, module, parts)
    types = {a.dtype for parts in modules.values() for a in parts.values() if a.ndim}
    if coded := sorted(str(dtype) for dtype in types if not mx.issubdtype(dtype, mx.floating)):
        raise ValueError(f"{path} has numbers of the type {', '.join(coded)}: save it in bfloat16 or float16.")
    if bad := [m for m, parts in modules.items() if not all(mx.isfinite(a).all().item() for a in parts.values())]:
        raise ValueError(f"{path} has numbers that are not finite ({first_few(bad)}): its training has failed.")
    return Adapter(path.stem, path, modules, metadata)


def is_duplicate(module: str, modules: dict) -> bool:
    """Is this a matrix of Z-Image that the file also has in diffusers' spelling? Some files have both."""
    other = re.sub(r"attention([._])out$", r"attention\1to_out\g<1>0", module)
    other = re.sub(r"attention([._])qkv$", r"attention\1to_q", other)
    return other != module and other in modules


def check_names(path: Path, arrays: dict, modules: dict, unknown_names: list[str]) -> None:
    """Refuse a file with names that mean nothing here."""
    if not modules:
        what = "whole weights, not an adapter: it is for from_pretrained itself, or --model" if any(
            name.endswith(".weight") for name in arrays) else "nothing of an adapter"  # fmt: skip
        raise ValueError(f"{path} holds {what} ({first_few(arrays)}).")
    if text := [name for name in modules if TEXT_ENCODER.match(name)]:
        raise ValueError(
            f"{path} changes a text encoder ({first_few(text)}), which no adapter of klein does: it is another model's."
        )
    unknown = [name for name in modules if find_target(name) is None]
    if unknown or unknown_names:
        who = guess_family(list(modules) + unknown_names, None)
        looks = f"it looks like an adapter for {who}" if who else "is it another model's?"
        raise ValueError(f"{path} has names that klein does not know ({first_few(unknown + unknown_names)}): {looks}.")


def check_complete(path: Path, module: str, parts: dict[str, mx.array]) -> None:
    """Refuse half a pair, and two kinds of change in one."""
    needed = {name for names in factors(parts) for name in names}
    if set(parts) - {"alpha", "magnitude"} != needed or ("magnitude" in parts and "up" not in parts):
        raise ValueError(f"{path}: {module} is not complete, it only has {', '.join(sorted(parts))}: get it anew.")
    if "alpha" in parts and parts["alpha"].size != 1:
        raise ValueError(f"{path}: the alpha of {module} is not one number.")


# ---------------------------------------------------------------- writing


LAYOUTS = ("diffusers", "comfy")


def write_adapter(
    path: str | Path, changes: dict[str, LowRank], *, layout: str = "diffusers", dtype: mx.Dtype = mx.bfloat16,
    trained: dict | None = None,
) -> None:  # fmt: skip
    """Write low-rank changes of our matrices, by path, as an adapter file; in one move.

    layout: "diffusers", whose loader (and ours) takes alpha from the header; or "comfy", in the names that ComfyUI
    reads and with B already scaled, since it does not look there. trained: what the header shall say of the training.
    """
    path, tensors, alphas, ranks = Path(path), {}, {}, {}
    for ours, change in changes.items():
        theirs = [name.removesuffix(".weight") for name in rename(f"{ours}.weight", TRANSFORMER_NAMES)]
        b = swap_halves(change.b) if theirs == ["norm_out.linear"] and layout == "diffusers" else change.b
        if layout == "comfy":
            theirs, b = [ours], change._factor * b
        for name, third in zip(theirs, mx.split(b, len(theirs))):
            name = f"transformer.{name}" if layout == "diffusers" else f"diffusion_model.{name}"
            tensors |= {f"{name}.lora_A.weight": change.a.astype(dtype), f"{name}.lora_B.weight": third.astype(dtype)}
            ranks[name], alphas[name] = len(change.a), change._factor * len(change.a)
    metadata = {"format": "pt", "kleinlite": json.dumps(trained or {})}
    if layout == "diffusers":
        metadata["lora_adapter_metadata"] = json.dumps(peft_config(ranks, alphas))
    partial = path.with_name(f".{path.stem}.partial.safetensors")
    try:
        mx.save_safetensors(str(partial), tensors, metadata)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def peft_config(ranks: dict[str, int], alphas: dict[str, float]) -> dict:
    """What PEFT needs to know to build the same adapter, in the words of its LoraConfig."""
    names = {name.removeprefix("transformer."): name for name in ranks}
    r, alpha = max(ranks.values()), max(alphas.values())
    said = {
        "r": r, "lora_alpha": alpha, "target_modules": sorted(names),
        "rank_pattern": {name: ranks[full] for name, full in names.items() if ranks[full] != r},
        "alpha_pattern": {name: alphas[full] for name, full in names.items() if alphas[full] != alpha},
    }  # fmt: skip
    return {f"transformer.{name}": value for name, value in said.items()}
