"""How to train an adapter, and on which models."""

from dataclasses import dataclass

from ..errors import UserError
from ..inference.request import check_seeds
from ..lora import MATRIX_KINDS
from ..models.checkpoint import ModelInfo
from ..models.families import Family
from ..models.registry import BUNDLED, MODELS, find_released


@dataclass(frozen=True)
class Settings:
    """How to train.

    rank: of all matrices of the blocks, or by kind, such as {"qkv": 16, "linear1": 8}; other kinds stay as they are.
    rate: the peak of the learning rate, see `default_rate`.
    """

    rank: int | dict[str, int] = 16
    steps: int = 500
    rate: float | None = None
    batch: int = 1
    accumulate: int = 4  # batches whose gradients make one step
    seed: int = 0
    every: int = 100  # steps between two looks: samples, files
    layout: str = "diffusers"  # or "comfy": whose names the file has

    def __post_init__(self) -> None:
        ranks = self.rank if isinstance(self.rank, dict) else {"qkv": self.rank}
        if unknown := set(ranks) - set(MATRIX_KINDS):
            others = ", ".join(sorted(map(repr, unknown)))
            raise UserError(f"Ranks are for matrices of the kinds {', '.join(MATRIX_KINDS)}, not for {others}.")
        counts = {name: getattr(self, name) for name in ("steps", "batch", "accumulate", "every")}
        for name, value in (counts | {"rank": min(ranks.values())}).items():
            if value < 1:
                raise UserError(f"{name} counts from 1, not from {value}.")
        check_seeds(self.seed, 1)
        if self.rate is not None and not 0 < self.rate < 1:
            raise UserError(f"The learning rate is above 0 and far below 1, such as 1e-4, not {self.rate:g}.")


def default_rate(d: int) -> float:
    """The learning rate for a model of width d: 1e-4 for 4B, whose width is 3072; a narrow one takes larger steps.

    In inverse proportion, which keeps the change of the activations the same (Yang et al. 2022, arXiv 2203.03466).
    """
    return 1e-4 * 3072 / d


def check_trains(family: Family) -> None:
    """Refuse a family for whose models no adapter can be trained. Raises UserError."""
    if not family.trains:
        raise UserError(f"kleinlite trains no adapters for {family.title}: take base-4b or base-9b.")


def check_base(info: ModelInfo) -> None:
    """Refuse to train a distilled model: plain training would make it forget its few steps. Raises UserError."""
    check_trains(info.family)
    if not info.distilled:
        return
    released = find_released(info.name)
    base = f"base-{released.size.name}" if released else f"{info.name.lower()}-base"
    known = base if base in MODELS or base in BUNDLED else "its base model"
    raise UserError(f"{info.name} is distilled: train on {known}, and use the adapter on {info.name}.")
