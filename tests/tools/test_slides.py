"""A chapter's slides: every figure once, each guess before its figure, and nothing that leaves the screen."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

from tools import slides
from tools.slides import find_claims, find_question, first_sentence, make_deck, pictures_of

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))


@cache
def deck(path: Path) -> list[str]:
    return list(make_deck(json.loads(path.read_text("utf-8")), path.stem))


def shown(slide: str) -> str:
    """What the room sees."""
    return slide.partition("<aside")[0]


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_deck_has_its_chapters_parts(path):
    cells = json.loads(path.read_text("utf-8"))["cells"]
    made = deck(path)
    figures = [slide for slide in made if '<div class="figure">' in slide]
    prose = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    drawn = sum(bool(pictures_of(cell)) for cell in cells if cell["cell_type"] == "code")
    assert len(figures) == drawn + prose.count("![")
    for slide in figures:
        assert re.search(r'<p class="said">\S.{9,}</p>', shown(slide), re.S), "a figure without a sentence"
        assert "*The picture:*" not in slide and "<em>The picture:</em>" in slide
    for guess, behind in zip(made, made[1:]):
        assert 'class="guess"' not in guess or '<div class="figure">' in behind
    assert '<p class="asked">' in made[0] and "what to remember" in made[-3] and "<ul><li>" in made[-3]
    tasks = re.findall(r"^\d+\. ", prose.partition("## Exercises")[2], re.M)
    assert shown(made[-1]).count("<li>") == len(tasks) > 0
    links = [link for slide in made for link in re.findall(r'(?:href|src)="([^"]+)"', slide)]
    assert all(re.match("https:|data:|#", link) for link in links), "a deck stands alone"


def test_a_question_is_a_guess_with_what_it_needs():
    text = "## Steps\n\nOther things.\n\nOne is old. Three lines are wrong. Which will you see? Guess first."
    assert find_question(text) == ("Which will you see?", "One is old. Three lines are wrong.")
    assert find_question("Why so? Because.\n\nNow look.") == ("", "")
    assert find_question("It is 0.5 (Smith et al. 2020). Why?")[1] == "It is 0.5 (Smith et al. 2020)."


def test_a_figure_has_the_sentence_behind_it():
    assert first_sentence("It works. Where nano drew blobs, it draws crosses. More.") == (
        "It works. Where nano drew blobs, it draws crosses."
    )
    assert (
        first_sentence("- *One*: the prompt is gone by now.\n- *Two*: it stays.") == "*One*: the prompt is gone by now."
    )
    assert first_sentence("Does the text reach the picture? We try.") == "", "that is about the next figure"


def test_claims_are_what_to_remember_or_bold_sentences():
    told = "**A bold sentence stands here.**\n\n## Exercises\n\n## What to remember\n\nOne. Two is more.\n\n[Next](x)"
    assert find_claims(told) == ["One.", "Two is more."]
    assert find_claims("So **a real thing** is. **This is what we claim here.** **Is it what we claim?**") == [
        "This is what we claim here."
    ]
    assert find_claims("A start.\n\nAn end. So compare numbers.") == ["So compare numbers."]


STILL = """<!doctype html><meta charset="utf-8"><style>{style}
.reveal .slides section {{ position: relative; width: 1280px; height: 720px; }}
aside {{ display: none; }} * {{ margin: 0; }}
</style><div class="reveal"><div class="slides">{slides}</div></div>"""
OUTSIDE = """[...document.querySelectorAll("section")].map((slide, i) => {
  const box = slide.getBoundingClientRect();
  const parts = [...slide.querySelectorAll("h1, h2, p, li, img, iframe")].filter((part) => !part.closest("aside"));
  const out = parts.map((part) => part.getBoundingClientRect())
    .filter((part) => part.bottom > box.bottom - 8 || part.right > box.right - 8);
  return out.length ? i + 1 : 0;
}).filter((i) => i)"""


@pytest.mark.slow
@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_nothing_leaves_a_slide(path, open_page, tmp_path):
    """Laid out without reveal.js, which only enlarges what this page shows."""
    file = tmp_path / "deck.html"
    still = "\n".join(deck(path)).replace("data-src=", "title=")  # a living page would ask for the network
    file.write_text(STILL.format(style=slides.LOOKS, slides=still), "utf-8")
    page, log = open_page(file.as_uri(), width=1400)
    assert page.locator("section").count() == len(deck(path)) and log.errors == []
    assert page.evaluate(OUTSIDE) == []
