"""The recipe of klein-nano, from drawn scenes to a model's folder. Stop it at any time: it goes on where it was.

    python -m recipe train RUNS                       all stages, into the folder RUNS
    python -m recipe train RUNS --stage distill       one stage, with --steps N for another length

The weights that come with this package were made by earlier editions of this recipe: notebooks/nano-card.md says how,
notebooks/nano-card.md what this edition makes.
Several processes share the work under MLX's launcher (`mlx.launch -n 2 -- python -m recipe train RUNS`) or
without it: each with MLX_RANK, its number, and MLX_HOSTFILE, a file with the list
`[["127.0.0.1:5000"], ["127.0.0.1:5001"]]`.
They share each batch, so a step takes less time. The first process keeps the folder; RUNS/log says how it goes.
"""

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten
from tokenizers import Tokenizer
from tqdm.auto import tqdm

from kleinlite.autoencoder import Autoencoder
from kleinlite.cpu import setup
from kleinlite.distillation import STUDENT_STEPS, distill_loss
from kleinlite.errors import UserError
from kleinlite.files import replace_file
from kleinlite.klein import Klein
from kleinlite.models.tokenizer import load_tokenizer
from kleinlite.sampling import noised, schedule
from kleinlite.text_encoder import TextEncoder, next_token_logits, tokenize
from kleinlite.trainer.run import read_arrays, train_with_progress, write_arrays
from kleinlite.training import (
    Batch,
    encode_batch,
    flow_optimizer,
    initialize,
    join_references,
    learning_rate,
    make_optimizer,
    shifted_times,
    velocity_loss,
)
from kleinlite.transformer import Transformer

from .config import RecipeConfig
from .curriculum import Curriculum
from .data import autoencoder_batch, draw_scenes, encode_scenes, measure_latents, psnr, text_batch, train_tokenizer
from .evaluate import contact_sheet
from .redraw import redraw_loss
from .saving import save_encoders, save_transformer
from .stages import (
    MISSING,
    SharedRun,
    broadcast_from_rank_zero,
    copy_from_rank_zero,
    is_rank_zero,
    load_average,
    lock_shared_folder,
    share,
)
from .world import GUIDANCE, World, find_world

HELD_OUT = 10_000_000  # the seed whose scenes measure the autoencoder, the step whose sentences the text encoder
LAST = ("linear2", "proj", "img_mlp.2", "txt_mlp.2", "final_layer.linear", "adaLN_modulation.1", "lin")  # begin small
MOST_STEPS = 1_000_000


def autoencoder_loss(model: Autoencoder, pixels: mx.array, key: mx.array) -> mx.array:
    """Picture through a noisy latent and back: absolute and squared error, and a light pull towards unit normal.

    Kingma and Welling 2013, arXiv 1312.6114.
    """
    mean, logvar = mx.split(model.encoder(pixels), 2, axis=-1)
    logvar = mx.clip(logvar, -20, 10)
    z = mean + mx.exp(0.5 * logvar) * mx.random.normal(mean.shape, key=key)
    error = model.decoder(z) - pixels
    kl = 0.5 * (mean * mean + mx.exp(logvar) - 1 - logvar)
    return mx.abs(error).mean() + 4 * (error * error).mean() + 2e-4 * kl.mean()


def autoencoder_optimizer(steps: int) -> optim.Optimizer:
    """Muon for the convolutions between the first and the last, Adam for these and for everything else.

    It takes about half the steps of Adam alone. Muon: Jordan et al. 2024, kellerjordan.github.io/posts/muon.
    """
    muon = optim.Muon(learning_rate(0.005, steps), momentum=0.95, weight_decay=0.0)
    adam = make_optimizer(learning_rate(2e-3, steps))

    def between(name: str, w: mx.array) -> bool:
        return w.ndim == 4 and "conv_in" not in name and "conv_out" not in name

    return optim.MultiOptimizer([muon, adam], [between])


def text_encoder_loss(model: TextEncoder, ids: mx.array, mask: mx.array) -> mx.array:
    """Cross-entropy of the next token, over real tokens: how language models learn."""
    loss = nn.losses.cross_entropy(next_token_logits(model, ids, mask)[:, :-1], ids[:, 1:])
    real = mask[:, 1:].astype(mx.float32)
    return (loss * real).sum() / real.sum()


class Recipe:
    """The stages, each reading what the ones before left in the folder."""

    def __init__(self, folder: Path, world: World, cfg: RecipeConfig | None = None):
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is a file: name a folder, new or from an earlier start, for the runs.")
        self.folder = folder
        self.world = world
        self.cfg = cfg or world.config
        self.grid = (world.size // 16, world.size // 16)
        self.parts: dict[str, Any] = {}  # finished ones, in memory

    def file(self, name: str) -> Path:
        """Where a stage keeps its run."""
        return self.folder / f"{name}.safetensors"

    def reads(self, stage: str) -> tuple[str, ...]:
        """What a stage needs from the ones before."""
        if stage in ("autoencoder", "text_encoder"):
            return ()
        students = ["distill", *self.world.rounds]
        before = {"transformer": (), "distill": ("transformer",), "export": ("transformer", students[-1])}
        before |= {after: (name,) for name, after in pairwise(students)}
        return ("autoencoder", "text_encoder", *before[stage])

    def check_inputs(self, stage: str) -> None:
        """Raises UserError if an earlier stage has not left what this one reads."""
        reads = self.reads(stage)
        missing = [i for i, name in enumerate(reads) if not self.file(name).exists()]
        first = broadcast_from_rank_zero(mx.array(missing[0] if missing else -1)).item()
        if first >= 0:
            raise UserError(MISSING.format(self.file(reads[first])))

    def train(
        self, name: str, model: nn.Module, optimizer: optim.Optimizer, loss: Callable[..., mx.array],
        batches: Callable[[int], Iterable[Any]], report: Callable[[], str], decay: float,
    ) -> None:  # fmt: skip
        """One stage, or a round of one: train to its last step, with a line in RUNS/log at each look."""
        run = SharedRun(self.file(name), model, optimizer, decay=decay)
        first = run.step
        started = time.perf_counter()

        def timed() -> str:
            return f"{report()}, {(time.perf_counter() - started) / (run.step - first):.2f} s per step"

        steps = self.cfg.steps[name.partition("-")[0]]
        train_with_progress(run, steps, loss, batches, timed, self.cfg.every, log=self.folder / "log")

    def load(self, name: str, module: nn.Module) -> Any:
        """A part as an earlier stage left it, frozen."""
        copy_from_rank_zero(self.file(name))
        load_average(self.file(name), module)
        module.freeze()
        return module

    def begin(self, part: str, module: nn.Module) -> None:
        """Give a new part the weights of the model that this world begins with: all but what reads the words.

        A new text encoder writes features of its own, so the matrix that reads them stays as it was drawn.
        """
        if self.cfg.begins_with:
            known = tree_flatten(Klein.from_pretrained(self.cfg.begins_with).parts.load(part).parameters())
            module.load_weights([(name, w) for name, w in known if not name.startswith("txt_in")], strict=False)

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer, trained at the first call."""
        if "tokenizer" not in self.parts:
            path = self.folder / "tokenizer" / "tokenizer.json"
            if is_rank_zero() and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                with replace_file(path) as draft:
                    train_tokenizer(self.world, self.cfg.text_encoder.vocab, reworded=True).save(str(draft))
            copy_from_rank_zero(path)
            self.parts["tokenizer"] = load_tokenizer(self.folder)
        return self.parts["tokenizer"]

    def load_autoencoder(self) -> Autoencoder:
        """The trained autoencoder, with the statistics of its latents."""
        if "autoencoder" not in self.parts:
            model = self.load("autoencoder", Autoencoder(self.cfg.autoencoder))
            measure_latents(self.world, model, self.cfg.statistics)
            self.parts["autoencoder"] = model
        return self.parts["autoencoder"]

    def new_text_encoder(self) -> TextEncoder:
        """An untrained one, for as many words as the tokenizer has."""
        return TextEncoder(replace(self.cfg.text_encoder, vocab=self.load_tokenizer().get_vocab_size()))

    def load_text_encoder(self) -> TextEncoder:
        """The trained text encoder."""
        if "text_encoder" not in self.parts:
            self.parts["text_encoder"] = self.load("text_encoder", self.new_text_encoder())
        return self.parts["text_encoder"]

    def curriculum(self) -> Curriculum:
        """The lessons of the transformer; their scenes are encoded once, and again when the autoencoder is newer."""
        cfg = self.cfg
        lessons = self.world.lessons(cfg)
        path = self.file("latents")
        autoencoder = self.load_autoencoder()
        if is_rank_zero():
            current = path.exists() and path.stat().st_mtime >= self.file("autoencoder").stat().st_mtime
            if not current or len(read_arrays(path)[0]["latents"]) != len(lessons.scenes):
                rows = encode_scenes(self.world, autoencoder, lessons.scenes, lambda i: tqdm(i, desc="encoding scenes"))
                write_arrays(path, {"latents": rows})
        copy_from_rank_zero(path)
        latents = read_arrays(path)[0]["latents"]
        tokens = cfg.text_encoder.max_length
        return Curriculum(self.world, lessons, latents, self.load_tokenizer(), tokens, share(cfg.batch))

    # ------------------------------------------------------------ the stages

    def autoencoder(self) -> None:
        """Pictures into latents and back."""
        cfg = self.cfg
        model = Autoencoder(cfg.autoencoder)
        initialize(model, mx.random.key(0), damp=("conv2", "proj_out"))
        self.begin("autoencoder", model)
        optimizer = autoencoder_optimizer(cfg.steps["autoencoder"])
        pixels = draw_scenes(self.world, self.world.held_out_scenes(HELD_OUT, 16))

        def report() -> str:
            averaged = load_average(self.file("autoencoder"), Autoencoder(cfg.autoencoder))
            return f"held-out PSNR {psnr(averaged.decode(averaged.encode(pixels)), pixels):.2f} dB"

        def batches(step: int) -> tuple[mx.array, ...]:
            return autoencoder_batch(self.world, step, share(16), self.world.size // 2)

        self.train("autoencoder", model, optimizer, autoencoder_loss, batches, report, decay=0.995)

    def text_encoder(self) -> None:
        """The sentences of the world and their rewordings, word by word."""
        steps = self.cfg.steps["text_encoder"]
        tokens = self.cfg.text_encoder.max_length
        tokenizer = self.load_tokenizer()
        model = self.new_text_encoder()
        initialize(model, mx.random.key(1), damp=("o_proj", "down_proj"), damping=0.3)
        # Variance 1/width would leave the words too quiet beside what the layers add: the layers must still name them.
        shape = model.embed_tokens.weight.shape
        model.embed_tokens.weight = 0.5 * mx.random.normal(shape, key=mx.random.key(2))
        optimizer = optim.AdamW(learning_rate(2e-3, steps), betas=[0.9, 0.98], weight_decay=0.0, bias_correction=True)
        held = text_batch(self.world, tokenizer, tokens, HELD_OUT, 64)

        def report() -> str:
            return f"other scenes {text_encoder_loss(model, *held).item():.3f} nats per token"

        def batches(step: int) -> tuple[mx.array, ...]:
            return text_batch(self.world, tokenizer, tokens, step, share(64))

        self.train("text_encoder", model, optimizer, text_encoder_loss, batches, report, decay=0.995)

    def transformer(self) -> None:
        """The velocity, at noise levels where four steps stand and where outlines are drawn."""
        text_encoder = self.load_text_encoder()
        model = Transformer(self.cfg.transformer)
        initialize(model, mx.random.key(3), damp=LAST, damping=0.2)
        self.begin("transformer", model)

        def loss(model: Transformer, clean: mx.array, references: mx.array, *rest: mx.array) -> mx.array:
            *words, key = rest
            batch = encode_batch(model, text_encoder, self.grid, clean, references, *words)
            k_noise, k_time = mx.random.split(key)
            t = lesson_times(k_time, len(clean), edits=references.shape[1] > 0)
            eps = mx.random.normal(clean.shape, key=k_noise)
            return velocity_loss(model, clean, batch.txt, t, eps, batch.rope, references)

        optimizer = flow_optimizer(self.cfg.steps["transformer"])

        def report() -> str:
            return self.draw_samples("transformer", distilled=False)

        self.train("transformer", model, optimizer, loss, self.curriculum(), report, decay=0.999)

    def distill(self) -> None:
        """Each of the student's four steps replaces two guided steps of the teacher."""
        text_encoder = self.load_text_encoder()
        teacher = self.load("transformer", Transformer(self.cfg.transformer))
        student = self.load("transformer", Transformer(self.cfg.transformer))
        student.unfreeze()
        empty = text_encoder(*tokenize(self.load_tokenizer(), [""], self.cfg.text_encoder.max_length))

        def loss(model: Transformer, *lesson: Any) -> mx.array:
            *arrays, key, guidance, segment = lesson
            batch = encode_batch(teacher, text_encoder, self.grid, *arrays)
            return distill_loss(model, teacher, batch, empty, guidance, segment, key)

        optimizer = flow_optimizer(self.cfg.steps["distill"], rate=0.3)

        def report() -> str:
            return self.draw_samples("distill", distilled=True)

        self.train("distill", student, optimizer, loss, self.curriculum().student_batch, report, decay=0.99)

    def learn_in_rounds(self, stage: str) -> None:
        """Each round begins with what the one before has left, and draws its pictures before its first step."""
        self.load_text_encoder()  # all processes together, before the first draws alone
        self.load_autoencoder()
        rounds = self.world.rounds[stage]
        before = left = self.reads(stage)[-1]
        for number in range(rounds.number):
            name = f"{stage}-{number + 1}" if number + 1 < rounds.number else stage
            student = self.load(left, Transformer(self.cfg.transformer))
            path = self.file(f"{stage}-pictures-{number + 1}")
            if is_rank_zero() and not path.exists():
                parts = (student, self.load_text_encoder(), self.load_autoencoder(), self.load_tokenizer(), self.grid)
                write_arrays(path, rounds.draw(number, self.cfg.own_pictures, *parts, progress=tqdm)._asdict())
            copy_from_rank_zero(path)
            self.learn_from_own(name, before, student, rounds.kind(**read_arrays(path)[0]))
            left = name

    def learn_from_own(self, name: str, before: str, student: Transformer, own: Any) -> None:
        """One round. Every other step is of the curriculum, and answered as the stage `before` had left the student.

        So landscapes, edits and what is not there stay as they were ("learning without forgetting", Li and Hoiem 2016,
        arXiv 1606.09282). A guided teacher in their place brought second houses back.
        """
        text_encoder = self.load_text_encoder()
        stays = self.load(before, Transformer(self.cfg.transformer))
        student.unfreeze()
        curriculum = self.curriculum()

        def batches(step: int) -> tuple[Any, ...]:
            if step % 2:
                return "before", *curriculum(step), step // 2 % STUDENT_STEPS
            return "own", *own.batch(step // 2, share(self.cfg.batch))

        def loss(model: Transformer, kind: str, *lesson: Any) -> mx.array:
            if kind == "own":
                x, target, ids, mask, segment = lesson
                batch = encode_batch(model, text_encoder, self.grid, target, target[:, :0], ids, mask)
                return redraw_loss(model, x, batch, segment)
            *arrays, key, segment = lesson
            batch = encode_batch(model, text_encoder, self.grid, *arrays)
            return stay_loss(model, stays, batch, segment, key)

        optimizer = flow_optimizer(self.cfg.steps[name.partition("-")[0]], rate=0.15)

        def report() -> str:
            return self.draw_samples(name, distilled=True)

        self.train(name, student, optimizer, loss, batches, report, decay=0.99)

    def export(self) -> None:
        """Write the model, distilled, under its world's name, and `base` inside it."""
        out = self.folder / self.world.name
        student = self.load(self.reads("export")[-1], Transformer(self.cfg.transformer))
        base = self.load("transformer", Transformer(self.cfg.transformer))
        self.save(out, student, distilled=True)
        if is_rank_zero():
            save_transformer(out / "base", base, self.load_text_encoder().cfg, distilled=False, shares=True)

    def save(self, folder: Path, transformer: Transformer, distilled: bool) -> None:
        """A whole model as a folder."""
        tokenizer = self.load_tokenizer()
        text_encoder = self.load_text_encoder()
        autoencoder = self.load_autoencoder()
        if is_rank_zero():
            save_encoders(folder, autoencoder, self.cfg.autoencoder, self.world.size, text_encoder, tokenizer)
            save_transformer(folder, transformer, text_encoder.cfg, distilled)

    def draw_samples(self, name: str, distilled: bool) -> str:
        """Draw the sample prompts with a run's average, side by side, into a PNG named after its stage.

        The first process does it alone, so all that it needs has been loaded before: nobody would answer it.
        """
        preview = self.folder / "preview"
        self.save(preview, load_average(self.file(name), Transformer(self.cfg.transformer)), distilled)
        settings: Any = {} if distilled else {"steps": 8, "guidance": GUIDANCE}
        samples = list(self.world.samples)
        pictures = Klein.from_pretrained(preview)(samples, seed=[0] * len(samples), progress=False, **settings)
        contact_sheet(pictures).save(self.folder / f"{name}.png")
        return f"samples in {self.folder / name}.png"


def stay_loss(student: Transformer, before: Transformer, batch: Batch, segment: int, key: mx.array) -> mx.array:
    """Step number `segment` of four, from a noised picture: the student's answer against the one it gave before."""
    n = batch.clean.shape[1]
    t = schedule(STUDENT_STEPS, n)[segment]
    x = noised(batch.clean, mx.random.normal(batch.clean.shape, key=key), t)
    img = join_references(x, batch.references)
    change = student(img, batch.txt, t, rope=batch.rope) - before(img, batch.txt, t, rope=batch.rope)
    return (change[:, :n] ** 2).mean()


def lesson_times(key: mx.array, b: int, edits: bool) -> mx.array:
    """Noise levels, (b,): two in five near 0.7, from where the last of four steps jumps to the picture.

    A third is higher, where the layout is decided and, of edits, which thing is meant (shift 16); the rest is lower,
    where the distilled model's teacher draws the outlines.
    """
    k_which, k_time = mx.random.split(key)
    u = mx.random.uniform(shape=(b,), key=k_time)
    which = mx.random.uniform(shape=(b,), key=k_which)
    high = shifted_times(k_time, b, 16.0) if edits else 0.8 + 0.2 * u
    return mx.where(which < 0.4, 0.62 + 0.16 * u, mx.where(which < 0.75, high, 0.72 * u))


def train(
    folder: Path, stage: str | None = None, steps: int | None = None, cfg: RecipeConfig | None = None,
    world: str = "shapes",
) -> None:  # fmt: skip
    """Train the whole recipe or one stage of it, into a folder.

    world: a name or a Python file, see `find_world`.

    Raises UserError for a mistake; KeyboardInterrupt, once all is saved, after Ctrl-C.
    """
    found = find_world(world)
    cfg = cfg or found.config
    if stage not in (None, *cfg.steps, "export"):
        raise UserError(f"There is no stage {stage!r} here: choose from {', '.join(cfg.steps)}, export.")
    if steps is not None and (stage not in cfg.steps or not 1 <= steps <= MOST_STEPS):
        raise UserError(f"--steps is a number from 1 to {MOST_STEPS:,}, and goes with the --stage that it is for.")
    if stage and steps:
        cfg = replace(cfg, steps={**cfg.steps, stage: steps})
    setup()  # before the first large array: a stage may encode scenes before its run begins
    recipe = Recipe(folder, found, cfg)
    stages = [stage] if stage else [*cfg.steps, "export"]
    recipe.check_inputs(stages[0])
    with lock_shared_folder(folder):
        try:
            for name in stages:
                recipe.learn_in_rounds(name) if name in found.rounds else getattr(recipe, name)()
        except KeyboardInterrupt:
            if is_rank_zero() and any(recipe.file(name).exists() for name in cfg.steps):
                print(f"\nSaved in {folder}. The same command goes on from here.", file=sys.stderr)
            raise
    if is_rank_zero():
        print(f"done: {folder / found.name if 'export' in stages else folder}")
