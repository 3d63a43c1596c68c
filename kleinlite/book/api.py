"""The site's API reference: every module's public names, signatures and docstrings, read from the sources.

Nothing is imported, so that the page can be made anywhere, and says what the files say. `Klein` comes first, then the
modules in the order of the chapters that write them, then those written by hand, then the programs.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

__all__ = ["reference"]

WIDTH = 76  # of a signature in one line
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
PROMOTED = re.compile(r"^Promoted from notebooks/(\d\d)(\w+)\.ipynb:.*", re.M | re.S)
FIRST = "```python\nfrom kleinlite import Klein, picture_info, save_picture\n```"


class Module(NamedTuple):
    name: str
    about: str  # its docstring, without the line that promotion adds
    chapter: str  # "05_transformer", or "" if written by hand
    public: dict[str, ast.stmt]
    source: str
    program: bool  # to be run, not imported

    @property
    def room(self) -> str:
        """The name as an anchor."""
        return self.name.replace(".", "-")

    def anchor(self, name: str) -> str:
        return name.lower() if name == "Klein" else f"{self.room}-{name}"


def read(path: Path, package: Path) -> Module:
    """One module: what it says about itself, and the definitions that others may use."""
    source = path.read_text("utf-8")
    tree = ast.parse(source)
    about = ast.get_docstring(tree) or ""
    promoted = PROMOTED.search(about)
    defined: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, (*FUNCTION, ast.ClassDef)):
            defined[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    if "__all__" in defined:
        names = [name for name in ast.literal_eval(defined["__all__"].value) if name in defined]
    else:
        names = [n for n, node in defined.items() if not n.startswith("_") and documented(node)]
    return Module(
        ".".join(path.relative_to(package).with_suffix("").parts),
        PROMOTED.sub("", about).strip(),
        "".join(promoted.groups()) if promoted else "",
        {name: defined[name] for name in names},
        source,
        "main" in defined and "__all__" not in defined,
    )


def documented(node: ast.stmt) -> bool:
    return isinstance(node, (*FUNCTION, ast.ClassDef)) and ast.get_docstring(node) is not None


# One definition


def signature(node: ast.FunctionDef, name: str, method: bool = False) -> str:
    """name(what it takes) -> what it gives, in lines short enough for a phone."""
    a = node.args
    with_default = [None] * (len(a.posonlyargs + a.args) - len(a.defaults)) + a.defaults
    plain = [parameter(arg, default) for arg, default in zip(a.posonlyargs + a.args, with_default)]
    if a.posonlyargs:
        plain.insert(len(a.posonlyargs), "/")
    plain = plain[1:] if method else plain
    star = [f"*{parameter(a.vararg)}"] if a.vararg else ["*"] if a.kwonlyargs else []
    named = [parameter(arg, default) for arg, default in zip(a.kwonlyargs, a.kw_defaults)]
    parts = [*plain, *star, *named, *([f"**{parameter(a.kwarg)}"] if a.kwarg else [])]
    gives = f" -> {annotation(node.returns)}" if node.returns else ""
    line = f"{name}({', '.join(parts)}){gives}"
    if len(line) <= WIDTH:
        return line
    line = ", ".join(parts)
    body = line if len(line) <= WIDTH - 4 and len(parts) < 5 else ",\n    ".join(parts) + ","
    return f"{name}(\n    {body}\n){gives}"


def parameter(arg: ast.arg, default: ast.expr | None = None) -> str:
    text = f"{arg.arg}: {annotation(arg.annotation)}" if arg.annotation else arg.arg
    if default is None:
        return text
    value = ast.unparse(default)
    value = value if '"' in value else value.replace("'", '"')
    return f"{text} = {value}" if arg.annotation else f"{text}={value}"


def annotation(node: ast.expr) -> str:
    """A type as people write it: without the quotes around a class that is not there yet."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ast.unparse(node)


def heads(node: ast.stmt, name: str, source: str) -> str:
    """What a definition looks like from outside: a signature, a class with its fields, a constant with its value."""
    if isinstance(node, FUNCTION):
        return signature(node, name)
    if not isinstance(node, ast.ClassDef):
        lines = source_of(node, source)
        return "\n".join(lines if len(lines) <= 12 else [*lines[:6], "    …", lines[-1]])
    start = next((f for f in node.body if isinstance(f, FUNCTION) and f.name == "__init__"), None)
    if start:
        return signature(start, f"class {name}", method=True)
    fields = [f for f in node.body if isinstance(f, ast.AnnAssign) and not f.target.id.startswith("_")]
    fields = [line for field in fields for line in source_of(field, source)]
    decorators = [f"@{ast.unparse(decorator)}" for decorator in node.decorator_list]
    bases = f"({', '.join(map(ast.unparse, node.bases))})" if node.bases else ""
    return "\n".join([*decorators, f"class {name}{bases}{':' if fields else ''}", *fields])


def source_of(node: ast.stmt, source: str) -> list[str]:
    """The lines of a statement as they stand in its file, comments too, but not what is meant for a formatter."""
    return [re.sub(r"  # fmt: skip$", "", line) for line in source.splitlines()[node.lineno - 1 : node.end_lineno]]


def methods(node: ast.ClassDef) -> list[tuple[str, ast.FunctionDef]]:
    """Public methods and the call, each with how it is written: klein.stream(…), Klein.from_pretrained(…)."""
    found = []
    for method in node.body:
        if isinstance(method, FUNCTION) and (not method.name.startswith("_") or method.name == "__call__"):
            kinds = {ast.unparse(decorator) for decorator in method.decorator_list}
            owner = node.name if kinds & {"classmethod", "staticmethod"} else snake(node.name)
            name = owner if method.name == "__call__" else f"{owner}.{method.name}"
            if "property" in kinds:
                gives = f": {annotation(method.returns)}" if method.returns else ""
                found.append((f"{name}{gives}", method))
            else:
                found.append((signature(method, name, method="staticmethod" not in kinds), method))
    return found


def snake(name: str) -> str:
    """DoubleBlock → double_block, MLP → mlp"""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


# Markdown


def markdown(doc: str, names: dict[str, str], parameters: tuple[str, ...] = ()) -> str:
    """A docstring as Markdown: names of this package become links, parameters a list, indented lines code."""
    parts = []
    for paragraph in filter(None, re.split(r"\n\s*\n", inspect.cleandoc(doc))):
        lines = paragraph.splitlines()
        if all(line.startswith("    ") for line in lines) or lines[0].startswith(">>>"):
            kind = "python" if lines[0].startswith(">>>") else "text"
            parts.append(f"```{kind}\n{textwrap.dedent(paragraph)}\n```")
            continue
        if lines[0].split(":")[0].split(", ")[0] in parameters:
            lines = [
                f"- **{line.replace(':', '**:', 1)}" if line.split(":")[0].split(", ")[0] in parameters
                else f"- {line}" if line.startswith("Raises ") else f"  {line}" for line in lines
            ]  # fmt: skip
        parts.append("\n".join(escaped(line, names) for line in lines))
    return "\n\n".join(parts)


def escaped(line: str, names: dict[str, str]) -> str:
    """Nothing outside backticks means anything to Markdown, but a list's hyphen and a parameter's bold."""
    bold = re.match(r"- \*\*(.+?)\*\*: ", line)
    start, rest = (f"- <code>{bold[1]}</code>: ", line[bold.end() :]) if bold else ("", line)
    pieces = re.split(r"(`[^`]+`)", rest)
    pieces[::2] = [re.sub(r"([*_\[\]<>$#|~\\])", r"\\\1", piece) for piece in pieces[::2]]
    pieces[1::2] = [f"[{piece}](#{names[piece[1:-1]]})" if piece[1:-1] in names else piece for piece in pieces[1::2]]
    return start + "".join(pieces)


def entry(module: Module, name: str, names: dict[str, str], level: str = "###") -> str:
    """One name: heading, signature, docstring; then its methods. Those that say nothing stand below the signature."""
    node = module.public[name]
    head, quiet, below = heads(node, name, module.source), [], []
    parameters = parameter_names(node) if isinstance(node, FUNCTION) else ()
    for written, method in methods(node) if isinstance(node, ast.ClassDef) else ():
        if not documented(method):
            quiet.append(written)
            continue
        text = markdown(ast.get_docstring(method), names, parameter_names(method))
        anchor = f"{module.anchor(name)}-{method.name.strip('_')}"
        below.append(f'<div class="method" id="{anchor}">\n\n```python\n{written}\n```\n\n{text}\n\n</div>')
    about = markdown(ast.get_docstring(node) or "", names, parameters) if documented(node) else ""
    head = "\n\n".join([head, "\n".join(quiet)]) if quiet else head
    heading = f"{level} `{name}` {{#{module.anchor(name)}}}"
    return "\n\n".join(filter(None, [heading, f"```python\n{head}\n```", about, *below]))


def parameter_names(node: ast.FunctionDef) -> tuple[str, ...]:
    return tuple(arg.arg for arg in node.args.args + node.args.kwonlyargs)


def section(module: Module, names: dict[str, str]) -> str:
    """One module: its chapter, its file, what it says about itself, and its names."""
    title, _, rest = module.about.partition("\n")
    file = f"kleinlite/{module.name.replace('.', '/')}.py"
    chapter = f"Built in [chapter {int(module.chapter[:2])}]({module.chapter}.ipynb), " if module.chapter else ""
    home = f"{chapter}{'in' if chapter else 'In'} [`{file}`](../{file})."
    about = markdown(f"{'' if chapter else title}\n{rest}", names) if rest.strip() or not chapter else ""
    parts = [f"## {module.name} {{#{module.room}}}", home, about]
    shown = [] if module.program else [name for name in module.public if name != "Klein"]
    return "\n\n".join(part for part in [*parts, *(entry(module, name, names) for name in shown)] if part)


def contents(modules: list[Module]) -> str:
    """A table of all modules and names."""
    rows = ["| module | chapter | names |", "|---|:-:|---|"]
    for module in modules:
        chapter = f"[{int(module.chapter[:2])}]({module.chapter}.ipynb)" if module.chapter else ""
        links = ", ".join(f"[{name}](#{module.anchor(name)})" for name in module.public)
        command = f"`python -m kleinlite.{module.name}`" if module.name != "cli" else "`kleinlite`"
        rows.append(f"| [{module.name}](#{module.room}) | {chapter} | {command if module.program else links} |")
    return "\n".join(rows)


def reference(package: Path) -> str:
    """The whole page, in Markdown, below its title."""
    modules = [read(path, package) for path in sorted(package.rglob("*.py")) if not path.stem.startswith("__")]
    modules = [module for module in modules if module.public]
    modules.sort(key=lambda m: (m.program, not m.chapter, m.chapter or m.name))
    names = {name: m.anchor(name) for m in reversed(modules) if not m.program for name in m.public}
    first = [entry(module, "Klein", names, "##") for module in modules if "Klein" in module.public]
    every = [section(module, names) for module in modules]
    parts = [FIRST, *first, "## All modules", contents(modules), *every]
    return "\n\n".join(parts).replace("{{#", "\\{{#")  # mdBook would take it for an include
