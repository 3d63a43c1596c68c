"""Train an adapter: everything encoded once, then steps that can be stopped at any time. Chapter 14 tells the idea.

Beside `dog.safetensors` stands a folder, `dog.training`, with the encoded examples, the state to go on from, the loss
on held-out examples after so many steps, and grids of samples. The adapter itself is written anew each time, from the
moving average of its weights.
"""

import hashlib
import itertools
import math
import os
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_map
from PIL import Image

from ..errors import ExistingFileError, UserError
from ..files import check_disk_space, replace_file, write_json
from ..klein import Klein
from ..lora import attach, freeze_except, new_deltas
from ..models.describe import check_base
from ..models.files import read_json
from ..models.lora_files import open_adapter, write_adapter
from ..pipeline import encode_references, guided_field, to_images, to_pixels, velocity_field
from ..position_ids import image_ids, reference_ids, text_ids
from ..quantization import QuantizedLinear
from ..sampling import euler, noise, schedule
from ..text_encoder import tokenize
from ..training import learning_rate, shifted_times, velocity_loss
from ..transformer import Transformer
from .checkpointing import enable_gradient_checkpointing
from .folder import Example
from .run import Run, lock_folder, read_arrays, train_with_progress, write_arrays
from .settings import Settings, default_rate

LEVELS = (0.2, 0.4, 0.6, 0.8)  # noise levels at which held-out pictures are judged
FEW = 20  # of fewer examples none is held out
SAMPLES = 4  # captions in the grid of samples, held-out ones first
SAMPLE_STEPS = 20
SAMPLE_GUIDANCE = 4.0


class EncodedExamples:
    """The examples as latents and features, a file each in a folder, worked out once and read when they are needed."""

    def __init__(self, klein: Klein, examples: Sequence[Example], folder: Path):
        self.files = [folder / f"{i}.safetensors" for i in range(len(examples))]
        self.empty = folder / "empty.safetensors"  # the features of no prompt, for guidance
        sizes = [picture.size for picture in (examples[0].picture, *examples[0].references)]
        self.grid, *self.reference_grids = [(height // 16, width // 16) for width, height in sizes]
        text_cfg = klein.parts.configs.text_encoder
        n = math.prod(self.grid)
        r = sum(math.prod(grid) for grid in self.reference_grids)
        txt_shape = (1, text_cfg.max_length, text_cfg.d * len(text_cfg.out_layers))
        shapes = {"txt": txt_shape, "clean": (1, n, 128), "references": (1, r, 128)}
        missing = [(path, e) for path, e in zip(self.files, examples) if not is_encoded(path, shapes)]
        check_disk_space(folder, 4 * len(missing) * sum(math.prod(shape) for shape in shapes.values()))
        captions = [(path, example.caption) for path, example in missing]
        if not is_encoded(self.empty, {"txt": txt_shape}):
            captions.append((self.empty, ""))
        if captions:  # the text encoder's turn, then the autoencoder's; one caption in memory
            for txt, (path, _) in zip(klein._model.prompts.encode_each([caption] for _, caption in captions), captions):
                assert isinstance(txt, mx.array)  # a list of rows is Z-Image's, which `plan_training` refuses
                write_arrays(path, {"txt": txt})
        for path, example in missing:
            txt = read_arrays(path)[0]["txt"]
            mx.eval(txt)
            write_arrays(path, encode_pictures(klein, example) | {"txt": txt})

    def batch(self, rows: Sequence[int]) -> tuple[mx.array, mx.array, mx.array]:
        """clean (b, n, 128), references (b, r, 128) and txt (b, m, f) of these examples."""
        encoded = [read_arrays(self.files[row])[0] for row in rows]
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


def is_encoded(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a file holds arrays of these shapes; what is cut short or damaged is encoded again."""
    if not path.is_file():
        return False
    try:
        arrays, _ = read_arrays(path)
    except UserError:
        return False
    return {name: w.shape for name, w in arrays.items()} == shapes


def check_captions(klein: Klein, examples: Sequence[Example]) -> None:
    """Refuse a caption that has too many tokens, by the name of its file. Raises UserError."""
    for example in examples:
        try:
            tokenize(klein.tokenizer, [example.caption], klein.info.max_length)
        except UserError as error:
            raise UserError(f"{example.name}.txt: {error}") from None


def check_output(path: Path) -> None:
    """Refuse to replace a file that is not an adapter. Raises ExistingFileError."""
    if not os.path.lexists(path):
        return
    try:
        open_adapter(path)
    except (ValueError, OSError):
        raise ExistingFileError(f"{path} is there and is not an adapter: name another file.") from None


def encode_pictures(klein: Klein, example: Example) -> dict[str, mx.array]:
    """The latents (1, n, 128) of an example's picture, and those of its references, (1, r, 128)."""
    autoencoder = klein.parts.load("autoencoder")
    clean = autoencoder.encode(to_pixels(example.picture)).reshape(1, -1, 128)
    references = [z.flatten(1, 2) for z in encode_references(autoencoder, list(example.references), 1)]
    return {"clean": clean, "references": mx.concatenate(references, axis=1) if references else clean[:, :0]}


def split_examples(count: int, share: float | None, seed: int) -> tuple[list[int], list[int]]:
    """Rows to train on and rows that are held out, at least one of each; see `Settings` on a share of None."""
    rows = list(range(count))
    random.Random(seed).shuffle(rows)
    if share is None and count < FEW:
        return rows, []
    out = min(max(1, round((share or 0.1) * count)), count - 1)
    return sorted(rows[out:]), sorted(rows[:out])


def accumulating_step(count: int) -> Callable[..., Callable[..., mx.array]]:
    """Like `training_step`, but of `count` batches, one after the other, whose gradients make one step."""

    def make(model: nn.Module, optimizer: optim.Optimizer, loss: Callable[..., mx.array]) -> Callable[..., mx.array]:
        optimizer.init(model.trainable_parameters())
        gradients = nn.value_and_grad(model, lambda *batch: loss(model, *batch))
        quantized = any(isinstance(m, QuantizedLinear) for m in model.modules())
        if not (quantized and mx.default_device() == mx.Device(mx.cpu)):  # there, quantized products cannot be compiled
            gradients = mx.compile(gradients, inputs=[model.state], outputs=[model.state])

        def update(batches: Iterable[tuple[Any, ...]]) -> mx.array:
            value = mx.array(0.0)
            total: Any = None
            for batch in batches:  # each opens its files when it is its turn
                batch_loss, grads = gradients(*batch)
                total = grads if total is None else tree_map(mx.add, total, grads)
                value = value + batch_loss / count
                mx.eval(value, total)  # one batch at a time in memory
            total, _ = optim.clip_grad_norm(tree_map(lambda g: g / count, total), 1.0)
            optimizer.update(model, total)
            return value

        return update

    return make


class LoraTrainer:
    """One training: a model, examples and settings, and the file in which the adapter shall be."""

    def __init__(self, klein: Klein, examples: Sequence[Example], out: str | Path, settings: Settings):
        check_base(klein.info)
        self.klein = klein
        self.settings = settings
        self.out = Path(out)
        check_output(self.out)
        check_captions(klein, examples)
        self.folder = self.out.with_suffix(".training")
        self.rows, self.held_out = split_examples(len(examples), settings.held_out, settings.seed)
        warmup = min(20, max(1, settings.steps // 10))
        rate = settings.rate or default_rate(klein.parts.configs.transformer.d)
        optimizer = optim.AdamW(learning_rate(rate, settings.steps, warmup), weight_decay=1e-4)
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
        self.shift = settings.shift or math.exp(0.5 + (1.15 - 0.5) * (n - 256) / (4096 - 256))

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
        this = {"model": klein.info.name, "quantize": klein._model.checkpoint.quantize, **asdict(self.settings)}
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
            if self.run.step < s.steps:
                if self.run.step and self.run.step % s.every == 0 and not self.is_reported():
                    self.report()  # the last start was killed before it could
                step = accumulating_step(s.accumulate)
                train_with_progress(
                    self.run, s.steps, velocity_loss, self.batches, self.report, s.every, step, self.out.stem
                )
            else:
                self.report()  # there may be no file any more
        return self.out

    def batches(self, step: int) -> tuple[Iterator[tuple[Any, ...]]]:
        """What one step learns from, read one by one; it depends on the number of the step alone."""
        count = self.settings.accumulate
        return (map(self.batch, range(step * count, (step + 1) * count)),)

    def batch(self, number: int) -> tuple[mx.array | tuple[mx.array, mx.array], ...]:
        """The arguments of `velocity_loss`: other rows, noise and noise levels for each number."""
        s = self.settings
        rng = random.Random(f"{s.seed} {number}")
        clean, references, txt = self.encoded.batch(rng.choices(self.rows, k=s.batch))
        k_time, k_noise = mx.random.split(mx.random.key(rng.randrange(2**32)))
        eps = mx.random.normal(clean.shape, key=k_noise).astype(txt.dtype)
        t = shifted_times(k_time, s.batch, self.shift)
        return clean.astype(txt.dtype), txt, t, eps, self.rope, references.astype(txt.dtype)

    def report(self) -> str:
        """Write the adapter, the samples and the loss on held-out examples; the last two in words, too."""
        samples = self.folder / f"samples-{self.run.step:05}.png"
        now = self.net.trainable_parameters()
        self.net.update(self.run.average)  # the adapter is the moving average
        try:
            loss = self.validate()
            write_adapter(self.out, self.deltas, layout=self.settings.layout, trained=self.describe())
            with replace_file(samples) as draft:
                self.draw_samples().save(draft, format="PNG")
        finally:
            self.net.update(now)
        told = f"samples in {samples}"
        if loss is None:
            return told
        if not self.has_row():  # a training at its end only writes its files again
            with (self.folder / "held-out.csv").open("a", encoding="utf-8") as file:
                file.write(f"{self.run.step},{loss:.6f}\n")
        return f"held out {loss:.4f} of {len(self.held_out)} pictures, {told}"

    def has_row(self) -> bool:
        """Whether the loss on held-out examples after this step is written down."""
        path = self.folder / "held-out.csv"
        last = path.read_text(encoding="utf-8").split()[-1:] if path.exists() else []
        return bool(last) and last[0].startswith(f"{self.run.step},")

    def is_reported(self) -> bool:
        """Whether `report` has done its work for this step: its last file is there."""
        return self.has_row() if self.held_out else (self.folder / f"samples-{self.run.step:05}.png").exists()

    def describe(self) -> dict[str, Any]:
        """What the adapter's header says of its training; of a folder its name, not where it lies."""
        s = self.settings
        name = self.klein.info.name
        model = Path(name).resolve().name if Path(name).exists() else name
        return {"model": model, "steps": self.run.step, "rank": s.rank, "pictures": len(self.rows)}

    def validate(self) -> float | None:
        """The loss on held-out examples, at the same noise and noise levels each time; None if there are none."""
        if not self.held_out:
            return None
        losses = []
        for row in self.held_out:
            clean, references, txt = self.encoded.batch([row])
            for i, level in enumerate(LEVELS):
                eps = noise(1000 * row + i, clean.shape[1]).astype(clean.dtype)
                losses.append(velocity_loss(self.net, clean, txt, mx.array([level]), eps, self.rope, references))
                mx.eval(losses[-1])
        return sum(map(float, losses)) / len(losses)

    def draw_samples(self) -> Image.Image:
        """A few captions drawn from seed 0, with guidance, held-out ones first, side by side."""
        gh, gw = self.encoded.grid
        empty = read_arrays(self.encoded.empty)[0]["txt"]
        pictures: list[Image.Image] = []
        for row in [*self.held_out, *self.rows][:SAMPLES]:
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
