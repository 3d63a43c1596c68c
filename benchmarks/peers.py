"""kleinlite beside diffusers and mflux: the same stages by turns, and the report "How fast". Hand-written.

    make bench-peers                                    everything; the others get environments of their own
    python -m benchmarks.peers --stages step picture --turns 9      these only: printed, the report stays as it is
    python -m benchmarks.peers --threads 1         on a busy machine: one thread each

Weights are random, in float32 on a CPU (but in one row) and in bfloat16 on a GPU. Each program runs in a process of its
own, one stage at a time; they take turns, because other work on a machine comes and goes. What was measured is kept in
benchmarks/how-fast.json, and benchmarks/how-fast.md with its plot is made of that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from benchmarks.how_fast import write_notes, write_page, write_table
from benchmarks.stages import BUSY, STAGES, TOGETHER, Timing
from benchmarks.workers.loop import PROMPT
from kleinlite.models.checkpoint import resolve_model

ROOT = Path(__file__).resolve().parents[1]
WORKERS = Path(__file__).parent / "workers"
SCRIPTS = {"kleinlite": "ours.py", "diffusers": "with_diffusers.py", "mflux": "with_mflux.py"}
MLX = "mlx" if sys.platform == "darwin" else "mlx[cpu]" if mx.default_device() == mx.Device(mx.cpu) else "mlx[cuda]"
PEERS = {
    "diffusers": ("torch==2.13.0", "diffusers==0.42.1", "transformers==5.24.0", "accelerate", "safetensors"),
    "mflux": (MLX, "scipy-openblas32", "transformers", "platformdirs", "piexif", "toml", "pillow", "tokenizers",
              "safetensors", "tqdm"),
}  # fmt: skip


# ---------------------------------------------------------------- the programs


def set_up(name: str, folder: Path) -> Path:
    """The Python of an environment with a peer in it, made if it is not there. Ours is never touched.

    Raises OSError, with what pip said last, if it cannot be made.
    """
    python = folder / name / "bin" / "python"
    if not (folder / name / ".done").exists():
        print(f"Installing {name} into {folder / name} …", file=sys.stderr)
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        commands = [[sys.executable, "-m", "venv", folder / name], [*pip, *PEERS[name]]]
        if name == "mflux":  # by itself it would bring CUDA's libraries on Linux
            commands.append([*pip, "--no-deps", "mflux==0.24.0"])
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise OSError(f"{name} could not be installed: {last_line(done.stderr + done.stdout)}")
        (folder / name / ".done").touch()
    return python


def last_line(text: str) -> str:
    return ([line.strip() for line in text.splitlines() if line.strip()] or ["it said nothing"])[-1]


def how_it_ended(status: int, said: str) -> str:
    """Why a process that should have answered did not, in a few words."""
    return f"killed by signal {-status}, perhaps for want of memory" if status < 0 else last_line(said)


def environment(threads: int | None) -> dict[str, str]:
    """Of a worker: our package on its path, threads as asked for, and modules compiled once, as users have them."""
    limits = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPATH": str(ROOT), **(limits if threads else {})}


class Worker:
    """A process that runs one stage each time it is asked, in the environment of its program."""

    def __init__(self, command: list, threads: int | None):
        self.complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*map(str, command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.complaints,
            env=environment(threads), text=True,
        )  # fmt: skip

    def answer(self) -> dict:
        """The next line that it says; OSError, with the reason, if it ends instead."""
        line = self.process.stdout.readline()
        if not line.endswith("\n"):
            status = self.process.wait()
            self.complaints.seek(0)
            raise OSError(how_it_ended(status, self.complaints.read()))
        return json.loads(line)

    def run(self) -> dict:
        with contextlib.suppress(BrokenPipeError):  # it has ended: `answer` says how
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.complaints.close()


@contextlib.contextmanager
def busy_core(wanted: bool) -> Iterator[None]:
    """Another program that keeps the first core busy, where Linux lets us choose; elsewhere any."""
    if not wanted:
        yield
        return
    work = f"import os\nwhile os.getppid() == {os.getpid()}: pass"  # should we be killed, it ends as well
    other = subprocess.Popen([sys.executable, "-c", work], stdout=subprocess.DEVNULL)
    try:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(other.pid, {min(os.sched_getaffinity(0))})
        yield
    finally:
        other.kill()
        other.wait()


class Found(NamedTuple):
    """What was measured: stage → program → Timing; what each program says it is; and what went wrong, in sentences."""

    stages: dict[str, dict[str, Timing]]
    versions: dict[str, str]
    failures: list[str]

    @contextlib.contextmanager
    def noting(self, stage: str, program: str) -> Iterator[None]:
        """An OSError in here is a failure, and said at once."""
        try:
            yield
        except OSError as error:
            self.failures.append(f"{program} did not finish “{stage}”: {error}.")
            print(self.failures[-1], file=sys.stderr)


def take_turns(commands: dict[tuple[str, str], list], turns: int, threads: int | None) -> Found:
    """Run stages by turns in every program that has them. commands: (stage, program) → what starts its worker.

    A program that dies is left out of the stage and named; the others go on.
    """
    found, workers, said, answers = Found({}, {}, []), {}, {}, {}

    def worker_of(stage, program):
        return (stage.removesuffix(BUSY), program)

    try:
        for (stage, program), command in commands.items():  # one after the other: no preparation disturbs another
            key = worker_of(stage, program)
            with found.noting(stage, program):
                if key not in workers:
                    workers[key] = Worker(command, threads)
                    said[key] = workers[key].answer()
                    found.versions[program] = said[key]["versions"]
                if "ready" in said.get(key, {}):
                    answers[stage, program] = []
        for _ in range(turns):
            for stage, program in list(answers):
                costs = answers.pop((stage, program))
                with found.noting(stage, program), busy_core(stage.endswith(BUSY)):
                    costs.append(workers[worker_of(stage, program)].run())
                    answers[stage, program] = costs
    finally:
        for worker in workers.values():
            worker.close()
    for (stage, program), costs in answers.items():
        seconds, processor, peaks = ([cost[key] for cost in costs] for key in ("seconds", "processor", "peak_bytes"))
        found.stages.setdefault(stage, {})[program] = Timing(seconds, processor, max(peaks))
    return found


def start_to_png(commands: dict[str, list], turns: int, threads: int | None) -> Found:
    """Whole processes, by turns."""
    stage, found, timings = "start to PNG", Found({}, {}, []), {name: Timing([], [], 0) for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(turns):
            for name in list(timings):
                timing = timings.pop(name)
                words = [str(word).replace("OUT", f"{folder}/{name}.png") for word in commands[name]]
                with found.noting(stage, name):
                    before, start = os.times(), time.perf_counter()
                    done = subprocess.run(words, env=environment(threads), capture_output=True, text=True)
                    seconds, after = time.perf_counter() - start, os.times()
                    if done.returncode:
                        raise OSError(how_it_ended(done.returncode, done.stderr))
                    spent = after.children_user + after.children_system - before.children_user - before.children_system
                    timing.seconds.append(seconds)
                    timing.processor.append(spent)
                    timings[name] = timing
    return found._replace(stages={stage: timings} if timings else {})


def measure(stages: list[str], pythons: dict[str, Path], turns: int, threads: int | None, layers: int) -> dict:
    """Everything, as plain data."""
    nano, found = resolve_model("nano"), Found({}, {}, [])
    load, others = os.getloadavg(), processor_seconds()
    start = time.perf_counter()
    rounds = [[stage] for stage in STAGES if stage in stages and stage not in TOGETHER]
    together = [stage for stage in TOGETHER if stage in stages]
    for members in [*rounds, *([together] * bool(together))]:
        print(f"{', '.join(members)} …", file=sys.stderr, flush=True)
        if members == ["start to PNG"]:
            whole = {
                "kleinlite": [pythons["kleinlite"], "-m", "kleinlite", "generate", PROMPT, "--seed", 7, "-o", "OUT"]
            }
            if "diffusers" in pythons:
                whole["diffusers"] = [pythons["diffusers"], WORKERS / SCRIPTS["diffusers"], "--draw", nano, "OUT"]
            new = start_to_png(whole, turns, threads)
        else:
            commands = {
                (stage, name): [python, WORKERS / SCRIPTS[name], stage.removesuffix(BUSY), layers, nano]
                for stage in members for name, python in pythons.items()
            }  # fmt: skip
            new = take_turns(commands, turns, threads)
        for mine, more in zip(found[:2], new[:2]):
            mine.update(more)
        found.failures.extend(new.failures)
    wall, ours = time.perf_counter() - start, sum(os.times()[:4])
    settings = {name: value for name, value in os.environ.items() if name.startswith(("OPENBLAS_", "OMP_", "MKL_"))}
    return {
        "turns": turns, "threads": threads, "layers": layers, "machine": machine(), "cores": os.cpu_count(),
        "load before": load, "others": None if others is None else (processor_seconds() - others - ours) / wall,
        "minutes": wall / 60, "settings": settings, "versions": found.versions, "failures": found.failures,
        "stages": {s: {n: t._asdict() for n, t in found.stages[s].items()} for s in STAGES if s in found.stages},
    }  # fmt: skip


def processor_seconds() -> float | None:
    """What all programs of this machine together have spent since it started; only Linux tells."""
    try:
        user, nice, system, *_ = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:])
    except OSError:
        return None
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def machine() -> str:
    """The processor's name, its widest vectors where Linux tells them, and the system."""
    try:
        told = Path("/proc/cpuinfo").read_text()
    except OSError:
        told = ""
    names = re.findall(r"^model name\s*: (.*)$", told, re.MULTILINE)
    vectors = [f"with {name}" for word, name in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if f" {word} " in told]
    processor = names[0] if names else platform.processor() or platform.machine()
    return ", ".join([" ".join([processor, *vectors[:1]]), platform.system()])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.split("\n")[0])
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES), metavar="STAGE")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, help="for each program (default: what each takes)")
    parser.add_argument("--layers", type=int, default=27, help="of the text encoder; they share one layer's weights")
    parser.add_argument("--environments", type=Path, default=ROOT / ".peers", help="where the peers are installed")
    parser.add_argument("--diffusers", type=Path, metavar="PYTHON", help="an environment that has diffusers already")
    parser.add_argument("--mflux", type=Path, metavar="PYTHON", help="an environment that has mflux already")
    parser.add_argument("--page", type=Path, default=ROOT / "benchmarks", help="the folder of how-fast.md")
    options = parser.parse_args(argv)
    pythons, missing = {"kleinlite": Path(sys.executable)}, []
    for name in PEERS:
        try:
            pythons[name] = getattr(options, name) or set_up(name, options.environments)
        except OSError as error:
            missing.append(f"{error}.")
            print(missing[-1], file=sys.stderr)
    found = measure(options.stages, pythons, options.turns, options.threads, options.layers)
    found["failures"][:0] = missing
    print("\n".join([write_table(found), *write_notes(found)]))
    if set(options.stages) == set(STAGES):
        write_page(found, options.page)
        print(f"{found['minutes']:.0f} minutes; {options.page / 'how-fast.md'}", file=sys.stderr)


if __name__ == "__main__":
    main()
