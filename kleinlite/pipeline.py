"""The pipeline.

We join all parts: a prompt goes in, a picture comes out; and with reference pictures in, it edits.

Promoted from notebooks/06_pipeline.ipynb: edit there, then run `make promote`. (seal 02b0f545)
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import mlx.core as mx
from PIL import Image

from .autoencoder import Autoencoder
from .drawing.diffusion_pipeline import DiffusionPipeline
from .drawing.picture_file import to_rgb
from .drawing.request import Request
from .kv_cache import cached_velocity_field
from .position_ids import image_ids, reference_ids, text_ids
from .sampling import euler, guide, noise
from .transformer import Transformer

__all__ = [
    "to_pixels",
    "to_images",
    "Step",
    "LARGEST_REFERENCE",
    "prepare_reference",
    "encode_references",
    "velocity_field",
    "guided_field",
    "draw_steps",
    "Klein",
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


class Step(NamedTuple):
    """One Euler step of a running generation; `preview()` is the clean picture that the model expects from here."""

    index: int
    t: float
    t_next: float
    velocity: mx.array
    latents: mx.array
    preview: Callable[[], Image.Image | list[Image.Image]]


LARGEST_REFERENCE = 1024 * 1024  # pixels; diffusers' cap


def prepare_reference(image: Image.Image) -> Image.Image:
    """Shrink to at most 1024² pixels and cut the edges, evenly, to multiples of 16: what diffusers does."""
    image = to_rgb(image)
    w, h = image.size
    if min(w, h) < 64 or max(w, h) > 8 * min(w, h):
        raise ValueError(f"A reference picture needs sides of at least 64 pixels and at most 8:1, this one is {w}×{h}.")
    if w * h > LARGEST_REFERENCE:
        scale = math.sqrt(LARGEST_REFERENCE / (w * h))
        image = image.resize((int(w * scale), int(h * scale)), Image.Resampling.LANCZOS)
    w, h = image.size
    left, top = w % 16 // 2, h % 16 // 2
    return image.crop((left, top, left + w // 16 * 16, top + h // 16 * 16))


def encode_references(autoencoder: Autoencoder, images: list[Image.Image], b: int) -> mx.array:
    """The tokens of all pictures behind each other, the same for each of b drawings: (b, tokens, 128)"""
    latents = [autoencoder.encode(to_pixels(image)).reshape(1, -1, 128) for image in images]
    return mx.repeat(mx.concatenate(latents, axis=1), b, axis=0)


def velocity_field(
    transformer: Transformer,
    txt: mx.array,
    references: mx.array | None,
    grids: list[tuple[int, int]],
    grid: tuple[int, int],
) -> Callable[[mx.array, float], mx.array]:
    """Where to go from latents x at noise level t, as a function of (x, t), for a picture of `grid` tokens.

    txt: text features (b, m, f). references: (b, tokens, 128), whose pictures have these `grids` of tokens.
    """
    n, ids = grid[0] * grid[1], image_ids(*grid)
    if references is not None:
        ids = mx.concatenate([ids, reference_ids(grids)])
    rope = transformer.rope(ids, text_ids(txt.shape[1]))
    mx.eval(rope, references if references is not None else ())

    def velocity(x: mx.array, t: float) -> mx.array:
        img = x if references is None else mx.concatenate([x, references], axis=1)
        return transformer(img.astype(txt.dtype), txt, t, rope=rope)[:, :n]

    return velocity


def guided_field(klein: DiffusionPipeline, request: Request) -> Callable[[mx.array, float], mx.array]:
    """The velocity field of one request, with its references and its guidance."""
    b, references = len(request.prompts), None
    guided = request.guidance_scale > 1
    txt, *others = klein.encode_prompts(request.prompts, *[[request.negative_prompt] * b] * guided)
    if request.references:
        references = encode_references(klein.load("autoencoder"), request.references, b)
    make = klein.info.family.velocity_field or velocity_field  # another family, as chapter 14's, brings its own
    if klein.info.kv and request.references:
        make = cached_velocity_field
    grids, transformer = (request.reference_grids, request.grid), klein.load("transformer")
    with_prompt = make(transformer, txt, references, *grids)
    if not others:
        return with_prompt
    without = make(transformer, others[0], references, *grids)
    return lambda x, t: guide(with_prompt(x, t), without(x, t), request.guidance_scale)


def draw_steps(klein: DiffusionPipeline, request: Request) -> Iterator[Step]:
    """The Euler loop of one request: from its seeds' noise, or from its own, to the picture."""
    b, (gh, gw) = len(request.prompts), request.grid
    field = guided_field(klein, request)

    def decode(latents):
        images = to_images(klein.load("autoencoder").decode(latents.reshape(b, gh, gw, -1)))
        return images if request.batched else images[0]

    x = request.noise
    if x is None:
        x = mx.concatenate([noise(seed, gh * gw, klein.info.d_latent) for seed in request.seeds])
    for step in euler(field, x, klein.info.family.schedule(request.steps, gh * gw)):
        clean = step.latents - step.t_next * step.velocity  # lazy: worked out if somebody looks
        yield Step(*step, partial(decode, clean))


class Klein(DiffusionPipeline):
    """A text-to-image and editing model: text encoder, transformer, autoencoder, and the loop that joins them.

    >>> klein = Klein.from_pretrained()
    >>> klein("a red circle above a blue square", seed=7)
    """

    prepare_reference = staticmethod(prepare_reference)
    draw_steps = draw_steps

    def stream(
        self, prompt: str | Sequence[str], *, images: Sequence[Image.Image] = (), width: int | None = None,
        height: int | None = None, steps: int | None = None, guidance: float | None = None, negative_prompt: str = "",
        seed: int | Sequence[int] | None = None, noise: mx.array | None = None, progress: bool = True,
    ) -> Iterator[Step]:  # fmt: skip
        """The same as a call, one `Step` at a time: to watch, to stop early, or to look inside."""
        request = self.check_request(
            prompt, images, width=width, height=height, steps=steps, guidance=guidance,
            negative_prompt=negative_prompt, seed=seed, noise=noise,
        )  # fmt: skip
        return self.run(request, progress)
