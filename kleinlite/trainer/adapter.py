"""Train an adapter: everything encoded once, then steps that can be stopped at any time. Chapter 14 tells the idea.

Beside `dog.safetensors` stands a folder, `dog.training`, with the encoded examples, the state to go on from, and grids
of samples. The adapter itself is written anew each time, from the moving average of its weights.
"""

import hashlib
import itertools
import math
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_map
from PIL import Image

from ..errors import ExistingFileError, UserError
from ..files import check_replaceable, replace_file, spell, write_json
from ..inference.prompts import encode_each
from ..klein import Klein
from ..lora import attach, freeze_except, new_deltas
from ..models.adapters import open_adapter, write_adapter
from ..models.files import read_json
from ..pipeline import encode_references, guided_field, to_images, to_pixels, velocity_field
from ..position_ids import image_ids, reference_ids, text_ids
from ..quantization import QuantizedLinear
from ..sampling import euler, noise, schedule
from ..text_encoder import tokenize
from ..training import learning_rate, make_optimizer, shifted_times, velocity_loss
from ..transformer import Transformer
from .checkpointing import enable_gradient_checkpointing
from .folder import Example
from .run import Run, lock_folder, read_arrays, train_with_progress, write_arrays
from .settings import Settings, default_rate

SAMPLES = 4  # captions in the grid of samples
SAMPLE_STEPS = 20
SAMPLE_GUIDANCE = 4.0


class EncodedExamples:
    """The examples as features and latents, in files of a folder, worked out once and read when they are needed."""

    def __init__(self, klein: Klein, examples: Sequence[Example], folder: Path):
        self.captions = [folder / f"{i}-caption.safetensors" for i in range(len(examples))]
        self.pictures = [folder / f"{i}-pictures.safetensors" for i in range(len(examples))]
        self.empty = folder / "empty-caption.safetensors"  # the features of no prompt, for guidance
        sizes = [picture.size for picture in (examples[0].picture, *examples[0].references)]
        self.grid, *self.reference_grids = [(height // 16, width // 16) for width, height in sizes]
        captions = dict(zip([*self.captions, self.empty], [*(e.caption for e in examples), ""]))
        missing = [path for path in captions if not path.exists()]
        if missing:  # the text encoder's turn, then the autoencoder's; one caption in memory
            for txt, path in zip(encode_each(klein.parts, klein.info, ([captions[path]] for path in missing)), missing):
                assert isinstance(txt, mx.array)  # a list of rows is Z-Image's, which `plan_training` refuses
                write_arrays(path, {"txt": txt})
        for path, example in zip(self.pictures, examples):
            if not path.exists():
                write_arrays(path, encode_pictures(klein, example))

    def batch(self, rows: Sequence[int]) -> tuple[mx.array, mx.array, mx.array]:
        """clean (b, n, 128), references (b, r, 128) and txt (b, m, f) of these examples."""
        encoded = [read_arrays(self.pictures[row])[0] | read_arrays(self.captions[row])[0] for row in rows]
        clean, references, txt = (
            mx.concatenate([arrays[name] for arrays in encoded]) for name in ("clean", "references", "txt")
        )
        return clean, references, txt

    def rope(self, net: Transformer) -> tuple[mx.array, mx.array]:
        """The rotation table of all of them: they have one size."""
        ids = image_ids(*self.grid)
        if self.reference_grids:
            ids = mx.concatenate([ids, reference_ids(self.reference_grids)])
        return net.rope(ids, text_ids(read_arrays(self.empty)[0]["txt"].shape[1]))


def check_captions(klein: Klein, examples: Sequence[Example]) -> None:
    """Refuse a caption that has too many tokens, by the name of its file. Raises UserError."""
    for example in examples:
        try:
            tokenize(klein.tokenizer, [example.caption], klein.info.max_length)
        except UserError as error:
            raise UserError(f"{example.name}.txt: {error}") from None


def check_output(path: Path) -> None:
    """Refuse to replace a file that is not an adapter. Raises ExistingFileError, or UserError for an odd name."""
    spell(path)
    try:
        if check_replaceable(path) is not None:
            open_adapter(path)
    except (ValueError, OSError):
        raise ExistingFileError(f"{path} is there and is not an adapter: name another file.") from None


def encode_pictures(klein: Klein, example: Example) -> dict[str, mx.array]:
    """The latents (1, n, 128) of an example's picture, and those of its references, (1, r, 128)."""
    autoencoder = klein.parts.load("autoencoder")
    clean = autoencoder.encode(to_pixels(example.picture)).reshape(1, -1, 128)
    references = [z.flatten(1, 2) for z in encode_references(autoencoder, list(example.references), 1)]
    return {"clean": clean, "references": mx.concatenate(references, axis=1) if references else clean[:, :0]}


def accumulating_step(
    model: nn.Module, optimizer: optim.Optimizer, loss: Callable[..., mx.array]
) -> Callable[..., mx.array]:
    """Like `training_step`, but of several batches, one after the other, whose gradients make one step."""
    optimizer.init(model.trainable_parameters())
    gradients = nn.value_and_grad(model, lambda *batch: loss(model, *batch))
    quantized = any(isinstance(m, QuantizedLinear) for m in model.modules())
    if not (quantized and mx.default_device() == mx.Device(mx.cpu)):  # there, quantized products cannot be compiled
        gradients = mx.compile(gradients, inputs=[model.state], outputs=[model.state])

    def update(batches: Iterable[tuple[Any, ...]]) -> mx.array:
        losses = []
        total: Any = None
        for batch in batches:  # each opens its files when it is its turn
            value, grads = gradients(*batch)
            losses.append(value)
            total = grads if total is None else tree_map(mx.add, total, grads)
            mx.eval(value, total)  # one batch at a time in memory
        total, _ = optim.clip_grad_norm(tree_map(lambda g: g / len(losses), total), 1.0)
        optimizer.update(model, total)
        return mx.stack(losses).mean()

    return update


class LoraTrainer:
    """One training: a model, examples and settings, and the file that the adapter goes to."""

    def __init__(self, klein: Klein, examples: Sequence[Example], out: str | Path, settings: Settings):
        self.klein = klein
        self.settings = settings
        self.out = Path(spell(Path(out)))
        check_captions(klein, examples)
        self.folder = self.out.with_suffix(".training")
        self.count = len(examples)
        warmup = min(20, max(1, settings.steps // 10))
        rate = settings.rate or default_rate(klein.parts.configs.transformer.d)
        optimizer = make_optimizer(learning_rate(rate, settings.steps, warmup))
        with lock_folder(self.folder):  # another start would write the same files
            self.check_same_settings(examples)
            self.encoded = EncodedExamples(klein, examples, self.folder / "encoded")
            self.net = klein.parts.load("transformer")
            self.deltas = new_deltas(self.net, settings.rank, mx.random.key(settings.seed))
            attach(self.net, "new", self.deltas)
            freeze_except(self.net, self.deltas)
            enable_gradient_checkpointing(self.net)
            self.run = Run(self.folder / "state.safetensors", self.net, optimizer)
        self.rope = self.encoded.rope(self.net)
        n = math.prod(self.encoded.grid)  # from 0.5 at 256 tokens to 1.15 at 4096, as the makers shift the noise levels
        self.shift = math.exp(0.5 + (1.15 - 0.5) * (n - 256) / (4096 - 256))

    def check_same_settings(self, examples: Sequence[Example]) -> None:
        """Refuse to go on with another training's state, unless this one only takes more steps; write down what it is.

        What was written down before a first step, by a start that was refused or stopped, stands in nobody's way.
        """
        path = self.folder / "training.json"
        pixels = hashlib.sha256()
        for example in examples:
            for picture in (example.picture, *example.references):
                pixels.update(f"{example.caption} {picture.size}".encode() + picture.tobytes())
        klein = self.klein
        this = {"model": klein.info.name, "quantize": klein.info.chosen.get("quantize"), **asdict(self.settings)}
        this["examples"] = pixels.hexdigest()
        was = read_json(path) if path.exists() else this
        if was.get("steps", 0) < self.settings.steps:  # the learning rate falls anew, by the longer schedule
            was["steps"] = self.settings.steps
        if changed := ", ".join(name for name in this if was.get(name) != this[name]):
            if (self.folder / "state.safetensors").exists():
                raise UserError(
                    f"{self.folder} has a training with other settings ({changed}): delete it, or name another file."
                )
            shutil.rmtree(self.folder / "encoded", ignore_errors=True)
        write_json(path, this)

    def train(self) -> Path:
        """Go on until the last step; the adapter's file. Ctrl-C leaves everything to go on from."""
        s = self.settings
        with lock_folder(self.folder):
            step = self.run.step
            is_due = step == s.steps or (step > 0 and step % s.every == 0)
            if is_due and not (self.out.exists() and self.samples().exists()):
                self.report()  # the last start was killed before it could
            train_with_progress(
                self.run, s.steps, velocity_loss, self.batches, self.report, s.every, accumulating_step, self.out.stem
            )
        return self.out

    def batches(self, step: int) -> tuple[Iterator[tuple[Any, ...]]]:
        """What one step learns from, read one by one; it depends on the number of the step alone."""
        count = self.settings.accumulate
        return (map(self.batch, range(step * count, (step + 1) * count)),)

    def batch(self, number: int) -> tuple[mx.array | tuple[mx.array, mx.array], ...]:
        """The arguments of `velocity_loss`: other rows, noise and noise levels for each number."""
        s = self.settings
        rng = random.Random(f"{s.seed} {number}")
        clean, references, txt = self.encoded.batch(rng.choices(range(self.count), k=s.batch))
        k_time, k_noise = mx.random.split(mx.random.key(rng.randrange(2**32)))
        eps = mx.random.normal(clean.shape, key=k_noise).astype(txt.dtype)
        t = shifted_times(k_time, s.batch, self.shift)
        return clean.astype(txt.dtype), txt, t, eps, self.rope, references.astype(txt.dtype)

    def report(self) -> str:
        """Write the adapter and, as a sign that it is there, the samples."""
        now = self.net.trainable_parameters()
        self.net.update(self.run.average)  # the adapter is the moving average
        try:
            write_adapter(self.out, self.deltas, layout=self.settings.layout, trained=self.describe())
            with replace_file(self.samples()) as draft:
                self.draw_samples().save(draft, format="PNG")
        finally:
            self.net.update(now)
        return f"samples in {self.samples()}"

    def samples(self) -> Path:
        return self.folder / f"samples-{self.run.step:05}.png"

    def describe(self) -> dict[str, Any]:
        """What the adapter's header says of its training."""
        rank = self.settings.rank
        return {"model": self.klein.info.name, "steps": self.run.step, "rank": rank, "pictures": self.count}

    def draw_samples(self) -> Image.Image:
        """The first captions drawn from seed 0, with guidance, side by side."""
        gh, gw = self.encoded.grid
        empty = read_arrays(self.encoded.empty)[0]["txt"]
        pictures: list[Image.Image] = []
        for row in range(min(self.count, SAMPLES)):
            _, references, txt = self.encoded.batch([row])
            ends = itertools.accumulate(h * w for h, w in self.encoded.reference_grids)
            pieces = zip(mx.split(references, list(ends)[:-1], axis=1), self.encoded.reference_grids)
            shown = [tokens.reshape(1, *grid, 128) for tokens, grid in pieces]
            field = velocity_field(self.net, txt, (gh, gw), shown)
            without = velocity_field(self.net, empty, (gh, gw), shown)
            guided = guided_field([field, without], SAMPLE_GUIDANCE)
            for step in euler(guided, noise(0, gh * gw), schedule(SAMPLE_STEPS, gh * gw)):
                latents = step.latents
            pictures += to_images(self.klein.parts.load("autoencoder").decode(latents.reshape(1, gh, gw, -1)))
        width, height = pictures[0].size
        sheet = Image.new("RGB", (width * len(pictures), height))
        for i, picture in enumerate(pictures):
            sheet.paste(picture, (i * width, 0))
        return sheet
