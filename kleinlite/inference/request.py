"""What one call asks for: its arguments checked, and the model's defaults filled in.

What passes `check_request` has the right type and range, and everything behind relies on that. Anything else raises a
UserError, a ValueError whose sentence names the mistake and the way out.
"""

import hashlib
import inspect
import numbers
import operator
import random
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import mlx.core as mx
from PIL import Image

from ..errors import UserError
from ..models.checkpoint import ModelInfo
from ..models.families import Box
from ..models.registry import find_bundled
from ..pipeline import prepare_reference
from .masks import Change, count_skipped, plan_change
from .picture_file import check_reference_size, shrink, to_rgb

__all__ = ["Options", "Request", "as_reference", "check_request", "check_prompts", "check_images"]

F = TypeVar("F", bound=Callable[..., Any])

LARGEST_GUIDANCE = 1000  # far beyond any use; what overflows has no picture, see `LoadedModel.check_finite`

FROM_DIFFUSERS = {  # what diffusers calls our options
    "num_inference_steps": "steps",
    "guidance_scale": "guidance",
    "image": "images",
    "mask_image": "mask",
    "image_reference": "images, the picture to change first",
    "generator": "seed",
    "latents": "noise",
    "num_images_per_prompt": "a list of prompts",
    "size": "width and height",
    "output_type": "np.asarray(picture) of what a call returns, a PIL picture",
    "callback_on_step_end": "for step in klein.stream(…)",
    "prompt_embeds": "the prompt itself, whose features are remembered",
    "sigmas": "steps, or step through kleinlite.sampling.euler with levels of your own",
}
OPENING = {  # what others call the options of from_pretrained
    "torch_dtype": "dtype", "quantization_config": "quantize", "vae": 'parts={"autoencoder": …}',
    "device": "nothing, since MLX takes the GPU that there is, or mx.set_default_device(mx.cpu) before it",
}  # fmt: skip


class Options(TypedDict, total=False):
    """What a call takes besides the prompt: `Klein.__call__` says what each means. None is the same as left out."""

    images: Image.Image | Sequence[Image.Image]
    mask: Image.Image | None
    strength: float | None
    extend: Sequence[int] | None
    width: int | None
    height: int | None
    steps: int | None
    guidance: float | None
    negative_prompt: str
    seed: int | Sequence[int] | None
    noise: mx.array | None
    progress: bool


DEFAULTS: Options = {"images": (), "negative_prompt": "", "progress": True}  # of others the model's own files say


def name_options(call: F) -> F:
    """The same function, whose signature names the options: for Tab, Shift-Tab and help(), which ask Python for it."""
    signature = inspect.signature(call)
    *own, _ = signature.parameters.values()
    named = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=DEFAULTS.get(name), annotation=kind)
        for name, kind in Options.__annotations__.items()
    ]
    call.__signature__ = signature.replace(parameters=[*own, *named])  # type: ignore[attr-defined]
    return call


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
    guidance_scale: float  # the same as chapter 4 counts it: 1 is none
    negative_prompt: str
    seeds: list[int]
    noise: mx.array | None = None
    box: Box | None = None  # to which pictures and previews are cut
    change: Change | None = None  # of the first reference; then width and height are its canvas's

    @property
    def skipped_steps(self) -> int:
        """The first steps of the schedule, which a strength leaves out."""
        return count_skipped(self.steps, self.change.strength) if self.change else 0

    @property
    def grid(self) -> tuple[int, int]:
        return self.height // 16, self.width // 16

    def metadata(self, i: int) -> dict[str, Any]:
        """What made picture i, in the words of a call; no seed leads back to noise that was given."""
        start: dict[str, Any] = {"seed": self.seeds[i]} if self.noise is None else {"noise": True}
        return {
            "model": self.model, "prompt": self.prompts[i], **start, "steps": self.steps,
            "guidance": self.guidance, "negative_prompt": self.negative_prompt,
            "width": self.width, "height": self.height, "references": len(self.references),
            **({"pictures": self.hash_pictures()} if self.references else {}),
            **({"box": list(self.box)} if self.box else {}),
            **(self.change.metadata() if self.change else {}),
        }  # fmt: skip

    def hash_pictures(self) -> str:
        """What tells the pictures that were given, the mask among them, from others of their number."""
        mask = [self.change.mask] if self.change and self.change.mask else []
        given = b"".join(picture.tobytes() for picture in [*self.references, *mask])
        return hashlib.sha256(given).hexdigest()[:16]


def as_reference(image: Image.Image, least: int = 64) -> Image.Image:
    """Any picture as a reference: upright, in RGB, cut as chapter 6 cuts it. Raises UserError for odd sizes."""
    return prepare_reference(check_reference_size(to_rgb(image), least))


def check_request(info: ModelInfo, prompt: str | Sequence[str], options: Options | None = None) -> Request:
    """A call's options, checked, the model's defaults filled in, and its pictures as the model will read them.

    Raises UserError for what cannot work, each time with the way out.
    """
    given: dict[str, Any] = {**DEFAULTS}
    given |= {name: value for name, value in (options or {}).items() if value is not None}
    check_names(given, Options.__annotations__, FROM_DIFFUSERS, "A call")
    prompts = check_prompts(info, prompt)
    references, box, change = check_pictures(info, given)
    width, height = choose_size(info, given, references, change)
    steps, guidance, negative_prompt = choose_numbers(info, given)
    seeds = check_seeds(given.get("seed"), len(prompts))
    noise = given.get("noise")
    if noise is not None:
        noise = check_noise(noise, (len(prompts), width * height // 256, info.d_latent))
    return Request(
        model=info.name, prompts=prompts, batched=not isinstance(prompt, str), references=references, width=width,
        height=height, steps=steps, guidance=guidance, guidance_scale=guidance + 1 - info.family.no_guidance,
        negative_prompt=negative_prompt, seeds=seeds, noise=noise, box=box, change=change,
    )  # fmt: skip


def check_pictures(info: ModelInfo, given: dict[str, Any]) -> tuple[list[Image.Image], Box | None, Change | None]:
    """The pictures as the model will read them, the box to which the result is cut, and the change of the first.

    A family may fill up a lone picture, and then the result is cut to a box, unless a width or a height is given.
    """
    images = check_images(given["images"])
    if images and not info.family.edits:
        raise UserError(
            f"{info.name} draws from words and cannot edit pictures: leave the pictures out, or take a model of "
            "FLUX.2 [klein], such as 4b."
        )
    change = plan_change(images, given)
    if change:
        images[0] = change.canvas
    elif info.family.prepare_lone_reference and len(images) == 1:
        image, box = info.family.prepare_lone_reference(to_rgb(images[0]))
        return [image], None if {"width", "height"} & given.keys() else box, None
    references = [as_reference(image, 16 if change else 64) for image in images]  # diffusers' bounds
    if info.only_size:
        first = 1 if change else 0
        references[first:] = [shrink(image, info.only_size) for image in references[first:]]
    return references, None, change


def choose_size(
    info: ModelInfo, given: dict[str, Any], references: list[Image.Image], change: Change | None
) -> tuple[int, int]:
    """Width and height: of the picture to change, else as given, of the first reference, or the model's own."""
    if change:
        if (given.get("width", change.size[0]), given.get("height", change.size[1])) != change.size:
            size = "{}×{}".format(*change.size)
            said = f"With mask, strength or extend the picture says the size, {size}"
            raise UserError(f"{said}: leave width and height out.")
        return change.canvas.size
    default = references[0].size if references else (info.size, info.size)
    return check_side(given.get("width", default[0]), "width"), check_side(given.get("height", default[1]), "height")


def choose_numbers(info: ModelInfo, given: dict[str, Any]) -> tuple[int, float, str]:
    """Steps, guidance, and the negative prompt, which acts through it."""
    steps = check_integer(given.get("steps", info.steps), "steps", "such as 4")
    if not 1 <= steps <= 1000:
        raise UserError(f"steps counts the model's looks at the picture: at least 1 and at most 1000, not {steps}.")
    guidance = check_guidance(given.get("guidance"), info)
    negative_prompt = check_text(info, given["negative_prompt"], "negative_prompt")
    none = info.family.no_guidance
    if negative_prompt and guidance == none:
        use = "a guidance above 0" if none == 0 else "a base model and a guidance above 1"
        raise UserError(f"A negative prompt only acts through guidance: use {use}.")
    return steps, guidance, negative_prompt


def check_names(given: Iterable[str], known: Iterable[str], hints: dict[str, str], where: str) -> None:
    """Raises TypeError for an option that there is not, as Python does. hints: what others call ours."""
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None:
        hint = f": say {hints[unknown]}" if unknown in hints else ""
        raise TypeError(f"{where} has no option {unknown!r}{hint}. There are {', '.join(known)}.")


def fold_blanks(text: str) -> str:
    """One space for each run of blanks, and no character that nobody sees: soft hyphens, marks of direction.

    A page or a table that was copied has them; captions do not, and to the tokenizer they are other tokens. The page
    Draw does the same: `tests/blanks.json` has cases for both.
    """
    apart = re.sub("[\u200b\ufeff]", " ", text)  # spaces of no width, of which Unicode says that they are none
    return " ".join("".join(c for c in apart if unicodedata.category(c) != "Cf").split())


def check_text(info: ModelInfo, text: Any, name: str) -> str:
    """The text, as a bundled model knows texts. Raises UserError."""
    if not isinstance(text, str):
        raise UserError(f"{name} must be text, not {describe(text)}.")
    try:
        text.encode()
    except UnicodeEncodeError:  # lone surrogates: how Python carries bytes that are not UTF-8
        told = f"The {name} {text[:40]!r} is not valid UTF-8 text: check its source, or the terminal."
        raise UserError(told) from None
    return fold_blanks(text) if find_bundled(info.name) else text


def check_prompts(info: ModelInfo, prompt: Any) -> list[str]:
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(prompts, (list, tuple)):
        raise UserError(f"The prompt must be a sentence or a list of sentences, not {describe(prompt)}.")
    if not prompts:
        raise UserError("The list of prompts is empty: give a sentence, or several.")
    return [check_text(info, text, "prompt") for text in prompts]


def check_images(images: Any) -> list[Image.Image]:
    images = list(images) if isinstance(images, (list, tuple)) else [images]
    for image in images:
        if not isinstance(image, Image.Image):
            hint = "make one with PIL.Image.open or fromarray"
            raise UserError(f"images must be pictures, not {describe(image)}: {hint}.")
    return images


def check_integer(value: Any, name: str, example: str) -> int:
    """A whole number of any type that is one, as NumPy's are."""
    try:
        return operator.index(value)
    except TypeError:
        raise UserError(f"{name} must be a whole number {example}, not {describe(value)}.") from None


def check_side(value: Any, name: str) -> int:
    side = check_integer(value, name, "of pixels")
    if side < 16 or side % 16:
        near = max(16, (side + 8) // 16 * 16)
        raise UserError(f"The {name} must be a multiple of 16 pixels, {describe(side)} is not: try {near}.")
    return side


def check_guidance(guidance: Any, info: ModelInfo) -> float:
    """The model's own if none is given."""
    if guidance is None:
        return info.guidance
    if not isinstance(guidance, numbers.Real):
        raise UserError(f"guidance must be a number such as {max(info.guidance, 1):g}, not {describe(guidance)}.")
    guidance = float(guidance)
    none = info.family.no_guidance
    if info.distilled and info.family.guidance_fixed and guidance != none:
        raise UserError(
            f"{info.name} is distilled: guidance is built into its weights and cannot be set. Leave guidance out, or "
            "use the base model (nano-base for nano, base-4b for 4b, flux3-base for flux3)."
        )
    if not none <= guidance <= LARGEST_GUIDANCE:
        told = f"from {none:g} (none) to {LARGEST_GUIDANCE}, not {guidance:g}"
        raise UserError(f"guidance is a number {told}: try {info.guidance:g}.")
    return guidance


def check_seeds(seed: Any, count: int) -> list[int]:
    """One seed for each of `count` pictures; a random one if none is given, and counting up from it."""
    if seed is None:
        seed = random.randrange(2**31)
    if isinstance(seed, (list, tuple, range)):
        if len(seed) != count:
            ways_out = f"say [prompt] * {len(seed)}" if count == 1 < len(seed) else "give one for each picture"
            raise UserError(f"{len(seed)} seeds given, {count} needed: {ways_out}, or a single seed.")
        seeds = [check_integer(number, "A seed", "such as 7") for number in seed]
    else:
        first = check_integer(seed, "seed", "or a list of them")
        seeds = [*range(first, first + count)]
    for number in (min(seeds), max(seeds)):
        if not 0 <= number < 2**64:
            raise UserError(f"A seed is a whole number from 0 to 2**64 - 1, {describe(number)} is not.")
    return seeds


def check_noise(noise: Any, shape: tuple[int, int, int]) -> mx.array:
    """Starting latents: an array of this shape, of any library."""
    if tuple(getattr(noise, "shape", ())) != shape:
        found = getattr(noise, "shape", describe(noise))
        raise UserError(f"The noise must have the shape {shape} (pictures, tokens, channels), not {found}.")
    noise = mx.array(noise, mx.float32)
    mx.eval(noise)  # here, where it comes from: another thread could not
    return noise


def describe(value: object) -> str:
    """A value in few words, for a sentence."""
    text = repr(value) if isinstance(value, (str, bytes, int, float, Path, type(None))) else ""
    return text if 0 < len(text) <= 60 else f"a {type(value).__name__}"
