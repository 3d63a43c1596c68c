"""kleinlite beside diffusers and mflux: the same stages by turns, and the page "How fast". Hand-written.

    make bench-peers                                    everything; the others get environments of their own
    python -m kleinlite.bench.peers --stages step picture --turns 9
    python -m kleinlite.bench.peers --threads 1         on a busy machine: one thread each, processor time counts

Weights are random, in float32 on a CPU and in bfloat16 on a GPU. Each program runs in a process of its own, one stage
at a time; they take turns, because other work on a machine comes and goes. Best, median and spread are printed, kept
in notebooks/how-fast.json, and written into notebooks/how-fast.md with a plot.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from ..models.opening import find_model
from .workers.loop import HEAD_SIZE, HEADS, PRODUCT, PROMPT, TEXT_TOKENS, TOKENS

ROOT = Path(__file__).resolve().parents[2]
WORKERS = Path(__file__).parent / "workers"
PEERS = {
    "diffusers": ("torch==2.13.0", "diffusers==0.42.1", "transformers==5.23.0", "accelerate", "safetensors"),
    "mflux": ("mlx[cpu]" if sys.platform == "linux" else "mlx", "scipy-openblas32", "transformers", "platformdirs",
              "piexif", "toml", "pillow", "tokenizers", "safetensors", "tqdm"),
}  # fmt: skip
S = TOKENS + TEXT_TOKENS
STAGES = {  # name → what it is, and its multiplications and additions where they are easily counted
    "product": ("a product 1536 × 3072 × 9216, as in every block", 2 * PRODUCT[0] * PRODUCT[1] * PRODUCT[2]),
    "addition": ("x + 1 for 34 million values", 0),
    "attention": ("24 heads × 1536 tokens × 128", 4 * HEADS * S * S * HEAD_SIZE),
    "silu · up": ("the gate of an MLP, 1536 × 9216", 0),
    "modulated norm": ("layer norm, scale and shift, 1536 × 3072", 0),
    "step": ("1 double and 2 single blocks of the 4B, 1024 + 512 tokens", 0),
    "step, 8 bits": ("the same, its weights packed", 0),
    "step, 4 bits": ("the same, its weights packed", 0),
    "training": ("values and gradients of 7 small blocks, 32 pictures of 36 + 32 tokens", 0),
    "text encoder": ("layers of Qwen3-4B, 512 tokens", 0),
    "decode 256²": ("the released autoencoder's decoder", 0),
    "decode 512²": ("the same, four times the pixels", 0),
    "picture": ("klein-nano, four steps, in a warm process", 0),
    "start to PNG": ("the same, from the shell: import, load, draw, save", 0),
}


class Timing(NamedTuple):
    """What the turns of one stage in one program cost."""

    seconds: list[float]
    processor: list[float]  # seconds of all threads
    peak_bytes: int  # beyond what was held before the stage

    @property
    def best(self) -> float:
        return min(self.seconds)


def set_up(name: str, folder: Path) -> Path:
    """The Python of an environment with a peer in it, made if it is not there. Ours is never touched."""
    python = folder / name / "bin" / "python"
    if not (folder / name / ".done").exists():
        print(f"Installing {name} into {folder / name} …", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", folder / name], check=True)
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, *PEERS[name]], check=True)
        if name == "mflux":  # by itself it would bring CUDA's libraries on Linux
            subprocess.run([*pip, "--no-deps", "mflux==0.24.0"], check=True)
        (folder / name / ".done").touch()
    return python


def environment(threads: int | None) -> dict[str, str]:
    """Of a worker: our package on its path, and as many threads as asked for."""
    limits = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    return {**os.environ, "PYTHONPATH": str(ROOT), **(limits if threads else {})}


def take_turns(
    commands: dict[str, list], stage: str, turns: int, threads: int | None
) -> tuple[dict[str, Timing], dict[str, str]]:
    """One stage in every program that has it: the timings, and what each program says it is."""
    workers, versions, answers = {}, {}, {}
    for name, command in commands.items():  # one after the other, so that no preparation disturbs another
        worker = subprocess.Popen(
            [*map(str, command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=environment(threads), text=True,
        )  # fmt: skip
        first = json.loads(worker.stdout.readline() or '{"missing": true, "versions": "did not start"}')
        versions[name] = first["versions"]
        if "ready" in first:
            workers[name], answers[name] = worker, []
    try:
        for _ in range(turns):
            for name, worker in workers.items():
                worker.stdin.write("\n")
                worker.stdin.flush()
                answers[name].append(json.loads(worker.stdout.readline()))
    finally:
        for worker in workers.values():
            worker.stdin.close()
            worker.wait()
    columns = lambda name, key: [answer[key] for answer in answers[name]]
    return {
        name: Timing(columns(name, "seconds"), columns(name, "processor"), max(columns(name, "peak_bytes")))
        for name in answers
    }, versions


def start_to_png(commands: dict[str, list], turns: int, threads: int | None) -> dict[str, Timing]:
    """Whole processes, by turns."""
    found = {name: Timing([], [], 0) for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(turns):
            for name, command in commands.items():
                before, start = os.times(), time.perf_counter()
                words = [str(word).replace("OUT", f"{folder}/{name}.png") for word in command]
                subprocess.run(words, check=True, env=environment(threads), capture_output=True)
                after = os.times()
                spent = after.children_user + after.children_system - before.children_user - before.children_system
                found[name].seconds.append(time.perf_counter() - start)
                found[name].processor.append(spent)
    return found


def measure(stages: list[str], pythons: dict[str, Path], turns: int, threads: int | None, layers: int) -> dict:
    """Everything, as plain data."""
    nano = find_model("nano")
    scripts = {"kleinlite": "ours.py", "diffusers": "with_diffusers.py", "mflux": "with_mflux.py"}
    found = {"turns": turns, "threads": threads, "layers": layers, "load before": os.getloadavg(), "stages": {}}
    for stage in stages:
        print(f"{stage} …", file=sys.stderr, flush=True)
        if stage == "start to PNG":
            ours = [pythons["kleinlite"], "-m", "kleinlite", "generate", PROMPT, "--seed", 7, "-o", "OUT"]
            whole = {"kleinlite": ours}
            if "diffusers" in pythons:
                whole["diffusers"] = [pythons["diffusers"], WORKERS / scripts["diffusers"], "--draw", nano, "OUT"]
            timings = start_to_png(whole, turns, threads)
        else:
            commands = {
                name: [python, WORKERS / scripts[name], stage, layers, nano] for name, python in pythons.items()
            }
            timings, versions = take_turns(commands, stage, turns, threads)
            found.setdefault("versions", {}).update(versions)
        found["stages"][stage] = {name: timing._asdict() for name, timing in timings.items()}
    settings = {name: value for name, value in os.environ.items() if name.startswith(("OPENBLAS_", "OMP_", "MKL_"))}
    return found | {
        "load after": os.getloadavg(), "machine": machine(), "cores": os.cpu_count(), "settings": settings,
    }  # fmt: skip


def machine() -> str:
    """The processor's name and the system."""
    try:
        names = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                 if line.startswith("model name")]  # fmt: skip
    except OSError:
        names = []
    return f"{names[0] if names else platform.processor() or platform.machine()}, {platform.system()}"


# ---------------------------------------------------------------- the page

PAGE = """\
# How fast

Every stage of a picture in kleinlite, beside diffusers and mflux, measured by turns on one machine.
`make bench-peers` sets the others up in environments of their own, runs everything and writes this page. A stage that
falls behind is shown like any other. Weights are random; on a CPU everything runs in float32, on a GPU in bfloat16.

**The machine:** {machine}, {cores} cores; {threads}; {turns} turns. Its load (programs that wanted a core) was {before}
before and {after} after.{warning}
{versions}

## Side by side

Seconds, best (median, spread between the quartiles). *Ratio*: kleinlite's time / diffusers', of the best turns and of
the medians; below 1 we are faster. *Processor*: the same for the time that all threads spent, which other work on the
machine changes little.

{table}

<p><img src="images/how-fast.png" alt="Ratio of processor time, kleinlite to diffusers, for each stage"></p>

{notes}

## Your machine

On Metal and CUDA the same program runs, and these rows are empty until somebody sends theirs (`notebooks/how-fast.json`
in a pull request). The figures to beat there, from the seed of this project and not measured by this program: M3 Max,
512², four steps: 7.73 s in all, 1.09 s a step.
"""


def quartiles(values: list[float]) -> float:
    """The distance between the first and the third."""
    first, _, third = statistics.quantiles(values, n=4)
    return third - first


def cell(timing: Timing | None) -> str:
    if timing is None:
        return ""
    digits = 3 if timing.best < 1 else 2
    numbers = [timing.best, statistics.median(timing.seconds)]
    numbers += [quartiles(timing.seconds)] * (len(timing.seconds) > 2)  # two say nothing about a spread
    best, *others = (f"{x:.{digits}f}" for x in numbers)
    return f"{best} ({', '.join(others)})"


def ratios(ours: Timing, theirs: Timing) -> tuple[float, float, float]:
    """kleinlite's time / the other's: best, median, processor."""
    return (
        ours.best / theirs.best,
        statistics.median(ours.seconds) / statistics.median(theirs.seconds),
        min(ours.processor) / min(theirs.processor),
    )


def write_page(found: dict, folder: Path) -> None:
    """notebooks/how-fast.md and its plot, from what `measure` found."""
    rows = ["| stage | kleinlite | diffusers | ratio best, median | processor | mflux | ratio to mflux |",
            "|-|-|-|-|-|-|-|"]  # fmt: skip
    bars, limits = {}, []
    for stage, timings in found["stages"].items():
        known = {name: Timing(**timing) for name, timing in timings.items()}
        ours, theirs, mflux = (known.get(name) for name in ("kleinlite", "diffusers", "mflux"))
        best, median, processor = ratios(ours, theirs) if theirs else (None,) * 3
        beside = f"{best:.2f}, {median:.2f} | **{processor:.2f}**" if theirs else " | "
        to_mflux = f"{ours.best / mflux.best:.2f} ({ratios(ours, mflux)[2]:.2f} processor)" if mflux else ""
        what, flops = STAGES[stage]
        rows.append(f"| **{stage}**: {what} | {cell(ours)} | {cell(theirs)} | {beside} | {cell(mflux)} | {to_mflux} |")
        if theirs:
            bars[stage] = round(processor, 2)
        if flops:
            rate = lambda timing, flops=flops: f"{flops / min(timing.processor) / 1e9:.0f}" if timing else "–"
            limits.append(f"{stage}: {rate(ours)} in kleinlite, {rate(theirs)} in diffusers")
    memory = [
        f"{stage}: {found['stages'][stage]['kleinlite']['peak_bytes'] / 1e6:,.0f} MB in kleinlite, "
        f"{found['stages'][stage]['diffusers']['peak_bytes'] / 1e6:,.0f} MB in diffusers"
        for stage in ("decode 256²", "decode 512²")
        if "diffusers" in found["stages"].get(stage, {})
    ]
    layers = f"The text encoder ran {found['layers']} of its 27 layers; they are alike." * (
        "text encoder" in found["stages"]
    )
    notes = [f"GFLOP/s of one second of processor time: {'; '.join(limits)}." if limits else "", layers]
    alone = lambda stage: min(found["stages"].get(stage, {}).get("kleinlite", {}).get("processor", [math.nan]))
    packed = [f"{bits} bits {alone(f'step, {bits} bits') / alone('step'):.2f}" for bits in (8, 4)]
    notes += [f"A step with packed weights / in float32, processor time: {', '.join(packed)}."] * (
        "nan" not in packed[0]
    )
    notes += [f"Memory beyond what was held before decoding: {'; '.join(memory)}." if memory else ""]
    load = lambda values: ", ".join(f"{x:.1f}" for x in values)
    busy = max(found["load before"][0], found["load after"][0]) > 1.5
    warning = (
        " **The machine was busy with other work: seconds are too long and uneven; believe the processor column.**"
    )
    page = PAGE.format(
        machine=found["machine"], cores=found["cores"], turns=found["turns"], before=load(found["load before"]),
        after=load(found["load after"]), warning=warning * busy, table="\n".join(rows),
        threads=f"threads of each program: {found['threads'] or 'as many as it takes'}",
        versions="\n".join(f"- {said}" for said in found.get("versions", {}).values()),
        notes="\n".join(f"- {note}" for note in notes if note),
    )  # fmt: skip
    (folder / "how-fast.md").write_text(page, encoding="utf-8")
    if bars:
        draw_ratios(folder / "images" / "how-fast.png", bars)


def draw_ratios(path: Path, ratio: dict[str, float]) -> None:
    """Bars, and a line where both programs are equal."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 0.3 * len(ratio) + 0.8), layout="constrained")
    axes = figure.add_subplot()
    colours = ["#3b7dd8" if value <= 1 else "#c0562f" for value in ratio.values()]
    axes.bar_label(axes.barh(list(ratio), list(ratio.values()), color=colours), fmt="%.2f", fontsize=7, padding=2)
    axes.axvline(1.0, color="grey", linewidth=1, linestyle="--")
    axes.set_xlim(0, 1.12 * max(1.0, *ratio.values()))  # room for the numbers
    axes.invert_yaxis()
    axes.set_xlabel("processor time, kleinlite / diffusers (left of the line: kleinlite is faster)", fontsize=8)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=160)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m kleinlite.bench.peers", description=__doc__.split("\n")[0])
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES), metavar="STAGE")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, help="for each program (default: what each takes)")
    parser.add_argument("--layers", type=int, default=27, help="of the text encoder; they share one layer's weights")
    parser.add_argument("--environments", type=Path, default=ROOT / ".peers", help="where the peers are installed")
    parser.add_argument("--diffusers", type=Path, metavar="PYTHON", help="an environment that has diffusers already")
    parser.add_argument("--mflux", type=Path, metavar="PYTHON", help="an environment that has mflux already")
    parser.add_argument("--page", type=Path, default=ROOT / "notebooks", help="the folder of how-fast.md")
    options = parser.parse_args(argv)
    pythons = {"kleinlite": Path(sys.executable)}
    for name in PEERS:
        pythons[name] = getattr(options, name) or set_up(name, options.environments)
    found = measure(options.stages, pythons, options.turns, options.threads, options.layers)
    (options.page / "how-fast.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    write_page(found, options.page)
    print((options.page / "how-fast.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
