"""The page Draw of the built site, as a visitor uses it, and its pictures against the package's."""

import base64
import json
from pathlib import Path
from urllib.parse import urlsplit

import live
import numpy as np
import pytest
from PIL import Image
from site_model import write_site_model
from waiting import HANGS_MS

from kleinlite import Klein, cli, picture_info
from kleinlite.book import mistakes
from kleinlite.position_ids import image_ids

PIXELS = "e => Array.from(e.getContext('2d').getImageData(0, 0, e.width, e.height).data)"
DRAWN = "document.querySelector('#live-draw output').value.startsWith('Drawn in')"
WORDS = "spans => spans.map(span => span.firstChild.textContent)"  # without their ids
SAYS = "#live-draw output"
ROOT = Path(__file__).resolve().parents[2]


def says(text):
    return f"document.querySelector('#live-draw output').value.includes({json.dumps(text)})"


BIG = "#live-draw .layers > canvas:first-child"
LONG = HANGS_MS


@pytest.fixture(scope="module")
def site_model(tmp_path_factory) -> Path:
    """The folder of the model that visitors draw with."""
    return write_site_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def nano(site_model) -> Klein:
    return Klein.from_pretrained(site_model, keep_loaded=True)


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


def alike(ours, theirs: np.ndarray) -> None:
    """With weights of 8 bits and without: nobody sees a difference."""
    apart = np.abs(np.array(ours).astype(int) - theirs)
    assert apart.max() <= 20 and apart.mean() < 0.6


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
    steps = list(nano.stream("a red house under a yellow sun", seed=7, progress=False))
    assert page.locator(".film img").count() == 4  # a stored run, alive at once
    bundled = Klein.from_pretrained()
    for i, step in enumerate(bundled.stream("a red house under a yellow sun", seed=7, progress=False)):
        same(step.preview(), np.array(Image.open(ROOT / f"notebooks/images/draw-{i + 1}.png")))
    page.wait_for_function(f"document.querySelector('{BIG}').getContext('2d').getImageData(48, 48, 1, 1).data[3]")
    alike(steps[-1].preview(), picture(page))
    page.click("button.chief")
    page.wait_for_function(DRAWN, timeout=LONG)
    loaded = [url for url in log.requests if "/nano-" in url]
    assert loaded and not [url for url in loaded if "00002-of" in url or "/base/" in url]
    assert {urlsplit(url).netloc for url in log.requests} == {urlsplit(home).netloc}
    assert page.evaluate("crossOriginIsolated") is False, "nobody may come to need headers that a static host has not"
    same(steps[-1].preview(), picture(page))
    frames = page.locator(".film canvas")
    assert frames.count() == 4
    for i, step in enumerate(steps):
        same(step.preview(), picture(page, f".film li:nth-child({i + 1}) canvas"))
    page.click(".film li:first-child button")
    same(steps[0].preview(), picture(page))
    assert page.get_attribute(BIG, "aria-label") == "Drawn by klein-nano: a red house under a yellow sun"
    file = saved(page, tmp_path)
    assert picture_info(file) == picture_info(bundled("a red house under a yellow sun", seed=7, progress=False))
    same(Image.open(file), np.array(steps[-1].preview()))
    assert cli.main(["generate", "--like", str(file), "-o", str(tmp_path / "again.png")]) == 0
    alike(Image.open(file), np.array(Image.open(tmp_path / "again.png")))
    assert log.errors == []


def test_the_world_of_critters(draw, tmp_path):
    """The switch leads to the same page with another model: its stored run, picture, change, file and link."""
    page, log = draw()
    page.click(".worlds >> text=critters")
    page.wait_for_url("**/draw.html?world=critters")
    assert page.inner_text(".worlds [aria-current]") == "critters"
    prompt = page.input_value("[name=prompt]")
    bundled = Klein.from_pretrained("critters", keep_loaded=True)
    for i, step in enumerate(bundled.stream(prompt, seed=7, progress=False)):
        assert page.get_attribute(f".film li:nth-child({i + 1}) img", "src") == f"images/critters-draw-{i + 1}.png"
        same(step.preview(), np.array(Image.open(ROOT / f"notebooks/images/critters-draw-{i + 1}.png")))
    page.click("button.chief")
    page.wait_for_function(DRAWN, timeout=LONG)
    assert [url for url in log.requests if "/live/critters-" in url]
    assert not [url for url in log.requests if "/nano-" in url]
    klein = Klein.from_pretrained(write_site_model(tmp_path / "model", live.CRITTERS), keep_loaded=True)
    same(before := klein(prompt, seed=7, progress=False), picture(page))
    assert picture_info(saved(page, tmp_path)) == picture_info(step.preview())
    page.click("text=make it frown")
    page.wait_for_selector(".gallery button:nth-child(2)", timeout=LONG)
    same(klein("make it frown", images=[before], seed=7, progress=False), picture(page))
    link = page.evaluate("location.href")
    assert "?world=critters#" in link and "model=critters" in link and link.endswith("change=make+it+frown")
    page.fill("[name=prompt]", "a dragon")
    page.click("button.chief")
    page.wait_for_function(says('critters never learned "dragon"'), timeout=LONG)
    assert log.errors == []


def test_a_card_and_a_film_are_sent(draw, tmp_path):
    """The card has the picture above its sentence; the film plays, as large, and ends with the picture."""
    page, log = draw()
    page.click("button.chief")
    page.wait_for_function(DRAWN, timeout=LONG)
    with page.expect_download() as card:
        page.click("text=Send a card")
    card = Image.open(card.value.path()).convert("RGB")
    assert card.width == 720 and card.height > 760
    small = np.array(card.crop((36, 36, 684, 684)).resize((96, 96), Image.Resampling.BOX)).astype(int)
    assert np.abs(small - picture(page)).mean() < 3
    assert np.ptp(np.array(card.crop((36, 690, 684, card.height)))) > 100, "words"
    with page.expect_download(timeout=LONG) as film:
        page.click("text=Send the film")
    film = film.value
    assert film.suggested_filename.startswith("a-red-house-under-a-yellow-sun-7.")
    told = page.evaluate(
        """async (data) => {
            const video = document.createElement("video");
            video.src = `data:video/webm;base64,${data}`;
            await new Promise((ready, refused) => { video.onloadeddata = ready; video.onerror = refused; });
            video.muted = true;
            await video.play();
            await new Promise((ended) => (video.onended = ended));
            const paper = new OffscreenCanvas(video.videoWidth, video.videoHeight), pen = paper.getContext("2d");
            pen.drawImage(video, 0, 0);
            return [video.videoWidth, video.videoHeight, [...pen.getImageData(36, 36, 648, 648).data]];
        }""",
        base64.b64encode(Path(film.path()).read_bytes()).decode(),
    )
    assert tuple(told[:2]) == card.size
    last = np.array(told[2]).reshape(648, 648, 4)[..., :3]
    assert np.abs(last - np.array(card.crop((36, 36, 684, 684))).astype(int)).mean() < 6
    assert log.errors == []


@pytest.mark.slow
def test_the_model_loads_behind_the_stored_picture(draw):
    """Once somebody touches the form; then the first picture loads nothing more."""
    page, log = draw()
    page.focus("[name=prompt]")
    page.wait_for_function(says("The model is here"), timeout=LONG)
    loaded = [url for url in log.requests if "/nano-" in url]
    assert loaded and page.locator(".film img").count() == 4 and page.locator(".gallery button").count() == 0
    page.click("button.chief")
    page.wait_for_function(DRAWN, timeout=LONG)
    assert [url for url in log.requests if "/nano-" in url] == loaded
    assert log.errors == []


@pytest.mark.slow
def test_a_second_visit_asks_for_no_weights(draw, chromium):
    page, log = draw("#prompt=a+house&seed=1&size=64x64&steps=1")
    page.click("button.chief")
    page.wait_for_function(DRAWN, timeout=LONG)
    log.requests.clear()
    page.reload()
    page.click("button.chief")
    page.wait_for_function(DRAWN, timeout=LONG)
    assert not [url for url in log.requests if url.endswith(".safetensors.gz")]


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


def test_a_change_on_a_fresh_page_draws_first_what_it_changes(draw):
    page, log = draw("#prompt=a+red+circle&seed=3&steps=1&size=64x64")
    page.fill("[name=change]", "make the circle green")
    page.press("[name=change]", "Enter")
    page.wait_for_selector(".gallery button:nth-child(2)", timeout=LONG)
    assert log.errors == []


def test_stop_counts_steps_that_showed_no_picture(draw):
    """Only every hundredth of a thousand steps is decoded."""
    page, log = draw("#steps=1000")
    page.click("button.chief")
    page.wait_for_function(says("Step 3 of"), timeout=LONG)
    page.click("text=Stop")
    page.wait_for_function(says("Stopped after"), timeout=LONG)
    assert log.errors == []


@pytest.mark.parametrize("clipboard", ["undefined", "{ writeText: async () => { throw new Error('refused'); } }"])
def test_without_a_clipboard_the_link_is_in_the_address_bar(draw, clipboard):
    """As over http, or in a frame that may not write."""
    page, log = draw("#prompt=a+boat&seed=2&size=64x64&steps=1")
    page.evaluate(f"Object.defineProperty(navigator, 'clipboard', {{ value: {clipboard} }})")
    page.click("button.chief")
    page.wait_for_function(DRAWN, timeout=LONG)
    page.click("text=Copy link")
    page.wait_for_function(says("stands in the address bar."))
    assert log.errors == []


@pytest.mark.slow
def test_a_suggestion_draws_first_what_it_changes(draw, nano):
    """None of the buttons of a page that was just opened does nothing."""
    page, log = draw("#prompt=a+red+circle+above+a+blue+square&seed=3")
    page.click("text=turn the circle into a star")
    page.wait_for_selector(".gallery button:nth-child(2)", timeout=LONG)
    first = nano("a red circle above a blue square", seed=3, progress=False)
    same(nano("turn the circle into a star", images=[first], seed=3, progress=False), picture(page))
    assert "change=turn+the+circle+into+a+star" in page.evaluate("location.hash")
    page.click(".gallery button:nth-child(2)")
    same(first, picture(page))
    assert log.errors == []


PAINTED = """e => Array.from(e.getContext('2d').getImageData(0, 0, e.width, e.height).data)
    .filter((_, i) => i % 4 === 3).map(alpha => alpha ? 255 : 0)"""
SHEET = "#live-draw .layers > .sheet"


@pytest.mark.slow
def test_a_mask(draw, nano, tmp_path):
    """Paint over the house with the mouse, say what is to be there: as the package does, and all else to the bit."""
    page, log = draw()
    assert page.is_disabled("text=Paint a mask")
    page.click("button.chief")
    page.wait_for_function(DRAWN, timeout=LONG)
    before = Image.fromarray(picture(page).astype(np.uint8))
    page.click("text=Paint a mask")
    page.locator(SHEET).scroll_into_view_if_needed()
    box = page.locator(SHEET).bounding_box()

    def at(x, y):
        return (box["x"] + x / 96 * box["width"], box["y"] + y / 96 * box["height"])

    page.mouse.move(*at(12, 72))
    page.mouse.down()
    for x, y in ((40, 72), (40, 56), (10, 56)):
        page.mouse.move(*at(x, y), steps=8)
    page.mouse.up()
    page.focus("[name=change]")  # the brush's outline is no part of the mask
    levels = np.array(page.eval_on_selector(SHEET, PAINTED), np.uint8).reshape(96, 96)
    assert 0.05 < (levels > 0).mean() < 0.4 and levels[64, 24] == 255 and levels[20, 70] == 0
    page.fill("[name=change]", "make the house blue")
    page.click("text=Change what is painted")
    page.wait_for_selector(".gallery button:nth-child(2)", timeout=LONG)
    mask = Image.fromarray(levels)
    ours = nano("make the house blue", images=[before], mask=mask, seed=7, progress=False)
    same(ours, picture(page))
    assert (picture(page)[levels == 0] == np.array(before)[levels == 0]).all(), "what is not painted stays, to the bit"
    assert (picture(page)[levels > 0] != np.array(before)[levels > 0]).any()
    made = picture_info(ours) | {"model": "nano"}
    del made["pictures"]  # a hash, by which the command line tells an edited list
    assert picture_info(saved(page, tmp_path)) == made
    assert not any(page.eval_on_selector(SHEET, PAINTED)), "a mask that nobody sees would change the next picture"
    assert page.inner_text("form:has([name=change]) button") == "Change"
    page.click("text=Paint a mask")
    page.focus(SHEET)  # and by keyboard
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    page.focus("[name=change]")
    painted = np.array(page.eval_on_selector(SHEET, PAINTED)).reshape(96, 96)
    assert painted[44, 48] == 255 and painted[54, 48] == 0
    assert log.errors == []


@pytest.mark.slow
def test_a_mask_of_everything_is_answered(draw):
    page, _ = draw("#prompt=a+boat&seed=2&size=64x64&steps=1")
    page.click("button.chief")
    page.wait_for_function(DRAWN, timeout=LONG)
    page.click("text=Paint a mask")
    page.focus(SHEET)
    for _ in range(16):
        page.keyboard.press("ArrowUp")
        page.keyboard.press("ArrowLeft")
    for row in range(9):
        for _ in range(16):
            page.keyboard.press("Enter")
            page.keyboard.press("ArrowLeft" if row % 2 else "ArrowRight")
        page.keyboard.press("Enter")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowDown")
    page.click("text=Change what is painted")
    page.wait_for_function(f"document.querySelector('{SAYS}').value.includes('nothing would stay')", timeout=LONG)


@pytest.mark.slow
def test_a_mistake_beside_the_right_picture(draw, nano):
    """A toggle draws once more with a wrong line, which is shown; the next picture is right again."""
    page, log = draw()
    pair, rows = page.locator(".beside").bounding_box(), page.locator("#live-mistakes .chapter >> nth=0").bounding_box()
    assert pair["y"] + pair["height"] <= rows["y"] and pair["height"] > 200, "the pictures have their room above"
    page.click("#live-mistakes >> text=h and w swapped")
    page.wait_for_selector("canvas.wrong", timeout=LONG)
    right = nano("a red house under a yellow sun", seed=7, progress=False)
    with mistakes.line(image_ids, "zero + t, h, w, zero", "zero + t, w, h, zero"):
        same(nano("a red house under a yellow sun", seed=7, progress=False), picture(page, "canvas.wrong"))
    same(right, picture(page))
    assert "- [t, Math.floor(i / gw), i % gw, 0]\n+ [t, i % gw, Math.floor(i / gw), 0]" in page.inner_text(
        "#live-mistakes pre"
    )
    assert "of 255 levels changed on average." in page.inner_text("#live-mistakes")
    assert page.locator("#live-mistakes [aria-pressed=true]").all_inner_texts() == ["h and w swapped"]
    page.evaluate("""() => { window.laid = []; const beside = document.querySelector('.beside');
        new MutationObserver(() => laid.push([beside.querySelectorAll('figcaption')[1].textContent,
            beside.querySelectorAll('canvas.wrong').length])).observe(beside, {childList: true}); }""")
    page.click("#live-mistakes >> text=epsilon 1e-5")
    page.wait_for_function("window.laid.at(-1)?.[1] === 1", timeout=LONG)
    laid = page.evaluate("window.laid")
    assert laid[0] == ["epsilon 1e-5", 0] and laid[-1] == ["epsilon 1e-5", 1], "no old picture under a new title"
    page.click("button.chief")
    page.wait_for_selector(".gallery button:nth-child(2)", timeout=LONG)
    same(right, picture(page))
    assert log.errors == []


@pytest.mark.slow
def test_a_mistake_travels_in_a_link(draw, nano):
    """It is offered, and drawn once the visitor says so; another picture has none beside it."""
    page, _ = draw()
    page.click("#live-mistakes >> text=pairs by halves")
    page.wait_for_selector("canvas.wrong", timeout=LONG)
    link = page.evaluate("location.hash")
    assert link.endswith("&mistake=pairs+by+halves")
    wrong = picture(page, "canvas.wrong")
    page, log = draw(link)
    assert "A stored run of this prompt" in page.inner_text(SAYS)
    assert not [url for url in log.requests if "/nano-" in url] and page.locator("canvas.wrong").count() == 0
    page.click("text=Draw with “pairs by halves”")
    page.wait_for_selector("canvas.wrong", timeout=LONG)
    assert (picture(page, "canvas.wrong") == wrong).all() and page.evaluate("location.hash") == link
    page.click("text=a yellow star on a blue background")
    page.wait_for_function("!location.hash.includes('mistake')", timeout=LONG)
    assert page.locator("canvas.wrong, #live-mistakes [aria-pressed=true]").count() == 0
    assert log.errors == []


@pytest.mark.slow
def test_an_unknown_mistake_of_a_link_is_none(draw):
    page, log = draw("#prompt=a+boat&mistake=%3Cb%3E")
    page.wait_for_selector("#live-mistakes button")
    assert page.locator("text=Draw with").count() == 0 and log.errors == []


@pytest.mark.slow
def test_a_link_opens_on_a_stored_run_and_says_so(draw, nano):
    page, log = draw("#prompt=a+yellow+star&seed=5")
    page.wait_for_function(f"document.querySelector('{BIG}').getContext('2d').getImageData(48, 48, 1, 1).data[3]")
    alike(nano("a red house under a yellow sun", seed=7, progress=False), picture(page))
    told = page.inner_text(SAYS)
    assert "A stored run of “a red house under a yellow sun”" in told and "Draw draws what the link says" in told
    assert page.locator(".film img").count() == 4 and not [url for url in log.requests if "/nano-" in url]
    page.click("button.chief")
    page.wait_for_function(DRAWN, timeout=LONG)
    same(nano("a yellow star", seed=5, progress=False), picture(page))


@pytest.mark.slow
def test_the_link_is_copied(draw, home):
    page, log = draw("#prompt=a+boat&seed=2&size=64x64&steps=1")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=home)
    assert page.is_disabled("text=Copy link")
    page.click("button.chief")
    page.wait_for_function(DRAWN, timeout=LONG)
    page.click("text=Copy link")
    page.wait_for_function(says("The link is in the clipboard"))
    link = page.evaluate("navigator.clipboard.readText()")
    assert link == page.evaluate("location.href") and "#prompt=a+boat&seed=2&size=64x64&steps=1" in link
    assert log.errors == []


@pytest.mark.slow
def test_long_runs_show_rough_pictures_on_the_way(draw):
    """Without WebAssembly decoding is slow: one matrix in its place shows where each step leads."""
    page, log = draw("?wasm=0#prompt=a+red+sun&seed=2&size=64x64&steps=3")
    page.evaluate("""() => { window.seen = new Set(); new MutationObserver(() => setTimeout(() => seen.add(
        document.querySelector('#live-draw .layers > canvas').toDataURL()))).observe(
        document.querySelector('#live-draw output'), {childList: true, subtree: true, characterData: true}); }""")
    page.click("button.chief")
    page.wait_for_function(DRAWN, timeout=LONG)
    page.wait_for_function("window.seen.size >= 3", timeout=LONG)
    assert log.errors == []


@pytest.mark.slow
def test_guidance(draw, site_model):
    """nano-base comes when it is drawn with, and shows eight of its steps."""
    page, log = draw()
    page.select_option("[name=model]", "nano-base")
    assert page.input_value("[name=steps]") == "50"
    page.fill("[name=steps]", "9")
    page.fill("[name=guidance]", "3")
    page.click("button.chief")
    page.wait_for_function(DRAWN, timeout=LONG)
    assert page.locator(".film li").count() == 8 and [url for url in log.requests if "/base/" in url]
    ours = Klein.from_pretrained(site_model / "base")(
        "a red house under a yellow sun", seed=7, steps=9, guidance=3, progress=False
    )
    same(ours, picture(page))


@pytest.mark.slow
def test_one_step_with_an_adapter(draw, home, site_model, nano, tmp_path):
    """It comes when it is drawn with, beside the model that is there; without it the picture is what it was."""
    page, log = draw()
    page.click("button.chief")
    page.wait_for_function(DRAWN, timeout=LONG)
    before, plain = [url for url in log.requests if "/nano-" in url], picture(page)
    assert not [url for url in before if "loras" in url] and not page.is_visible("text=with the adapter")
    page.select_option("[name=model]", "one-look")
    assert page.input_value("[name=steps]") == "1" and page.is_visible("text=with the adapter")
    page.click("button.chief")
    page.wait_for_selector(".gallery button:nth-child(2)", timeout=LONG)
    (more,) = [url for url in log.requests if "/nano-" in url][len(before) :]
    assert more.endswith("/loras/one-look.safetensors.gz") and page.locator(".film li").count() == 1
    prompt = "a red house under a yellow sun"
    quick = Klein.from_pretrained(site_model, loras=[site_model / "loras/one-look.safetensors"])
    same(quick(prompt, seed=7, steps=1, progress=False), picture(page))
    bundled = Klein.from_pretrained("nano", loras=["one-look"])(prompt, seed=7, steps=1, progress=False)
    alike(bundled, picture(page))
    file = saved(page, tmp_path)
    assert picture_info(file) == picture_info(bundled)
    assert cli.main(["generate", "--like", str(file), "-o", str(tmp_path / "again.png")]) == 0
    alike(Image.open(file), np.array(Image.open(tmp_path / "again.png")))
    link = page.evaluate("location.hash")
    page.select_option("[name=model]", "nano")
    assert page.input_value("[name=steps]") == "4" and not page.is_visible("text=with the adapter")
    page.click("button.chief")
    page.wait_for_selector(".gallery button:nth-child(3)", timeout=LONG)
    assert (picture(page) == plain).all() and "lora" not in page.evaluate("location.hash")
    page.fill("[name=steps]", "1")
    page.click("button.chief")
    page.wait_for_selector(".gallery button:nth-child(4)", timeout=LONG)
    same(nano(prompt, seed=7, steps=1, progress=False), picture(page))
    assert log.errors == []
    page, log = draw(link, width=390)
    assert page.input_value("[name=model]") == "one-look" and page.input_value("[name=steps]") == "1"
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.click("text=chapter 12")
    page.wait_for_url(f"{home}/12_fewer_steps.html#*")
    assert page.locator(f"[id='{page.evaluate('location.hash.slice(1)')}']").inner_text() == "One step, for nano"
    assert not [url for url in log.requests if "/nano-" in url]


@pytest.mark.slow
def test_an_adapter_that_is_missing_is_told(draw, nano):
    """And without it nano draws as ever."""
    page, _ = draw("#prompt=a+boat&seed=2&lora=one-look&steps=1")
    page.context.route("**/loras/*", lambda route: route.fulfill(status=404))
    page.click("button.chief")
    page.wait_for_function(says("could not be loaded (loras/one-look.safetensors.gz: 404)"), timeout=LONG)
    page.select_option("[name=model]", "nano")
    page.fill("[name=steps]", "1")
    page.click("button.chief")
    page.wait_for_function(DRAWN, timeout=LONG)
    same(nano("a boat", seed=2, steps=1, progress=False), picture(page))
    page.context.unroute_all()
    page.select_option("[name=model]", "one-look")
    page.click("button.chief")
    page.wait_for_selector(".gallery button:nth-child(2)", timeout=LONG)
    alike(Klein.from_pretrained("nano", loras=["one-look"])("a boat", seed=2, steps=1, progress=False), picture(page))


def test_a_link_carries_all(draw, nano):
    """Another seed, a large one, size and steps; from the keyboard; on a phone, in the dark."""
    page, log = draw(f"#prompt=a+yellow+star&seed={2**64 - 1}&size=128x96&steps=2", width=390, dark=True)
    assert page.input_value("[name=prompt]") == "a yellow star"
    page.focus("[name=prompt]")
    page.keyboard.press("Enter")
    page.wait_for_function(DRAWN, timeout=LONG)
    same(nano("a yellow star", seed=2**64 - 1, width=128, height=96, steps=2, progress=False), picture(page))
    page.click(".live summary")
    assert f"of {nano.info.max_length} tokens" in page.inner_text(".tokens")
    assert "".join(page.locator(".tokens .mine").evaluate_all(WORDS)) == "a yellow star"
    page.fill("[name=prompt]", "a red sun")
    page.wait_for_function(f"({WORDS})([...document.querySelectorAll('.tokens .mine')]).join('') === 'a red sun'")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert f"seed={2**64 - 1}" in page.evaluate("location.hash")
    assert log.errors == []


def test_it_says_what_nano_never_learned(draw):
    page, _ = draw("#prompt=a+cat&seed=1&size=64x64&steps=1")
    sizes = page.eval_on_selector_all("[name=size] option", "options => options.map(option => option.text)")
    assert sizes[0] == "96 × 96" and all(size.endswith(" (not trained)") for size in sizes[1:])
    page.click("button.chief")
    page.wait_for_function(DRAWN, timeout=LONG)
    assert 'nano never learned "cat", another size than 96×96: it draws circles' in page.inner_text(SAYS)


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


@pytest.mark.slow
def test_a_file_that_is_missing_is_told(draw):
    page, _ = draw("#steps=1")
    page.context.route("**/transformer/*.safetensors.gz", lambda route: route.fulfill(status=404))
    page.click("button.chief")
    page.wait_for_function(
        "document.querySelector('#live-draw output').value.includes('could not be loaded')", timeout=LONG
    )
    page.context.unroute_all()
    page.click("button.chief")
    page.wait_for_function(DRAWN, timeout=LONG)


FAULTS = {
    "a page of a proxy": lambda body: b"<!DOCTYPE html><p>Blocked.</p>",
    "half of it": lambda body: body[: len(body) // 2],
    "one damaged byte": lambda body: body[:-9] + bytes([body[-9] ^ 64]) + body[-8:],
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("file", ["**/transformer/*00001*.safetensors.gz", "**/tokenizer.json"])
def test_a_wrong_answer_is_told_and_not_kept(draw, nano, file, fault):
    """The next click draws the right picture: nothing wrong went into the browser's store."""
    page, _ = draw("#prompt=a+boat&seed=2&steps=1")

    def spoil(route):
        body = route.fetch().body()
        route.fulfill(status=200, body=FAULTS[fault](body))

    page.context.route(file, spoil)
    page.click("button.chief")
    page.wait_for_function(
        "document.querySelector('#live-draw output').value.includes('could not be loaded')", timeout=LONG
    )
    page.context.unroute_all()
    page.click("button.chief")
    page.wait_for_function(DRAWN, timeout=LONG)
    same(nano("a boat", seed=2, steps=1, progress=False), picture(page))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["a page of a proxy", "half of it"])
@pytest.mark.parametrize("file", ["**/fast_preview/nano.bin", "**/gemm.wasm"])
def test_what_only_makes_it_faster_may_be_damaged(draw, nano, file, fault):
    """The matrix of the fast preview and the compiled product: without them it draws as well."""
    page, log = draw("#prompt=a+boat&seed=2&steps=1&size=64x64")

    def spoil(route):
        route.fulfill(status=200, body=FAULTS[fault](route.fetch().body()))

    page.context.route(file, spoil)
    page.click("button.chief")
    page.wait_for_function(DRAWN, timeout=LONG)
    same(nano("a boat", seed=2, width=64, height=64, steps=1, progress=False), picture(page))
    assert log.errors == []


@pytest.mark.slow
def test_slow_weights_are_told_and_can_be_stopped(draw):
    """Nothing comes any more: the page says so, Stop gives up, and the next click begins again."""
    page, _ = draw("?patience=0.5#prompt=a+boat&seed=2&size=64x64&steps=1")
    held = []
    page.context.route("**/transformer/*.safetensors.gz", lambda route: held.append(route))
    page.click("button.chief")
    page.wait_for_function(says("The connection is slow"), timeout=LONG)
    assert held and page.is_enabled("text=Stop")
    page.click("text=Stop")
    page.wait_for_function(says("Loading was stopped"), timeout=LONG)
    assert page.is_disabled("text=Stop")
    page.context.unroute_all()
    page.click("button.chief")
    page.wait_for_function(DRAWN, timeout=LONG)


@pytest.mark.slow
@pytest.mark.parametrize("link, answer", [
    ("steps=1000000000", "from 1 to 1000"), ("seed=abc", "whole number from 0 to"),
    ("model=nano-base&steps=1&guidance=1e300", "Guidance is a number"),
    ("model=nano-base&steps=1&guidance=x", "Guidance is a number"),
])  # fmt: skip
def test_numbers_of_a_link_are_checked(draw, link, answer):
    page, log = draw(f"#{link}")
    page.click("text=a yellow star on a blue background")
    page.wait_for_function(says(answer), timeout=LONG)
    page.click("text=make it night")
    page.wait_for_function(f"!{says('Loading')} && {says(answer)}", timeout=LONG)
    assert log.errors == []


@pytest.mark.slow
def test_without_the_compiled_product_plain_javascript_draws(draw, nano):
    page, _ = draw("#prompt=a+boat&seed=2&steps=1&size=64x64")
    page.context.route("**/gemm.wasm", lambda route: route.abort())
    page.click("button.chief")
    page.wait_for_function(DRAWN, timeout=LONG)
    same(nano("a boat", seed=2, width=64, height=64, steps=1, progress=False), picture(page))


@pytest.mark.slow
def test_without_webassembly_and_without_motion(draw, nano):
    """Slower, says so, and shows the last picture only."""
    page, log = draw("?wasm=0#prompt=a+boat&seed=2&size=64x64&steps=2")
    page.click("button.chief")
    page.wait_for_function(DRAWN, timeout=LONG)
    assert "without WebAssembly" in page.evaluate("document.querySelector('#live-draw output').value")
    assert page.locator(".film li").count() == 1
    same(nano("a boat", seed=2, width=64, height=64, steps=2, progress=False), picture(page))
    assert log.errors == []


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("field, value", [("prompt", "a boat"), ("seed", "5"), ("steps", "2")])
def test_enter_in_a_field_draws(draw, field, value):
    """Also where the settings stand, beside the picture."""
    page, log = draw("#prompt=a+sun&seed=2&size=64x64&steps=1")
    page.fill(f"[name={field}]", value)
    page.press(f"[name={field}]", "Enter")
    page.wait_for_selector(".gallery button", timeout=LONG)
    assert f"{field}={value.replace(' ', '+')}" in page.evaluate("location.hash") and log.errors == []


def test_on_a_phone_the_picture_comes_first(chromium, home):
    """It stands above settings and suggestions, and is seen whole after Draw without scrolling."""
    page = chromium.new_context(viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True).new_page()
    page.goto(f"{home}/draw.html")
    page.tap("button.chief")
    page.wait_for_function(DRAWN, timeout=LONG)
    box = page.locator(BIG).bounding_box()
    assert box["y"] > 0 and box["y"] + box["height"] < 844 and page.evaluate("scrollY") == 0
    for later in ("[name=seed]", "[name=model]", "text=a yellow star on a blue background", "[name=change]"):
        assert page.locator(later).bounding_box()["y"] > box["y"] + box["height"]
    page.locator("[name=change]").scroll_into_view_if_needed()
    page.evaluate("scrollTo(0, scrollY + 200)")
    page.tap("text=Paint a mask")
    assert page.locator("text=Paint over what may change").bounding_box()["y"] > 40, "below the menu, and on the screen"
    page.context.close()


@pytest.mark.slow
def test_without_scripts_and_from_a_file(chromium, site, home):
    page = chromium.new_context(java_script_enabled=False).new_page()
    for name, place in (("draw", "live-draw"), ("inside", "live-inside"), ("home", "live-draw-compact")):
        page.goto(f"{home}/{name}.html")
        assert "needs JavaScript" in page.inner_text(f"#{place}")
        shown = page.locator(f"#{place} img").evaluate_all("pictures => pictures.map(e => e.naturalWidth)")
        assert shown == [96] * 4 and page.locator(f"#{place}").bounding_box()["height"] < 250, "pictures, and no hole"
    page.context.close()
    page = chromium.new_context().new_page()
    page.goto((site / "draw.html").as_uri())
    assert "make serve" in page.inner_text("#live-draw")
    page.context.close()
