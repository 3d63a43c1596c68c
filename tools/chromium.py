"""What drives the site in a browser: where this system's Chromium is, and a web server for a folder."""

import contextlib
import functools
import http.server
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAC = "/Applications/{0}.app/Contents/MacOS/{0}"
NAMES = (  # first the one that has no windows to draw: the tests take a fifth less time with it
    "chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome",
)  # fmt: skip


def executable() -> str | None:
    """Where a Chromium or Chrome is on this machine; CHROMIUM in the environment names another one."""
    named = [os.environ.get("CHROMIUM"), *map(shutil.which, NAMES)]
    return next((path for path in [*named, MAC.format("Chromium"), MAC.format("Google Chrome")]
                 if path and os.path.exists(path)), None)  # fmt: skip


def launch(playwright: Any) -> Any:
    """The browser. A container's root may not make a sandbox, and its /dev/shm is small."""
    args = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
    return playwright.chromium.launch(executable_path=executable(), args=args)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """A web server for a folder, on this machine only; gives its address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
