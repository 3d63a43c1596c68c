"""The page Draw of the built site, as a visitor uses it, and its pictures against the package's."""

import json
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image

from kleinlite import Klein, cli, picture_info

PIXELS = "e => Array.from(e.getContext('2d').getImageData(0, 0, e.width, e.height).data)"
DRAWN = "document.querySelector('#live-draw output').value.startsWith('Drawn in')"
WORDS = "spans => spans.map(span => span.firstChild.textContent)"  # without their ids
SAYS = "#live-draw output"
BIG = "#live-draw .stage > div > canvas"
LONG = 60_000


@pytest.fixture(scope="module")
def nano() -> Klein:
    return Klein.from_pretrained(keep_loaded=True)


@pytest.fixture
def draw(open_page, home):
    """draw(how="", **settings): the page, and its log."""
    return lambda how="", **settings: open_page(f"{home}/draw.html{how}", **settings)


def picture(page, canvas: str = BIG) -> np.ndarray:
    width, height = page.eval_on_selector(canvas, "e => [e.width, e.height]")
    return np.array(page.eval_on_selector(canvas, PIXELS)).reshape(height, width, 4)[..., :3]


def same(ours, theirs: np.ndarray) -> None:
    apart = np.abs(np.array(ours).astype(int) - theirs)
    assert apart.max() <= 1 and (apart > 0).mean() < 1e-3


def saved(page, tmp_path):
    with page.expect_download() as found:
        page.click("text=Download PNG")
    found.value.save_as(path := tmp_path / found.value.suggested_filename)
    return path


def test_nothing_is_loaded_before_the_first_click_and_then_it_draws(draw, home, nano, tmp_path, capsys):
    """From the first look to a file that the command line draws again."""
    page, log = draw()
    page.wait_for_selector("#live-draw button.chief")
    assert "Nothing has been loaded yet" in page.inner_text(SAYS)
    assert not [url for url in log.requests if "/nano-" in url or url.endswith(".wasm")]
    page.click("button.chief")
    page.wait_for_function(DRAWN, timeout=LONG)
    loaded = [url for url in log.requests if "/nano-" in url]
    assert loaded and not [url for url in loaded if "00002-of" in url or "/base/" in url]
    assert {urlsplit(url).netloc for url in log.requests} == {urlsplit(home).netloc}
    assert page.evaluate("crossOriginIsolated") is False, "nobody may come to need headers that a static host has not"
    steps = list(nano.stream("a red circle above a blue square", seed=7, progress=False))
    same(steps[-1].preview(), picture(page))
    frames = page.locator(".film canvas")
    assert frames.count() == 4
    for i, step in enumerate(steps):
        same(step.preview(), picture(page, f".film li:nth-child({i + 1}) canvas"))
    page.click(".film li:first-child button")
    same(steps[0].preview(), picture(page))
    assert page.get_attribute(BIG, "aria-label") == "Drawn by klein-nano: a red circle above a blue square"
    file = saved(page, tmp_path)
    assert picture_info(file) == picture_info(nano("a red circle above a blue square", seed=7, progress=False))
    same(Image.open(file), np.array(steps[-1].preview()))
    assert cli.main(["generate", "--like", str(file), "-o", str(tmp_path / "again.png")]) == 0
    same(Image.open(file), np.array(Image.open(tmp_path / "again.png")))
    assert log.errors == []


def test_a_second_visit_asks_for_no_weights(draw, chromium):
    page, log = draw("#prompt=a+house&seed=1&size=64x64&steps=1")
    page.click("button.chief")
    page.wait_for_function(DRAWN, timeout=LONG)
    log.requests.clear()
    page.reload()
    page.click("button.chief")
    page.wait_for_function(DRAWN, timeout=LONG)
    assert not [url for url in log.requests if url.endswith(".safetensors")]


def test_an_edit(draw, nano, tmp_path):
    """Draw, then say what to change; the encoder comes only now. The file says that it had a reference."""
    page, log = draw()
    page.click("button.chief")
    page.wait_for_function(DRAWN, timeout=LONG)
    before = Image.fromarray(picture(page).astype(np.uint8))
    page.fill("[name=change]", "make the circle green")
    page.press("[name=change]", "Enter")
    page.wait_for_selector(".gallery button:nth-child(2)", timeout=LONG)
    assert [url for url in log.requests if "vae/" in url and "00002-of" in url]
    same(nano("make the circle green", images=[before], seed=7, progress=False), picture(page))
    assert picture_info(saved(page, tmp_path))["references"] == 1
    assert page.evaluate("location.hash").endswith("change=make+the+circle+green")
    page.click(".gallery button:nth-child(2)")
    assert (picture(page) == np.array(before)).all()
    assert log.errors == []


def test_guidance(draw):
    """nano-base comes when it is drawn with, and shows eight of its steps."""
    page, log = draw()
    page.select_option("[name=model]", "nano-base")
    assert page.input_value("[name=steps]") == "50"
    page.fill("[name=steps]", "9")
    page.fill("[name=guidance]", "3")
    page.click("button.chief")
    page.wait_for_function(DRAWN, timeout=LONG)
    assert page.locator(".film li").count() == 8 and [url for url in log.requests if "/base/" in url]
    ours = Klein.from_pretrained("nano-base")(
        "a red circle above a blue square", seed=7, steps=9, guidance=3, progress=False
    )
    same(ours, picture(page))


def test_a_link_carries_all(draw, nano):
    """Another seed, a large one, size and steps; from the keyboard; on a phone, in the dark."""
    page, log = draw(f"#prompt=a+yellow+star&seed={2**64 - 1}&size=128x96&steps=2", width=390, dark=True)
    assert page.input_value("[name=prompt]") == "a yellow star"
    page.focus("[name=prompt]")
    page.keyboard.press("Enter")
    page.wait_for_function(DRAWN, timeout=LONG)
    same(nano("a yellow star", seed=2**64 - 1, width=128, height=96, steps=2, progress=False), picture(page))
    page.click(".live summary")
    assert f"of {nano.info.tokens} tokens" in page.inner_text(".tokens")
    assert "".join(page.locator(".tokens .mine").evaluate_all(WORDS)) == "a yellow star"
    page.fill("[name=prompt]", "a red sun")
    page.wait_for_function(f"({WORDS})([...document.querySelectorAll('.tokens .mine')]).join('') === 'a red sun'")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert f"seed={2**64 - 1}" in page.evaluate("location.hash")
    assert log.errors == []


def test_stop_and_a_newer_wish(draw):
    page, log = draw("#steps=1000")
    page.click("button.chief")
    page.wait_for_function("document.querySelector('#live-draw output').value.startsWith('Step 2')", timeout=LONG)
    page.click("text=Stop")
    page.wait_for_function("document.querySelector('#live-draw output').value.startsWith('Stopped')", timeout=LONG)
    page.click("button.chief")
    page.wait_for_function("document.querySelector('#live-draw output').value.startsWith('Step')", timeout=LONG)
    page.fill("[name=steps]", "1")
    page.click("text=a yellow star on a blue background")
    page.wait_for_function(DRAWN, timeout=LONG)
    assert page.get_attribute(BIG, "aria-label").endswith("a yellow star on a blue background")
    assert log.errors == []


@pytest.mark.parametrize("field, value, says", [
    ("prompt", "red " * 600, "this model reads"), ("seed", str(2**64), "whole number from 0 to"),
])  # fmt: skip
def test_mistakes_are_answered_and_the_next_click_works(draw, field, value, says):
    page, _ = draw("#steps=1")
    page.fill(f"[name={field}]", value)
    page.click("button.chief")
    page.wait_for_function(
        f"document.querySelector('#live-draw output').value.includes({json.dumps(says)})", timeout=LONG
    )
    page.fill(f"[name={field}]", "1")
    page.click("button.chief")
    page.wait_for_function(DRAWN, timeout=LONG)


def test_a_file_that_is_missing_is_told(draw):
    page, _ = draw("#steps=1")
    page.context.route("**/transformer/*.safetensors", lambda route: route.fulfill(status=404))
    page.click("button.chief")
    page.wait_for_function(
        "document.querySelector('#live-draw output').value.includes('Reload the page')", timeout=LONG
    )
    page.context.unroute_all()
    page.click("button.chief")
    page.wait_for_function(DRAWN, timeout=LONG)


def test_without_webassembly_and_without_motion(draw, nano):
    """Slower, says so, and shows the last picture only."""
    page, log = draw("?wasm=0#prompt=a+boat&seed=2&size=64x64&steps=2")
    page.click("button.chief")
    page.wait_for_function(DRAWN, timeout=LONG)
    assert "without WebAssembly" in page.evaluate("document.querySelector('#live-draw output').value")
    assert page.locator(".film li").count() == 1
    same(nano("a boat", seed=2, width=64, height=64, steps=2, progress=False), picture(page))
    assert log.errors == []


def test_less_motion(draw):
    """Who asked for less of it gets the film when it is over."""
    page, _ = draw()
    page.emulate_media(reduced_motion="reduce")
    page.evaluate("""() => new MutationObserver(() => {
        window.early ||= document.querySelectorAll('.film li').length % 4 > 0;
    }).observe(document.querySelector('.film'), {childList: true})""")
    page.click("button.chief")
    page.wait_for_function(DRAWN, timeout=LONG)
    assert page.locator(".film li").count() == 4 and not page.evaluate("window.early")


def test_without_scripts_and_from_a_file(chromium, site, home):
    page = chromium.new_context(java_script_enabled=False).new_page()
    page.goto(f"{home}/draw.html")
    assert "needs JavaScript" in page.inner_text("#live-draw")
    page.context.close()
    page = chromium.new_context().new_page()
    page.goto((site / "draw.html").as_uri())
    assert "make serve" in page.inner_text("#live-draw")
    page.context.close()
