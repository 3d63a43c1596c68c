"""One model in use: its parts, its prompts, its adapters and the memory that they take."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ParamSpec, TypeVar

import mlx.core as mx

from ..cpu import bfloat16_name, idle_cores_only
from ..errors import UserError
from ..memory import count_parameters
from ..models.checkpoint import Checkpoint
from ..models.families import network_of
from .cluster import Cluster
from .fast_preview import fit_preview
from .loras import Loras, lora_bytes, record_loras
from .machine_memory import FEWER_BITS, all_parts_fit, check_memory, plan_request
from .parts import PartStore
from .picture_memory import MemoryPlan
from .prompts import PromptEncoder
from .request import Request
from .serialized import run_serialized

__all__ = ["LoadedModel"]

P = ParamSpec("P")
R = TypeVar("R")


class LoadedModel:
    """One model in use. group: the machines that draw each picture together. exact: float32 was asked for."""

    def __init__(
        self, checkpoint: Checkpoint, keep_loaded: bool = False, group: mx.distributed.Group | None = None,
        exact: bool = False,
    ):  # fmt: skip
        self.checkpoint = checkpoint
        self.info = checkpoint.info
        self.bits: tuple[float, float] = run_serialized(lambda: checkpoint.bits)
        self.loras = Loras(checkpoint.configs.transformer)
        self.cluster = Cluster(group, checkpoint)
        self.parts = PartStore(checkpoint, self.loras, self.cluster, keep_loaded, exact)
        if self.parts.is_large("transformer") and not (exact or checkpoint.is_quantized or checkpoint.quant_spec):
            self.info = replace(self.info, product=bfloat16_name())
        self.prompts = PromptEncoder(self.parts, self.info)
        self._preview_matrix: mx.array | None = None

    def summary(self) -> list[tuple[str, ...]]:
        """A row for each part, for people: its name, its weights, bits each, memory, whether it is loaded."""
        rows: list[tuple[str, ...]] = []
        for part, bits in {"text_encoder": self.bits[1], "transformer": self.bits[0], "autoencoder": 32.0}.items():
            cfg = getattr(self.checkpoint.configs, part)
            count = count_parameters(network_of(cfg), cfg)
            loaded = "yes" if part in self.parts.loaded else "no"
            memory = f"{count * bits / 8e6:,.0f} MB"
            rows.append((part.replace("_", " "), f"{count:,}", f"{bits:.3g} bits", memory, loaded))
        return rows

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """`run_serialized`; a small model leaves the cores to what else runs on them, and is quicker for it."""
        if self.parts.is_large("transformer"):
            return run_serialized(function, *args, **kwargs)

        def run_beside_others() -> R:
            with idle_cores_only():
                return function(*args, **kwargs)

        return run_serialized(run_beside_others)

    def preview_matrix(self) -> mx.array:
        """What stands for the decoder in fast previews, see `fit_preview`; fitted when first asked for, and kept."""
        if self._preview_matrix is None:
            self._preview_matrix = run_serialized(fit_preview, self.parts.load("autoencoder"))
        return self._preview_matrix

    def release_all(self) -> None:
        self.prompts.remembered.clear()
        self.parts.release_all()

    def plan_memory(self, request: Request, bits: float | None = None) -> MemoryPlan:
        """The bytes that a request takes, with the parts as they are loaded here or in `bits` bits per weight."""
        plan = plan_request(self.checkpoint, request, bits or self.bits, self.cluster.machines)
        return plan._replace(transformer=plan.transformer + lora_bytes(self.loras))

    def check_memory(self, request: Request) -> None:
        """Raises MemoryLimitError for a request that this machine cannot hold, with what would fit."""
        fewer = () if self.checkpoint.is_quantized else FEWER_BITS
        check_memory(partial(self.plan_memory, request), fewer, self.cluster.least_memory())

    def offload_if_needed(self, request: Request) -> None:
        """Release the transformer after the last step, if the decoder or the next prompt needs its place."""
        if sys.is_finalizing():  # a stream that was left open ends with the process, where MLX has ended already
            return
        if not all_parts_fit(self.plan_memory(request)):
            self.parts.release("transformer")

    def check_finite(self, latents: mx.array) -> None:
        """Refuse to make a picture of numbers that have grown beyond all bounds. Raises UserError."""
        if mx.isfinite(latents).all().item():
            return
        way_out = "give its adapters smaller scales" if self.loras else "take dtype=mx.float32, less noise or guidance"
        raise UserError(
            f"{self.info.name} has computed numbers that are not finite, of which no picture can be made: {way_out}, "
            "or download the weights again."
        )

    def metadata(self) -> dict[str, Any]:
        """What a picture remembers of the model, besides the request: bits, exchanged parts, adapters."""
        return self.info.chosen | ({"loras": record_loras(self.loras)} if self.loras else {})
