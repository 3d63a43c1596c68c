"""What a family of models is: a record of all in which one family differs from another.

A family has its file in this folder, which fills a `Family` from its chapter. Other code asks the record, and takes
klein where nothing is said. A new one is its chapter, its file here, its row in `FAMILIES`, and registry rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn
from PIL import Image
from tokenizers import Tokenizer

from ...autoencoder import AutoencoderConfig
from ...checkpoints import Rule, rename
from ...text_encoder import TextEncoder, TextEncoderConfig
from ...z_image import static_schedule
from ..fields import Fields, format_fields, read_fields
from ..files import ModelFolder

Features = mx.array | list[mx.array]  # of a batch of prompts: one array, or one per prompt where lengths differ
Box = tuple[int, int, int, int]  # left, top, right and bottom, in pixels
Values = dict[str, Any]  # what a JSON file holds
Rules = list[Rule]  # for chapter 8's `rename`: from our names to those of the released folders
Schedule = Callable[[int, int], list[float]]  # steps and image tokens → noise levels


class TransformerNumbers(Hashable, Protocol):
    """What every family's transformer config has."""

    @property
    def d(self) -> int: ...  # width of the blocks

    @property
    def d_latent(self) -> int: ...  # numbers per image token

    @property
    def d_text(self) -> int: ...  # features per text token


class Configs(NamedTuple):
    """The numbers of a model's parts."""

    transformer: TransformerNumbers
    text_encoder: TextEncoderConfig
    autoencoder: AutoencoderConfig


class Variant(NamedTuple):
    """What the files of one model say about how it is to be used."""

    distilled: bool  # few steps, no guidance
    kv: bool  # reference pictures are computed once, not in every step
    schedule: Schedule


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


def shifted_schedule(steps: int, tokens: int, shift: float) -> list[float]:
    """The same noise levels for a picture of any size."""
    return static_schedule(steps, shift)


def encode_each(
    encode: Callable[[TextEncoder, Tokenizer, str, int], mx.array], encoder: TextEncoder, tokenizer: Tokenizer,
    prompts: list[str], max_length: int,
) -> Features:  # fmt: skip
    """A chapter's features of one prompt, for several."""
    return [encode(encoder, tokenizer, prompt, max_length) for prompt in prompts]


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
        return next(form for form in (self, *self.others) if form.config is type(cfg))

    def parse(self, path: Path, values: Values, index: Values) -> Any:
        """What config.json and model_index.json say → config. Raises UserError."""
        if self.own_parse:
            return self.own_parse(path, values, index)
        absent = [name for name in self.optional if not values.get(self.fields[name].name)]
        fields = {name: field for name, field in self.fields.items() if name not in absent}
        return self.config(**read_fields(path, values, fields))

    def format(self, cfg: Any) -> Values:
        """config → config.json, which is what we compute, see `check_words`."""
        if self.own_format:
            return self.own_format(cfg)
        return self.layout | format_fields(cfg, self.fields) | self.repeated(cfg)

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


@dataclass(frozen=True)
class Family:
    """What the models of a family share and those of another have otherwise."""

    title: str
    example: str  # a released model, to recommend
    pipelines: tuple[str, ...]  # how `_class_name` in a model's index begins
    classes: tuple[str, ...]  # how `_class_name` in the transformer's config.json begins
    transformer: PartFormat
    text_encoder: PartFormat
    autoencoder: PartFormat
    released: dict[str, Configs]  # by the name of a size in the registry
    defaults: dict[bool, tuple[int, float]]  # distilled or not → steps, guidance
    encode: Callable[[TextEncoder, Tokenizer, list[str], int], Features]  # prompts and the most tokens → features
    schedule: Schedule
    read_variant: Callable[[ModelFolder, Any], Variant]  # index and other files, and the transformer's config
    # What adapter files call its matrices, besides our names and the released folders'; {i}: the number of a block.
    lora_aliases: dict[str, str] = field(default_factory=dict)  # → our names
    lora_duplicates: tuple[tuple[str, str], ...] = ()  # spellings that some files have besides others, and the others
    lora_widths: dict[int, str] = field(default_factory=dict)  # of the blocks' stream → the model that it tells
    no_guidance: float = 1.0  # the guidance that does nothing
    guidance_fixed: bool = True  # a distilled model refuses a guidance
    edits: bool = True  # it can take reference pictures
    # Of a single file, whose header does not tell: distilled and KV by its name, or None if the name tells nothing.
    read_file_name: Callable[[str], tuple[bool, bool] | None] | None = None
    kv_pipeline: str = ""  # `_class_name` in the index of a model that was trained for cached references
    velocity_field: Callable[..., Any] | None = None  # chapter 6's arguments; None: chapter 6's own
    prepare_lone_reference: Callable[[Image.Image], tuple[Image.Image, Box]] | None = None  # None: chapter 6's, always
    # The most tokens that a prompt can come to, at most so many: before a tokenizer is here. None: it is padded to all.
    count_window: Callable[[str, int], int] | None = None
    float16: bool = True  # False: its numbers grow beyond float16's
    trains: bool = True  # adapters can be trained for it

    def __hash__(self) -> int:  # of what can have one: the dictionaries cannot
        return hash(self.title)

    @property
    def parts(self) -> dict[str, PartFormat]:
        return {"transformer": self.transformer, "text_encoder": self.text_encoder, "autoencoder": self.autoencoder}
