"""What a visitor can play with: the explorers in the chapters, the page Look inside; numbers against the package's."""

import mlx.core as mx
import pytest
from test_draw_page import LONG, picture, same

from kleinlite import Klein
from kleinlite.book import live
from kleinlite.book.widgets.explorers import record_attention
from kleinlite.pipeline import to_images
from kleinlite.position_ids import apply_rope, image_ids, rope_table
from kleinlite.sampling import empirical_mu
from kleinlite.text_encoder import TEMPLATE

PROMPT, OTHER = "a red circle above a blue square", "a blue circle above a blue square"
VIEWS = ["tokens", "reading", "features", "latents", "attention", "modulation", "velocity", "picture", "difference"]
SLIDE = "(e, value) => { e.value = value; e.dispatchEvent(new Event('input')); }"
CAPTION = ".explorer figcaption >> nth={}"


@pytest.fixture(scope="module")
def nano() -> Klein:
    return Klein.from_pretrained(keep_loaded=True)


def slide(page, name: str, value: float) -> None:
    page.eval_on_selector(f".live input[aria-label='{name}']", SLIDE, value)


def test_schedule(open_page, home):
    page, log = open_page(f"{home}/04_sampling.html")
    title = page.locator(".explorer .chart .title >> nth=1")
    for steps, size in ((4, 1024), (50, 512), (10, 1056)):
        slide(page, "steps", steps)
        slide(page, "size", size)
        n = (size // 16) ** 2
        assert title.text_content().startswith(f"n = {n:,}: mu = {empirical_mu(n, steps):.2f}, shift")
    assert page.locator("[data-explorer]").count() == 0, "the still is for those without scripts"
    assert log.errors == [] and not [url for url in log.requests if "/nano-" in url]


def test_rope(open_page, home):
    page, log = open_page(f"{home}/02_position_ids.html")
    turned = {t: apply_rope(mx.ones((1, 1, 256, 128)), rope_table(image_ids(16, 16, t)))[0, 0] for t in (0, 20)}
    for t, row, column in ((0, 8, 5), (20, 3, 15)):
        if t:
            page.click(f"text=a reference at t = {t}")
        slide(page, "row", row)
        slide(page, "column", column)
        for i, part in enumerate((slice(0, 128), slice(32, 64), slice(64, 96))):
            seen = turned[t][:, part] @ turned[0][row * 16 + column, part] / (part.stop - part.start)
            ours = f"{seen.min().item():.2f} to {seen.max().item():.2f}"
            assert page.inner_text(CAPTION.format(i)).endswith(ours)
    page.click(".explorer canvas >> nth=0", position={"x": 5, "y": 5})
    assert page.input_value(".explorer input[aria-label=row]") == page.input_value("input[aria-label=column]") == "0"
    assert log.errors == []


def test_latents(open_page, home, nano):
    page, log = open_page(f"{home}/01_autoencoder.html")
    assert page.locator("[data-explorer]").is_visible() and not [url for url in log.requests if "/nano-" in url]
    page.click("text=Make it alive")
    page.wait_for_selector(".explorer input[aria-label=channel]", timeout=LONG)
    slide(page, "channel", 17)
    slide(page, "push", -3)
    page.wait_for_function("document.querySelectorAll('.explorer figcaption')[1].textContent === 'channel 17, −3.0'")
    *_, step = nano.stream(PROMPT, seed=7, progress=False)
    side = nano.info.size // 16
    pushed = step.latents.reshape(1, side, side, -1) - 3 * (mx.arange(step.latents.shape[-1]) == 17)
    same(to_images(nano.autoencoder.decode(pushed))[0], picture(page, ".explorer figure:nth-child(2) canvas"))
    assert log.errors == []


def test_attention_of_a_word(open_page, home, nano):
    page, log = open_page(f"{home}/05_transformer.html")
    page.click("text=Make it alive")
    page.wait_for_selector(".explorer input[aria-label=block]", timeout=LONG)
    page.click(".explorer >> text=square")
    slide(page, "step", 3)
    slide(page, "block", 4)
    _, maps = record_attention(nano, PROMPT, 7)
    text = TEMPLATE.format(PROMPT)
    first, spans = text.index("square"), nano.tokenizer.encode(text).offsets
    at = [i for i, (start, end) in enumerate(spans) if start < first + len("square") and end > first]
    seen = maps[2][3][:, at].sum(axis=-1)
    assert page.inner_text(CAPTION.format(1)).endswith(f"up to {(seen.max() / seen.mean()).item():.1f} times the mean")
    assert log.errors == []


def test_without_scripts_the_stills_stay(chromium, home):
    page = chromium.new_context(java_script_enabled=False).new_page()
    for name in ("01_autoencoder", "02_position_ids", "04_sampling", "05_transformer"):
        page.goto(f"{home}/{name}.html")
        assert page.locator("[data-explorer] img").count() == 1
    page.context.close()


UNNAMED = """[...document.querySelectorAll('.live :is(button, input, select, canvas, svg.chart)')].filter(e => !(
    e.ariaLabel || e.getAttribute('aria-labelledby') || e.closest('label') || e.textContent.trim()
)).map(e => e.outerHTML.slice(0, 90))"""


@pytest.fixture(scope="module")
def inside(chromium, home):
    """The page Look inside, with two prompts drawn."""
    page = chromium.new_page(viewport={"width": 1200, "height": 900})
    page.wrong = []
    page.on("pageerror", lambda error: page.wrong.append(str(error)))
    page.goto(f"{home}/inside.html")
    page.fill("[name=other]", OTHER)
    page.click("button.chief")
    page.wait_for_selector(".map button", timeout=LONG)
    yield page
    page.close()


@pytest.mark.parametrize("name", VIEWS)
def test_every_box_opens(inside, name):
    """For both prompts, with a sentence and its chapter, quickly, at every step; and fits on a phone."""
    inside.click(f"[data-view={name}]")
    assert inside.get_attribute(f"[data-view={name}]", "aria-pressed") == "true"
    assert inside.locator(".says a").get_attribute("href").endswith(".html")
    assert inside.locator(".columns canvas, .columns svg, .columns .tokens, .columns .chips").count() > 0
    script = """name => { const start = performance.now(); document.querySelector(`[data-view=${name}]`).click();
        return performance.now() - start; }"""
    assert min(inside.evaluate(script, name) for _ in range(3)) < 100, "milliseconds"
    for step in (1, 4):
        slide(inside, "step", step)
    inside.set_viewport_size({"width": 390, "height": 900})
    assert inside.evaluate("document.documentElement.scrollWidth") == 390
    inside.set_viewport_size({"width": 1200, "height": 900})
    assert inside.evaluate(UNNAMED) == [], "what has no name for those who do not see it"
    assert inside.wrong == []


def test_attention_of_a_patch(inside, nano):
    inside.click("[data-view=attention]")
    slide(inside, "step", 2)
    slide(inside, "block", 3)
    side = nano.info.size // 16
    patch = side // 3 * side + side // 2
    for i, prompt in enumerate((PROMPT, OTHER)):
        _, maps = record_attention(nano, prompt, 7)
        text = maps[1][2][patch].sum().item()
        says = inside.inner_text(f".column:nth-child({i + 1}) figcaption")
        assert abs(float(says.split(" %")[0]) - 100 * (1 - text)) <= 0.51


def test_reading_is_causal(inside):
    """Shaded are a token and those before it, no later ones."""
    inside.click("[data-view=reading]")
    chips = inside.locator(".column:nth-child(1) .chip")
    chips.nth(5).click()
    shaded = chips.evaluate_all("chips => chips.map(chip => chip.style.background !== '')")
    assert shaded == [i <= 5 for i in range(len(shaded))]


def test_code_is_shown_as_it_is():
    package = live.SCRIPTS.parents[1]
    silu = live.render_excerpt(package, "js", "silu")
    assert silu.startswith("```javascript\n/** x · sigmoid(x)") and silu.endswith("Math.exp(-this.M[i]); }\n```")
    assert live.render_excerpt(package, "js", "noise").count("\n}\n") == 1
    assert live.render_excerpt(package, "py", "sampling.schedule").startswith("```python\ndef schedule(")
    with pytest.raises(LookupError, match="no paint to show"):
        live.render_excerpt(package, "js", "paint")


def test_the_titles_number_is_true():
    """klein in 500 lines: without comments and empty ones."""
    lines = (live.SCRIPTS / "klein.js").read_text("utf-8").split("\n")
    code = [line for line in lines if line.strip() and not line.strip().startswith(("//", "/**", "* "))]
    assert len(code) <= 500 and max(map(len, lines)) <= 120
