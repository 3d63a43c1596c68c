"""Autoresearch on the speedrun: change train.py, try it, keep what is better. program.md tells an agent how.

python -m recipe.auto baseline                  three seeds of train.py as it is: the spread that a keep has to beat
python -m recipe.auto try "batch of 16"         one training of the changed file, and the judges' verdict
python -m recipe.auto chart                     results.tsv as a picture, chart.png
"""

import argparse
import csv
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from kleinlite.errors import Parser, UserError, run_command
from kleinlite.trainer.run import lock_folder

from .given import Given, encode_once
from .judge import judge
from .rules import TRAIN, check_train, locked_files

TRACKS = (5.0, 10.0)  # minutes
SEEDS = (0, 1, 2)  # of the baseline; a try has the first
LATE = 1.1  # of the minutes, and loading and saving besides


@dataclass(frozen=True)
class Row:
    """One training: what the judges said, in percent. locked: of the code around train.py, from `locked_files`."""

    minutes: float
    seed: int
    steps: int
    score: float
    error: float
    second: float
    captions: int
    verdict: str  # baseline, keep, discard or crash
    note: str
    locked: str


def read_rows(path: Path) -> list[Row]:
    """What has been tried."""
    if not path.exists():
        return []
    kinds = Row.__annotations__
    with path.open(encoding="utf-8", newline="") as file:
        return [Row(**{k: kinds[k](v) for k, v in row.items()}) for row in csv.DictReader(file, delimiter="\t")]


def add_row(path: Path, row: Row) -> None:
    """One line more."""
    fresh = not path.exists()
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(Row.__annotations__), delimiter="\t", lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerow(asdict(row))


def decide(rows: list[Row], row: Row) -> str:
    """keep or discard: more than the baseline's spread above the last keep, and the second judge is no lower."""
    baseline = [other for other in rows if other.verdict == "baseline" and other.minutes == row.minutes]
    kept = [other for other in rows if other.verdict == "keep" and other.minutes == row.minutes]
    scores = [other.score for other in baseline]
    best = kept[-1].score if kept else sum(scores) / len(scores)
    second = kept[-1].second if kept else sum(other.second for other in baseline) / len(baseline)
    return "keep" if row.score > best + max(scores) - min(scores) and row.second >= second else "discard"


def train(args: argparse.Namespace) -> None:
    """One training, which nobody judges."""
    from .train import train

    train(Given(args.folder, args.minutes, args.seed))


def measure(folder: Path, minutes: float, seed: int, note: str) -> Row:
    """Train in another process, which is ended when it is late, and judge: the verdict is "judged", or "crash"."""
    row = Row(minutes, seed, 0, 0.0, 0.0, 0.0, 0, "crash", note, locked_files())
    for file in ("drawing.json", "pictures.png"):
        (folder / file).unlink(missing_ok=True)
    encode_once(folder)  # in no try's time
    options = [f"--folder={folder}", f"--minutes={minutes}", f"--seed={seed}"]
    command = [sys.executable, "-m", "recipe.auto", "train", *options]
    try:
        subprocess.run(command, check=True, timeout=60 * minutes * LATE + 60)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"kleinlite: {error}", file=sys.stderr)
        return row
    return replace(row, verdict="judged", **asdict(judge(folder)))


def baseline(args: argparse.Namespace) -> None:
    """Three seeds of train.py as it is."""
    if any(row.verdict == "baseline" and row.minutes == args.minutes for row in read_rows(args.results)):
        raise UserError(f"{args.results} has a baseline of {args.minutes:g} minutes: name another file (--results).")
    check_train(TRAIN.read_text("utf-8"))
    with lock_folder(args.folder):
        for seed in SEEDS:
            row = measure(args.folder, args.minutes, seed, "as it is")
            if row.verdict == "crash":
                raise UserError("train.py as it is did not end: see the error above.")
            row = replace(row, verdict="baseline")
            add_row(args.results, row)
            show(row)


def try_it(args: argparse.Namespace) -> None:
    """One training of the changed train.py, and what the judges say."""
    rows = read_rows(args.results)
    known = {row.locked for row in rows if row.verdict == "baseline" and row.minutes == args.minutes}
    if not known:
        wants = f"python -m recipe.auto baseline --minutes {args.minutes:g}"
        raise UserError(f"There is no baseline of {args.minutes:g} minutes: run `{wants}` first.")
    if known != {locked_files()}:
        raise UserError("Something else than train.py has changed since the baseline: put it back (`git diff`).")
    check_train(TRAIN.read_text("utf-8"))
    with lock_folder(args.folder):
        row = measure(args.folder, args.minutes, SEEDS[0], args.note)
    if row.verdict != "crash":
        row = replace(row, verdict=decide(rows, row))
    add_row(args.results, row)
    show(row)


def show(row: Row) -> None:
    print(f"{row.verdict}: {row.score} ± {row.error} % right, {row.second} % by the second judge; {row.note}")


def chart(args: argparse.Namespace) -> None:
    """All trainings in the order of their rows: what was kept is green."""
    from matplotlib.figure import Figure

    rows = [row for row in read_rows(args.results) if row.minutes == args.minutes and row.verdict != "crash"]
    colors = {"baseline": "tab:blue", "keep": "tab:green", "discard": "tab:gray"}
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for name, color in colors.items():
        if not (found := [(i, row) for i, row in enumerate(rows) if row.verdict == name]):
            continue
        where = [i for i, _ in found]
        scores = [row.score for _, row in found]
        errors = [row.error for _, row in found]
        axes.errorbar(where, scores, errors, fmt="o", color=color, label=name)
        axes.plot(where, [row.second for _, row in found], "x", color=color)
    axes.set_xticks(range(len(rows)), [row.note for row in rows], rotation=30, ha="right", fontsize=8)
    axes.set_ylabel("right, % (x: the second judge)")
    axes.set_title(f"{args.minutes:g} minutes of training each")
    axes.legend()
    figure.savefig(args.results.with_name("chart.png"), dpi=100)


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = Parser(prog="python -m recipe.auto", description=__doc__.partition("\n")[0], allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, run in (("baseline", baseline), ("try", try_it), ("chart", chart), ("train", train)):
        about = run.__doc__.partition("\n")[0]
        command = commands.add_parser(name, help=about, description=about)
        command.set_defaults(run=run)
        where = "trainings and pictures are kept here (default: %(default)s)"
        command.add_argument("--folder", type=Path, default=Path("runs/auto"), help=where)
        command.add_argument("--results", type=Path, default=Path("runs/auto/results.tsv"), help="default: %(default)s")
        command.add_argument("--minutes", type=float, choices=TRACKS, default=TRACKS[0], help="default: %(default)g")
        if name == "try":
            command.add_argument("note", help="what was changed, in a few words")
        if name == "train":
            command.add_argument("--seed", type=int, default=SEEDS[0])
    args = parser.parse_args(argv)
    return run_command(args.run, args)


if __name__ == "__main__":
    sys.exit(main())
