"""The stages of nano's recipe, the words of its command, and what it draws: plain data, quick to load."""

from __future__ import annotations

import argparse
from pathlib import Path

STEPS = {"autoencoder": 21_000, "text_encoder": 1500, "transformer": 40_000, "distill": 9400, "redraw": 600}
STAGES = (*STEPS, "export")
DRAWS = "circles, squares, triangles, stars, hearts, diamonds, houses, trees and boats"
ABOUT = "train klein-nano, the whole recipe or one stage; stop it with Ctrl-C at any time: it goes on where it was"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `kleinlite train` and `python -m kleinlite.nano.recipe` take."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where runs and results are kept")
    parser.add_argument("--stage", choices=STAGES, help="only this stage: %(choices)s", metavar="STAGE")
    parser.add_argument("--steps", type=int, metavar="N", help="steps of this stage (with --stage)")
