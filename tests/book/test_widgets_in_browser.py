"""The widgets' own scripts in a browser, each on a page of its own: what the mouse does arrives at the model."""

import io
from pathlib import Path

import pytest
from PIL import Image

from kleinlite.book.widgets import panel
from tools.chromium import serving

FOLDER = Path(panel.__file__).parent
MODEL = """async ([script, state]) => {  // anywidget's model, as far as the scripts use it
    const heard = [];
    window.sent = [];
    window.model = {
        get: (name) => state[name],
        set: (name, value) => { state[name] = value; heard.forEach((callback) => callback()); },
        save_changes: () => window.sent.push(structuredClone(state.value)),
        send: (message) => window.sent.push(message),
        on: (_, callback) => heard.push(callback),
        off: (_, callback) => heard.splice(heard.indexOf(callback), 1),
    };
    if (state.value instanceof Array && typeof state.value[0] === 'number')
        state.value = new DataView(new Uint8Array(state.value).buffer);
    document.body.innerHTML = '<div id="widget" style="width: 300px"></div>';
    const widget = (await import(script)).default;
    window.leave = widget.render({ model, el: document.querySelector('#widget') });
}"""


@pytest.fixture(scope="module")
def server():
    with serving(FOLDER) as address:
        yield address


@pytest.fixture
def show(open_page, server):
    """show("code", value="…"): the page of one widget, its state as given."""

    def show(name: str, **state):
        page, _ = open_page(f"{server}/style.css")
        page.evaluate(MODEL, [f"{server}/{name}.js", state])
        page.add_style_tag(path=FOLDER / "style.css")
        return page

    return show


def png(side: int) -> list[int]:
    file = io.BytesIO()
    Image.new("RGB", (side, side), "#3a60d6").save(file, "PNG")
    return list(file.getvalue())


def test_a_click_says_which_cell(show):
    page = show("clickable", value=png(300), rows=4, columns=3, area=[0.1, 0.2, 0.6, 0.8], title="a map")
    page.evaluate("document.querySelector('#widget').className = 'kleinlite-clickable'")
    picture = page.locator("#widget img")
    page.wait_for_function("document.querySelector('#widget img').naturalWidth === 300")
    box = picture.bounding_box()
    outline = page.locator("#widget span")

    def at(row: float, column: float) -> dict[str, float]:
        return {"x": box["width"] * (0.1 + 0.6 * column / 3), "y": box["height"] * (0.2 + 0.8 * row / 4)}

    picture.hover(position=at(1.5, 2.5))
    shown = outline.bounding_box()
    assert abs(shown["x"] - box["x"] - at(1, 2)["x"]) < 1 and abs(shown["y"] - box["y"] - at(1, 2)["y"]) < 1
    assert abs(shown["width"] - box["width"] * 0.2) < 1 and abs(shown["height"] - box["height"] * 0.2) < 1
    for position in (at(1.5, 2.5), at(3.9, 0.1), at(-0.5, 1)):  # the last one is beside the grid
        picture.click(position=position)
    assert page.evaluate("sent") == [{"row": 1, "column": 2}, {"row": 3, "column": 0}]
    picture.hover(position=at(-0.5, 1))
    assert not outline.is_visible()


def test_a_picture_alone_is_a_button_for_the_keyboard(show):
    page = show("clickable", value=png(72), rows=1, columns=1, area=[0, 0, 1, 1], title="a star · seed 3")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("sent") == [{"row": 0, "column": 0}]
    assert page.get_by_role("button", name="a star · seed 3").count() == 1


def test_pictures_are_chosen_or_dropped(show, tmp_path):
    page = show("files", value=[])
    assert page.get_by_role("button").inner_text() == "Reference (0)"
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(name.encode())
    names = "sent.at(-1).map(file => [file.name, new TextDecoder().decode(file.content)])"
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button").click()
    chooser.value.set_files([tmp_path / "a.png", tmp_path / "b.png"])
    page.wait_for_function("sent.length === 1")
    assert page.evaluate(names) == [["a.png", "a.png"], ["b.png", "b.png"]]
    assert page.get_by_role("button").inner_text() == "Reference (2)"
    page.locator(".kleinlite-drop").drop({"files": tmp_path / "b.png"})
    page.wait_for_function("sent.length === 2")
    assert page.evaluate(names) == [["b.png", "b.png"]]
    page.evaluate("model.set('value', [])")
    assert page.get_by_role("button").inner_text() == "Reference (0)"


def test_code_is_copied_and_never_taken_for_html(show):
    page = show("code", value="klein('<b>&amp;</b>')")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    assert page.locator("code").inner_text() == "klein('<b>&amp;</b>')" and not page.locator("b").count()
    page.get_by_role("button").click()
    page.get_by_text("copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "klein('<b>&amp;</b>')"
    page.evaluate("model.set('value', 'other')")
    assert page.locator("code").inner_text() == "other" and page.get_by_role("button").inner_text() == "copy"
