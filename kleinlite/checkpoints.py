"""Checkpoints.

We open the files in which models are published, give every tensor its place, and refuse what does not fit.

Promoted from notebooks/08_checkpoints.ipynb: edit there, then run `make promote`. (seal 42da30d8)
"""

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

__all__ = ["read_header", "rename", "swap_halves", "to_mlx", "match"]


def read_header(path: Path) -> dict[str, dict]:
    """Dtype, shape and place of every tensor in a safetensors file. Checks nothing: `models.files` does."""
    with path.open("rb") as f:
        length = struct.unpack("<Q", f.read(8))[0]
        header = json.loads(f.read(length))
    header.pop("__metadata__", None)
    return header


def rename(name: str, rules: list[tuple[str, ...]]) -> list[str]:
    """Apply each rule that fits, in order: the file's tensors that make up ours, one, or several to be stacked."""
    names = [name]
    for pattern, *replacements in rules:
        if re.search(pattern, names[0]):
            names = [re.sub(pattern, replacement, name) for replacement in replacements for name in names]
    return names


def swap_halves(w: mx.array) -> mx.array:
    """The folder's final modulation is (scale, shift), the single file's and ours (shift, scale)."""
    half = len(w) // 2
    return mx.concatenate([w[half:], w[:half]])


def to_mlx(names: list[str], tensors: list[mx.array]) -> mx.array:
    """A file's tensors of these names → ours: stacked, halves swapped where they must be, channels last."""
    w = mx.concatenate(tensors)
    if names == ["norm_out.linear.weight"]:
        w = swap_halves(w)
    return w.transpose(0, 2, 3, 1) if w.ndim == 4 else w


def match(module: nn.Module, arrays: dict, rules: list[tuple[str, ...]], convert: Callable = to_mlx) -> dict:
    """Give every parameter of `module` its tensor. Strict: none missing, none left over, none of another shape."""
    shapes = {name: tuple(w.shape) for name, w in tree_flatten(module.parameters())}
    sources = {name: rename(name, rules) for name in shapes}
    wanted = [source for names in sources.values() for source in names]
    missing, extra = [name for name in wanted if name not in arrays], sorted(set(arrays) - set(wanted))
    here = {name: names for name, names in sources.items() if not set(names) & set(missing)}
    weights = {name: convert(names, [arrays[n] for n in names]) for name, names in here.items()}
    wrong = {name: tuple(w.shape) for name, w in weights.items() if tuple(w.shape) != shapes[name]}
    misshapen = [f"{sources[name][0]} is {shape}, expected {shapes[name]}" for name, shape in wrong.items()]
    if missing or extra or misshapen:
        lists = [("missing", missing), ("not expected", extra), ("of the wrong shape", misshapen)]
        found = "; ".join(f"{len(x)} {what}: {', '.join(x[:4])}{' …' if len(x) > 4 else ''}" for what, x in lists if x)
        kind = type(module).__name__.lower()
        raise ValueError(f"The {kind}'s weights do not fit ({found}). Is this another model's file?")
    return weights
