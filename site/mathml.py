"""Formulas of the site: LaTeX between dollar signs becomes MathML when it is built, and no reader needs a script."""

import html
import re

__all__ = ["FORMULA", "to_mathml"]

FORMULA = re.compile(
    r"\\\$"  # a dollar sign that is meant as one
    r"|\$\$(?P<block>(?:\\.|[^$\\])+)\$\$"
    r"|(?<![\w$])\$(?!\s)(?P<inline>(?:\\.|[^$\\\n]|\n(?![ >]*\n))+?)(?<!\s)\$(?![\d$])",
    re.S,
)


def to_mathml(found: re.Match) -> tuple[str, str]:
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
    result = re.sub(r">([^<]+)<", lambda text: f">{to_entities(text[1])}<", result)
    if found["block"]:
        result = f'<span class="formula">{result}</span>'
    return result, problem


def to_entities(text: str) -> str:
    return "".join(c if c.isalnum() or c.isspace() else f"&#{ord(c)};" for c in html.unescape(text))
