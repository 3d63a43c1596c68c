"""Whether a picture fits into this machine: the plan of a model that is here or known, and the refusal.

The arithmetic is in `memory_plan`.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import MemoryLimitError
from ..models.checkpoint import Checkpoint
from ..models.describe import ModelFacts
from ..models.families import Configs, TransformerNumbers, family_of, network_of
from ..sharding import check_shares, common_divisor, held_share
from ..text_encoder import TextEncoder, TextEncoderConfig
from .memory_plan import MemoryPlan, plan_memory
from .serialized import run_serialized

__all__ = [
    "FEWER_BITS", "all_parts_fit", "check_memory", "machine_memory", "plan_model", "plan_networks", "window_configs",
]  # fmt: skip

FEWER_BITS = (8, 6, 5, 4, 3)  # what a refusal may offer
USABLE_SHARE = 0.75  # of the memory, where the system does not say how much one program can count on
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
# What a process takes beside the arrays that are planned; a test measures it.
BESIDE_ARRAYS = 0.3  # of their bytes: what MLX keeps for the next array, what an allocator cannot give back
WORK_SPACE = 3 * 2**27  # bytes, whatever the size: libraries, stacks, copies that a product makes of its factors


def plan_model(
    model: Checkpoint | ModelFacts, *, width: int, height: int, bits: float | tuple[float, float] | None = None,
    reference_tokens: int = 0, b: int = 1, prompts: Sequence[str] = ("",), machines: int = 1,
) -> MemoryPlan:  # fmt: skip
    """`plan_memory` for a model; bits per weight as it will be loaded if not given.

    reference_tokens: of the reference pictures. b: pictures at a time. prompts: theirs, where their length matters.
    machines: that share its heads; the plan is each one's. Raises UserError where they cannot.
    """
    assert model.configs is not None
    plan = plan_networks(
        window_configs(model.configs, prompts), width=width, height=height, bits=bits or model.bits,
        reference_tokens=reference_tokens, b=b, cached=model.info.kv,
    )  # fmt: skip
    if machines == 1:
        return plan
    return plan._replace(
        transformer=int(plan.transformer * transformer_share(model.configs.transformer, machines)),
        text_encoder=int(plan.text_encoder * text_encoder_share(model.configs.text_encoder, machines)),
    )


@cache
def transformer_share(cfg: TransformerNumbers, machines: int) -> float:
    """The share of a transformer that each of several machines holds. Raises UserError if they cannot share it."""
    build: Any = network_of(cfg)
    network = build(cfg)
    check_shares(network, machines)
    return held_share(network, machines)


@cache
def text_encoder_share(cfg: TextEncoderConfig, machines: int) -> float:
    """The same of a text encoder's layers below its highest tap: all of it where its heads do not go round."""
    network = TextEncoder(replace(cfg, layers=max(cfg.out_layers), tied=True))
    return 1.0 if common_divisor(network) % machines else held_share(network, machines)


def window_configs(configs: Configs, prompts: Sequence[str] = ("",)) -> Configs:
    """The configs with the tokens to which these prompts can come, in place of the most that the model reads."""
    cfg = configs.text_encoder
    count_window = family_of(configs.transformer).count_window
    if count_window is None:
        return configs
    return configs._replace(text_encoder=replace(cfg, max_length=max(count_window(p, cfg.max_length) for p in prompts)))


def plan_networks(configs: Configs, **request: Any) -> MemoryPlan:
    """`plan_memory` with the networks of the model's own family."""
    networks = network_of(configs.transformer), network_of(configs.autoencoder)
    # They are built to be counted, and what builds arrays in a thread of its own can end the process with that thread.
    return run_serialized(lambda: plan_memory(configs, networks=networks, **request))


def machine_memory() -> tuple[int, int]:
    """Bytes of memory here, and how many of them one program can count on: what a Mac says, else three quarters.

    A limit of a shell (`ulimit -v`, `ulimit -d`) or of a container counts as the machine's, since beyond it the system
    ends the process without a word; less what comes beside the arrays.
    """
    info = mx.device_info()
    total = int(info.get("memory_size") or info.get("total_memory") or 0)
    if not total:  # a CPU on Linux or Windows
        limits = [max(int((limit - WORK_SPACE) / (1 + BESIDE_ARRAYS)), 1) for limit in process_limits()]
        total = min([physical_memory(), *limits])
    return total, int(info.get("max_recommended_working_set_size", USABLE_SHARE * total))


def physical_memory() -> int:
    """Bytes; where the system has no word for it, as on Windows, so many that nothing is refused."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**40


def process_limits() -> list[int]:
    """The bytes beyond which the system ends this process: by its shell, by its control group and those above."""
    limits = []
    with suppress(ImportError):  # Windows
        import resource

        limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    if OWN_CGROUP.is_file():
        group = CGROUPS / OWN_CGROUP.read_text("utf-8").strip().rpartition("::/")[2]
        files = [folder / "memory.max" for folder in (group, *group.parents) if folder.is_relative_to(CGROUPS)]
        limits += [int(n) for file in files if file.is_file() and (n := file.read_text("utf-8").strip()).isdigit()]
    return [limit for limit in limits if 0 <= limit < 2**60]  # -1, or a number beyond any memory: no limit


def all_parts_fit(plan: MemoryPlan) -> bool:
    return plan.peak_bytes_all_loaded <= machine_memory()[1]


def check_memory(plan: MemoryPlan, smaller: dict[int, MemoryPlan], total: int | None = None) -> None:
    """Refuse what has no chance to fit, and name the most bits for which `smaller` has a plan that does.

    total: the memory of the smallest machine, where several draw together. Raises MemoryLimitError.
    """
    total = total or machine_memory()[0]
    if plan.peak_bytes <= total:
        return
    refusal = f"This takes {plan.peak_bytes / 1e9:.1f} GB of memory, and the machine has {total / 1e9:.1f} GB"
    for bits, other in sorted(smaller.items(), reverse=True):
        if other.peak_bytes <= total:
            raise MemoryLimitError(f"{refusal}: with quantize={bits} it takes {other.peak_bytes / 1e9:.1f} GB.")
    raise MemoryLimitError(f"{refusal}: draw a smaller picture, or take a smaller model.")
