"""What each way of quantising costs: the error of every layer and the difference it makes to pictures. Hand-written.

    python -m benchmarks.quantization                 nano, all settings: seconds
    python -m benchmarks.quantization 4b --only 4 8   a released model: one picture per setting
    python -m benchmarks.quantization --speed         time of a quantized block of the 4B / in float32

Chapter 7 says what the settings are, and shows some of the pictures. Differences of pictures are means in levels of 255
over all pixels, channels and prompts; same seeds, so that only the weights differ.
"""

import argparse
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from benchmarks.turns import race
from kleinlite.klein import Klein
from kleinlite.models.checkpoint import open_checkpoint
from kleinlite.models.formats import load_weights
from kleinlite.models.quantize_network import plain_matrix, quantize, should_quantize
from kleinlite.pipeline import to_pixels
from kleinlite.position_ids import rope_table
from kleinlite.quantization import QUANT_SPECS, QuantizedMatrix, QuantSpec, quantize_matrix
from kleinlite.transformer import SingleBlock, TransformerConfig

PROMPTS = (
    "a red circle above a blue square",
    "a yellow star",
    "a red house under a yellow sun",
    "a white boat at sunset",
)


@dataclass(frozen=True)
class Cost:
    """One setting, measured."""

    setting: int | str
    bits: float  # per weight of a quantized matrix, scales included
    megabytes: float  # the transformer's matrices and what is left whole
    errors: dict[str, float]  # relative error of every quantized matrix
    difference: float  # of the pictures, in levels of 255

    @property
    def worst(self) -> str:
        return max(self.errors, key=self.errors.get)


def measure_layer_errors(name: str | Path, p: QuantSpec) -> tuple[dict[str, float], int]:
    """Relative error (root mean square) of each quantized matrix of the transformer, and the bytes of all its weights.

    One matrix at a time, so that it works for models larger than the memory.
    """
    weights = open_checkpoint(name, dtype=mx.float32).weights("transformer")
    total = sum(w.shape[0] * w.shape[1] for w in weights.values() if len(w.shape) == 2)
    errors, nbytes = {}, 0
    for path in list(weights):
        w = plain_matrix(weights.pop(path))
        if len(w.shape) != 2 or not should_quantize(w.shape, total, p):
            nbytes += w.nbytes
            continue
        quantized: QuantizedMatrix = quantize_matrix(w, p)
        off, exact = quantized.decode() - w.astype(mx.float32), w.astype(mx.float32)
        errors[path.removesuffix(".weight")] = mx.sqrt(off.square().mean() / exact.square().mean()).item()
        nbytes += sum(t.nbytes for t in quantized.tensors.values())
    return errors, nbytes


def measure_costs(
    name: str | Path = "nano", settings: Iterable[int | str] = QUANT_SPECS, prompts: Sequence[str] = PROMPTS, **request
) -> Iterator[Cost]:
    """Each setting's cost, one after the other. request: size and steps of the pictures, as for a `Klein`."""
    seeds = list(range(len(prompts)))

    def draw(klein):
        return [to_pixels(x) for x in klein(list(prompts), seed=seeds, progress=False, **request)]

    exact = draw(Klein.from_pretrained(name))
    for setting in settings:
        errors, nbytes = measure_layer_errors(name, QUANT_SPECS[setting])
        pairs = zip(draw(Klein.from_pretrained(name, quantize=setting)), exact)
        difference = statistics.mean(mx.abs(a - b).mean().item() * 127.5 for a, b in pairs)
        yield Cost(setting, QUANT_SPECS[setting].bits_per_weight, nbytes / 1e6, errors, difference)


HEADER = (
    "| quantize | bits per weight | transformer, MB | error of a layer | worst layer | pictures differ by |\n"
    "|-|-|-|-|-|-|"
)


def format_row(c: Cost) -> str:
    """A line of the table, in Markdown."""
    typical, worst = statistics.median(c.errors.values()), f"{c.worst} {c.errors[c.worst]:.1%}"
    return f"| {c.setting} | {c.bits:.2f} | {c.megabytes:,.1f} | {typical:.1%} | {worst} | {c.difference:.1f} |"


def time_block(setting: int | str, tokens: Sequence[int] = (64, 256, 768, 1536)) -> dict[int, float]:
    """Time of one single block of the 4B's shape, quantized / its time in float32, for each count of tokens.

    setting: as for `quantize`, or "bfloat16", the matrices kept in 16 bits. Both are timed in turns, four times, and
    the best counts: other work comes and goes. With OPENBLAS_NUM_THREADS=1 it is processor time, which a busy machine
    changes least.
    """
    cfg = TransformerConfig()
    whole, quantized = SingleBlock(cfg), SingleBlock(cfg)
    mx.eval(whole.parameters())
    weights = {k: w.astype(mx.bfloat16) for k, w in tree_flatten(whole.parameters())}
    load_weights(quantized, weights, mx.float32, keep_narrow=True)
    if setting != "bfloat16":
        quantize(quantized, QUANT_SPECS[setting], mx.float32)
    del weights
    ratios = {}
    for n in tokens:
        x = mx.random.normal((1, n, cfg.d))
        mod = [mx.zeros((1, 1, cfg.d))] * 3
        rope = rope_table(mx.zeros((n, 4), dtype=mx.int32), cfg.axes, cfg.theta)
        best = [min(turns) for turns in race([partial(block, x, mod, rope) for block in (whole, quantized)], rounds=4)]
        ratios[n] = best[1] / best[0]
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantization", description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="nano")
    parser.add_argument("--only", nargs="+", metavar="SETTING", help=f"some of {', '.join(map(str, QUANT_SPECS))}")
    parser.add_argument("--size", type=int, help="side of the pictures in pixels; the model's own if not given")
    parser.add_argument("--speed", action="store_true", help="time a quantized block instead")
    args = parser.parse_args()
    settings = [int(s) if s.isdigit() else s for s in args.only] if args.only else QUANT_SPECS
    if args.speed:
        for setting in ("bfloat16", *settings):
            ratios = ", ".join(f"{n} tokens {ratio:.2f}" for n, ratio in time_block(setting).items())
            print(f"{setting}: {ratios}", flush=True)
        return
    print(HEADER)
    for c in measure_costs(args.model, settings, width=args.size, height=args.size):
        print(format_row(c), flush=True)


if __name__ == "__main__":
    main()
