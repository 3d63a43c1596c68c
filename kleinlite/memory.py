"""What a picture takes in memory, by arithmetic on the configs, and what this machine has. Hand-written.

The weights are counted by building a network without filling it: MLX is lazy, no number is drawn. The three sums of
what is in flight were fitted to measurements (the page "Which machine runs what" compares): between two matrix
products MLX has about 72 numbers per token and channel in flight (56 in the text encoder), and the decoder eight of
its widest arrays and ten strips on a CPU, six on a GPU.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .autoencoder import Autoencoder, AutoencoderConfig
from .cpu import STRIP
from .models.configs import RELEASED_CONFIGS
from .models.formats import find_packing
from .models.opening import SMALL_PART_BYTES, Checkpoint
from .models.registry import MODELS
from .text_encoder import TextEncoder, TextEncoderConfig
from .transformer import Transformer, TransformerConfig

__all__ = [
    "MemoryPlan", "compute_dtype", "count_parameters", "plan_memory", "plan_checkpoint", "plan_released",
    "bits_per_weight", "machine_memory", "all_parts_fit", "check_memory",
]  # fmt: skip


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


@cache
def count_parameters(kind: type[nn.Module], cfg: TransformerConfig | TextEncoderConfig | AutoencoderConfig) -> int:
    """How many weights a network has. For the text encoder: those below its highest tap, no other is read."""
    if kind is TextEncoder:
        cfg = replace(cfg, layers=max(cfg.taps), tied=True)
    return sum(w.size for _, w in tree_flatten(kind(cfg).parameters()))


def plan_memory(
    cfg: TransformerConfig, text_cfg: TextEncoderConfig, vae_cfg: AutoencoderConfig, *, width: int, height: int,
    bits: float | tuple[float, float] = 16, references: int = 0, b: int = 1, cpu: bool | None = None,
) -> MemoryPlan:  # fmt: skip
    """What b pictures will take, predicted from the configs alone.

    bits: per weight, scales included; two numbers if the transformer and the text encoder differ.
    references: tokens of the reference pictures. cpu: whether to predict for a CPU; as MLX is set if not given.
    """
    cpu = compute_dtype() == mx.float32 if cpu is None else cpu
    of_transformer, of_text = bits if isinstance(bits, tuple) else (bits, bits)
    text, tokens = b * text_cfg.tokens, b * (text_cfg.tokens + width * height // 256 + references)
    size = 4 if cpu else 2  # bytes per number in flight; four in the decoder
    widest = 4 * b * width * height * max((vae_cfg.decoder_channels or vae_cfg.channels)[:2])
    return MemoryPlan(
        text_encoder=int(count_parameters(TextEncoder, text_cfg) * of_text / 8),
        transformer=int(count_parameters(Transformer, cfg) * of_transformer / 8),
        autoencoder=4 * count_parameters(Autoencoder, vae_cfg),
        encode=size * text_cfg.d * max(56 * text, 2 * text_cfg.d_mlp),
        step=size * cfg.d * max(72 * tokens, 9 * cfg.d),
        decode=8 * widest + 10 * STRIP if cpu else 6 * widest,
    )


def plan_checkpoint(
    checkpoint: Checkpoint, *, width: int, height: int, bits: float | tuple[float, float] | None = None,
    references: int = 0, b: int = 1,
) -> MemoryPlan:  # fmt: skip
    """`plan_memory` for a model whose files are here; bits as its files have them if not given."""
    configs = [checkpoint.parts[part][0] for part in ("transformer", "text_encoder", "vae")]
    bits = bits or bits_per_weight(checkpoint)
    return plan_memory(*configs, width=width, height=height, bits=bits, references=references, b=b)


def plan_released(name: str, *, width: int, height: int, quantize: int | str | None = None) -> MemoryPlan:
    """`plan_memory` for a released model by its name, known before its files are here."""
    model = MODELS[name.lower()]
    configs = *RELEASED_CONFIGS[model.size.name], AutoencoderConfig()
    stored = 8 * model.transformer_bytes / model.size.transformer_parameters, 16
    bits = find_packing(quantize).bits_per_weight if quantize else stored
    return plan_memory(*configs, width=width, height=height, bits=bits)


def bits_per_weight(checkpoint: Checkpoint) -> tuple[float, float]:
    """Of the transformer and of the text encoder, as they will be in memory. Headers are read, no weights."""
    if checkpoint.packing:
        return (checkpoint.packing.bits_per_weight,) * 2
    found = []
    for name, kind in (("transformer", Transformer), ("text_encoder", TextEncoder)):
        found.append(8.0 * checkpoint.dtype.size)  # at most: wider weights, and those of small parts, are cast
        if checkpoint.nbytes(name) >= SMALL_PART_BYTES:
            stored = [getattr(w, "tensors", {"": w}).values() for w in checkpoint.weights(name).values()]
            bits = 8 * sum(w.nbytes for arrays in stored for w in arrays)
            found[-1] = min(found[-1], bits / count_parameters(kind, checkpoint.parts[name][0]))
    return tuple(found)


def machine_memory() -> tuple[int, int]:
    """Bytes of memory here, and how many of them one program can count on: what a Mac says, else three quarters."""
    info = mx.device_info()
    total = info.get("memory_size") or info.get("total_memory")
    if not total:  # a CPU on Linux
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total, int(info.get("max_recommended_working_set_size", 0.75 * total))


def all_parts_fit(plan: MemoryPlan) -> bool:
    """Whether the parts can stay in memory together."""
    return plan.peak_bytes_all_loaded <= machine_memory()[1]


def check_memory(plan: MemoryPlan, smaller: dict[int, MemoryPlan]) -> None:
    """Refuse what has no chance to fit, and name the most bits for which `smaller` has a plan that does."""
    total, needed = machine_memory()[0], plan.peak_bytes
    if needed > total:
        refusal = f"This takes {needed / 1e9:.1f} GB of memory, and the machine has {total / 1e9:.1f} GB"
        for bits, other in sorted(smaller.items(), reverse=True):
            if other.peak_bytes <= total:
                raise MemoryError(f"{refusal}: with quantize={bits} it takes {other.peak_bytes / 1e9:.1f} GB.")
        raise MemoryError(f"{refusal}: draw a smaller picture, or take a smaller model.")
