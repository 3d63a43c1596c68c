"""The whole recipe of klein-nano, from drawn scenes to a bundled model. Stop it at any time: it goes on where it was.

    kleinlite train RUNS                       all stages, into the folder RUNS
    kleinlite train RUNS --calibrate           only say how long each would take here, and how much memory
    kleinlite train RUNS --stage distill       one stage, with --steps N for another length

Several processes, on one machine or on many, share the work under MLX's own launcher. Each step then sees as many
times the pictures, so fewer steps do; the first process keeps the folder and sends the others what they lack.

    mlx.launch -n 2 -m kleinlite.nano.recipe RUNS
    mlx.launch --hosts 10.0.0.1,10.0.0.2 -m kleinlite.nano.recipe RUNS

On a Linux CPU add `--env OPENBLAS_NUM_THREADS=1` (cores divided by processes): every process brings its own threads.
The launcher itself keeps a core busy (MLX 0.32.4, Linux). Where cores are few, start the processes without it: with
MLX_RANK, each its number, and MLX_HOSTFILE, a file with the list `[["127.0.0.1:5000"], ["127.0.0.1:5001"]]`.
Chapters 11 and 12 explain every part. The same code runs on a CPU (hours), on Metal and on CUDA.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from tokenizers import Tokenizer
from tqdm.auto import tqdm

from ..autoencoder import Autoencoder, AutoencoderConfig
from ..cpu import two_streams
from ..distillation import distill_loss
from ..errors import Parser, run_command
from ..models.export import save_encoders, save_transformer
from ..models.opening import load_tokenizer
from ..pipeline import Klein
from ..scenes import Scene, sample
from ..text_encoder import TextEncoder, TextEncoderConfig, tokenize
from ..training import (
    autoencoder_loss,
    flow_loss,
    flow_optimizer,
    initialize,
    learning_rate,
    text_encoder_loss,
)
from ..transformer import Transformer, TransformerConfig
from .data import (
    FlowData,
    autoencoder_batch,
    draw_samples,
    encode_scenes,
    measure_latents,
    psnr,
    text_batch,
    train_tokenizer,
    training_scenes,
)
from .decoding import decoder_batches, decoder_loss, decoder_optimizer, sight
from .judge import contact_sheet
from .lessons import GUIDANCE, LESSONS, STUDENT, Lessons, StudentLessons, lesson_loss, more_scenes
from .run import (
    MISSING,
    Run,
    broadcast_from_rank_zero,
    copy_from_rank_zero,
    is_rank_zero,
    load_average,
    lock_folder,
    read_arrays,
    read_step,
    train_with_progress,
    write_arrays,
)
from .sharing import share_blocks, share_matrices
from .stages import ABOUT, STAGES, STEPS, add_arguments
from .vocabulary import extend
from .widen import wide_config, widen, widen_decoder

SIZE, GRID, TOKENS = 96, (6, 6), 32
HELD_OUT = 10_000_000  # scenes from this seed on are never trained on
AUTOENCODER = AutoencoderConfig(channels=(16, 32, 64, 96), layers=1, groups=8)
FINISHED = replace(AUTOENCODER, decoder_channels=(64, 32, 64, 96))  # outlines are drawn by the widest level
TRANSFORMER = TransformerConfig(double_blocks=2, single_blocks=5, heads=4, axes=(8, 8, 8, 8), d_text=288)
LAST = ("linear2", "proj", "img_mlp.2", "txt_mlp.2", "final_layer.linear", "adaLN_modulation.1", "lin")  # begin small
READS = dict.fromkeys(STAGES, ()) | {  # what a stage needs from the ones before
    "transformer": ("autoencoder", "text_encoder"),
    "sharpen": ("autoencoder", "text_encoder", "transformer"),
    "edits": ("autoencoder", "text_encoder", "sharpen"),
    "wide": ("autoencoder", "text_encoder", "edits"),
    "decoder": ("autoencoder", "text_encoder", "wide"),
    "distill": ("autoencoder", "text_encoder", "wide"),
    "export": ("autoencoder", "text_encoder", "wide", "distill"),
}
SCENES, EDITS, FAMILIES, ROWS, ONES = 16_000, 8_000, 600, 2_000, 3_000  # what the training set is made of
TWINS = ("twins", "twins", "twins", "pictures", "twins")
SAMPLES = (
    "a red circle above a blue square", "a yellow star", "a green triangle left of a pink heart",
    "a yellow sun over a blue sea", "a red house under a yellow sun", "a green tree on white snow at night",
    "a white boat on a blue sea at sunset", "a black diamond on a pink background",
)  # fmt: skip


def text_config(tokenizer: Tokenizer) -> TextEncoderConfig:
    vocab = tokenizer.get_vocab_size()
    return TextEncoderConfig(
        vocab=vocab, d=96, d_mlp=256, layers=4, heads=4, kv_heads=2, hd=32, taps=(1, 2, 3), tokens=TOKENS
    )  # fmt: skip


# ---------------------------------------------------------------- the stages


class Recipe:
    """The stages, each reading what the ones before left in the folder."""

    def __init__(self, folder: Path, steps: dict[str, int]):
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is a file: name a folder, new or from an earlier start, for the runs.")
        self.folder, self.steps, self.made = folder, steps, {}

    def file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def done(self, stage: str) -> int:
        """How many steps of a stage are behind us."""
        step = read_step(self.file(stage)) if is_rank_zero() else 0
        return broadcast_from_rank_zero(mx.array(step)).item()

    def check_inputs(self, stage: str) -> None:
        """ValueError if an earlier stage has not left what this one reads."""
        missing = [name for name in READS[stage] if not self.file(name).exists()]
        first = broadcast_from_rank_zero(mx.array(READS[stage].index(missing[0]) if missing else -1)).item()
        if first >= 0:
            raise ValueError(MISSING.format(self.file(READS[stage][first])))

    def trained(self, name: str, module: nn.Module) -> nn.Module:
        """A part as an earlier stage left it."""
        copy_from_rank_zero(self.file(name))
        return load_average(self.file(name), module)

    def train(self, run: Run, until: int, loss: Callable, batches: Callable, report: Callable[[], str]) -> None:
        train_with_progress(run, until, loss, batches, report)

    def tokenizer(self) -> Tokenizer:
        path = self.folder / "tokenizer" / "tokenizer.json"
        if is_rank_zero() and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            train_tokenizer().save(str(path.with_suffix(".partial")))
            os.replace(path.with_suffix(".partial"), path)
        copy_from_rank_zero(path)
        return load_tokenizer(self.folder)

    def trained_autoencoder(self) -> Autoencoder:
        if "autoencoder" not in self.made:
            model = self.trained("autoencoder", Autoencoder(AUTOENCODER))
            measure_latents(model, SIZE)
            self.made["autoencoder"] = model
        return self.made["autoencoder"]

    def finished_autoencoder(self) -> Autoencoder:
        """With the decoder of the stage of that name, once it has run: the latents stay what they were."""
        if "finished" not in self.made:
            model = widen_decoder(self.trained_autoencoder(), FINISHED, mx.random.key(6))
            if self.done("decoder"):
                self.trained("decoder", model)
            self.made["finished"] = model
        return self.made["finished"]

    def sight(self) -> mx.array:
        """What the wide stage measures errors of latents by, (128, 128)."""
        return sight(self.finished_autoencoder(), draw_samples(range(32), SIZE), mx.random.key(8))

    def trained_text_encoder(self) -> TextEncoder:
        if "text_encoder" not in self.made:
            model = self.trained("text_encoder", TextEncoder(text_config(self.tokenizer())))
            model.freeze()
            self.made["text_encoder"] = model
        return self.made["text_encoder"]

    def words(self) -> tuple[Tokenizer, TextEncoder]:
        """The tokenizer and the text encoder with synonyms, capitals and plurals; nothing is trained for them."""
        if "words" not in self.made:
            narrow = self.trained_text_encoder()
            tokenizer, table = extend(self.tokenizer(), narrow.embed_tokens.weight, mx.random.key(77))
            model = TextEncoder(replace(narrow._cfg, vocab=table.shape[0]))
            model.update(narrow.parameters())
            model.embed_tokens.weight = table
            model.freeze()
            self.made["words"] = tokenizer, model
        return self.made["words"]

    def data(self) -> FlowData:
        """The training set of the narrow transformer."""
        return FlowData(self.latents(training_scenes(SCENES, EDITS, FAMILIES)), self.tokenizer(), TOKENS, batch=32)

    def lessons(self, kind: type[Lessons], turns: Sequence[str]) -> Lessons:
        """The training set of the wide one."""
        latents = self.latents(training_scenes(SCENES, EDITS, FAMILIES) | more_scenes(ROWS, ONES))
        return kind(latents, self.words()[0], TOKENS, batch=32, turns=turns)

    def latents(self, scenes_by_name: dict[str, list[Scene]]) -> dict[str, mx.array]:
        """Of lists of scenes; what is not in the folder yet is encoded, list by list, and kept there."""
        path, autoencoder = self.file("latents"), self.trained_autoencoder()
        if is_rank_zero():
            newer = path.exists() and path.stat().st_mtime > self.file("autoencoder").stat().st_mtime
            known = read_arrays(path)[0] if newer else {}
            for name, scenes in scenes_by_name.items():
                if name not in known or known[name].shape[0] != len(scenes):
                    bar = lambda rows, name=name: tqdm(rows, desc=f"encoding {name}")
                    known[name] = encode_scenes(autoencoder, scenes, SIZE, bar)
                    write_arrays(path, known)
        copy_from_rank_zero(path)
        return read_arrays(path)[0]

    def autoencoder(self) -> None:
        until, model = self.steps["autoencoder"], Autoencoder(AUTOENCODER)
        initialize(model, mx.random.key(0), damp=("conv2", "proj_out"))
        optimizer = optim.AdamW(learning_rate(2e-3, until), betas=[0.9, 0.99], weight_decay=0.0, bias_correction=True)
        run = Run(self.file("autoencoder"), model, optimizer, decay=0.995)
        x = draw_samples(range(HELD_OUT, HELD_OUT + 16), SIZE)

        def report() -> str:
            best = load_average(run.path, Autoencoder(AUTOENCODER))
            return f"held-out PSNR {psnr(best.decode(best.encode(x)), x):.2f} dB"

        self.train(run, until, autoencoder_loss, lambda step: autoencoder_batch(step, 16, SIZE, 48), report)

    def text_encoder(self) -> None:
        until, tokenizer = self.steps["text_encoder"], self.tokenizer()
        model = TextEncoder(text_config(tokenizer))
        initialize(model, mx.random.key(1), damp=("o_proj", "down_proj"), damping=0.3)
        # Variance 1/width would leave the words too quiet beside what the layers add: the taps must still name them.
        shape = model.embed_tokens.weight.shape
        model.embed_tokens.weight = 0.5 * mx.random.normal(shape, key=mx.random.key(2))
        optimizer = optim.AdamW(learning_rate(2e-3, until), betas=[0.9, 0.98], weight_decay=0.0, bias_correction=True)
        run = Run(self.file("text_encoder"), model, optimizer, decay=0.995)
        held = text_batch(tokenizer, TOKENS, HELD_OUT, 64)
        report = lambda: f"held-out scenes {text_encoder_loss(model, *held).item():.3f} nats per token"
        self.train(run, until, text_encoder_loss, lambda step: text_batch(tokenizer, TOKENS, step, 64), report)

    def transformer(self) -> None:
        model = Transformer(TRANSFORMER)
        initialize(model, mx.random.key(3), damp=LAST, damping=0.2)
        self.train_flow("transformer", model, self.data())

    def train_flow(
        self, stage: str, model: Transformer, batches: Callable, rate: float = 1.0, decay: float = 0.999,
        edit_shift: float = 6.0,
    ) -> None:  # fmt: skip
        until, text_encoder = self.steps[stage], self.trained_text_encoder()
        self.finished_autoencoder()  # for the samples
        run = Run(self.file(stage), share_blocks(model), share_matrices(flow_optimizer(until, rate)), decay)

        def loss(model: Transformer, clean: mx.array, references: mx.array, *rest: mx.array) -> mx.array:
            shift = edit_shift if references.shape[1] else 6.0
            return flow_loss(model, text_encoder, GRID, clean, references, *rest, shift=shift)

        with two_streams():
            self.train(run, until, loss, batches, lambda: self.grid(stage, distilled=False))

    def sharpen(self) -> None:
        """Go on with circles and squares five times as often: the kinds that look most alike are learned last."""
        data = self.data()
        data.seeds += 4 * alike(data)
        model = self.trained("transformer", Transformer(TRANSFORMER))
        self.train_flow("sharpen", model, data, rate=0.6, decay=0.99)

    def edits(self) -> None:
        """Go on with edits, most of them twins: one scene of two things, and an instruction for each.

        Which of the two is meant is decided in nothing but noise, so edits are learned there most (shift 16).
        """
        data = self.data()
        data.seeds += alike(data)
        data.turns = 2 * (*TWINS, "edits", "twins", "pictures") + (*TWINS, "pairs", "twins", "pictures")
        model = self.trained("sharpen", Transformer(TRANSFORMER))
        self.train_flow("edits", model, data, rate=0.6, decay=0.995, edit_shift=16.0)

    def wide(self) -> None:
        """Twice as wide, and on with more words, rows, single shapes and the noise levels that four steps stand at."""
        until, (_, text_encoder) = self.steps["wide"], self.words()
        root = self.sight()
        model = share_blocks(widen(self.trained("edits", Transformer(TRANSFORMER)), mx.random.key(5)))
        run = Run(self.file("wide"), model, share_matrices(flow_optimizer(until, rate=0.6)), decay=0.99)
        loss = lambda model, *batch: lesson_loss(model, text_encoder, GRID, root, *batch)
        with two_streams():
            self.train(run, until, loss, self.lessons(Lessons, LESSONS), lambda: self.grid("wide", distilled=False))

    def decoder(self) -> None:
        """Sharper pictures from the same latents, as the encoder gives them and as the wide stage writes them."""
        until, (tokenizer, text_encoder) = self.steps["decoder"], self.words()
        model = widen_decoder(self.trained_autoencoder(), FINISHED, mx.random.key(6))
        flow = self.trained("wide", Transformer(wide_config(TRANSFORMER)))
        flow.freeze()
        model.freeze()
        model.decoder.unfreeze()
        run = Run(self.file("decoder"), model, decoder_optimizer(until), decay=0.99)
        x = draw_samples(range(HELD_OUT, HELD_OUT + 16), SIZE)
        z, best = model.encode(x), Autoencoder(FINISHED)
        best.update(model.parameters())

        def report() -> str:
            return f"held-out PSNR {psnr(load_average(run.path, best).decode(z), x):.2f} dB"

        batches = decoder_batches(model, flow, text_encoder, tokenizer, TOKENS, 8, SIZE)
        self.train(run, until, decoder_loss, batches, report)
        self.made.pop("finished", None)  # earlier stages drew their samples without this one

    def distill(self) -> None:
        until, (tokenizer, text_encoder) = self.steps["distill"], self.words()
        self.finished_autoencoder()  # for the samples
        wide = lambda: share_blocks(self.trained("wide", Transformer(wide_config(TRANSFORMER))))
        teacher, student = wide(), wide()
        teacher.freeze()
        empty = text_encoder(*tokenize(tokenizer, [""], TOKENS))
        run = Run(self.file("distill"), student, share_matrices(flow_optimizer(until, rate=0.3)), decay=0.99)
        known = teacher, text_encoder, empty, GRID
        loss = lambda model, *batch: distill_loss(model, *known, *batch)
        batches = self.lessons(StudentLessons, STUDENT)
        with two_streams():
            self.train(run, until, loss, batches, lambda: self.grid("distill", distilled=True))

    def export(self) -> Path:
        """Write `nano` (distilled) and inside it `base`, ready to be bundled."""
        out, cfg = self.folder / "nano", wide_config(TRANSFORMER)
        student, base = (self.trained(name, Transformer(cfg)) for name in ("distill", "wide"))
        self.save(out, student, distilled=True)
        if is_rank_zero():
            save_transformer(out / "base", base, self.words()[1]._cfg, distilled=False)
        return out

    def save(self, folder: Path, transformer: Transformer, distilled: bool) -> None:
        """A whole model as a folder."""
        wide = transformer._cfg == wide_config(TRANSFORMER)
        tokenizer, text_encoder = self.words() if wide else (self.tokenizer(), self.trained_text_encoder())
        autoencoder = self.finished_autoencoder()
        if is_rank_zero():
            save_encoders(folder, autoencoder, FINISHED, SIZE, text_encoder, tokenizer)
            save_transformer(folder, transformer, text_encoder._cfg, distilled)

    def grid(self, name: str, distilled: bool) -> str:
        """Draw the sample prompts with a run's average, side by side, into a PNG named after its stage."""
        preview, cfg = self.folder / "preview", wide_config(TRANSFORMER) if name in ("wide", "distill") else TRANSFORMER
        self.save(preview, load_average(self.file(name), Transformer(cfg)), distilled)
        more = {} if distilled else {"steps": 8, "guidance": GUIDANCE}
        drawn = Klein.from_pretrained(preview)(list(SAMPLES), seed=[0] * len(SAMPLES), progress=False, **more)
        contact_sheet(drawn).save(self.folder / f"{name}.png")
        return f"samples in {self.folder / name}.png"


def alike(data: FlowData) -> list[int]:
    """The scenes with a circle or a square."""
    return [seed for seed in data.seeds if any(t.kind in ("circle", "square") for t in sample(seed).things)]


# ---------------------------------------------------------------- what it will cost


class Rehearsal(Recipe):
    """The same stages with untrained parts, a few steps each: the shapes are real, so time and memory are."""

    WARM_UP, TIMED = (0, 3), (1, 2, 5, 7)  # each kind of batch as often as in its stage

    def trained(self, name: str, module: nn.Module) -> nn.Module:
        initialize(module, mx.random.key(0))
        return module

    def trained_autoencoder(self) -> Autoencoder:
        return self.trained("autoencoder", Autoencoder(AUTOENCODER))

    def sight(self) -> mx.array:
        return mx.eye(128)

    def latents(self, scenes_by_name: dict[str, list[Scene]]) -> dict[str, mx.array]:
        shape = GRID[0] * GRID[1], 128
        return {name: mx.zeros((len(scenes), *shape), dtype=mx.float16) for name, scenes in scenes_by_name.items()}

    def train(self, run: Run, until: int, loss: Callable, batches: Callable, report: Callable[[], str]) -> None:
        """Leaves seconds for the first steps (they compile), seconds per step after that, and the peak in bytes."""
        mx.reset_peak_memory()
        steps, seconds = run.steps(10, loss, batches), []
        for run.step in (*self.WARM_UP, *self.TIMED):
            start = time.perf_counter()
            next(steps)
            seconds.append(time.perf_counter() - start)
        warm_up, timed = seconds[: len(self.WARM_UP)], seconds[len(self.WARM_UP) :]
        self.cost = sum(warm_up), sum(timed) / len(timed), mx.get_peak_memory()

    def encoding(self) -> None:
        """The same for the training set, in batches of 32 scenes."""
        mx.reset_peak_memory()
        autoencoder, scenes = self.trained_autoencoder(), [sample(seed) for seed in range(64)]
        start = time.perf_counter()
        mx.eval(encode_scenes(autoencoder, scenes, SIZE))
        self.cost = 0.0, (time.perf_counter() - start) / 2, mx.get_peak_memory()


def calibrate(recipe: Recipe, stages: list[str]) -> None:
    """Print what the rest of these stages will take here."""
    with tempfile.TemporaryDirectory() as folder:
        _calibrate(recipe, Rehearsal(Path(folder), recipe.steps), stages)


def _calibrate(recipe: Recipe, rehearsal: Rehearsal, stages: list[str]) -> None:
    say = print if is_rank_zero() else lambda *_, **__: None
    say(f"{'stage':<13}{'steps':>7}{'to do':>8}{'s/step here':>13}{'time left':>13}{'peak memory':>13}")
    total, highest = 0.0, 0
    stages = [stage for stage in stages if stage in STEPS]
    if any(stage in ("transformer", "sharpen", "edits", "wide", "distill") for stage in stages):
        stages.insert(
            min(i for i, stage in enumerate(stages) if stage not in ("autoencoder", "text_encoder")), "encoding"
        )
    for stage in stages:
        if stage == "encoding":
            lists = training_scenes(SCENES, EDITS, FAMILIES) | more_scenes(ROWS, ONES)
            steps = sum(-(-len(scenes) // 32) for scenes in lists.values())
            todo = 0 if broadcast_from_rank_zero(mx.array(int(recipe.file("latents").exists()))).item() else steps
        else:
            steps = recipe.steps[stage]
            todo = max(0, steps - recipe.done(stage))
        if not todo:
            say(f"{stage:<13}{steps:>7,}{'done':>8}")
            continue
        getattr(rehearsal, stage)()
        first, each, peak = rehearsal.cost
        gc.collect()  # a run and its compiled step hold on to each other
        mx.clear_cache()
        total, highest = total + first + todo * each, max(highest, peak)
        say(f"{stage:<13}{steps:>7,}{todo:>8,}{each:>13.2f}{duration(first + todo * each):>13}{peak / 1e9:>10.2f} GB")
    say(f"{'all':<41}{duration(total):>13}{highest / 1e9:>10.2f} GB", flush=True)


def duration(seconds: float) -> str:
    """A duration in the largest units that matter."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


# ---------------------------------------------------------------- the command


def train(folder: Path, stage: str | None = None, steps: int | None = None, calibrate_only: bool = False) -> None:
    """Train the whole recipe or one stage of it, into a folder; first print what it will take here.

    Raises ValueError, with the way out, for a mistake; KeyboardInterrupt, once all is saved, after Ctrl-C.
    """
    if steps is not None and (stage not in STEPS or steps < 1):
        raise ValueError("--steps is a number from 1 on, and goes with the --stage that it is for.")
    group = mx.distributed.init()
    if group.rank() > 0:  # MLX compiles into the temporary folder, where two processes must not write the same file
        own = Path(tempfile.gettempdir()) / f"kleinlite-process-{group.rank()}"
        own.mkdir(exist_ok=True)
        os.environ["TMPDIR"] = str(own)
    if group.size() > 1 and is_rank_zero():
        print(f"{group.size()} processes, each with its own share of every step's batch")
    recipe = Recipe(folder, {**STEPS, **({stage: steps} if steps else {})})
    stages = [stage] if stage else list(STAGES)
    if calibrate_only:
        return calibrate(recipe, stages)
    recipe.check_inputs(stages[0])
    with lock_folder(folder):
        try:
            calibrate(recipe, stages)
            for name in stages:
                getattr(recipe, name)()
        except KeyboardInterrupt:
            if is_rank_zero() and any(recipe.file(name).exists() for name in STEPS):
                print(f"\nSaved in {folder}. The same command goes on from here.", file=sys.stderr)
            raise
    if is_rank_zero():
        print(f"done: {folder / 'nano' if 'export' in stages else folder}")


def main(argv: list[str] | None = None) -> int:
    """`python -m kleinlite.nano.recipe`, for `mlx.launch`; returns the exit status."""
    parser = Parser(prog="python -m kleinlite.nano.recipe", description=ABOUT, allow_abbrev=False)
    add_arguments(parser)
    options = parser.parse_args(argv)
    return run_command(train, options.folder, options.stage, options.steps, options.calibrate)


if __name__ == "__main__":
    sys.exit(main())
