"""What training an adapter takes in memory, by arithmetic on the configs.

Three stages, one after the other: the captions' features, the pictures' latents, the training itself. In the last,
each block keeps its input and is worked out again when its gradient is due, so that only one block at a time is whole.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ..autoencoder import AutoencoderConfig
from ..errors import MemoryLimitError
from ..inference.memory_check import machine_memory
from ..inference.memory_plan import compute_dtype, plan_memory
from ..lora import rank_at
from ..models.describe import ModelFacts, check_trains
from ..models.families import family_of
from ..models.lora_files import matrix_shapes
from ..text_encoder import TextEncoderConfig
from .folder import Example
from .settings import Settings

# Fitted to `python -m benchmarks.training`, which measures a step beside what is predicted here:
IN_FLIGHT = 155  # numbers per token and channel while one block's gradient is worked out
KEPT = 2.5  # numbers per token and channel that each block keeps until then
SCORES = 8.5  # arrays of attention weights, tokens × tokens for each head
COPIES = 6  # of the adapter, in float32: weights, average, gradients, their sum, two moments


class TrainingPlan(NamedTuple):
    """Bytes: of each stage, and what the last consists of."""

    features: int
    latents: int
    weights: int
    adapter: int
    activations: int

    @property
    def training(self) -> int:
        return self.weights + self.adapter + self.activations

    @property
    def peak_bytes(self) -> int:
        return max(self.features, self.latents, self.training)

    def __str__(self) -> str:
        def gb(n: float) -> str:
            return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.0f} MB"

        return (
            f"features {gb(self.features)}, then latents {gb(self.latents)}, then training {gb(self.training)} "
            f"(weights {gb(self.weights)}, adapter {gb(self.adapter)}, activations {gb(self.activations)})"
        )


def adapter_size(cfg: Any, rank: int | Mapping[str, int]) -> int:
    """How many numbers an adapter of this rank has. rank: see `rank_at`."""
    return sum(rank_at(path, rank) * sum(shape) for path, shape in matrix_shapes(cfg).items())


def plan_training(
    cfg: Any, text_cfg: TextEncoderConfig, vae_cfg: AutoencoderConfig, *, width: int, height: int,
    bits: float | tuple[float, float] = 16, rank: int | Mapping[str, int] = 16, b: int = 1, reference_tokens: int = 0,
    cpu: bool | None = None,
) -> TrainingPlan:  # fmt: skip
    """For pictures of this size, `b` at a time; bits, reference_tokens and cpu as for `plan_memory`.

    cfg: the transformer's. Raises UserError for another family's.
    """
    check_trains(family_of(cfg))
    cpu = compute_dtype() == mx.float32 if cpu is None else cpu
    drawing = plan_memory(
        (cfg, text_cfg, vae_cfg), width=width, height=height, bits=bits, reference_tokens=reference_tokens, cpu=cpu
    )
    size = 4 if cpu else 2
    tokens = b * (text_cfg.max_length + width * height // 256 + reference_tokens)
    numbers = cfg.d * tokens * (IN_FLIGHT + KEPT * (cfg.double_blocks + cfg.single_blocks))
    numbers += SCORES * cfg.heads * tokens**2 / b
    return TrainingPlan(
        features=drawing.text_encoder + drawing.encode,
        latents=drawing.autoencoder + drawing.decode,
        weights=drawing.transformer + drawing.autoencoder,  # it stays, for the samples
        adapter=4 * COPIES * adapter_size(cfg, rank),
        activations=int(size * numbers),
    )


def plan_model_training(facts: ModelFacts, examples: Sequence[Example], settings: Settings) -> TrainingPlan:
    """For a model that `describe` knows."""
    example = examples[0]  # all have its sizes
    w, h = example.picture.size
    reference_tokens = sum(picture.width * picture.height // 256 for picture in example.references)
    assert facts.configs is not None
    transformer, text_encoder, autoencoder = facts.configs
    return plan_training(
        transformer, text_encoder, autoencoder, width=w, height=h, bits=facts.bits, rank=settings.rank,
        b=settings.batch, reference_tokens=reference_tokens,
    )  # fmt: skip


def check_plan(plan: TrainingPlan) -> None:
    """Refuse what has no chance to fit, with the ways out."""
    total = machine_memory()[0]
    if plan.peak_bytes > total:
        raise MemoryLimitError(
            f"Training takes {plan.peak_bytes / 1e9:.1f} GB of memory, and the machine has {total / 1e9:.1f} GB: "
            "quantize the weights with --quantize 4, or take smaller pictures with --size or a smaller --rank."
        )
