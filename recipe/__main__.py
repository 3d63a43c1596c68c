"""The recipe's commands, in a clone.

python -m recipe train RUNS         train klein-nano; stopped by Ctrl-C, the same command goes on
                                    (--world critters, or a file of your own, trains a model of another world)
python -m recipe speedrun           train a small model within half an hour, and judge it; RECORDS.md has the rules
"""

import argparse
import sys
from pathlib import Path

from kleinlite.errors import Parser, UserError, run_command

from . import speedrun, training
from .config import STEPS


def make_parser() -> Parser:
    """All words of the two commands."""
    parser = Parser(prog="python -m recipe", description=__doc__.partition("\n")[0], allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    about = "train klein-nano, or a model of another world; stop it with Ctrl-C at any time: it goes on where it was"
    train = commands.add_parser("train", help=about, description=about)
    train.add_argument("folder", type=Path, metavar="FOLDER", help="where runs and results are kept")
    about = "what it learns to draw: %(default)s, critters, or a Python file with a World"
    train.add_argument("--world", default="shapes", help=about, metavar="WORLD")
    stages = ", ".join([*STEPS, "export"])
    train.add_argument("--stage", help=f"only this stage: {stages}, as far as the world has it", metavar="STAGE")
    train.add_argument("--steps", type=int, metavar="N", help="steps of this stage (with --stage)")
    train.set_defaults(run=run_training)
    about = "train a small model from nothing within minutes, and judge what it draws; RECORDS.md has the rules"
    run = commands.add_parser("speedrun", help=about, description=about)
    where = "the run (default: speedrun)"
    run.add_argument("folder", type=Path, nargs="?", default=Path("speedrun"), metavar="FOLDER", help=where)
    until = "from the first scene to the score (default: 30)"
    run.add_argument("--minutes", type=float, default=30.0, metavar="M", help=until)
    run.set_defaults(run=run_speedrun)
    return parser


def run_training(args: argparse.Namespace) -> None:
    training.train(args.folder, args.stage, args.steps, world=args.world)


def run_speedrun(args: argparse.Namespace) -> None:
    if not 1 <= args.minutes <= 1440:
        raise UserError(f"--minutes is a number from 1 to 1440 (a day), not {args.minutes:g}.")
    speedrun.speedrun(args.folder, args.minutes)


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    args = make_parser().parse_args(argv)
    return run_command(args.run, args)


if __name__ == "__main__":
    sys.exit(main())
