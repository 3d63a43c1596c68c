"""plane.js, flow matching in the plane, against MLX on the same numbers; and the page on which a visitor trains it."""

import re
from ast import literal_eval

import live
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from test_draw_page import LONG

from tools.chromium import serving

SIZES = (3, 96, 96, 2)
STEP = """async ([url, x0, eps, t]) => {
    const code = await import(url), numbers = values => Float32Array.from(values);
    const field = new code.Field(3);
    const weights = () => field.layers.map(({weight, bias}) => [[...weight], [...bias]]);
    const before = weights(), {loss, gradient} = field.lossAndGradient(numbers(x0), numbers(eps), numbers(t));
    const path = code.walk(field, numbers(eps), 6).map(points => [...points]);
    const training = new code.Training(field, {steps: 40, rate: 5e-3});
    for (let i = 0; i < 3; i++) training.update(field.lossAndGradient(numbers(x0), numbers(eps), numbers(t)).gradient);
    return {before, loss, gradient: gradient.map(({weight, bias}) => [[...weight], [...bias]]), path, after: weights()};
}"""


@pytest.fixture(scope="module")
def scripts(chromium):
    """A page beside the scripts as they stand, and the address of plane.js."""
    with serving(live.SCRIPTS) as address:
        page = chromium.new_page()
        page.goto(address)
        yield page, f"{address}/plane.js"


def network(weights) -> nn.Module:
    """Chapter 0's `field` with these weights."""
    layers = [nn.Linear(inn, out) for inn, out in zip(SIZES, SIZES[1:])]
    for layer, (weight, bias) in zip(layers, weights):
        layer.weight = mx.array(weight).reshape(layer.weight.shape)
        layer.bias = mx.array(bias)
    return nn.Sequential(layers[0], nn.SiLU(), layers[1], nn.SiLU(), layers[2])


def apart(net: dict, weights) -> float:
    """How far the numbers of each layer are from these, in parts of the largest of them, at worst."""
    far = 0.0
    for layer, ours in zip([net["layers"][i] for i in (0, 2, 4)], weights):
        for name, its in zip(("weight", "bias"), ours):
            mine = np.array(layer[name]).ravel()
            far = max(far, np.abs(mine - its).max() / np.abs(mine).max())
    return far


def test_gradient_steps_and_walk_are_those_of_mlx(scripts):
    """Loss and gradient of one batch, three steps of Adam with a falling rate, and a walk: chapter 0's lines."""
    page, url = scripts
    keys = mx.random.split(mx.random.key(4), 3)
    x0 = 2 * mx.random.normal((33, 2), key=keys[0])  # an odd number: the last row stands alone
    eps = mx.random.normal((33, 2), key=keys[1])
    t = mx.random.uniform(shape=(33, 1), key=keys[2])
    found = page.evaluate(STEP, [url, *(array.flatten().tolist() for array in (x0, eps, t))])
    net = network(found["before"])

    def plane_loss(x0, eps, t):
        x_t = (1 - t) * x0 + t * eps
        return ((net(mx.concatenate([x_t, t], axis=1)) - (eps - x0)) ** 2).mean()

    loss_and_gradient = nn.value_and_grad(net, plane_loss)
    loss, gradient = loss_and_gradient(x0, eps, t)
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert apart(gradient, found["gradient"]) < 1e-5
    x = eps
    for i, theirs in enumerate(found["path"][1:]):
        time = 1 - i / 6
        x = x - net(mx.concatenate([x, mx.full((33, 1), time)], axis=1)) / 6
        np.testing.assert_allclose(np.array(x).ravel(), theirs, atol=1e-5)
    adam = optim.Adam(optim.cosine_decay(5e-3, 40))
    for _ in range(3):
        _, gradient = loss_and_gradient(x0, eps, t)
        adam.update(net, gradient)
    assert apart(net, found["after"]) < 1e-4


def test_the_mean_of_all_lines(scripts):
    """Shares and mean of the lines through a place: each line's share is the density of the noise it begins at."""
    page, url = scripts
    examples = np.random.default_rng(0).normal(size=(50, 2)).astype(np.float32)
    script = "async ([url, all, ...at]) => (await import(url)).lines(Float32Array.from(all), ...at)"
    for x, y, t in ((0.3, -1.2, 0.5), (0.0, 0.0, 1.0), (2.0, 1.0, 0.05)):
        found = page.evaluate(script, [url, examples.ravel().tolist(), x, y, t])
        eps = (np.array([x, y]) - (1 - t) * examples.astype(float)) / t
        log_density = -(eps**2).sum(axis=1) / 2
        density = np.exp(log_density - log_density.max())
        shares = density / density.sum()
        np.testing.assert_allclose(found["shares"], shares, atol=1e-9)
        np.testing.assert_allclose(found["expected"], shares @ examples, atol=1e-6)
    assert page.evaluate(script, [url, examples.ravel().tolist(), 0, 0, 1])["shares"] != pytest.approx(1 / 50)


def test_normal_numbers(scripts):
    page, url = scripts
    script = "async url => { const c = await import(url); return [...c.normals(20000, c.uniforms(1))]; }"
    found = np.array(page.evaluate(script, url))
    assert abs(found.mean()) < 0.03 and abs(found.std() - 1) < 0.02 and abs((found[::2] * found[1::2]).mean()) < 0.03


SAYS = "document.querySelector('#live-toy output').value"
LEARNED = f"{SAYS}.startsWith('Learned for 2000')"
INK = """([x, y]) => {
    const d = document.querySelector('.paper').getContext('2d').getImageData(x, y, 12, 12).data;
    return d.some((value, i) => i % 4 === 3 && value > 0); }"""


@pytest.mark.slow
def test_a_visitor_draws_a_cloud_and_trains(open_page, home):
    """With the mouse: a stroke begins the training; at the end most points lie where the stroke is."""
    page, log = open_page(f"{home}/train.html")
    page.click('text="blank paper"')
    page.click('text="Train"')
    assert "Draw a cloud first" in page.evaluate(SAYS)
    page.locator(".paper").scroll_into_view_if_needed()
    box = page.locator(".paper").bounding_box()

    def at(share):
        return box["x"] + share * box["width"]

    middle = box["y"] + box["height"] / 2
    page.mouse.move(at(0.75), middle - 40)
    page.mouse.down()
    page.mouse.move(at(0.75), middle + 40, steps=20)
    page.mouse.up()
    page.wait_for_function(f"{SAYS}.startsWith('Learning: step')")
    page.wait_for_function(LEARNED, timeout=3 * LONG)
    page.wait_for_function("document.querySelector('.live input[type=range]').value === '0'", timeout=LONG)
    assert page.evaluate(INK, [345, 225]) and not page.evaluate(INK, [110, 225])
    page.mouse.move(at(0.5), middle)
    page.eval_on_selector(".live input[type=range]", "e => { e.value = 1; e.dispatchEvent(new Event('input')); }")
    page.wait_for_function("document.querySelector('.told').textContent.includes('at t = 1.00')")
    told = page.inner_text(".told").replace("−", "-")
    mean, network = [literal_eval(f"({pair})") for pair in re.findall(r"\(([^)]*)\)", told)[1:]]
    assert mean == pytest.approx((1.6, 0), abs=0.15) == network, "all lines together: the middle of the stroke"
    assert log.errors == []


@pytest.mark.slow
def test_by_keyboard_in_the_dark_without_motion_on_a_phone(open_page, home):
    page, log = open_page(f"{home}/train.html", width=390, dark=True)
    page.emulate_media(reduced_motion="reduce", color_scheme="dark")
    page.focus(".paper")
    for key in ("Shift+ArrowRight", "ArrowUp", "ArrowLeft"):
        page.keyboard.press(key)
    assert page.inner_text(".told").startswith("From (0.40, 0.10) at t = 1.00")
    page.click('text="blank paper"')
    page.focus(".paper")
    for _ in range(6):
        page.keyboard.press("Enter")
    assert page.evaluate(INK, [253, 217])
    page.evaluate("""() => { window.times = new Set(); const e = document.querySelector('.live .slider output');
        new MutationObserver(() => times.add(e.textContent)).observe(e, {childList: true, subtree: true}); }""")
    page.click('text="Train"')
    page.wait_for_function(LEARNED, timeout=3 * LONG)
    page.click('text="Walk"')
    assert page.evaluate("[...times]") in (["t = 0.00", "t = 1.00"], ["t = 1.00", "t = 0.00"]), "no film"
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert log.errors == []


def test_walk_stops_the_training_and_says_so(open_page, home):
    page, log = open_page(f"{home}/train.html")
    page.click('text="Train"')
    page.wait_for_function(f"{SAYS}.startsWith('Learning: step')")
    page.click('text="Walk"')
    page.wait_for_function(f"{SAYS}.startsWith('Learned for')")
    assert page.inner_text(".live button.chief") == "Go on" and log.errors == []


def test_a_swipe_on_a_phone_scrolls_and_paints_nothing(chromium, home):
    page = chromium.new_context(viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True).new_page()
    page.goto(f"{home}/train.html")
    page.wait_for_selector(".paper")
    assert page.eval_on_selector(".paper", "e => getComputedStyle(e).touchAction") == "pan-y"
    box = page.locator(".paper").bounding_box()
    fingers = page.context.new_cdp_session(page)
    for kind, up in [("touchStart", 0), *(("touchMove", 10 * k) for k in range(1, 21)), ("touchEnd", None)]:
        points = [] if up is None else [{"x": 195, "y": int(box["y"]) + 250 - up}]
        fingers.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    page.wait_for_function("scrollY > 100")
    assert page.evaluate(SAYS).startswith("Nothing learned yet"), "a stroke would begin the training"
    page.tap("text=pointer draws")
    assert page.eval_on_selector(".paper", "e => getComputedStyle(e).touchAction") == "none"
    page.context.close()


@pytest.mark.slow
def test_chapter_0_has_it_too(open_page, home):
    page, log = open_page(f"{home}/00_idea.html")
    page.wait_for_selector(".paper")
    assert page.locator("[data-explorer]").count() == 0
    assert not [url for url in log.requests if "/nano-" in url]
    assert log.errors == []
