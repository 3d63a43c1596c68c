"""From nothing to a judged score within minutes: `python -m recipe speedrun --minutes 30`.

RECORDS.md has the rules. Given are nano's autoencoder, its tokenizer and its text encoder, all frozen; the transformer
begins with random weights and learns from scenes drawn from seeds. The clock decides when the learning rate falls and
when the run ends, so that a slow machine makes fewer steps and not a longer run. Stop it at any time: the same command
goes on where it was.
"""

import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten
from PIL import Image, ImageDraw
from tqdm.auto import tqdm

from kleinlite.errors import UserError
from kleinlite.files import write_json
from kleinlite.klein import Klein
from kleinlite.measuring import mean_and_error
from kleinlite.models.checkpoint import resolve_model
from kleinlite.nano.data import encode_scenes
from kleinlite.nano.evaluate import SIZE, draw_all, examine, held_out_captions
from kleinlite.trainer.run import Run, catch_interrupts, lock_folder, read_arrays, write_arrays
from kleinlite.training import encode_batch, flow_loss, initialize, make_optimizer
from kleinlite.transformer import Transformer, TransformerConfig

from .curriculum import Curriculum
from .evaluate import contact_sheet
from .saving import save_transformer
from .scene_lessons import GRID, make_lessons
from .shapes import WORLD
from .stages import load_average
from .training import LAST

GIVEN = ("vae", "text_encoder", "tokenizer", "scheduler")  # parts of nano that nobody has to train
JUDGED_FROM = 40_000_000  # held-out scenes of these seeds are judged: others than nano's own tables use
SHOWN = 48  # pictures in the report, the first ones
LOOKS = 8  # samples, saved states and points of the curve in a run


@dataclass(frozen=True)
class SpeedrunConfig:
    """What a contestant may change. rates: the peaks of Muon's and of Adam's learning rate."""

    transformer: TransformerConfig = TransformerConfig(
        double_blocks=2, single_blocks=4, heads=4, axes=(8, 8, 8, 8), d_text=288, mlp_ratio=2.0
    )
    scenes: int = 6000  # fewer where encoding them would take more than a tenth of the minutes
    batch: int = 32
    rates: tuple[float, float] = (0.02, 2e-3)
    shift: float = 3.0  # how far the noise levels of training are pushed towards noise
    steps: int = 8  # of drawing
    guidance: float = 2.5
    captions: int = 200  # that are judged


@dataclass
class Log:
    """What a run remembers besides its weights; times in seconds."""

    minutes: float
    spent: float = 0.0
    drawing: float = 0.0  # one picture takes, as last measured
    loss: float = 0.0  # of late
    looks: int = 0
    curve: list[tuple[int, float]] = field(default_factory=list)  # steps, and the loss


class Speedrun:
    """One run, kept in a folder. clock: seconds since any moment."""

    def __init__(self, folder: Path, minutes: float, cfg: SpeedrunConfig, clock: Callable[[], float]):
        self.folder = folder
        self.cfg = cfg
        self.clock = clock
        self.given = Klein.from_pretrained("nano-base", keep_loaded=True)
        self.model = Transformer(cfg.transformer)
        initialize(self.model, mx.random.key(3), damp=LAST, damping=0.2)
        self.weights = count_weights(self.model)
        muon = optim.Muon(0.0, momentum=0.95, weight_decay=0.0)
        adam = make_optimizer(0.0)
        self.optimizer = optim.MultiOptimizer([muon, adam], [lambda name, w: "blocks" in name and w.ndim == 2])
        file = folder / "log.json"
        self.log = Log(**json.loads(file.read_text("utf-8"))) if file.exists() else Log(minutes)
        if self.log.minutes != minutes:
            was = f"{folder} holds a run of {self.log.minutes:g} minutes"
            raise UserError(f"{was}: say --minutes {self.log.minutes:g}, or name another folder.")

    def curriculum(self) -> Curriculum:
        """Pictures with captions; encoded once, as many as a tenth of the minutes allows."""
        path = self.folder / "latents.safetensors"
        if not path.exists():
            start = self.clock()
            first = make_lessons(32, 0, 0).scenes
            encode_scenes(self.given.autoencoder, first, SIZE)  # takes several times as long as any other
            again = self.clock()
            encode_scenes(self.given.autoencoder, first, SIZE)
            allowed = 32 * int(6 * self.log.minutes / max(self.clock() - again, 1e-6))
            scenes = make_lessons(min(self.cfg.scenes, max(allowed, 64)), 0, 0).scenes
            rows = encode_scenes(self.given.autoencoder, scenes, SIZE, lambda i: tqdm(i, "encoding"))
            self.log.spent = self.clock() - start
            write_json(self.folder / "log.json", asdict(self.log))
            write_arrays(path, {"latents": rows})
        rows = read_arrays(path)[0]["latents"]
        return picture_curriculum(self.given, rows, self.cfg.batch)

    def set_rates(self) -> bool:
        """Let the learning rates follow the clock; False when what is left is for drawing and judging."""
        whole = 60 * self.log.minutes
        share = self.log.spent / (whole - min(1.2 * self.cfg.captions * self.log.drawing, whole / 2))
        for part, peak in zip(self.optimizer.optimizers, self.cfg.rates):
            part.learning_rate = peak * rate_at(share)
        return share < 1

    def train(self) -> None:
        """Learn until the time for it is over, with a look at samples every eighth of the minutes."""
        cfg = self.cfg
        log = self.log
        curriculum = self.curriculum()
        run = Run(self.folder / "run.safetensors", self.model, self.optimizer, decay=0.99)
        log.curve = [point for point in log.curve if point[0] <= run.step]

        def loss(model: Transformer, clean: mx.array, references: mx.array, *rest: mx.array) -> mx.array:
            *words, key = rest
            batch = encode_batch(model, self.given.text_encoder, GRID, clean, references, *words)
            return flow_loss(model, batch, key, cfg.shift)

        whole = 60 * log.minutes
        last = self.clock()
        with catch_interrupts() as pressed, tqdm(total=round(whole), unit="s", desc="speedrun") as bar:
            for value in run.steps(10**9, loss, curriculum) if self.set_rates() else ():
                log.loss = 0.95 * log.loss + 0.05 * value if log.loss else value
                look = log.spent >= log.looks * whole / LOOKS
                if log.spent >= len(log.curve) * whole / 100:
                    log.curve.append((run.step, log.loss))
                if look:
                    log.looks += 1
                    self.save(run)
                    self.draw_samples()
                now = self.clock()
                log.spent += now - last
                last = now
                learning = self.set_rates()
                if not learning:
                    log.curve.append((run.step, log.loss))
                bar.set_postfix(step=run.step, loss=f"{log.loss:.3f}", refresh=False)
                bar.update(round(log.spent) - bar.n)
                if look or pressed or not learning:
                    self.save(run)
                if pressed:
                    raise KeyboardInterrupt
                if not learning:
                    break

    def save(self, run: Run) -> None:
        """The clock first: a stop between the two files may not give time back."""
        write_json(self.folder / "log.json", asdict(self.log))
        run.save()

    def open_model(self) -> Klein:
        """The run's average as a model of its own, in RUN/model, where `kleinlite generate --model` finds it."""
        out = self.folder / "model"
        average = Transformer(self.cfg.transformer)
        load_average(self.folder / "run.safetensors", average)
        save_model(out, average, self.given)
        return Klein.from_pretrained(out)

    def draw_samples(self) -> None:
        """The sample prompts, side by side; and how long a picture takes."""
        start = self.clock()
        pictures = draw_all(self.open_model(), list(WORLD.samples), steps=self.cfg.steps, guidance=self.cfg.guidance)
        self.log.drawing = (self.clock() - start) / len(WORLD.samples)
        contact_sheet(pictures).save(self.folder / "samples.png")

    def report(self) -> str:
        """Draw, judge and write report.md; returns its first line."""
        cfg = self.cfg
        start = self.clock()
        cases = held_out_captions(cfg.captions, JUDGED_FROM)
        pictures = draw_all(self.open_model(), [said for _, said in cases], steps=cfg.steps, guidance=cfg.guidance)
        results = examine(pictures, cases)
        minutes = (self.log.spent + self.clock() - start) / 60
        contact_sheet(pictures[:SHOWN]).save(self.folder / "pictures.png")
        draw_curve(self.log.curve).save(self.folder / "loss.png")
        right = percent([sum(result.values()) / len(result) for result in results])
        whole = percent([float(all(result.values())) for result in results])
        score = f"{right} of what {len(cases)} held-out captions ask for is right"
        late = "" if minutes < 1.02 * self.log.minutes else f", which is late for {self.log.minutes:g}: no record"
        load = os.getloadavg() if hasattr(os, "getloadavg") else ()  # Windows has none
        facts = {
            "everything right": f"{whole} of the pictures", "minutes": f"{minutes:.1f}{late}",
            "weights trained": f"{self.weights:,}", "config": cfg, "machine": describe_machine(),
            "load at the end": " ".join(f"{n:.1f}" for n in load),
            "versions": f"kleinlite {version('kleinlite')}, MLX {version('mlx')}, Python {platform.python_version()}",
            "commit": find_commit(), "steps": self.log.curve[-1][0], "loss": f"{self.log.curve[-1][1]:.4f}",
        }  # fmt: skip
        rows = ["| | |", "|-|-|", *(f"| {name} | {fact} |" for name, fact in facts.items())]
        said = "\n".join(f"{i}. {caption}" for i, (_, caption) in enumerate(cases[:SHOWN], start=1))
        first = "The first of the judged pictures, seeds from 0 on, nothing chosen:"
        parts = [f"# {score}", "\n".join(rows), "![The loss](loss.png)", first, "![Pictures](pictures.png)", said]
        (self.folder / "report.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
        return score


def count_weights(transformer: Transformer) -> int:
    """How many weights are trained. Raises UserError if they are more than the rules allow."""
    weights: dict[str, mx.array] = dict(tree_flatten(transformer.parameters()))
    number = sum(w.size for w in weights.values())
    if number > 10_000_000:
        raise UserError(f"The network has {number / 1e6:.1f} M weights: the rules allow 10 M.")
    return number


def picture_curriculum(given: Klein, rows: mx.array, batch: int) -> Curriculum:
    """Batches of the first scenes' captions and latents (scenes, n, 128); nothing held out is among them."""
    tokens = given.text_encoder.cfg.max_length
    return Curriculum(WORLD, make_lessons(len(rows), 0, 0), rows, given.tokenizer, tokens, batch, turns=("pictures",))


def save_model(folder: Path, transformer: Transformer, given: Klein) -> None:
    """A trained transformer beside nano's other parts: a model like any other."""
    for part in GIVEN:
        shutil.copytree(resolve_model("nano") / part, folder / part, dirs_exist_ok=True)
    save_transformer(folder, transformer, given.text_encoder.cfg, distilled=False)


def rate_at(share: float) -> float:
    """The learning rate over its peak after this share of the time: up for 2 %, level, and down over the last half."""
    return max(0.01, min(share / 0.02, 1.0, 2 * (1 - share)))


def draw_curve(curve: list[tuple[int, float]]) -> Image.Image:
    """The loss against the steps, both from 0."""
    image = Image.new("RGB", (640, 240), "white")
    pen = ImageDraw.Draw(image)
    last = curve[-1][0]
    highest = max(loss for _, loss in curve)
    pen.line([(639 * step / last, 239 - 220 * loss / highest) for step, loss in curve], fill="navy", width=2)
    pen.text((4, 3), f"loss {highest:.2f} at the top, 0 at the bottom; {last} steps", fill="gray")
    return image


def percent(shares: list[float]) -> str:
    """Their mean, and how uncertain it is because there are no more of them."""
    mean, error = mean_and_error(shares)
    return f"{100 * mean:.1f} % ± {100 * error:.1f}"


def describe_machine() -> str:
    """System, cores and what MLX computes on."""
    device = mx.device_info().get("device_name", "")
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {mx.default_device()} {device}".strip()


def find_commit() -> str:
    """The repository's commit, if this is a clone."""
    said = subprocess.run("git describe --always --dirty", shell=True, cwd=Path(__file__).parent, capture_output=True)
    return said.stdout.decode().strip() or "no clone"


def speedrun(
    folder: Path, minutes: float, cfg: SpeedrunConfig | None = None, clock: Callable[[], Any] = time.perf_counter
) -> None:
    """Train, draw and judge within these minutes, into a folder.

    Raises UserError for a mistake; KeyboardInterrupt, once all is saved, after Ctrl-C.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: name a folder, new or from an earlier start, for the run.")
    if (folder / "report.md").exists():
        raise UserError(f"{folder} holds a finished run: read {folder / 'report.md'}, or name another folder.")
    with lock_folder(folder):
        run = Speedrun(folder, minutes, cfg or SpeedrunConfig(), clock)
        run.train()
        print(f"{run.report()}: {folder / 'report.md'}")
