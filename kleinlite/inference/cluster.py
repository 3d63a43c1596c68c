"""How several machines share one model: whole with an answer each, or each with its own heads."""

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from ..errors import UserError
from ..models.adapters.variants import DoRA, Kronecker
from ..models.checkpoint import Checkpoint
from ..sharding import common_divisor, shard
from ..text_encoder import TextEncoder
from .machine_memory import machine_memory, plan_model
from .machines import from_first, least
from .request import Request

__all__ = ["Cluster"]


class Cluster:
    """The machines that draw each picture together; without a group, this one alone."""

    def __init__(self, group: mx.distributed.Group | None, checkpoint: Checkpoint):
        self.group = group if group and group.size() > 1 else None
        self.guidance_group = self._find_guidance_group(checkpoint)

    def _find_guidance_group(self, checkpoint: Checkpoint) -> mx.distributed.Group | None:
        """Two machines, each with one of a base model's two answers, if both can hold it; None: they share heads."""
        info = checkpoint.info
        if self.group is None or self.group.size() != 2 or info.guidance == info.family.no_guidance:
            return None
        plan = plan_model(checkpoint, width=info.size, height=info.size)
        return self.group if plan.peak_bytes <= least(machine_memory()[1], self.group) else None

    @property
    def machines(self) -> int:
        """How many machines share the heads of the model; 1: each holds the whole."""
        return 1 if self.group is None or self.guidance_group else self.group.size()

    def agree(self, request: Request, seeded: bool) -> Request:
        """The request as all machines draw it: where no seed was given, with the first machine's."""
        if self.group is None or seeded:
            return request
        return replace(request, seeds=from_first(request.seeds, self.group))

    def least_memory(self) -> int | None:
        """The bytes of the smallest machine, or one alone would refuse; None without a group."""
        return None if self.group is None else least(machine_memory()[0], self.group)

    def share(self, part: nn.Module) -> None:
        """Keep this machine's heads only. A text encoder whose heads do not go round stays whole. Raises UserError."""
        assert self.group is not None
        if isinstance(part, TextEncoder) and common_divisor(part) % self.machines:
            return
        if any(isinstance(module, (DoRA, Kronecker)) for module in part.modules()):
            raise UserError("A DoRA or LoKr adapter cannot be divided over several machines: take a LoRA or a LoHa.")
        shard(part, self.group)
        mx.eval(part.parameters())
