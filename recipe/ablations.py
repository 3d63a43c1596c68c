"""Small transformers that differ in one thing, trained alike on nano's own latents, for chapters 3, 5 and 9.

    OPENBLAS_NUM_THREADS=1 python -m recipe.ablations notebooks/trials.json

Each net is trained several times: with other first weights, and other batches of the same scenes. The loss is then
taken on scenes whose content no training has seen. Runs of one number see the same batches and the same noise in every
net, and all are measured with the same noise, so nets are compared run by run; how far the runs of one net lie apart
says which differences mean something.

The pictures are 48 pixels wide and their latents are not patchified: a token is one place of 32 channels. Of the noise
in 128 channels a net 64 wide could hand on half at most, whatever it learns.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import count, islice
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from tqdm.auto import tqdm

from kleinlite.autoencoder import unpatchify
from kleinlite.cpu import setup
from kleinlite.models.checkpoint import open_checkpoint
from kleinlite.nano.data import encode_scenes
from kleinlite.scenes import Scene, captions, sample, scene_held_out
from kleinlite.text_encoder import tokenize
from kleinlite.training import encode_batch, flow_loss, flow_optimizer, initialize, training_step
from kleinlite.transformer import Transformer, TransformerConfig
from recipe.training import HELD_OUT, LAST

SIZE, GRID, CHANNELS = 48, (6, 6), 32  # pixels; latents before they are patchified
D_TAP = 96  # channels of one tap of nano's text encoder
SCENES, UNSEEN, BATCH, STEPS, SEEDS, RATE = 4096, 512, 8, 320, 3, 2.0


@dataclass(frozen=True)
class Net:
    """What is trained, and how long: the transformer's numbers, the text encoder's out_layers that it reads, steps."""

    heads: int = 2
    double_blocks: int = 1  # four single blocks to one double, as in the 4B
    single_blocks: int = 4
    out_layers: tuple[int, ...] = (1, 2, 3)
    steps: int = STEPS

    @property
    def cfg(self) -> TransformerConfig:
        return TransformerConfig(
            double_blocks=self.double_blocks, single_blocks=self.single_blocks, heads=self.heads, axes=(8, 8, 8, 8),
            d_text=D_TAP * len(self.out_layers), d_latent=CHANNELS,
        )  # fmt: skip

    def build(self, seed: int) -> Transformer:
        """With fresh weights."""
        model = Transformer(self.cfg)
        initialize(model, mx.random.key(seed), damp=LAST, damping=0.2)
        return model

    def count_weights(self) -> int:
        """Those in use: without double blocks the modulations of double blocks are idle, and so with single ones."""
        idle = ("double_stream",) * (not self.double_blocks) + ("single_stream",) * (not self.single_blocks)
        weights = tree_flatten(Transformer(self.cfg).parameters())
        return sum(w.size for name, w in weights if not idle or not name.startswith(idle))


NETS = {
    "32 wide": Net(heads=1), "64 wide": Net(), "128 wide": Net(heads=4),  # chapter 9
    "128 wide, 87 steps": Net(heads=4, steps=87),  # for the price of "64 wide"
    "3 double": Net(double_blocks=3, single_blocks=0), "6 single": Net(double_blocks=0, single_blocks=6),  # chapter 5
    "5 double": Net(double_blocks=5, single_blocks=0),
    "tap 1": Net(out_layers=(1,)), "tap 2": Net(out_layers=(2,)), "tap 3": Net(out_layers=(3,)),  # chapter 3
}  # fmt: skip


@dataclass(frozen=True)
class Pictures:
    """Latents (count, n, 32) and, of one caption each, the features of all three out_layers (count, m, 288)."""

    clean: mx.array
    features: mx.array

    def batch(self, rows: mx.array, net: Net, key: mx.array) -> tuple[mx.array, ...]:
        """What `net_loss` takes, with features in place of ids: `read` hands them on."""
        clean, features = (x[rows].astype(mx.float32) for x in (self.clean, self.features))
        heard = [features[..., D_TAP * (k - 1) : D_TAP * k] for k in net.out_layers]
        return clean, clean[:, :0], mx.concatenate(heard, axis=-1), mx.array(0), key


def read(features: mx.array, mask: mx.array) -> mx.array:
    """In place of the text encoder: the features are there already."""
    return features


def net_loss(model: Transformer, *batch: mx.array) -> mx.array:
    """The flow loss of a `Pictures.batch`."""
    *arrays, key = batch
    return flow_loss(model, encode_batch(model, read, GRID, *arrays), key)


def encode_pictures(scenes: Iterable[Scene], number: int) -> Pictures:
    """The first so many scenes, and a caption of each, through nano's autoencoder and text encoder."""
    scenes, nano = list(islice(scenes, number)), open_checkpoint("nano", dtype=mx.float32)
    texts = [random.Random(i).choice(captions(scene)) for i, scene in enumerate(scenes)]
    text_encoder, tokenizer, features = nano.load_text_encoder(), nano.load_tokenizer(), []
    for i in range(0, number, 64):
        features.append(text_encoder(*tokenize(tokenizer, texts[i : i + 64], nano.info.max_length)).astype(mx.float16))
        mx.eval(features[-1])
    patchified = encode_scenes(nano.load_autoencoder(), scenes, SIZE).reshape(
        number, SIZE // 16, SIZE // 16, 4 * CHANNELS
    )
    return Pictures(unpatchify(patchified).reshape(number, GRID[0] * GRID[1], CHANNELS), mx.concatenate(features))


def encode_all(scenes: int, unseen: int) -> tuple[Pictures, Pictures]:
    """What is trained on, and what is kept from it by its content."""
    known = (scene for scene in map(sample, count()) if not scene_held_out(scene))
    new = (scene for scene in map(sample, count(HELD_OUT)) if scene_held_out(scene))
    return encode_pictures(known, scenes), encode_pictures(new, unseen)


def held_out_loss(model: Transformer, net: Net, unseen: Pictures) -> float:
    """The flow loss on all these pictures, each with four draws of noise and time."""
    total, losses = len(unseen.clean), []
    for i in range(0, total, 64):
        rows = mx.arange(i, min(i + 64, total))
        losses += [net_loss(model, *unseen.batch(rows, net, mx.random.key(i + k))) for k in range(4)]
        mx.eval(losses)
    return sum(loss.item() for loss in losses) / len(losses)


def train(net: Net, seen: Pictures, unseen: Pictures, seed: int) -> dict:
    """One run: held-out loss, the same with exchanged captions, training loss tenth by tenth, processor seconds."""
    model, start, losses = net.build(seed), time.process_time(), []
    update = training_step(model, flow_optimizer(net.steps, RATE), net_loss)
    for key in mx.random.split(mx.random.key(1000 + seed), net.steps):
        k_rows, k_noise = mx.random.split(key)
        rows = mx.random.randint(0, len(seen.clean), (BATCH,), key=k_rows)
        losses.append(update(*seen.batch(rows, net, k_noise)).item())
    seconds, tenth = time.process_time() - start, max(1, net.steps // 10)
    means = [round(sum(part) / len(part), 4) for part in (losses[i : i + tenth] for i in range(0, net.steps, tenth))]
    exchanged = replace(unseen, features=mx.roll(unseen.features, 1, axis=0))  # each reads its neighbor's caption
    return {
        "seed": seed, "seconds": round(seconds, 1), "training": means,
        "held_out": round(held_out_loss(model, net, unseen), 5),
        "other_captions": round(held_out_loss(model, net, exchanged), 5),
    }  # fmt: skip


def run_trials(
    nets: dict[str, Net], scenes: int = SCENES, unseen: int = UNSEEN, seeds: int = SEEDS,
    progress: Callable[[Iterable], Iterable] = iter,
) -> dict:  # fmt: skip
    """Train every net from every seed; what `notebooks/trials.json` holds."""
    setup()  # before the first large array: a fast matrix product where MLX's own is slow
    seen, kept = encode_all(scenes, unseen)
    found = {
        name: asdict(net) | {"width": net.cfg.d, "weights": net.count_weights(), "runs": []}
        for name, net in nets.items()
    }
    for seed, name in progress([(seed, name) for seed in range(seeds) for name in nets]):
        found[name]["runs"].append(train(nets[name], seen, kept, seed))
    return {
        "made by": "python -m recipe.ablations",
        "versions": {"python": platform.python_version(), "mlx": version("mlx"), "kleinlite": version("kleinlite")},
        "machine": f"{platform.system()} {platform.machine()}, {mx.default_device()}",
        "scenes": scenes, "unseen": unseen, "batch": BATCH,
        "nets": found,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train small transformers that differ in one thing, and compare.")
    parser.add_argument("path", type=Path, help="the JSON to write, notebooks/trials.json in the book")
    options = parser.parse_args(argv)
    found = run_trials(NETS, progress=lambda runs: tqdm(runs, desc="training"))
    options.path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name, net in found["nets"].items():
        print(f"{name:19}{net['weights']:10,} weights  held-out loss", *(run["held_out"] for run in net["runs"]))


if __name__ == "__main__":
    main()
