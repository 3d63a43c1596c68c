"""The atlas of wrong pictures: each known mistake of a chapter, taken out of what its notebook stores.

A page asks for one by `{{#mistake 02_position_ids: pairs by halves}}`. It gets the pictures with and without it, the
line that was changed, and the checks that noticed, as the chapter's cell with `mistakes.compare` left them. So the
atlas says what the chapters show; only its order and its words are written by hand.
"""

import ast
import base64
import io
import re
from collections.abc import Callable
from typing import NamedTuple

from PIL import Image

__all__ = ["Mistake", "insert_mistakes", "read_mistakes"]

MARKER = re.compile(r"(?<!\\)\{\{#mistake (\w+): (.+?)\}\}")
COMPARED = re.compile(r"^(.+): caught by ([^;\n]+)", re.M)
ROW, COLUMNS = 96, 4  # pixels of a picture's place in what `plots.rows` draws, and pictures in a row
Names = dict[str, ast.expr]


class Mistake(NamedTuple):
    """One line of a chapter, wrong."""

    code: str  # a code block in Markdown: what was changed, and into what
    where: str  # the function, "position_ids.apply_rope"
    caught: str  # the checks that noticed: "last id"
    picture: Image.Image  # above four pictures drawn rightly, below the same with the mistake


def insert_mistakes(text: str, notebooks: dict[str, dict], show: Callable[[str, str, dict[str, int]], str]) -> str:
    """A page's Markdown with the mistakes that it asks for.

    notebooks: by path, "02_position_ids.ipynb".
    show: makes HTML of a JPEG in base64, its description and its size.
    Raises LookupError for a mistake that its chapter does not compare, or stores in another way than it did.
    """
    known: dict[str, dict[str, Mistake]] = {}

    def insert(found: re.Match) -> str:
        chapter, name = found.groups()
        try:
            if chapter not in known:
                known[chapter] = read_mistakes(notebooks[f"{chapter}.ipynb"])
            return render_mistake(chapter, name, known[chapter][name], show)
        except KeyError:
            raise LookupError(f"{chapter}.ipynb compares no mistake called “{name}”") from None
        except ValueError as error:
            raise LookupError(f"the mistakes of {chapter}.ipynb cannot be shown: {error}") from None

    return MARKER.sub(insert, text)


def read_mistakes(notebook: dict) -> dict[str, Mistake]:
    """The known mistakes of a chapter by name; none if it compares none. ValueError: it stores them in another way."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    compared = next((cell for cell in cells if "mistakes.compare(" in "".join(cell["source"])), None)
    if not compared:
        return {}
    texts = ["".join(output["text"]) for output in compared["outputs"] if output["output_type"] == "stream"]
    told = dict(COMPARED.findall("".join(texts)))
    stored = [output["data"]["image/jpeg"] for output in compared["outputs"] if "image/jpeg" in output.get("data", {})]
    if not stored:
        raise ValueError("the cell with mistakes.compare stores no picture")
    sheet = Image.open(io.BytesIO(base64.b64decode("".join(stored[0])))).convert("RGB")
    margin = (sheet.height - ROW * (1 + len(told))) // 2
    if not 0 <= margin < ROW // 4:
        raise ValueError(f"its picture is not {1 + len(told)} rows of {ROW} pixels")
    nodes = [node for cell in cells for node in parse_cell("".join(cell["source"]))]
    names, mistakes = read_assignments(nodes), {}
    for row, (name, value) in enumerate(zip(told, read_values(names["wrong"], list(told))), start=1):
        where, code = describe_change(value, names, nodes)
        mistakes[name] = Mistake(code, where, told[name], crop_pair(sheet, margin, row))
    return mistakes


def parse_cell(source: str) -> list[ast.stmt]:
    """The statements of a cell; none if it has magics."""
    try:
        return ast.parse(source).body
    except SyntaxError:
        return []


def read_assignments(nodes: list[ast.stmt]) -> Names:
    """What a notebook's names stand for: the last value that each was given, imports as `module` = kleinlite.module."""
    names: Names = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {name.asname: ast.parse(name.name, mode="eval").body for name in node.names if name.asname}
        elif isinstance(node, ast.Assign):
            (target,), value = node.targets, node.value
            several = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            pairs = zip(target.elts, value.elts) if several else [(target, value)]
            names |= {name.id: given for name, given in pairs if isinstance(name, ast.Name)}
    return names


def read_values(wrong: ast.expr, told: list[str]) -> list[ast.expr]:
    """The values of the dictionary `wrong`, whose keys must be the mistakes that were compared."""
    keys = [ast.literal_eval(key) for key in wrong.keys] if isinstance(wrong, ast.Dict) else []
    if keys != told:
        raise ValueError(f"`wrong` has {keys}, but the outputs tell of {told}: run the notebook")
    return wrong.values


def describe_change(call: ast.expr, names: Names, nodes: list[ast.stmt]) -> tuple[str, str]:
    """Where a mistake is made, and a code block that shows it: of mistakes.line(…), or of patch.object(…)."""
    target, second, third = (resolve(argument, names) for argument in call.args)
    place = dotted_path(target, names)
    if "patch" not in ast.unparse(call.func):
        right, wrong = ast.literal_eval(second), ast.literal_eval(third)
        lines = [*(f"- {line}" for line in right.split("\n")), *(f"+ {line}" for line in wrong.split("\n") if line)]
        return place, "\n".join(["```diff", *lines, "```"])
    place = f"{place}.{ast.literal_eval(second)}"
    replacement = next((n for n in nodes if isinstance(n, ast.FunctionDef) and n.name == ast.unparse(third)), None)
    place = place.removesuffix(".__call__")
    code = ast.unparse(replacement) if replacement else f"{place.split('.')[-1]} = {ast.unparse(third)}"
    return place, f"```python\n{code}\n```"


def resolve(node: ast.expr, names: Names) -> ast.expr:
    """What a name stands for, if the notebook gave it a value that says more than the name."""
    while isinstance(node, ast.Name) and node.id in names:
        node = names[node.id]
    return node


def dotted_path(node: ast.expr, names: Names) -> str:
    """module.SwiGLU.__call__ → transformer.SwiGLU"""
    if isinstance(node, ast.Attribute):
        return f"{dotted_path(node.value, names)}.{node.attr}".removesuffix(".__call__").removeprefix("kleinlite.")
    return ast.unparse(resolve(node, names)).removeprefix("kleinlite.")


def crop_pair(sheet: Image.Image, margin: int, row: int) -> Image.Image:
    """The first row, drawn rightly, and one of the others below it."""
    left, pair = sheet.width - margin - COLUMNS * ROW, Image.new("RGB", (COLUMNS * ROW, 2 * ROW), "white")
    for i, source in enumerate((0, row)):
        top = margin + source * ROW
        pair.paste(sheet.crop((left, top, left + COLUMNS * ROW, top + ROW)), (0, i * ROW))
    return pair


def render_mistake(chapter: str, name: str, mistake: Mistake, show: Callable[..., str]) -> str:
    """Markdown: the pictures, the line, and who noticed. chapter: "02_position_ids"."""
    file = io.BytesIO()
    mistake.picture.save(file, "JPEG", quality=75, optimize=True)
    size = dict(zip(("width", "height"), mistake.picture.size))
    words = f"Four pictures drawn rightly, and below them with the mistake: {name}"
    link = f"[chapter {int(chapter[:2])}]({chapter}.ipynb#what-if-this-line-were-wrong)"
    return "\n\n".join([
        show(base64.b64encode(file.getvalue()).decode(), words, size),
        f"**{name}**, in `{mistake.where}` ({link}):",
        mistake.code,
        f"Caught by the check: *{mistake.caught}*.",
    ])  # fmt: skip
