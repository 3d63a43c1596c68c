"""What does each line of microklein do? Break it, and look: one small change at a time, drawn with klein-nano.

    python -m tools.every_line    draw all of them anew, into site/javascript/every_line/ (ten minutes of one core)

A change turns an operator, leaves out a term or the call around an argument, or makes a number half as large again. Of
each line the first and the last such change are drawn. Written are a sheet of pictures, and `lines.json`: for each
change its line, and what became of it.
"""

import ast
import copy
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from kleinlite.nano.evaluate import judge

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "microklein.py"
NANO = ROOT / "kleinlite" / "nano" / "weights"
RESULTS = ROOT / "site" / "javascript" / "every_line"
PROMPT, SEED, GRID, STEPS = "a red circle above a blue square", 7, 6, 4
SIDE, COLUMNS = 96, 12  # pixels of a picture, and pictures in a row of the sheet
TURNED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
AROUND = {
    "silu", "rotate", "modulate", "heads", "rms_norm", "group_norm", "linear", "conv", "res_block", "attn_block",
    "add_mlp", "single_block", "qwen_layer",
}  # fmt: skip
UNBROKEN = {  # functions that read files or arguments: a change there shows nothing of the model
    "read_safetensors": "reads a file", "load": "reads a folder", "under": "picks names", "float32": "widens numbers",
    "draw": "reads arguments",
}  # fmt: skip
SHARED = {"linear", "rms_norm", "silu", "heads", "project_qkv", "attention", "rope_table", "rotate"}
FIRST = {"encode": 0, "qwen_layer": 0, "conv": 2, "group_norm": 2, "res_block": 2, "attn_block": 2, "decode": 2}


class Change(NamedTuple):
    """One line of the page, broken."""

    function: str
    line: int
    before: str
    after: str
    tree: ast.Module


def changes(source: str) -> list[Change]:
    """The first and the last change of each line of a page, from top to bottom."""
    ordered = sorted(all_changes(source), key=lambda change: change.line)
    lines = [list(some) for _, some in itertools.groupby(ordered, key=lambda change: change.line)]
    return [change for some in lines for change in (some if len(some) < 3 else [some[0], some[-1]])]


def all_changes(source: str) -> Iterator[Change]:
    tree = ast.parse(source)
    for place, function in enumerate(tree.body):
        if isinstance(function, ast.FunctionDef) and function.name not in UNBROKEN:
            for number, node in enumerate(ast.walk(function)):
                for other in broken(node):
                    changed = copy.deepcopy(tree)
                    replace(changed.body[place], number, other)
                    assert isinstance(node, ast.expr)
                    yield Change(function.name, node.lineno, ast.unparse(node), ast.unparse(other), changed)


def broken(node: ast.AST) -> list[ast.expr]:
    """What may stand in place of a piece of code."""
    names = any(isinstance(side, ast.Constant) and isinstance(side.value, str) for side in ast.iter_child_nodes(node))
    if isinstance(node, ast.BinOp) and type(node.op) in TURNED and not names:
        turned = ast.BinOp(node.left, TURNED[type(node.op)](), node.right)
        return [turned, node.left, *([node.right] if isinstance(node.op, (ast.Add, ast.Mult)) else [])]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in AROUND and node.args:
        return [node.args[0]]
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and node.value not in (0, 1, 2):
        larger = node.value * 3 / 2
        if isinstance(node.value, float) or larger.is_integer():  # half a channel or half an axis says nothing
            return [ast.Constant(type(node.value)(larger))]
    return []


def replace(function: ast.stmt, number: int, other: ast.expr) -> None:
    """Puts other code in the place of a function's node, which its number in `ast.walk` tells."""
    old = list(ast.walk(function))[number]
    for parent in ast.walk(function):
        for name, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, name, other)
            elif isinstance(value, list):
                setattr(parent, name, [other if item is old else item for item in value])


class Page:
    """A page that draws, right or broken. What comes before the first broken stage is taken from the right one."""

    def __init__(self, tree: ast.Module):
        self.names: dict[str, Any] = {"__name__": "page", "__file__": str(PAGE)}
        exec(compile(ast.fix_missing_locations(tree), str(PAGE), "exec"), self.names)

    def features(self) -> np.ndarray:
        return self.names["encode"](NANO, PROMPT)

    def latents(self, features: np.ndarray) -> np.ndarray:
        noise = np.random.default_rng(SEED).standard_normal((GRID * GRID, 128), dtype=np.float32)
        return self.names["denoise"](NANO, noise, features, GRID, GRID, STEPS)

    def picture(self, latents: np.ndarray) -> np.ndarray:
        pixels = self.names["decode"](NANO, latents, GRID, GRID)
        return np.round(255 * np.clip(pixels / 2 + 0.5, 0, 1)).astype(np.uint8)


class Right(NamedTuple):
    """What the page makes as it stands."""

    features: np.ndarray
    latents: np.ndarray
    picture: np.ndarray

    @classmethod
    def of(cls, source: str) -> "Right":
        page = Page(ast.parse(source))
        features = page.features()
        latents = page.latents(features)
        return cls(features, latents, page.picture(latents))


def draw(change: Change, right: Right) -> np.ndarray:
    """The picture of a broken page, (96, 96, 3)."""
    page, stage = Page(change.tree), FIRST.get(change.function, 0 if change.function in SHARED else 1)
    features = page.features() if stage == 0 else right.features
    latents = page.latents(features) if stage < 2 else right.latents
    with np.errstate(all="ignore"):
        picture = page.picture(latents)
    if picture.shape != right.picture.shape:
        raise ValueError(f"the picture has the shape {picture.shape}")
    return picture


def examine(change: Change, right: Right) -> tuple[dict, np.ndarray | None]:
    """What is told of a change, and its picture, if it draws one."""
    about = {"line": change.line, "before": change.before, "after": change.after}
    try:
        picture = draw(change, right)
    except Exception as error:
        return about | {"error": f"{type(error).__name__}: {error}".split("\n")[0].split(". ")[0][:120]}, None
    apart = np.abs(picture.astype(int) - right.picture)
    seen = ", ".join(f"{thing.color} {thing.kind}" for thing in judge(Image.fromarray(picture)).things)
    return about | {
        "levels": round(float(apart.mean()), 2),
        "most": int(apart.max()),
        "judge": seen or "nothing",
    }, picture


def unbroken(source: str, found: Iterable[dict]) -> dict[int, str]:
    """For each line of code in a function that no change breaks, why that is."""
    reasons: dict[int, str] = {}
    lines = {about["line"] for about in found}
    for function in ast.parse(source).body:
        if isinstance(function, ast.FunctionDef):
            inside = {node.lineno for node in ast.walk(function) if isinstance(node, ast.stmt)} - {function.lineno}
            why = UNBROKEN.get(function.name, "has no operator to turn, no call to leave out, no number to enlarge")
            reasons |= dict.fromkeys(inside - lines, why)
    return reasons


def write(found: list[tuple[dict, np.ndarray | None]], right: np.ndarray) -> None:
    """The sheet, which begins with the right picture, and what is told of each change, with its number on the sheet."""
    pictures, told = [right], []
    for about, picture in found:
        if picture is not None:
            about = about | {"picture": len(pictures)}
            pictures.append(picture)
        told.append(about)
    sheet = Image.new("RGB", (COLUMNS * SIDE, -(-len(pictures) // COLUMNS) * SIDE), "white")
    for i, picture in enumerate(pictures):
        sheet.paste(Image.fromarray(picture), (i % COLUMNS * SIDE, i // COLUMNS * SIDE))
    RESULTS.mkdir(exist_ok=True)
    sheet.save(RESULTS / "pictures.jpg", quality=80)
    said = {"starts": starts(PAGE.read_text("utf-8")), "changes": told}
    (RESULTS / "lines.json").write_text(json.dumps(said, indent=0, ensure_ascii=False) + "\n", "utf-8")


def starts(source: str) -> dict[str, int]:
    """In which line each part of the page begins, by its number."""
    found = [(re.match(r"# ---- (\d+)\.", line), number) for number, line in enumerate(source.split("\n"), start=1)]
    return {part[1]: number for part, number in found if part}


def main() -> None:
    source = PAGE.read_text("utf-8")
    right = Right.of(source)
    write([examine(change, right) for change in changes(source)], right.picture)


if __name__ == "__main__":
    main()
