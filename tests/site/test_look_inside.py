"""What a visitor can play with: the explorers in the chapters, the page Look inside; numbers against the package's."""

import json
import re
from pathlib import Path

import live
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from PIL import Image
from site_model import write_site_model
from test_draw_page import FAULTS, LONG, ROOT, picture, same

from kleinlite import Klein
from kleinlite.inside import record_attention
from kleinlite.pipeline import to_images
from kleinlite.position_ids import apply_rope, image_ids, rope_table, text_ids
from kleinlite.sampling import empirical_mu, euler, noise, schedule
from kleinlite.text_encoder import TEMPLATE, tokenize
from kleinlite.transformer import roped_attention
from recipe import attention_score

PROMPT, OTHER = "a red circle above a blue square", "a blue circle above a blue square"
VIEWS = [
    "tokens",
    "reading",
    "features",
    "latents",
    "attention",
    "product",
    "modulation",
    "velocity",
    "picture",
    "without",
    "difference",
]
SLIDE = "(e, value) => { e.value = value; e.dispatchEvent(new Event('input')); }"
CAPTION = ".explorer figcaption >> nth={}"


@pytest.fixture(scope="module")
def site_model(tmp_path_factory) -> Path:
    """The folder of the model that visitors look into."""
    return write_site_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def nano(site_model) -> Klein:
    return Klein.from_pretrained(site_model, keep_loaded=True)


def slide(page, name: str, value: float) -> None:
    page.eval_on_selector(f".live input[aria-label='{name}']", SLIDE, value)


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_attention_of_a_word(open_page, home, nano):
    page, log = open_page(f"{home}/05_transformer.html")
    page.click("text=Make it alive")
    page.wait_for_selector(".explorer input[aria-label=block]", timeout=LONG)
    page.click(".explorer >> text=square")
    slide(page, "step", 3)
    slide(page, "block", 4)
    _, maps = record_attention(nano, PROMPT, seed=7)
    text = TEMPLATE.format(PROMPT)
    first, spans = text.index("square"), nano.tokenizer.encode(text).offsets
    at = [i for i, (start, end) in enumerate(spans) if start < first + len("square") and end > first]
    seen = maps[2][3][:, at].sum(axis=-1)
    assert page.inner_text(CAPTION.format(1)).endswith(f"up to {(seen.max() / seen.mean()).item():.1f} times the mean")
    assert log.errors == []


@pytest.mark.slow
def test_without_scripts_the_stills_stay(chromium, home):
    page = chromium.new_context(java_script_enabled=False).new_page()
    for name in ("02_position_ids", "04_sampling", "05_transformer"):
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
    page.wait_for_selector(".columns canvas", timeout=LONG)
    yield page
    page.close()


STATUS = "document.querySelector('#live-inside output').value"


def test_it_opens_on_a_stored_film_and_every_box_draws(open_page, home):
    """Nothing is loaded, and nothing is empty: a film, and the boxes with their loop. A box that is pressed draws."""
    page, log = open_page(f"{home}/inside.html")
    assert page.locator(".stepper .film img").count() == 4 and page.locator(".columns img").count() == 1
    assert "A stored run" in page.inner_text(".says") and page.is_disabled("text=Copy link")
    assert page.inner_text(".columns figcaption") == page.input_value("[name=prompt]") == PROMPT
    for i, step in enumerate(Klein.from_pretrained().stream(PROMPT, seed=7, progress=False)):
        file = page.locator(f".stepper .film li:nth-child({i + 1}) img").get_attribute("src")
        same(step.preview(), np.array(Image.open(ROOT / "notebooks" / file)))
    loop = page.locator(".map .loop")
    assert loop.locator(".times").inner_text() == "↻ 4 times"
    assert loop.locator("button").all_inner_texts() == ["latents", "attention", "modulation", "velocity"]
    assert page.locator(".map button:enabled").count() == len(VIEWS) - 1  # a difference takes two sentences
    assert not [url for url in log.requests if "/nano-" in url]
    page.click("[data-view=velocity]")
    page.wait_for_selector("[data-view=velocity][aria-pressed=true]", timeout=LONG)
    assert page.locator(".columns svg").count() == 1 and page.locator(".stepper .film canvas").count() == 4
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=home)
    page.click("text=Copy link")
    page.wait_for_function(f"{STATUS}.includes('is in the clipboard')")
    link = page.evaluate("navigator.clipboard.readText()")
    assert link == page.evaluate("location.href") and "view=velocity" in link
    assert log.errors == []


def test_it_opens_on_a_critter(open_page, home, tmp_path):
    """In the other world: its stored film, its longer sentences, and no tour, whose words are about shapes."""
    page, log = open_page(f"{home}/inside.html")
    page.click(".worlds >> text=critters")
    page.wait_for_url("**/inside.html?world=critters")
    prompt = page.input_value("[name=prompt]")
    for i, step in enumerate(Klein.from_pretrained("critters").stream(prompt, seed=7, progress=False)):
        same(step.preview(), np.array(Image.open(ROOT / f"notebooks/images/critters-inside-{i + 1}.png")))
    page.click("[data-view=tokens]")
    page.wait_for_selector("[data-view=tokens][aria-pressed=true]", timeout=LONG)
    assert "filled up to 48." in page.inner_text(".columns") and not page.is_visible("text=Take the tour")
    page.click("[data-view=picture]")
    page.click(".film li:nth-child(4) button")
    klein = Klein.from_pretrained(write_site_model(tmp_path, live.CRITTERS))
    same(klein(prompt, seed=7, progress=False), picture(page, ".column:nth-child(1) canvas"))
    page.click("[data-view=attention]")
    assert "measured for shapes alone" in page.inner_text(".score")
    page.click("[data-view=without]")
    page.wait_for_function("document.querySelector('.columns').innerText.includes('of 255 levels')", timeout=LONG)
    page.wait_for_function("location.search === '?world=critters' && location.hash.includes('view=without')")
    assert not [url for url in log.requests if "/nano-" in url] and log.errors == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_wrong_answer_is_told(open_page, home, fault):
    """A file that is missing or damaged; the next click works."""
    page, _ = open_page(f"{home}/inside.html")

    def spoil(route):
        if fault:
            route.fulfill(status=200, body=FAULTS[fault](route.fetch().body()))
        else:
            route.fulfill(status=404)

    page.context.route("**/transformer/*00001*.safetensors.gz", spoil)
    page.click("button.chief")
    page.wait_for_function(f"{STATUS}.includes('could not be loaded')", timeout=LONG)
    page.context.unroute_all()
    page.click("button.chief")
    page.wait_for_selector(".columns canvas", timeout=LONG)


@pytest.mark.slow
def test_the_film_is_the_step_control(inside, nano):
    """A picture of it chooses the step, and so does the slider; it is there where a step matters, and not elsewhere."""
    inside.click("[data-view=picture]")
    for i, step in enumerate(nano.stream(PROMPT, seed=7, progress=False)):
        inside.click(f".film li:nth-child({i + 1}) button")
        same(step.preview(), picture(inside, ".column:nth-child(1) canvas"))
        same(step.preview(), picture(inside, f".film li:nth-child({i + 1}) canvas"))
        assert inside.input_value("input[aria-label=step]") == str(i + 1)
        inside.wait_for_function(f"location.hash.includes('step={i + 1}&')")
    slide(inside, "step", 2)
    pressed = "buttons => buttons.map(button => button.getAttribute('aria-current'))"
    assert inside.eval_on_selector_all(".film button", pressed) == [None, "step", None, None]
    seen = []
    for name in VIEWS:
        inside.click(f"[data-view={name}]")
        seen += [name] * inside.locator(".film").is_visible()
    assert seen == ["latents", "attention", "product", "modulation", "velocity", "picture", "difference"]
    assert inside.wrong == []


@pytest.mark.slow
def test_a_patch_is_chosen_by_keyboard(inside):
    inside.click("[data-view=attention]")
    slide(inside, "row", 4)
    slide(inside, "column", 2)
    inside.focus("input[aria-label=column]")
    inside.keyboard.press("ArrowRight")
    label = inside.get_attribute(".column:nth-child(1) canvas.choose", "aria-label")
    assert "row 4, column 3" in label
    inside.wait_for_function("location.hash.includes('patch=27&')")
    inside.click(".columns .column:nth-child(1) canvas.choose", position={"x": 5, "y": 5})
    assert inside.input_value("input[aria-label=row]") == inside.input_value("input[aria-label=column]") == "0"
    slide(inside, "row", 2)
    slide(inside, "column", 3)  # as the page begins
    assert inside.wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("name", VIEWS)
def test_every_box_opens(inside, name):
    """For both prompts, with a sentence and its chapter, at every step; and fits on a phone."""
    inside.click(f"[data-view={name}]")
    assert inside.get_attribute(f"[data-view={name}]", "aria-pressed") == "true"
    assert inside.locator(".says a").get_attribute("href").endswith(".html")
    assert inside.locator(".columns canvas, .columns svg, .columns .tokens, .columns .chips").count() > 0
    for step in (1, 4):
        slide(inside, "step", step)
    inside.set_viewport_size({"width": 390, "height": 900})
    assert inside.evaluate("document.documentElement.scrollWidth") == 390
    inside.set_viewport_size({"width": 1200, "height": 900})
    assert inside.evaluate(UNNAMED) == [], "what has no name for those who do not see it"
    assert inside.wrong == []


@pytest.mark.slow
def test_attention_of_a_patch(inside, nano):
    inside.click("[data-view=attention]")
    slide(inside, "step", 2)
    slide(inside, "block", 3)
    side = nano.info.size // 16
    patch = side // 3 * side + side // 2
    for i, prompt in enumerate((PROMPT, OTHER)):
        _, maps = record_attention(nano, prompt, seed=7)
        text = maps[1][2][patch].sum().item()
        says = inside.inner_text(f".column:nth-child({i + 1}) figcaption")
        assert abs(float(says.split(" %")[0]) - 100 * (1 - text)) <= 0.51


@pytest.mark.slow
def test_one_product_cell_by_cell(inside, nano):
    """The cell that the keyboard chooses: row, column, first terms and sum, and its share of the row's softmax."""
    kept = []

    def keep(q, k, v, rope):
        kept.append((apply_rope(q, rope), apply_rope(k, rope)))
        return roped_attention(q, k, v, rope)

    first = next(iter(nano.stream(PROMPT, seed=7, progress=False)))
    rope = nano.transformer.rope(image_ids(6, 6), text_ids(32))
    txt = nano.encode_prompt(PROMPT)
    nano.transformer(first.latents, txt, first.t_next, rope=rope, attention_fn=keep)
    inside.click("[data-view=product]")
    slide(inside, "step", 2)
    slide(inside, "block", 4)
    slide(inside, "head", 3)
    inside.focus(".columns .column:nth-child(1) canvas.product")
    inside.keyboard.press("ArrowDown")
    inside.keyboard.press("ArrowRight")
    q, k = (np.array(part[0, 2]).astype(float) for part in kept[3])
    terms = q[41] * k[5] / 8
    says = inside.inner_text(".column:nth-child(1) .sum").replace("−", "-")
    assert abs(float(re.search(r"= (-?[\d.]+)\. Softmax", says)[1]) - terms.sum()) < 0.006
    factors = [float(number) for number in re.findall(r"-?[\d.]+", says)[:4]]
    np.testing.assert_allclose(factors, [q[41, 0], k[5, 0] / 8, q[41, 1], k[5, 1] / 8], atol=0.006)
    scores = np.exp(q[41] @ k.T / 8)
    assert abs(float(re.search(r"makes ([\d.]+) %", says)[1]) - 100 * scores[5] / scores.sum()) < 0.06
    captions = inside.locator(".column:nth-child(1) .strips figcaption").all_inner_texts()
    assert captions[0].startswith("query: patch in row 1, column 3") and captions[1].startswith("key: “␣circle”")
    inside.wait_for_function("location.hash.includes('row=41&column=5')")
    inside.hover(".columns .column:nth-child(1) canvas.product", position={"x": 3, "y": 3})
    inside.wait_for_function("location.hash.includes('row=0&column=0')")
    assert inside.wrong == []


@pytest.mark.slow
def test_the_map_of_a_word_and_its_score(inside, nano):
    """The map is query·key of the word, as the package has it; the number beside it is the stored one."""
    inside.click("[data-view=attention]")
    slide(inside, "step", 1)
    slide(inside, "block", 2)
    slide(inside, "head", 0)
    inside.click(".columns .column:nth-child(1) .chip >> text=circle")
    recorder = attention_score.ScoreRecorder(32)
    rope = nano.transformer.rope(image_ids(6, 6), text_ids(32))
    nano.transformer(noise(7, 36), nano.encode_prompt(PROMPT), 1.0, rope=rope, attention_fn=recorder)
    values = recorder.maps[1][:, 5]

    def levels(canvas):
        return picture(inside, canvas).reshape(6, 16, 6, 16, 3).sum(axis=(1, 3)).reshape(36, 3)

    dimmed, whole = levels(".column:nth-child(1) canvas.word"), levels(".film li:nth-child(1) canvas")

    def light(seen):
        return 0.25 + 0.75 * (seen - seen.min()) / (seen.max() - seen.min())

    np.testing.assert_allclose(dimmed.sum(axis=1) / whole.sum(axis=1), light(values), atol=0.02)
    assert abs(light(recorder.maps[1][:, 9]) - light(values)).max() > 0.2, "another word has another map"
    shares = [part / part.sum(axis=1, keepdims=True) for part in (dimmed, whole)]
    np.testing.assert_allclose(*shares, atol=0.02, err_msg="each patch keeps its color")
    measured = inside.inner_text(".column:nth-child(1) .score")
    own, other = stored_scores()["double 2"][2]
    assert f"noise level 0.9, the word for a thing finds its patches with an AUC of {own:.2f}" in measured
    assert f"the other thing finds them with {other:.2f} (0.5 is chance" in measured
    slide(inside, "block", 0)
    assert "Choose a block" in inside.inner_text(".column:nth-child(1) .score")
    assert inside.wrong == []


def stored_scores() -> dict[str, list[list[float]]]:
    return json.loads(attention_score.STORED.read_text("utf-8"))["auc"]


@pytest.mark.slow
def test_the_scores_are_measured_again():
    found = attention_score.measure()
    assert found.keys() == stored_scores().keys()
    for block, levels in stored_scores().items():
        np.testing.assert_allclose(levels, found[block], atol=0.015)
    assert all(own > 0.88 and other < 0.65 for own, other in found["double 2"])  # what the page says of them
    assert all(other > own for own, other in found["double 1"])
    assert all(own < 0.5 for name in ("single 3", "single 4") for own, _ in found[name])


def test_the_score_of_a_map():
    true = np.array([True, True, False, False])
    assert attention_score.score_map(np.array([3.0, 2.0, 1.0, 0.0]), true) == 1
    assert attention_score.score_map(np.array([0.0, 1.0, 2.0, 3.0]), true) == 0
    assert attention_score.score_map(np.array([1.0, 1.0, 1.0, 1.0]), true) == 0.5
    assert attention_score.score_map(np.array([3.0, 1.0, 2.0, 0.0]), true) == 0.75


def test_the_true_patches_of_a_drawing():
    scene = attention_score.choose_scenes(1)[0]
    above, below = (attention_score.true_patches(scene, i).reshape(6, 6) for i in (0, 1))
    assert above.any() and below.any() and not (above & below).any()
    place = {"top": above[:3], "bottom": above[3:], "left": above[:, :3], "right": above[:, 3:]}[scene.things[0].place]
    assert place.sum() == above.sum()


SEEN = """[...document.body.querySelectorAll('body *')].filter(e => e.checkVisibility() && e.getClientRects().length
    && e.innerText?.trim() && !e.closest('.live') && !e.querySelector('.live') && e.getBoundingClientRect().right > 0)
    .map(e => e.outerHTML.slice(0, 80))"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draw", "inside", "train", "02_position_ids"])
def test_embedded_in_a_lecture(open_page, home, name):
    """?embed leaves the living part alone, at the top; ?embed=large makes it larger; the address keeps both."""
    page, log = open_page(f"{home}/{name}.html?embed", width=700)
    page.wait_for_selector(".live :is(button, canvas)")
    assert page.evaluate(SEEN) == []
    box = page.locator(".live >> nth=0").bounding_box()
    assert 0 <= box["y"] < 60 and box["x"] < 60
    assert page.evaluate("document.documentElement.scrollWidth") == 700
    size = "document.querySelector('.live :is(button, canvas)').getBoundingClientRect().height"
    small = page.evaluate(size)
    page.goto(f"{home}/{name}.html?embed=large")
    page.wait_for_selector(".live :is(button, canvas)")
    assert page.evaluate(size) > 1.3 * small
    assert log.errors == []


@pytest.mark.slow
def test_reading_is_causal(inside):
    """Shaded are a token and those before it, no later ones."""
    inside.click("[data-view=reading]")
    chips = inside.locator(".column:nth-child(1) .chip")
    chips.nth(5).click()
    shaded = chips.evaluate_all("chips => chips.map(chip => chip.style.background !== '')")
    assert shaded == [i <= 5 for i in range(len(shaded))]


def test_code_is_shown_as_it_is():
    silu = live.render_excerpt("silu")
    assert silu.startswith("```javascript\n/** x · sigmoid(x)") and silu.endswith("Math.exp(-this.M[i]);\n}\n```")
    assert live.render_excerpt("noise").count("\n}\n") == 1
    with pytest.raises(LookupError, match="no paint to show"):
        live.render_excerpt("paint")


def test_the_titles_number_is_true():
    """klein in 700 lines: without comments and empty ones."""
    lines = (live.SCRIPTS / "klein.js").read_text("utf-8").split("\n")
    code = [line for line in lines if line.strip() and not line.strip().startswith(("//", "/**", "* "))]
    assert len(code) <= 700 and max(map(len, lines)) <= 120


@pytest.mark.slow
def test_the_tour_goes_where_its_words_lead(open_page, home):
    page, log = open_page(f"{home}/inside.html")
    words = page.locator("ol.tour > li > b").all_inner_texts()
    places = [
        ("picture", 1, -1), ("tokens", 1, -1), ("reading", 1, -1), ("features", 1, -1), ("latents", 4, -1),
        ("attention", 2, -1), ("attention", 2, 5), ("modulation", 1, -1), ("velocity", 1, -1), ("difference", 2, 3),
        ("without", 2, 0),
    ]  # fmt: skip
    assert len(places) == len(words)
    page.click("text=Take the tour")
    for i, question in enumerate(words, start=1):
        view, step, block = places[i - 1]
        page.wait_for_function(
            f"document.querySelector('.stop .count')?.innerText === '{i} of {len(words)}'", timeout=LONG
        )
        assert page.inner_text(".stop b") == question
        assert page.locator(".columns *").count() > 0
        assert page.get_attribute(".map [aria-pressed=true]", "data-view") == view
        page.wait_for_function(f"location.hash.includes('view={view}&step={step}&block={block}&')")
        assert page.input_value("input[aria-label=step]") == str(step)
        if page.locator(".film").is_visible():
            assert page.get_attribute(f".film li:nth-child({step}) button", "aria-current") == "step"
        if page.locator("input[aria-label=block]").count():
            assert page.input_value("input[aria-label=block]") == str(max(block + 1, 0 if view == "attention" else 1))
        if i < len(words):
            page.click(".stop >> text=Next")
    view = page.evaluate("location.href")
    page.click(".stop >> text=End the tour")
    assert page.locator(".stop").is_hidden() and "view=without" in view and "block=0" in view
    page.goto("about:blank")
    page.goto(view)  # a link leads to the same place, once the visitor asks for it
    assert page.input_value("[name=other]") == "a blue circle above a blue square"
    page.click("button.chief")
    page.wait_for_selector("[data-view=without][aria-pressed=true]", timeout=LONG)
    assert log.errors == []


@pytest.mark.slow
@pytest.mark.parametrize("width, height", [(390, 844), (1280, 860)])
def test_on_a_small_screen_the_tour_folds_the_map(chromium, home, width, height):
    """What is shown begins on the screen that its words stand on; without the tour the map is there."""
    page = chromium.new_page(viewport={"width": width, "height": height}, reduced_motion="reduce")
    page.goto(f"{home}/inside.html")
    assert page.is_visible(".map")
    page.click("text=Take the tour")
    for stop in range(1, 12):
        page.wait_for_function(
            f"document.querySelector('.stop .count')?.innerText.startsWith('{stop} of')", timeout=LONG
        )
        assert page.is_hidden(".map")
        words, shown = (
            page.locator(at).bounding_box()["y"] for at in (".stop", ".columns :is(canvas, svg, p) >> nth=0")
        )
        assert 0 <= words < shown < height - 60
        page.click(".stop >> text=" + ("Next" if stop < 11 else "End the tour"))
    assert page.is_visible(".map")
    page.close()


def test_what_the_tour_says_is_true(nano):
    """The numbers in the words of its stops, worked out by the package."""
    steps, maps = record_attention(nano, "a red circle above a blue square", seed=7)
    tokens = [nano.tokenizer.decode([i]).strip() for i in tokenize(nano.tokenizer, [PROMPT], 32)[0][0].tolist()]
    mine = range(3, 10)
    assert [tokens[i] for i in mine] == PROMPT.split()
    patch = maps[1].mean(axis=0)[8].tolist()
    order = sorted(mine, key=lambda i: -patch[i])
    assert [tokens[i] for i in order[:2]] == ["red", "circle"]
    assert (round(100 * patch[order[0]]), round(100 * patch[order[1]])) == (11, 8)
    square = maps[1].mean(axis=0)[6 * 4 + 2].tolist()
    assert tokens[max(mine, key=lambda i: square[i])] == "blue"
    to_words = [round(100 * block[:, 3:10].sum(axis=-1).mean().item()) for block in maps[1]]
    assert len(to_words) == 7 and (to_words[3], to_words[5]) == (20, 1)
    start = steps[0].latents - (steps[0].t_next - steps[0].t) * steps[0].velocity
    points = [start, *(step.latents for step in steps)]
    way = [mx.linalg.norm(b - a).item() for a, b in zip(points, points[1:])]
    far = mx.linalg.norm(points[-1] - start).item()
    assert (round(100 * way[0] / far), round(100 * way[-1] / far)) == (8, 66)
    pictures = [np.asarray(step.preview()).astype(float) for step in steps]
    changes = [abs(b - a).mean() for a, b in zip(pictures, pictures[1:])]
    assert (round(changes[0]), round(changes[2])) == (17, 3)


class Skip(nn.Module):
    def __call__(self, x, *others):
        return x


class SilentHead(nn.Module):
    """A single block whose first head's output is lost: the columns of its share in the last matrix are zero."""

    def __init__(self, block, hd: int):
        super().__init__()
        self.block = block
        weight = block.linear2.weight
        self.block.linear2.weight = mx.where(mx.arange(weight.shape[1]) < hd, 0, weight)

    def __call__(self, *args):
        return self.block(*args)


class ShutGate(nn.Module):
    """A double block with one of its gates at zero, in both streams: number 0 is the attention's, 1 the MLP's."""

    def __init__(self, block, gate: int):
        super().__init__()
        self.block = block
        self.gate = gate

    def __call__(self, img, txt, img_mod, txt_mod, *others):
        def shut(mod):
            return [part._replace(gate=0) if i == self.gate else part for i, part in enumerate(mod)]

        return self.block(img, txt, shut(img_mod), shut(txt_mod), *others)


CUTS = ["a block", "a head", "a gate", "a word", "the place of two words", "all gates", "the clock"]


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
def test_what_if(inside, cut, site_model):
    """Each part that the page takes away, taken away from the package's own network: the same picture."""
    klein = Klein.from_pretrained(site_model, keep_loaded=True)
    net, txt = klein.transformer, klein.encode_prompt(PROMPT)
    ids, words = image_ids(6, 6), text_ids(32)
    inside.click("[data-view=without]")
    inside.click(f'.toggles >> text="{cut}"')
    believed = None
    if cut in ("a block", "a head"):
        slide(inside, "block", 5)  # the third single block
        blocks = net.single_blocks
        blocks[2] = Skip() if cut == "a block" else SilentHead(blocks[2], 64)
    if cut == "a gate":
        slide(inside, "block", 2)  # the second double block
        inside.click('.toggles >> text="feed-forward"')
        net.double_blocks[1] = ShutGate(net.double_blocks[1], 1)
    if cut == "a word":
        inside.click(".columns .column >> nth=0 >> .chip >> text=red")
        txt = mx.where((mx.arange(32) == 4)[None, :, None], 0, txt)
    if cut == "the place of two words":
        inside.click(".columns .column >> nth=0 >> .chips >> nth=0 >> .chip >> text=red")
        inside.click(".columns .column >> nth=0 >> .chips >> nth=1 >> .chip >> text=blue")
        txt = txt[:, mx.array([{4: 8, 8: 4}.get(i, i) for i in range(32)])]
    if cut == "all gates":
        modulation = type(net.single_stream_modulation).__call__

        def wide_open(self, vec):
            return [mod._replace(gate=mx.ones_like(mod.gate)) for mod in modulation(self, vec)]

    if cut == "the clock":
        believed = 0.5

    def field(x, t, _):
        return net(x, txt, believed or t, ids, words)

    with pytest.MonkeyPatch.context() as patch:
        if cut == "all gates":
            patch.setattr(type(net.single_stream_modulation), "__call__", wide_open)
        *_, step = euler(field, noise(7, 36), schedule(4, 36))
    expected = to_images(klein.autoencoder.decode(step.latents.reshape(1, 6, 6, 128)))[0]
    inside.wait_for_function(
        "document.querySelector('.columns p[aria-live]').textContent.startsWith('The picture')", timeout=LONG
    )
    same(expected, picture(inside, ".column >> nth=0 >> figure >> nth=1 >> canvas"))
