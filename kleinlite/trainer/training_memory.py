"""What training an adapter takes in memory, by arithmetic on the configs.

Three stages, one after the other: the captions' features, the pictures' latents, the training itself. In the last,
each block keeps its input and is worked out again when its gradient is due, so that only one block at a time is whole.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ..autoencoder import AutoencoderConfig
from ..errors import MemoryLimitError
from ..inference.machine_memory import machine_memory
from ..inference.picture_memory import compute_dtype, plan_memory
from ..lora import rank_at
from ..models.adapters.names import matrix_shapes
from ..models.families import family_of
from ..text_encoder import TextEncoderConfig
from .settings import check_trains

# Fitted to `python -m benchmarks.training`, which measures a step beside what is predicted here:
IN_FLIGHT = 155  # numbers per token and channel while one block's gradient is worked out
KEPT = 2.5  # numbers per token and channel that each block keeps until then
SCORES = 8.5  # arrays of attention weights, tokens × tokens for each head
COPIES = 6  # of the adapter, in float32: weights, average, gradients, their sum, two moments


class TrainingPlan(NamedTuple):
    """Bytes: what comes on top of the weights while the adapter learns, and the most of the three stages."""

    adapter: int
    activations: int
    peak_bytes: int


def adapter_size(cfg: Any, rank: int | Mapping[str, int]) -> int:
    """How many numbers an adapter of this rank has. rank: see `rank_at`."""
    return sum(rank_at(path, rank) * sum(shape) for path, shape in matrix_shapes(cfg).items())


def plan_training(
    configs: tuple[Any, TextEncoderConfig, AutoencoderConfig], size: tuple[int, int],
    references: Sequence[tuple[int, int]] = (), *, bits: float | tuple[float, float] = 16,
    rank: int | Mapping[str, int] = 16, b: int = 1, cpu: bool | None = None,
) -> TrainingPlan:  # fmt: skip
    """For b pictures at a time of width × height pixels, after references of theirs; bits and cpu as for `plan_memory`.

    configs: of transformer, text encoder, autoencoder. Raises UserError for another family's.
    """
    cfg, text_cfg, _ = configs
    check_trains(family_of(cfg))
    cpu = compute_dtype() == mx.float32 if cpu is None else cpu
    width, height = size
    reference_tokens = sum(w * h // 256 for w, h in references)
    drawing = plan_memory(configs, width=width, height=height, bits=bits, reference_tokens=reference_tokens, cpu=cpu)
    number_bytes = 4 if cpu else 2
    tokens = b * (text_cfg.max_length + width * height // 256 + reference_tokens)
    numbers = cfg.d * tokens * (IN_FLIGHT + KEPT * (cfg.double_blocks + cfg.single_blocks))
    numbers += SCORES * cfg.heads * tokens**2 / b
    adapter = 4 * COPIES * adapter_size(cfg, rank)
    activations = int(number_bytes * numbers)
    features = drawing.text_encoder + drawing.encode
    latents = drawing.autoencoder + drawing.decode
    training = drawing.transformer + drawing.autoencoder + adapter + activations  # the autoencoder draws the samples
    return TrainingPlan(adapter, activations, max(features, latents, training))


def check_plan(plan: TrainingPlan) -> None:
    """Refuse what has no chance to fit, with the ways out."""
    total = machine_memory()[0]
    if plan.peak_bytes > total:
        raise MemoryLimitError(
            f"Training takes {plan.peak_bytes / 1e9:.1f} GB of memory, and the machine has {total / 1e9:.1f} GB: "
            "quantize the weights with --quantize 4, or take smaller pictures with --size or a smaller --rank."
        )
