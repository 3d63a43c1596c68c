"""The whole recipe of klein-nano, from drawn scenes to a bundled model. Stop it at any time: it goes on where it was.

    python -m kleinlite.train RUNS                 all stages, into the folder RUNS
    python -m kleinlite.train RUNS --stage NAME    autoencoder, text_encoder, transformer, sharpen, distill or export

Chapter 8 explains every part. The same code runs on a CPU (hours), on Metal and on CUDA.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_unflatten
from tokenizers import Tokenizer
from tqdm.auto import tqdm

from .autoencoder import Autoencoder, AutoencoderConfig
from .checkpoints import load_tokenizer
from .evaluate import contact_sheet
from .export import save_encoders, save_transformer
from .pipeline import Klein
from .scenes import sample
from .text_encoder import TextEncoder, TextEncoderConfig, tokenize
from .training import (
    FlowData,
    Run,
    autoencoder_batch,
    autoencoder_loss,
    distill_loss,
    encode_training_set,
    flow_loss,
    flow_optimizer,
    initialise,
    learning_rate,
    measure_latents,
    pictures,
    psnr,
    text_batch,
    text_encoder_loss,
    train_tokenizer,
)  # fmt: skip
from .transformer import Transformer, TransformerConfig

SIZE, GRID, TOKENS = 96, (6, 6), 32
HELD_OUT = 10_000_000  # scenes from this seed on are never trained on
GUIDANCE = 3.0  # what the distilled model learns to do without being asked
AUTOENCODER = AutoencoderConfig(channels=(16, 32, 64, 96), layers=1, groups=8)
TRANSFORMER = TransformerConfig(double_blocks=2, single_blocks=5, heads=4, axes=(8, 8, 8, 8), d_text=288)
STEPS = {"autoencoder": 2000, "text_encoder": 700, "transformer": 7200, "sharpen": 760, "distill": 240}
SCENES, EDITS = 16_000, 6_000
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


def averaged(path: Path, module):
    """The module with a run's moving average as its weights."""
    if not path.exists():
        raise SystemExit(f"{path} is missing: train that stage first (or leave out --stage to train all).")
    prefix = "average."
    arrays = mx.load(str(path))
    module.update(tree_unflatten([(k[len(prefix) :], w) for k, w in arrays.items() if k.startswith(prefix)]))
    return module


def follow(run: Run, until: int, loss, batches, report, every: int = 200) -> None:
    """Train with a progress bar; save and report every so many steps."""
    bar = tqdm(total=until, initial=run.step, desc=run.path.stem, smoothing=0.05)
    recent = 0.0
    for value in run.steps(until, loss, batches):
        recent = value if recent == 0 else 0.98 * recent + 0.02 * value
        bar.update()
        if run.step % every == 0 or run.step == until:
            run.save()
            bar.write(f"{run.path.stem} {run.step}: loss {recent:.4f}, {report()}")
    bar.close()


class Recipe:
    """The stages, each reading what the ones before left in the folder."""

    def __init__(self, folder: Path, steps: dict[str, int]):
        self.folder, self.steps = folder, steps
        folder.mkdir(parents=True, exist_ok=True)

    def file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def tokenizer(self) -> Tokenizer:
        path = self.folder / "tokenizer" / "tokenizer.json"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            train_tokenizer().save(str(path))
        return load_tokenizer(self.folder)

    def trained_autoencoder(self) -> Autoencoder:
        model = averaged(self.file("autoencoder"), Autoencoder(AUTOENCODER))
        measure_latents(model, SIZE)
        return model

    def trained_text_encoder(self) -> TextEncoder:
        model = averaged(self.file("text_encoder"), TextEncoder(text_config(self.tokenizer())))
        model.freeze()
        return model

    def data(self) -> FlowData:
        path = self.file("latents")
        if not path.exists():
            bar = lambda rows: tqdm(rows, desc="encoding scenes")
            arrays = encode_training_set(self.trained_autoencoder(), SIZE, SCENES, EDITS, bar)
            mx.save_safetensors(str(path), arrays)
        return FlowData(mx.load(str(path)), self.tokenizer(), TOKENS, batch=32)

    def autoencoder(self) -> None:
        until, model = self.steps["autoencoder"], Autoencoder(AUTOENCODER)
        initialise(model, mx.random.key(0), damp=("conv2", "proj_out"))
        optimizer = optim.AdamW(learning_rate(2e-3, until), betas=[0.9, 0.99], weight_decay=0.0, bias_correction=True)
        run = Run(self.file("autoencoder"), model, optimizer, decay=0.995)
        x = pictures(range(HELD_OUT, HELD_OUT + 16), SIZE)

        def report() -> str:
            best = averaged(run.path, Autoencoder(AUTOENCODER))
            return f"held-out PSNR {psnr(best.decode(best.encode(x)), x):.2f} dB"

        follow(run, until, autoencoder_loss, lambda step: autoencoder_batch(step, 16, SIZE, 48), report)

    def text_encoder(self) -> None:
        until, tokenizer = self.steps["text_encoder"], self.tokenizer()
        model = TextEncoder(text_config(tokenizer))
        initialise(model, mx.random.key(1), damp=("o_proj", "down_proj"), damping=0.3)
        # Variance 1/width would leave the words too quiet beside what the layers add: the taps must still name them.
        shape = model.embed_tokens.weight.shape
        model.embed_tokens.weight = 0.5 * mx.random.normal(shape, key=mx.random.key(2))
        optimizer = optim.AdamW(learning_rate(2e-3, until), betas=[0.9, 0.98], weight_decay=0.0, bias_correction=True)
        run = Run(self.file("text_encoder"), model, optimizer, decay=0.995)
        held = text_batch(tokenizer, TOKENS, HELD_OUT, 64)
        report = lambda: f"held-out scenes {text_encoder_loss(model, *held).item():.3f} nats per token"
        follow(run, until, text_encoder_loss, lambda step: text_batch(tokenizer, TOKENS, step, 64), report)

    def transformer(self) -> None:
        until, data, text_encoder = self.steps["transformer"], self.data(), self.trained_text_encoder()
        model = Transformer(TRANSFORMER)
        last = (
            "linear2",
            "proj",
            "img_mlp.2",
            "txt_mlp.2",
            "final_layer.linear",
            "adaLN_modulation.1",
            "lin",
        )
        initialise(model, mx.random.key(3), damp=last, damping=0.2)
        run = Run(self.file("transformer"), model, flow_optimizer(until))
        self.follow_flow(run, until, data, text_encoder)

    def follow_flow(self, run: Run, until: int, data: FlowData, text_encoder: TextEncoder) -> None:
        loss = lambda model, *batch: flow_loss(model, text_encoder, GRID, *batch)
        follow(run, until, loss, data, lambda: self.grid(run.path.stem, distilled=False))

    def sharpen(self) -> None:
        """Go on with circles and squares five times as often: the kinds that look most alike are learned last."""
        until, data, text_encoder = self.steps["sharpen"], self.data(), self.trained_text_encoder()
        alike = [s for s in data.seeds if any(t.kind in ("circle", "square") for t in sample(s).things)]
        data.seeds += 4 * alike
        model = averaged(self.file("transformer"), Transformer(TRANSFORMER))
        run = Run(self.file("sharpen"), model, flow_optimizer(until, rate=0.6), decay=0.99)
        self.follow_flow(run, until, data, text_encoder)

    def distill(self) -> None:
        until, data, text_encoder = self.steps["distill"], self.data(), self.trained_text_encoder()
        teacher = averaged(self.file("sharpen"), Transformer(TRANSFORMER))
        teacher.freeze()
        student = averaged(self.file("sharpen"), Transformer(TRANSFORMER))
        empty = text_encoder(*tokenize(self.tokenizer(), [""], TOKENS))
        optimizer = optim.AdamW(learning_rate(5e-4, until), betas=[0.9, 0.99], weight_decay=0.0, bias_correction=True)
        run = Run(self.file("distill"), student, optimizer, decay=0.99)
        loss = lambda model, *batch: distill_loss(model, teacher, text_encoder, empty, GUIDANCE, GRID, *batch)
        follow(run, until, loss, data, lambda: self.grid("distill", distilled=True))

    def export(self) -> Path:
        """Write `nano` (distilled, if that stage has run) and inside it `base`, ready to be bundled."""
        out, tokenizer, text_encoder = self.folder / "nano", self.tokenizer(), self.trained_text_encoder()
        save_encoders(out, self.trained_autoencoder(), AUTOENCODER, SIZE, text_encoder, tokenizer)
        for name, folder, distilled in (("sharpen", out / "base", False), ("distill", out, True)):
            model = averaged(self.file(name), Transformer(TRANSFORMER))
            save_transformer(folder, model, text_config(tokenizer), distilled)
        return out

    def grid(self, name: str, distilled: bool) -> str:
        """Draw the sample prompts with a run's average, side by side, into a PNG named after its step."""
        preview = self.folder / "preview"
        text_encoder, tokenizer = self.trained_text_encoder(), self.tokenizer()
        if not (preview / "vae").exists():
            save_encoders(preview, self.trained_autoencoder(), AUTOENCODER, SIZE, text_encoder, tokenizer)
        model = averaged(self.file(name), Transformer(TRANSFORMER))
        save_transformer(preview, model, text_config(tokenizer), distilled)
        klein = Klein.from_pretrained(preview)
        more = {} if distilled else {"steps": 8, "guidance": GUIDANCE}
        drawn = klein(list(SAMPLES), seed=[0] * len(SAMPLES), progress=False, **more)
        contact_sheet(drawn).save(self.folder / f"{name}.png")
        return f"samples in {self.folder / name}.png"


def main(argv: list[str] | None = None) -> None:
    stages = ("autoencoder", "text_encoder", "transformer", "sharpen", "distill", "export")
    parser = argparse.ArgumentParser(description="Train klein-nano; resumable.")
    parser.add_argument("folder", type=Path, help="where runs and results are kept")
    parser.add_argument("--stage", choices=stages, help="only this stage")
    parser.add_argument("--steps", type=int, help="steps of this stage (with --stage)")
    options = parser.parse_args(argv)
    steps = {**STEPS, **({options.stage: options.steps} if options.stage and options.steps else {})}
    recipe = Recipe(options.folder, steps)
    for stage in [options.stage] if options.stage else stages:
        getattr(recipe, stage)()
    print(f"done: {options.folder}")


if __name__ == "__main__":
    main()
