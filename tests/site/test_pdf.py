"""The book in print: headings make the outline, links live, and what the site folds is open."""

import pytest
from browser import reason_to_skip

from tools import pdf

PAGE = """<h1>The idea</h1><p><a href="https://example.org/seen">seen</a></p>
<details><summary>Sources</summary><a href="https://example.org/folded">folded</a></details>
<script>document.body.innerHTML = ""</script>"""


def test_a_site_is_printed(tmp_path):
    if reason := reason_to_skip():
        pytest.skip(reason)
    (tmp_path / "print.html").write_text(PAGE)
    pdf.write(tmp_path, tmp_path / "book.pdf")
    printed = (tmp_path / "book.pdf").read_bytes()
    assert printed.startswith(b"%PDF") and b"/Outlines" in printed
    assert b"example.org/seen" in printed and b"example.org/folded" in printed
