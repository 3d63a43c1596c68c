"""The site: formulas, links, pictures and marks on the way from a notebook to a page, and the built pages."""

import html.parser
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

from kleinlite import book

ROOT = Path(__file__).resolve().parent.parent
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
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
    for file in ("notebooks/sketch.png", "notebooks/03_aside.ipynb", "kleinlite/demo.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()

    def chapter(path: str, content: str, *below: dict) -> dict:
        return {"Chapter": {"path": path, "content": content, "sub_items": list(below)}}

    def make(*cells):
        cells = [cell(c) if isinstance(c, str) else c for c in cells]
        pages = [
            chapter("01_demo.ipynb", json.dumps({"cells": cells})),
            chapter("02_more.ipynb", json.dumps({"cells": [cell("MD # More\n\n## The $\\mu$ of it")]})),
            chapter("glossary.md", "# Words\n\n## RoPE\n", chapter("deep.md", "[up](glossary.md#rope)")),
        ]
        context = {"root": str(tmp_path), "config": {"book": {"src": "notebooks"}}}
        items = [{"PartTitle": "One"}, *pages, "Separator", chapter(None, "")]
        problems = book.build(context, {"items": items})
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
    assert not problems and f'<p><img alt="a dot" src="data:image/png;base64,{PIXEL}"></p>' in text


# Cells


def test_marks_and_housekeeping_are_gone(make):
    text, _ = make(
        "MD # Title\n\nText.",
        "#| default_exp demo\n#| export\nimport math",
        "# NBVAL_CHECK_OUTPUT\n# a comment\nx = 1",
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
    assert text.count(f"data:image/png;base64,{PIXEL}") == 4 and "data:image/svg+xml;base64,PHN2Zz4KPC9zdmc+" in text
    assert "![" not in text and "Figure" not in text and "IPython" not in text


def test_a_widget_beside_a_picture_is_dropped(make):
    widget = shown(**{book.WIDGET: {"model_id": "f00"}, "text/plain": "IntSlider()"})
    assert "play" not in make(cell("x", widget, shown(image_png=PIXEL)))[0]
    text, _ = make(cell("x", widget))
    assert "open the notebook" in text and "IntSlider" not in text


def test_code_that_would_confuse_markdown_or_mdbook(make):
    text, _ = make('a = "```"', 'b = f"{{#x}}"')
    assert '````python\na = "```"\n````' in text and 'f"\\{{#x}}"' in text


# The protocol, and the pages as mdBook builds them


def test_protocol(monkeypatch, capsys):
    assert book.main(["supports", "html"]) == 0 and book.main(["supports", "epub"]) == 1
    chapter = {"Chapter": {"path": "a.md", "content": "[x](gone.md)", "sub_items": []}}
    context = {"root": str(ROOT), "config": {"book": {"src": "notebooks"}}}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps([context, {"items": [chapter]}])))
    assert book.main([]) == 1
    assert capsys.readouterr() == ("", "notebooks/a.md: gone.md leads nowhere.\n")


class Page(html.parser.HTMLParser):
    """What a built page links to, what it can be linked by, and its pictures."""

    def __init__(self, file: Path):
        super().__init__()
        self.links, self.ids, self.pictures, self.tags = [], set(), [], []
        self.feed(file.read_text("utf-8"))

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append(tag)
        self.ids.add(attributes.get("id"))
        if tag == "img":
            self.pictures.append(attributes)
        self.links += [attributes[name] for name in ("href", "src") if attributes.get(name)]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The book of this repository, built."""
    mdbook = shutil.which("mdbook", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if not mdbook:
        pytest.skip("mdbook is not installed: pip install -e '.[book]' brings it")
    target = tmp_path_factory.mktemp("site")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    result = subprocess.run(
        [mdbook, "build", "--dest-dir", str(target), str(ROOT)],
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return target


def test_every_link_of_the_site_leads_somewhere(site):
    pages = {file.name: Page(file) for file in site.glob("*.html")}
    assert len(pages) > 3
    for name, page in pages.items():
        for link in page.links:
            path, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", link) or name in ("404.html", "toc.html"):
                continue
            assert not path or (site / unquote(path)).exists(), f"{name}: {link}"
            if anchor and (path or name).endswith(".html"):
                assert unquote(anchor) in pages[unquote(path) or name].ids, f"{name}: {link}"


def test_the_site_needs_no_network_and_is_light(site):
    for file in site.glob("*.html"):
        assert not re.search(r'<(script|link|img|iframe)\b[^>]*(src|href)="(https?:)?//', file.read_text("utf-8")), (
            file.name
        )
        if file.name != "print.html":
            assert file.stat().st_size <= 1_000_000, f"{file.name} is heavier than 1 MB"
    assert sum(file.stat().st_size for file in site.rglob("*") if file.is_file()) <= 20_000_000


def test_pages_are_complete(site):
    for file in site.glob("*.html"):
        page, text = Page(file), file.read_text("utf-8")
        assert all(picture.get("alt", "").strip() for picture in page.pictures), file.name
        inside = re.sub(r"<(pre|code|script)\b.*?</\1>", "", text, flags=re.S)
        assert not re.search(r"\$\$|\\frac|\\begin\{", inside), f"{file.name} shows raw LaTeX"
        if file.name not in ("promotion.html", "print.html"):
            code = " ".join(re.findall(r"<pre>.*?</pre>", text, re.S))
            assert "#| " not in code and "NBVAL_" not in code, f"{file.name} shows a mark"


@pytest.mark.skipif(not shutil.which("chromium"), reason="chromium is not installed")
def test_nothing_scrolls_sideways_on_a_phone(site, tmp_path):
    """Every page in a frame of 390 pixels reports how wide it became, in one run of the browser."""
    report = (
        "<script>addEventListener('load',()=>parent.postMessage(location.pathname.split('/').pop()+' '"
        "+document.documentElement.scrollWidth,'*'))</script></body>"
    )
    shutil.copytree(site, tmp_path / "site")
    pages = [file for file in (tmp_path / "site").glob("*.html") if file.name not in ("toc.html", "print.html")]
    for file in pages:
        file.write_text(file.read_text("utf-8").replace("</body>", report), "utf-8")
    frames = "".join(f'<iframe width="390" height="800" src="{file.name}"></iframe>' for file in pages)
    listener = "<script>addEventListener('message',e=>document.body.append(e.data+';'))</script>"
    (tmp_path / "site" / "frames.html").write_text(f"<body>{listener}{frames}</body>")
    switches = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --dump-dom"
    result = subprocess.run(
        ["chromium", *switches.split(), f"--user-data-dir={tmp_path}/profile", "--virtual-time-budget=9000",
         "--window-size=1000,900", (tmp_path / "site" / "frames.html").as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    widths = dict(re.findall(r"([\w.]+\.html) (\d+);", result.stdout))
    assert set(widths) == {file.name for file in pages}
    assert {name: width for name, width in widths.items() if int(width) > 390} == {}
