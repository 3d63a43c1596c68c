"""Chapter 00 as a reader meets it: a real JupyterLab server, a real browser, mouse and keyboard.

Lab is driven through its own commands where it has some: a key pressed before the kernel is connected is lost.
"""

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
from browser import reason_to_skip, watch
from PIL import Image
from waiting import HANGS_MS, stop, wait_until

if reason_to_skip():
    pytest.skip(reason_to_skip(), allow_module_level=True)
from playwright.sync_api import Page, expect

ROOT = Path(__file__).resolve().parents[2]
CHAPTER = "00_idea.ipynb"
READ_ONLY = "mlx_in_ten_cells.ipynb"
READY = """(async () => {
    const app = window.jupyterapp;
    await app.restored;
    window.notebook = [...app.shell.widgets('main')].find(widget => widget.context);
    app.shell.activateById(notebook.id);
    await notebook.context.ready;
    await notebook.sessionContext.ready;
    await notebook.sessionContext.session.kernel.info;
})()"""
PLAYGROUND = """(async () => {  // a long notebook keeps only the cells in sight on the page
    const at = notebook.content.widgets.findIndex(cell => /playground/.test(cell.model.sharedModel.source));
    notebook.content.activeCellIndex = at;
    await notebook.content.scrollToItem(at, 'start');
    await window.jupyterapp.commands.execute('notebook:run-cell');  // it runs alone; nbval runs the whole chapter
})()"""
RAISED = """[...notebook.content.widgets].flatMap(cell => cell.model.outputs?.toJSON() ?? [])
    .filter(output => output.output_type === 'error').map(output => output.evalue)"""
PIXELS = """(async () => {
    const shown = () => document.querySelector('.kleinlite-stage > img');
    let image = shown();
    while (!await image.decode().then(() => true, () => false)) {  // the next picture came in between
        await new Promise(next => setTimeout(next, 50));
        image = shown();
    }
    const canvas = document.createElement('canvas');
    [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
    const context = canvas.getContext('2d');
    context.drawImage(image, 0, 0);
    return [canvas.width, canvas.height, ...context.getImageData(0, 0, canvas.width, canvas.height).data];
})()"""
SAYS = ".kleinlite [role=status]"
PROMPT = "input[placeholder='What should it draw?']"
DRAW, STOP = ".kleinlite button[title='Draw']", ".kleinlite button[title='Stop']"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two notebooks, one to play with and one to read."""
    folder = tmp_path_factory.mktemp("notebooks")
    for name in (CHAPTER, READ_ONLY):
        shutil.copy(ROOT / "notebooks" / name, folder)
    return folder


@pytest.fixture(scope="module")
def lab(tmp_path_factory, folder):
    """The address of a server of our own, with settings of its own."""
    home = tmp_path_factory.mktemp("home")
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
        "--ContentsManager.pre_save_hook=tools.lab.keep_metadata",
    ]  # fmt: skip
    address, log = f"http://127.0.0.1:{port}", home / "log"
    with log.open("w") as out:
        environment = os.environ | {name: str(home / place) for name, place in own.items()}
        server = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
        try:
            wait_until(lambda: answers(server, address, log), "JupyterLab starts")
            yield address
        finally:
            stop(server)  # and its kernels with it


def answers(server: subprocess.Popen, address: str, log: Path) -> bool:
    """Whether the server is up; an error if it has ended."""
    assert server.poll() is None, log.read_text("utf-8")
    try:
        urllib.request.urlopen(f"{address}/api/status").close()
    except (urllib.error.URLError, ConnectionError):
        return False
    return True


@pytest.fixture(scope="module")
def page(lab, chromium):
    """The chapter with its playground in sight, the first cell that anybody runs."""
    page = chromium.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(HANGS_MS)
    page.log = watch(page)
    page.goto(f"{lab}/lab/tree/{CHAPTER}?reset")
    page.wait_for_function("window.jupyterapp && document.querySelector('.jp-Notebook .jp-CodeCell')")
    page.evaluate(READY)
    page.evaluate(PLAYGROUND)
    assert page.evaluate(RAISED) == [], f"the playground of {CHAPTER} raised"
    page.wait_for_selector(".kleinlite-stage > img")
    yield page
    page.close()


@pytest.mark.slow
def test_reading_leaves_the_file_as_it_was(lab, chromium, folder):
    """Opened, and saved as Lab does by itself: not a byte has changed, so `git pull` has nothing to refuse."""
    page = chromium.new_page()
    page.set_default_timeout(HANGS_MS)
    page.goto(f"{lab}/lab/tree/{READ_ONLY}?reset")
    page.wait_for_function("window.jupyterapp && document.querySelector('.jp-Notebook .jp-CodeCell')")
    page.evaluate(READY)
    page.wait_for_function("/ipython/.test(JSON.stringify(notebook.content.model.sharedModel.metadata))")
    page.evaluate("window.jupyterapp.commands.execute('docmanager:save')")
    page.wait_for_function("!notebook.context.model.dirty")
    page.close()
    assert (folder / READ_ONLY).read_bytes() == (ROOT / "notebooks" / READ_ONLY).read_bytes()


def says(page: Page, words: str) -> str:
    """Wait for these words in the line above the picture."""
    expect(page.locator(SAYS)).to_contain_text(words, timeout=HANGS_MS)
    return page.locator(SAYS).inner_text()


def click(page: Page, selector: str) -> None:
    """As a hand does it: what is typed in a field is sent when the mouse goes down, and used when it goes up."""
    page.click(selector, delay=200)


def fill(page: Page, selector: str, text: str) -> None:
    """Type over what stands in a field; again if an older message of the kernel took it away."""
    for _ in range(3):
        click(page, selector)
        page.locator(selector).select_text()
        page.keyboard.type(text)
        page.wait_for_timeout(300)
        if page.locator(selector).input_value() == text:
            return


def field(page: Page, label: str) -> str:
    """A selector for the input with this label."""
    return f"[id='{page.get_by_text(label, exact=True).get_attribute('for')}']"


def test_type_a_prompt_and_draw(page):
    says(page, "a red house under a yellow sun · seed 7")
    before = page.evaluate(PIXELS)
    assert before[:2] == [96, 96]
    fill(page, PROMPT, "a yellow star on a green background")
    click(page, DRAW)
    says(page, "a yellow star on a green background · seed 7")
    after = page.evaluate(PIXELS)
    changed = sum(abs(a - b) > 32 for a, b in zip(before, after)) / len(before)
    assert changed > 0.1, f"only {changed:.0%} of the values changed"
    assert '"a yellow star on a green background", width=96' in page.locator(".kleinlite-code").inner_text()
    expect(page.locator(".kleinlite-gallery img")).to_have_count(2)
    click(page, ".kleinlite-gallery > :nth-child(2) button")  # the first picture, now behind the new one
    says(page, "a red house under a yellow sun")
    assert page.evaluate(PIXELS) == before


@pytest.mark.slow
def test_enter_draws_and_a_wrong_size_is_answered(page):
    width = field(page, "width")
    fill(page, width, "100")
    click(page, PROMPT)
    page.keyboard.press("Enter")
    says(page, "multiple of 16 pixels, 100 is not: try 96.")
    fill(page, width, "96")
    click(page, PROMPT)
    page.keyboard.press("Enter")
    says(page, "a yellow star on a green background · seed 7")


@pytest.mark.slow
def test_a_picture_dropped_beside_the_button_is_a_reference(page, tmp_path):
    file = tmp_path / "sunset.png"
    Image.linear_gradient("L").resize((112, 80)).convert("RGB").save(file)
    page.locator(".kleinlite-drop").drop({"files": file})
    width = page.locator(field(page, "width"))
    expect(width).to_have_value("112", timeout=HANGS_MS)
    click(page, DRAW)
    expect(page.locator(".kleinlite-code")).to_contain_text("sunset.png", timeout=HANGS_MS)
    expect(page.locator(".kleinlite-gallery img")).to_have_count(4, timeout=HANGS_MS)
    assert page.evaluate(PIXELS)[:2] == [112, 80]
    click(page, "button[title='no reference']")
    expect(width).to_have_value("96", timeout=HANGS_MS)


@pytest.mark.slow
def test_stop_ends_a_long_run(page):
    fill(page, field(page, "steps"), "1000")
    click(page, DRAW)
    step = f"Number(/step (\\d+) of 1000/.exec(document.querySelector('{SAYS}').innerText)?.[1])"
    page.wait_for_function(f"{step} > 2")
    early = page.evaluate(PIXELS)
    page.wait_for_function(f"{step} > 20")
    click(page, STOP)
    stopped = says(page, "stopped after")
    steps = int(stopped.split("stopped after ")[1].split(" of 1000")[0])
    assert 20 < steps < 1000
    last = page.evaluate(PIXELS)
    assert last != early  # the preview was alive
    time.sleep(1.5)
    assert page.locator(SAYS).inner_text() == stopped and page.evaluate(PIXELS) == last
    expect(page.locator(STOP)).to_be_disabled()


@pytest.mark.slow
def test_the_still_is_hidden_while_the_panel_lives_and_shown_the_next_day(page):
    """Saved and opened again without a kernel, where Lab cannot show the controls."""
    still = page.locator(".jp-Notebook .jp-OutputArea-child:has(img)").filter(has_not=page.locator(".kleinlite"))
    live = page.locator(".jp-OutputArea-child:has(.kleinlite)")
    before = live.locator("xpath=preceding-sibling::*[1]")
    expect(before).to_be_hidden()
    page.evaluate("async () => { await notebook.context.save(); await notebook.sessionContext.shutdown(); }")
    page.reload()
    page.wait_for_function("window.jupyterapp && document.querySelector('.jp-Notebook .jp-CodeCell')")
    expect(page.locator(".kleinlite")).to_have_count(0)
    expect(still.first).to_be_visible()
    page.screenshot(path=os.environ.get("KLEINLITE_SCREENSHOT", os.devnull), type="png")


@pytest.mark.slow
def test_nothing_leaves_this_machine(page, lab):
    elsewhere = {url for url in page.log.requests if urlsplit(url).netloc not in ("", urlsplit(lab).netloc)}
    assert elsewhere == set()
