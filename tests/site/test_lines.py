"""On microklein's page each line of the decoder can be broken: with the pointer, with Tab, and from a picture."""

import json

import pytest

from tools.every_line import RESULTS

CHANGES = json.loads((RESULTS / "lines.json").read_text("utf-8"))["changes"]
PANEL = ".breaking:not([hidden])"


@pytest.mark.parametrize("width", [1200, 390])
def test_a_line_is_pointed_at_tabbed_to_and_found_by_its_picture(open_page, home, width):
    page, log = open_page(f"{home}/microklein.html", width=width)
    page.wait_for_selector(".break >> nth=3")
    assert page.locator(".break").count() == len({change["line"] for change in CHANGES})
    line = next(change["line"] for change in CHANGES if "bn.running_var" in change["before"])
    page.focus(f"[aria-label='Break line {line}']")
    assert f"Line {line}," in page.inner_text(PANEL) and "bn.running_var" in page.inner_text(PANEL)
    page.keyboard.press("Tab")
    after = min(change["line"] for change in CHANGES if change["line"] > line)
    assert f"Line {after}," in page.inner_text(PANEL)
    page.keyboard.press("Escape")
    assert page.locator(PANEL).count() == 0
    mark = page.locator(f"[aria-label='Break line {line}']").bounding_box()
    page.mouse.move(mark["x"] + 150, mark["y"] + 9)
    assert f"Line {line}," in page.inner_text(PANEL)
    drawn = [change for change in CHANGES if change.get("most", 0) > 1]
    pictures = page.locator(".wrong-pictures button")
    assert pictures.count() == len(drawn)
    worst = max(drawn, key=lambda change: change["levels"])
    pictures.first.click()
    assert f"Line {worst['line']}," in page.inner_text(PANEL)
    page.wait_for_function(f"""() => {{ const box = document.querySelector("[aria-label='Break line {worst["line"]}']")
        .getBoundingClientRect(); return box.top > 0 && box.bottom < innerHeight; }}""")
    assert page.evaluate("document.documentElement.scrollWidth") == width and log.errors == []
