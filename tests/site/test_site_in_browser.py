"""The site as a reader gets it: built once, read as files, then visited in a headless Chromium.

Chromium comes from the system (`apt install chromium`); without it the tests in the browser are skipped.
"""

import html.parser
import os
import re
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pytest
from PIL import Image
from tiers import slow

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
LISTED = re.findall(r"\[(.+)\]\((.+)\)", (NOTEBOOKS / "SUMMARY.md").read_text("utf-8"))
PAGES = [re.sub(r"\.\w+$", ".html", path) for _, path in LISTED]
CHAPTERS = [page for page in PAGES if re.match(r"\d\d_|flux3", page)]  # what has exercises
QUICK = ["index.html", "draw.html", "02_position_ids.html"]  # of each kind of page one
OTHERS = [page for page in PAGES if page not in QUICK]


# ---------------------------------------------------------------- as files


class HTML(html.parser.HTMLParser):
    """What a built page links to, what it can be linked by, and its pictures."""

    def __init__(self, file: Path):
        super().__init__()
        self.text = file.read_text("utf-8")
        self.links, self.ids, self.pictures = [], set(), []
        self.feed(self.text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids.add(attributes.get("id"))
        if tag == "img":
            self.pictures.append(attributes)
        self.links += [attributes[name] for name in ("href", "src") if attributes.get(name)]


@pytest.fixture(scope="module")
def pages(site) -> dict[str, HTML]:
    found = {file.relative_to(site).as_posix(): HTML(file) for file in site.rglob("*.html")}
    assert set(PAGES) <= set(found)
    return found


def test_every_link_leads_somewhere(site, pages):
    for name, page in pages.items():
        for link in page.links:
            path, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", link) or name in ("404.html", "toc.html"):
                continue
            there = os.path.normpath(os.path.join(os.path.dirname(name), unquote(path))) if path else name
            assert (site / there).exists(), f"{name}: {link}"
            if anchor and there.endswith(".html"):
                assert unquote(anchor) in pages[there].ids, f"{name}: {link}"


@pytest.mark.slow
def test_exercises_and_solutions_lead_to_each_other(pages):
    solved = [name for name in PAGES if name.startswith("solutions/")]
    assert [f"solutions/{name}" for name in CHAPTERS] == solved, "every chapter has its solutions in SUMMARY.md"
    for chapter in CHAPTERS:
        assert f"solutions/{chapter}" in pages[chapter].links and "#exercises" in pages[chapter].links
        assert f"../{chapter}#exercises" in pages[f"solutions/{chapter}"].links


def test_titles_tell_pages_apart(pages):
    titles = Counter(re.search(r"<title>(.*?)</title>", pages[name].text)[1] for name in PAGES)
    assert set(titles.values()) == {1}
    for (title, _), name in zip(LISTED, PAGES):
        assert re.search(r"<title>(.*?)</title>", pages[name].text)[1] == f"{title} - kleinlite"


def test_next_leads_from_home_into_the_book(pages):
    for name, there in (("index.html", "00_idea.html"), ("00_idea.html", "01_autoencoder.html")):
        assert re.search(r'<a rel="next[^>]*href="([^"]+)"', pages[name].text)[1] == there


@pytest.mark.slow
def test_nothing_remote_and_nothing_heavy(site, pages):
    for name, page in pages.items():
        remote = r'<(script|link(?! rel="canonical")|img|iframe)\b[^>]*(src|href)="(https?:)?//'
        assert not re.search(remote, page.text), name
        assert len(page.text.encode()) <= 1_000_000 or name == "print.html", f"{name} is heavier than 1 MB"
        assert not re.search(r'"data:image/[^"]{2000,}"', page.text), f"{name} holds a picture: it shall be a file"
    for file in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", file.read_text("utf-8")), file.name
    sizes = {file.relative_to(site).as_posix(): file.stat().st_size for file in site.rglob("*") if file.is_file()}
    models = sum(size for name, size in sizes.items() if name.startswith(("live/nano-", "live/critters-")))
    assert 0 < models <= 28_400_000 and sum(sizes.values()) - models <= 32_000_000


def test_pages_are_complete(pages):
    for name, page in pages.items():
        assert all(picture.get("alt", "").strip() for picture in page.pictures), name
        inside = re.sub(r"<(pre|code|script)\b.*?</\1>", "", page.text, flags=re.S)
        assert not re.search(r"\$\$|\\frac|\\begin\{|\{\{#", inside), f"{name} shows raw LaTeX or a marker"
        assert not re.search(r"<p>\| ", inside), f"{name} shows a row of a table that an empty line cut off"
        code = " ".join(re.findall(r"<pre>.*?</pre>", page.text, re.S))
        assert "#| " not in code and "NBVAL_" not in code, f"{name} shows a mark"


def test_pictures_say_how_large_they_are(pages):
    """Known before they come, so that the page does not jump. What a click shows larger comes later."""
    for name in PAGES:
        shown = re.sub(r'<span class="img-wrapper">.*?</span>', "", pages[name].text)
        pictures = re.findall(r"<img\b[^>]*>", shown)
        unsized = [p for p in pictures if not (re.search(r' width="\d+"', p) and re.search(r' height="\d+"', p))]
        assert unsized == [], name
    home = [picture for picture in pages["home.html"].pictures if "width" in picture]
    assert len(home) == 5  # four of a stored run, for who has no scripts
    for picture in home:
        assert (int(picture["width"]), int(picture["height"])) == Image.open(NOTEBOOKS / picture["src"]).size


@pytest.mark.slow
def test_a_chapter_leads_to_its_workbook(site, pages):
    text = pages["04_sampling.html"].text
    assert 'href="live/workbook/04_sampling.ipynb"' in text
    assert 'href="https://colab.research.google.com/github/kleinlite/kleinlite/blob/workbook/04_sampling.ipynb"' in text
    workbook = (site / "live" / "workbook" / "04_sampling.ipynb").read_text("utf-8")
    assert "Your turn: schedule" in workbook and "first-cell" in workbook


@pytest.mark.slow
def test_the_card_that_others_show_beside_a_link(site, pages):
    card = re.search(r'property="og:image" content="(.+?)"', pages["index.html"].text)[1]
    home = re.search(r'^Book = "(.+)"', (ROOT / "pyproject.toml").read_text("utf-8"), re.M)[1]
    assert card.startswith(home), "an address of its own: those who read it do not follow relative ones"
    assert Image.open(site / card.removeprefix(home)).size == (1200, 630)
    assert 'property="og:title" content="Autoencoder - kleinlite"' in pages["01_autoencoder.html"].text
    assert re.search(r'rel="icon" href="favicon-\w+\.svg"', pages["index.html"].text)


def test_the_font_of_formulas_has_its_licence_beside_it(site):
    (font,) = site.glob("fonts/stix-two-math-*.woff2")
    assert font.stat().st_size <= 270_000
    (licence,) = site.glob("fonts/STIX-TWO-MATH-LICENSE-*.txt")
    assert "SIL Open Font License, Version 1.1" in licence.read_text("utf-8")


# ---------------------------------------------------------------- in a browser

PALE = """(() => {  // texts that are hard to tell from what is behind them
    const light = color => { const [r, g, b] = color.match(/[\\d.]+/g).slice(0, 3).map(x => {
        x /= 255; return x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4; });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const behind = e => { const c = getComputedStyle(e).backgroundColor;
        return c === 'rgba(0, 0, 0, 0)' && e.parentElement ? behind(e.parentElement) : c; };
    const contrast = e => { const a = light(getComputedStyle(e).color), b = light(behind(e));
        return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); };
    const texts = 'p, li, td, th, a, h1, h2, code, code span, pre.output, mi, button:enabled, label, summary, output';
    return [...document.querySelectorAll(`main :is(${texts})`)]
        .filter(e => e.offsetParent && e.textContent.trim() && contrast(e) < 4.5)
        .map(e => `${e.tagName}.${e.className} ${contrast(e).toFixed(1)}: ${e.textContent.slice(0, 30)}`); })()"""
STILL = "Promise.all(document.getAnimations().map(a => a.finished)).then(() => 0)"  # nothing moves any more
PICTURES = """Promise.all([...document.querySelectorAll('main img:not(.img-wrapper *)')].map(async e => {
    e.loading = 'eager';  // what waits to be scrolled to would not be decoded, ever
    await e.decode().catch(() => 0);
    return {what: e.alt, there: e.naturalWidth > 0 && e.clientWidth > 0, plot: !e.closest('.live'),
            behind: getComputedStyle(e).backgroundColor};
}))"""
FORMULAS = """[...document.querySelectorAll('main math')].filter(e => e.closest('details:not([open])') === null)
    .map(e => { const box = e.getBoundingClientRect(); return box.width > 3 && box.height > 3; })"""
TOO_WIDE = """[...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1
    && !e.closest('pre, .table-wrapper, .output, .formula')).map(e => e.tagName + ' ' + e.textContent.slice(0, 40))"""

CUT_OFF = """[...document.querySelectorAll('main pre > code')].filter(e => e.scrollWidth > e.clientWidth + 1)
    .map(e => e.textContent.slice(0, 40))"""


def choose_theme(page: "Page", name: str) -> None:
    """Choose one in the menu, as a reader would, and wait until the colors have stopped changing."""
    menu = page.locator("#mdbook-theme-list")
    if not menu.is_visible():  # it stays open after a choice
        page.click("#mdbook-theme-toggle")
    page.click(f"#mdbook-theme-{name}")
    page.evaluate(STILL)


@pytest.mark.parametrize("name", [*QUICK, *slow(*OTHERS)])
def test_page(open_page, home, name):
    """No error, no remote request; everything is visible, in the light and in the dark, and on a phone."""
    page, log = open_page(f"{home}/{name}", width=1200)
    assert page.evaluate(PALE) == []
    pictures, formulas = page.evaluate(PICTURES), page.evaluate(FORMULAS)
    assert [p["what"] for p in pictures if not p["there"]] == []
    assert all(formulas)
    if formulas:
        loaded = "document.fonts.ready.then(() => [...document.fonts].some(f => /STIX/.test(f.family) && f.status"
        assert page.evaluate(f"{loaded} === 'loaded'))"), "the font of formulas"
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("document.documentElement.classList.contains('navy')")
    page.evaluate(STILL)
    assert page.evaluate(PALE) == [], "in the dark"
    white = "rgb(255, 255, 255)"
    assert all((p["behind"] == white) == p["plot"] for p in page.evaluate(PICTURES)), "plots stand on white in the dark"
    assert log.errors == []
    assert [r for r in log.requests if not r.startswith((f"{home}/", "data:"))] == []
    page, log = open_page(f"{home}/{name}", width=390, dark=True)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.evaluate(TOO_WIDE) == [], "on a phone"
    assert page.evaluate(CUT_OFF) == [], "lines of code that end outside of a phone"
    assert log.errors == []


SHIFTED = """new Promise(done => { let sum = 0;
    new PerformanceObserver(list => list.getEntries().forEach(entry => { sum += entry.value; }))
        .observe({type: 'layout-shift', buffered: true});
    setTimeout(() => done(sum), 1000); })"""  # nobody touches the page: all of it counts


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("name", ["index", "draw", "inside", "01_autoencoder", "nano-card"])
def test_the_page_stays_where_it_is_while_it_loads(chromium, home, name, width):
    """Also when pictures come late: cumulative layout shift."""
    context = chromium.new_context(viewport={"width": width, "height": 900}, is_mobile=width < 600)
    context.route(re.compile(r"\.(png|jpg|jpeg)$"), lambda route: (time.sleep(0.1), route.continue_()))
    page = context.new_page()
    page.goto(f"{home}/{name}.html")
    assert page.evaluate(SHIFTED) < 0.1
    context.close()


@pytest.mark.slow
def test_links_are_told_by_more_than_their_color(open_page, home):
    page, _ = open_page(f"{home}/01_autoencoder.html")

    def lines(where):
        return set(page.eval_on_selector_all(where, """links => links.map(e => {
            const { textDecorationLine, textDecorationStyle } = getComputedStyle(e);
            return `${textDecorationLine} ${textDecorationStyle}`; })"""))  # fmt: skip

    assert lines("main :is(p, li, td, blockquote) a:not(.header, .term)") == {"underline solid"}
    assert lines("main a.term") == {"underline dotted"}
    assert lines("main a.header") == lines("#mdbook-sidebar li a") == {"none solid"}


def search(page: "Page", words: str) -> list[str]:
    """The links that the search box finds."""
    page.keyboard.press("s")
    page.wait_for_function("document.activeElement.id === 'mdbook-searchbar'")
    page.keyboard.type(words)
    page.wait_for_selector("#mdbook-searchresults li a")
    return page.evaluate("[...document.querySelectorAll('#mdbook-searchresults li a')].map(e => e.href)")


def test_search_finds_rope(open_page, home):
    page, log = open_page(f"{home}/index.html")
    results = search(page, "RoPE")
    assert any("/02_position_ids.html" in link for link in results)
    assert any("/glossary.html" in link and link.endswith("#rope") for link in results)
    page.goto(results[0])
    page.wait_for_selector("main mark", state="attached")
    assert log.errors == []


@pytest.mark.slow
def test_a_name_of_the_package_is_found(open_page, home):
    results = search(open_page(f"{home}/05_transformer.html")[0], "rope_table")
    assert any(link.endswith("#position_ids-rope_table") for link in results)


@pytest.mark.slow
@pytest.mark.parametrize("words, first", [
    ("license", "responsibility.html"), ("negative prompt", "06_pipeline.html#the-velocity-field"),
])  # fmt: skip
def test_search_finds_what_is_called_otherwise(open_page, home, words, first):
    page, _ = open_page(f"{home}/index.html")
    assert first in re.sub(r"\?[^#]*", "", search(page, words)[0])
    page.goto(f"{home}/{first}")
    assert not page.locator("main p[hidden]").is_visible()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draw.html", "05_transformer.html", "nano-card.html"])
def test_print_is_black_on_white_in_the_dark(open_page, home, name):
    page, _ = open_page(f"{home}/{name}", dark=True)
    page.emulate_media(media="print", color_scheme="dark")
    page.evaluate(STILL)
    text = "getComputedStyle(document.querySelector('main p')).color"
    assert page.evaluate(text) == "rgb(0, 0, 0)"
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(255, 255, 255)"
    page.wait_for_timeout(500)  # for the colors of code, which come by themselves
    assert page.evaluate(PALE) == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("name, place", [
    ("draw", "live-draw"), ("draw", "live-mistakes"), ("home", "live-draw-compact"), ("inside", "live-inside"),
    ("train", "live-toy"),
])  # fmt: skip
def test_nothing_jumps_when_a_living_part_comes(open_page, home, name, place, width):
    """The page keeps room for it, so that the text below stays where it is."""
    page, _ = open_page(f"{home}/{name}.html", width=width)
    page.wait_for_selector(".live button")
    page.wait_for_timeout(300)
    grown = "e => e.getBoundingClientRect().height - parseFloat(getComputedStyle(e).minHeight)"
    assert page.eval_on_selector(f"#{place}", grown) < 8


@pytest.mark.slow
def test_themes(open_page, home):
    """A reader's system decides; what is chosen in the menu stays for the next page."""
    chosen = "document.documentElement.className.match(/light|navy/)[0]"
    background = "getComputedStyle(document.documentElement).backgroundColor"
    page, log = open_page(f"{home}/glossary.html")
    choose_theme(page, "default_theme")
    assert page.evaluate(chosen) == "light"
    bright = page.evaluate(background)
    page.emulate_media(color_scheme="dark")
    page.goto(f"{home}/glossary.html")
    assert page.evaluate(chosen) == "navy" and page.evaluate(background) != bright
    choose_theme(page, "light")
    page.goto(f"{home}/05_transformer.html")
    assert page.evaluate(chosen) == "light" and page.evaluate(background) == bright
    choose_theme(page, "default_theme")
    assert page.evaluate(chosen) == "navy"
    assert log.errors == []


@pytest.mark.parametrize("name", ["draw.html", *slow("index.html", "solutions/03_text_encoder.html", "print.html")])
def test_the_first_tab_leads_to_the_content(open_page, home, name):
    """Past the sidebar's links and the menu, by keyboard; the address keeps what it holds."""
    page, log = open_page(f"{home}/{name}#prompt=a+boat")
    focused = "document.activeElement"
    page.keyboard.press("Tab")
    assert page.evaluate(f"{focused}.innerText") == "Skip to the content"
    left = page.evaluate(f"{focused}.getBoundingClientRect().left")
    assert 0 <= left < 50, "it is seen while it has the focus"
    page.keyboard.press("Enter")
    assert page.evaluate(f"{focused}.tagName") == "MAIN"
    assert page.evaluate("document.querySelector('.skip').getBoundingClientRect().right") < 0
    page.keyboard.press("Tab")
    assert page.evaluate(f"{focused}.closest('main') !== null && {focused}.tagName !== 'MAIN'")
    assert page.evaluate("location.hash") == "#prompt=a+boat" and log.errors == []


def test_the_sidebar_is_short(open_page, home):
    page, _ = open_page(f"{home}/03_text_encoder.html")
    shown = """[...document.querySelectorAll('#mdbook-sidebar li.chapter-item > span > a:not(.chapter-fold-toggle)')]
        .filter(e => e.offsetParent).map(e => e.innerText.trim())"""
    links = page.evaluate(shown)
    assert len(links) <= 29 and {"Solutions", "3. Text encoder"} <= set(links), links
    assert not [link for link in links if link.startswith("Solutions:") or "99" in link]
    page.goto(f"{home}/solutions/03_text_encoder.html")
    assert "Solutions: text encoder" in page.evaluate(shown), "unfolded where the reader is"


def test_the_next_page_is_the_next_chapter(open_page, home):
    page, _ = open_page(f"{home}/01_autoencoder.html")
    assert page.evaluate("document.querySelector('a.next').href").endswith("/02_position_ids.html")


@pytest.mark.slow
def test_the_page_to_print(open_page, home, pages):
    """All chapters on one page, with their pictures; links stay on it."""
    page, log = open_page(f"{home}/print.html")
    assert page.evaluate("document.querySelectorAll('main h1').length") >= len(PAGES)
    assert log.errors == []
