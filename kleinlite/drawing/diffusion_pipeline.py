"""The call around the Euler loop: from arguments to pictures. Hand-written; `Klein` of chapter 6 gives it its loop."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from PIL import Image

from ..memory import compute_dtype
from ..models.opening import open_checkpoint
from .parts import Parts
from .request import Request, check_images, check_loading, check_request
from .thread import in_turn

__all__ = ["DiffusionPipeline"]


class DiffusionPipeline(Parts):
    """A model's parts, and the call that draws with them. A subclass prepares references and makes the steps."""

    @classmethod
    def from_pretrained(
        cls, name: str | Path = "nano", *, quantize: int | str | None = None, dtype: mx.Dtype | None = None,
        parts: str | Path | dict[str, str | Path] | None = None, keep_loaded: bool = False,
        loras: Sequence[str | Path | tuple[str | Path, float]] = (),
    ) -> "DiffusionPipeline":  # fmt: skip
        """A bundled model ("nano", "nano-base"), a released one ("4b", …), a hub repository, or a local folder or file.

        quantize: bits per weight, 3, 4, 5, 6 or 8, or "mxfp4", "mxfp8" or "nvfp4"; as the files have them if not given.
        dtype: how the transformer and the text encoder compute; bfloat16 on a GPU, float32 on a CPU if not given.
        parts: the model that has a single file's other parts; or parts to replace, such as {"vae": "small-decoder"}.
        keep_loaded: keep the text encoder in memory between prompts.
        loras: adapter files, each with a scale if not 1: ["dog.safetensors", ("style.safetensors", 0.7)]; see `loras`.
        """
        check_loading(name, quantize, dtype, parts, loras)
        dtype = dtype or compute_dtype()
        klein = in_turn(lambda: cls(open_checkpoint(name, dtype=dtype, quantize=quantize, parts=parts), keep_loaded))
        klein.loras.add_all(loras)
        return klein

    def __call__(
        self, prompt: str | Sequence[str], *, images: Sequence[Image.Image] = (), width: int | None = None,
        height: int | None = None, steps: int | None = None, guidance: float | None = None, negative_prompt: str = "",
        seed: int | Sequence[int] | None = None, noise: mx.array | None = None, progress: bool = True,
    ) -> Image.Image | list[Image.Image]:  # fmt: skip
        """Draw the prompt; with `images`, edit or combine them as the prompt says. A list of prompts gives a list.

        images: reference pictures, 1..n; the output takes the first one's size unless width and height are given.
        width, height: pixels, multiples of 16.
        steps, guidance: the model's own if not given. Guidance (1 is none) and negative_prompt need a base model;
        Z-Image takes them as its makers count, 0 is none, and no reference pictures.
        seed: one number (a batch counts up from it) or one per prompt; chosen if not given. See `picture_info`.
        noise: (b, n, 128) starting latents in place of the seeds' own; of Z-Image (b, n, 64).
        Raises ValueError, with the way out, if these do not go together, and MemoryError if this machine is too small.
        """
        request = self.check_request(
            prompt, images, width=width, height=height, steps=steps, guidance=guidance,
            negative_prompt=negative_prompt, seed=seed, noise=noise,
        )  # fmt: skip
        return self.draw(request, progress)

    def stream(
        self, prompt: str | Sequence[str], *, images: Sequence[Image.Image] = (), width: int | None = None,
        height: int | None = None, steps: int | None = None, guidance: float | None = None, negative_prompt: str = "",
        seed: int | Sequence[int] | None = None, noise: mx.array | None = None, progress: bool = True,
    ) -> Iterator[Any]:  # fmt: skip
        """The same as a call, one `Step` at a time: to watch, to stop early, or to look inside."""
        request = self.check_request(
            prompt, images, width=width, height=height, steps=steps, guidance=guidance,
            negative_prompt=negative_prompt, seed=seed, noise=noise,
        )  # fmt: skip
        return self.run(request, progress)

    def check_request(self, prompt: str | Sequence[str], images: Sequence[Image.Image] = (), **options: Any) -> Request:
        """The arguments of a call as a `Request`, or what is wrong with them; nothing is loaded for it."""
        references = [self.prepare_reference(image) for image in check_images(images)]
        request = check_request(self.info, prompt, references, **options)
        self.check_memory(request)
        return request

    def draw(self, request: Request, progress: bool = True) -> Image.Image | list[Image.Image]:
        """The picture of a request, or the list of them, each with what made it in its `info`."""
        return in_turn(self._draw, request, progress)

    def _draw(self, request: Request, progress: bool) -> Image.Image | list[Image.Image]:
        for step in self.run(request, progress):
            last = step
        pictures = last.preview()  # nothing is left to expect: it is the picture itself
        more = {"quantize": self.checkpoint.quantize} if self.checkpoint.quantize else {}
        if self.checkpoint.chosen:
            more = more | {"parts": self.checkpoint.chosen}
        if self.loras:
            more = more | {"loras": self.loras.metadata()}
        for i, picture in enumerate(pictures if request.batched else [pictures]):
            picture.info["kleinlite"] = request.metadata(i) | more
        return pictures

    def run(self, request: Request, progress: bool = True) -> Iterator[Any]:
        """`draw_steps` under a progress bar; where memory is short, the transformer is released at the end.

        Between two steps other threads may have their turn.
        """
        steps = self.draw_steps(request)
        try:
            count = range(request.steps)
            if progress:
                from tqdm.auto import tqdm  # slow to import

                count = tqdm(count, "drawing", leave=False)
            for _ in count:
                step = in_turn(next, steps)
                yield step._replace(preview=partial(in_turn, step.preview))
        finally:
            steps.close()  # or it would hold on to the transformer
            self.make_room(request)

    @staticmethod
    def prepare_reference(image: Image.Image) -> Image.Image:
        """The picture as it will be encoded."""
        raise NotImplementedError

    def draw_steps(self, request: Request) -> Iterator[Any]:
        """The loop: from noise to the picture, a step at a time, each with a `preview()`, which ends in the picture."""
        raise NotImplementedError
