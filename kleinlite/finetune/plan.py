"""What training an adapter takes in memory, by arithmetic on the configs.

Three stages, one after the other: the captions' features, the pictures' latents, the training itself. In the last,
each block keeps its input and is worked out again when its gradient is due, so that only one block at a time is whole.
"""

from typing import NamedTuple

import mlx.core as mx

from ..autoencoder import AutoencoderConfig
from ..drawing.memory_check import bits_per_weight, find_released_configs, machine_memory
from ..lora import linear_layers, matrix_shape
from ..memory import compute_dtype, plan_memory
from ..models.formats import find_packing
from ..models.opening import open_checkpoint
from ..models.registry import find_released
from ..quantisation import PACKINGS
from ..text_encoder import TextEncoderConfig
from ..transformer import Transformer, TransformerConfig
from .folder import Example
from .settings import Settings

# Fitted to `python -m kleinlite.bench.training`, which measures a step beside what is predicted here:
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
    packable: bool = True  # whether 4 bits per weight would be fewer

    @property
    def training(self) -> int:
        return self.weights + self.adapter + self.activations

    @property
    def peak_bytes(self) -> int:
        return max(self.features, self.latents, self.training)

    def __str__(self) -> str:
        gb = lambda n: f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.0f} MB"
        return (
            f"features {gb(self.features)}, then latents {gb(self.latents)}, then training {gb(self.training)} "
            f"(weights {gb(self.weights)}, adapter {gb(self.adapter)}, activations {gb(self.activations)})"
        )


def adapter_size(cfg: TransformerConfig, rank: int) -> int:
    """How many numbers an adapter of this rank has, for all matrices of the blocks."""
    layers = linear_layers(Transformer(cfg))
    return rank * sum(sum(matrix_shape(layer)) for path, layer in layers.items() if "_blocks." in path)


def plan_training(
    cfg: TransformerConfig, text_cfg: TextEncoderConfig, vae_cfg: AutoencoderConfig, *, width: int, height: int,
    bits: float | tuple[float, float] = 16, rank: int = 16, b: int = 1, references: int = 0, cpu: bool | None = None,
) -> TrainingPlan:  # fmt: skip
    """For pictures of this size, `b` at a time; bits, references and cpu as for `plan_memory`."""
    if not isinstance(cfg, TransformerConfig):
        raise ValueError("Adapters are trained here on models of FLUX.2 [klein]: take nano-base or base-4b.")
    cpu = compute_dtype() == mx.float32 if cpu is None else cpu
    drawing = plan_memory(cfg, text_cfg, vae_cfg, width=width, height=height, bits=bits, references=references, cpu=cpu)
    size, tokens = 4 if cpu else 2, b * (text_cfg.tokens + width * height // 256 + references)
    numbers = cfg.d * tokens * (IN_FLIGHT + KEPT * (cfg.double_blocks + cfg.single_blocks))
    numbers += SCORES * cfg.heads * tokens**2 / b
    return TrainingPlan(
        features=drawing.text_encoder + drawing.encode,
        latents=drawing.autoencoder + drawing.decode,
        weights=drawing.transformer + drawing.autoencoder,  # it stays, for the samples
        adapter=4 * COPIES * adapter_size(cfg, rank),
        activations=int(size * numbers),
    )


def plan_model_training(
    name: str, example: Example, settings: Settings, *, quantize: int | str | None = None
) -> TrainingPlan:
    """For a model by its name: a released one without its files, another from its own. ValueError if distilled."""
    w, h = example.picture.size
    references = sum(picture.width * picture.height // 256 for picture in example.references)
    if released := find_released(name):
        configs, bits = find_released_configs(name, quantize)
        distilled, packed = released.distilled, released.packed
    else:
        checkpoint = open_checkpoint(name, dtype=compute_dtype(), quantize=quantize)
        configs, bits = checkpoint.configs, bits_per_weight(checkpoint)
        distilled, packed = checkpoint.info.distilled, checkpoint.packed
    check_base(name, distilled)
    plan = plan_training(
        *configs, width=w, height=h, bits=bits, rank=settings.rank, b=settings.batch, references=references
    )
    packing = find_packing(quantize)
    wider = packing is None or packing.bits_per_weight > PACKINGS[4].bits_per_weight
    return plan._replace(packable=wider and not packed)


def check_base(name: str, distilled: bool) -> None:
    """Refuse a distilled model: plain training would make it forget its few steps."""
    if distilled:
        raise ValueError(f"{name} is distilled: train on its base model, and use the adapter on it.")


def check_plan(plan: TrainingPlan) -> None:
    """Refuse what has no chance to fit, with the ways out."""
    total = machine_memory()[0]
    if plan.peak_bytes > total:
        ways = ["take smaller pictures with --size"]
        if plan.packable:
            ways.insert(0, "pack the weights with --quantize 4")
        if plan.training == plan.peak_bytes and plan.adapter > max(plan.weights, plan.activations):
            ways.insert(0, "take a smaller --rank")
        raise MemoryError(
            f"Training takes {plan.peak_bytes / 1e9:.1f} GB of memory, and the machine has {total / 1e9:.1f} GB: "
            f"{', or '.join(ways)}."
        )
