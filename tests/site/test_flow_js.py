"""flow.js, microflow in JavaScript, against microflow's numbers; and the tab on which a visitor trains it."""

import base64
import re

import live
import mlx.core as mx
import numpy as np
import pytest
from test_draw_page import LONG
from test_klein_js import floats

import microflow
from kleinlite.book import world
from tools.chromium import serving

PACK = """const base64 = (values) => {
        const bytes = new Uint8Array(values.buffer, values.byteOffset, values.byteLength), parts = [];
        for (let i = 0; i < bytes.length; i += 8192) parts.push(String.fromCharCode(...bytes.subarray(i, i + 8192)));
        return btoa(parts.join(""));
    }, numbers = (text) => new Float32Array(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);"""
STEP = """async ([url, kernel, weights, clean, labels, noise, times]) => {
    const { Flow } = await import(url);
    PACK
    const flow = new Flow(kernel ? await (await fetch(kernel)).arrayBuffer() : null);
    for (const [name, values] of Object.entries(weights)) flow.M.set(numbers(values), flow.weights[name].x);
    const loss = flow.loss(numbers(clean), labels, numbers(noise), times), gradients = {}, after = {};
    for (const [name, { g, n }] of Object.entries(flow.weights)) gradients[name] = base64(flow.M.subarray(g, g + n));
    const walked = [...flow.walk(numbers(noise), labels)].at(-1);
    flow.update(0.002);
    for (const [name, { x, n }] of Object.entries(flow.weights)) after[name] = base64(flow.M.subarray(x, x + n));
    return { loss, gradients, walked: base64(walked), after, wasm: flow.wasm };
}""".replace("PACK", PACK)


def packed(values: np.ndarray) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


@pytest.mark.parametrize("kernel", ["gemm.wasm", None])
def test_loss_gradients_and_walk_are_those_of_microflow(chromium, kernel):
    """The same weights, pictures, noise and times: both compute the same, with WebAssembly and without."""
    rng = np.random.default_rng(3)
    w = microflow.new_weights(rng)
    for name in ("places", "out"):  # zero at first, and with them most gradients
        w[name].value = 0.1 * rng.standard_normal(w[name].value.shape).astype(np.float32)
    clean, noise = rng.standard_normal((2, 2, 36, 48)).astype(np.float32)
    labels, times = np.array([3, 5]), np.array([0.2, 0.9])
    with serving(live.SCRIPTS) as address:
        page = chromium.new_page()
        page.goto(address)
        weights = {name: packed(array.value) for name, array in w.items()}
        given = [packed(clean), labels.tolist(), packed(noise), times.tolist()]
        found = page.evaluate(STEP, [f"{address}/flow.js", kernel and f"{address}/{kernel}", weights, *given])
        page.close()
    assert found["wasm"] == bool(kernel)
    loss = microflow.loss_of(w, clean, labels, noise, times)
    microflow.backward(loss)
    assert found["loss"] == pytest.approx(float(loss.value), rel=1e-5)
    assert found["gradients"].keys() == w.keys()
    for name, array in w.items():
        ours, theirs = np.broadcast_to(array.gradient, array.value.shape).ravel(), floats(found["gradients"][name])
        assert np.abs(ours - theirs).max() < 1e-5 * np.abs(ours).max(), name
        # Adam's first step is the rate, towards the gradient's sign
        moved = floats(found["after"][name]) - array.value.ravel()
        assert np.abs(moved + 0.002 * np.sign(ours))[np.abs(ours) > 1e-5].max(initial=0) < 1e-5, name
    x = noise
    for i in range(10, 0, -1):
        x = x + (microflow.guess(w, x, labels, np.full(2, i / 10)).value - x) / i
    microflow.tape.clear()
    np.testing.assert_allclose(np.ravel(x), floats(found["walked"]), atol=1e-4)


SAYS = "document.querySelector('#live-toy output').value"


def pixels(page, name: str) -> np.ndarray:
    """What a canvas shows, (H, W, 3)."""
    script = """name => { const canvas = document.querySelector(`canvas.${name}`), { width, height } = canvas;
        const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
        return [width, height, [...data]]; }"""
    width, height, data = page.evaluate(script, name)
    return np.array(data, np.uint8).reshape(height, width, 4)[..., :3]


def names(pictures: np.ndarray, sentences: list[str]) -> tuple[int, int]:
    """How many of these pictures, in 8 bits, chapter 0's judge calls what the sentences say: kinds, colors."""
    exam = world.make_exam(size=24)
    scenes = [exam.scenes[exam.sentences.index(sentence)] for sentence in sentences]
    return world.count_right([mx.array(picture / 127.5 - 1, mx.float32) for picture in pictures], scenes)


BOOK = ["a red circle", "a yellow square", "a green triangle", "a blue star"]


@pytest.mark.slow
def test_a_model_is_born_in_the_page(open_page, home):
    """The book's four: what it has learned from can be named, and so can what it draws from two other noises."""
    page, log = open_page(f"{home}/train.html")
    page.click('button:text-is("pictures")')
    page.click('text="Train"')
    page.wait_for_function(f"{SAYS}.startsWith('Learning: step')", timeout=LONG)
    first = pixels(page, "guessed")
    page.wait_for_function(f"{SAYS}.startsWith('Learned for 500')", timeout=6 * LONG)
    assert pixels(page, "guessed").std() > 2 * first.std(), "at first it guesses gray"
    drawn = []
    for _ in range(3):
        walk = pixels(page, "walk")
        drawn += [walk[24 * i : 24 * i + 24, -24:] for i in range(4)]
        page.click('text="Walk from other noise"')
        page.wait_for_function("""before => { const canvas = document.querySelector("canvas.walk");
            return canvas.getContext("2d").getImageData(0, 0, 1, 1).data.join() !== before; }""",
            arg=",".join(map(str, [*walk[0, 0], 255])))  # fmt: skip
    kinds, colors = names(np.stack(drawn), BOOK * 3)
    assert kinds >= 11 and colors == 12
    assert log.errors == []


def test_papers_are_chosen_and_drawn_on(open_page, home):
    page, log = open_page(f"{home}/train.html#pictures")
    page.wait_for_selector(".sketch")
    shown = [np.array(pixels(page, f"sketch[aria-label='{name}']")) for name in BOOK]
    small = [picture.reshape(24, 4, 24, 4, 3).mean(axis=(1, 3)) for picture in shown]
    assert names(np.stack(small), BOOK) == (4, 4)
    page.select_option("select >> nth=1", "a blue star")
    assert page.locator("canvas[aria-label='a blue star']").count() == 2
    page.click('text="green pen"')
    page.locator(".sketch").first.scroll_into_view_if_needed()
    box = page.locator(".sketch").first.bounding_box()
    page.mouse.move(box["x"] + 20, box["y"] + 75)
    page.mouse.down()
    page.mouse.move(box["x"] + 130, box["y"] + 75, steps=5)
    page.mouse.up()
    drawn = pixels(page, "sketch[aria-label='my drawing']")
    assert np.abs(drawn[48, 48] - np.array([60, 160, 82])).max() <= 2, "the pen's green"
    assert drawn[20, 48].tolist() == [243, 242, 238]
    assert log.errors == []


def test_stop_and_other_pictures(open_page, home):
    """Stop walks with what was learned so far; another picture forgets it."""
    page, log = open_page(f"{home}/train.html#pictures", width=390)
    page.click('text="Train"')
    page.wait_for_function(f"{SAYS}.startsWith('Learning: step')", timeout=LONG)
    page.click('text="Stop"')
    page.wait_for_function(f"{SAYS}.startsWith('Learned for')", timeout=LONG)
    learned = int(re.search(r"\d+", page.evaluate(SAYS))[0])
    assert pixels(page, "walk").std() > 0 and page.inner_text(".live button.chief") == "Go on"
    page.click('text="Go on"')
    page.wait_for_function(f"/step (\\d+)/.exec({SAYS})?.[1] > {learned}", timeout=LONG)
    page.select_option("select >> nth=0", "a blue circle")
    assert page.evaluate(SAYS).startswith("Nothing learned yet") and pixels(page, "walk").std() == 0
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert log.errors == []


def test_a_drawing_becomes_patches_and_pixels_again(chromium):
    """vary moves and resizes by little: the mean of many is close to the drawing, and no two are the same."""
    rng = np.random.default_rng(0)
    drawing = np.full((96, 96, 4), 255, np.uint8)
    drawing[..., :3] = np.repeat(np.repeat(rng.integers(0, 256, (3, 3, 3)), 32, 0), 32, 1)
    script = """async ([url, rgba]) => {
        const { vary, sheet } = await import(url), { uniforms } = await import(url.replace("flow", "plane"));
        const patches = vary({ rgba, width: 96 }, 12, uniforms(1), [243, 242, 238]);
        const { rgba: shown, width, height } = sheet(patches, 3, 4);
        return [width, height, [...shown]]; }"""
    with serving(live.SCRIPTS) as address:
        page = chromium.new_page()
        page.goto(address)
        width, height, data = page.evaluate(script, [f"{address}/flow.js", drawing.ravel().tolist()])
        page.close()
    assert (width, height) == (96, 72)
    shown = np.array(data).reshape(3, 24, 4, 24, 4)[..., :3].transpose(0, 2, 1, 3, 4).reshape(12, 24, 24, 3)
    assert len({picture.tobytes() for picture in shown}) == 12
    fine = drawing[..., :3].reshape(24, 4, 24, 4, 3).mean(axis=(1, 3))
    for row in (4, 12, 20):  # the middles of nine fields
        for column in (4, 12, 20):
            assert np.abs(shown[:, row, column] - fine[row, column]).max() <= 1
