"""What it costs.

Will the 4B run on my computer, and how long will a picture take? You can know both before you download a byte.

Letters: s tokens of text and picture, d width. FLOPs are floating-point operations, two per multiply-add.

Sources: two operations per weight and token: Kaplan et al. 2020, arXiv 2001.08361. The roofline: Williams et al.
2009, doi 10.1145/1498765.1498785. `ACTIVATIONS` is fitted to `python -m benchmarks.picture`.

Promoted from notebooks/09_memory.ipynb: edit there, then run `make promote`. (seal 883af2d1)
"""

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .autoencoder import Autoencoder, AutoencoderConfig
from .text_encoder import TextEncoder, TextEncoderConfig
from .transformer import Transformer, TransformerConfig

__all__ = [
    "count_parameters", "Work", "count_step", "count_prompt", "ACTIVATIONS", "Stage", "stage_bytes", "peak_bytes",
]  # fmt: skip


@cache
def count_parameters(kind: Callable[[Any], nn.Module], cfg: Hashable) -> int:
    """How many weights the network `kind(cfg)` has; of a text encoder those that are read, below its highest tap."""
    if isinstance(cfg, TextEncoderConfig):
        cfg = replace(cfg, layers=max(cfg.out_layers), tied=True)
    weights: dict[str, mx.array] = dict(tree_flatten(kind(cfg).parameters()))
    if isinstance(cfg, TextEncoderConfig):
        del weights["norm.weight"]  # comes after the last layer, above every tap
    return sum(w.size for w in weights.values())


class Work(NamedTuple):
    """Floating-point operations (FLOPs): in matrices of weights, and between the tokens in attention."""

    matrices: int
    attention: int

    @property
    def total(self) -> int:
        """Both together."""
        return self.matrices + self.attention


def count_step(cfg: TransformerConfig, text: int, image: int) -> Work:
    """One evaluation of the transformer for `text` and `image` tokens (references included)."""
    s = text + image
    blocks = cfg.double_blocks + cfg.single_blocks
    weights = (4 + 3 * cfg.mlp_ratio) * cfg.d**2  # of a block, per token
    ends = text * cfg.d_text * cfg.d + 2 * image * cfg.d_latent * cfg.d
    return Work(matrices=int(2 * (blocks * weights * s + ends)), attention=4 * blocks * s**2 * cfg.d)


def count_prompt(cfg: TextEncoderConfig) -> Work:
    """The layers up to the highest tap, for one prompt, padded to `cfg.max_length` tokens."""
    weights = 2 * cfg.d * (cfg.heads + cfg.kv_heads) * cfg.head_dim + 3 * cfg.d * cfg.d_mlp  # of a layer
    layers = max(cfg.out_layers)
    m = cfg.max_length
    return Work(matrices=2 * layers * weights * m, attention=4 * layers * m**2 * cfg.heads * cfg.head_dim)


ACTIVATIONS = 72  # numbers per token and channel at the busiest moment: `python -m benchmarks.picture`


class Stage(NamedTuple):
    """The memory of one stage in bytes: the weights of the part that runs, and what it works with."""

    weights: int
    activations: int


def stage_bytes(
    configs: tuple[TransformerConfig, TextEncoderConfig, AutoencoderConfig], side: int, bits: float = 16
) -> dict[str, Stage]:
    """What the stages of a picture of side × side pixels take, one after the other.

    configs: of transformer, text encoder and autoencoder. bits: of a weight; the autoencoder's stay in 32. Activations
    have 16 bits, the decoder's 32.
    """
    cfg, text, autoencoder = configs
    m = text.max_length
    tokens = m + (side // 16) ** 2
    channels = (autoencoder.decoder_channels or autoencoder.channels)[0]
    return {
        "prompt": Stage(int(count_parameters(TextEncoder, text) * bits / 8), 2 * ACTIVATIONS * m * text.d),
        "steps": Stage(int(count_parameters(Transformer, cfg) * bits / 8), 2 * ACTIVATIONS * tokens * cfg.d),
        "decoder": Stage(4 * count_parameters(Autoencoder, autoencoder), 2 * 4 * channels * side**2),
    }


def peak_bytes(
    configs: tuple[TransformerConfig, TextEncoderConfig, AutoencoderConfig], side: int, bits: float = 16
) -> int:
    """The most memory that a picture takes at one time, in bytes, if only the part that runs is loaded."""
    return max(sum(stage) for stage in stage_bytes(configs, side, bits).values())
