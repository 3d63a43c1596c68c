"""The stages of nano's recipe and the words of its command: plain data, quick to load. Hand-written."""

from __future__ import annotations

import argparse
from pathlib import Path

STEPS = {
    "autoencoder": 2900, "text_encoder": 700, "transformer": 7200, "sharpen": 760, "edits": 9600, "wide": 40_400,
    "decoder": 18_400, "distill": 9400,
}  # fmt: skip
STAGES = (*STEPS, "export")
ABOUT = "train klein-nano, the whole recipe or one stage; stop it with Ctrl-C at any time: it goes on where it was"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `kleinlite train` and `python -m kleinlite.nano.recipe` take."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where runs and results are kept")
    parser.add_argument("--stage", choices=STAGES, help="only this stage: %(choices)s", metavar="STAGE")
    parser.add_argument("--steps", type=int, metavar="N", help="steps of this stage (with --stage)")
    parser.add_argument("--calibrate", action="store_true", help="only print what it would take here")
