"""Whether a picture fits into this machine: the plan of a model that is here or known, and the refusal.

The arithmetic is `memory.plan_memory`, built in the chapter on what a picture costs.
"""

import os
import resource
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast

import mlx.core as mx

from ..errors import MemoryLimitError
from ..memory import MemoryPlan, plan_memory
from ..models.checkpoint import ModelInfo
from ..models.families import Configs, family_of, network_of
from ..sharding import check_shares, common_divisor, held_share
from ..text_encoder import TextEncoder, TextEncoderConfig
from .serialized import run_serialized

__all__ = [
    "FEWER_BITS",
    "KnownModel",
    "all_parts_fit",
    "check_memory",
    "machine_memory",
    "plan_model",
    "plan_networks",
    "window_configs",
]

FEWER_BITS = (8, 6, 5, 4, 3)  # what a refusal may offer
USABLE_SHARE = 0.75  # of the memory, where the system does not say how much one program can count on
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
RESIDENT = Path("/proc/self/statm")
# What a process takes beside the arrays that are planned; a test measures it.
BESIDE_ARRAYS = 0.3  # of their bytes: what MLX keeps for the next array, what an allocator cannot give back
WORK_SPACE = 3 * 2**27  # bytes, whatever the size: libraries, stacks, copies that a product makes of its factors


class KnownModel(Protocol):
    """A `Checkpoint`, or the `ModelFacts` of a model whose configs are known."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def configs(self) -> Configs | None: ...

    @property
    def bits(self) -> tuple[float, float]: ...


def plan_model(
    model: KnownModel, *, width: int, height: int, bits: float | tuple[float, float] | None = None,
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
        transformer=int(plan.transformer * transformer_share(cast(Hashable, model.configs.transformer), machines)),
        text_encoder=int(plan.text_encoder * text_encoder_share(model.configs.text_encoder, machines)),
    )


@cache
def transformer_share(cfg: Hashable, machines: int) -> float:
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
    return run_serialized(lambda: plan_memory(cast(Any, configs), networks=networks, **request))


def machine_memory(held: int = 0) -> tuple[int, int]:
    """Bytes of memory here, and how many of them one program can count on: what a Mac says, else three quarters.

    A container's limit and one that a shell has set (`ulimit -v`) count as the machine's. held: bytes that this process
    has already for what is planned, such as a model's parts in memory.
    """
    info = mx.device_info()
    total = int(info.get("memory_size") or info.get("total_memory") or 0)
    if not total:  # a CPU on Linux
        total = min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *process_limits(held)])
    return total, int(info.get("max_recommended_working_set_size", USABLE_SHARE * total))


def process_limits(held: int = 0) -> list[int]:
    """The bytes of arrays that hard limits leave to this process: of a shell (ulimit), of a container, of a job.

    Beyond such a limit the system ends the process without a word. What the process holds already counts, unless it is
    `held` for what is planned or kept by MLX for the next array; and so does what arrays bring with them.
    """
    virtual, _, _, _, _, data, _ = pages_in_use()
    held += mx.get_cache_memory()
    left = []
    for limit, used in (
        (resource.getrlimit(resource.RLIMIT_AS)[0], virtual),
        (resource.getrlimit(resource.RLIMIT_DATA)[0], data),
        *((limit, pages_in_use()[1]) for limit in cgroup_limits()),
    ):
        if 0 <= limit < 2**60:  # -1, or a number beyond any memory: no limit
            left.append(max(int((limit - max(used - held, 0) - WORK_SPACE) / (1 + BESIDE_ARRAYS)), 1))
    return left


def pages_in_use() -> list[int]:
    """/proc/self/statm in bytes: virtual, resident, shared, text, 0, data, 0; zeros where there is none."""
    if not RESIDENT.is_file():
        return [0] * 7
    return [int(pages) * os.sysconf("SC_PAGE_SIZE") for pages in RESIDENT.read_text().split()]


def cgroup_limits() -> list[int]:
    """The memory limits of this process's control groups, of both versions, up to the root."""
    if not OWN_CGROUPS.is_file():
        return []
    limits = []
    for line in OWN_CGROUPS.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = CGROUPS
            name = "memory.max"
        elif "memory" in controllers.split(","):
            top = CGROUPS / "memory"
            name = "memory.limit_in_bytes"
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if top in (folder, *folder.parents) and (folder / name).is_file():
                text = (folder / name).read_text().strip()
                limits += [int(text)] if text.isdigit() else []
    return limits


def all_parts_fit(plan: MemoryPlan, held: int = 0) -> bool:
    """Whether the parts can stay in memory together; held: the bytes of those that are there."""
    return plan.peak_bytes_all_loaded <= machine_memory(held)[1]


def check_memory(
    plan: MemoryPlan, smaller: dict[int, MemoryPlan], *, held: int = 0, total: int | None = None
) -> None:  # fmt: skip
    """Refuse what has no chance to fit, and name the most bits for which `smaller` has a plan that does.

    held: bytes of it that are in memory. total: the memory of the smallest machine, where several draw together.
    Raises MemoryLimitError.
    """
    total = total or machine_memory(held)[0]
    if plan.peak_bytes <= total:
        return
    refusal = f"This takes {plan.peak_bytes / 1e9:.1f} GB of memory, and the machine has {total / 1e9:.1f} GB"
    for bits, other in sorted(smaller.items(), reverse=True):
        if other.peak_bytes <= total:
            raise MemoryLimitError(f"{refusal}: with quantize={bits} it takes {other.peak_bytes / 1e9:.1f} GB.")
    raise MemoryLimitError(f"{refusal}: draw a smaller picture, or take a smaller model.")
