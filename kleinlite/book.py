"""Turns notebooks into the pages of the site: the preprocessor named in book.toml, in mdBook's own protocol.

mdBook reads SUMMARY.md, which lists the notebooks themselves, and hands over all chapters as JSON; back goes
Markdown. A page shows what its notebook stores, since nothing is run here: prose, code, outputs, pictures.
Left out are the marks (`#| export`, nbval's comments) and the cells tagged `remove-cell`.

Formulas become MathML here, so that a reader needs neither JavaScript nor a network for them. A formula that
cannot be translated, a link or a picture that leads nowhere, a picture without words for those who do not see
it: each ends the build with a sentence. Notebooks are read as plain JSON: `import nbformat` takes seconds.
"""

from __future__ import annotations

import base64
import html
import json
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote

CODE = re.compile(
    r"^[ \t>]*(?P<fence>```+|~~~+).*?^[ \t>]*(?P=fence)[`~]*[ \t]*$"
    r"|(?<!`)(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)",
    re.M | re.S,
)
FORMULA = re.compile(
    r"\\\$"  # a dollar sign that is meant as one
    r"|\$\$(?P<block>(?:\\.|[^$\\])+)\$\$"
    r"|(?<![\w$])\$(?!\s)(?P<inline>(?:\\.|[^$\\\n]|\n(?![ >]*\n))+?)(?<!\s)\$(?![\d$])",
    re.S,
)
TARGET = re.compile(
    r"(?P<picture>!\[(?P<alt>[^]]*))?(?P<opening>\]\(|^\[[^]]+\]: +|\b(?:src|href)=\")(?P<to>[^)\s\"]+)", re.M
)
MARKS = re.compile(r"^#( ?\|.*| NBVAL_.*)\n?", re.M)
PICTURES = ("image/png", "image/jpeg", "image/gif", "image/svg+xml")
WIDGET = "application/vnd.jupyter.widget-view+json"


class Site:
    """All chapters, where their links lead, and what is wrong with them."""

    def __init__(self, root: Path, source: str, chapters: dict[str, str]):
        self.root, self.source = root, source
        self.anchors = {path: anchors(text) for path, text in chapters.items()}
        self.repository = re.search(r'^Repository = "(.+)"', (root / "pyproject.toml").read_text("utf-8"), re.M)[1]
        self.problems: list[str] = []

    def on_github(self, file: str) -> str:
        return f"{self.repository}/{'tree' if (self.root / file).is_dir() else 'blob'}/main/{quote(file)}"

    def link(self, target: str, page: str, where: str) -> str:
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
        return target if copied else self.on_github(stored) + (f"#{anchor}" if anchor else "")


# Prose


def anchors(text: str) -> set[str]:
    """The names that mdBook gives to a page's headings."""
    found: set[str] = set()
    for title in re.findall(r"^#{1,6} +(.+?) *$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M):
        title = FORMULA.sub(lambda found: mathml(found)[0], title)
        words = html.unescape(re.sub(r"\]\([^)]*\)|<[^>]*>", "", title)).strip().lower()
        name = "".join(c for c in words.replace(" ", "-") if c.isalnum() or c in "-_")
        found.add(next(n for n in (name, *(f"{name}-{i}" for i in range(1, 99))) if n not in found))
    return found


def prose(text: str, page: str, where: str, site: Site) -> str:
    """Markdown with its links led to the site's pages and its formulas translated; code stays as it is."""
    done, start = [], 0
    for code in [*CODE.finditer(text), None]:
        part = text[start : code.start() if code else None]
        part = FORMULA.sub(lambda found: formula(found, where, site), part)  # first: $p[i](x)$ is no link
        done.append(TARGET.sub(lambda found: redirect(found, page, where, site), part))
        if code:
            done.append(code[0])
            start = code.end()
    return "".join(done)


def redirect(found: re.Match, page: str, where: str, site: Site) -> str:
    if found["picture"] is not None and not found["alt"].strip():
        site.problems.append(f"{where}: the picture {found['to'][:60]} has no words: write ![what it shows](…)")
    return f"{found['picture'] or ''}{found['opening']}{site.link(found['to'], page, where)}"


def formula(found: re.Match, where: str, site: Site) -> str:
    result, problem = mathml(found)
    if problem:
        site.problems.append(f"{where}: the formula {found[0]} does not translate to MathML ({problem})")
    return result


def mathml(found: re.Match) -> tuple[str, str]:
    """A formula in one line, with nothing in it that Markdown could take for its own; and what went wrong."""
    latex = found["block"] or found["inline"]
    if not latex:
        return found[0], ""
    from latex2mathml.converter import convert  # here, so that reading this module needs nothing installed

    latex = re.sub(r"\n[ >]*", " ", latex).strip().replace("{aligned}", "{align*}")
    latex = re.sub(r"\\[lr]Vert\b", r"\\|", latex)  # latex2mathml would stretch these over the whole formula
    try:
        result = convert(latex, display="block" if found["block"] else "inline")
    except Exception as error:  # it raises a dozen classes of its own
        return "", f"{type(error).__name__} {error}".strip()
    strange = re.search(r">(\\\w*|&)<", result)
    problem = f"{strange[1]} is not known" if strange else ""
    if latex.count(r"\begin") > result.count("<mtable") or "newline" in result:
        problem = problem or "rows need an environment that it knows, such as aligned, cases or pmatrix"
    result = re.sub(r">([^<]+)<", lambda text: f">{entities(text[1])}<", result)
    if found["block"]:
        result = f'<span class="formula">{result}</span>'
    return result, problem


def entities(text: str) -> str:
    return "".join(c if c.isalnum() or c.isspace() else f"&#{ord(c)};" for c in html.unescape(text))


# Cells


def page(notebook: dict, path: str, site: Site) -> str:
    """The Markdown of one notebook."""
    parts, heading, module = [], "", None
    for number, cell in enumerate(notebook["cells"], start=1):
        where = f"{site.source}/{path}, cell {number}"
        source, tags = "".join(cell["source"]), cell["metadata"].get("tags", [])
        if cell["cell_type"] == "markdown":
            heading = ([heading] + re.findall(r"^#+ +(.+)", source, re.M))[-1]
            parts.append(prose(with_attachments(source, cell), path, where, site))
        elif cell["cell_type"] == "code":
            module = module or re.search(r"^#\| ?default_exp +(\w+)", source, re.M)
            if "remove-cell" in tags:
                continue
            shown = MARKS.sub("", source).strip("\n")
            if shown and "remove-input" not in tags:
                block = f"{fence(shown)}python\n{shown}\n{fence(shown)}"
                promoted = re.search(r"^#\| ?export", source, re.M)
                parts.append(f'<div class="promoted">\n\n{block}\n\n</div>' if promoted else block)
            if "remove-output" not in tags:
                first = shown.split("\n")[0]
                alt = cell["metadata"].get("alt") or (first[1:] if first.startswith("#") else f"Picture: {heading}")
                parts += outputs(cell["outputs"], alt.strip(" #*_`$."), path, where, site)
    text = "\n\n".join(parts).replace("{{#", "\\{{#")  # mdBook would take it for an include
    title = re.search(r"^# .*$", text, re.M)
    position = title.end() if title else 0
    return "\n\n".join([text[:position], doors(path, module and module[1], site), text[position:].lstrip("\n")])


def fence(source: str) -> str:
    """Backticks enough to hold a source that has some of its own."""
    return "`" * max([3, *(len(ticks) + 1 for ticks in re.findall("`{3,}", source))])


def with_attachments(source: str, cell: dict) -> str:
    """Prose with the pictures pasted into its cell, as HTML: mdBook would store a Markdown picture twice."""

    def paste(found: re.Match) -> str:
        mime, data = next(iter(cell.get("attachments", {}).get(unquote(found[2]), {}).items()), (None, None))
        return picture(mime, data, found[1]) if mime and found[1].strip() else found[0].replace("attachment:", "")

    return re.sub(r"!\[([^]]*)\]\(attachment:([^)]+)\)", paste, source)


def picture(mime: str, data: str | list[str], alt: str) -> str:
    data = "".join(data)
    if mime == "image/svg+xml":
        data = base64.b64encode(data.encode()).decode()
    return f'<p><img alt="{html.escape(alt)}" src="data:{mime};base64,{"".join(data.split())}"></p>'


def outputs(stored: list[dict], alt: str, path: str, where: str, site: Site) -> Iterator[str]:
    """What a cell shows, the richest form of each: picture, table, Markdown, text."""
    pictures = sum(any(mime in output.get("data", {}) for mime in PICTURES) for output in stored)
    seen = 0
    for output in stored:
        data = output.get("data", {})
        mime = next((mime for mime in PICTURES if mime in data), None)
        if output["output_type"] == "error":
            yield listing(f"{output['ename']}: {output['evalue']}", "output error")
        elif output["output_type"] == "stream":
            if output["name"] == "stdout":
                yield listing("".join(output["text"]))
        elif WIDGET in data:
            if not pictures:
                yield '<p class="output">Something to play with stands here: open the notebook to use it.</p>'
        elif mime:
            seen += 1
            name = f"{alt} ({seen} of {pictures})" if pictures > 1 else alt
            yield f'<div class="output">{picture(mime, data[mime], name)}</div>'
        elif "text/html" in data:
            table = re.sub(r"<(script|style)\b.*?</\1>|\n\s*(?=\n)", "", "".join(data["text/html"]), flags=re.S)
            yield f'<div class="output">{table}</div>'
        elif "text/markdown" in data:
            text = prose("".join(data["text/markdown"]), path, where, site)
            yield f'<div class="output">\n\n{text}\n\n</div>'
        elif "text/latex" in data:
            yield prose("".join(data["text/latex"]), path, where, site)
        elif "text/plain" in data:
            yield listing("".join(data["text/plain"]))


def listing(text: str, kind: str = "output") -> str:
    text = re.sub(r"\x1b\[[\d;]*m", "", text).rstrip()
    return f'<pre class="{kind}">{html.escape(text)}</pre>' if text else ""


def doors(path: str, module: str | None, site: Site) -> str:
    """The line below a chapter's title: where to open the notebook, and the file that it writes."""
    project = site.repository.removeprefix("https://github.com/")
    file = f"{site.source}/{path}"
    links = [
        f'<a href="{posixpath.basename(path)}" download>download</a>',
        f'<a href="{site.on_github(file)}">GitHub</a>',
        f'<a href="https://mybinder.org/v2/gh/{project}/main?urlpath=lab/tree/{quote(file)}">Binder</a>',
        f'<a href="https://colab.research.google.com/github/{project}/blob/main/{quote(file)}">Colab</a>',
    ]
    text = f"This page is a notebook: {' · '.join(links)}."
    if module:
        home = f"kleinlite/{module}.py"
        edge = '<span class="edge">an edge like this</span>'
        text += f' Cells with {edge} become <a href="{site.on_github(home)}"><code>{home}</code></a>.'
    return f'<p class="doors">{text}</p>'


# mdBook's protocol


def chapters(items: list) -> Iterator[dict]:
    """Every chapter that has a file, at any depth."""
    for item in items:
        if isinstance(item, dict) and (chapter := item.get("Chapter")):
            if chapter["path"]:
                yield chapter
            yield from chapters(chapter["sub_items"])


def markdown_of(notebook: dict) -> str:
    return "\n\n".join("".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "markdown")


def build(context: dict, book: dict) -> list[str]:
    """Rewrites the chapters of a book in place; returns what is wrong with them."""
    found = list(chapters(book.get("items") or book.get("sections") or []))
    notebooks = {c["path"]: json.loads(c["content"]) for c in found if c["path"].endswith(".ipynb")}
    texts = {c["path"]: markdown_of(notebooks[c["path"]]) if c["path"] in notebooks else c["content"] for c in found}
    site = Site(Path(context["root"]), context["config"]["book"]["src"], texts)
    for chapter in found:
        path = chapter["path"]
        if path in notebooks:
            chapter["content"] = page(notebooks[path], path, site)
        else:
            chapter["content"] = prose(chapter["content"], path, f"{site.source}/{path}", site)
    return site.problems


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["supports"]:
        return 0 if arguments[1:] == ["html"] else 1
    context, book = json.load(sys.stdin)
    problems = build(context, book)
    for problem in problems:
        print(f"{problem}.", file=sys.stderr)
    if not problems:
        json.dump(book, sys.stdout)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
