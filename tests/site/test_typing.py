"""Draw as you type: what is drawn while somebody types, what is dropped, and where nothing comes unasked."""

import base64
import io

import live
import numpy as np
import pytest
from browser import watch
from PIL import Image
from site_model import write_site_model
from test_draw_page import BIG, DRAWN, LONG, nano, picture, same, says, site_model  # noqa: F401, two are fixtures
from tiers import slow

from kleinlite import Klein

SENTENCE = "a red circle above a blue square"
RECORD = f"""() => {{ window.drawn = []; const canvas = document.querySelector('{BIG}');
    new MutationObserver(() => drawn.push([canvas.ariaLabel.replace('Drawn by klein-nano: ', ''), canvas.toDataURL()]))
        .observe(canvas, {{attributes: true, attributeFilter: ['aria-label']}}); }}"""
SWITCH = "[name=typed]"
PROMPT = "[name=prompt]"


def record(page) -> None:
    """From here on every picture that is shown is kept, with its sentence."""
    page.wait_for_selector("button.chief")
    page.evaluate(RECORD)


def drawn(page) -> list[tuple[str, np.ndarray]]:
    """The sentences that were drawn, in that order, and their pictures."""
    found = page.evaluate("window.drawn")
    return [(text, np.array(Image.open(io.BytesIO(base64.b64decode(url.split(",")[1]))).convert("RGB")))
            for text, url in found]  # fmt: skip


def type_words(page, text: str) -> None:
    page.locator(PROMPT).press_sequentially(text, delay=30)


def wait_for(page, sentence: str) -> None:
    page.wait_for_function("text => window.drawn.some(([its]) => its === text)", arg=sentence, timeout=LONG)


def model_files(log) -> list[str]:
    return [url for url in log.requests if "/live/nano-" in url or "/live/critters-" in url]


@pytest.fixture
def draw(open_page, home):
    return lambda how="", **settings: open_page(f"{home}/draw.html{how}", **settings)


def test_the_picture_follows_the_sentence(draw, nano, site_model):  # noqa: F811
    """Word by word in one step, in the end in four: the same picture that Draw draws. Only Draw keeps it in the row."""
    page, log = draw()
    record(page)
    page.fill(PROMPT, "")
    assert page.is_checked(SWITCH) and page.locator(".film img").count() == 4
    for words in ("a red ", "circle ", "above "):
        type_words(page, words)
        wait_for(page, page.input_value(PROMPT).strip())
    type_words(page, "a blue square")
    page.wait_for_function(DRAWN, timeout=LONG)
    seen = drawn(page)
    lengths = [len(text) for text, _ in seen]
    assert lengths == sorted(lengths) and all(SENTENCE.startswith(text) for text, _ in seen), (
        "never back to an older one"
    )
    assert len({shown.tobytes() for _, shown in seen}) >= 4
    quick = Klein.from_pretrained(site_model, loras=[site_model / "loras/one-look.safetensors"])
    first = next(shown for text, shown in seen if text == "a red circle")
    same(quick("a red circle", seed=7, steps=1, progress=False), first)
    steps = list(nano.stream(SENTENCE, seed=7, progress=False))
    same(steps[-1].preview(), picture(page))
    assert page.locator(".film canvas").count() == 4
    same(steps[0].preview(), picture(page, ".film li:nth-child(1) canvas"))
    assert page.locator(".gallery button").count() == 0, "nobody asked for these pictures"
    assert page.evaluate("location.hash").startswith("#prompt=a+red+circle+above+a+blue+square&seed=7")
    assert page.evaluate(f"document.activeElement.matches('{PROMPT}')")
    loaded = model_files(log)
    page.press(PROMPT, "Enter")
    page.wait_for_selector(".gallery button", timeout=LONG)
    same(steps[-1].preview(), picture(page))
    assert model_files(log) == loaded and log.errors == []


@pytest.mark.slow
def test_a_long_run_of_an_older_sentence_is_dropped(draw, nano):  # noqa: F811
    page, log = draw("#steps=1000")
    record(page)
    page.fill(PROMPT, "a red circle")
    wait_for(page, "a red circle")
    page.wait_for_selector("#live-draw[aria-busy=true]")  # at work on its thousand steps
    page.fill("[name=steps]", "4")
    page.focus(PROMPT)
    page.keyboard.press("End")
    type_words(page, " above a blue square")
    page.wait_for_function(f"{DRAWN} && location.hash.includes('square')", timeout=LONG)
    same(nano(SENTENCE, seed=7, progress=False), picture(page))
    page.click("button.chief")  # whatever still came would come before this picture
    page.wait_for_selector(".gallery button", timeout=LONG)
    lengths = [len(text) for text, _ in drawn(page)]
    assert lengths == sorted(lengths) and lengths[-1] == len(SENTENCE)
    assert log.errors == []


@pytest.mark.slow
def test_while_the_model_loads_only_the_newest_sentence_waits(draw):
    page, log = draw()
    record(page)
    held = []
    page.context.route("**/transformer/*.safetensors.gz", lambda route: held.append(route))
    page.fill(PROMPT, "")
    with page.expect_request("**/transformer/*.safetensors.gz"):
        type_words(page, "a red circle above ")
    type_words(page, "a blue square")
    assert drawn(page) == [] and page.input_value(PROMPT) == SENTENCE, "loading does not block the keyboard"
    (route,) = held
    route.continue_()
    page.wait_for_function(DRAWN, timeout=LONG)
    assert {text for text, _ in drawn(page)} == {SENTENCE} and log.errors == []


@pytest.mark.slow
def test_the_switch_turns_it_off(draw, nano):  # noqa: F811
    page, log = draw()
    record(page)
    page.uncheck(SWITCH)
    page.fill(PROMPT, "")
    type_words(page, "a yellow star on a blue background")
    page.click("button.chief")
    page.wait_for_function(DRAWN, timeout=LONG)
    assert [text for text, _ in drawn(page)] == ["a yellow star on a blue background"]
    assert not [url for url in log.requests if "loras" in url]
    page.fill(PROMPT, "a red heart")
    page.click("text=What the model reads")
    page.wait_for_function("document.querySelector('.tokens').textContent.includes('heart')", timeout=LONG)
    page.check(SWITCH)
    page.focus(PROMPT)
    page.keyboard.press("End")
    type_words(page, " above a blue square")
    page.wait_for_function(f"{DRAWN} && location.hash.includes('heart')", timeout=LONG)
    same(nano("a red heart above a blue square", seed=7, progress=False), picture(page))
    assert page.locator(".gallery button").count() == 1 and log.errors == []


@pytest.mark.parametrize("visitor", ["less motion", *slow("a phone", "saved data")])
def test_nothing_comes_unasked(chromium, home, visitor):
    """Who wants less motion, has a phone, or saves data: nothing is loaded and nothing is drawn until Draw."""
    settings = {
        "less motion": {"reduced_motion": "reduce"},
        "a phone": {"is_mobile": True, "has_touch": True, "viewport": {"width": 390, "height": 844}},
        "saved data": {},
    }[visitor]
    page = chromium.new_context(**settings).new_page()
    if visitor == "saved data":
        page.add_init_script("Object.defineProperty(navigator, 'connection', {value: {saveData: true}})")
    log = watch(page)
    page.goto(f"{home}/draw.html")
    record(page)
    assert not page.is_checked(SWITCH)
    page.fill(PROMPT, "")
    type_words(page, "a yellow star on a blue background")
    assert model_files(log) == []
    page.click("button.chief")
    page.wait_for_function(DRAWN, timeout=LONG)
    assert [text for text, _ in drawn(page)] == ["a yellow star on a blue background"]
    if visitor != "less motion":  # and who wants it after all, gets it
        page.check(SWITCH)
        page.focus(PROMPT)
        page.keyboard.press("End")
        type_words(page, " at night")
        wait_for(page, "a yellow star on a blue background at night")
    assert log.errors == []
    page.context.close()


@pytest.mark.slow
def test_what_cannot_be_drawn_is_told_and_the_next_word_works(draw):
    page, _ = draw()
    record(page)
    page.fill(PROMPT, "red " * 600)
    page.wait_for_function(says("this model reads"), timeout=LONG)
    page.fill(PROMPT, "a red heart")
    page.wait_for_function(DRAWN, timeout=LONG)
    page.fill("[name=seed]", "seven")
    page.fill(PROMPT, "a red star")
    page.wait_for_function(says("whole number from 0 to"), timeout=LONG)
    page.fill("[name=seed]", "8")
    page.fill(PROMPT, "a red star above a blue square")
    page.wait_for_function(DRAWN, timeout=LONG)
    assert "seed=8" in page.evaluate("location.hash")


@pytest.mark.slow
def test_a_typed_picture_can_be_changed_and_stays_in_the_row(draw, nano):  # noqa: F811
    page, _ = draw()
    record(page)
    page.fill(PROMPT, SENTENCE)
    page.wait_for_function(DRAWN, timeout=LONG)
    page.fill("[name=change]", "make the circle green")
    page.press("[name=change]", "Enter")
    page.wait_for_selector(".gallery button:nth-child(2)", timeout=LONG)
    first = nano(SENTENCE, seed=7, progress=False)
    same(nano("make the circle green", images=[first], seed=7, progress=False), picture(page))
    page.click(".gallery button:nth-child(2)")
    same(first, picture(page))


@pytest.mark.slow
def test_the_model_with_guidance_is_too_slow_for_it(draw):
    page, _ = draw()
    page.select_option("[name=model]", "nano-base")
    assert page.is_disabled(SWITCH)
    page.select_option("[name=model]", "nano")
    assert page.is_enabled(SWITCH)


@pytest.mark.slow
def test_with_one_look_chosen_one_step_is_all(draw, site_model):  # noqa: F811
    page, _ = draw()
    record(page)
    page.select_option("[name=model]", "one-look")
    page.fill(PROMPT, "a red heart")
    page.wait_for_function(DRAWN, timeout=LONG)
    assert [text for text, _ in drawn(page)] == ["a red heart"]
    quick = Klein.from_pretrained(site_model, loras=[site_model / "loras/one-look.safetensors"])
    same(quick("a red heart", seed=7, steps=1, progress=False), picture(page))


def test_home_follows_too(open_page, home, tmp_path):
    """The same above the fold of the first page, with a critter: a stored run, nothing loaded, and what is typed."""
    page, log = open_page(f"{home}/index.html", width=1280)
    page.set_viewport_size({"width": 1280, "height": 800})
    big = BIG.replace("#live-draw", "#live-draw-compact")
    page.wait_for_function(f"document.querySelector('{big}').getContext('2d').getImageData(48, 48, 1, 1).data[3]")
    box = page.locator(big).bounding_box()
    assert box["y"] > 0 and box["y"] + box["height"] < 800
    assert page.locator(".film img").count() == 4 and model_files(log) == []
    assert page.locator(".live select, .live [name=seed]").count() == 0
    assert page.inner_text(".worlds [aria-current]") == "critters"
    page.fill(PROMPT, "")
    type_words(page, "a happy green ")
    page.wait_for_function("document.querySelector('.live output').value.startsWith('Two steps so far')", timeout=LONG)
    type_words(page, "monster with one eye")
    page.wait_for_function("document.querySelector('.live output').value.startsWith('Drawn in')", timeout=LONG)
    critters = Klein.from_pretrained(write_site_model(tmp_path, live.CRITTERS))
    same(critters("a happy green monster with one eye", seed=7, progress=False), picture(page, big))
    assert page.evaluate("location.hash") == "" and log.errors == []
    assert not [url for url in log.requests if "/nano-" in url]
