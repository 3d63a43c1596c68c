"""What one call asks for: its arguments checked, and the model's defaults filled in. Hand-written."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
from PIL import Image

from ..models.opening import ModelInfo

__all__ = ["Request", "check_request"]


@dataclass(frozen=True)
class Request:
    """One call's arguments, checked and complete: everything the loop needs, everything a picture remembers."""

    model: str
    prompts: list[str]
    batched: bool  # a list of prompts gives a list of pictures, a lone prompt a lone picture
    references: list[Image.Image]
    width: int
    height: int
    steps: int
    guidance: float
    negative_prompt: str
    seeds: list[int]
    noise: mx.array | None = None

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of latent tokens."""
        return self.height // 16, self.width // 16

    @property
    def reference_grids(self) -> list[tuple[int, int]]:
        """The same of each reference picture."""
        return [(image.height // 16, image.width // 16) for image in self.references]

    def metadata(self, i: int) -> dict:
        """What made picture i, in the words of a call."""
        return {
            "model": self.model, "prompt": self.prompts[i], "seed": self.seeds[i], "steps": self.steps,
            "guidance": self.guidance, "negative_prompt": self.negative_prompt,
            "width": self.width, "height": self.height, "references": len(self.references),
        }  # fmt: skip


def check_request(
    info: ModelInfo, prompt: str | Sequence[str], references: Sequence[Image.Image] = (), *, width: int | None = None,
    height: int | None = None, steps: int | None = None, guidance: float | None = None, negative_prompt: str = "",
    seed: int | Sequence[int] | None = None, noise: mx.array | None = None,
) -> Request:  # fmt: skip
    """Fill in the model's defaults and refuse what cannot work with a ValueError, each time with the way out.

    references: pictures as they will be encoded, see `prepare_reference`. The others as for a call of `Klein`.
    """
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    if not prompts or not all(isinstance(p, str) for p in prompts):
        raise ValueError("The prompt must be a sentence or a list of sentences.")
    default = references[0].size if references else (info.size, info.size)
    width, height = (side if side is not None else d for side, d in zip((width, height), default))
    for what, side in (("width", width), ("height", height)):
        if side < 16 or side % 16:
            near = max(16, 16 * round(side / 16))
            raise ValueError(f"The {what} must be a multiple of 16 pixels, {side} is not: try {near}.")
    steps = info.steps if steps is None else steps
    if not 1 <= steps <= 1000:
        raise ValueError(f"steps counts the model's looks at the picture: at least 1 and at most 1000, not {steps}.")
    if info.distilled and guidance not in (None, 1):
        raise ValueError(
            f"{info.name} is distilled: guidance is built into its weights and cannot be set. Leave guidance out, or "
            "use the base model (nano-base for nano, base-4b for 4b)."
        )
    guidance = info.guidance if guidance is None else float(guidance)
    if not 1 <= guidance < math.inf:
        raise ValueError(f"guidance is a number from 1 (none) upwards, not {guidance:g}: try {info.guidance:g}.")
    if negative_prompt and guidance == 1:
        raise ValueError("A negative prompt only acts through guidance: use a base model and a guidance above 1.")
    if seed is None:
        seed = random.randrange(2**31)
    seeds = [seed + i for i in range(len(prompts))] if isinstance(seed, int) else list(seed)
    if len(seeds) != len(prompts):
        raise ValueError(
            f"There are {len(prompts)} prompts and {len(seeds)} seeds: give one seed each, or a single one."
        )
    for number in seeds:
        if not 0 <= number < 2**64:
            raise ValueError(f"A seed is a whole number from 0 to 2**64 - 1, {number} is not.")
    shape = (len(prompts), width * height // 256, 128)
    if noise is not None and tuple(noise.shape) != shape:
        raise ValueError(f"The noise must have the shape {shape} (pictures, tokens, channels), not {noise.shape}.")
    return Request(
        info.name, prompts, not isinstance(prompt, str), list(references), width, height, steps, guidance,
        negative_prompt, seeds, noise,
    )  # fmt: skip
