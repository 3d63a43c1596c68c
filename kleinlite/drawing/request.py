"""What one call asks for: its arguments checked, and the model's defaults filled in. Hand-written.

This is the one gate for arguments: what passes it has the right type and range, and everything behind relies on that.
What does not is a ValueError with a sentence that names the mistake and the way out.
"""

import math
import numbers
import operator
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from PIL import Image

from ..models.formats import find_packing
from ..models.opening import ModelInfo
from ..quantisation import PACKINGS
from .thread import in_turn

__all__ = ["Request", "check_request", "check_prompts", "check_images", "check_loading"]

LARGEST_SIDE = 2**31 - 16  # what a PNG file can say; memory ends long before
LARGEST_GUIDANCE = 1000  # far beyond any use; what overflows is black
FLOATS = (mx.float32, mx.bfloat16, mx.float16)


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
    no_guidance: float = 1.0  # the guidance that does nothing, in this model's way to count

    @property
    def guidance_scale(self) -> float:
        """The guidance as chapter 4 counts it: 1 is none."""
        return self.guidance + 1 - self.no_guidance

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of latent tokens."""
        return self.height // 16, self.width // 16

    @property
    def reference_grids(self) -> list[tuple[int, int]]:
        """The same of each reference picture."""
        return [(image.height // 16, image.width // 16) for image in self.references]

    def metadata(self, i: int) -> dict:
        """What made picture i, in the words of a call; no seed leads back to noise that was given."""
        start = {"seed": self.seeds[i]} if self.noise is None else {"noise": True}
        return {
            "model": self.model, "prompt": self.prompts[i], **start, "steps": self.steps,
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
    prompts = check_prompts(prompt)
    check_text(negative_prompt, "negative_prompt")
    if references and not info.family.edits:
        raise ValueError(
            f"{info.name} draws from words and cannot edit pictures: leave the pictures out, or take a model of "
            "FLUX.2 [klein], such as 4b."
        )
    default = references[0].size if references else (info.size, info.size)
    width, height = (side if side is not None else d for side, d in zip((width, height), default))
    width, height = check_side(width, "width"), check_side(height, "height")
    steps = info.steps if steps is None else check_integer(steps, "steps", "such as 4")
    if not 1 <= steps <= 1000:
        told = describe(steps)
        raise ValueError(f"steps counts the model's looks at the picture: at least 1 and at most 1000, not {told}.")
    guidance = check_guidance(guidance, info)
    none = info.family.no_guidance
    if negative_prompt and guidance == none:
        use = "a guidance above 0" if none == 0 else "a base model and a guidance above 1"
        raise ValueError(f"A negative prompt only acts through guidance: use {use}.")
    seeds = check_seeds(seed, len(prompts))
    if noise is not None:
        noise = check_noise(noise, (len(prompts), width * height // 256, info.d_latent))
    return Request(
        info.name, prompts, not isinstance(prompt, str), list(references), width, height, steps, guidance,
        negative_prompt, seeds, noise, none,
    )  # fmt: skip


def check_text(text: str, name: str) -> str:
    """Text that can be read and stored."""
    if not isinstance(text, str):
        raise ValueError(f"{name} must be text, not {describe(text)}.")
    try:
        text.encode()
    except UnicodeEncodeError:  # lone surrogates: how Python carries bytes that are not UTF-8
        told = f"The {name} {text[:40]!r} is not valid UTF-8 text: check its source, or the terminal."
        raise ValueError(told) from None
    return text


def check_prompts(prompt: str | Sequence[str]) -> list[str]:
    """A prompt or a list of them → a list."""
    if isinstance(prompt, str):
        return [check_text(prompt, "prompt")]
    if not isinstance(prompt, (list, tuple)) or not prompt or not all(isinstance(text, str) for text in prompt):
        raise ValueError(f"The prompt must be a sentence or a list of sentences, not {describe(prompt)}.")
    return [check_text(text, "prompt") for text in prompt]


def check_images(images: Image.Image | Sequence[Image.Image]) -> list[Image.Image]:
    """A picture or several → a list."""
    images = [images] if isinstance(images, Image.Image) else images
    if not isinstance(images, (list, tuple)):
        raise ValueError(f"images must be a list of pictures, not {describe(images)}: open files with PIL.Image.open.")
    for image in images:
        if not isinstance(image, Image.Image):
            hint = f"PIL.Image.open({image!r})" if isinstance(image, (str, Path)) else "PIL.Image.open or fromarray"
            raise ValueError(f"images must be pictures, not {describe(image)}: make one with {hint}.")
    return list(images)


def check_integer(value: int, name: str, example: str) -> int:
    """A whole number of any type that is one, as NumPy's are."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number {example}, not {describe(value)}.") from None


def check_side(value: int, name: str) -> int:
    """A width or a height."""
    side = check_integer(value, name, "of pixels")
    if side > LARGEST_SIDE:
        raise ValueError(f"The {name} must be at most {LARGEST_SIDE} pixels, not {describe(side)}.")
    if side < 16 or side % 16:
        near = max(16, (side + 8) // 16 * 16)
        raise ValueError(f"The {name} must be a multiple of 16 pixels, {describe(side)} is not: try {near}.")
    return side


def check_guidance(guidance: float | None, info: ModelInfo) -> float:
    """The model's own if none is given."""
    if guidance is None:
        return info.guidance
    if isinstance(guidance, bool) or not isinstance(guidance, numbers.Real):
        raise ValueError(f"guidance must be a number such as {max(info.guidance, 1):g}, not {describe(guidance)}.")
    try:
        guidance = float(guidance)
    except OverflowError:
        guidance = math.inf
    none = info.family.no_guidance
    if info.distilled and info.family.guidance_fixed and guidance != none:
        raise ValueError(
            f"{info.name} is distilled: guidance is built into its weights and cannot be set. Leave guidance out, or "
            "use the base model (nano-base for nano, base-4b for 4b)."
        )
    if not none <= guidance <= LARGEST_GUIDANCE:
        told = f"from {none:g} (none) to {LARGEST_GUIDANCE}, not {guidance:g}"
        raise ValueError(f"guidance is a number {told}: try {info.guidance:g}.")
    return guidance


def check_seeds(seed: int | Sequence[int] | None, count: int) -> list[int]:
    """One seed for each of `count` pictures; a random one if none is given, and counting up from it."""
    if seed is None:
        seed = random.randrange(2**31)
    if isinstance(seed, (list, tuple, range)):
        if len(seed) != count:
            raise ValueError(f"{len(seed)} seeds given, {count} needed: give one for each picture, or a single one.")
        seeds = [check_integer(number, "A seed", "such as 7") for number in seed]
    else:
        first = check_integer(seed, "seed", "or a list of them")
        seeds = [*range(first, first + count)]
    for number in (min(seeds), max(seeds)):
        if not 0 <= number < 2**64:
            raise ValueError(f"A seed is a whole number from 0 to 2**64 - 1, {describe(number)} is not.")
    return seeds


def check_noise(noise: mx.array, shape: tuple[int, int, int]) -> mx.array:
    """Starting latents: an array of this shape, or what `mx.array` makes one of."""
    try:
        noise = mx.array(noise)
    except Exception:  # whatever it is, it is no array
        raise ValueError(f"noise must be an array of the shape {shape}, not {describe(noise)}.") from None
    if noise.shape != shape:
        raise ValueError(f"The noise must have the shape {shape} (pictures, tokens, channels), not {noise.shape}.")
    if not mx.issubdtype(noise.dtype, mx.floating):
        raise ValueError(f"The noise must be floating-point numbers, not {noise.dtype}: mx.random.normal makes them.")
    mx.eval(noise)  # here, where it comes from: another thread could not
    if not in_turn(lambda: mx.all(mx.isfinite(noise)).item()):
        raise ValueError("The noise has values that are infinite or not a number: the picture would be black.")
    return noise


def check_loading(
    name: str | Path, quantize: int | str | None, dtype: mx.Dtype | None,
    parts: str | Path | dict[str, str | Path] | None, loras: Sequence[str | Path | tuple[str | Path, float]] = (),
) -> None:  # fmt: skip
    """Arguments of `from_pretrained`, as far as it needs no file to judge them."""
    if not isinstance(name, (str, Path)) or not str(name).strip():
        raise ValueError(f'The model must be a name such as "nano" or "4b", or a folder, not {describe(name)}.')
    if not isinstance(quantize, (int, str, type(None))):
        raise ValueError(f"quantize is one of {', '.join(map(str, PACKINGS))}, not {describe(quantize)}.")
    find_packing(quantize)
    if dtype is not None and not (isinstance(dtype, mx.Dtype) and dtype in FLOATS):
        raise ValueError(f"dtype must be mx.float32, mx.bfloat16 or mx.float16, not {describe(dtype)}.")
    for place in parts.values() if isinstance(parts, dict) else [parts]:
        if not isinstance(place, (str, Path)) and not (place is parts is None):
            raise ValueError(f"parts must be a model's name or folder, or one for each part, not {describe(place)}.")
    if not isinstance(loras, (list, tuple)):
        raise ValueError(f"loras must be a list of files, or of (file, scale), not {describe(loras)}.")
    for lora in loras:
        file, *scale = lora if isinstance(lora, (list, tuple)) and lora else (lora,)
        if not isinstance(file, (str, Path)) or len(scale) > 1:
            raise ValueError(f"loras must be a list of files, or of (file, scale), not of {describe(lora)}.")


def describe(value: object) -> str:
    """A value in few words, for a sentence."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return f"a number of {value.bit_length()} bits"
    text = repr(value) if isinstance(value, (str, bytes, int, float, Path, type(None))) else ""
    return text if 0 < len(text) <= 60 else f"a {type(value).__name__}"
