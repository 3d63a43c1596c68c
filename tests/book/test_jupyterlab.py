"""Chapter 00 as a reader meets it: a real JupyterLab server, a real browser, mouse and keyboard.

Lab is driven through its own commands where it has some: a key pressed before the kernel is connected is lost.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from browser import Chromium, reason_to_skip
from PIL import Image

if reason_to_skip():
    pytest.skip(reason_to_skip(), allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
CHAPTER = "00_overview.ipynb"
READY = """(async () => {
    const app = window.jupyterapp;
    await app.restored;
    window.notebook = [...app.shell.widgets('main')].find(widget => widget.context);
    app.shell.activateById(notebook.id);
    await notebook.context.ready;
    await notebook.sessionContext.ready;
    await notebook.sessionContext.session.kernel.info;
    await app.commands.execute('notebook:run-all-cells');
    window.finished = true;
})()"""
PLAYGROUND = """(async () => {  // a long notebook keeps only the cells in sight on the page
    const at = notebook.content.widgets.findIndex(cell => /playground/.test(cell.model.sharedModel.source));
    notebook.content.activeCellIndex = at;
    await notebook.content.scrollToItem(at, 'start');
})()"""
RAISED = """[...notebook.content.widgets].flatMap(cell => cell.model.outputs?.toJSON() ?? [])
    .filter(output => output.output_type === 'error').map(output => output.evalue)"""
PIXELS = """(async () => {
    const image = document.querySelector('.kleinlite-stage > img');
    await image.decode();
    const canvas = document.createElement('canvas');
    [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
    const context = canvas.getContext('2d');
    context.drawImage(image, 0, 0);
    return [canvas.width, canvas.height, ...context.getImageData(0, 0, canvas.width, canvas.height).data];
})()"""
SAYS = "document.querySelector('.kleinlite [role=status]').innerText"
PROMPT = "input[placeholder='What shall be drawn?']"
QUERY = f"document.querySelector({json.dumps(PROMPT)})"
DRAW, STOP = ".kleinlite button[title='Draw']", ".kleinlite button[title='Stop']"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The address of a server of our own, with settings of its own."""
    home, folder = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("notebooks")
    shutil.copy(ROOT / "notebooks" / CHAPTER, folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    news = home / "lab" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    news.parent.mkdir(parents=True)
    news.write_text('{"fetchNews": "false"}', "utf-8")  # or Lab asks about it in a corner
    own = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "IPYTHONDIR": "ipython"}
    own |= {"JUPYTER_RUNTIME_DIR": "run", "JUPYTERLAB_SETTINGS_DIR": "lab", "JUPYTERLAB_WORKSPACES_DIR": "spaces"}
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}",
        f"--ServerApp.root_dir={folder}", "--IdentityProvider.token=", "--ServerApp.password=", "--LabApp.news_url=",
        "--LabApp.expose_app_in_browser=True", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]  # fmt: skip
    address, log = f"http://127.0.0.1:{port}", home / "log"
    with log.open("w") as out:
        environment = os.environ | {name: str(home / place) for name, place in own.items()}
        server = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
        try:
            for _ in range(240):
                try:
                    urllib.request.urlopen(f"{address}/api/status", timeout=5).close()
                    break
                except (urllib.error.URLError, ConnectionError, TimeoutError):
                    assert server.poll() is None, log.read_text("utf-8")
                    time.sleep(0.5)
            yield address
        finally:
            server.terminate()  # and its kernels with it
            server.wait(30)


@pytest.fixture(scope="module")
def page(lab):
    with Chromium() as browser:
        page = browser.open(f"{lab}/lab/tree/{CHAPTER}?reset", width=1280)
        page.wait("window.jupyterapp && document.querySelector('.jp-Notebook .jp-CodeCell')", 120)
        page.run(f"{READY} && null")
        page.wait("window.finished", 240)
        assert page.run(RAISED) == [], f"cells of {CHAPTER} raised"
        page.run(PLAYGROUND)
        page.wait("document.querySelector('.kleinlite-stage > img')", 60)
        yield page


def says(page, words: str) -> str:
    """Wait for these words in the line above the picture."""
    try:
        page.wait(f"{SAYS}.includes({json.dumps(words)})", 180)
    except TimeoutError:
        pytest.fail(f"it says {page.run(SAYS)!r}, not {words!r}; the prompt is {page.run(f'{QUERY}.value')!r}")
    return page.run(SAYS)


def middle(page, selector: str) -> dict:
    """Where on the screen something is, as soon as it does not move any more."""
    box, last = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()", None
    while (now := page.run(box)) != last:
        last = now
        time.sleep(0.2)
    return {"x": now["x"] + now["width"] / 2, "y": now["y"] + now["height"] / 2}


def click(page, selector: str) -> None:
    """As a hand does it: what is typed in a field is sent when the mouse goes down, and used when it goes up."""
    at = {**middle(page, selector), "button": "left", "clickCount": 1}
    page.tell("Input.dispatchMouseEvent", type="mousePressed", **at)
    time.sleep(0.2)
    page.tell("Input.dispatchMouseEvent", type="mouseReleased", **at)


def fill(page, selector: str, text: str) -> None:
    click(page, selector)
    page.run(f"document.querySelector({json.dumps(selector)}).select()")
    page.type(text)


def enter(page) -> None:
    key = {"key": "Enter", "windowsVirtualKeyCode": 13}
    page.tell("Input.dispatchKeyEvent", type="keyDown", text="\r", **key)
    page.tell("Input.dispatchKeyEvent", type="keyUp", **key)


def field(page, label: str) -> str:
    """A selector for the input with this label."""
    script = "[...document.querySelectorAll('.kleinlite label')].find(l => l.innerText === {0}).htmlFor"
    return f"[id='{page.run(script.format(json.dumps(label)))}']"


def test_type_a_prompt_and_draw(page):
    says(page, "a red circle above a blue square · seed 7")
    before = page.run(PIXELS)
    assert before[:2] == [96, 96]
    fill(page, PROMPT, "a yellow star on a green background")
    click(page, DRAW)
    says(page, "a yellow star on a green background · seed 7")
    after = page.run(PIXELS)
    changed = sum(abs(a - b) > 32 for a, b in zip(before, after)) / len(before)
    assert changed > 0.1, f"only {changed:.0%} of the values changed"
    code = page.run("document.querySelector('.kleinlite-call').innerText")
    assert '"a yellow star on a green background", width=96' in code
    page.wait("document.querySelectorAll('.kleinlite-gallery img').length === 2")
    click(page, ".kleinlite-gallery > :nth-child(2) button")  # the first picture, now behind the new one
    says(page, "a red circle above a blue square")
    assert page.run(PIXELS) == before


def test_enter_draws_and_a_wrong_size_is_answered(page):
    width = field(page, "width")
    fill(page, width, "100")
    click(page, PROMPT)
    enter(page)
    says(page, "multiple of 16 pixels, 100 is not: try 96.")
    fill(page, width, "96")
    click(page, PROMPT)
    enter(page)
    says(page, "a yellow star on a green background · seed 7")


def test_a_picture_dropped_beside_the_button_is_a_reference(page, tmp_path):
    file = tmp_path / "sunset.png"
    Image.linear_gradient("L").resize((112, 80)).convert("RGB").save(file)
    dropped = {"items": [], "files": [str(file)], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        page.tell("Input.dispatchDragEvent", type=kind, data=dropped, **middle(page, ".kleinlite-drop"))
    page.wait("document.querySelector('.widget-upload').innerText.includes('(1)')", 60)
    page.wait(f"document.querySelector({json.dumps(field(page, 'width'))}).value === '112'", 60)
    click(page, DRAW)
    page.wait("document.querySelector('.kleinlite-call').innerText.includes('sunset.png')", 60)
    page.wait("document.querySelectorAll('.kleinlite-gallery img').length === 4", 120)
    assert page.run(PIXELS)[:2] == [112, 80]
    click(page, "button[title='no reference']")
    page.wait(f"document.querySelector({json.dumps(field(page, 'width'))}).value === '96'", 60)


def test_stop_ends_a_long_run(page):
    fill(page, field(page, "steps"), "1000")
    click(page, DRAW)
    step = f"Number(/step (\\d+) of 1000/.exec({SAYS})?.[1])"
    page.wait(f"{step} > 2", 120)
    early = page.run(PIXELS)
    page.wait(f"{step} > 20", 120)
    click(page, STOP)
    stopped = says(page, "stopped after")
    steps = int(stopped.split("stopped after ")[1].split(" of 1000")[0])
    assert 20 < steps < 1000
    last = page.run(PIXELS)
    assert last != early  # the preview was alive
    time.sleep(1.5)
    assert page.run(SAYS) == stopped and page.run(PIXELS) == last
    assert page.run(f"document.querySelector({json.dumps(STOP)}).disabled")
    assert "islice(klein.stream(" in page.run("document.querySelector('.kleinlite-call').innerText")


def test_nothing_leaves_this_machine(page, lab):
    elsewhere = {url for url in page.requests if urlsplit(url).netloc not in ("", urlsplit(lab).netloc)}
    assert elsewhere == set()
