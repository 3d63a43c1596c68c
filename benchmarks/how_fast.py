"""The page "How fast", from what `benchmarks.peers` measured. Hand-written."""

import json
import os
import statistics
import tempfile
from pathlib import Path

from benchmarks.stages import BUSY, PROGRAMS, STAGES, Timing, count_work

PAGE = """\
# How fast

> {answer}

<p><img src="images/how-fast.png" alt="Seconds and GFLOP/s of each stage, beside a plain product and a plain copy"></p>

The black lines are the machine's own limit: its fastest plain matmul, in float32, and its fastest plain copy. A
convolution may pass them, because kleinlite needs fewer multiplications than written (Winograd's algorithm).

**The machine:** {machine}, {cores} cores; {threads}; best of {turns}. {load}
{versions}

## Side by side

The programs take turns on one machine, with random weights, in float32 on a CPU. Seconds are the best run, then the
median and the spread between the quartiles. *Ratio* is kleinlite's time over the other's, best runs and medians:
below 1 we are faster. *Processor* is the same for the time of all threads.

{table}

{notes}

The first row compares libraries, not programs, and most other rows consist of such matmuls. torch multiplies by Intel's
MKL, which [has been slow in float32 on AMD's processors](https://danieldk.eu/Intel-MKL-on-AMD-Zen). Another processor
may give another ratio.

## On your machine

`make bench-peers` installs the others in environments of their own, measures, and writes this page. On a GPU all
programs compute in bfloat16 and wait for the device. That has [not been run](not_run_yet.md). The figures to beat,
which this program did not measure: an M3 Max takes 7.73 s for a picture of 512 × 512 in four steps, 1.09 s a step.
Send us `notebooks/how-fast.json`, or [your machine's row](machines.md#yours).
"""


ANSWERED = {
    "step": "for three blocks of the 4B",
    "picture": "for a picture of klein-nano",
    "start to PNG": "from the shell to its file",
}


def quartiles(values: list[float]) -> float:
    """The distance between the first and the third."""
    first, _, third = statistics.quantiles(values, n=4)
    return third - first


def cell(timing: Timing | None) -> str:
    if timing is None:
        return ""
    digits = 3 if timing.best < 1 else 2
    numbers = [timing.best, statistics.median(timing.seconds)]
    if len(timing.seconds) > 2:  # two say nothing about a spread
        numbers.append(quartiles(timing.seconds))
    best, *others = (f"{x:.{digits}f}" for x in numbers)
    return f"{best} ({', '.join(others)})"


def ratios(ours: Timing, theirs: Timing) -> tuple[float, float, float]:
    """kleinlite's time / the other's: best, median, processor."""
    return (
        ours.best / theirs.best,
        statistics.median(ours.seconds) / statistics.median(theirs.seconds),
        min(ours.processor) / min(theirs.processor),
    )


def beside(ours: Timing | None, theirs: Timing | None) -> str:
    """Two cells of the table."""
    if not (ours and theirs):
        return " | "
    best, median, processor = ratios(ours, theirs)
    return f"**{best:.2f}**, {median:.2f} | {processor:.2f}"


def timings_of(found: dict) -> dict[str, dict[str, Timing]]:
    return {stage: {n: Timing(**t) for n, t in timings.items()} for stage, timings in found["stages"].items()}


def write_table(found: dict) -> str:
    """A row for each stage."""
    rows = ["| stage | kleinlite | diffusers | ratio | processor | mflux | ratio | processor |", "|-|-|-|-|-|-|-|-|"]
    for stage, timings in timings_of(found).items():
        ours, theirs, mflux = (timings.get(name) for name in PROGRAMS)
        what = STAGES[stage].format(layers=found["layers"])
        rows.append(
            f"| **{stage}**: {what} | {cell(ours)} | {cell(theirs)} | {beside(ours, theirs)} | {cell(mflux)} | "
            f"{beside(ours, mflux)} |"
        )
    return "\n".join(rows)


def find_behind(found: dict) -> tuple[list[str], list[str]]:
    """The stages in which diffusers was faster than we, with the ratio: by best runs, and by medians."""
    by_best, by_medians = [], []
    for stage, programs in timings_of(found).items():
        if {"kleinlite", "diffusers"} <= set(programs):
            best, median, _ = ratios(programs["kleinlite"], programs["diffusers"])
            for behind, ratio in ((by_best, best), (by_medians, median)):
                if round(ratio, 2) > 1:  # as it is printed
                    behind.append(f"{stage} ({ratio:.2f})")
    return by_best, by_medians


def write_answer(found: dict) -> str:
    """How fast it is, in one sentence."""
    timings = timings_of(found)
    by_best, by_medians = find_behind(found)
    shared = sum({"kleinlite", "diffusers"} <= set(programs) for programs in timings.values())
    said: list[str] = []
    for stage, name in ANSWERED.items():
        ours, theirs = (timings.get(stage, {}).get(program) for program in ("kleinlite", "diffusers"))
        if ours and theirs:
            best, median, _ = ratios(ours, theirs)
            said.append(f"{best:.2f} ({median:.2f}){'' if said else ' of diffusers’ time'} {name}")
    if not said:
        return "On this machine nothing was measured beside diffusers."
    slower = f"it is slower in {len(by_best)} ({len(by_medians)}) of {shared} stages"
    return f"On this machine kleinlite takes, by best runs (by medians), {', '.join(said)}; {slower}."


def write_notes(found: dict) -> list[str]:
    """What the table does not say by itself, a sentence each."""
    timings, notes = timings_of(found), []
    by_best, by_medians = (", ".join(behind) or "none" for behind in find_behind(found))
    notes.append(f"**Behind diffusers** by best runs: {by_best}; by medians: {by_medians}.")
    for stage in ("decode 256²", "decode 512²"):
        ours, theirs = (timings.get(stage, {}).get(name) for name in ("kleinlite", "diffusers"))
        if ours and theirs:
            mine, others = ours.peak_bytes / 1e6, theirs.peak_bytes / 1e6
            notes.append(
                f"{stage} takes {mine:,.0f} MB beyond its weights in kleinlite and {others:,.0f} MB in diffusers: "
                f"{mine / others:.2f} times as much."
            )
    alone, busy = timings.get("step", {}), timings.get(f"step{BUSY}", {})

    def times(timing, base):
        return f"{ratios(timing, base)[0]:.2f} times ({ratios(timing, base)[2]:.2f} processor)"

    quantized = {bits: timings.get(f"step, {bits} bits", {}).get("kleinlite") for bits in (8, 4)}
    if all(quantized.values()) and "kleinlite" in alone:
        of = [f"{times(timing, alone['kleinlite'])} in {bits} bits" for bits, timing in quantized.items()]
        notes.append(f"With quantized weights a step takes, compared with float32: {', '.join(of)}.")
    slower = [f"{times(busy[name], alone[name])} in {name}" for name in alone if name in busy]
    if slower and found["cores"] > 1 and found["threads"] != 1:
        lost = found["cores"] / (found["cores"] - 1)
        notes.append(
            f"With another program on one core a step takes, compared with none: {', '.join(slower)}; without "
            f"that core at all it would be {lost:.2f} times."
        )
    return [*notes, *found["failures"]]


def write_page(found: dict, folder: Path) -> None:
    """how-fast.json, how-fast.md and the plot, from what `measure` found: all of them, or none."""
    load, others = ", ".join(f"{x:.1f}" for x in found["load before"]), found["others"]
    said = f"Its load (programs that wanted a core) was {load} before"
    said += "." if others is None else f"; during the run other programs kept {max(others, 0):.2f} cores busy."
    if max(others or 0, found["load before"][0] * (others is None)) > 0.2:
        said += " **It was busy with other work: seconds are too long and uneven; believe the processor columns.**"
    settings = ", ".join(f"{name}={value}" for name, value in found["settings"].items())
    page = PAGE.format(
        machine=found["machine"], cores=found["cores"], turns=found["turns"], load=said, table=write_table(found),
        threads=f"threads of each program: {found['threads'] or 'as many as it takes'}",
        versions="\n".join(f"- {said}" for said in [*found["versions"].values(), *([settings] * bool(settings))]),
        notes="\n".join(f"- {note}" for note in write_notes(found)), answer=write_answer(found),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(dir=folder) as new:
        (Path(new) / "how-fast.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        (Path(new) / "how-fast.md").write_text(page, encoding="utf-8")
        draw_plot(Path(new) / "how-fast.png", timings_of(found), count_work(found["layers"]))
        (folder / "images").mkdir(exist_ok=True)
        for name in ("images/how-fast.png", "how-fast.json", "how-fast.md"):
            os.replace(Path(new) / Path(name).name, folder / name)


COLOURS = {"kleinlite": "#3b7dd8", "diffusers": "#d9822b", "mflux": "#8a8f98"}


def draw_plot(path: Path, timings: dict[str, dict[str, Timing]], work: dict[str, tuple[float, float]]) -> None:
    """Seconds of each stage, and its rate beside that of a plain product or a plain copy."""
    from matplotlib.figure import Figure
    from PIL import Image

    def fastest(stage, i):
        return work[stage][i] / min((t.best for t in timings.get(stage, {}).values()), default=0)

    limits = fastest("product", 0), fastest("copy", 1)
    figure = Figure(figsize=(7.6, 0.36 * len(timings) + 1.1), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1, 1))
    names, across = list(timings), right.get_yaxis_transform()
    for y, stage in enumerate(names):
        flops, nbytes = work.get(stage, (0, 0))
        if flops or nbytes:
            left.plot([flops / limits[0] + nbytes / limits[1]] * 2, [y - 0.35, y + 0.35], color="black", linewidth=1.5)
        for program, colour in COLOURS.items():
            if program in timings[stage]:
                seconds = timings[stage][program].best
                left.plot(seconds, y, "o", color=colour, markersize=5, alpha=0.85)
                if flops:
                    right.plot(flops / seconds / 1e9, y, "o", color=colour, markersize=5, alpha=0.85)
        if nbytes:
            for i, (program, timing) in enumerate(timings[stage].items()):
                rate = f"{nbytes / timing.best / 1e9:.1f} GB/s"
                right.text(0.03 + 0.2 * i, y, rate, color=COLOURS[program], fontsize=8, va="center", transform=across)
    right.axvline(limits[0] / 1e9, color="black", linewidth=1.5)
    left.set(xscale="log", xlabel="seconds, best turn", yticks=range(len(names)), yticklabels=names)
    right.set(xlabel="GFLOP/s", xlim=(0, None))
    left.invert_yaxis()
    for axes in (left, right):
        axes.grid(axis="both", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=8)
    handles = [left.plot([], [], "o", color=colour, label=name)[0] for name, colour in COLOURS.items()]
    handles += left.plot([], [], color="black", linewidth=1.5, label="the machine's limit")
    figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(path, dpi=140)
    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)
