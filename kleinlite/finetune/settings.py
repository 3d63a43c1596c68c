"""How to train an adapter."""

from dataclasses import dataclass

from ..models.adapters import LAYOUTS


@dataclass(frozen=True)
class Settings:
    """How to train. rate: the peak of the learning rate; shift: see `shifted_times`, by the pictures' size if None."""

    rank: int = 16
    steps: int = 500
    rate: float = 1e-4
    batch: int = 1
    accumulate: int = 4  # batches whose gradients make one step
    seed: int = 0
    every: int = 100  # steps between two looks: validation, samples, files
    held_out: float = 0.1  # share of the examples that is never trained on, at least one
    shift: float | None = None
    layout: str = "diffusers"  # or "comfy": whose names the file has

    def __post_init__(self):
        for name in ("rank", "steps", "batch", "accumulate", "every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} counts from 1, not from {getattr(self, name)}.")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"A seed is a number from 0 to 2^64 - 1, not {self.seed}.")
        if not 0 < self.rate < 1:
            raise ValueError(f"The learning rate is above 0 and far below 1, such as 1e-4, not {self.rate:g}.")
        if self.layout not in LAYOUTS:
            raise ValueError(f"The layout is {' or '.join(LAYOUTS)}, not {self.layout!r}.")
