"""The released autoencoder in strips and whole: memory, seconds, and the largest difference. Hand-written.

    python -m benchmarks.strips 256 512 1024

Random weights and latents. What is whole runs once, since it is slow and large; strips run `--turns` times.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import mlx.core as mx

from kleinlite.autoencoder import Autoencoder, AutoencoderConfig, Decoder, Encoder
from kleinlite.cpu import setup
from kleinlite.inference.strips import use_strips


def measure(run: Callable[[], mx.array], turns: int = 1) -> tuple[mx.array, float, int]:
    """The result, the median of seconds, and the most bytes beyond what is in memory already."""
    held = mx.get_active_memory()
    mx.clear_cache()
    mx.reset_peak_memory()
    seconds = []
    for _ in range(turns):
        start = time.perf_counter()
        result = run()
        mx.eval(result)
        seconds.append(time.perf_counter() - start)
    return result, sorted(seconds)[turns // 2], mx.get_peak_memory() - held


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sides", type=int, nargs="*", default=[256, 512], help="pixels; 256 and 512 if not given")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--whole", type=int, default=512, help="the largest side that is also done whole (512)")
    args = parser.parse_args()
    setup()
    mx.random.seed(0)
    net = Autoencoder(AutoencoderConfig())
    net.eval()
    mx.eval(net.parameters())
    use_strips(net)
    print(f"MLX {mx.__version__}, {mx.default_device()}; beyond the weights")
    for side in args.sides:
        latents = mx.random.normal((1, side // 16, side // 16, 128))
        picture = mx.random.uniform(-1, 1, (1, side, side, 3))
        mx.eval(latents, picture)
        tasks = {"decode": (net.decoder, Decoder, partial(net.decode, latents))}
        tasks["encode"] = (net.encoder, Encoder, partial(net.encode, picture))
        for name, (part, plain, run) in tasks.items():
            result, seconds, nbytes = measure(run, args.turns)
            line = f"{name} {side}²: strips {nbytes / 1e6:,.0f} MB, {seconds:.1f} s"
            if side <= args.whole:
                in_strips = part.__class__
                part.__class__ = plain
                whole, seconds, nbytes = measure(run)
                part.__class__ = in_strips
                off = mx.abs(whole - result).max().item()
                line += f"; whole {nbytes / 1e6:,.0f} MB, {seconds:.1f} s; at most {off:.1e} apart"
            print(line, flush=True)


if __name__ == "__main__":
    main()
