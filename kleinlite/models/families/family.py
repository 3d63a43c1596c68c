"""What a family of models is: a record of all in which one family differs from another.

A family has its file in this folder, which fills a `Family` from its chapter. Other code asks the record, and takes
klein where nothing is said. A new one is its chapter, its file here, its row in `FAMILIES`, and registry rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
from PIL import Image
from tokenizers import Tokenizer

from ...autoencoder import AutoencoderConfig
from ...text_encoder import TEMPLATE, TextEncoder, TextEncoderConfig
from ...z_image import static_schedule
from ..files import ModelFolder
from ..part_format import PartFormat

Features = mx.array | list[mx.array]  # of a batch of prompts: one array, or one per prompt where lengths differ
Box = tuple[int, int, int, int]  # left, top, right and bottom, in pixels
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
    template: str = TEMPLATE  # the chat template, with a place for the prompt
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
    # Steps, whether distilled, and `quantize` → what is to be said before a picture is drawn.
    notes: Callable[[int, bool, int | str | None], list[str]] = lambda steps, distilled, quantize: []

    def __hash__(self) -> int:  # of what can have one: the dictionaries cannot
        return hash(self.title)

    @property
    def parts(self) -> dict[str, PartFormat]:
        return {"transformer": self.transformer, "text_encoder": self.text_encoder, "autoencoder": self.autoencoder}
