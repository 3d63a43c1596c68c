"""Checkpoints.

A published model is a folder of arrays with names. How does it become a network, and what can go wrong on the way
without an error?

Letters: a tensor's name is a path of modules; "ours" are the authors' names, the others diffusers'.

Sources: the safetensors format (https://github.com/huggingface/safetensors). The authors' names:
https://github.com/black-forest-labs/flux2. The folders': diffusers' `convert_flux2_to_diffusers.py`.

Promoted from notebooks/08_checkpoints.ipynb: edit there, then run `make promote`. (seal dd32e13b)
"""

import json
import re
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .errors import UserError

__all__ = [
    "read_header", "Conversion", "Rule", "rename", "swap_halves", "find_conversion", "to_mlx", "convert_present",
    "find_problems", "match",
]  # fmt: skip


def read_header(path: Path) -> dict[str, Any]:
    """Name → dtype, shape and place (`data_offsets`) of every tensor in a safetensors file. `models.files` checks it.

    Raises struct.error or ValueError if the beginning of the file is no header.
    """
    with path.open("rb") as f:
        length = struct.unpack("<Q", f.read(8))[0]
        header: dict[str, Any] = json.loads(f.read(length))
    header.pop("__metadata__", None)
    return header


Conversion = Callable[[mx.array], mx.array]


class Rule(NamedTuple):
    """How the file names what we call `pattern`. Several targets: our tensor is theirs, stacked in this order."""

    pattern: str
    targets: list[str]
    convert: Conversion | None = None


def rename(name: str, rules: Sequence[Rule]) -> list[str]:
    """The file's tensors that make up ours, by name: every rule that fits is applied, in order."""
    names = [name]
    for rule in rules:
        if re.search(rule.pattern, names[0]):
            names = [re.sub(rule.pattern, target, name) for target in rule.targets for name in names]
    return names


def swap_halves(w: mx.array) -> mx.array:
    """The folder's final modulation is (scale, shift), the single file's and ours (shift, scale)."""
    half = len(w) // 2
    return mx.concatenate([w[half:], w[:half]])


def find_conversion(name: str, rules: Sequence[Rule]) -> Conversion | None:
    """What a rule for our tensor `name` does to its rows, if one carries such a function."""
    return next((rule.convert for rule in rules if rule.convert and re.search(rule.pattern, name)), None)


def to_mlx(tensors: list[mx.array], conversion: Conversion | None = None) -> mx.array:
    """The file's tensors that make up one of ours → ours: stacked, converted if a rule says so, channels last."""
    w = mx.concatenate(tensors)
    if conversion is not None:
        w = conversion(w)
    return w.transpose(0, 2, 3, 1) if w.ndim == 4 else w


def convert_present(
    sources: dict[str, list[str]],
    arrays: dict[str, Any],
    rules: Sequence[Rule],
    convert: Callable[[list[Any], Conversion | None], Any] = to_mlx,
) -> dict[str, Any]:
    """Our tensors, by our names, whose sources are all among the file's arrays and stack."""
    weights = {}
    for name, names in sources.items():
        tensors = [arrays[source] for source in names if source in arrays]
        widths = {tensor.shape[1:] for tensor in tensors}
        if len(tensors) == len(names) and len(widths) == 1:
            weights[name] = convert(tensors, find_conversion(name, rules))
    return weights


def find_problems(
    sources: dict[str, list[str]], arrays: dict[str, Any], weights: dict[str, Any], shapes: dict[str, tuple[int, ...]]
) -> dict[str, list[str]]:
    """What is missing among a file's arrays, what nobody asks for, or two do, and which shapes are not ours."""
    expected = [source for names in sources.values() for source in names]
    misshapen = []
    for name, names in sources.items():
        present = all(source in arrays for source in names)
        if present and (name not in weights or tuple(weights[name].shape) != shapes[name]):
            found = [weights[name]] if len(names) == 1 else [arrays[source] for source in names]
            parts = [f"{source} is {tuple(part.shape)}" for source, part in zip(names, found)]
            misshapen.append(f"{' + '.join(parts)}, expected {shapes[name]}")
    return {
        "missing": [source for source in expected if source not in arrays],
        "not expected": sorted(set(arrays) - set(expected)),
        "used twice": sorted({source for source in expected if expected.count(source) > 1}),
        "of the wrong shape": misshapen,
    }


def match(
    module: nn.Module,
    arrays: dict[str, Any],
    rules: Sequence[Rule],
    convert: Callable[[list[Any], Conversion | None], Any] = to_mlx,
) -> dict[str, Any]:
    """Every parameter of `module` with its tensor from `arrays`, by our names.

    Raises UserError, with the names, if a tensor is missing, left over, used twice or of another shape.
    """
    parameters: dict[str, mx.array] = dict(tree_flatten(module.parameters()))
    shapes = {name: tuple(w.shape) for name, w in parameters.items()}
    sources = {name: rename(name, rules) for name in shapes}
    weights = convert_present(sources, arrays, rules, convert)
    lists = []
    for problem, names in find_problems(sources, arrays, weights, shapes).items():
        if names:
            more = " …" if len(names) > 4 else ""
            lists.append(f"{len(names)} {problem}: {', '.join(names[:4])}{more}")
    if lists:
        kind = type(module).__name__.lower()
        raise UserError(f"The {kind}'s weights do not fit ({'; '.join(lists)}). Is this another model's file?")
    return weights
