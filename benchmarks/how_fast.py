"""The report "How fast", from what `benchmarks.peers` measured. Hand-written."""

import json
import os
import tempfile
from pathlib import Path

from benchmarks.stages import PROGRAMS, STAGES, Timing, count_work

PAGE = """\
# How fast

> Is kleinlite as fast as diffusers?

{answer}

<p><img src="images/how-fast.png" alt="Seconds and GFLOP/s of each stage, against a plain matmul and a plain copy"></p>

Where blue lies left of orange, kleinlite is faster. The black lines are the machine's limit in float32,
its fastest matmul and its fastest copy; bfloat16 may pass them.

The programs take turns on one CPU, in float32 unless the row says otherwise. Seconds are the best of {turns} runs.
*Ratio* is kleinlite's time over that of diffusers: below 1 we are faster.

{table}

{notes}

**The machine:** {machine}, {cores} cores. {load}
{versions}

Most rows consist of matmuls like the first. Another processor may give another ratio.

## On your machine

`make bench-peers` installs the others, measures, and writes this report. On a GPU that has
[not been run](../notebooks/not_run_yet.md).
Send us `benchmarks/how-fast.json`, or [your machine's row](../notebooks/machines.md#yours).
"""


ANSWERED = {
    "step": "for three blocks of the 4B",
    "picture": "for a picture of klein-nano",
    "start to PNG": "from the shell to its file",
}


def cell(timing: Timing | None) -> str:
    return f"{timing.best:.{3 if timing.best < 1 else 2}f}" if timing else ""


def timings_of(found: dict) -> dict[str, dict[str, Timing]]:
    return {stage: {n: Timing(**t) for n, t in timings.items()} for stage, timings in found["stages"].items()}


def write_table(found: dict) -> str:
    """A row for each stage."""
    rows = ["| stage | kleinlite | diffusers | ratio | mflux |", "|-|-:|-:|-:|-:|"]
    for stage, timings in timings_of(found).items():
        ours, theirs, mflux = (timings.get(name) for name in PROGRAMS)
        what = STAGES[stage].format(layers=found["layers"])
        ratio = f"**{ours.best / theirs.best:.2f}**" if ours and theirs else ""
        rows.append(f"| **{stage}**: {what} | {cell(ours)} | {cell(theirs)} | {ratio} | {cell(mflux)} |")
    return "\n".join(rows)


def write_answer(found: dict) -> str:
    """How fast it is, in one sentence."""
    timings = timings_of(found)
    ratios = {
        stage: programs["kleinlite"].best / programs["diffusers"].best
        for stage, programs in timings.items()
        if {"kleinlite", "diffusers"} <= set(programs)
    }
    said = [f"{ratios[stage]:.2f} {name}" for stage, name in ANSWERED.items() if stage in ratios]
    if not said:
        return "On this machine nothing was measured beside diffusers."
    slower = sum(round(ratio, 2) > 1 for ratio in ratios.values())  # as it is printed
    return (
        f"On this machine, kleinlite’s time over that of diffusers is {', '.join(said)}. "
        f"It is slower in {slower} of {len(ratios)} stages."
    )


def write_notes(found: dict) -> list[str]:
    """What the table does not say by itself, a sentence each."""
    timings, notes = timings_of(found), []
    for stage in ("decode 256²", "decode 512²"):
        ours, theirs = (timings.get(stage, {}).get(name) for name in ("kleinlite", "diffusers"))
        if ours and theirs:
            mine, others = ours.peak_bytes / 1e6, theirs.peak_bytes / 1e6
            notes.append(
                f"{stage} takes {mine:,.0f} MB beyond its weights in kleinlite and {others:,.0f} MB in diffusers."
            )
    return [*notes, *found["failures"]]


def write_page(found: dict, folder: Path) -> None:
    """how-fast.json, how-fast.md and the plot, from what `measure` found: all of them, or none."""
    load, others = found["load before"][0], found["others"]
    if others is None:
        said = f"Its load before the run was {load:.1f}."
    else:
        said = f"During the run other programs kept {max(others, 0):.2f} cores busy."
    if (load if others is None else others) > 0.2:
        said += " **It was busy with other work: seconds are too long and uneven.**"
    versions = [*found["versions"].values(), *(f"{name}={value}" for name, value in found["settings"].items())]
    if found["threads"]:
        versions.append(f"{found['threads']} threads in each program")
    page = PAGE.format(
        answer=write_answer(found), turns=found["turns"], table=write_table(found), machine=found["machine"],
        cores=found["cores"], load=said, versions="\n".join(f"- {version}" for version in versions),
        notes="\n".join(f"- {note}" for note in write_notes(found)),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(dir=folder) as new:
        (Path(new) / "how-fast.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        (Path(new) / "how-fast.md").write_text(page, encoding="utf-8")
        draw_plot(Path(new) / "how-fast.png", timings_of(found), count_work(found["layers"]))
        (folder / "images").mkdir(exist_ok=True)
        for name in ("images/how-fast.png", "how-fast.json", "how-fast.md"):
            os.replace(Path(new) / Path(name).name, folder / name)


COLORS = {"kleinlite": "#3b7dd8", "diffusers": "#d9822b", "mflux": "#8a8f98"}


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
        for program, color in COLORS.items():
            if program in timings[stage]:
                seconds = timings[stage][program].best
                left.plot(seconds, y, "o", color=color, markersize=5, alpha=0.85)
                if flops:
                    right.plot(flops / seconds / 1e9, y, "o", color=color, markersize=5, alpha=0.85)
        if nbytes:
            for i, (program, timing) in enumerate(timings[stage].items()):
                rate = f"{nbytes / timing.best / 1e9:.1f} GB/s"
                right.text(0.03 + 0.2 * i, y, rate, color=COLORS[program], fontsize=8, va="center", transform=across)
    right.axvline(limits[0] / 1e9, color="black", linewidth=1.5)
    left.set(xscale="log", xlabel="seconds, best turn", yticks=range(len(names)), yticklabels=names)
    right.set(xlabel="GFLOP/s", xlim=(0, None))
    left.invert_yaxis()
    for axes in (left, right):
        axes.grid(axis="both", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=8)
    handles = [left.plot([], [], "o", color=color, label=name)[0] for name, color in COLORS.items()]
    handles += left.plot([], [], color="black", linewidth=1.5, label="the machine's limit")
    figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(path, dpi=140)
    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)
