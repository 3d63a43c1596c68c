"""Turns notebooks into the pages of the site: the preprocessor named in book.toml, in mdBook's own protocol.

mdBook reads SUMMARY.md, which lists the notebooks themselves, and hands over all chapters as JSON; back goes
Markdown. A page shows what its notebook stores, since nothing is run here: prose, code, outputs, pictures.
Left out are the marks (`#| export`, nbval's and the formatter's comments) and the cells tagged `remove-cell`.

Formulas become MathML here, so that a reader needs neither JavaScript nor a network for them. The first use of a
word that the glossary explains becomes a link to it; `{{#api}}` becomes the reference made from the docstrings,
`{{#mistake …}}` one of the mistakes that the chapters draw with, `{{#part microklein.py 1}}` a part of a file.
A formula that cannot be translated, a link or a picture that leads nowhere, a picture without words for those who
do not see it, a page or a site that grew too heavy: each ends the build with a sentence. Notebooks are read as
plain JSON: `import nbformat` takes seconds.
"""

import base64
import hashlib
import html
import io
import json
import posixpath
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote, unquote

import api
import atlas
import live
from mathml import FORMULA, to_mathml

CODE = re.compile(
    r"^[ \t>]*(?P<fence>```+|~~~+).*?^[ \t>]*(?P=fence)[`~]*[ \t]*$"
    r"|(?<!`)(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)",
    re.M | re.S,
)
LINK = re.compile(
    r"(?P<picture>!\[(?P<alt>[^]]*))?(?P<opening>\]\(|^\[[^]]+\]: +|\b(?:src|href)=\")(?P<to>[^)\s\"]+)", re.M
)
MARKS = re.compile(r"^#( ?\|.*| NBVAL_.*)\n?|  # fmt: skip$", re.M)
PICTURES = ("image/png", "image/jpeg", "image/gif", "image/svg+xml")
PICTURE = re.compile(
    r'!\[(?P<alt>[^]]*)\]\((?P<to>[^)\s]+)\)|<img\b(?![^>]*\b(?:width|height)=)[^>]*\bsrc="(?P<src>[^"]+)"'
)
LARGER = (  # a click makes a picture larger: what mdBook itself writes, which leaves out the size
    '<label class="checkbox-label"><input class="checkbox-img" type="checkbox" aria-label="Show it larger">{}'
    '<span class="img-wrapper">{}</span></label>'
)
TERM_FREE = re.compile(  # where no word becomes a link: code, headings, links, formulas, tags
    CODE.pattern
    + r"|^[ >]*#[^\n]*|!?\[(?:`[^`]*`|[^][`])*\](?:\([^)]*\)|: [^\n]*)?|<(math|a|details)\b.*?</\3>|<[^>]*>",
    re.M | re.S,
)
GLOSSARY_ENTRY = re.compile(r"^### +(.+?) *\n\n(?:<!-- also: (.+?) -->\n\n)?(.+?)(?=\n\n|\Z)", re.M | re.S)
TERM_FREE_PAGES = ("glossary.md", "api.md", "changelog.md")
PAGE_BYTES, SITE_BYTES = 1_000_000, 32_000_000  # a page and the whole site may weigh this much, of which
FRAME_BYTES, FIXED_BYTES = 40_000, 5_000_000  # mdBook adds this: a page's frame; scripts, fonts, the search index
SOUGHT = {  # words that readers search for, by the page and heading that answer them in other words; nobody sees them
    "responsibility.md": {"Data, license and misuse": "license, licenses, licensing: the license, which license"},
    "02_position_ids.ipynb": {"Turning queries and keys": "RoPE, rope: rotary position embedding"},
    "06_pipeline.ipynb": {"The velocity field": "negative prompt"},
}
WIDGET = "application/vnd.jupyter.widget-view+json"


class Site:
    """All chapters, where their links lead, and what is wrong with them."""

    def __init__(self, root: Path, source: str, chapters: dict[str, str], scripts: str = ""):
        self.root, self.source, self.scripts = root, source, scripts
        self.anchors = {path: find_anchors(text) for path, text in chapters.items()}
        self.repository = re.search(r'^Repository = "(.+)"', (root / "pyproject.toml").read_text("utf-8"), re.M)[1]
        self.workbooks: set[str] = set()  # the pages whose chapters have one
        self.problems: list[str] = []
        self.pictures: dict[str, dict[str, int]] = {}  # per page: file names, and bytes
        self.terms = read_glossary(chapters.get("glossary.md", ""))
        self.unused: dict[str, set[str]] = {}  # per page: the terms that were not met yet
        words = "|".join(re.escape(word) for word in sorted(self.terms, key=len, reverse=True))
        self.words = re.compile(rf"(?<![\w-])(?:{words})(?![\w-])", re.I) if words else None

    def github_url(self, file: str) -> str:
        return f"{self.repository}/{'tree' if (self.root / file).is_dir() else 'blob'}/main/{quote(file)}"

    def resolve_link(self, target: str, page: str, where: str) -> str:
        """Where a link of a notebook leads on the site: to a page, to a file beside it, else to GitHub."""
        if re.match(r"[a-z][a-z\d+.-]*:|//", target):
            return target
        path, _, anchor = target.partition("#")
        file = posixpath.normpath(posixpath.join(posixpath.dirname(page), unquote(path))) if path else page
        chapter = next((p for p in self.anchors if file in (p, posixpath.splitext(p)[0] + ".html")), None)
        if chapter:
            if anchor and anchor not in self.anchors[chapter]:
                self.problems.append(f"{where}: {chapter} has no heading for the link {target}")
            return re.sub(r"\.ipynb(?=#|$)", ".html", target)
        stored = posixpath.normpath(f"{self.source}/{file}")
        if not (self.root / stored).exists():
            self.problems.append(f"{where}: {target} leads nowhere")
        copied = stored.startswith(f"{self.source}/") and not file.endswith(".ipynb")
        return target if copied else self.github_url(stored) + (f"#{anchor}" if anchor else "")

    def link_terms(self, text: str, page: str) -> str:
        """Markdown in which the first use of each term on a page leads to the glossary."""
        if not self.words or page in TERM_FREE_PAGES:
            return text
        unused = self.unused.setdefault(page, {anchor for anchor, _ in self.terms.values()})
        there = posixpath.relpath("glossary.html", posixpath.dirname(page) or ".")

        def mark(found: re.Match) -> str:
            anchor, meaning = self.terms[found[0].lower()]
            if anchor not in unused:
                return found[0]
            unused.remove(anchor)
            return f'<a class="term" href="{there}#{anchor}" title="{html.escape(meaning)}">{found[0]}</a>'

        return change_between(TERM_FREE, text, lambda part: self.words.sub(mark, part))


# Prose


def change_between(pattern: re.Pattern, text: str, change: Callable[[str], str]) -> str:
    """A text in which all that lies between the matches of a pattern is changed, and they are not."""
    done, start = [], 0
    for kept in pattern.finditer(text):
        done += [change(text[start : kept.start()]), kept[0]]
        start = kept.end()
    return "".join([*done, change(text[start:])])


def find_anchors(text: str) -> set[str]:
    """The names that mdBook gives to a page's headings, and those that it was told."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    found = set(re.findall(r'\bid="([^"]+)"', text))
    for title in re.findall(r"^#{1,6} +(.+?) *$", text, re.M):
        told = re.search(r"\{#(\S+)\}$", title)
        name = told[1] if told else slugify(title)
        found.add(next(n for n in (name, *(f"{name}-{i}" for i in range(1, 99))) if n not in found))
    return found


def slugify(title: str) -> str:
    title = FORMULA.sub(lambda found: to_mathml(found)[0], title)
    words = html.unescape(re.sub(r"\]\([^)]*\)|<[^>]*>", "", title)).strip().lower()
    return "".join(c for c in words.replace(" ", "-") if c.isalnum() or c in "-_")


def read_glossary(glossary: str) -> dict[str, tuple[str, str]]:
    """What the glossary explains: each word, and its plural, to the heading's anchor and the first sentence."""
    found = {}
    for title, also, text in GLOSSARY_ENTRY.findall(glossary):
        sentence = re.match(r".+?[.:;](?=\s|$)|.*", " ".join(text.split()))[0].rstrip(".:;") + "."
        meaning = "" if "$" in sentence else re.sub(r"\[([^]]+)\]\([^)]*\)|[*_`]", r"\1", sentence)
        for word in [title, *also.split(", ")] if also else [title]:
            found |= dict.fromkeys((word.lower(), f"{word.lower()}s"), (slugify(title), meaning))
    return found


def render_prose(text: str, page: str, where: str, site: Site) -> str:
    """Markdown with its links led to the site's pages and its formulas translated; code stays as it is."""

    def render(part: str) -> str:
        part = FORMULA.sub(lambda found: render_formula(found, where, site), part)  # first: $p[i](x)$ is no link
        part = LINK.sub(lambda found: rewrite_link(found, page, where, site), part)
        return PICTURE.sub(lambda found: add_size(found, page, site), part)

    return change_between(CODE, text, render)


def rewrite_link(found: re.Match, page: str, where: str, site: Site) -> str:
    if found["picture"] is not None and not found["alt"].strip():
        site.problems.append(f"{where}: the picture {found['to'][:60]} has no words: write ![what it shows](…)")
    return f"{found['picture'] or ''}{found['opening']}{site.resolve_link(found['to'], page, where)}"


def add_size(found: re.Match, page: str, site: Site) -> str:
    """A picture beside the chapters, with its size, so that the page does not jump while it loads."""
    target = found["to"] or found["src"]
    file = site.root / site.source / posixpath.dirname(page) / unquote(target)
    size = measure(file.read_bytes()) if file.is_file() else {}
    if not size:
        return found[0]
    said = " ".join(f'{side}="{pixels}"' for side, pixels in size.items())
    if found["src"]:
        return f"{found[0]} {said}"
    begins, ends = f'<img alt="{html.escape(found["alt"])}"', f' src="{target}">'
    return LARGER.format(f"{begins} {said}{ends}", begins + ends)


def measure(picture: bytes) -> dict[str, int]:
    """Width and height as the head of a picture tells them; nothing if it does not."""
    from PIL import Image  # here: mdBook's first question does not need it

    try:
        return dict(zip(("width", "height"), Image.open(io.BytesIO(picture)).size))
    except OSError:
        return {}


def render_formula(found: re.Match, where: str, site: Site) -> str:
    result, problem = to_mathml(found)
    if problem:
        site.problems.append(f"{where}: the formula {found[0]} does not translate to MathML ({problem})")
    return result


# Cells


# JupyterLab shows a quote that begins with a bold word as it is; mdBook makes a box of it.
BOX = re.compile(r"^> \*\*(Note|Warning|Tip|Important|Caution)\.\*\* ", re.M)


def render_notebook(notebook: dict, path: str, site: Site) -> str:
    """The Markdown of one notebook."""
    parts, heading, module, scripted = [], "", None, None
    for number, cell in enumerate(notebook["cells"], start=1):
        where = f"{site.source}/{path}, cell {number}"
        source, tags = "".join(cell["source"]), cell["metadata"].get("tags", [])
        if cell["cell_type"] == "markdown":
            source = BOX.sub(r"> [!\1]\n> ", source)
            scripted = scripted or "data-explorer=" in source
            heading = ([heading] + re.findall(r"^#+ +(.+)", source, re.M))[-1]
            parts.append(
                site.link_terms(render_prose(embed_attachments(source, cell, path, site), path, where, site), path)
            )
        elif cell["cell_type"] == "code":
            module = module or re.search(r"^#\| ?default_exp +(\w+)", source, re.M)
            if "remove-cell" in tags:
                continue
            shown = MARKS.sub("", source).strip("\n")
            if shown and "remove-input" not in tags:
                block = f"{fence_for(shown)}python\n{shown}\n{fence_for(shown)}"
                promoted = re.search(r"^#\| ?export", source, re.M)
                parts.append(f'<div class="promoted">\n\n{block}\n\n</div>' if promoted else block)
            if "remove-output" not in tags:
                first = shown.split("\n")[0]
                alt = cell["metadata"].get("alt") or (first[1:] if first.startswith("#") else f"Picture: {heading}")
                shown_below = render_outputs(cell["outputs"], alt.strip(" #*_`$."), path, where, site)
                explorer = live.EXPLORER.search(source)
                parts += [live.mark_still(output, explorer[1]) for output in shown_below] if explorer else shown_below
                scripted = scripted or explorer
    if scripted and site.scripts:
        parts.append(live.render_script("explorers", site.scripts))
    text = "\n\n".join(parts).replace("{{#", "\\{{#")  # mdBook would take it for an include
    title = re.search(r"^# .*$", text, re.M)
    position = title.end() if title else 0
    return "\n\n".join([text[:position], render_links(path, module and module[1], site), text[position:].lstrip("\n")])


def fence_for(source: str) -> str:
    """Backticks enough to hold a source that has some of its own."""
    return "`" * max([3, *(len(ticks) + 1 for ticks in re.findall("`{3,}", source))])


def embed_attachments(source: str, cell: dict, path: str, site: Site) -> str:
    """Prose with the pictures pasted into its cell, as HTML: mdBook would store a Markdown picture twice."""

    def paste(found: re.Match) -> str:
        mime, data = next(iter(cell.get("attachments", {}).get(unquote(found[2]), {}).items()), (None, None))
        if mime and found[1].strip():
            return render_picture(mime, data, found[1], {}, path, site)
        return found[0].replace("attachment:", "")

    return re.sub(r"!\[([^]]*)\]\(attachment:([^)]+)\)", paste, source)


def render_picture(mime: str, data: str | list[str], alt: str, size: dict, path: str, site: Site) -> str:
    """An HTML picture. It becomes a file, which the page to print shows as well.

    Its size, where that is known, keeps the page from jumping while it loads.
    """
    data = "".join(data)
    content = data.encode() if mime == "image/svg+xml" else base64.b64decode(data)
    size = size or measure(content)
    said = "".join(f' {side}="{pixels}"' for side, pixels in size.items())
    said += ' class="wide"' if size and size["width"] > 3 * size["height"] else ""
    name = f"{hashlib.sha256(content).hexdigest()[:16]}.{mime.removeprefix('image/').removesuffix('+xml')}"
    live.write_file(site.root / site.source / live.PICTURES / name, content)
    site.pictures.setdefault(path, {})[name] = len(content)
    source = posixpath.relpath(f"{live.PICTURES}/{name}", posixpath.dirname(path) or ".")
    return f'<p><img alt="{html.escape(alt)}"{said} src="{source}"></p>'


def render_outputs(stored: list[dict], alt: str, path: str, where: str, site: Site) -> Iterator[str]:
    """What a cell shows, the richest form of each: picture, table, Markdown, text."""
    pictures = sum(any(mime in output.get("data", {}) for mime in PICTURES) for output in stored)
    seen = 0
    for output in stored:
        data = output.get("data", {})
        mime = next((mime for mime in PICTURES if mime in data), None)
        if output["output_type"] == "error":
            yield render_text(f"{output['ename']}: {output['evalue']}", "output error")
        elif output["output_type"] == "stream":
            if output["name"] == "stdout":
                yield render_text("".join(output["text"]))
        elif WIDGET in data and not mime:
            if not pictures:
                yield '<p class="output">Something to play with stands here: open the notebook to use it.</p>'
        elif mime:
            seen += 1
            name = f"{alt} ({seen} of {pictures})" if pictures > 1 else alt
            size = output.get("metadata", {}).get(mime, {})
            yield f'<div class="output">{render_picture(mime, data[mime], name, size, path, site)}</div>'
        elif "text/html" in data:
            table = re.sub(r"<(script|style)\b.*?</\1>|\n\s*(?=\n)", "", "".join(data["text/html"]), flags=re.S)
            yield f'<div class="output">{table}</div>'
        elif "text/markdown" in data:
            text = render_prose("".join(data["text/markdown"]), path, where, site)
            yield f'<div class="output">\n\n{text}\n\n</div>'
        elif "text/latex" in data:
            yield render_prose("".join(data["text/latex"]), path, where, site)
        elif "text/plain" in data:
            yield render_text("".join(data["text/plain"]))


def render_text(text: str, kind: str = "output") -> str:
    text = re.sub(r"\x1b\[[\d;]*m", "", text).rstrip()
    return f'<pre class="{kind}">{html.escape(text)}</pre>' if text else ""


def render_links(path: str, module: str | None, site: Site) -> str:
    """The line below a chapter's title: where to open the notebook, the file that it writes, and what to do next."""
    project = site.repository.removeprefix("https://github.com/")
    file = f"{site.source}/{path}"
    colab = f"https://colab.research.google.com/github/{project}/blob/main/{quote(file)}"
    links = [
        f'<a href="{posixpath.basename(path)}" download>download</a>',
        f'<a href="{site.github_url(file)}">GitHub</a>',
        f'<a href="https://mybinder.org/v2/gh/{project}/main?urlpath=lab/tree/{quote(file)}">Binder</a>',
    ]
    if not path.startswith("solutions/") and path != "mlx_in_ten_cells.ipynb":
        links.append(f'<a href="{colab}" title="Its first cell installs what it needs">Colab</a>')
    if path in site.workbooks:
        about = "The same chapter, whose functions you write: see How to work through this book"
        opened = f"https://colab.research.google.com/github/{project}/blob/workbook/{quote(path)}"
        links[1:1] = [
            f'<a href="{live.WORKBOOK}/{path}" title="{about}" download>workbook</a>',
            f'<a href="{opened}" title="The workbook; its first cell installs what it needs">workbook in Colab</a>',
        ]
    texts = [f"This page is a notebook: {' · '.join(links)}."]
    if module:
        home = f"kleinlite/{module}.py"
        edge = '<span class="edge">an edge like this</span>'
        text = f'Cells with {edge} become <a href="{site.github_url(home)}"><code>{home}</code></a>'
        known = module in site.anchors.get("api.md", ())
        texts.append(f'{text} (<a href="api.html#{module}">reference</a>).' if known else f"{text}.")
    solutions, chapter = f"solutions/{path}", path.removeprefix("solutions/")
    if path != chapter and "exercises" in site.anchors.get(chapter, ()):
        texts.append(f'<a href="../{html_name(chapter)}#exercises">Back to the exercises</a>.')
    elif "exercises" in site.anchors[path]:
        answers = f' and <a href="{html_name(solutions)}">solutions</a>' if solutions in site.anchors else ""
        texts.append(f'At the end: <a href="#exercises">exercises</a>{answers}.')
    return f'<p class="doors">{" ".join(texts)}</p>'


def html_name(path: str) -> str:
    return posixpath.splitext(path)[0] + ".html"


# mdBook's protocol


def walk_chapters(items: list) -> Iterator[dict]:
    """Every chapter that has a file, at any depth."""
    for item in items:
        if isinstance(item, dict) and (chapter := item.get("Chapter")):
            if chapter["path"]:
                yield chapter
            yield from walk_chapters(chapter["sub_items"])


def markdown_of(notebook: dict) -> str:
    return "\n\n".join("".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "markdown")


def rewrite_book(context: dict, book: dict) -> list[str]:
    """Rewrites the chapters of a book in place; returns what is wrong with them."""
    from tools import questions, workbook  # here: they import MLX, which mdBook's first question does not need

    root, source = Path(context["root"]), context["config"]["book"]["src"]
    found = list(walk_chapters(book["items"]))
    alive = [c for c in found if c["path"].endswith(".md") and live.MARK.search(c["content"])]
    scripts, problems = live.prepare(root / source) if alive else ("", [])
    for chapter in alive:
        chapter["content"] = live.MARK.sub(lambda mark: live.render_place(mark, scripts), chapter["content"])
    notebooks = {c["path"]: json.loads(c["content"]) for c in found if c["path"].endswith(".ipynb")}

    def part(mark):
        return live.render_part(root / mark[1], mark[2])

    for chapter in found:
        if not chapter["path"].endswith(".md"):
            continue
        try:
            chapter["content"] = live.CODE.sub(lambda mark: live.render_excerpt(mark[1]), chapter["content"])
            chapter["content"] = live.PART.sub(part, chapter["content"])
        except LookupError as error:
            problems.append(f"{source}/{chapter['path']}: {error}")
        if "{{#changelog}}" in chapter["content"]:  # whose links are written for GitHub, from the folder above
            log = (root / "CHANGELOG.md").read_text("utf-8").replace(f"]({source}/", "](")
            chapter["content"] = chapter["content"].replace("{{#changelog}}", log)
        if "{{#api}}" in chapter["content"]:
            chapter["content"] = chapter["content"].replace("{{#api}}", api.render_reference(root / "kleinlite"))
    texts = {c["path"]: markdown_of(notebooks[c["path"]]) if c["path"] in notebooks else c["content"] for c in found}
    site = Site(root, source, texts, scripts)
    site.problems += problems
    site.workbooks = workbook.write_downloads(root / source / live.WORKBOOK, notebooks)
    for i, chapter in enumerate(found):
        path = chapter["path"]
        if path in notebooks:
            chapter["content"] = render_notebook(notebooks[path], path, site)
            chapter["content"] += f"\n\n{questions.render_questions(posixpath.splitext(path)[0])}"
        else:
            chapter["content"] = show_mistakes(chapter["content"], path, notebooks, site)
            chapter["content"] = site.link_terms(render_prose(chapter["content"], path, f"{source}/{path}", site), path)
        chapter["content"] = add_sought(chapter["content"], path, site)
        chapter["number"] = chapter_number(path) or ([98, i] if chapter.get("parent_names") else None)
    check_sizes({c["path"]: len(c["content"].encode()) for c in found}, site)
    if not site.problems:
        used = {name for names in site.pictures.values() for name in names}
        live.remove_others(root / source / live.PICTURES, used)
    return site.problems


def add_sought(text: str, path: str, site: Site) -> str:
    """A page with what `SOUGHT` has for it, for the search alone."""
    for heading, words in SOUGHT.get(path, {}).items():
        added, found = re.subn(
            rf"^(#+ {re.escape(heading)})$", rf"\1\n\n<p hidden>{words}</p>", text, count=1, flags=re.M
        )
        if not found:
            site.problems.append(f"{site.source}/{path} has no heading “{heading}” for the words of the search")
        text = added
    return text


def show_mistakes(text: str, path: str, notebooks: dict[str, dict], site: Site) -> str:
    """A page with the chapters' known mistakes that it asks for."""

    def show(data, alt, size):
        return render_picture("image/jpeg", data, alt, size, path, site)

    try:
        return atlas.insert_mistakes(text, notebooks, show)
    except LookupError as error:
        site.problems.append(f"{site.source}/{path}: {error}")
        return text


def chapter_number(path: str) -> list[int] | None:
    """05_transformer is chapter 5. mdBook nests by numbers, so pages below others need one, which nobody sees."""
    chapter = re.match(r"(?:solutions/)?(\d+)_", path)
    if path == "solutions.md":
        return [99]
    if path.startswith("solutions/"):
        return [99, int(chapter[1]) if chapter else 98]
    return [int(chapter[1])] if chapter and int(chapter[1]) else None


def check_sizes(pages: dict[str, int], site: Site) -> None:
    """Complain about a page that is too heavy, and about a site that is. Pictures are the usual reason."""
    for path, weight in pages.items():
        weight += sum(site.pictures.get(path, {}).values())
        if weight + FRAME_BYTES > PAGE_BYTES:
            site.problems.append(f"{site.source}/{path} makes a page of {weight / 1e6:.1f} MB, it may weigh 1 MB")
    folder = site.root / site.source
    beside = [f for f in folder.rglob("*") if f.is_file() and f.suffix != ".md"]
    beside = [f for f in beside if not f.is_relative_to(folder / live.FOLDER)]  # models have a limit of their own
    pictures = {name: size for names in site.pictures.values() for name, size in names.items()}
    total = 2 * sum(pages.values()) + FIXED_BYTES  # twice: the print page
    total += sum(pictures.values()) + sum(f.stat().st_size for f in beside)
    if total > SITE_BYTES:
        site.problems.append(f"The whole site would weigh {total / 1e6:.0f} MB, it may weigh {SITE_BYTES / 1e6:.0f} MB")


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["supports"]:
        return 0 if arguments[1:] == ["html"] else 1
    context, book = json.load(sys.stdin)
    problems = rewrite_book(context, book)
    for problem in problems:
        print(f"{problem}.", file=sys.stderr)
    if not problems:
        json.dump(book, sys.stdout)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
