"""The program on the page about serving, as it stands there, asked by many at once."""

import functools
import io
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
from PIL import Image
from waiting import HANGS, wait_until

from kleinlite.klein import Klein

PAGE = Path(__file__).parents[1] / "notebooks" / "serving.md"


def listens(port: int, process: subprocess.Popen) -> bool:
    """Whether somebody listens there; an error if the program has ended."""
    assert process.poll() is None
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


def ask(port: int, seed: int) -> tuple[int, bytes]:
    query = urlencode({"prompt": "a red star", "seed": seed})
    try:
        with urlopen(f"http://127.0.0.1:{port}/?{query}", timeout=HANGS) as reply:
            return reply.status, reply.read()
    except HTTPError as refusal:
        return refusal.code, refusal.read()


@pytest.fixture
def port(tmp_path):
    """Where the page's server listens."""
    [code] = [c for c in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S) if "serve_forever" in c]
    program = tmp_path / "server.py"
    program.write_text(code)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        free = listener.getsockname()[1]
    line = [sys.executable, str(program), str(free)]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(functools.partial(listens, free, process), "the server starts")
        yield free
    finally:
        process.kill()
        process.wait()


def test_each_gets_the_picture_that_it_would_get_alone(port):
    klein = Klein.from_pretrained()
    with ThreadPoolExecutor(6) as users:
        answers = list(users.map(functools.partial(ask, port), [-1, *range(5)]))
    status, sentence = answers[0]
    assert status == 400 and sentence.startswith(b"A seed is a whole number")
    for seed, (status, content) in enumerate(answers[1:]):
        alone = klein("a red star", seed=seed, progress=False)
        assert status == 200 and Image.open(io.BytesIO(content)).tobytes() == alone.tobytes()
