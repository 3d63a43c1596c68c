"""The pipeline.

We join all parts: a prompt goes in, a picture comes out; and with reference pictures in, it edits.

Promoted from notebooks/06_pipeline.ipynb: edit there, then run `make promote`. (seal 689bd808)
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import mlx.core as mx
from PIL import Image

from .autoencoder import Autoencoder
from .drawing.compiled import compile_on_gpu
from .drawing.diffusion_pipeline import DiffusionPipeline
from .drawing.picture_file import check_reference_size, to_rgb
from .drawing.request import Request
from .kv_cache import cached_velocity_field
from .position_ids import image_ids, reference_ids, text_ids
from .sampling import euler, guide, noise
from .transformer import Transformer

__all__ = [
    "to_pixels",
    "to_images",
    "Step",
    "prepare_reference",
    "encode_references",
    "Grid",
    "Field",
    "velocity_field",
    "guided_field",
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


def prepare_reference(image: Image.Image) -> Image.Image:
    """Shrink to at most 1024² pixels and cut the edges, evenly, to multiples of 16: what diffusers does."""
    image = check_reference_size(to_rgb(image))
    w, h = image.size
    if w * h > 1024 * 1024:
        scale = math.sqrt(1024 * 1024 / (w * h))
        image = image.resize((int(w * scale), int(h * scale)), Image.Resampling.LANCZOS)
    w, h = image.size
    left, top = w % 16 // 2, h % 16 // 2
    return image.crop((left, top, left + w // 16 * 16, top + h // 16 * 16))


def encode_references(autoencoder: Autoencoder, images: list[Image.Image], b: int) -> mx.array:
    """The tokens of all pictures behind each other, the same for each of b drawings: (b, tokens, 128)"""
    latents = [autoencoder.encode(to_pixels(image)).reshape(1, -1, 128) for image in images]
    return mx.repeat(mx.concatenate(latents, axis=1), b, axis=0)


Grid = tuple[int, int]  # rows and columns of latent tokens
Field = Callable[[mx.array, float], mx.array]  # x, t → velocity


def velocity_field(
    transformer: Transformer, txt: mx.array, references: mx.array | None, grids: list[Grid], grid: Grid
) -> Field:
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


def guided_field(klein: DiffusionPipeline, request: Request) -> Field:
    """The velocity field of one request, with its references and its guidance."""
    prompts, b, references = [request.prompts], len(request.prompts), None
    if request.guidance_scale > 1:
        prompts.append([request.negative_prompt] * b)
    features = klein.encode_prompts(*prompts)
    make = klein.info.family.velocity_field or velocity_field
    if request.references:
        references = encode_references(klein.load("autoencoder"), request.references, b)
        make = cached_velocity_field if klein.info.kv else make
    transformer = klein.load("transformer")
    fields = [make(transformer, txt, references, request.reference_grids, request.grid) for txt in features]
    fields = [compile_on_gpu(field, transformer) for field in fields]
    if len(fields) == 1:
        return fields[0]
    return lambda x, t: guide(*(field(x, t) for field in fields), request.guidance_scale)


class Klein(DiffusionPipeline):
    """A text-to-image and editing model: text encoder, transformer, autoencoder, and the loop that joins them.

    >>> klein = Klein.from_pretrained()
    >>> klein("a red circle above a blue square", seed=7)
    """

    prepare_reference = staticmethod(prepare_reference)

    def draw_steps(self, request: Request) -> Iterator[Step]:
        """The Euler loop of one request: from its seeds' noise, or from its own, to the picture."""
        field, n, x = guided_field(self, request), math.prod(request.grid), request.noise
        if x is None:
            x = mx.concatenate([noise(seed, n, self.info.d_latent) for seed in request.seeds])
        for step in euler(field, x, self.info.family.schedule(request.steps, n)):
            clean = step.latents - step.t_next * step.velocity  # lazy: worked out if somebody looks
            yield Step(*step, partial(self.decode_latents, clean, request))

    def decode_latents(self, latents: mx.array, request: Request) -> Image.Image | list[Image.Image]:
        """The pictures of latents (b, n, c), as many as the request asks for."""
        grid = latents.reshape(len(latents), *request.grid, -1)
        images = to_images(self.load("autoencoder").decode(grid))
        return images if request.batched else images[0]
