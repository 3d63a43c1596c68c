"""Writes the page of parity, notebooks/parity.md: how far each block is from what diffusers and transformers compute.

    python tests/write_parity.py            run the comparisons and write the page
    python tests/write_parity.py --check    run them and compare with the page; exit 1 if it promises too much

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
from golden_tools import GOLDENS

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
WORDS = {  # what a test compares, where its name does not say it well
    "autoencoder_res_block": "residual block, with and without a change of width",
    "autoencoder_mid_attention": "attention in the middle",
    "autoencoder_encode": "the whole encoder: latents, and latents packed and normalized",
    "autoencoder_pack_and_normalise": "packing, statistics, and back",
    "autoencoder_decode": "the whole decoder",
    "autoencoder_small_decoder": "the small decoder",
    "position_ids_rope": "RoPE: cosines, sines, turned queries and keys",
    "text_encoder_rms_norm": "RMSNorm",
    "text_encoder_layer": "one layer, with padding",
    "text_encoder_hidden_state": "every hidden state of a whole encoder",
    "text_encoder_features": "the features that the transformer reads",
    "text_encoder_logits": "scores of the next token",
    "sampling_schedule": "noise levels, for many sizes and steps",
    "sampling_euler": "the Euler loop along two known fields",
    "transformer_time_features": "cosines and sines of the time",
    "transformer_time_embedding": "the time's embedding",
    "transformer_modulation": "modulation, six parts and three",
    "transformer_swiglu": "SwiGLU",
    "transformer_feed_forward": "feed-forward layer",
    "transformer_qk_norm": "norm of queries and keys",
    "transformer_block_by_block": "every block inside a whole transformer",
    "transformer": "the whole transformer",
    "transformer reference": "… with one reference picture",
    "transformer two_references": "… with two reference pictures",
    "transformer batch": "… with a batch at two times",
    "kv_cache_block one_reference": "keys and values that each block keeps",
    "kv_cache_block two_references": "… of two references, in a batch",
    "kv_cache_velocity one_reference": "velocities that look them up, first step and later",
    "kv_cache_velocity two_references": "… with two references, a batch at two times",
    "kv_cache_trajectory": "whole edits with no, one and two references, and a batch: latents after every step",
}
PIPELINE = {
    "features": "text features", "encode": "a picture's latents", "decode": "the decoded picture",
    "sigmas": "noise levels", "first_velocity": "first velocity", "trajectory": "latents after every step",
}  # fmt: skip
RUNS = {"t2i": "text to picture", "edit1": "one reference", "edit2": "two references", "cfg": "guidance"}
RUNS |= {"cfg_edit": "guidance and a reference"}

INTRODUCTION = """\
# Parity with the reference

A picture that looks good proves little: a wrong epsilon, a wrong rounding or two swapped halves can hide behind it for
years. So every piece of this book is compared with the reference implementation, block by block, and this page says
how far apart the two are. `python tests/write_parity.py` ran the comparisons and wrote this page; a test runs them
again and fails if the page promises too much.

**How to read the numbers.** Each is the largest difference between a value of ours and the reference's, divided by
the largest value in that output, over all comparisons of the test: `1e-6` is one millionth. float32 has seven digits,
so about `1e-7` is the least that two programs can differ by when they add in another order. *Ordinary* inputs are of
size 1, *small* ones of size 0.01: only there does a wrong epsilon show ([what ports get wrong](corrections.md)). The
modules are tiny and random, since mathematics does not depend on size, and the weights are the same on both sides.
"""
NOT_COVERED = """\
## Why some numbers are larger

Two roundings, both of angles. The time enters through cosines of up to 1000 radians, which float32 holds to about
`6e-5`: whoever computes the angle in another order is off by that much, and everything that follows a time inherits
a share of it. And RoPE's angles reach 511 radians; diffusers takes them in float64, we take them in float32, as the
models' original code does. Where neither is involved, what is left is the rounding of sums.

## What this does not show

- **The released weights.** They have not been run by us yet. That each of their tensors has a place of the right shape
  is [tested](../tests/models/test_names.py) by names and shapes alone.
- **Metal and CUDA.** These are a CPU's numbers. The same tests are set up to run on Apple silicon, where sums are
  added in another order; they allow ten times as much there.
- **bfloat16**, which is what a GPU computes in. A test compares it with our own float32 only.
- **The reference's own choices.** We follow diffusers where it and the original code part: pixels are rounded, not cut
  off (one level of 255 at most), and a reference picture may have 1024² pixels at most. We refuse a prompt of more
  than 512 tokens, which diffusers cuts.
- **Quantized files' pictures.** FP8 and NVFP4 files are decoded as third-party readers lay them out, [byte by
  byte](../tests/models/test_formats.py); no other program's pictures from such a file were compared with ours. Adapter
  files have [a page of their own](adapters.md).
- **Whether the pictures are good.** For klein-nano that is measured by a judge: `python -m recipe.evaluate`.

## Run it yourself

```sh
make setup
.venv/bin/python -m pytest tests/test_parity_blocks.py tests/test_pipeline_golden.py
.venv/bin/python tests/write_parity.py --check
```

The reference values are stored in [`tests/goldens`](../tests/goldens) and [`tests/pipelines`](../tests/pipelines), with
the programs that made them; writing them again takes torch and diffusers (`pip install -e ".[dev]"`).
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
    pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", "-k", "not shared", *files], plugins=[recorder])
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


def blocks(errors: dict) -> str:
    """One table per chapter: what is compared, with ordinary and with small inputs."""
    tables: dict[str, dict[str, dict[str, list[float]]]] = {module: {} for module in CHAPTERS}
    for (test, parameters), differences in errors.items():
        module = next((name for name in CHAPTERS if test.startswith(name)), None)
        if module is None or test in PIPELINE:
            continue
        case = dict(parameters).get("case", "ordinary")
        name = test if case in ("ordinary", "small", "straight", "curved") else f"{test} {case}"
        columns = tables[module].setdefault(name, defaultdict(list))
        columns["small" if case == "small" else "ordinary"] += differences
    parts = []
    for module, rows in tables.items():
        chapter = CHAPTERS[module]
        title = module.replace("_", " ").capitalize().replace("Kv", "Key/value")
        lines = [f"### {title}", "", f"Built in [chapter {int(chapter[:2])}]({chapter}.ipynb).", ""]
        lines += ["| compared | ordinary | small |", "|---|--:|--:|"]
        for name, columns in rows.items():
            words = WORDS.get(name) or name.removeprefix(module).replace("_", " ").strip() or name.replace("_", " ")
            small = number(columns["small"]) if "small" in columns else ""
            lines.append(f"| {words} | {number(columns['ordinary'])} | {small} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def pipeline(errors: dict) -> str:
    """From prompt to picture: parts, and whole runs of several kinds."""
    parts, runs, levels = {}, defaultdict(lambda: defaultdict(list)), defaultdict(list)
    for (test, parameters), differences in errors.items():
        run = dict(parameters).get("run", "").removesuffix("_unicode")
        if test == "picture":
            levels[run] += differences
        elif test in PIPELINE and run:
            runs[test][run] += differences
        elif test in PIPELINE:
            parts.setdefault(test, []).extend(differences)
    lines = ["| compared | " + " | ".join(RUNS.values()) + " |", "|---|" + "--:|" * len(RUNS)]
    for test, columns in runs.items():
        lines.append(f"| {PIPELINE[test]} | " + " | ".join(number(columns[run]) for run in RUNS) + " |")
    nano = max(errors["diffusers_draws_the_same", ()])
    shown = [f"{max(levels[run]):.0f}" for run in RUNS]
    lines.append("| pixels, in levels of 255 | " + " | ".join("equal" if x == "0" else x for x in shown) + " |")
    said = ", ".join(f"{PIPELINE[test]} {number(differences)}" for test, differences in parts.items())
    return "\n".join([
        "## From prompt to picture", "",
        "Built in [chapter 6](06_pipeline.ipynb). diffusers' `Flux2KleinPipeline` and ours, on the same folder of tiny",
        f"random weights, from the same noise. Token ids are equal; {said}. Whole runs:", "", *lines, "",
        "And with trained weights: diffusers loads klein-nano's bundled files as they are. Of five pictures drawn by",
        "both (from words alone, in two formats; edited; from two references; with guidance), no value is further off",
        f"than {max(1, nano):.0f} of 255 levels (one that lies between two is rounded the one way or the other).",
    ])  # fmt: skip


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
    ours = f"MLX {mx.__version__} on the {device}, {platform.system()} {platform.machine()}, float32"
    compared = f"**Ours:** {ours}. **The reference:** {theirs}; float32 too."
    return "\n\n".join(
        [INTRODUCTION + "\n" + compared, "## Block by block", blocks(errors), pipeline(errors), NOT_COVERED]
    )


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
