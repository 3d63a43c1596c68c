"""The pipeline.

We join all parts: a prompt goes in, a picture comes out; and with reference pictures in, it edits.

Promoted from notebooks/06_pipeline.ipynb: edit there, then run `make promote`. (seal c0de5efc)
"""

import html
import json
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from PIL import Image, PngImagePlugin
from tokenizers import Tokenizer
from tqdm.auto import tqdm

from .autoencoder import Autoencoder, AutoencoderConfig
from .checkpoints import SMALL, Checkpoint, ModelInfo, open_checkpoint
from .cpu import STRIP
from .position_ids import image_ids, reference_ids, text_ids
from .quantisation import PACKINGS
from .sampling import euler, guide, noise, schedule
from .text_encoder import TextEncoder, TextEncoderConfig, tokenize
from .transformer import Transformer, TransformerConfig

__all__ = [
    "to_pixels",
    "to_images",
    "Step",
    "LARGEST_REFERENCE",
    "prepare_reference",
    "Request",
    "check_request",
    "Plan",
    "compute_dtype",
    "parameters",
    "memory_plan",
    "machine_memory",
    "check_memory",
    "bits_per_weight",
    "plan_request",
    "Parts",
    "parts_table",
    "encode_references",
    "velocity_field",
    "draw_steps",
    "Klein",
    "decode_in_tiles",
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


class Plan(NamedTuple):
    """The memory that a picture takes, in bytes: the weights of each part, and what each stage needs on top."""

    text_encoder: int
    transformer: int
    autoencoder: int
    encode: int
    step: int
    decode: int

    @property
    def least(self) -> int:
        """If each part is in memory only while it works: the largest of the three stages."""
        return max(self.text_encoder + self.encode, self.transformer + self.step, self.autoencoder + self.decode)

    @property
    def most(self) -> int:
        """If all parts stay."""
        return sum(self[:3]) + max(self[3:])


def compute_dtype() -> mx.Dtype:
    """bfloat16 on a GPU. On a CPU float32: MLX has no quick half-precision product there."""
    return mx.float32 if mx.default_device() == mx.Device(mx.cpu) else mx.bfloat16


@cache
def parameters(kind: type[nn.Module], cfg) -> int:
    """How many weights a network has. For the text encoder: those below its highest tap, no other is read."""
    if kind is TextEncoder:
        cfg = replace(cfg, layers=max(cfg.taps), tied=True)
    return sum(w.size for _, w in tree_flatten(kind(cfg).parameters()))


def memory_plan(
    cfg: TransformerConfig, text_cfg: TextEncoderConfig, vae_cfg: AutoencoderConfig, *, width: int, height: int,
    bits: float | tuple[float, float] = 16, references: int = 0, b: int = 1, cpu: bool | None = None,
) -> Plan:  # fmt: skip
    """What b pictures will take, predicted from the configs alone.

    bits: per weight, scales included; two numbers if the transformer and the text encoder differ.
    references: tokens of the reference pictures. cpu: whether to predict for a CPU; as MLX is set if not given.
    """
    cpu = compute_dtype() == mx.float32 if cpu is None else cpu
    of_transformer, of_text = bits if isinstance(bits, tuple) else (bits, bits)
    text, tokens = b * text_cfg.tokens, b * (text_cfg.tokens + width * height // 256 + references)
    size = 4 if cpu else 2  # bytes per number in flight; four in the decoder
    widest = 4 * b * width * height * max((vae_cfg.decoder_channels or vae_cfg.channels)[:2])
    return Plan(
        text_encoder=int(parameters(TextEncoder, text_cfg) * of_text / 8),
        transformer=int(parameters(Transformer, cfg) * of_transformer / 8),
        autoencoder=4 * parameters(Autoencoder, vae_cfg),
        encode=size * text_cfg.d * max(56 * text, 2 * text_cfg.d_mlp),
        step=size * cfg.d * max(72 * tokens, 9 * cfg.d),
        decode=8 * widest + 10 * STRIP if cpu else 6 * widest,
    )


def machine_memory() -> tuple[int, int]:
    """Bytes of memory here, and how many of them one program can count on."""
    found = mx.device_info()
    whole = found.get("memory_size") or found.get("total_memory")
    if not whole:  # a CPU on Linux
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return whole, int(found.get("max_recommended_working_set_size", 0.75 * whole))


def check_memory(plan: Plan, smaller: dict[int, Plan]) -> None:
    """Refuse what has no chance to fit, and name the most bits for which `smaller` has a plan that does."""
    whole, needed = machine_memory()[0], plan.least
    if needed > whole:
        told = f"This takes {needed / 1e9:.1f} GB of memory, and the machine has {whole / 1e9:.1f} GB"
        for bits, other in sorted(smaller.items(), reverse=True):
            if other.least <= whole:
                raise MemoryError(f"{told}: with quantize={bits} it takes {other.least / 1e9:.1f} GB.")
        raise MemoryError(f"{told}: draw a smaller picture, or take a smaller model.")


def bits_per_weight(checkpoint: Checkpoint) -> tuple[float, float]:
    """Of the transformer and of the text encoder, as they will be in memory. Headers are read, no weights."""
    if checkpoint.packing:
        return (checkpoint.packing.bits_per_weight,) * 2
    found = []
    for name, kind in (("transformer", Transformer), ("text_encoder", TextEncoder)):
        found.append(8.0 * checkpoint.dtype.size)  # at most: wider weights, and those of small parts, are cast
        if checkpoint.nbytes(name) >= SMALL:
            stored = [getattr(w, "tensors", {"": w}).values() for w in checkpoint.weights(name).values()]
            bits = 8 * sum(w.nbytes for arrays in stored for w in arrays)
            found[-1] = min(found[-1], bits / parameters(kind, checkpoint.parts[name][0]))
    return tuple(found)


def plan_request(checkpoint: Checkpoint, request: Request, bits: float | tuple[float, float]) -> Plan:
    """`memory_plan` for one call."""
    configs = [checkpoint.parts[part][0] for part in ("transformer", "text_encoder", "vae")]
    references = sum(image.width * image.height // 256 for image in request.references)
    size = {"width": request.width, "height": request.height, "b": len(request.prompts)}
    return memory_plan(*configs, bits=bits, references=references, **size)


class Parts:
    """A model's parts, read from their files when they are needed, and freed when what comes next needs the room.

    A part that you have asked for by its name, such as `klein.text_encoder`, is yours: it stays.
    """

    def __init__(self, checkpoint: Checkpoint, keep_loaded: bool = False):
        self.checkpoint, self.info, self.keep_loaded = checkpoint, checkpoint.info, keep_loaded
        self.bits = bits_per_weight(checkpoint)
        self._packed = next(({"quantize": q} for q, p in PACKINGS.items() if p == checkpoint.packing), {})
        self._parts, self._yours, self._features = {}, set(), {}  # in memory; asked for; of the last prompts

    def _part(self, name: str, yours: bool = False):
        """A part for the pipeline's own use."""
        if name not in self._parts:
            self._parts[name] = getattr(self.checkpoint, f"load_{name}")()
        if yours:
            self._yours.add(name)
        return self._parts[name]

    tokenizer: Tokenizer = property(lambda self: self._part("tokenizer", yours=True))
    text_encoder: TextEncoder = property(lambda self: self._part("text_encoder", yours=True))
    transformer: Transformer = property(lambda self: self._part("transformer", yours=True))
    autoencoder: Autoencoder = property(lambda self: self._part("autoencoder", yours=True))

    def _free(self, name: str) -> None:
        """Forget a part, unless it is to stay."""
        if not self.keep_loaded and name not in self._yours and self._parts.pop(name, None):
            mx.clear_cache()  # MLX keeps freed memory for itself; this hands it back

    def encode_prompt(self, prompt: str | list[str]) -> mx.array:
        """Text features (1, tokens, features), or one row per prompt of a list."""
        return self._encode([prompt] if isinstance(prompt, str) else prompt)[0]

    def _encode(self, *batches: list[str]) -> list[mx.array]:
        """The features of each batch of prompts; the text encoder is read at most once, and not if all are known."""
        known = {} if "text_encoder" in self._yours else self._features  # you may have changed what is yours
        found = {tuple(batch): known.get(tuple(batch)) for batch in batches}
        if any(features is None for features in found.values()):
            encoder = self._part("text_encoder")
            for prompts in found:
                found[prompts] = encoder(*tokenize(self._part("tokenizer"), list(prompts), self.info.tokens))
                mx.eval(found[prompts])  # or the features, not worked out yet, would hold on to the encoder
            del encoder
            self._free("text_encoder")
        self._features = dict([*known.items(), *found.items()][-4:])
        return [found[tuple(batch)] for batch in batches]


def parts_table(klein: Parts) -> str:
    """The parts of a model as an HTML table, for `Klein._repr_html_`."""
    kinds = {"text encoder": TextEncoder, "transformer": Transformer, "autoencoder": Autoencoder}
    bits, rows = (klein.bits[1], klein.bits[0], 32), ""
    for (name, kind), n in zip(kinds.items(), bits):
        count = parameters(kind, klein.checkpoint.parts["vae" if kind is Autoencoder else name.replace(" ", "_")][0])
        loaded = "yes" if name.replace(" ", "_") in klein._parts else "no"
        cells = name, f"{count:,}", f"{n:.3g} bits", f"{count * n / 8e6:,.0f} MB", loaded
        rows += "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    heads = "".join(
        f"<th>{head}</th>" for head in (html.escape(klein.info.name), "weights", "each", "memory", "loaded")
    )
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


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


def draw_steps(klein: "Klein", request: Request, start: mx.array | None = None) -> Iterator[Step]:
    """The Euler loop of one request, from its seeds' noise or from the latents in `start`."""
    b, (gh, gw) = len(request.prompts), request.grid
    n = gh * gw
    x = mx.array(start) if start is not None else mx.concatenate([noise(seed, n) for seed in request.seeds])
    if x.shape != (b, n, 128):
        raise ValueError(f"The noise must have the shape {(b, n, 128)} (pictures, tokens, channels), not {x.shape}.")
    plan = plan_request(klein.checkpoint, request, klein.bits)
    check_memory(
        plan, {q: plan_request(klein.checkpoint, request, PACKINGS[q].bits_per_weight) for q in (8, 6, 5, 4, 3)}
    )
    guided, references = request.guidance > 1, None
    txt, *others = klein._encode(request.prompts, *[[request.negative_prompt]] * guided)
    if request.references:
        references = encode_references(klein._part("autoencoder"), request.references, b)
    grids = [(image.height // 16, image.width // 16) for image in request.references]
    field = with_prompt = klein._field(txt, references, grids, (gh, gw))
    if guided:
        without = klein._field(mx.repeat(others[0], b, axis=0), references, grids, (gh, gw))
        field = lambda x, t: guide(with_prompt(x, t), without(x, t), request.guidance)
    try:
        for step in euler(field, x, schedule(request.steps, n)):
            yield Step(*step, _grid=request.grid, _autoencoder=klein._part("autoencoder"), _single=request.single)
    finally:
        if plan.most > machine_memory()[1]:  # the decoder, or the next prompt, wants the transformer's place
            field = with_prompt = without = None  # they hold it, too
            klein._free("transformer")


class Klein(Parts):
    """A text-to-image and editing model: text encoder, transformer, autoencoder, and the loop that joins them.

    >>> klein = Klein.from_pretrained()
    >>> klein("a red circle above a blue square", seed=7)
    """

    @classmethod
    def from_pretrained(
        cls, name: str | Path = "nano", *, quantize: int | str | None = None, dtype: mx.Dtype | None = None,
        parts: str | Path | dict[str, str | Path] | None = None, keep_loaded: bool = False,
    ) -> "Klein":  # fmt: skip
        """A bundled model ("nano", "nano-base"), a released one ("4b", …), a hub repository, or a local folder or file.

        quantize: bits per weight, 3, 4, 5, 6 or 8, or "mxfp4", "mxfp8" or "nvfp4"; as the files have them if not given.
        dtype: how the transformer and the text encoder compute; bfloat16 on a GPU, float32 on a CPU if not given.
        parts: the model that has a single file's other parts; or parts to replace, such as {"vae": "small-decoder"}.
        keep_loaded: keep the text encoder in memory between prompts.
        """
        checkpoint = open_checkpoint(name, dtype=dtype or compute_dtype(), quantize=quantize, parts=parts)
        if checkpoint.info.kv:
            from kleinlite.kv_cache import KleinKV as cls  # chapter 9 builds on this class
        return cls(checkpoint, keep_loaded)

    def __call__(
        self, prompt: str | Sequence[str], *, images: Sequence[Image.Image] = (), width: int | None = None,
        height: int | None = None, steps: int | None = None, guidance: float | None = None, negative_prompt: str = "",
        seed: int | Sequence[int] | None = None, noise: mx.array | None = None, progress: bool = True,
    ) -> Image.Image | list[Image.Image]:  # fmt: skip
        """Draw the prompt; with `images`, edit or combine them as the prompt says. A list of prompts gives a list.

        images: reference pictures, 1..n; the output takes the first one's size unless width and height are given.
        width, height: pixels, multiples of 16.
        steps, guidance: the model's own if not given. Guidance and negative_prompt need a base model.
        seed: one number (a batch counts up from it) or one per prompt; chosen if not given. See `picture_info`.
        noise: (b, n, 128) starting latents in place of the seeds' own.
        Raises ValueError, with the way out, if these do not go together.
        """
        request = check_request(self.info, prompt, images, width, height, steps, guidance, negative_prompt, seed)
        for step in tqdm(draw_steps(self, request, noise), "drawing", request.steps, leave=False, disable=not progress):
            latents = step.latents
        pictures = to_images(self._part("autoencoder").decode(latents.reshape(len(request.prompts), *request.grid, -1)))
        for i, picture in enumerate(pictures):
            picture.info["kleinlite"] = request.describe(i) | self._packed
        return pictures[0] if request.single else pictures

    def stream(
        self, prompt, *, images=(), width=None, height=None, steps=None, guidance=None, negative_prompt="",
        seed=None, noise=None, progress=True,
    ) -> Iterator[Step]:  # fmt: skip
        """The same, one `Step` at a time: to watch, to stop early, or to look inside. Arguments as for a call."""
        request = check_request(self.info, prompt, images, width, height, steps, guidance, negative_prompt, seed)
        return iter(tqdm(draw_steps(self, request, noise), "drawing", request.steps, leave=False, disable=not progress))

    _repr_html_ = parts_table

    def _field(self, txt, references, grids, grid) -> Callable[[mx.array, float], mx.array]:
        """`velocity_field` with this model's transformer. A model that works in another way has its own."""
        return velocity_field(self._part("transformer"), txt, references, grids, grid)


def decode_in_tiles(autoencoder: Autoencoder, latents: mx.array, tile: int = 32, overlap: int = 8) -> mx.array:
    """`Autoencoder.decode` in squares of `tile` tokens that fade over `overlap`: less memory, another picture.

    (b, gh, gw, 128) → (b, 16·gh, 16·gw, 3)
    """
    b, gh, gw, _ = latents.shape
    starts = lambda side: [*range(0, max(side - tile, 0), tile - overlap), max(side - tile, 0)]
    ramp = lambda n: mx.minimum(mx.minimum(mx.arange(1, n + 1), mx.arange(n, 0, -1)), 16 * overlap)
    pixels, weights = mx.zeros((b, 16 * gh, 16 * gw, 3)), mx.zeros((b, 16 * gh, 16 * gw, 1))
    for top in starts(gh):
        for left in starts(gw):
            part = autoencoder.decode(latents[:, top : top + tile, left : left + tile])
            h, w = part.shape[1:3]
            weight, there = (ramp(h)[:, None] * ramp(w))[None, ..., None], (16 * top, 16 * left)
            pixels[:, there[0] : there[0] + h, there[1] : there[1] + w] += weight * part
            weights[:, there[0] : there[0] + h, there[1] : there[1] + w] += weight
            mx.eval(pixels, weights)  # one tile at a time
    return pixels / weights


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
