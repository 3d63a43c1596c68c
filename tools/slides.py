"""A deck of slides for each chapter, made from its notebook: what it asks, shows, claims, and leaves to the reader.

    python -m tools.slides 05 14    slides/05_transformer.html and slides/14_lora.html; without names, all

A figure's slide has the sentence behind it. If the prose before asks something, that question has a slide of its own,
so that a room can guess first. Speaker notes (press S) are the chapter's paragraphs. reveal.js, fetched once by deno,
goes into each file: a deck opens anywhere, without a network. Only the living pages of the site need one.
"""

import argparse
import base64
import html
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import mistune
from PIL import Image

from tools.notebooks import ROOT, find_notebooks, text_of
from tools.questions import read_questions
from tools.workbook import SITE, link_to_site

sys.path.insert(0, str(ROOT / "site"))
from mathml import FORMULA, to_mathml

REVEAL = "6.0.2"
FILES = ROOT / ".venv" / f"reveal-{REVEAL}"
WIDTH, HEIGHT = 1280, 720
SENTENCE = re.compile(r"(?:\$[^$]*\$|`[^`]*`|.)+?(?<! al)(?<!vs)(?<!e\.g)[.!?][*_”\")]*(?=\s|$)", re.S)
CLAIM = re.compile(r"\*\*([A-Z][^*]+[.!])\*\*")
REMEMBER = re.compile(r"^## What to remember\n+(.+?)(?=\n\n)", re.M | re.S)
LIVE = re.compile(r"\]\((?:\S*/)?(draw|inside|train)\.(?:md|html)(#[\w-]+)?\)")  # pages that run by themselves
PICTURES = ("image/png", "image/jpeg")
STORED = re.compile(r"!\[([^]]+)\]\((images/[\w.-]+)\)")  # a picture that stands in the prose
LOOKS = """
.reveal { font: 36px/1.35 system-ui, sans-serif; color: #1d1f24; }
.reveal-viewport { background: #fffefb; }
.reveal .slides { text-align: left; }
.reveal .slides section { height: 100%; padding: 24px 48px; box-sizing: border-box; }
.reveal h1 { font-size: 76px; line-height: 1.15; margin: 120px 0 40px; }
.reveal h2 { font-size: 24px; font-weight: 600; color: #5a6170; margin: 0 0 20px; }
.reveal .asked { font-size: 46px; line-height: 1.3; margin: 0; }
.reveal .guess { display: flex; flex-direction: column; justify-content: center; gap: 36px; height: 540px; }
.reveal .figure { display: flex; flex-direction: column; gap: 8px; height: 470px; }
.reveal .figure img { flex: 1 1 0; min-height: 0; width: 100%; object-fit: contain; margin: 0; }
.reveal .said { font-size: 32px; line-height: 1.3; margin: 16px 0 0; }
.reveal .beside { display: flex; gap: 40px; align-items: center; }
.reveal .beside .figure { flex: 0 0 760px; height: 600px; }
.reveal iframe { width: 100%; height: 540px; border: 0; }
.reveal :is(ul, ol) { margin: 0; padding-left: 1.4em; }
.reveal li { margin: 0 0 16px; }
.reveal ol li { font-size: 27px; line-height: 1.3; margin-bottom: 12px; }
.reveal strong { font-weight: 700; }
.reveal em { font-style: italic; }
.reveal a { color: #2458a6; }
.reveal code { font-size: 0.9em; background: #f7f3ea; padding: 0 0.2em; }
.reveal .slide-number { right: auto; left: 8px; font-size: 16px; background: none; color: #5a6170; }
"""
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
<div class="reveal"><div class="slides">
{slides}
</div></div>
<script>{script}</script>
<script>
Reveal.initialize({{ width: {width}, height: {height}, margin: 0, center: false, hash: true, controls: false,
  slideNumber: "c/t", transition: "none", plugins: [RevealNotes] }});
</script>
</html>
"""


class Picture(NamedTuple):
    mime: str
    data: str


def to_html(text: str) -> str:
    """Markdown of a chapter as HTML without its pictures: formulas in MathML, links to the site."""
    text = STORED.sub("", text)
    text = FORMULA.sub(lambda found: to_mathml(found)[0], link_to_site(text))
    return mistune.create_markdown(escape=False, plugins=["table"])(text)


def to_line(text: str) -> str:
    """A sentence as HTML without a paragraph around it."""
    return re.sub(r"^<p>|</p>$", "", to_html(" ".join(text.split())).strip())


def paragraphs(text: str) -> list[str]:
    """The paragraphs of prose: no headings, tables, formulas, boxes or HTML; of a list, its first item."""
    blocks = [block.removeprefix("- ").split("\n- ")[0] for block in re.split(r"\n\s*\n", text.strip()) if block]
    return [block for block in blocks if not block.startswith(("#", "|", "$$", "<", "```", ">", "!["))]


def sentences(text: str) -> list[str]:
    return [sentence.strip() for sentence in SENTENCE.findall(text)]


def is_question(sentence: str) -> bool:
    return sentence.rstrip('*_”")').endswith("?")


def find_question(text: str) -> tuple[str, str]:
    """What the last paragraph of a text asks, and up to fifty words of what it says before; "" if it asks nothing."""
    found = sentences((paragraphs(text) or [""])[-1])
    asked = [sentence for sentence in found if is_question(sentence)][-2:]
    told = found[: found.index(asked[0])] if asked else []
    while len(" ".join(told).split()) > 50:
        told = told[1:]
    return " ".join(asked), " ".join(told)


def first_sentence(text: str) -> str:
    """The sentence that a text opens with, two if the first has fewer than six words; "" if it asks."""
    found = sentences((paragraphs(text) or [""])[0])
    if not found or is_question(found[0]):
        return ""
    return found[0] if len(found[0].split()) > 5 else " ".join(found[:2])


def pictures_of(cell: dict) -> list[Picture]:
    shown = [output.get("data", {}) for output in cell.get("outputs", [])]
    return [Picture(mime, text_of(data[mime])) for data in shown for mime in PICTURES if mime in data]


def section(opening: str, body: str, notes: str = "") -> str:
    """A slide; opening: the small line above; notes: Markdown that only the speaker sees."""
    aside = f'<aside class="notes">{to_html(notes)}</aside>' if notes else ""
    return f"<section>\n<h2>{to_line(opening)}</h2>\n{body}\n{aside}</section>"


def figure(opening: str, pictures: list[Picture], alt: str, said: str, notes: str) -> str:
    """A slide with what one cell has drawn, and a sentence."""
    shown = "".join(f'<img alt="{html.escape(alt)}" src="data:{p.mime};base64,{p.data}">' for p in pictures)
    body = f'<div class="figure">{shown}</div><p class="said">{to_line(said)}</p>'
    if len(pictures) == 1 and is_tall(pictures[0]):
        body = f'<div class="beside">{body}</div>'
    return section(opening, body, f"{notes}\n\n*The picture:* {alt}")


def is_tall(picture: Picture) -> bool:
    """Whether a picture gains by standing beside its sentence and not above it."""
    width, height = Image.open(io.BytesIO(base64.b64decode(picture.data))).size
    return width < 1.3 * height


def exercises(text: str) -> list[str]:
    """The exercises of a chapter: each its bold name and what it asks first."""
    found = re.findall(r"^\d+\. (.+(?:\n(?!\d+\. |\n|#).*)*)", text, re.M)
    return [" ".join(sentences(item)[:3]) for item in found]


def listed(kind: str, items: list[str]) -> str:
    return f"<{kind}>{''.join(f'<li>{to_line(item)}</li>' for item in items)}</{kind}>"


def find_claims(text: str) -> list[str]:
    """What a chapter says one should remember; else its bold sentences, else the one before its exercises."""
    if told := REMEMBER.search(text):
        return sentences(told[1])
    read = text.partition("\n## Exercises")[0]
    return [claim for claim in CLAIM.findall(read) if len(claim.split()) > 4] or sentences(paragraphs(read)[-1])[-1:]


def make_deck(notebook: dict, name: str) -> Iterator[str]:
    """The slides of a chapter; name: "05_transformer"."""
    cells = notebook["cells"]
    text = "\n\n".join(text_of(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    last = text.partition("\n## Exercises")[2].partition("\n## ")[0]
    title = re.match(r"# (.+)", text)[1]
    asked = re.search(r"^> (.+(?:\n> .+)*)", text, re.M)[1].replace("\n> ", " ")
    page = f"{SITE}{name}.html"
    chapter = f"kleinlite, chapter {int(name[:2])}"
    promise = text_of(cells[0]["source"])
    yield section(chapter, f'<h1>{to_line(title)}</h1><p class="asked">{to_line(asked)}</p>', promise)
    heading = title
    before = promise
    for place, cell in enumerate(cells):
        source = text_of(cell["source"])
        if cell["cell_type"] == "markdown":
            if place and "## Exercises" not in source:
                headings = re.findall(r"^##+ (.+)", source, re.M)
                heading = headings[-1] if headings else heading
                before = source
            for alt, file in STORED.findall(source):
                data = base64.b64encode((ROOT / "notebooks" / file).read_bytes()).decode()
                yield figure(f"{title} · {heading}", [Picture("image/png", data)], alt, alt, source)
            for living in LIVE.finditer(source.partition("## Exercises")[0]):
                address = f"{SITE}{living[1]}.html?embed=large{living[2] or ''}"
                link = f'<p class="said"><a href="{address}">{address}</a></p>'
                yield section(f"{title} · live", f'<iframe data-src="{address}"></iframe>{link}', source)
            continue
        pictures = pictures_of(cell)
        if not pictures:
            continue
        opening = title if heading == title else f"{title} · {heading}"
        question, told = find_question(before)
        if question:
            guess = f'<p class="said">{to_line(told)}</p><p class="asked">{to_line(question)}</p>'
            yield section(opening, f'<div class="guess">{guess}</div>', before)
        behind = find_behind(cells, place)
        alt = cell["metadata"].get("alt", heading)
        yield figure(opening, pictures, alt, first_sentence(behind) or alt, f"{'' if question else before}\n\n{behind}")
        before = ""
    yield section(f"{title} · what to remember", listed("ul", find_claims(text)))
    once_more = read_questions().get(name, [])
    answers = "\n\n".join(f"**{ask}** {answer}" for ask, answer in once_more)
    yield section(f"{title} · think once more", listed("ul", [ask for ask, _ in once_more]), answers)
    if tasks := exercises(last):
        solutions = f'<p class="said"><a href="{SITE}solutions/{name}.html">Solutions</a></p>'
        yield section(f'{title} · <a href="{page}#exercises">exercises</a>', listed("ol", tasks) + solutions, last)


def find_behind(cells: list[dict], place: int) -> str:
    """The prose behind a figure, up to the next figure; "" if there is none."""
    for cell in cells[place + 1 :]:
        if cell["cell_type"] == "markdown":
            return re.split(r"^##", text_of(cell["source"]), maxsplit=1, flags=re.M)[0]
        if pictures_of(cell):
            return ""
    return ""


def fetch_reveal() -> Path:
    """The folder of reveal.js, brought by deno the first time."""
    if not (found := FILES / "node_modules" / "reveal.js" / "dist").exists():
        FILES.mkdir(parents=True, exist_ok=True)
        wanted = {"nodeModulesDir": "auto", "imports": {"reveal.js": f"npm:reveal.js@{REVEAL}"}}
        (FILES / "deno.json").write_text(json.dumps(wanted), "utf-8")
        subprocess.run([Path(sys.executable).with_name("deno"), "install", "-q"], cwd=FILES, check=True)
    return found


def render_page(slides: list[str], title: str, reveal: Path) -> str:
    """The whole deck as one file."""
    style = "".join((reveal / name).read_text("utf-8") for name in ("reset.css", "reveal.css")) + LOOKS
    scripts = [(reveal / name).read_text("utf-8") for name in ("reveal.js", "plugin/notes.js")]
    script = "\n".join(scripts).replace("</script", "<\\/script")
    shown = "\n".join(slides)
    return PAGE.format(title=title, style=style, slides=shown, script=script, width=WIDTH, height=HEIGHT)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write a deck of slides for each chapter.")
    parser.add_argument("chapters", nargs="*", metavar="CHAPTER", help="its number or name (default: all)")
    chosen = find_notebooks(parser.parse_args(argv).chapters)
    folder = ROOT / "slides"
    folder.mkdir(exist_ok=True)
    reveal = fetch_reveal()
    for path in chosen:
        if path.parent.name != "notebooks" or not path.stem[:2].isdecimal():
            continue
        slides = list(make_deck(json.loads(path.read_text("utf-8")), path.stem))
        (folder / f"{path.stem}.html").write_text(render_page(slides, path.stem, reveal), "utf-8", newline="\n")
        print(f"slides/{path.stem}.html: {len(slides)} slides")


if __name__ == "__main__":
    main()
