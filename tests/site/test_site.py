"""The site: formulas, links, pictures, words and marks on the way from a notebook to a page. Built: test_site.py."""

import base64
import html
import io
import json
import re
import sys
from pathlib import Path

import build as site
import pytest

ROOT = Path(__file__).resolve().parents[2]
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
GLOSSARY = """# Words

## Positions

### RoPE

<!-- also: rotary position embedding -->

Rotary *position* [embedding](#rope): turned pairs. More of it.

### Latent

What the autoencoder makes of a picture.

### Sigma

The share $x$ of noise. From 1 to 0.
"""
needs_latex = pytest.mark.skipif(
    not pytest.importorskip("importlib.util").find_spec("latex2mathml"),
    reason="pip install -e '.[book]' brings it",
)


def cell(source: str, *outputs: dict, **metadata) -> dict:
    kind = "markdown" if source.startswith("MD ") else "code"
    more = {"outputs": list(outputs)} if kind == "code" else {}
    return {"cell_type": kind, "source": source.removeprefix("MD "), "metadata": metadata, **more}


def shown(**data: str) -> dict:
    data = {mime.replace("_", "/"): value for mime, value in data.items()}
    return {"output_type": "display_data", "data": data, "metadata": {}}


@pytest.fixture
def make(tmp_path):
    """make("MD prose", "code", cell(…), …) → the page's Markdown, and the list of what is wrong."""
    (tmp_path / "pyproject.toml").write_text('Repository = "https://github.com/you/project"\n')
    for file in ("notebooks/sketch.png", "notebooks/03_aside.ipynb", "kleinlite/__init__.py", "kleinlite/demo.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()

    def chapter(path: str, content: str, *below: dict) -> dict:
        return {"Chapter": {"path": path, "content": content, "sub_items": list(below)}}

    def make(*cells):
        cells = [cell(c) if isinstance(c, str) else c for c in cells]
        pages = [
            chapter("01_demo.ipynb", json.dumps({"cells": cells})),
            chapter("02_more.ipynb", json.dumps({"cells": [cell("MD # More\n\n## The $\\mu$ of it")]})),
            chapter("glossary.md", GLOSSARY, chapter("deep.md", "[up](glossary.md#rope)")),
            chapter("api.md", "# Reference\n\n{{#api}}\n\n<a id='x'></a><div id=\"demo\"></div>"),
            chapter("solutions/01_demo.ipynb", json.dumps({"cells": [cell("MD # Solutions\n\nA latent.")]})),
        ]
        context = {"root": str(tmp_path), "config": {"book": {"src": "notebooks"}}}
        items = [{"PartTitle": "One"}, *pages, "Separator", chapter(None, "")]
        problems = site.rewrite_book(context, {"items": items})
        make.source = tmp_path / "notebooks"
        make.pages = {page["Chapter"]["path"]: page["Chapter"] for page in pages}
        return pages[0]["Chapter"]["content"], problems

    return make


def formulas(text: str) -> list[str]:
    """The text of every formula, without its tags."""
    found = re.findall(r"<math.*?</math>", text)
    return [html.unescape(re.sub(r"<[^>]+>", "", f)) for f in found]


# Formulas


@needs_latex
@pytest.mark.parametrize(
    "prose, expected",
    [
        ("$x_1$ and $y_{i,j}*z*w$", ["x1", "yi,j∗z∗w"]),
        ("$$\\begin{pmatrix} a \\\\ b \\end{pmatrix}$$", ["(ab)"]),
        ("$$\n\\frac{a}{b}\n$$", ["ab"]),
        ("> in a box\n> $$\n> x = y\n> $$\n> on", ["x=y"]),
        ("$a$, $b$-th and ($c$)", ["a", "b", "c"]),
        ("| $|x|$ | $a$ |\n|-|-|", ["|x|", "a"]),
        ("$\\begin{aligned} a &= b \\\\ c &= d \\end{aligned}$", ["a=bc=d"]),
        ("it costs $5 and then $10", []),
        ("it costs \\$5 or 5\\$ a piece", []),
        ("US$5 against $ 5 $", []),
        ("US$5 or CAN$ 6; $5 or $ 6; from $5,$6 on", []),
        ("(\\$5,$x$)", ["x"]),
        ("`$x$` and ``$y$ ` `` and\n\n```bash\necho $HOME $PATH\n```\n\n$z$", ["z"]),
        ("~~~\n$a$\n~~~", []),
    ],
)
def test_what_is_a_formula(make, prose, expected):
    text, problems = make(f"MD {prose}")
    assert not problems
    assert [f.replace("*", "∗") for f in formulas(text)] == expected
    outside = re.sub(r'<span class="formula">|</span>|<math.*?</math>', "", text)
    if not expected:
        assert prose in text, "prose and code without formulas stay as they are"
    assert "\\frac" not in outside


@needs_latex
def test_markdown_cannot_touch_a_formula(make):
    """No line break, and no character between the tags that Markdown gives a meaning."""
    text, problems = make("MD $$\nx_{1}*y_{2}*z^* \\mid [a](b) < \\text{c_d_e} | f - \\#1\n$$")
    (formula,) = re.findall(r"<math.*?</math>", text)
    assert not problems and not set("*_[]()|`#!~") & set(re.sub(r"<[^>]+>|&#\d+;", "", formula))


@needs_latex
@pytest.mark.parametrize(
    "latex",
    ["\\frac{1}{", "\\unheardof x", "a & b", "a \\\\ b", "\\left( x", "\\begin{gather} x \\end{gather}"],
)
def test_a_formula_that_does_not_translate(make, latex):
    text, problems = make(cell("1"), f"MD $${latex}$$")
    (problem,) = problems
    assert problem.startswith(f"notebooks/01_demo.ipynb, cell 2: the formula $${latex}$$ does not translate")


# Links and pictures in the prose


@pytest.mark.parametrize(
    "target, there",
    [
        ("02_more.ipynb", "02_more.html"),
        ("02_more.ipynb#more", "02_more.html#more"),
        ("#home", "#home"),
        ("glossary.md#rope", "glossary.md#rope"),
        ("deep.md", "deep.md"),
        ("sketch.png", "sketch.png"),
        ("03_aside.ipynb", "https://github.com/you/project/blob/main/notebooks/03_aside.ipynb"),
        ("../kleinlite/demo.py#L3", "https://github.com/you/project/blob/main/kleinlite/demo.py#L3"),
        ("../kleinlite", "https://github.com/you/project/tree/main/kleinlite"),
        ("https://example.org/a#b", "https://example.org/a#b"),
    ],
)
def test_links(make, target, there):
    text, problems = make(f'MD # Home\n\n[a `word`]({target}) <a href="{target}">b</a>\n\n[c]: {target}')
    assert not problems
    assert f"[a `word`]({there})" in text and f'href="{there}"' in text and f"[c]: {there}" in text


@needs_latex
def test_a_link_to_a_heading_with_a_formula(make):
    assert not make("MD [x](02_more.ipynb#the-μ-of-it)")[1]


@pytest.mark.parametrize(
    "prose, problem",
    [
        ("[x](04_gone.ipynb)", "04_gone.ipynb leads nowhere"),
        ("[x](../kleinlite/gone.py)", "../kleinlite/gone.py leads nowhere"),
        ("[x](02_more.ipynb#less)", "02_more.ipynb has no heading for the link 02_more.ipynb#less"),
        ("[x](#less)", "01_demo.ipynb has no heading for the link #less"),
        ("![a cat](gone.png)", "gone.png leads nowhere"),
        ('<img alt="a" src="gone.png">', "gone.png leads nowhere"),
        ("![](sketch.png)", "the picture sketch.png has no words: write ![what it shows](…)"),
        ("![a](attachment:gone.png)", "gone.png leads nowhere"),
    ],
)
def test_a_link_or_a_picture_that_is_broken(make, prose, problem):
    assert make("1", f"MD {prose}")[1] == [f"notebooks/01_demo.ipynb, cell 2: {problem}"]


def test_links_in_code_are_left_alone(make):
    text, problems = make("MD `[x](gone.md)`\n\n```\n[y](gone.md)\n```", "a = '[z](gone.md)'")
    assert not problems and text.count("gone.md") == 3


def test_a_picture_pasted_into_a_cell(make):
    pasted = cell("MD # T\n\n![a dot](attachment:dot.png)") | {"attachments": {"dot.png": {"image/png": PIXEL}}}
    text, problems = make(pasted)
    assert not problems
    (file,) = re.findall(r'<p><img alt="a dot" width="1" height="1" src="(live/pictures/\w+\.png)"></p>', text)
    assert (make.source / file).read_bytes() == base64.b64decode(PIXEL)


# Cells


def test_marks_and_housekeeping_are_gone(make):
    text, _ = make(
        "MD # Title\n\nText.",
        "#| default_exp demo\n#| export\nimport math",
        "# NBVAL_CHECK_OUTPUT\n# a comment\nx = 1  # fmt: skip",
        "#| hide",
        cell("secret = 1", tags=["remove-cell"]),
        cell("no_source()", shown(text_plain="seen"), tags=["remove-input"]),
        cell("no_output()", shown(text_plain="unseen"), tags=["remove-output"]),
    )
    assert not re.search(r"#\||NBVAL|secret|no_source|unseen|default_exp", text)
    assert '<div class="promoted">\n\n```python\nimport math\n```\n\n</div>' in text
    assert "```python\n# a comment\nx = 1\n```" in text and '<pre class="output">seen</pre>' in text
    assert text.count("```") == 6


def test_the_doors(make):
    text, _ = make("MD # Title\n\nText.", "#| default_exp demo")
    title, doors, rest = text.split("\n\n", 2)
    assert title == "# Title" and rest.startswith("Text.")
    for target in (
        "01_demo.ipynb",
        "https://github.com/you/project/blob/main/notebooks/01_demo.ipynb",
        "https://github.com/you/project/blob/main/kleinlite/demo.py",
        "https://mybinder.org/v2/gh/you/project/main?urlpath=lab/tree/notebooks/01_demo.ipynb",
        "https://colab.research.google.com/github/you/project/blob/main/notebooks/01_demo.ipynb",
    ):
        assert f'href="{target}"' in doors
    assert "kleinlite/" not in make("MD # Title")[0], "a notebook without a module names none"


def test_outputs(make):
    stream = {"output_type": "stream", "name": "stdout", "text": ["a < b\n", "\n", "\x1b[31mred\x1b[0m\n"]}
    noise = {"output_type": "stream", "name": "stderr", "text": "warning"}
    error = {"output_type": "error", "ename": "ValueError", "evalue": "no", "traceback": ["long"]}
    table = shown(text_html="<table>\n\n<tr><td>1</td></tr></table><script>x</script>", text_plain="plain")
    text, _ = make(cell("x", stream, noise, error, table, shown(text_markdown="**bold**", text_plain="no")))
    assert '<pre class="output">a &lt; b\n\nred</pre>' in text
    assert '<pre class="output error">ValueError: no</pre>' in text
    assert '<div class="output"><table>\n<tr><td>1</td></tr></table></div>' in text and "**bold**" in text
    assert not re.search("warning|long|script|plain|>no<", text)


def test_pictures_are_there_once_and_have_words(make):
    dot = {"image/png": PIXEL[:40] + "\n" + PIXEL[40:] + "\n", "text/plain": "<Figure>"}
    text, _ = make(
        "MD ## The `grid`",
        cell("plot()", shown(**dot)),
        cell("# sixteen angles\nplot()", shown(**dot), shown(**dot)),
        cell("# not this\nplot()", shown(**dot), alt='A "red" dot.'),
        cell("x", shown(**{"image/svg+xml": "<svg>\n</svg>", "text/plain": "<IPython…>"})),
    )
    assert re.findall('alt="(.*?)"', text) == [
        "Picture: The `grid",
        "sixteen angles (1 of 2)",
        "sixteen angles (2 of 2)",
        "A &quot;red&quot; dot",
        "Picture: The `grid",
    ]
    (dot,) = set(re.findall(r'src="(live/pictures/\w+\.png)"', text))
    assert text.count(dot) == 4, "one picture is one file"
    (drawing,) = re.findall(r'src="(live/pictures/\w+\.svg)"', text)
    assert (make.source / drawing).read_text("utf-8") == "<svg>\n</svg>"
    assert {file.name for file in (make.source / "live/pictures").iterdir()} == {Path(dot).name, Path(drawing).name}
    assert "![" not in text and "Figure" not in text and "IPython" not in text


def test_a_picture_is_as_large_as_its_notebook_says(make):
    """It may have more pixels than its place on the page: good screens show them all."""
    sharp = shown(image_png=PIXEL) | {"metadata": {"image/png": {"width": 40, "height": 10}}}
    photo = shown(image_jpeg="JPEG") | {"metadata": {"image/jpeg": {"width": 20, "height": 10}}}
    text, _ = make(cell("x", sharp, photo))
    assert 'width="40" height="10" class="wide" src="live/pictures/' in text
    assert 'width="20" height="10" src="live/pictures/' in text


def test_a_widget_beside_a_picture_is_dropped(make):
    widget = shown(**{site.WIDGET: {"model_id": "f00"}, "text/plain": "IntSlider()"})
    assert "play" not in make(cell("x", widget, shown(image_png=PIXEL)))[0]
    text, _ = make(cell("x", widget))
    assert "open the notebook" in text and "IntSlider" not in text
    both = shown(**{site.WIDGET: {"model_id": "f00"}, "image/png": PIXEL, "text/plain": "Panel()"})
    text, _ = make(cell("x", both, alt="A still picture"))  # saved by JupyterLab, not cleaned yet
    assert (
        'alt="A still picture"' in text and "live/pictures/" in text and not re.search("open the notebook|Panel", text)
    )


def test_code_that_would_confuse_markdown_or_mdbook(make):
    text, _ = make('a = "```"', 'b = f"{{#x}}"')
    assert '````python\na = "```"\n````' in text and 'f"\\{{#x}}"' in text


# Words of the glossary


def terms(text: str) -> list[tuple[str, ...]]:
    return re.findall(r'<a class="term" href="(.*?)" title="(.*?)">(.*?)</a>', text)


def test_the_first_use_of_a_word_leads_to_the_glossary(make):
    text, problems = make(
        "MD # RoPE\n\nSome RoPE, `rope`, more rope.\n\n> And **latents**, a latent; sigmas.", "rope = 1"
    )
    assert not problems and terms(text) == [
        ("glossary.html#rope", "Rotary position embedding.", "RoPE"),
        ("glossary.html#latent", "What the autoencoder makes of a picture.", "latents"),
        ("glossary.html#sigma", "", "sigmas"),
    ]
    assert "# RoPE\n" in text and "**<a class" in text
    [(target, *_)] = terms(make.pages["solutions/01_demo.ipynb"]["content"])
    assert target == "../glossary.html#latent"


def test_other_words_and_places_are_left_alone(make):
    text, _ = make(
        "MD # T\n\n[the `x` of RoPE](glossary.md#rope) <b title='latent'>x</b> europe Latent-like [a latent][1]\n"
        "<a href='#t'>sigma</a>\n\n```\nlatent\n```\n\n[1]: deep.md 'a latent'"
    )
    assert not terms(text)
    assert terms(make("MD a rotary position embedding")[0])[0][2] == "rotary position embedding"
    assert not terms(make.pages["glossary.md"]["content"]), "the glossary does not explain itself with itself"


# The order of the pages, and their weight


def test_numbers_are_those_of_the_notebooks(make):
    make("MD # T")
    numbers = {path: page["number"] for path, page in make.pages.items()}
    assert numbers == {
        "01_demo.ipynb": [1], "02_more.ipynb": [2], "glossary.md": None, "api.md": None,
        "solutions/01_demo.ipynb": [99, 1],
    }  # fmt: skip
    assert site.chapter_number("00_idea.ipynb") is None and site.chapter_number("solutions.md") == [99]
    assert site.chapter_number("solutions/flux3.ipynb") == [99, 98], "below the others' solutions"


def test_exercises_and_solutions_know_each_other(make):
    text, problems = make("MD # Title\n\nText.\n\n## Exercises", "#| default_exp demo")
    assert '<a href="#exercises">exercises</a> and <a href="solutions/01_demo.html">solutions</a>' in text
    assert '(<a href="api.html#demo">reference</a>)' in text
    answers = make.pages["solutions/01_demo.ipynb"]["content"]
    assert '<a href="../01_demo.html#exercises">' in answers and 'href="01_demo.ipynb" download' in answers
    assert not problems and "xercises" not in make("MD # Title")[0]


def test_what_is_too_heavy(make, tmp_path):
    dot = shown(image_png=PIXEL[:40] + "A" * 1_300_000)
    assert make(cell("x", dot))[1] == ["notebooks/01_demo.ipynb makes a page of 1.0 MB, it may weigh 1 MB"]
    (tmp_path / "notebooks" / "film.gif").write_bytes(bytes(28_000_000))
    assert make("1")[1] == ["The whole site would weigh 33 MB, it may weigh 32 MB"]


PARTS = """# A file in parts.

# ---- 1. Arrays
x = "{{#js nothing}} costs $5, $6"

# ---- 2. All together
print(x)
"""


def test_a_part_of_a_file(tmp_path):
    """From its line to the next part's, as code that nobody touches; one that is not there ends the build."""
    (tmp_path / "pyproject.toml").write_text('Repository = "https://github.com/you/project"\n')
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "small.py").write_text(PARTS)

    def build(text):
        chapter = {"path": "small.md", "content": text, "sub_items": []}
        context = {"root": str(tmp_path), "config": {"book": {"src": "notebooks"}}}
        return site.rewrite_book(context, {"items": [{"Chapter": chapter}]}), chapter["content"]

    problems, text = build("# Small\n\n{{#part small.py 2}}\n\nand\n\n{{#part small.py 1}}\n")
    first, last = PARTS.split("\n", 2)[2].split("\n\n")
    assert problems == [] and text == f"# Small\n\n```python\n{last.strip()}\n```\n\nand\n\n```python\n{first}\n```\n"
    assert build("{{#part small.py 3}}")[0] == ["notebooks/small.md: there is no part 3 of small.py to show"]
    assert build("{{#part gone.py 1}}")[0] == ["notebooks/small.md: there is no part 1 of gone.py to show"]


# mdBook's protocol


def test_protocol(monkeypatch, capsys):
    assert site.main(["supports", "html"]) == 0 and site.main(["supports", "epub"]) == 1
    chapter = {"Chapter": {"path": "a.md", "content": "[x](gone.md)", "sub_items": []}}
    context = {"root": str(ROOT), "config": {"book": {"src": "notebooks"}}}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps([context, {"items": [chapter]}])))
    assert site.main([]) == 1
    assert capsys.readouterr() == ("", "notebooks/a.md: gone.md leads nowhere.\n")
