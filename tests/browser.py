"""A headless Chromium, driven over its own protocol (DevTools). Needs no driver and no package but websocket-client.

with Chromium() as browser:
    page = browser.open("http://127.0.0.1:8000/index.html", width=390)
    assert page.run("document.title") == "Overview"
    page.press("s")
    page.wait("document.querySelector('#mdbook-searchbar')")
    print(page.errors, page.requests)
"""

from __future__ import annotations

import base64
import contextlib
import functools
import http.server
import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

MAC = "/Applications/{0}.app/Contents/MacOS/{0}"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SWITCHES = (
    "--headless=new --no-sandbox --disable-gpu --hide-scrollbars --mute-audio --no-first-run --disable-sync "
    "--no-default-browser-check --disable-background-networking --disable-component-update --disable-extensions "
    "--disable-dev-shm-usage --remote-debugging-port=0"
)


def executable() -> str | None:
    """Where a Chromium or Chrome is on this machine; CHROMIUM in the environment names another one."""
    named = [os.environ.get("CHROMIUM"), *map(shutil.which, NAMES)]
    return next((path for path in [*named, MAC.format("Chromium"), MAC.format("Google Chrome")]
                 if path and os.path.exists(path)), None)  # fmt: skip


def reason_to_skip() -> str | None:
    """Why tests in a browser cannot run here, if they cannot. With KLEINLITE_BROWSER=required that is an error."""
    reason = None if executable() else "no Chromium found: apt install chromium, or set CHROMIUM to its path"
    if not importlib.util.find_spec("websocket"):
        reason = "websocket-client is not installed: pip install -e '.[book]' brings it (with JupyterLab)"
    if reason and os.environ.get("KLEINLITE_BROWSER") == "required":
        raise RuntimeError(f"The tests in a browser must run here, but {reason}.")
    return reason


class Page:
    """One tab. What went wrong on it gathers in `errors`, what it asked for in `requests`."""

    def __init__(self, address: str):
        import websocket

        self.socket = websocket.create_connection(address, suppress_origin=True, timeout=30)
        self.count = 0
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.loaded = False
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.tell(f"{domain}.enable")

    def tell(self, method: str, **parameters) -> dict:
        """Send one command and wait for its answer; what happens in between is noted."""
        self.count += 1
        self.socket.send(json.dumps({"id": self.count, "method": method, "params": parameters}))
        while (message := json.loads(self.socket.recv())).get("id") != self.count:
            self.note(message.get("method"), message.get("params", {}))
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']['message']}")
        return message["result"]

    def note(self, event: str, about: dict) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif event == "Page.loadEventFired":
            self.loaded = True
        elif event == "Runtime.exceptionThrown":
            details = about["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif event == "Runtime.consoleAPICalled" and about["type"] in ("error", "assert"):
            self.errors.append(" ".join(str(x.get("value", x.get("description"))) for x in about["args"]))
        elif event == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.errors.append(f"{about['entry']['text']} {about['entry'].get('url', '')}")

    def goto(self, url: str) -> Page:
        """Load a page, and come back when its pictures are there."""
        self.errors, self.requests, self.loaded = [], [], False
        self.tell("Page.navigate", url=url)
        until = time.monotonic() + 30
        while not self.loaded:
            if time.monotonic() > until:
                raise TimeoutError(f"{url} did not load")
            message = json.loads(self.socket.recv())
            self.note(message.get("method"), message.get("params", {}))
        return self

    def run(self, script: str):
        """The value of an expression, or of the promise that it gives."""
        told = self.tell("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in told:
            details = told["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description") or details["text"])
        return told["result"].get("value")

    def wait(self, condition: str, seconds: float = 20) -> None:
        """Until an expression is true."""
        until = time.monotonic() + seconds
        while not self.run(f"!!({condition})"):
            if time.monotonic() > until:
                raise TimeoutError(f"after {seconds} s still not true: {condition}")
            time.sleep(0.05)

    def size(self, width: int, height: int = 900) -> None:
        self.tell("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=width < 600)  # fmt: skip

    def dark(self, on: bool) -> None:
        """What the system says that its user likes."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if on else "light"}]
        self.tell("Emulation.setEmulatedMedia", features=features)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": key} if len(key) == 1 and kind == "keyDown" else {}
            self.tell("Input.dispatchKeyEvent", type=kind, key=key, **text)

    def type(self, text: str) -> None:
        for character in text:
            self.press(character)

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of the first element that the selector finds."""
        box = f"JSON.parse(JSON.stringify(document.querySelector({json.dumps(selector)}).getBoundingClientRect()))"
        box = self.run(box)
        at = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2, "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self.tell("Input.dispatchMouseEvent", type=kind, **at)

    def screenshot(self, path: Path | str, whole: bool = False) -> None:
        data = self.tell("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        Path(path).write_bytes(base64.b64decode(data))


class Chromium:
    """A browser of one's own, with an empty profile; closed and forgotten at the end."""

    def __enter__(self) -> Chromium:
        self.folder = tempfile.mkdtemp(prefix="chromium-")
        command = [executable(), *SWITCHES.split(), f"--user-data-dir={self.folder}", "about:blank"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        told, until = Path(self.folder) / "DevToolsActivePort", time.monotonic() + 30
        while not (told.exists() and len(lines := told.read_text().split()) == 2):
            if time.monotonic() > until or self.process.poll() is not None:
                self.__exit__()
                raise RuntimeError(f"{command[0]} did not start")
            time.sleep(0.05)
        import urllib.request

        self.port = lines[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/json/list", timeout=30) as answer:
            targets = json.load(answer)
        self.page = Page(next(t["webSocketDebuggerUrl"] for t in targets if t["type"] == "page"))
        return self

    def open(self, url: str, width: int = 1200, dark: bool = False) -> Page:
        self.page.size(width)
        self.page.dark(dark)
        return self.page.goto(url)

    def __exit__(self, *_) -> None:
        if hasattr(self, "page"):
            with contextlib.suppress(Exception):
                self.page.tell("Browser.close")
            self.page.socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


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
