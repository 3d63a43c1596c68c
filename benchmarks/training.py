"""What a step of adapter training takes, predicted and measured, on a random transformer of any shape.

python -m benchmarks.training                              a fifth of 4B: one double block and four single ones
python -m benchmarks.training --width 1024 --size 256      narrower, on smaller pictures
python -m benchmarks.training --plan                       only what the released base models would take
"""

import argparse
import itertools
import time

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from kleinlite.cpu import setup, speed_up
from kleinlite.inference.picture_memory import compute_dtype
from kleinlite.lora import attach, freeze_except, new_deltas
from kleinlite.models.configs import RELEASED_CONFIGS
from kleinlite.models.quantize_network import quantize
from kleinlite.position_ids import image_ids, text_ids
from kleinlite.quantization import QUANT_SPECS
from kleinlite.trainer.checkpointing import enable_gradient_checkpointing
from kleinlite.trainer.training_memory import COPIES, plan_training
from kleinlite.training import velocity_loss
from kleinlite.transformer import Transformer, TransformerConfig


def measure(cfg: TransformerConfig, size: int, tokens: int, rank: int, bits: int | None) -> tuple[int, int, float]:
    """Bytes of the weights, bytes on top of them in one step, and its seconds."""
    net, dtype = Transformer(cfg), compute_dtype()
    net.set_dtype(dtype)
    if bits:
        quantize(net, QUANT_SPECS[bits], dtype)
    mx.eval(net.parameters())
    weights = sum(w.nbytes for _, w in tree_flatten(net.parameters()))
    changes = new_deltas(net, rank, mx.random.key(0))
    attach(net, "new", changes)
    freeze_except(net, changes)
    enable_gradient_checkpointing(net)
    side = size // 16
    speed_up(net)  # as a network that is loaded
    x, eps = (mx.random.normal((1, side * side, 128), key=mx.random.key(i)).astype(dtype) for i in (1, 2))
    txt = mx.random.normal((1, tokens, cfg.d_text), key=mx.random.key(3)).astype(dtype)
    batch = x, txt, mx.array([0.6]), eps, net.rope(image_ids(side, side), text_ids(tokens))
    mx.eval(batch, net.parameters())
    gradients = nn.value_and_grad(net, velocity_loss)
    mx.clear_cache()
    mx.reset_peak_memory()
    before, start = mx.get_active_memory(), time.perf_counter()
    mx.eval(gradients(net, *batch))
    return weights, mx.get_peak_memory() - before, time.perf_counter() - start


def plan_table(rank: int = 16) -> str:
    """What training takes at most, for the released base models on a GPU, as a table of the page on machines."""
    rows = ["| model | weights | training at 512², GB | at 1024² |", "|---|---|--:|--:|"]
    widths = {"bfloat16": 16, "8 bits": QUANT_SPECS[8].bits_per_weight, "4 bits": QUANT_SPECS[4].bits_per_weight}
    for name, (words, bits) in itertools.product(("4b", "9b"), widths.items()):
        configs, shared = RELEASED_CONFIGS[name], {"bits": bits, "rank": rank, "cpu": False}
        plans = [plan_training(configs, (side, side), **shared) for side in (512, 1024)]
        rows.append(f"| `base-{name}` | {words} | " + " | ".join(f"{p.peak_bytes / 1e9:.1f}" for p in plans) + " |")
    return "\n".join(rows)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Memory and time of a step of adapter training.")
    parser.add_argument("--width", type=int, default=3072, help="of the transformer, a multiple of 128 (default: 4B's)")
    parser.add_argument("--blocks", type=int, nargs=2, default=(1, 4), metavar=("DOUBLE", "SINGLE"))
    parser.add_argument("--size", type=int, default=512, help="pixels along a side of the picture")
    parser.add_argument("--tokens", type=int, default=512, help="of the text")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--bits", type=int, choices=(4, 8), help="quantize the weights")
    parser.add_argument("--plan", action="store_true", help="only predict, for the released base models")
    options = parser.parse_args(argv)
    if options.plan:
        return print(plan_table(options.rank))
    setup()
    _, text_cfg, vae_cfg = RELEASED_CONFIGS["4b"]
    double, single = options.blocks
    cfg = TransformerConfig(double_blocks=double, single_blocks=single, heads=options.width // 128)
    bits = QUANT_SPECS[options.bits].bits_per_weight if options.bits else 8 * compute_dtype().size
    plan = plan_training((cfg, text_cfg, vae_cfg), (options.size, options.size), bits=bits, rank=options.rank)
    weights, above, seconds = measure(cfg, options.size, options.tokens, options.rank, options.bits)
    print(f"{double} + {single} blocks, {options.width} wide, {options.size}², rank {options.rank}")
    print(f"weights       measured {weights / 1e9:.2f} GB")
    predicted = plan.adapter / COPIES + plan.activations  # here are no average, no moments
    print(f"on top of it  measured {above / 1e9:.2f} GB, predicted {predicted / 1e9:.2f} GB")
    print(f"a step        {seconds:.1f} s")


if __name__ == "__main__":
    main()
