"""Several threads at once: every call is served, each gets its own picture, and the process ends as it should."""

import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from stand_in_hub import TINY
from waiting import HANGS

from kleinlite import Klein

START = f"""
import hashlib, json, sys, threading
from kleinlite import Klein

klein = Klein.from_pretrained({str(TINY)!r})
wish = {{"width": 32, "height": 32, "steps": 2, "progress": False}}
draw = lambda seed: hashlib.md5(klein("a red circle", seed=seed, **wish).tobytes()).hexdigest()
"""


def test_the_callers_random_numbers_are_their_own():
    """A layer draws its first weights when it is built; what `mx.random` gives next does not depend on that."""
    mx.random.seed(3)
    expected = mx.random.normal((4,)).tolist()
    mx.random.seed(3)
    klein = Klein.from_pretrained(TINY)
    klein("a red circle", width=32, height=32, steps=1, seed=1, progress=False)
    klein.plan_memory()
    klein.release()
    klein("a red circle", width=32, height=32, steps=1, seed=1, progress=False)
    assert mx.random.normal((4,)).tolist() == expected


def test_a_stream_that_was_left_open_ends_with_the_process():
    """Its end comes after MLX's: what it computed there ended the process with a fault."""
    code = START + "stream = klein.stream('a red circle', seed=1, **wish)\nnext(stream).preview()\n"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANGS)


# Each tells which pictures it made, by seed.
USES = {
    "ten threads that draw": """
drawn = {}
def work(i):
    for seed in (i, i + 1):
        drawn[f"{i} {seed}"] = draw(seed)
threads = [threading.Thread(target=work, args=(i,)) for i in range(10)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
""",
    "the main thread as well, before, meanwhile and after": """
drawn = {"before 3": draw(3)}
def work(i):
    drawn[f"{i} {i}"] = draw(i)
threads = [threading.Thread(target=work, args=(i,)) for i in range(10)]
[thread.start() for thread in threads]
drawn["meanwhile 4"] = draw(4)
[thread.join() for thread in threads]
drawn["after 5"] = draw(5)
""",
    "threads that read prompts, load parts and open models": """
drawn = {}
def work(i):
    mine = Klein.from_pretrained(klein._model.checkpoint.home.path)
    features = mine.encode_prompt("a red circle")
    assert features.shape[0] == 1 and mine.autoencoder is mine.autoencoder
    drawn[f"{i} {i}"] = hashlib.md5(mine("a red circle", seed=i, **wish).tobytes()).hexdigest()
threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
""",
    # A thread for each request, as in Flask's own server: they come and go.
    "a web server": """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from concurrent.futures import ThreadPoolExecutor
from urllib.request import urlopen

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = draw(int(self.path[1:])).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass

ThreadingHTTPServer.request_queue_size = 20
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
ask = lambda seed: urlopen(f"http://127.0.0.1:{server.server_address[1]}/{seed}").read().decode()
with ThreadPoolExecutor(10) as users:
    drawn = {f"user {seed}": told for seed, told in zip(range(10), users.map(ask, range(10)))}
server.shutdown()
""",
    # Every step of a generator in whatever thread of a pool is free, as Gradio runs them.
    "streams whose steps change threads": """
from concurrent.futures import ThreadPoolExecutor
drawn, pool = {}, ThreadPoolExecutor(4)
def user(seed):
    steps = klein.stream("a red circle", seed=seed, **wish)
    while step := pool.submit(next, steps, None).result():
        picture = pool.submit(step.preview).result()
        last = step.latents.tolist()  # may be read anywhere
    drawn[f"user {seed}"] = hashlib.md5(picture.tobytes()).hexdigest()
    next(klein.stream("a red circle", seed=seed, **wish))  # and one that nobody follows
users = [threading.Thread(target=user, args=(seed,)) for seed in range(6)]
[thread.start() for thread in users]
[thread.join() for thread in users]
pool.shutdown()
""",
    "a mistake, told to the one who made it": """
drawn, told = {}, []
def work(i):
    try:
        klein("a " * 1000, **wish)
    except ValueError as error:
        told.append(str(error))
    drawn[f"{i} {i}"] = draw(i)
threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert len(told) == 4 and "shorten" in told[0]
""",
}


def run(code: str, **environment) -> subprocess.CompletedProcess:
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"} | environment
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS, env=environment)


@pytest.fixture(scope="module")
def alone() -> dict[str, str]:
    """What each seed gives where nothing else runs."""
    end = run(START + "print(json.dumps({seed: draw(seed) for seed in range(11)}))")
    assert end.returncode == 0, end.stderr

    return json.loads(end.stdout)


@pytest.mark.parametrize("again", range(int(os.environ.get("KLEINLITE_THREAD_RUNS", 2))))
@pytest.mark.parametrize("use", USES)
def test_threads(use, again, alone):
    """Many more runs: KLEINLITE_THREAD_RUNS=50 pytest tests/inference/test_serialized.py"""
    end = run(START + USES[use] + "\nprint(json.dumps(drawn))")
    assert (end.returncode, end.stderr) == (0, "")

    drawn = json.loads(end.stdout)
    assert drawn and all(picture == alone[name.split()[-1]] for name, picture in drawn.items())


FORK = """
import os, signal, time
{before}
child = os.fork()
if child == 0:
    signal.alarm(60)  # not for ever, if it hangs
    from kleinlite import Klein
    try:
        Klein.from_pretrained({model!r})("a", width=32, height=32, steps=1, progress=False)
        print("drawn", flush=True)
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(sys.platform != "linux", reason="where fork is the way to start a process")
def test_after_a_fork_a_sentence():
    end = run(FORK.format(before="from kleinlite import Klein; Klein.from_pretrained()('a')", model=str(TINY)))
    assert end.returncode == 0, end.stderr
    assert end.stdout.strip().endswith('"spawn", or use kleinlite in the new process only.')


@pytest.mark.skipif(sys.platform != "linux", reason="where fork is the way to start a process")
def test_an_import_alone_starts_nothing_that_a_fork_would_lose():
    end = run(FORK.format(before="import kleinlite, kleinlite.klein", model=str(TINY)))
    assert (end.returncode, end.stdout.strip()) == (0, "drawn"), end.stderr


def test_a_process_that_forks_first_draws():
    end = run(FORK.format(before="", model=str(TINY)))
    assert (end.returncode, end.stdout.strip()) == (0, "drawn"), end.stderr


def test_a_process_that_is_spawned_draws(tmp_path):
    script = Path(tmp_path / "spawned.py")
    script.write_text(f"""
import multiprocessing
from kleinlite import Klein

def work(seed):
    return Klein.from_pretrained({str(TINY)!r})("a", seed=seed, width=32, height=32, steps=1, progress=False).size

if __name__ == "__main__":
    work(1)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(work, [1, 2]))
""")
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    end = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=HANGS, env=environment)
    assert (end.returncode, end.stdout.strip()) == (0, "[(32, 32), (32, 32)]"), end.stderr
