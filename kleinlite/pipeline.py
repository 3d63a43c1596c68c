"""The pipeline.

Five chapters built the parts. What does it take to turn a prompt into a picture with them, and a picture into an
edit?

Letters: b pictures, n picture tokens, m text tokens, H and W pixels, gh and gw rows and columns of tokens.

Sources: the call, its rounding and its references: diffusers' Flux2KleinPipeline. References as further tokens:
Labs et al. 2025 (FLUX.1 Kontext), arXiv 2506.15742.

Promoted from notebooks/06_pipeline.ipynb: edit there, then run `make promote`. (seal 5b17fe7a)
"""

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from PIL import Image

from .autoencoder import Autoencoder
from .position_ids import image_ids, reference_ids, text_ids
from .sampling import Field, classifier_free_guidance, euler, noise, noised, schedule
from .text_encoder import tokenize
from .transformer import AttentionFn, Transformer

__all__ = [
    "to_pixels", "to_images", "prepare_reference", "encode_references", "Grid", "velocity_field", "guided_field",
    "generate", "masked_field",
]  # fmt: skip


def to_pixels(image: Image.Image) -> mx.array:
    """A picture as (1, H, W, 3) in [-1, 1]."""
    rgb = image.convert("RGB")
    levels: Any = memoryview(rgb.tobytes())  # MLX reads any buffer, which its types do not say
    values = mx.array(levels).reshape(1, rgb.height, rgb.width, 3)
    return 2 * (values.astype(mx.float32) / 255) - 1


def to_images(pixels: mx.array) -> list[Image.Image]:
    """(b, H, W, 3), about [-1, 1] → b pictures, clamped and rounded to 8 bits as diffusers does."""
    levels: Any = mx.round(255 * mx.clip(pixels.astype(mx.float32) / 2 + 0.5, 0, 1)).astype(mx.uint8)
    return [Image.frombytes("RGB", (p.shape[1], p.shape[0]), bytes(memoryview(p))) for p in levels]


def prepare_reference(image: Image.Image) -> Image.Image:
    """Shrink to at most 1024² pixels and cut the edges, evenly, to multiples of 16: what diffusers does."""
    w, h = image.size
    if w * h > 1024 * 1024:
        scale = math.sqrt(1024 * 1024 / (w * h))
        image = image.resize((int(w * scale), int(h * scale)), Image.Resampling.LANCZOS)
    w, h = image.size
    left = w % 16 // 2
    top = h % 16 // 2
    return image.crop((left, top, left + w // 16 * 16, top + h // 16 * 16))


def encode_references(autoencoder: Autoencoder, images: list[Image.Image], b: int) -> list[mx.array]:
    """Each picture's latents, the same for each of b drawings: (b, gh, gw, 128)"""
    return [mx.repeat(autoencoder.encode(to_pixels(image)), b, axis=0) for image in images]


Grid = tuple[int, int]  # rows and columns of latent tokens


def velocity_field(
    transformer: Transformer,
    txt: mx.array,
    grid: Grid,
    references: Sequence[mx.array] = (),
    attention_fn: AttentionFn | None = None,
) -> Field:
    """Where to go from latents x at noise level t, for a picture of `grid` tokens.

    txt: text features (b, m, f). references: latents (b, gh, gw, 128), a picture each. attention_fn: instead of
    chapter 5's, to look inside.
    """
    n = grid[0] * grid[1]
    ids = image_ids(*grid)
    if references:
        ids = mx.concatenate([ids, reference_ids([(z.shape[1], z.shape[2]) for z in references])])
    tokens = [z.flatten(1, 2) for z in references]
    rope = transformer.rope(ids, text_ids(txt.shape[1]))
    mx.eval(rope, tokens)

    def velocity(x: mx.array, t: float, t_next: float = 0.0) -> mx.array:
        img = mx.concatenate([x, *tokens], axis=1)
        return transformer(img.astype(txt.dtype), txt, t, rope=rope, attention_fn=attention_fn)[:, :n]

    return velocity


def guided_field(fields: list[Field], guidance: float) -> Field:
    """One field alone, or the guided answer of two: with the prompt, and with the negative or empty one."""
    if len(fields) == 1:
        return fields[0]
    with_prompt, without = fields
    return lambda x, t, t_next: classifier_free_guidance(with_prompt(x, t, t_next), without(x, t, t_next), guidance)


def generate(
    model: Any, prompt: str, seed: int = 0, images: Sequence[Image.Image] = (), size: int = 96, steps: int = 4,
    guidance: float = 1.0,
) -> Image.Image:  # fmt: skip
    """Draw a prompt; with `images`, edit or combine them as the prompt says.

    model: anything with a tokenizer, a text_encoder, a transformer and an autoencoder. size: pixels a side, a multiple
    of 16. guidance: 1 for a distilled model; above 1 the velocity is evaluated twice, with the prompt and without.
    """
    grid = (size // 16, size // 16)
    n = grid[0] * grid[1]
    texts = [prompt, ""] if guidance > 1 else [prompt]
    m = model.text_encoder.cfg.max_length
    features = [model.text_encoder(*tokenize(model.tokenizer, [text], m)) for text in texts]
    pictures = [prepare_reference(image) for image in images]
    references = encode_references(model.autoencoder, pictures, 1)
    fields = [velocity_field(model.transformer, txt, grid, references) for txt in features]
    *_, last = euler(guided_field(fields, guidance), noise(seed, n), schedule(steps, n))
    return to_images(model.autoencoder.decode(last.latents.reshape(1, *grid, 128)))[0]


def masked_field(velocity: Field, clean: mx.array, eps: mx.array, mask: mx.array | None) -> Field:
    """A field that draws anew where the mask is 1, and where it is 0 leads to a picture's latents `clean` (b, n, c).

    eps: the noise of the walk (b, n, c). mask: (1, n, 1); None is 1 everywhere.
    Blending after each step (RePaint, Lugmayr et al. 2022, arXiv 2201.09865), written as a velocity.
    """
    if mask is None:
        return velocity

    def masked(x: mx.array, t: float, t_next: float) -> mx.array:
        back = (noised(clean, eps, t_next) - x) / (t_next - t)
        return back + mask * (velocity(x, t, t_next) - back)

    return masked
