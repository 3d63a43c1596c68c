"""The two programs on the page about serving, as they stand there: two replicas, a full queue, one replica killed."""

import functools
import io
import json
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from PIL import Image
from waiting import HANGS, wait_until

from kleinlite.klein import Klein

PAGE = Path(__file__).parents[1] / "notebooks" / "serving.md"


def program(first_words: str) -> str:
    """The program on the page whose docstring begins so."""
    return next(
        code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S) if first_words in code
    )


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def listens(port: int, process: subprocess.Popen) -> bool:
    """Whether somebody listens there; an error if the program has ended."""
    assert process.poll() is None
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


def ask(port: int, seed: int, prompt: str = "a red star") -> tuple[int, bytes]:
    wish = json.dumps({"prompt": prompt, "seed": seed}).encode()
    try:
        with urlopen(Request(f"http://127.0.0.1:{port}", wish), timeout=HANGS) as reply:
            return reply.status, reply.read()
    except HTTPError as refusal:
        return refusal.code, refusal.read()


@pytest.fixture
def servers(tmp_path):
    """The front's port and the two replicas' processes."""
    replica = tmp_path / "replica.py"
    replica.write_text(program('"""Draws'))
    front = tmp_path / "front.py"
    front.write_text(program('"""The address'))
    ports = [free_port() for _ in range(3)]
    addresses = [f"http://127.0.0.1:{port}" for port in ports[1:]]
    commands = [[front, ports[0], *addresses], *([replica, port] for port in ports[1:])]
    with ExitStack() as stack:
        processes = []
        for command in commands:
            line = [sys.executable, *map(str, command)]
            processes.append(subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            stack.callback(processes[-1].kill)
        for port, process in zip(ports, processes):
            wait_until(functools.partial(listens, port, process), "a server starts")
        yield ports[0], processes[1:]


def test_no_wish_is_lost(servers):
    port, (first, second) = servers
    klein = Klein.from_pretrained()
    assert Image.open(io.BytesIO(ask(port, 1)[1])).tobytes() == klein("a red star", seed=1, progress=False).tobytes()
    status, sentence = ask(port, -1)
    assert status == 400 and sentence.startswith(b"A seed is a whole number")
    for replica in (first, second):  # both hold still, so that wishes pile up
        replica.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(20) as users:
        answers = [users.submit(ask, port, seed) for seed in range(20)]
        refused = 15  # two are in hand and three in the queue, no more
        wait_until(lambda: sum(answer.done() for answer in answers) >= refused, "the queue is full")
        first.kill()
        second.send_signal(signal.SIGCONT)
        replies = [answer.result() for answer in answers]
    served = {seed: content for seed, (status, content) in enumerate(replies) if status == 200}
    assert 3 <= len(served) <= 5
    assert [reply for reply in replies if reply[0] != 200] == [(503, b"The queue is full: try again in a minute.")] * (
        20 - len(served)
    )
    for seed, content in served.items():
        assert Image.open(io.BytesIO(content)).tobytes() == klein("a red star", seed=seed, progress=False).tobytes()
