"""How a part stands in files: what config.json calls its numbers, and what the files call its tensors.

A `Field` is one number; a table of fields turns a config.json into a chapter's dataclass, and the dataclass back.
What else a config says is compared with what we compute: another value is refused, an unknown word is logged.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import mlx.nn as nn

from ..checkpoints import Rule, rename
from ..errors import UserError, clip, say_once

Values = dict[str, Any]  # what a JSON file holds
Rules = list[Rule]  # for chapter 8's `rename`: from our names to those of the released folders
LAYOUT = Path(__file__).parent / "layout"  # what diffusers and transformers write besides our numbers
WIDTH = (int, 1, 2**17)
COUNT = (int, 1, 1000)
EPS = (float, 1e-12, 0.1)
BASE = (float, 1.0, 1e12)  # of rotary positions
AXIS = (int, 2, 1024)
FOUR = (4, 4)


class Field(NamedTuple):
    """What config.json calls a number of ours, and what it may be: one of this kind, or so many in a list."""

    name: str
    kind: type[int | float | bool]
    low: float = 0
    high: float = 1
    length: tuple[int, int] | None = None  # at least and at most, of a list

    def check(self, path: Path, value: Any) -> None:
        items = value if isinstance(value, list | tuple) else [value]
        least, most = self.length or (1, 1)
        right = isinstance(value, list | tuple) == (self.length is not None) and least <= len(items) <= most
        types = (int, float) if self.kind is float else (self.kind,)
        if not right or not all(type(item) in types and self.low <= item <= self.high for item in items):
            raise UserError(
                f"{path} says that {self.name} is {clip(repr(value))}, and it must be {self.allowed}: is this another "
                "kind of model?"
            )

    @property
    def allowed(self) -> str:
        one = {int: "a whole number", float: "a number", bool: "true or false"}[self.kind]
        if self.kind is not bool:
            one += f" from {self.low:,} to {self.high:,}"
        return f"a list of {self.length[0]} to {self.length[1]}, each {one}" if self.length else one


Fields = dict[str, Field]  # by the names of the dataclass


def read_fields(path: Path, values: dict[str, Any], fields: Fields) -> dict[str, Any]:
    """The dataclass's numbers from config.json's, each checked. Raises UserError for what is missing or cannot be."""
    numbers = {}
    for name, entry in fields.items():
        if entry.name not in values:
            raise UserError(f"{path} says nothing about {entry.name!r}: is this another kind of model?")
        value = values[entry.name]
        entry.check(path, value)
        numbers[name] = tuple(value) if entry.length else value
    return numbers


def format_fields(cfg: object, fields: Fields) -> dict[str, Any]:
    """The numbers of a dataclass under config.json's names: the way back from `read_fields`."""
    values = {field.name: getattr(cfg, name) for name, field in fields.items()}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items() if v is not None}


def read_layout(file: str) -> dict[str, Any]:
    """A config.json of the released layout, without a model's own numbers."""
    return json.loads((LAYOUT / file).read_text("utf-8"))


# ---------------------------------------------------------------- words besides the numbers

# What transformers and diffusers write and what changes no picture: names, types, training, and what is read elsewhere.
NEUTRAL = {
    "architectures", "attention_dropout", "auto_map", "axes_lens", "base_image_seq_len", "base_shift",
    "batch_norm_momentum", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "force_upcast",
    "id2label", "image_token_id", "initializer_range", "is_encoder_decoder", "label2id", "latents_mean", "latents_std",
    "max_image_seq_len", "max_position_embeddings", "max_shift", "max_window_layers", "mrope_interleaved",
    "mrope_section", "out_channels", "output_attentions", "output_hidden_states", "pad_token_id", "problem_type",
    "quantization", "quantization_config", "return_dict", "sample_size", "sliding_window", "tie_word_embeddings",
    "torch_dtype", "transformers_version", "use_cache", "video_token_id", "vision_config", "vision_end_token_id",
    "vision_start_token_id",
}  # fmt: skip


def check_words(path: Path, values: dict[str, Any], computed: dict[str, Any], read: Collection[str]) -> None:
    """Refuse a word of a config by which the reference computes something else than we do. Raises UserError.

    computed: word → the value that we compute, a tuple of values that mean the same, or the words of a dictionary.
    read: words that are numbers of ours. A word that nobody knows is logged: a released file may have new ones.
    """
    for word, value in values.items():
        right = computed.get(word)
        if word in read or word in NEUTRAL or word.startswith("_"):
            continue
        if word not in computed:
            say_once(f"{path} says {clip(repr(word))}, a word that kleinlite does not know.")
        elif isinstance(right, dict) and isinstance(value, dict):
            check_words(path, value, right, read)
        elif not is_computed(value, None if isinstance(right, dict) else right):
            known = right if isinstance(right, tuple) else (right,)
            raise UserError(
                f"{path} says that {word} is {clip(repr(value))}, and kleinlite computes "
                f"{' or '.join(map(repr, known))}: take another model."
            )


def is_computed(value: object, right: object) -> bool:
    """Whether a config's value means what we compute; of a list with the same word for each layer, every item."""
    if isinstance(right, tuple):
        each = isinstance(value, list) and value and all(is_computed(item, right) for item in value)
        return bool(each) or any(is_computed(value, one) for one in right)
    if isinstance(value, float) and isinstance(right, float):
        return math.isclose(value, right, rel_tol=1e-6)  # 1e-6 that went through float32 is the same number
    return value == right


class Shapes(dict[str, list[int]]):
    """The shapes of the tensors in a file by our names, whether it has those or the released folders'."""

    def __init__(self, shapes: dict[str, list[int]], rules: Rules):
        super().__init__(shapes)
        self.rules = rules

    def __missing__(self, name: str) -> list[int]:
        """Of one of theirs, or of several, stacked. Raises KeyError."""
        parts = [dict.__getitem__(self, source) for source in rename(name, self.rules) if source != name]
        if not parts:
            raise KeyError(name)
        return [sum(part[0] for part in parts), *parts[0][1:]]

    def count(self, name: str) -> int:
        """How many tensors there are of a name with a number, `blocks.{}.x`, from 0 on."""
        return sum(1 for _ in itertools.takewhile(self.has, map(name.format, itertools.count())))

    def has(self, name: str) -> bool:
        return all(source in self for source in rename(name, self.rules)) or name in self


@dataclass(frozen=True)
class PartFormat:
    """How a part (transformer, text encoder or autoencoder) stands in files."""

    config: type  # the chapter's dataclass
    network: type[Any]  # the chapter's class
    fields: Fields  # config.json's numbers
    names: Rules  # what the released folders call its tensors
    anchor: str  # our name of a tensor that all its files have, and no other part's
    layout: Values = field(default_factory=dict)  # what config.json says beside the numbers
    repeated: Callable[[Any], Values] = lambda cfg: {}  # its further numbers, which follow from ours
    optional: tuple[str, ...] = ()  # fields that it may lack
    own_parse: Callable[[Path, Values, Values], Any] | None = None  # as `parse`, where the config is no plain table,
    own_format: Callable[[Any], Values] | None = None  # and as `format`
    computed: Values = field(default_factory=dict)  # further words, and values that mean the same
    infer: Callable[[Shapes], Any] | None = None  # shapes in a single file → config; None: it cannot be one file
    is_used: Callable[[Any, str], bool] = lambda cfg, name: True  # is this tensor of the file loaded?
    build: Callable[[Any], nn.Module] | None = None  # what is loaded, where it is less than the whole network
    others: tuple[PartFormat, ...] = ()  # what can stand in its place

    def of(self, cfg: Any) -> PartFormat:
        """This format, or the one of `others` that a config belongs to."""
        return next(form for form in (self, *self.others) if form.config.__name__ == type(cfg).__name__)

    def parse(self, path: Path, values: Values, index: Values) -> Any:
        """What config.json and model_index.json say → config, checked. Raises UserError."""
        if self.own_parse:
            cfg = self.own_parse(path, values, index)
        else:
            absent = [name for name in self.optional if not values.get(self.fields[name].name)]
            fields = {name: field for name, field in self.fields.items() if name not in absent}
            cfg = self.config(**read_fields(path, values, fields))
        self.check(path, cfg)
        check_words(path, values, self.format(cfg) | self.computed, {field.name for field in self.fields.values()})
        return cfg

    def format(self, cfg: Any) -> Values:
        """config → config.json, which is what we compute, see `check_words`."""
        if self.own_format:
            return self.own_format(cfg)
        return self.layout | format_fields(cfg, self.fields) | self.repeated(cfg)

    def check(self, path: Path, cfg: Any) -> None:
        """Refuse numbers that contradict each other. Raises UserError."""
        wrong = self.contradictions(cfg)
        if wrong:
            raise UserError(f"{path} contradicts itself ({'; '.join(wrong)}): is this another kind of model?")

    def contradictions(self, cfg: Any) -> list[str]:
        """Between numbers that are right one by one."""
        n = {name: getattr(cfg, name) for name in self.fields}
        wrong = [f"{a} channels of a position axis are odd" for a in n.get("axes", ()) if a % 2]
        if n.get("head_dim", 0) % 2:
            wrong.append("head_dim is odd")
        if "kv_heads" in n and n["heads"] % n["kv_heads"]:
            wrong.append(f"{n['heads']} heads do not share {n['kv_heads']}")
        levels = {*n.get("channels", ()), *(n.get("decoder_channels") or ())}
        return wrong + [f"{c} channels are no whole number of {n['groups']} groups" for c in levels if c % n["groups"]]
