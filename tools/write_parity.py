"""Writes the page of parity, notebooks/parity.md: how far each block is from what diffusers and transformers compute.

    python -m tools.write_parity            run the comparisons and write the page
    python -m tools.write_parity --check    run them and compare with the page; exit 1 if it promises too much

The numbers are those of the tests themselves: `test_parity_blocks.py`, `test_pipeline_golden.py` and klein-nano's
pictures in `nano/test_nano.py` are run, and every comparison that they make is noted down.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import sys
from collections import defaultdict
from pathlib import Path

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # as conftest.py does: before MLX is imported

import mlx.core as mx
import pytest

from tools.goldens import GOLDENS

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "notebooks" / "parity.md"
TESTS = (
    "test_parity_blocks.py",
    "test_kv_cache.py",
    "test_pipeline_golden.py",
    "nano/test_nano.py::test_diffusers_draws_the_same",
)
CHAPTERS = {
    "autoencoder": "01_autoencoder", "position_ids": "02_position_ids", "text_encoder": "03_text_encoder",
    "sampling": "04_sampling", "transformer": "05_transformer", "kv_cache": "10_kv_cache",
}  # fmt: skip
WORDS = {  # what a test compares, where its name does not say it well; equal words share a row
    "autoencoder_res_block": "residual block",
    "autoencoder_mid_attention": "attention in the middle",
    "autoencoder_downsample": "downsample and upsample",
    "autoencoder_upsample": "downsample and upsample",
    "autoencoder_encode": "the whole encoder",
    "autoencoder_pack_and_normalise": "packing and statistics",
    "autoencoder_decode": "the whole decoder",
    "autoencoder_small_decoder": "the small decoder",
    "position_ids_rope": "RoPE",
    "text_encoder_rms_norm": "RMSNorm",
    "text_encoder_layer": "one layer",
    "text_encoder_hidden_state": "every hidden state, and the features",
    "text_encoder_features": "every hidden state, and the features",
    "text_encoder_logits": "scores of the next token",
    "sampling_schedule": "noise levels",
    "sampling_euler": "the Euler loop",
    "transformer_time_features": "the time's cosines and embedding",
    "transformer_time_embedding": "the time's cosines and embedding",
    "transformer_modulation": "modulation",
    "transformer_swiglu": "feed-forward layer",
    "transformer_feed_forward": "feed-forward layer",
    "transformer_qk_norm": "norm of queries and keys",
    "transformer_double_block": "double and single blocks",
    "transformer_single_block": "double and single blocks",
    "transformer_block_by_block": "every block in its place",
    "transformer": "the whole transformer",
    "kv_cache_block": "kept keys and values",
    "kv_cache_velocity": "velocities that look them up",
    "kv_cache_trajectory": "latents of whole edits",
}
PIPELINE = {
    "features": "text features", "encode": "a picture's latents", "decode": "the decoded picture",
    "sigmas": "a run's noise levels", "first_velocity": "first velocity", "trajectory": "latents after every step",
    "picture": "pixels, in levels of 255",
}  # fmt: skip

INTRODUCTION = """\
# Parity with the reference

> How far is this code from the reference implementation?

**No block differs by more than `1e-4`, and no pixel by more than one level of 255.**

A picture that looks good proves little: no picture shows a wrong epsilon. So every
piece is compared with diffusers and transformers, on the same random weights. A test repeats the comparisons, and fails
if this page promises too much.

*Difference* is the largest gap between a value of ours and theirs, divided by the largest value in that output. float32
has seven digits, so adding in another order already gives about `1e-7`. Inputs are of size 1, and for most blocks
also of size 0.01: only there does a wrong epsilon show ([what ports get wrong](corrections.md)).
"""
NOT_COVERED = """\
Chapter 6 compares whole runs of diffusers' `Flux2KleinPipeline`: from words, with references, with guidance. diffusers
also draws klein-nano's files as they are: five pictures differ by {levels:.0f} of 255 levels at most.

**Angles make the larger numbers.** The time enters through cosines of up to 1000 radians, which float32 holds to about
`6e-5`. RoPE's angles reach 511 radians; diffusers takes them in float64, we in float32.

## What this does not show

- **The released weights, Metal and CUDA**, which we have [not run](not_run_yet.md).
- **bfloat16**, which is what a GPU computes in.
- **The reference's own choices.** Where diffusers and klein's original code differ, we follow diffusers. We refuse
  prompts of more than 512 tokens, which it cuts.

## Run it yourself

```sh
make setup
.venv/bin/python -m pytest tests/test_parity_blocks.py tests/test_pipeline_golden.py
.venv/bin/python -m tools.write_parity --check
```

The reference values are in [`tests/goldens`](../tests/goldens) and [`tests/pipelines`](../tests/pipelines), with the
programs that made them.
"""


class Recorder:
    """A pytest plugin that stands between the tests and `check`, and notes how large each difference was."""

    def __init__(self):
        self.errors = defaultdict(list)  # (test, its parameters) → differences
        self.failed: list[str] = []
        self.test = None

    def pytest_collection_finish(self, session):
        for module in {item.module for item in session.items}:
            if hasattr(module, "check"):
                module.check = self.noting(module.check)
            if hasattr(module, "levels_apart"):
                module.levels_apart = self.noting_levels(module.levels_apart)

    def pytest_runtest_setup(self, item):
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        said = tuple((name, str(value)) for name, value in parameters.items())
        self.test = item.originalname.removeprefix("test_"), said

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.append(report.nodeid)
        if report.when == "call" and report.passed:
            self.errors[self.test] += []  # a test may compare whole numbers only, without `check`

    def noting(self, check):
        def check_and_note(got, want, tolerance=None, absolute=False):
            wanted = want if isinstance(want, mx.array) else mx.array(want, dtype=mx.float32)
            error = mx.abs(got.astype(mx.float32) - wanted.astype(mx.float32)).max().item()
            scale = 1.0 if absolute else mx.abs(wanted).max().item()
            self.errors[self.test].append(error / scale if error else 0.0)
            check(got, want, **({} if tolerance is None else {"tolerance": tolerance}), absolute=absolute)

        return check_and_note

    def noting_levels(self, levels_apart):
        def note(image, name):
            self.errors[self.test].append(levels_apart(image, name))
            return self.errors[self.test][-1]

        return note


def measure() -> dict:
    """Every comparison of the two files of tests: {(test, parameters): differences}."""
    recorder = Recorder()
    files = [str(ROOT / "tests" / name) for name in TESTS]
    pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", *files], plugins=[recorder])
    if recorder.failed:
        sys.exit(f"These tests fail, so there is nothing to write: {', '.join(recorder.failed)}")
    return recorder.errors


# ---------------------------------------------------------------- tables


def number(differences: list[float]) -> str:
    """The largest one, rounded up to one digit."""
    if not differences or max(differences) == 0:
        return "equal"
    worst = max(differences)
    power = math.floor(math.log10(worst))
    digit = math.ceil(worst / 10**power - 1e-9)
    return f"{1 if digit == 10 else digit}e{power + (digit == 10)}"


def chapter_of(test: str) -> str | None:
    """The chapter that builds what a test compares."""
    if test in PIPELINE:
        return "06_pipeline"
    return next((chapter for module, chapter in CHAPTERS.items() if test.startswith(module)), None)


def table(errors: dict) -> str:
    """A row for each thing that is compared: the chapter that builds it, and the largest difference of all cases."""
    rows: dict[tuple[str, str], list[float]] = {}
    for (test, _), differences in errors.items():
        if chapter := chapter_of(test):
            words = PIPELINE.get(test) or WORDS.get(test) or test.removeprefix(chapter[3:]).replace("_", " ").strip()
            rows.setdefault((chapter, words or test.replace("_", " ")), []).extend(differences)
    lines = ["| compared | chapter | difference |", "|---|---|--:|"]
    for (chapter, words), differences in sorted(rows.items(), key=lambda row: row[0][0]):
        said = f"{max(differences):.0f}" if words == PIPELINE["picture"] else number(differences)
        lines.append(f"| {words} | [{int(chapter[:2])}]({chapter}.ipynb) | {said} |")
    return "\n".join(lines)


def made_with() -> dict[str, str]:
    """The versions that wrote the stored values."""
    found = {}
    for path in sorted(GOLDENS.glob("*.safetensors")):
        _, metadata = mx.load(str(path), return_metadata=True)
        found |= json.loads(metadata.get("made", "{}")).get("with", {})
    return found


def page(errors: dict) -> str:
    theirs = ", ".join(f"{name} {version}" for name, version in sorted(made_with().items()))
    device = "CPU" if mx.default_device() == mx.Device(mx.cpu) else "GPU"
    ours = f"MLX {mx.__version__} on the {device}, {platform.system()} {platform.machine()}"
    compared = f"**Ours:** {ours}. **The reference:** {theirs}; both in float32."
    levels = max(1, *errors["diffusers_draws_the_same", ()])
    return "\n\n".join([INTRODUCTION + "\n" + compared, table(errors), NOT_COVERED.format(levels=levels)])


def promises_too_much(stored: str, fresh: str) -> list[str]:
    """Rows in which a difference is now more than three times what the page says, and above 1e-6, which another
    processor's order of adding explains; and rows that only one of the two has."""

    def rows(text):
        return {row[0]: row[1:] for line in text.splitlines() if len(row := cells(line)) > 1}

    def cells(line):
        return [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("| ") else []

    def value(cell):
        return float(cell) if re.fullmatch(r"\d+(e-?\d+)?", cell) else 0.0

    old, new = rows(stored), rows(fresh)
    found = [f"{name}: only {'on the page' if name in old else 'in the tests'}" for name in old.keys() ^ new.keys()]
    for name in old.keys() & new.keys():
        for says, is_now in zip(old[name], new[name]):
            if value(is_now) > max(3 * value(says), 1e-6):
                found.append(f"{name}: the page says {says}, now it is {is_now}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare with the page")
    arguments = parser.parse_args()
    fresh = page(measure())
    if not arguments.check:
        PAGE.write_text(fresh, encoding="utf-8")
        print(f"{PAGE.relative_to(ROOT)} is written.")
        return 0
    problems = promises_too_much(PAGE.read_text(encoding="utf-8"), fresh)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
