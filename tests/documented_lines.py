"""What the documents tell a reader to type: shell lines and Python blocks of README, pages and notebooks."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kleinlite.cli import EXAMPLES, LORA_EXAMPLES, QUANTIZE_EXAMPLES

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.M | re.S)
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
PROGRAMS = ("kleinlite", "make", "python", "pytest", "pip", "git", "hf", "mlx.launch", "mlx.distributed_config")
PROGRAMS += ("conda", "source", "jupyter", "jupyter-lab", "ssh-copy-id", "apt", "brew")
TYPED = re.compile(rf"(?:[A-Z_]+=\S+ +)*(?:\S*/bin/)?(?:{'|'.join(map(re.escape, PROGRAMS))})(?: [^=].*)?$")


class Text(NamedTuple):
    """A piece of Markdown, or of a docstring, and where it stands."""

    where: str
    text: str


def pages() -> Iterator[Text]:
    for path in [*(ROOT / name for name in ("README.md", "AGENTS.md", "RECORDS.md")), *ROOT.glob("notebooks/*.md")]:
        yield Text(path.relative_to(ROOT).as_posix(), path.read_text("utf-8"))


def notebook_cells(kind: str) -> Iterator[Text]:
    for path in sorted(ROOT.glob("notebooks/**/*.ipynb")):
        if "live" not in path.parts and ".ipynb_checkpoints" not in path.parts:
            for i, cell in enumerate(json.loads(path.read_text("utf-8"))["cells"]):
                if cell["cell_type"] == kind:
                    yield Text(f"{path.relative_to(ROOT).as_posix()}, cell {i}", "".join(cell["source"]))


def docstrings() -> Iterator[Text]:
    for folder in ("kleinlite", "recipe", "site", "tools", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (said := ast.get_docstring(node)):
                    yield Text(path.relative_to(ROOT).as_posix(), said)


def shell_lines() -> list[Text]:
    """Every line that a reader might type into a shell, without comments, each once per place."""
    found = []
    for where, text in [*pages(), *notebook_cells("markdown"), *docstrings()]:
        for _, language, body in FENCE.findall(text):
            if language in ("", "sh", "bash", "console"):
                found += [Text(where, line) for line in body.replace("\\\n", " ").splitlines()]
        found += [Text(where, line) for line in INLINE.findall(FENCE.sub("", text))]
    for epilog in (EXAMPLES, QUANTIZE_EXAMPLES, LORA_EXAMPLES):
        found += [Text("kleinlite --help", line) for line in epilog.splitlines()]
    for where, text in notebook_cells("code"):
        found += [Text(where, line.lstrip("!")) for line in text.splitlines() if line.startswith("!")]
    lines = [Text(where, re.sub(r" +# .*|(?<=\S) {3,}.*", "", text).strip()) for where, text in found]
    return list(dict.fromkeys(line for line in lines if TYPED.match(line.text)))


def python_blocks() -> list[Text]:
    """Every fenced Python block of the pages and of the notebooks' text."""
    return [
        Text(where, body)
        for where, text in [*pages(), *notebook_cells("markdown")]
        for _, language, body in FENCE.findall(text)
        if language == "python"
    ]
