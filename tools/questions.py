"""The three questions of each chapter, and the same as cards: `python -m tools.questions` writes kleinlite-cards.txt.

Anki imports that file as it is (File, Import). Each card has a name of its own, so that a later import changes a card
and does not double it.
"""

import re
import tomllib
from typing import NamedTuple

from tools.notebooks import ROOT


class Question(NamedTuple):
    """What is asked, and what is right, in Markdown."""

    ask: str
    answer: str


def read_questions() -> dict[str, list[Question]]:
    """Per chapter, by its notebook's name without suffix: "05_transformer"."""
    stored = tomllib.loads((ROOT / "notebooks" / "questions.toml").read_text("utf-8"))
    return {chapter: [Question(**question) for question in questions] for chapter, questions in stored.items()}


def render_questions(chapter: str) -> str:
    """The Markdown at the end of a chapter's page: each answer folded behind its question; "" for other pages."""
    folded = [
        f"<details>\n<summary>{to_html(ask)}</summary>\n\n{answer}\n\n</details>"
        for ask, answer in read_questions().get(chapter, [])
    ]
    return "\n\n".join(["## Think once more", *folded]) if folded else ""


def to_html(text: str) -> str:
    """What stands in a summary or on a card, where nobody reads Markdown."""
    return re.sub(r"\*([^*]+)\*", r"<em>\1</em>", text.replace("&", "&amp;").replace("<", "&lt;"))


def make_cards() -> str:
    """Lines for Anki: a name, front, back and tag, between tabs."""
    rows = ["#separator:tab", "#html:true", "#guid column:1", "#tags column:4", "#deck:kleinlite", "#notetype:Basic"]
    for chapter, questions in read_questions().items():
        for number, (ask, answer) in enumerate(questions, start=1):
            rows.append(f"kleinlite-{chapter}-{number}\t{to_html(ask)}\t{to_html(answer)}\t{chapter}")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    (ROOT / "kleinlite-cards.txt").write_text(make_cards(), "utf-8", newline="\n")
    print("kleinlite-cards.txt: import it into Anki.")
