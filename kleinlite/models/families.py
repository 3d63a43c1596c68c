"""The families of models that kleinlite runs, and in what they differ: the one place that knows. Hand-written.

A model belongs to the family of its transformer's config. Chapters 1 to 6 build the first family, chapter 14 the other.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from tokenizers import Tokenizer

from ..autoencoder import Autoencoder, AutoencoderConfig
from ..sampling import schedule
from ..text_encoder import TextEncoder, TextEncoderConfig, tokenize
from ..transformer import Transformer, TransformerConfig
from ..z_image import (
    ScaledAutoencoder,
    ScaledAutoencoderConfig,
    ZImageConfig,
    ZImageTransformer,
    encode_caption,
    sister_field,
    static_schedule,
)
from .names import TRANSFORMER_NAMES, Z_IMAGE_NAMES

__all__ = ["Family", "KLEIN", "Z_IMAGE", "family_of", "network_of"]

Features = mx.array | list[mx.array]  # of a batch of prompts: one array, or one per prompt where lengths differ


@dataclass(frozen=True)
class Family:
    """What the models of a family share and those of another have otherwise."""

    title: str
    transformer: type[nn.Module]
    autoencoder: type[nn.Module]
    transformer_names: list[tuple[str, ...]]  # what the released folders call its tensors
    defaults: dict[bool, tuple[int, float]]  # distilled or not → steps, guidance
    no_guidance: float  # the guidance that does nothing
    guidance_fixed: bool  # a distilled model refuses a guidance
    edits: bool  # it can take reference pictures
    encode: Callable[[TextEncoder, Tokenizer, list[str], int], Features]  # prompts and the most tokens → features
    schedule: Callable[[int, int], list[float]]  # steps and image tokens → noise levels
    velocity_field: Callable | None = None  # with chapter 6's arguments; None: chapter 6's own


KLEIN = Family(
    title="FLUX.2 [klein]",
    transformer=Transformer,
    autoencoder=Autoencoder,
    transformer_names=TRANSFORMER_NAMES,
    defaults={True: (4, 1.0), False: (50, 4.0)},
    no_guidance=1.0,
    guidance_fixed=True,
    edits=True,
    encode=lambda encoder, tokenizer, prompts, tokens: encoder(*tokenize(tokenizer, prompts, tokens)),
    schedule=schedule,
)
Z_IMAGE = Family(
    title="Z-Image",
    transformer=ZImageTransformer,
    autoencoder=ScaledAutoencoder,
    transformer_names=Z_IMAGE_NAMES,
    defaults={True: (8, 0.0), False: (50, 4.0)},
    no_guidance=0.0,
    guidance_fixed=False,
    edits=False,
    encode=lambda encoder, tokenizer, prompts, tokens: [
        encode_caption(encoder, tokenizer, prompt, tokens) for prompt in prompts
    ],
    schedule=lambda steps, n: static_schedule(steps),
    velocity_field=lambda transformer, captions, references, grids, grid: sister_field(transformer, captions, grid),
)
FAMILIES = {TransformerConfig: KLEIN, ZImageConfig: Z_IMAGE}
NETWORKS = {
    TransformerConfig: Transformer,
    ZImageConfig: ZImageTransformer,
    AutoencoderConfig: Autoencoder,
    ScaledAutoencoderConfig: ScaledAutoencoder,
    TextEncoderConfig: TextEncoder,
}


def family_of(cfg: TransformerConfig | ZImageConfig) -> Family:
    """The family of a transformer's config."""
    return FAMILIES[type(cfg)]


def network_of(cfg: TransformerConfig | ZImageConfig | AutoencoderConfig | TextEncoderConfig) -> type[nn.Module]:
    """The network that a config describes."""
    return NETWORKS[type(cfg)]
