"""The memory that a picture will take, from the configs, before any weight is read. Chapter 9 has it in ten lines.

Prompt, steps and decoder come one after the other, and each needs only its own part, so the largest of three sums
decides. This plan also counts references, batches, a cache of keys and values, and the decoder's strips.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..autoencoder import Autoencoder, AutoencoderConfig
from ..cpu import FAST
from ..memory import ACTIVATIONS, count_parameters
from ..models.families import TransformerNumbers
from ..models.files import SMALL_PART_BYTES
from ..text_encoder import TextEncoder, TextEncoderConfig
from ..transformer import Transformer, TransformerConfig


class MemoryPlan(NamedTuple):
    """The memory that a picture takes, in bytes: the weights of each part, and what each stage needs on top."""

    text_encoder: int
    transformer: int
    autoencoder: int
    encode: int
    step: int
    decode: int  # or, if that is more, to encode a reference

    @property
    def peak_bytes(self) -> int:
        """If each part is in memory only while it works: the largest of the three stages."""
        return max(self.text_encoder + self.encode, self.transformer + self.step, self.autoencoder + self.decode)

    @property
    def peak_bytes_all_loaded(self) -> int:
        """If all parts stay."""
        weights = self.text_encoder + self.transformer + self.autoencoder
        return weights + max(self.encode, self.step, self.decode)


def compute_dtype() -> mx.Dtype:
    """bfloat16 on a GPU. On a CPU float32: MLX has no quick half-precision product there."""
    return mx.float32 if mx.default_device() == mx.Device(mx.cpu) else mx.bfloat16


# Fitted to `python -m benchmarks.picture` on a CPU, which measures every stage beside what is predicted here:
BESIDE_STRIPS = 5 * 2**24  # what the decoder's convolutions hold besides, strip by strip
BESIDE_SCORES = 43  # numbers per token and channel, where attention's scores are written out, one per head and pair


def plan_memory(
    configs: tuple[TransformerNumbers, TextEncoderConfig, AutoencoderConfig],
    *,
    width: int,
    height: int,
    bits: float | tuple[float, float] = 16,
    reference_tokens: int = 0,
    b: int = 1,
    cpu: bool | None = None,
    networks: tuple[Callable[[Any], nn.Module], Callable[[Any], nn.Module]] = (Transformer, Autoencoder),
    cached: bool = False,
) -> MemoryPlan:
    """The bytes that b pictures of width × height pixels will take, from the configs and the constants above.

    configs: of transformer, text encoder, autoencoder. bits: per weight, scales included; two numbers if transformer
    and text encoder differ. reference_tokens: of all reference pictures of one picture. cpu: as MLX is set if not
    given. networks: the classes of the first and the last config. cached: whether each block's keys and values of the
    references stay from step to step.
    """
    cfg, text_cfg, vae_cfg = configs
    if cpu is None:
        cpu = compute_dtype() == mx.float32
    transformer_bits, text_bits = bits if isinstance(bits, tuple) else (bits, bits)
    number_bytes = 4 if cpu else 2  # in flight; 4 in the decoder
    text_tokens = b * text_cfg.max_length
    drawn_tokens = text_tokens + b * (width * height // 256)
    tokens = drawn_tokens + b * reference_tokens
    cache_numbers = 0
    if cached and isinstance(cfg, TransformerConfig):
        tokens = max(drawn_tokens, reference_tokens)  # a step looks references up; before, one pass reads them alone
        cache_numbers = 2 * reference_tokens * (cfg.double_blocks + cfg.single_blocks)  # a key and a value
    encode_numbers = max(ACTIVATIONS * text_tokens, 2 * text_cfg.d_mlp)  # at least a copy of the largest matrices
    step_numbers = max(ACTIVATIONS * tokens, 9 * cfg.d)
    transformer = int(count_parameters(networks[0], cfg) * transformer_bits / 8)
    if cpu and isinstance(cfg, TransformerConfig) and not (FAST and transformer >= SMALL_PART_BYTES):
        step_numbers = max(step_numbers, BESIDE_SCORES * tokens + cfg.heads * tokens**2 // (b * cfg.d))
    finest, coarser = (vae_cfg.decoder_channels or vae_cfg.channels)[:2]
    decode_bytes = 4 * b * width * height * (coarser + 2 * finest)  # what goes into a block, and two that it makes
    reference_bytes = 4 * 256 * min(reference_tokens, 4096) * 3 * vae_cfg.channels[0]  # of klein, 1024²
    return MemoryPlan(
        text_encoder=int(count_parameters(TextEncoder, text_cfg) * text_bits / 8),
        transformer=transformer,
        autoencoder=4 * count_parameters(networks[1], vae_cfg),
        encode=number_bytes * text_cfg.d * encode_numbers,
        step=number_bytes * cfg.d * (step_numbers + cache_numbers),
        decode=max(decode_bytes, reference_bytes) + BESIDE_STRIPS,
    )
