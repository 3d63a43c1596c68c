"""Whether a picture fits into this machine: plans for models whose files are here or known, and the refusal.

The arithmetic is `memory.plan_memory`, built in the chapter on what a picture costs.
"""

import os
import resource
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..autoencoder import AutoencoderConfig
from ..memory import MemoryPlan, count_parameters, plan_memory
from ..models.configs import RELEASED_AUTOENCODERS, RELEASED_CONFIGS, Config
from ..models.families import network_of
from ..models.formats import find_packing
from ..models.opening import SMALL_PART_BYTES, Checkpoint
from ..models.registry import MODELS
from ..text_encoder import TextEncoderConfig

__all__ = [
    "plan_checkpoint", "plan_released", "bits_per_weight", "machine_memory", "all_parts_fit", "check_memory",
]  # fmt: skip


def plan_checkpoint(
    checkpoint: Checkpoint, *, width: int, height: int, bits: float | tuple[float, float] | None = None,
    references: int = 0, b: int = 1,
) -> MemoryPlan:  # fmt: skip
    """`plan_memory` for a model whose files are here; bits as its files have them if not given."""
    request = {"width": width, "height": height, "references": references, "b": b, "cached": checkpoint.info.kv}
    return plan_networks(*checkpoint.configs, bits=bits or bits_per_weight(checkpoint), **request)


def plan_networks(cfg: Config, text_cfg: TextEncoderConfig, vae_cfg: AutoencoderConfig, **request: Any) -> MemoryPlan:
    """`plan_memory` with the networks of the model's own family."""
    return plan_memory(cfg, text_cfg, vae_cfg, networks=(network_of(cfg), network_of(vae_cfg)), **request)


def plan_released(name: str, *, width: int, height: int, quantize: int | str | None = None) -> MemoryPlan:
    """`plan_memory` for a released model by its name, known before its files are here."""
    configs, bits = find_released_configs(name, quantize)
    return plan_networks(*configs, width=width, height=height, bits=bits)


def find_released_configs(
    name: str, quantize: int | str | None = None
) -> tuple[tuple[Config, ...], float | tuple[float, float]]:
    """The configs of a released model by its name, and the bits of its weights, known before its files are here."""
    model = MODELS[name.lower()]
    stored = min(16, 8 * model.transformer_bytes / model.size.transformer_parameters), 16  # wider weights are cast
    bits = find_packing(quantize).bits_per_weight if quantize else stored
    return (*RELEASED_CONFIGS[model.size.name], RELEASED_AUTOENCODERS[model.size.name]), bits


def bits_per_weight(checkpoint: Checkpoint) -> tuple[float, float]:
    """Of the transformer and of the text encoder, as they will be in memory. Headers are read, no weights."""
    if checkpoint.packing:
        return (checkpoint.packing.bits_per_weight,) * 2
    found = []
    for name in ("transformer", "text_encoder"):
        found.append(8.0 * checkpoint.dtype.size)  # at most: wider weights, and those of small parts, are cast
        if checkpoint.nbytes(name) >= SMALL_PART_BYTES:
            stored = [getattr(w, "tensors", {"": w}).values() for w in checkpoint.weights(name).values()]
            bits = 8 * sum(w.nbytes for arrays in stored for w in arrays)
            cfg = checkpoint.parts[name][0]
            found[-1] = min(found[-1], bits / count_parameters(network_of(cfg), cfg))
    return tuple(found)


def machine_memory() -> tuple[int, int]:
    """Bytes of memory here, and how many of them one program can count on: what a Mac says, else three quarters.

    A container's limit and one that a shell has set (`ulimit -v`) count as the machine's.
    """
    info = mx.device_info()
    total = info.get("memory_size") or info.get("total_memory")
    if not total:  # a CPU on Linux
        total = min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *process_limits()])
    return total, int(info.get("max_recommended_working_set_size", 0.75 * total))


def process_limits() -> list[int]:
    """How many bytes the system lets this process have, where it says so: beyond them MLX ends the process."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    cgroup = Path("/sys/fs/cgroup/memory.max")
    said = cgroup.read_text().strip() if cgroup.is_file() else "max"
    return [n for n in (limit, int(said) if said.isdigit() else -1) if n > 0]  # -1: no limit


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
