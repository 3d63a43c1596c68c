"""Whether a picture fits into this machine: the plan of a model that is here or known, and the refusal.

The arithmetic is in `picture_memory`.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import MemoryLimitError
from ..models.checkpoint import Checkpoint
from ..models.facts import ModelFacts
from ..models.families import Configs, family_of, network_of
from ..quantization import QUANT_SPECS
from ..sharding import check_shares, common_divisor, held_share
from ..text_encoder import TextEncoder
from .picture_memory import MemoryPlan, plan_memory
from .request import Request
from .serialized import run_serialized

__all__ = [
    "FEWER_BITS", "all_parts_fit", "check_memory", "machine_memory", "plan_model", "plan_networks", "plan_request",
    "window_configs",
]  # fmt: skip

FEWER_BITS = (8, 6, 5, 4, 3)  # what a refusal may offer
USABLE_SHARE = 0.75  # of the memory, where the system does not say how much one program can count on
CONTROL_GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")  # a line for each hierarchy: its number, its controllers, the process's group
# What a process takes besides the arrays that are planned; a test measures it.
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
    transformer, text_encoder = held_shares(model.configs, machines)
    return plan._replace(
        transformer=int(plan.transformer * transformer), text_encoder=int(plan.text_encoder * text_encoder)
    )


def plan_request(
    model: Checkpoint | ModelFacts, request: Request, bits: float | tuple[float, float] | None = None, machines: int = 1
) -> MemoryPlan:
    """The same for what a call asks for."""
    return plan_model(
        model, width=request.width, height=request.height, bits=bits,
        reference_tokens=sum(image.width * image.height // 256 for image in request.references), b=len(request.prompts),
        prompts=[*request.prompts, request.negative_prompt], machines=machines,
    )  # fmt: skip


@cache
def held_shares(configs: Configs, machines: int) -> tuple[float, float]:
    """The shares of transformer and text encoder that each of several machines holds. Raises UserError if it cannot.

    Of a text encoder whose heads do not go round, all of it; else of the layers below its highest tap.
    """
    build: Any = network_of(configs.transformer)
    transformer = build(configs.transformer)
    check_shares(transformer, machines)
    cfg = configs.text_encoder
    text_encoder = TextEncoder(replace(cfg, layers=max(cfg.out_layers), tied=True))
    whole = common_divisor(text_encoder) % machines
    return held_share(transformer, machines), 1.0 if whole else held_share(text_encoder, machines)


def window_configs(configs: Configs, prompts: Sequence[str] = ("",)) -> Configs:
    """The configs with the tokens to which these prompts can come, instead of the most that the model reads."""
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

    A limit of a job, a container or a shell counts as the machine's, since beyond it the system ends the process
    without a word; less what comes besides the arrays. Where the system has no word for its memory, as on Windows,
    nothing is refused.
    """
    info = mx.device_info()
    total = int(info.get("memory_size") or info.get("total_memory") or 0)
    if not total:  # a CPU on Linux or Windows
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**40
        for limit in process_limits():
            total = min(total, max(int((limit - WORK_SPACE) / (1 + BESIDE_ARRAYS)), 1))
    return total, int(info.get("max_recommended_working_set_size", USABLE_SHARE * total))


def process_limits() -> list[int]:
    """The bytes beyond which the system ends this process: of its control groups, its shell's `ulimit -v` and `-d`."""
    limits = []
    for file in group_files():
        with suppress(OSError, ValueError):  # it is not there, or says "max"
            limits.append(int(file.read_text("utf-8")))
    with suppress(ImportError):  # Windows
        import resource

        limits += [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    return [limit for limit in limits if 0 <= limit < 2**60]  # -1, or a number beyond any memory: no limit


def group_files() -> Iterator[Path]:
    """Where the limits of this process's control groups may stand, and of all groups above them, in both versions."""
    lines = OWN_GROUPS.read_text("utf-8").splitlines() if OWN_GROUPS.is_file() else []
    for _, controllers, group in (line.split(":", 2) for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        folder = CONTROL_GROUPS / "memory" if controllers else CONTROL_GROUPS
        for part in ["", *group.split("/")]:  # a container of version 1 sees its own group at the top
            if part != "..":
                folder = folder / part
                yield from (folder / f"memory.{word}" for word in ("max", "high", "limit_in_bytes"))


def all_parts_fit(plan: MemoryPlan) -> bool:
    return plan.peak_bytes_all_loaded <= machine_memory()[1]


def check_memory(
    plan: Callable[[float | None], MemoryPlan], fewer: Sequence[int] = FEWER_BITS, total: int | None = None
) -> None:
    """Refuse what has no chance to fit, and name the most bits of `fewer` with which it does.

    plan: what it takes in so many bits per weight; None: as it is. total: the memory of the smallest machine, where
    several draw together. Raises MemoryLimitError.
    """
    total = total or machine_memory()[0]
    needed = plan(None).peak_bytes
    if needed <= total:
        return
    refusal = f"This takes {needed / 1e9:.1f} GB of memory, and the machine has {total / 1e9:.1f} GB"
    for bits in fewer:
        other = plan(QUANT_SPECS[bits].bits_per_weight).peak_bytes
        if other <= total:
            takes = f"{bits} it takes {other / 1e9:.1f} GB."
            raise MemoryLimitError(f"{refusal}: with quantize={takes}", shell=f"{refusal}: with --quantize {takes}")
    raise MemoryLimitError(f"{refusal}: draw a smaller picture, or take a smaller model.")
