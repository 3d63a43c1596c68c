"""The site's API reference: every module's public names, signatures and docstrings, read from the sources by griffe.

Nothing is imported, so that the page can be made anywhere, and says what the files say. `Klein` comes first, then the
modules in the order of the chapters that write them, then those written by hand, room by room, then the programs.
"""

import inspect
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

import griffe

__all__ = ["render_reference"]

WIDTH = 76  # of a signature in one line
PROMOTED = re.compile(r"^Promoted from notebooks/(\w+)\.ipynb:.*", re.M | re.S)
IMPORT_KLEIN = "```python\nfrom kleinlite import Klein, picture_info, save_picture\n```"
Signed = griffe.Function | griffe.Class  # what has parameters


class Module(NamedTuple):
    name: str  # "transformer", "models.configs"
    about: str  # its docstring, without the line that promotion adds
    chapter: str  # "05_transformer", "flux3", or "" if written by hand
    public: dict[str, griffe.Object]
    is_program: bool  # to be run, not imported
    file: str = ""  # "models/configs.py"; a folder's is its __init__.py

    @property
    def number(self) -> str:
        """Of its chapter; "page" if a page beside the chapters builds it."""
        return str(int(self.chapter[:2])) if self.chapter[:2].isdecimal() else "page"

    @property
    def slug(self) -> str:
        """The name as an anchor; `Klein`, the class, has "klein"."""
        return self.name.replace(".", "-") if self.name != "klein" else "klein-module"

    def anchor(self, name: str) -> str:
        return name.lower() if name == "Klein" else f"{self.slug}-{name}"


def load_modules(package: Path) -> list[Module]:
    """All modules of a package, in any room, that have something to tell."""
    root = griffe.load(
        package.name,
        search_paths=[package.parent],
        try_relative_path=False,  # which finds another one below the current folder
        allow_inspection=False,
        extensions=griffe.Extensions(),  # not the one for dataclasses: fields are printed as they stand in the file
    )
    found, rooms = [], [root]
    while rooms:
        for module in rooms.pop().modules.values():
            rooms += [module] if module.is_init_module and "main" not in module.members else []  # a program is whole
            if not module.name.startswith("__"):
                found.append(read_module(module))
    return [module for module in found if module.public]


def read_module(module: griffe.Module) -> Module:
    """One module: what it says about itself, and the definitions that others may use."""
    about = read_docstring(module)
    promoted = PROMOTED.search(about)
    defined = {name: member for name, member in module.members.items() if not (member.is_alias or member.is_module)}
    if module.exports is None:
        names = [n for n, m in defined.items() if (m.is_function or m.is_class) and m.docstring and n[0] != "_"]
    else:
        names = [name for name in module.exports if name in defined]
    return Module(
        module.path.partition(".")[2],
        PROMOTED.sub("", about).strip(),
        promoted[1] if promoted else "",
        {name: defined[name] for name in names},
        "main" in defined and module.exports is None,
        module.path.partition(".")[2].replace(".", "/") + ("/__init__.py" if module.is_init_module else ".py"),
    )


def read_docstring(thing: griffe.Object) -> str:
    return thing.docstring.value if thing.docstring else ""


# One definition


def format_signature(function: Signed, name: str, bound: bool = False) -> str:
    """name(parameters) -> type, in lines short enough for a phone; bound: without self or cls."""
    parts, kinds = [], griffe.ParameterKind
    previous = None
    for parameter in list(function.parameters)[bound:]:
        if previous is kinds.positional_only is not parameter.kind:
            parts.append("/")
        if parameter.kind is kinds.keyword_only and previous not in (kinds.keyword_only, kinds.var_positional):
            parts.append("*")
        parts.append(format_parameter(parameter))
        previous = parameter.kind
    returns = getattr(function, "returns", None)  # a class has none
    returns = f" -> {returns}" if returns else ""
    line = ", ".join(parts)
    if len(f"{name}({line}){returns}") <= WIDTH:
        return f"{name}({line}){returns}"
    body = line if len(line) <= WIDTH - 4 and len(parts) < 5 else ",\n    ".join(parts) + ","
    return f"{name}(\n    {body}\n){returns}"


def format_parameter(parameter: griffe.Parameter) -> str:
    """A parameter as its file has it: steps: int = 4"""
    stars = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}.get(parameter.kind, "")
    text = f"{stars}{parameter.name}" + (f": {parameter.annotation}" if parameter.annotation else "")
    if stars or parameter.required:
        return text
    value = str(parameter.default)
    value = value if '"' in value else value.replace("'", '"')
    return f"{text} = {value}" if parameter.annotation else f"{text}={value}"


def format_definition(thing: griffe.Object, name: str) -> str:
    """What a definition looks like from outside: a signature, a class with its fields, a constant with its value."""
    if thing.is_function:
        return format_signature(thing, name)
    if thing.is_attribute:
        lines = source_lines(thing)
        return "\n".join(lines if len(lines) <= 12 else [*lines[:6], "    …", lines[-1]])
    if "__init__" in thing.members:
        return format_signature(thing, f"class {name}", bound=True)
    fields = [m for n, m in thing.members.items() if m.is_attribute and m.annotation and not is_property(m)
              and n[0] != "_"]  # fmt: skip
    fields = [line for field in fields for line in source_lines(field)]
    decorators = [f"@{decorator.value}" for decorator in thing.decorators]
    bases = f"({', '.join(map(str, thing.bases))})" if thing.bases else ""
    return "\n".join([*decorators, f"class {name}{bases}{':' if fields else ''}", *fields])


def is_property(thing: griffe.Object) -> bool:
    return "property" in thing.labels


def source_lines(thing: griffe.Object) -> list[str]:
    """The lines of a statement as they stand in its file, comments too, but not what is meant for a formatter."""
    return [re.sub(r"  # fmt: skip$", "", line) for line in thing.lines]


def list_methods(cls: griffe.Class) -> list[tuple[str, griffe.Object]]:
    """Public methods and the call, each with how it is written: klein.stream(…), Klein.from_pretrained(…).

    Those that a class of this package inherits from another one come after its own.
    """
    found, members = [], {}
    for owner in (cls, *cls.mro()):
        members |= {name: member for name, member in owner.members.items() if name not in members}
    for name, method in members.items():
        if not (method.is_function or is_property(method)) or (name[0] == "_" and name != "__call__"):
            continue
        unbound = method.labels & {"classmethod", "staticmethod"}
        owner = cls.name if unbound else snake_case(cls.name)
        name = owner if name == "__call__" else f"{owner}.{name}"
        if is_property(method):
            found.append((name + (f": {method.annotation}" if method.annotation else ""), method))
        else:
            found.append((format_signature(method, name, bound="staticmethod" not in method.labels), method))
    return found


def snake_case(name: str) -> str:
    """DoubleBlock → double_block, MLP → mlp"""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


# Markdown


def to_markdown(doc: str, anchors: dict[str, str], parameters: dict[str, str] | None = None) -> str:
    """A docstring as Markdown: names of this package become links, parameters a list, indented lines code."""
    parameters = parameters or {}
    parts = []
    for paragraph in filter(None, re.split(r"\n\s*\n", inspect.cleandoc(doc))):
        lines = paragraph.splitlines()
        if all(line.startswith("    ") for line in lines) or lines[0].startswith(">>>"):
            kind = "python" if lines[0].startswith(">>>") else "text"
            parts.append(f"```{kind}\n{textwrap.dedent(paragraph)}\n```")
            continue
        names = [line.split(":")[0].split(", ")[0] for line in lines]
        if names[0] in parameters:
            lines = [
                f"- **{line.replace(':', parameters[name] + '**:', 1)}" if name in parameters
                else f"- {line}" if line.startswith("Raises ") else f"  {line}" for name, line in zip(names, lines)
            ]  # fmt: skip
        parts.append("\n".join(escape_markdown(line, anchors) for line in lines))
    return "\n\n".join(parts)


def escape_markdown(line: str, anchors: dict[str, str]) -> str:
    """Nothing outside backticks means anything to Markdown, but a list's hyphen and a parameter's bold."""
    bold = re.match(r"- \*\*(.+?)\*\*: ", line)
    start, rest = (f"- <code>{bold[1]}</code>: ", line[bold.end() :]) if bold else ("", line)
    pieces = re.split(r"(`[^`]+`)", rest)
    pieces[::2] = [re.sub(r"([*_\[\]<>$#|~\\])", r"\\\1", piece) for piece in pieces[::2]]
    pieces[1::2] = [f"[{p}](#{anchors[p[1:-1]]})" if p[1:-1] in anchors else p for p in pieces[1::2]]
    return start + "".join(pieces)


def format_entry(module: Module, name: str, anchors: dict[str, str], level: str = "###") -> str:
    """One name: heading, signature, docstring; then its methods, those without a docstring below the signature."""
    thing = module.public[name]
    undocumented, below = [], []
    for line, method in list_methods(thing) if thing.is_class else ():
        if not method.docstring:
            undocumented.append(line)
            continue
        text = to_markdown(read_docstring(method), anchors, parameter_names(method))
        anchor = f"{module.anchor(name)}-{method.name.strip('_')}"
        below.append(f'<div class="method" id="{anchor}">\n\n```python\n{line}\n```\n\n{text}\n\n</div>')
    code = "\n\n".join(filter(None, [format_definition(thing, name), "\n".join(undocumented)]))
    about = to_markdown(read_docstring(thing), anchors, parameter_names(thing)) if not thing.is_attribute else ""
    heading = f"{level} `{name}` {{#{module.anchor(name)}}}"
    return "\n\n".join(filter(None, [heading, f"```python\n{code}\n```", about, *below]))


def parameter_names(thing: griffe.Object) -> dict[str, str]:
    """What a docstring may have lines about; with `: type` where the signature has no place for it, in Unpack[…]."""
    names = {}
    for parameter in thing.parameters if thing.is_function else ():
        names[parameter.name] = ""
        if str(parameter.annotation).startswith("Unpack["):
            options = thing.modules_collection[parameter.annotation.slice.canonical_path]
            names |= {name: f": {field.annotation}" for name, field in options.members.items()}
    return names


def format_section(module: Module, anchors: dict[str, str]) -> str:
    """One module: its chapter, its file, what it says about itself, and its names."""
    title, _, rest = module.about.partition("\n")
    file = f"kleinlite/{module.file}"
    home = "a page beside the chapters" if module.number == "page" else f"chapter {module.number}"
    chapter = f"Built in [{home}]({module.chapter}.ipynb), " if module.chapter else ""
    home = f"{chapter}{'in' if chapter else 'In'} [`{file}`](../{file})."
    about = to_markdown(f"{'' if chapter else title}\n{rest}", anchors) if rest.strip() or not chapter else ""
    parts = [f"## {module.name} {{#{module.slug}}}", home, about]
    shown = [] if module.is_program else [name for name in module.public if name != "Klein"]
    return "\n\n".join(part for part in [*parts, *(format_entry(module, name, anchors) for name in shown)] if part)


def format_contents(modules: list[Module]) -> str:
    """A table of all modules and names."""
    rows = ["| module | chapter | names |", "|---|:-:|---|"]
    for module in modules:
        chapter = f"[{module.number}]({module.chapter}.ipynb)" if module.chapter else ""
        links = ", ".join(f"[{name}](#{module.anchor(name)})" for name in module.public)
        command = f"`python -m kleinlite.{module.name}`" if module.name != "cli" else "`kleinlite`"
        rows.append(f"| [{module.name}](#{module.slug}) | {chapter} | {command if module.is_program else links} |")
    return "\n".join(rows)


def render_reference(package: Path) -> str:
    """The whole page, in Markdown, below its title."""
    modules = load_modules(package)
    modules.sort(key=lambda m: (m.is_program, not m.chapter, m.chapter or m.name))
    anchors = {name: m.anchor(name) for m in reversed(modules) if not m.is_program for name in m.public}
    klein = [format_entry(module, "Klein", anchors, "##") for module in modules if "Klein" in module.public]
    every = [format_section(module, anchors) for module in modules]
    parts = [IMPORT_KLEIN, *klein, "## All modules", format_contents(modules), *every]
    return "\n\n".join(parts).replace("{{#", "\\{{#")  # mdBook would take it for an include
