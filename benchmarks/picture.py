"""What a picture costs: seconds, memory and bytes read, stage by stage, beside what arithmetic predicts. Hand-written.

    python -m benchmarks.picture 4b --size 512 --quantize 4    your model on your machine
    python -m benchmarks.picture --full                        a random model as large as 4b: written, run, deleted

The second shows, without a download, that loading keeps its promises: the files have the released names, shapes and
types, and random numbers in them. `make bench-full` calls it; it takes 16 GB of disk and, on a CPU, its time.
"""

import argparse
import math
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from kleinlite.autoencoder import Autoencoder, AutoencoderConfig
from kleinlite.files import write_json
from kleinlite.inference.machine_memory import all_parts_fit
from kleinlite.inference.picture_memory import MemoryPlan, compute_dtype
from kleinlite.klein import Klein
from kleinlite.memory import count_parameters, count_prompt, count_step
from kleinlite.models.checkpoint import open_checkpoint, resolve_model
from kleinlite.models.configs import RELEASED_CONFIGS
from kleinlite.models.export import DIFFUSERS_STEM, write_config, write_safetensors
from kleinlite.models.families import KLEIN
from kleinlite.models.families.klein import AUTOENCODER_NAMES, TRANSFORMER_NAMES
from kleinlite.models.families.qwen3 import TEXT_ENCODER_NAMES
from kleinlite.quantization import QUANT_SPECS
from kleinlite.text_encoder import TextEncoder, TextEncoderConfig
from kleinlite.transformer import Transformer, TransformerConfig
from recipe.saving import format_index, to_released

# ---------------------------------------------------------------- a random model in the released layout


def make_random_weights(arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    """bfloat16 stand-ins, not yet computed: matrices that keep sizes as they are, norms that do nothing."""
    block = mx.random.normal((2**22,), key=mx.random.key(0)).astype(mx.bfloat16)

    def stand_in(name: str, shape: tuple[int, ...]) -> mx.array:
        size = math.prod(shape)
        if len(shape) < 2:
            return mx.full(shape, 0 if name.endswith(("bias", "mean")) else 1, dtype=mx.bfloat16)
        scaled = block * (size // shape[0]) ** -0.5
        return mx.tile(scaled, -(-size // block.size))[:size].reshape(shape)  # drawing 8 billion would take minutes

    return {name: stand_in(name, w.shape) for name, w in arrays.items()}


def write_model(folder: Path, cfg: TransformerConfig, text_cfg: TextEncoderConfig, vae: AutoencoderConfig) -> None:
    """A random model's folder as the released ones are, in bfloat16, a file for each part; with nano's tokenizer."""

    def write(part: str, module: nn.Module, rules: list, stem: str, config: dict) -> None:
        arrays = make_random_weights(to_released(module, rules, mx.bfloat16))
        write_config(folder / part, config)
        write_safetensors(folder / part / f"{stem}.safetensors", arrays, mx.clear_cache)

    config = KLEIN.autoencoder.format(vae) | {"sample_size": 1024}
    write("vae", Autoencoder(vae), AUTOENCODER_NAMES, DIFFUSERS_STEM, config)
    write("transformer", Transformer(cfg), TRANSFORMER_NAMES, DIFFUSERS_STEM, KLEIN.transformer.format(cfg))
    config = KLEIN.text_encoder.format(text_cfg)
    write("text_encoder", TextEncoder(text_cfg), TEXT_ENCODER_NAMES, "model", config)
    (folder / "tokenizer").mkdir()
    shutil.copyfile(resolve_model("nano") / "tokenizer/tokenizer.json", folder / "tokenizer/tokenizer.json")
    write_json(folder / "model_index.json", format_index(text_cfg, distilled=True))


# ---------------------------------------------------------------- measuring


class Cost(NamedTuple):
    """Of one stage, measured or predicted. Memory is the most in use while it ran, whatever it was in use for."""

    seconds: float
    resident: float  # bytes of the whole process
    arrays: float  # bytes of MLX's arrays
    read: float  # bytes read from files


def peak_resident_bytes() -> int:
    """The most memory that this process has had: on Linux since `reset_peaks`, elsewhere since it began."""
    if sys.platform == "linux":
        return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    import resource  # Windows has none

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on a Mac


def reset_peaks() -> None:
    mx.reset_peak_memory()
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM


def bytes_read() -> float:
    """What this process has read so far; only Linux tells."""
    counts = Path("/proc/self/io")
    return float(re.search(r"rchar: (\d+)", counts.read_text())[1]) if counts.exists() else math.nan


PROMPT = "a red fox in the snow, 85 mm"


def measure(klein: Klein, size: int, steps: int) -> dict[str, Cost]:
    """Draw one picture in stages, each as `Klein` does it."""
    costs, work = {}, {}
    work["prompt"] = lambda: klein.encode_prompt(PROMPT)
    work["load"] = lambda: mx.eval(klein.parts.load("transformer").parameters())
    stream = klein.stream(PROMPT, width=size, height=size, steps=steps, seed=7, progress=False)
    for i in range(1, steps + 1):
        work[f"step {i}"] = lambda: next(stream).latents.reshape(1, size // 16, size // 16, -1)

    def decode():
        list(stream)  # there is no step left: the transformer goes, if it would not fit beside the decoder
        return klein.parts.load("autoencoder").decode(result)

    for stage, do in {**work, "decode": decode}.items():
        reset_peaks()
        read, start = bytes_read(), time.perf_counter()
        result = do()
        mx.eval(result if result is not None else ())
        costs[stage] = Cost(
            time.perf_counter() - start, peak_resident_bytes(), mx.get_peak_memory(), bytes_read() - read
        )
        print(f"{stage}: {costs[stage].seconds:.1f} s", file=sys.stderr, flush=True)
    return costs


# ---------------------------------------------------------------- predicting


def measure_flops_per_second() -> float:
    """Floating-point operations per second in a matrix product of this machine, as a transformer's are."""
    a, b = (mx.random.normal((1024, 2048)).astype(compute_dtype()) for _ in range(2))
    mx.eval(a @ b.T)
    start = time.perf_counter()
    mx.eval(a @ b.T)
    return 2 * 1024 * 1024 * 2048 / (time.perf_counter() - start)


def predict(klein: Klein, model: str, plan: MemoryPlan, size: int, steps: int, base: int) -> dict[str, Cost]:
    """The same ledger by arithmetic. base: bytes of the process before anything was read."""
    cfg, text_cfg, vae_cfg = klein.parts.configs
    rate = measure_flops_per_second()
    files = open_checkpoint(model, dtype=mx.float32).files
    prompt, step = count_prompt(text_cfg), count_step(cfg, text_cfg.max_length, size * size // 256)
    seconds = {"prompt": prompt.total / rate, "step": step.total / rate}
    memory = {
        "prompt": plan.text_encoder + plan.encode,
        "load": plan.transformer,
        "step": plan.transformer + plan.step,
        "decode": all_parts_fit(plan) * plan.transformer + plan.autoencoder + plan.decode,
    }

    def count(module):
        return sum(w.size for _, w in tree_flatten(module.parameters()))

    used, vae = count_parameters(TextEncoder, text_cfg), Autoencoder(vae_cfg)  # only some layers are read
    read = {
        "prompt": files["text_encoder"].nbytes * used / count(TextEncoder(text_cfg)),
        "load": files["transformer"].nbytes,
        "decode": files["autoencoder"].nbytes * count(vae.decoder) / count(vae),
    }
    stages = ["prompt", "load", *(f"step {i}" for i in range(1, steps + 1)), "decode"]

    def cost(kind):
        return Cost(seconds.get(kind, math.nan), base + memory[kind], memory[kind], read.get(kind, 0.0))

    return {stage: cost(stage.split()[0]) for stage in stages}


def format_table(measured: dict[str, Cost], predicted: dict[str, Cost]) -> str:
    """Markdown: each number measured, and in brackets predicted."""
    lines = ["| stage | seconds | resident, GB | MLX's arrays, GB | read, GB |", "|---|--:|--:|--:|--:|"]

    def pair(a, b, digits):
        return f"{a:.{digits}f} ({'–' if math.isnan(b) else f'{b:.{digits}f}'})"

    for stage, cost in measured.items():
        scaled = [(cost[i] / (1, 1e9, 1e9, 1e9)[i], predicted[stage][i] / (1, 1e9, 1e9, 1e9)[i]) for i in range(4)]
        lines.append(f"| {stage} | {pair(*scaled[0], 1)} | " + " | ".join(pair(*s, 2) for s in scaled[1:]) + " |")
    peak = [max(cost.resident for cost in costs.values()) / 1e9 for costs in (measured, predicted)]
    return "\n".join([*lines, f"| whole run | | **{pair(*peak, 2)}** | | |"])


# ---------------------------------------------------------------- python -m benchmarks.picture


def print_costs(model: str, quantize: int | str | None, size: int | None, steps: int) -> None:
    """Draw a picture with a model and print what each stage cost."""
    klein = Klein.from_pretrained(model, quantize=quantize)
    size = size or klein.info.size
    plan = klein.plan_memory(PROMPT, width=size, height=size, steps=steps, seed=7)
    base = peak_resident_bytes()
    predicted = predict(klein, model, plan, size, steps, base)
    measured = measure(klein, size, steps)
    bits = "as stored" if quantize is None else f"quantize={quantize}"
    where = f"{mx.default_device()}, MLX {mx.__version__}"
    print(f"{Path(model).name}, {bits}, {size} × {size}, {where}: measured (predicted)")
    print(f"\n{format_table(measured, predicted)}\n", flush=True)


def run_full_size(model: str, folder: Path, size: int, steps: int) -> None:
    """Write a random model and print its ledger in three precisions, each in a process of its own."""
    if not (folder / "model_index.json").exists():
        print(f"writing a random {model} ...", file=sys.stderr)
        write_model(folder, *RELEASED_CONFIGS[model])
    for quantize in ([], ["--quantize", "8"], ["--quantize", "4"]):
        options = [str(folder), *quantize, f"--size={size}", f"--steps={steps}"]
        subprocess.run([sys.executable, "-m", "benchmarks.picture", *options], check=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.picture", description="What a picture costs.")
    parser.add_argument("model", nargs="?", default="nano", help="a model's name, or a folder")
    parser.add_argument("--quantize", choices=[str(q) for q in QUANT_SPECS], help="bits per weight, or a format")
    parser.add_argument("--size", type=int, help="height and width in pixels, a multiple of 16")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--full", choices=["4b", "9b"], nargs="?", const="4b", help="a random model of its size")
    parser.add_argument("--keep", type=Path, help="with --full: write it into this folder, or take it from there")
    args = parser.parse_args(arguments)
    if not args.full:
        quantize = next((q for q in QUANT_SPECS if str(q) == args.quantize), None)
        return print_costs(args.model, quantize, args.size, args.steps)
    with tempfile.TemporaryDirectory() as temporary:
        run_full_size(args.full, args.keep or Path(temporary) / args.full, args.size or 256, args.steps)


if __name__ == "__main__":
    main()
