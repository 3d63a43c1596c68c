"""What it costs.

From the config alone we predict how many weights, products and bytes a picture takes, from one measured product how
many seconds, and then measure.

Promoted from notebooks/09_memory.ipynb: edit there, then run `make promote`. (seal 71790c3c)
"""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .autoencoder import Autoencoder, AutoencoderConfig
from .cpu import STRIP
from .text_encoder import TextEncoder, TextEncoderConfig
from .transformer import Transformer, TransformerConfig

__all__ = ["count_parameters", "Work", "count_step", "count_prompt", "MemoryPlan", "compute_dtype", "plan_memory"]


@cache
def count_parameters(kind: type[nn.Module], cfg: TransformerConfig | TextEncoderConfig | AutoencoderConfig) -> int:
    """How many weights a network has. For the text encoder: those below its highest tap, no other is read."""
    if kind is TextEncoder:
        cfg = replace(cfg, layers=max(cfg.taps), tied=True)
    return sum(w.size for _, w in tree_flatten(kind(cfg).parameters()))


class Work(NamedTuple):
    """Floating-point operations of a stage: in matrices of weights, and between the tokens in attention."""

    matrices: int
    attention: int

    @property
    def total(self) -> int:
        return self.matrices + self.attention


def count_step(cfg: TransformerConfig, text: int, image: int) -> Work:
    """One evaluation of the transformer for `text` and `image` tokens (references included)."""
    s, blocks, weights = text + image, cfg.double_blocks + cfg.single_blocks, (4 + 3 * cfg.mlp_ratio) * cfg.d**2
    ends = text * cfg.d_text * cfg.d + 2 * image * cfg.d_latent * cfg.d
    return Work(int(2 * (blocks * weights * s + ends)), 4 * blocks * s**2 * cfg.d)


def count_prompt(cfg: TextEncoderConfig) -> Work:
    """The layers below the highest tap, for one padded prompt."""
    weights = 2 * cfg.d * (cfg.heads + cfg.kv_heads) * cfg.hd + 3 * cfg.d * cfg.d_mlp
    layers, m = max(cfg.taps), cfg.tokens
    return Work(2 * layers * weights * m, 4 * layers * m**2 * cfg.heads * cfg.hd)


class MemoryPlan(NamedTuple):
    """The memory that a picture takes, in bytes: the weights of each part, and what each stage needs on top."""

    text_encoder: int
    transformer: int
    autoencoder: int
    encode: int
    step: int
    decode: int

    @property
    def peak_bytes(self) -> int:
        """If each part is in memory only while it works: the largest of the three stages."""
        return max(self.text_encoder + self.encode, self.transformer + self.step, self.autoencoder + self.decode)

    @property
    def peak_bytes_all_loaded(self) -> int:
        """If all parts stay."""
        return sum(self[:3]) + max(self[3:])


def compute_dtype() -> mx.Dtype:
    """bfloat16 on a GPU. On a CPU float32: MLX has no quick half-precision product there."""
    return mx.float32 if mx.default_device() == mx.Device(mx.cpu) else mx.bfloat16


def plan_memory(
    cfg: TransformerConfig, text_cfg: TextEncoderConfig, vae_cfg: AutoencoderConfig, *, width: int, height: int,
    bits: float | tuple[float, float] = 16, references: int = 0, b: int = 1, cpu: bool | None = None,
    networks: tuple[type[nn.Module], type[nn.Module]] = (Transformer, Autoencoder), cached: bool = False,
) -> MemoryPlan:  # fmt: skip
    """What b pictures will take, predicted from the configs alone.

    bits: per weight, scales included; two numbers if the transformer and the text encoder differ. references: tokens
    of the reference pictures. cpu: as MLX is set if not given. networks: of the first and the last config. cached:
    whether each block's keys and values of the references stay from step to step.
    """
    cpu = compute_dtype() == mx.float32 if cpu is None else cpu
    of_transformer, of_text = bits if isinstance(bits, tuple) else (bits, bits)
    text, tokens = b * text_cfg.tokens, b * (text_cfg.tokens + width * height // 256 + references)
    size = 4 if cpu else 2  # bytes per number in flight; four in the decoder
    kept = 2 * references * (cfg.double_blocks + cfg.single_blocks) if cached else 0  # numbers per channel
    fine, next_level = (vae_cfg.decoder_channels or vae_cfg.channels)[:2]
    widest = 2 * b * width * height * max(3 * fine, 2 * next_level)
    return MemoryPlan(
        text_encoder=int(count_parameters(TextEncoder, text_cfg) * of_text / 8),
        transformer=int(count_parameters(networks[0], cfg) * of_transformer / 8),
        autoencoder=4 * count_parameters(networks[1], vae_cfg),
        encode=size * text_cfg.d * max(56 * text, 2 * text_cfg.d_mlp),
        step=size * cfg.d * (max(72 * tokens, 9 * cfg.d) + kept),
        decode=2 * widest + 5 * STRIP if cpu else 6 * widest,
    )
