"""Workers answer line by line, a dying one is a sentence, and the page "How fast" is made of what was measured."""

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_until

from benchmarks import how_fast, peers, stages
from benchmarks.how_fast import write_answer, write_notes, write_page, write_table
from benchmarks.peers import take_turns
from benchmarks.stages import BUSY, STAGES, Timing, count_decode, count_work


def measured(others: float = 0.0) -> dict:
    ours, theirs = Timing([2.0, 4.0, 3.0], [1.0, 1.5, 1.2], 10**6), Timing([4.0, 4.0, 4.0], [4.0, 5.0, 6.0], 2 * 10**6)
    both = {"kleinlite": ours._asdict(), "diffusers": theirs._asdict()}
    found = dict.fromkeys(STAGES, both) | {
        "step": both | {"mflux": theirs._asdict()}, "step, 8 bits": {"kleinlite": theirs._asdict()},
        "silu · up": {"kleinlite": theirs._asdict(), "diffusers": ours._asdict()},
        f"step{BUSY}": {"kleinlite": theirs._asdict()},
    }  # fmt: skip
    return {
        "turns": 3, "threads": None, "layers": 27, "load before": [0.1, 0.0, 0.0], "others": others, "minutes": 1.0,
        "stages": found, "versions": {"kleinlite": "kleinlite X"}, "machine": "A processor", "cores": 2,
        "settings": {}, "failures": ["mflux did not finish “step”: it said nothing."],
    }  # fmt: skip


def test_the_table_and_the_notes_say_what_was_measured():
    [step] = [line for line in write_table(measured()).splitlines() if line.startswith("| **step**")]
    assert step.endswith("| 2.00 | 4.00 | **0.50** | 4.00 |")
    assert write_notes(measured()) == [
        "decode 256² takes 1 MB beyond its weights in kleinlite and 2 MB in diffusers.",
        "decode 512² takes 1 MB beyond its weights in kleinlite and 2 MB in diffusers.",
        "mflux did not finish “step”: it said nothing.",
    ]


def test_the_answer_is_what_was_measured():
    answer = write_answer(measured())
    assert "over that of diffusers is 0.50 for three blocks of the 4B, 0.50 for a picture of klein-nano" in answer
    shared = sum("diffusers" in programs for programs in measured()["stages"].values())
    assert answer.endswith(f" It is slower in 1 of {shared} stages.")
    alone = measured() | {"stages": {"picture": measured()["stages"]["picture"]}}
    assert "0.50 for a picture of klein-nano. It is slower in 0 of 1" in write_answer(alone)
    assert "nothing was measured" in write_answer(measured() | {"stages": {}})


def test_one_turn_and_one_stage_are_enough_for_a_table():
    once = Timing([1.0], [1.0], 1)._asdict()
    found = measured() | {"stages": {"step": {"kleinlite": once}}, "failures": []}
    assert "| 1.00 |  |  |  |" in write_table(found) and write_notes(found) == []


def test_the_page_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    write_page(measured(), tmp_path)
    page = (tmp_path / "how-fast.md").read_text(encoding="utf-8")
    assert "- kleinlite X" in page and "busy with other work" not in page
    order = ["\nOn this machine", "<img", "| stage |", "- kleinlite X"]
    assert sorted(order, key=page.index) == order
    assert (tmp_path / "images" / "how-fast.png").stat().st_size > 5000
    assert json.loads((tmp_path / "how-fast.json").read_text(encoding="utf-8"))["cores"] == 2
    monkeypatch.setattr(how_fast, "draw_plot", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_page(measured() | {"cores": 3}, tmp_path)
    assert (tmp_path / "how-fast.md").read_text(encoding="utf-8") == page and len(list(tmp_path.iterdir())) == 3
    monkeypatch.setattr(how_fast, "draw_plot", lambda path, *_: path.touch())
    write_page(measured(others=0.8), tmp_path)
    assert "0.80 cores busy. **It was busy" in (tmp_path / "how-fast.md").read_text(encoding="utf-8")


def test_the_stored_page_is_made_from_the_stored_numbers(tmp_path):
    folder = peers.ROOT / "benchmarks"
    write_page(json.loads((folder / "how-fast.json").read_text(encoding="utf-8")), tmp_path)
    assert (folder / "how-fast.md").read_text(encoding="utf-8") == (tmp_path / "how-fast.md").read_text(
        encoding="utf-8"
    )


def test_every_stage_has_its_work_counted_but_the_whole_pictures():
    assert set(STAGES) - set(count_work(27)) == {"picture", "start to PNG"}
    assert count_decode(512) > 4 * count_decode(256) > 0  # attention grows with the square


def test_workers_take_turns():
    command = [sys.executable, peers.WORKERS / "ours.py", "modulated norm", 1, "."]
    stage = "modulated norm"
    found = take_turns({(stage, "one"): command, (stage, "two"): command}, 3, threads=1)
    timings = found.stages[stage]
    assert set(timings) == {"one", "two"} and all(len(t.seconds) == len(t.processor) == 3 for t in timings.values())
    assert all(min(t.seconds) > 0 for t in timings.values()) and found.versions["one"].startswith("kleinlite")
    assert found.failures == []


def test_a_program_that_lacks_a_stage_is_left_out():
    command = [sys.executable, peers.WORKERS / "ours.py", "no such stage", 1, "."]
    found = take_turns({("no such stage", "one"): command}, 1, threads=1)
    assert found.stages == {} and found.versions["one"].startswith("kleinlite") and found.failures == []


DIES = "import sys; {before}; sys.exit('Traceback\\nMemoryError: too large')"
ANSWERS = "import json; print(json.dumps({'ready': True, 'versions': 'v'}), flush=True); input()"
COST = "import json; print(json.dumps({'seconds': 1, 'processor': 1, 'peak_bytes': 0}), flush=True)"


@pytest.mark.parametrize("before", ["pass", ANSWERS])
def test_a_worker_that_dies_is_a_sentence_and_the_others_go_on(before, capsys):
    good = [sys.executable, "-c", f"{ANSWERS}\n{COST}\n"]
    bad = [sys.executable, "-c", DIES.format(before=before)]
    found = take_turns({("step", "bad"): bad, ("step", "good"): good, (f"step{BUSY}", "bad"): bad}, 1, threads=1)
    assert set(found.stages["step"]) == {"good"}
    assert found.failures[0] == "bad did not finish “step”: MemoryError: too large." in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_program_that_keeps_a_core_busy_ends_with_us():
    """However we end: the context manager has no say when somebody kills us."""
    code = """if True:
        import os
        from benchmarks.peers import busy_core
        busy = busy_core(True)
        busy.__enter__()
        print(busy.gen.gi_frame.f_locals["other"].pid, flush=True)
        os._exit(0)
    """
    pid = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=peers.ROOT).stdout.strip()
    status = Path(f"/proc/{pid}/stat")

    def ended():
        return not status.exists() or status.read_text().split()[2] == "Z"

    assert pid
    wait_until(ended, "the other program ends")


def test_whole_processes_that_fail_are_a_sentence():
    good, bad = [sys.executable, "-c", "pass"], [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    found = peers.start_to_png({"bad": bad, "good": good}, 2, threads=1)
    assert len(found.stages["start to PNG"]["good"].seconds) == 2 and "bad" not in found.stages["start to PNG"]
    assert found.failures == ["bad did not finish “start to PNG”: killed by signal 9, perhaps for want of memory."]


def test_a_peer_that_cannot_be_installed_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(peers.PEERS, "mflux", ("./no-such-folder",))
    monkeypatch.setattr(peers.sys, "executable", shutil.which("false"))
    with pytest.raises(OSError, match="mflux could not be installed: it said nothing"):
        peers.set_up("mflux", tmp_path)


def test_the_worker_for_diffusers_does_not_need_this_package():
    """It runs in an environment of its own."""
    nodes = ast.walk(ast.parse((peers.WORKERS / "with_diffusers.py").read_text(encoding="utf-8")))
    assert not [node for node in nodes if isinstance(node, ast.ImportFrom) and "kleinlite" in node.module]


def test_every_stage_of_ours_is_known():
    source = (peers.WORKERS / "ours.py").read_text(encoding="utf-8")
    assert all(f'"{stage}"' in source for stage in stages.STAGES if stage not in (f"step{BUSY}", "start to PNG"))
