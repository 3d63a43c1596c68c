"""How to train an adapter."""

from dataclasses import dataclass

from ..errors import UserError
from ..lora import MATRIX_KINDS
from ..models.lora_files import LAYOUTS


@dataclass(frozen=True)
class Settings:
    """How to train. What is None follows from the model and the pictures.

    rank: of all matrices of the blocks, or by kind, such as {"qkv": 16, "linear1": 8}; other kinds stay as they are.
    rate: the peak of the learning rate, see `default_rate`. shift: see `shifted_times`, by the pictures' size.
    held_out: share of the examples that is never trained on, at least one; a tenth of 20 or more, of fewer none, since
    the error on one or two pictures says little, and each is missed.
    """

    rank: int | dict[str, int] = 16
    steps: int = 500
    rate: float | None = None
    batch: int = 1
    accumulate: int = 4  # batches whose gradients make one step
    seed: int = 0
    every: int = 100  # steps between two looks: validation, samples, files
    held_out: float | None = None
    shift: float | None = None
    layout: str = "diffusers"  # or "comfy": whose names the file has

    def __post_init__(self) -> None:
        by_kind = self.rank if isinstance(self.rank, dict) else dict.fromkeys(MATRIX_KINDS, self.rank)
        if not by_kind or not set(by_kind) <= set(MATRIX_KINDS):
            others = ", ".join(sorted(map(repr, set(by_kind) - set(MATRIX_KINDS)))) or "none"
            raise UserError(f"Ranks are for matrices of the kinds {', '.join(MATRIX_KINDS)}, not for {others}.")
        for name in ("rank", "steps", "batch", "accumulate", "every"):
            for value in by_kind.values() if name == "rank" else [getattr(self, name)]:
                if value < 1:
                    raise UserError(f"{name} counts from 1, not from {value}.")
        if not 0 <= self.seed < 2**64:
            raise UserError(f"A seed is a number from 0 to 2^64 - 1, not {self.seed}.")
        if self.rate is not None and not 0 < self.rate < 1:
            raise UserError(f"The learning rate is above 0 and far below 1, such as 1e-4, not {self.rate:g}.")
        if self.layout not in LAYOUTS:
            raise UserError(f"The layout is {' or '.join(LAYOUTS)}, not {self.layout!r}.")


def default_rate(d: int) -> float:
    """The learning rate for a model of width d: 1e-4 for 4B, whose width is 3072; a narrow one takes larger steps.

    In inverse proportion, which keeps the change of the activations the same (Yang et al. 2022, arXiv 2203.03466).
    """
    return 1e-4 * 3072 / d
