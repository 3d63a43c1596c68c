"""`Klein`, the call that everybody makes: chapter 6's twenty lines, and what a program wants around them.

It loads parts and frees them, checks what is asked for, and lets a caller look on. A test draws by `generate` and by
`Klein`, and compares bytes.

b pictures · n picture tokens
"""

import inspect
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, Never, NoReturn, Unpack, overload

import mlx.core as mx
from PIL import Image
from tokenizers import Tokenizer

from .autoencoder import Autoencoder
from .errors import UserError
from .inference.fast_preview import preview_pixels
from .inference.loaded_model import LoadedModel
from .inference.loras import Loras, add_loras
from .inference.parts import Parts
from .inference.picture_file import remember
from .inference.picture_memory import MemoryPlan, compute_dtype
from .inference.request import OPENING, Options, Request, as_reference, check_names, check_request, name_options
from .inference.serialized import run_serialized
from .kv_cache import cached_velocity_field
from .models.checkpoint import ModelInfo, open_checkpoint
from .models.download import Access
from .models.families.taef2 import Taef2Config
from .pipeline import encode_references, guided_field, masked_field, to_images, velocity_field
from .sampling import Field, euler, noise, noised
from .sharding import shared_guidance
from .text_encoder import TextEncoder
from .transformer import AttentionFn, Transformer

__all__ = ["Klein", "Pictures", "Step", "as_reference"]

Pictures = Image.Image | list[Image.Image]  # of a prompt, or of a list of prompts


@dataclass(frozen=True, eq=False)
class Step:
    """One Euler step of a running generation, from noise level t to t_next.

    velocity: at t, guidance applied, (b, n, 128). latents: after the step, (b, n, 128).
    """

    index: int
    t: float
    t_next: float
    velocity: mx.array = field(repr=False)
    latents: mx.array = field(repr=False)
    decode: Callable[[mx.array, bool], Pictures] = field(repr=False)  # latents, and whether fast and roughly

    def preview(self, fast: bool = False) -> Pictures:
        """The clean picture that the model expects from here; after the last step, the picture itself.

        fast: by one matrix instead of the decoder: as large, but blurred, and next to no work.
        """
        return run_serialized(lambda: self.decode(self.latents - self.t_next * self.velocity, fast))


def progress_bar(steps: int, show: bool) -> Iterator[int]:
    """The numbers of the steps, if `show` says so under a bar, which speaks before the first step is done."""
    if not show:
        yield from range(steps)
        return
    from tqdm.auto import tqdm  # slow to import

    bar = tqdm(range(steps), "loading, reading the prompt", leave=False)
    for number in bar:
        yield number
        bar.set_description("drawing", refresh=False)


class Klein:
    """A text-to-image and editing model: text encoder, transformer, autoencoder, and the loop that joins them.

    >>> klein = Klein.from_pretrained()
    >>> image = klein("a red house under a yellow sun", seed=7, progress=False)
    >>> image.size
    (96, 96)
    """

    def __init__(self, model: LoadedModel | None = None):
        if not isinstance(model, LoadedModel):
            name = "" if model is None else repr(model)
            raise UserError(f"Klein({name}) has no model: say Klein.from_pretrained({name}).")
        self._model = model

    def __reduce__(self) -> NoReturn:
        way_out = f"where you want another, say Klein.from_pretrained({self.info.name!r})"
        raise UserError(f"A Klein holds a model in this process's memory, and is not copied or pickled: {way_out}.")

    @classmethod
    def from_pretrained(
        cls, name: str | Path = "nano", *, quantize: int | str | None = None, dtype: mx.Dtype | str | None = None,
        parts: str | Path | dict[str, str | Path] | None = None, keep_loaded: bool = False,
        loras: Sequence[str | Path | tuple[str | Path, float]] = (), group: mx.distributed.Group | None = None,
        revision: str | None = None, token: str | bool | None = None, cache_dir: str | Path | None = None,
        local_files_only: bool = False, **unknown: Never,
    ) -> "Klein":  # fmt: skip
        """A bundled model ("nano", "nano-base", "critters"), a released one ("4b", …), a repository, folder or file.

        quantize: bits per weight, 3, 4, 5, 6 or 8, or "mxfp4", "mxfp8" or "nvfp4"; as the files have them if not given.
        dtype: how the transformer and the text encoder compute, mx.float32 or "float32"; bfloat16 on a GPU, float32 on
        a CPU if not given, where weights in bfloat16 may still be multiplied as such (see `info.product`).
        parts: the model with a single file's other parts; or parts to replace, as in {"autoencoder": "small-decoder"}.
        keep_loaded: keep every part in memory once it is read.
        loras: adapter files, each with a scale if not 1: ["dog.safetensors", ("style.safetensors", 0.7)]; see `loras`.
        group: several machines that draw each picture together, all with the same calls: `mx.distributed.init()`.
        revision, token, cache_dir, local_files_only: as in huggingface_hub, for what is fetched from there.
        Raises UserError, FileError or HubError with the way out.
        """
        check_names(unknown, [*inspect.signature(cls.from_pretrained).parameters][:-1], OPENING, "from_pretrained")
        kind = getattr(mx, dtype, None) if isinstance(dtype, str) else dtype
        if dtype is not None and not (isinstance(kind, mx.Dtype) and mx.issubdtype(kind, mx.floating)):
            raise UserError(f"dtype must be mx.float32, mx.bfloat16 or mx.float16, not {dtype!r}.")
        if isinstance(loras, (str, Path, dict)):
            raise UserError(f"loras must be a list of files, or of (file, scale), not {str(loras)!r}.")
        access = Access(revision, token, cache_dir, local_files_only)
        checkpoint = run_serialized(
            open_checkpoint, str(name), dtype=kind or compute_dtype(), quantize=quantize, parts=parts, access=access
        )
        exact = kind is not None and kind == mx.float32
        model = run_serialized(LoadedModel, checkpoint, keep_loaded, group, exact)
        add_loras(model.loras, loras)
        return cls(model)

    @overload
    def __call__(self, prompt: str, **options: Unpack[Options]) -> Image.Image: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, prompt: Sequence[str], **options: Unpack[Options]) -> list[Image.Image]: ...
    @name_options
    def __call__(self, prompt: str | Sequence[str], **options: Unpack[Options]) -> Pictures:
        """Draw the prompt; with `images`, edit or combine them as the prompt says. A list of prompts gives a list.

        images: a reference picture or several; the first gives the size, unless width and height do.
        mask: what of images[0] is drawn anew: white is, black stays to the bit, gray blends; of the picture's size.
        strength: how much of images[0] is drawn anew, up to 1 (all, the default): int(steps - steps·strength) steps are
        left out. With four steps it has four values: above 0.75 all, above 0.5 three, above 0.25 two, else one.
        extend: pixels to add to images[0]: left, top, right, bottom.
        width, height: pixels, multiples of 16; with mask, strength or extend images[0] says them.
        steps: evaluations of the model on the way out of the noise.
        guidance: how far to follow the prompt. Base models: 1 is none. Z-Image: 0 is none. Distilled models refuse it.
        negative_prompt: what to stay away from; acts through guidance.
        seed: one number (a batch counts up from it) or one per prompt; a random one if not given.
        noise: starting latents (b, n, 128) instead of the seeds' own; of Z-Image (b, n, 64).
        progress: whether to show a bar.

        Each picture remembers what made it, in every PNG file that it is saved to: see `picture_info`.
        Raises UserError, with the way out, if the options do not go together, and MemoryLimitError if this machine is
        too small.
        """
        for step in self.stream(prompt, **options):
            last = step
        return last.preview()

    @name_options
    def stream(
        self, prompt: str | Sequence[str], *, attention_fn: AttentionFn | None = None, **options: Unpack[Options]
    ) -> Iterator[Step]:
        """The same as a call, one `Step` at a time: to watch, to stop early, or to look inside.

        attention_fn: instead of chapter 5's `roped_attention`, in every block; see `kleinlite.inside`.
        """
        return self._run(self._check(prompt, options), options, attention_fn)

    def encode_prompt(self, prompt: str | list[str]) -> mx.array | list[mx.array]:
        """Text features (1, tokens, features), or a row per prompt of a list; of Z-Image a list: lengths differ."""
        return self._model.prompts.encode(prompt)

    @name_options
    def plan_memory(self, prompt: str | Sequence[str] = "", **options: Unpack[Options]) -> MemoryPlan:
        """The bytes that this call would take, stage by stage; nothing is loaded for it."""
        return self._model.plan_memory(check_request(self.info, prompt, options))

    def release(self) -> None:
        """Take all parts out of memory; what needs one reads it again."""
        self._model.release_all()

    def _check(self, prompt: str | Sequence[str], options: Options) -> Request:
        request = check_request(self.info, prompt, options)
        request = self._model.cluster.agree(request, seeded=options.get("seed") is not None)
        self._model.check_memory(request)
        return request

    def _run(self, request: Request, options: Options, attention_fn: AttentionFn | None) -> Iterator[Step]:
        """The steps under a progress bar; other threads may have their turn between two of them."""
        steps = self._steps(request, attention_fn)
        try:
            for _ in progress_bar(request.steps - request.skipped_steps, options.get("progress", True)):
                yield self._model.run(next, steps)
        finally:
            steps.close()  # or it would hold on to the transformer
            self._model.offload_if_needed(request)

    def _steps(self, request: Request, attention_fn: AttentionFn | None = None) -> Generator[Step, None, None]:
        """The Euler loop of one request: from its seeds' noise, or from its own, to the picture.

        A picture to be changed is mixed with the noise first, and where its mask is black the walk leads back to it.
        """
        velocity = self._velocity_field(request, attention_fn)
        n = math.prod(request.grid)
        x = request.noise
        if x is None:
            x = mx.concatenate([noise(seed, n, self.info.d_latent) for seed in request.seeds])
        sigmas = self.info.family.schedule(request.steps, n)[request.skipped_steps :]
        if request.change:
            (clean,) = encode_references(self._model.parts.load("autoencoder"), [request.change.canvas], len(x))
            clean = clean.flatten(1, 2)
            velocity = masked_field(velocity, clean, x, request.change.token_mask())
            x = noised(clean, x, sigmas[0])
        decode = partial(self._decode, request)
        for step in euler(velocity, x, sigmas):
            yield Step(*step, decode if step.t_next else partial(self._finish, request))

    def _velocity_field(self, request: Request, attention_fn: AttentionFn | None = None) -> Field:
        """Everything that stays the same from step to step, prepared: features, references, positions."""
        prompts = [request.prompts]
        if request.guidance_scale > 1:
            prompts.append([request.negative_prompt] * len(request.prompts))
        group = self._model.cluster.guidance_group if len(prompts) == 2 else None
        if group:
            prompts = [prompts[group.rank()]]  # the other machine works out the other answer
        make: Callable[..., Field] = self.info.family.velocity_field or velocity_field
        if request.references and self.info.kv:
            make = cached_velocity_field
        more: dict[str, Any] = {"attention_fn": attention_fn} if attention_fn else {}
        if attention_fn and make is not velocity_field:
            raise UserError(f"{self.info.name} has an attention of its own here, and takes no attention_fn.")
        features = self._model.prompts.encode_batches(*prompts)
        if request.references:
            autoencoder = self._model.parts.load("autoencoder")
            more["references"] = encode_references(autoencoder, request.references, len(request.prompts))
            mx.eval(more["references"])
        transformer = self._model.parts.load("transformer")
        fields = [make(transformer, txt, request.grid, **more) for txt in features]
        if group:
            return shared_guidance(fields[0], request.guidance_scale, group)
        velocity = guided_field(fields, request.guidance_scale)
        if attention_fn or self._model.cluster.group or mx.default_device() == mx.Device(mx.cpu):
            return velocity
        mx.eval(transformer.parameters())  # or every step would read them from their files
        graph: Any = mx.compile(velocity)  # small operations joined into a few kernels
        return lambda x, t, t_next: graph(x, mx.array(t), mx.array(t_next))  # of numbers, each step had its own graph

    def _decode(self, request: Request, latents: mx.array, fast: bool = False) -> Pictures:
        """The pictures of latents (b, n, c), as many as the request asks for."""
        grid = latents.reshape(len(latents), *request.grid, -1)
        if fast and not isinstance(self._model.checkpoint.configs.autoencoder, Taef2Config):  # which is quick itself
            small = to_images(preview_pixels(self._model.preview_matrix(), grid))
            images = [image.resize((request.width, request.height), Image.Resampling.BICUBIC) for image in small]
        else:
            images = self._model.run(lambda: to_images(self._model.parts.load("autoencoder").decode(grid)))
        if request.box:
            images = [image.crop(request.box) for image in images]
        if request.change:
            images = [request.change.paste(image) for image in images]
        return images if request.batched else images[0]

    def _finish(self, request: Request, latents: mx.array, fast: bool = False) -> Pictures:
        """The pictures after the last step, each with what made it in its `info`."""
        self._model.check_finite(latents)
        pictures = self._decode(request, latents, fast)
        for i, picture in enumerate(pictures if isinstance(pictures, list) else [pictures]):
            remember(picture, request.metadata(i) | self._model.metadata())
        return pictures

    def __repr__(self) -> str:
        adapters = f", loras={self.loras}" if self.loras else ""
        return f"Klein({self.info.name!r}, {self.info.size}×{self.info.size}, {self.info.steps} steps{adapters})"

    def _repr_html_(self) -> str:
        """A table of the parts, which a notebook shows for a model."""
        rows = [(escape(self.info.name), "weights", "each", "memory", "loaded"), *self._model.summary()]
        return "<table>" + "".join(f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in rows) + "</table>"

    @property
    def info(self) -> ModelInfo:
        """What the model's files say of it: name, distilled or not, size, steps, guidance."""
        return self._model.info

    @property
    def loras(self) -> Loras:
        """The adapters in use and their scales."""
        return self._model.loras

    @property
    def parts(self) -> Parts:
        """What is in memory, for those who build on it: .configs, .loaded, .load(name), .release(name)."""
        return Parts(self._model.parts)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._model.parts.pin("tokenizer")

    @property
    def text_encoder(self) -> TextEncoder:
        """The text encoder; once asked for, a part stays in memory, with your changes to it."""
        return self._model.parts.pin("text_encoder")

    @property
    def transformer(self) -> Transformer:
        return self._model.parts.pin("transformer")

    @property
    def autoencoder(self) -> Autoencoder:
        return self._model.parts.pin("autoencoder")
