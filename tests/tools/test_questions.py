"""Every chapter has its three questions, and cards that Anki can tell apart."""

from pathlib import Path

from tools.questions import make_cards, read_questions, render_questions

ROOT = Path(__file__).resolve().parents[2]


def test_three_questions_for_each_chapter():
    asked = read_questions()
    assert list(asked) == [path.stem for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))]
    for chapter, questions in asked.items():
        assert len(questions) == 3, chapter
        for ask, answer in questions:
            assert "?" in ask and answer.endswith(".") and len(answer.split()) < 50, ask
            assert not {"\t", "\n", "$", "`", "["} & set(ask + answer), "a card is one line without formulas and links"


def test_answers_are_folded_on_the_page():
    page = render_questions("00_idea")
    assert page.startswith("## Think once more") and page.count("<details>") == page.count("</summary>\n\n") == 3
    assert "<em>a red circle</em>" in page and render_questions("mlx_in_ten_cells") == ""


def test_a_card_has_a_name_a_front_a_back_and_a_tag():
    """The head is Anki's own: https://docs.ankiweb.net/importing/text-files.html"""
    lines = make_cards().splitlines()
    rows = [line.split("\t") for line in lines if not line.startswith("#")]
    assert lines[:3] == ["#separator:tab", "#html:true", "#guid column:1"]
    assert {len(row) for row in rows} == {4} and len({name for name, *_ in rows}) == len(rows) == 57
