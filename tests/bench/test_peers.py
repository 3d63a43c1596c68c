"""The page "How fast" is made of what was measured, and workers answer line by line."""

import ast
import json
import sys

from kleinlite.bench import peers
from kleinlite.bench.peers import Timing, quartiles, ratios, take_turns


def measured(busy: float) -> dict:
    ours, theirs = Timing([2.0, 4.0, 3.0], [1.0, 1.5, 1.2], 10**6), Timing([4.0, 4.0, 4.0], [4.0, 5.0, 6.0], 2 * 10**6)
    stages = {
        "step": {"kleinlite": ours._asdict(), "diffusers": theirs._asdict(), "mflux": theirs._asdict()},
        "decode 256²": {"kleinlite": ours._asdict(), "diffusers": theirs._asdict()},
        "picture": {"kleinlite": ours._asdict()},
    }
    return {
        "turns": 3, "threads": None, "layers": 27, "load before": [busy, 0.0, 0.0], "load after": [0.1, 0.0, 0.0],
        "stages": stages, "versions": {"kleinlite": "kleinlite X"}, "machine": "A processor", "cores": 2,
    }  # fmt: skip


def test_ratios():
    ours, theirs = (Timing(**measured(0)["stages"]["step"][name]) for name in ("kleinlite", "diffusers"))
    assert ratios(ours, theirs) == (0.5, 0.75, 0.25)
    assert quartiles([1.0, 2.0, 3.0]) == 2.0


def test_the_page_shows_what_was_measured(tmp_path):
    peers.write_page(measured(busy=0.2), tmp_path)
    page = (tmp_path / "how-fast.md").read_text(encoding="utf-8")
    [step] = [line for line in page.splitlines() if line.startswith("| **step**")]
    assert "2.00 (3.00, 2.00)" in step and "0.50, 0.75 | **0.25**" in step
    assert "decode 256²: 1 MB in kleinlite, 2 MB in diffusers" in page and "- kleinlite X" in page
    assert "was busy" not in page and (tmp_path / "images" / "how-fast.png").stat().st_size > 5000
    peers.write_page(measured(busy=5.0), tmp_path)
    assert "The machine was busy" in (tmp_path / "how-fast.md").read_text(encoding="utf-8")


def test_the_stored_page_is_made_from_the_stored_numbers(tmp_path):
    folder = peers.ROOT / "notebooks"
    peers.write_page(json.loads((folder / "how-fast.json").read_text(encoding="utf-8")), tmp_path)
    assert (folder / "how-fast.md").read_text(encoding="utf-8") == (tmp_path / "how-fast.md").read_text(
        encoding="utf-8"
    )


def test_workers_take_turns():
    command = [sys.executable, peers.WORKERS / "ours.py", "modulated norm", 1, "."]
    timings, versions = take_turns({"one": command, "two": command}, "modulated norm", 3, threads=1)
    assert set(timings) == {"one", "two"} and all(len(t.seconds) == len(t.processor) == 3 for t in timings.values())
    assert all(min(t.seconds) > 0 for t in timings.values()) and versions["one"].startswith("kleinlite")


def test_a_program_that_lacks_a_stage_is_left_out():
    command = [sys.executable, peers.WORKERS / "ours.py", "no such stage", 1, "."]
    timings, versions = take_turns({"one": command}, "no such stage", 1, threads=1)
    assert timings == {} and versions["one"].startswith("kleinlite")


def test_the_worker_for_diffusers_does_not_need_this_package():
    """It runs in an environment of its own."""
    nodes = ast.walk(ast.parse((peers.WORKERS / "with_diffusers.py").read_text(encoding="utf-8")))
    assert not [node for node in nodes if isinstance(node, ast.ImportFrom) and "kleinlite" in node.module]
