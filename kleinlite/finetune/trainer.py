"""Train an adapter: everything encoded once, then steps that can be stopped at any time. Chapter 13 tells the idea.

Beside `dog.safetensors` stands a folder, `dog.training`, with the encoded examples, the state to go on from, the loss
on held-out examples after so many steps, and grids of samples. The adapter itself is written anew each time, from the
moving average of its weights.
"""

import hashlib
import json
import math
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_map
from PIL import Image

from ..lora import attach, new_changes, recompute_blocks, train_only, velocity_loss
from ..models.adapters import write_adapter
from ..models.files import read_json
from ..nano.run import Run, lock_folder, read_step, train_with_progress, write_arrays
from ..pipeline import Klein, encode_references, to_images, to_pixels, velocity_field
from ..position_ids import image_ids, reference_ids, text_ids
from ..quantisation import PackedLinear
from ..sampling import euler, guide, noise, schedule
from ..training import learning_rate, shifted_times
from ..transformer import Transformer
from .folder import Example
from .plan import check_base
from .settings import Settings

LEVELS = (0.2, 0.4, 0.6, 0.8)  # noise levels at which held-out pictures are judged
SAMPLES = 4  # captions in the grid of samples, held-out ones first
SAMPLE_STEPS, SAMPLE_GUIDANCE = 20, 4.0


class EncodedExamples:
    """The examples as latents and features, a file each in a folder, worked out once and read when they are needed."""

    def __init__(self, klein: Klein, examples: Sequence[Example], folder: Path):
        self.files = [folder / f"{i}.safetensors" for i in range(len(examples))]
        self.empty = folder / "empty.safetensors"  # the features of no prompt, for guidance
        sizes = [picture.size for picture in (examples[0].picture, *examples[0].references)]
        self.grid, *self.reference_grids = [(height // 16, width // 16) for width, height in sizes]
        missing = [(path, e) for path, e in zip(self.files, examples) if not path.exists()]
        if missing or not self.empty.exists():
            features = klein.encode_prompts(*([e.caption] for _, e in missing), [""])
            write_arrays(self.empty, {"txt": features.pop()})
            for (path, example), txt in zip(missing, features):
                write_arrays(path, encode_pictures(klein, example) | {"txt": txt})

    def batch(self, rows: Sequence[int]) -> tuple[mx.array, mx.array, mx.array]:
        """clean (b, n, 128), references (b, r, 128) and txt (b, m, f) of these examples."""
        found = [mx.load(str(self.files[row])) for row in rows]
        return tuple(mx.concatenate([each[name] for each in found]) for name in ("clean", "references", "txt"))

    def rope(self, net: Transformer) -> tuple[mx.array, mx.array]:
        """The rotation table of all of them: they have one size."""
        ids = image_ids(*self.grid)
        if self.reference_grids:
            ids = mx.concatenate([ids, reference_ids(self.reference_grids)])
        return net.rope(ids, text_ids(mx.load(str(self.empty))["txt"].shape[1]))


def encode_pictures(klein: Klein, example: Example) -> dict[str, mx.array]:
    """The latents (1, n, 128) of an example's picture, and those of its references, (1, r, 128)."""
    vae = klein.load("autoencoder")
    clean = vae.encode(to_pixels(example.picture)).reshape(1, -1, 128)
    references = encode_references(vae, list(example.references), 1) if example.references else clean[:, :0]
    return {"clean": clean, "references": references}


def split_examples(count: int, share: float, seed: int) -> tuple[list[int], list[int]]:
    """Rows to train on and rows that are held out, at least one of each."""
    rows = list(range(count))
    random.Random(seed).shuffle(rows)
    out = min(max(1, round(share * count)), count - 1)
    return sorted(rows[out:]), sorted(rows[:out])


def accumulating_step(count: int) -> Callable:
    """Like `training_step`, but of `count` batches, one after the other, whose gradients make one step."""

    def make(model: nn.Module, optimizer: optim.Optimizer, loss: Callable[..., mx.array]) -> Callable:
        optimizer.init(model.trainable_parameters())
        gradients = nn.value_and_grad(model, lambda *batch: loss(model, *batch))
        packed = any(isinstance(m, PackedLinear) for m in model.modules())
        if not (packed and mx.default_device() == mx.Device(mx.cpu)):  # there, packed products cannot be compiled
            gradients = mx.compile(gradients, inputs=[model.state], outputs=[model.state])

        def update(*batches: tuple) -> mx.array:
            value, total = 0.0, None
            for batch in batches:
                loss, grads = nn.average_gradients(gradients(*batch))
                total = grads if total is None else tree_map(mx.add, total, grads)
                value = value + loss / count
                mx.eval(value, total)  # one batch at a time in memory
            total, _ = optim.clip_grad_norm(tree_map(lambda g: g / count, total), 1.0)
            optimizer.update(model, total)
            return value

        return update

    return make


class LoraTrainer:
    """One training: a model, examples and settings, and the file in which the adapter shall be."""

    def __init__(self, klein: Klein, examples: Sequence[Example], out: str | Path, settings: Settings):
        check_base(klein.info.name, klein.info.distilled)
        self.klein, self.settings, self.out = klein, settings, Path(out)
        self.folder = self.out.with_suffix(".training")
        self.rows, self.held_out = split_examples(len(examples), settings.held_out, settings.seed)
        warmup = min(20, max(1, settings.steps // 10))
        optimizer = optim.AdamW(learning_rate(settings.rate, settings.steps, warmup), weight_decay=1e-4)
        with lock_folder(self.folder):  # another start would write the same files
            self.check_same_settings(examples)
            self.encoded = EncodedExamples(klein, examples, self.folder / "encoded")
            self.net = klein.load("transformer")
            self.changes = new_changes(self.net, settings.rank, mx.random.key(settings.seed))
            attach(self.net, "new", self.changes)
            train_only(self.net, self.changes)
            recompute_blocks(self.net)
            self.run = Run(self.folder / "state.safetensors", self.net, optimizer)
        self.rope = self.encoded.rope(self.net)
        n = math.prod(self.encoded.grid)  # from 0.5 at 256 tokens to 1.15 at 4096, as the makers shift the noise levels
        self.shift = settings.shift or math.exp(0.5 + (1.15 - 0.5) * (n - 256) / (4096 - 256))

    def check_same_settings(self, examples: Sequence[Example]) -> None:
        """Refuse to go on with another training's state; write down what this one is.

        What was written down before a first step, by a start that was refused or stopped, stands in nobody's way.
        """
        path, pixels = self.folder / "training.json", hashlib.sha256()
        for example in examples:
            for picture in (example.picture, *example.references):
                pixels.update(f"{example.caption} {picture.size}".encode() + picture.tobytes())
        klein = self.klein
        this = {"model": klein.info.name, "quantize": klein.checkpoint.quantize, **asdict(self.settings)}
        this["examples"] = pixels.hexdigest()
        was = read_json(path) if path.exists() else this
        if changed := ", ".join(name for name in this if was.get(name) != this[name]):
            if (self.folder / "state.safetensors").exists():
                raise ValueError(
                    f"{self.folder} has a training with other settings ({changed}): delete it, or name another file."
                )
            shutil.rmtree(self.folder / "encoded", ignore_errors=True)
        path.write_text(json.dumps(this, indent=1) + "\n", encoding="utf-8")

    def train(self) -> Path:
        """Go on until the last step; the adapter's file. Ctrl-C leaves everything to go on from."""
        s = self.settings
        with lock_folder(self.folder):
            if (there := read_step(self.run.path)) != self.run.step:
                raise ValueError(
                    f"{self.run.path} is at step {there} and this training at {self.run.step}: another one has gone on "
                    "here, or this one was broken off, so start it again."
                )
            if self.run.step < s.steps:
                step = accumulating_step(s.accumulate)
                train_with_progress(self.run, s.steps, velocity_loss, self.batches, self.report, s.every, step)
            else:
                self.report()  # there may be no file any more
        return self.out

    def batches(self, step: int) -> tuple:
        """What one step learns from; it depends on the number of the step alone."""
        s = self.settings
        return tuple(self.batch(step * s.accumulate + i) for i in range(s.accumulate))

    def batch(self, number: int) -> tuple[mx.array, ...]:
        """The arguments of `velocity_loss`: other rows, noise and noise levels for each number."""
        s, rng = self.settings, random.Random(f"{self.settings.seed} {number}")
        clean, references, txt = self.encoded.batch(rng.choices(self.rows, k=s.batch))
        k_time, k_noise = mx.random.split(mx.random.key(rng.randrange(2**32)))
        eps = mx.random.normal(clean.shape, key=k_noise).astype(txt.dtype)
        t = shifted_times(k_time, s.batch, self.shift)
        return clean.astype(txt.dtype), references.astype(txt.dtype), txt, t, eps, *self.rope

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """With the moving average as the adapter's weights."""
        now = self.net.trainable_parameters()
        self.net.update(self.run.average)
        try:
            yield
        finally:
            self.net.update(now)

    def report(self) -> str:
        """Write the adapter, the samples and the loss on held-out examples; the last in words, too."""
        with self.averaged_weights():
            loss = self.validate()
            write_adapter(self.out, self.changes, layout=self.settings.layout, trained=self.describe())
            self.draw_samples().save(self.folder / f"samples-{self.run.step:05}.png")
        path = self.folder / "held-out.csv"
        last = path.read_text(encoding="utf-8").split()[-1:] if path.exists() else []
        if not (last and last[0].startswith(f"{self.run.step},")):  # a training at its end only writes its files again
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{self.run.step},{loss:.6f}\n")
        return f"held out {loss:.4f}"

    def describe(self) -> dict:
        s = self.settings
        return {"model": self.klein.info.name, "steps": self.run.step, "rank": s.rank, "pictures": len(self.rows)}

    def validate(self) -> float:
        """The loss on held-out examples, at the same noise and noise levels each time."""
        losses = []
        for row in self.held_out:
            clean, references, txt = self.encoded.batch([row])
            for i, level in enumerate(LEVELS):
                eps = noise(1000 * row + i, clean.shape[1]).astype(clean.dtype)
                losses.append(velocity_loss(self.net, clean, references, txt, mx.array([level]), eps, *self.rope))
                mx.eval(losses[-1])
        return sum(loss.item() for loss in losses) / len(losses)

    def draw_samples(self) -> Image.Image:
        """A few captions drawn from seed 0, with guidance, held-out ones first, side by side."""
        gh, gw = self.encoded.grid
        empty, pictures = mx.load(str(self.encoded.empty))["txt"], []
        for row in [*self.held_out, *self.rows][:SAMPLES]:
            _, references, txt = self.encoded.batch([row])
            where = (references if references.shape[1] else None, self.encoded.reference_grids, (gh, gw))
            field = velocity_field(self.net, txt, *where)
            without = velocity_field(self.net, empty, *where)
            guided = lambda x, t, a=field, b=without: guide(a(x, t), b(x, t), SAMPLE_GUIDANCE)
            for step in euler(guided, noise(0, gh * gw), schedule(SAMPLE_STEPS, gh * gw)):
                latents = step.latents
            pictures += to_images(self.klein.load("autoencoder").decode(latents.reshape(1, gh, gw, -1)))
        width, height = pictures[0].size
        sheet = Image.new("RGB", (width * len(pictures), height))
        for i, picture in enumerate(pictures):
            sheet.paste(picture, (i * width, 0))
        return sheet
