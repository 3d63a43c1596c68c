"""The pipeline.

We join all parts: a prompt goes in, a picture comes out; and with reference pictures in, it edits.

Promoted from notebooks/06_pipeline.ipynb: edit there, then run `make promote`. (seal 8b733f6a)
"""

import json
import math
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from PIL import Image, PngImagePlugin
from tqdm.auto import tqdm

from .autoencoder import Autoencoder
from .checkpoints import ModelInfo, find_folder, load
from .position_ids import image_ids, reference_ids, text_ids
from .sampling import euler, guide, noise, schedule
from .text_encoder import TextEncoder, tokenize
from .transformer import Transformer

__all__ = [
    "to_pixels",
    "to_images",
    "Step",
    "LARGEST_REFERENCE",
    "prepare_reference",
    "Request",
    "check_request",
    "Klein",
    "save_picture",
    "picture_info",
]


def to_pixels(image: Image.Image) -> mx.array:
    """A picture as (1, H, W, 3) in [-1, 1]."""
    rgb = image.convert("RGB")
    values = mx.array(memoryview(rgb.tobytes())).reshape(1, rgb.height, rgb.width, 3)
    return 2 * (values.astype(mx.float32) / 255) - 1


def to_images(pixels: mx.array) -> list[Image.Image]:
    """(b, H, W, 3), about [-1, 1] → b pictures, clamped and rounded to 8 bits as diffusers does."""
    levels = mx.round(255 * mx.clip(pixels.astype(mx.float32) / 2 + 0.5, 0, 1)).astype(mx.uint8)
    return [Image.frombytes("RGB", (p.shape[1], p.shape[0]), bytes(memoryview(p))) for p in levels]


@dataclass(frozen=True)
class Step:
    """One Euler step of a running generation: what the loop yields, and a look at where it is heading."""

    index: int
    t: float
    t_next: float
    velocity: mx.array
    latents: mx.array
    _grid: tuple[int, int]
    _autoencoder: Autoencoder
    _single: bool

    def preview(self) -> Image.Image | list[Image.Image]:
        """The clean picture that the model expects from here: latents − t_next·velocity, decoded."""
        clean = self.latents - self.t_next * self.velocity
        images = to_images(self._autoencoder.decode(clean.reshape(clean.shape[0], *self._grid, -1)))
        return images[0] if self._single else images


LARGEST_REFERENCE = 1024 * 1024  # pixels; diffusers' cap


def prepare_reference(image: Image.Image) -> Image.Image:
    """Shrink to at most 1024² pixels and cut the edges, evenly, to multiples of 16: what diffusers does."""
    w, h = image.size
    if min(w, h) < 64 or max(w, h) > 8 * min(w, h):
        raise ValueError(f"A reference picture needs sides of at least 64 pixels and at most 8:1, this one is {w}×{h}.")
    image = image.convert("RGB")
    if w * h > LARGEST_REFERENCE:
        scale = math.sqrt(LARGEST_REFERENCE / (w * h))
        image = image.resize((int(w * scale), int(h * scale)), Image.Resampling.LANCZOS)
    w, h = image.size
    left, top = w % 16 // 2, h % 16 // 2
    return image.crop((left, top, left + w // 16 * 16, top + h // 16 * 16))


@dataclass(frozen=True)
class Request:
    """One call's wishes, checked and completed: everything the loop needs, everything a picture remembers."""

    model: str
    prompts: list[str]
    single: bool  # a lone prompt gives a lone picture
    references: list[Image.Image]
    width: int
    height: int
    steps: int
    guidance: float
    negative_prompt: str
    seeds: list[int]

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of latent tokens."""
        return self.height // 16, self.width // 16

    def describe(self, i: int) -> dict:
        """What made picture i, in the words of `Klein.__call__`."""
        return {
            "model": self.model, "prompt": self.prompts[i], "seed": self.seeds[i], "steps": self.steps,
            "guidance": self.guidance, "negative_prompt": self.negative_prompt,
            "width": self.width, "height": self.height, "references": len(self.references),
        }  # fmt: skip


def check_request(
    info: ModelInfo, prompt, images, width, height, steps, guidance, negative_prompt, seed
) -> Request:  # fmt: skip
    """Fill in the model's defaults and refuse what cannot work, each time with the way out."""
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    if not prompts or not all(isinstance(p, str) for p in prompts):
        raise ValueError("The prompt must be a sentence or a list of sentences.")
    images = [images] if isinstance(images, Image.Image) else images
    references = [prepare_reference(image) for image in images]
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
    return Request(
        info.name, prompts, isinstance(prompt, str), references, width, height, steps, guidance, negative_prompt, seeds
    )  # fmt: skip


class Klein:
    """A text-to-image and editing model: text encoder, transformer, autoencoder, and the loop that joins them.

    >>> klein = Klein.from_pretrained()
    >>> klein("a red circle above a blue square", seed=7)
    """

    def __init__(self, transformer: Transformer, autoencoder: Autoencoder, text_encoder: TextEncoder, tokenizer, info):
        self.transformer, self.autoencoder, self.text_encoder = transformer, autoencoder, text_encoder
        self.tokenizer, self.info = tokenizer, info

    @classmethod
    def from_pretrained(cls, name: str | Path = "nano", *, dtype: mx.Dtype | None = None) -> "Klein":
        """A bundled model ("nano", "nano-base"), a released one ("4b", …), a hub repository, or a local folder.

        dtype: how the transformer and the text encoder compute; bfloat16 on a GPU, float32 on a CPU if not given.
        """
        if dtype is None:
            dtype = mx.float32 if mx.default_device() == mx.Device(mx.cpu) else mx.bfloat16
        return cls(*load(find_folder(str(name)), str(name), dtype))

    def encode_prompt(self, prompt: str | list[str]) -> mx.array:
        """Text features (1, tokens, features), or one row per prompt of a list."""
        ids, mask = tokenize(self.tokenizer, [prompt] if isinstance(prompt, str) else prompt, self.info.tokens)
        return self.text_encoder(ids, mask)

    def __call__(
        self,
        prompt: str | Sequence[str],
        *,
        images: Sequence[Image.Image] = (),
        width: int | None = None,
        height: int | None = None,
        steps: int | None = None,
        guidance: float | None = None,
        negative_prompt: str = "",
        seed: int | Sequence[int] | None = None,
        noise: mx.array | None = None,
        progress: bool = True,
    ) -> Image.Image | list[Image.Image]:
        """Draw the prompt; with `images`, edit or combine them as the prompt says. A list of prompts gives a list.

        images: reference pictures, 1..n; the output takes the first one's size unless width and height are given.
        width, height: pixels, multiples of 16.
        steps, guidance: the model's own if not given. Guidance and negative_prompt need a base model.
        seed: one number (a batch counts up from it) or one per prompt; chosen if not given. See `picture_info`.
        noise: (b, n, 128) starting latents in place of the seeds' own.
        Raises ValueError, with the way out, if these do not go together.
        """
        request = check_request(self.info, prompt, images, width, height, steps, guidance, negative_prompt, seed)
        steps_taken = tqdm(
            self._run(request, noise), total=request.steps, disable=not progress, desc="drawing", leave=False
        )
        for step in steps_taken:
            latents = step.latents
        pictures = to_images(self.autoencoder.decode(latents.reshape(len(request.prompts), *request.grid, -1)))
        for i, picture in enumerate(pictures):
            picture.info["kleinlite"] = request.describe(i)
        return pictures[0] if request.single else pictures

    def stream(
        self, prompt, *, images=(), width=None, height=None, steps=None, guidance=None, negative_prompt="",
        seed=None, noise=None, progress=True,
    ) -> Iterator[Step]:  # fmt: skip
        """The same, one `Step` at a time: to watch, to stop early, or to look inside. Arguments as for a call."""
        request = check_request(self.info, prompt, images, width, height, steps, guidance, negative_prompt, seed)
        return iter(tqdm(self._run(request, noise), total=request.steps, disable=not progress, leave=False))

    def _run(self, request: Request, start: mx.array | None) -> Iterator[Step]:
        """The Euler loop of one request."""
        b, (gh, gw) = len(request.prompts), request.grid
        n = gh * gw
        x = mx.array(start) if start is not None else mx.concatenate([noise(seed, n) for seed in request.seeds])
        if x.shape != (b, n, 128):
            raise ValueError(
                f"The noise must have the shape {(b, n, 128)} (pictures, tokens, channels), not {x.shape}."
            )
        txt = self.encode_prompt(request.prompts)  # (b, m, features)
        ids, references = image_ids(gh, gw), None
        if request.references:
            grids = [(image.height // 16, image.width // 16) for image in request.references]
            latents = [self.autoencoder.encode(to_pixels(image)).reshape(1, -1, 128) for image in request.references]
            references = mx.repeat(mx.concatenate(latents, axis=1), b, axis=0)  # (b, tokens of all references, 128)
            ids = mx.concatenate([ids, reference_ids(grids)])
        rope = self.transformer.rope(ids, text_ids(txt.shape[1]))
        mx.eval(txt, rope, references if references is not None else ())

        def velocity(x, t, txt=txt):
            img = x if references is None else mx.concatenate([x, references], axis=1)
            return self.transformer(img.astype(txt.dtype), txt, t, rope=rope)[:, :n]

        if request.guidance > 1:
            without = mx.repeat(self.encode_prompt(request.negative_prompt), b, axis=0)
            field = lambda x, t: guide(velocity(x, t), velocity(x, t, without), request.guidance)
        else:
            field = velocity
        for step in euler(field, x, schedule(request.steps, n)):
            yield Step(*step, _grid=request.grid, _autoencoder=self.autoencoder, _single=request.single)


def save_picture(picture: Image.Image, path: str | Path) -> None:
    """Write a PNG that remembers what made it; in one move, so that no half-written file can be left."""
    path, chunk = Path(path), PngImagePlugin.PngInfo()
    if "kleinlite" in picture.info:
        chunk.add_itxt("kleinlite", json.dumps(picture.info["kleinlite"], ensure_ascii=False))
    partial = path.with_name(f".{path.name}.partial")
    try:
        picture.save(partial, format="PNG", pnginfo=chunk)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def picture_info(picture: Image.Image | str | Path) -> dict:
    """What made a picture: prompt, seed, model, steps, guidance, size. From the picture itself or its PNG file."""
    image = picture if isinstance(picture, Image.Image) else Image.open(picture)
    image.load()  # text chunks may come after the pixels
    if "kleinlite" not in image.info:
        raise ValueError("This picture does not say what made it: it was not written by kleinlite, or was saved again.")
    made = image.info["kleinlite"]
    try:
        return made if isinstance(made, dict) else json.loads(made)
    except ValueError:
        raise ValueError("What this picture says about itself is damaged: it was changed by another program.") from None
