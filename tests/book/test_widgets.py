"""The widgets without a browser: their controls do from Python what they do under a mouse."""

import base64
import io
import threading

import pytest
from PIL import Image
from waiting import HANGS

from kleinlite import transformer
from kleinlite.book import widgets
from kleinlite.book.widgets.panel import to_png
from kleinlite.klein import Klein
from kleinlite.pipeline import prepare_reference, to_pixels
from kleinlite.sampling import empirical_mu

PROMPT = "a red house under a yellow sun"
WIDGET = "application/vnd.jupyter.widget-view+json"
BLOCKS = 7  # klein-nano: two double, five single


@pytest.fixture(scope="module")
def klein() -> Klein:
    return Klein.from_pretrained()


@pytest.fixture
def play(klein):
    panel = widgets.playground(klein)
    yield panel
    panel.stop_requested.set()
    assert panel.idle.wait(HANGS)


def fill(panel, **values) -> None:
    for name, value in values.items():
        getattr(panel.parts, name).value = value


def draw(panel, **values) -> None:
    fill(panel, **values)
    panel.parts.draw.click()
    assert panel.idle.wait(HANGS)


def upload(panel, *files: tuple[str, bytes]) -> None:
    """As the browser sends them."""
    panel.parts.files.value = [{"name": name, "content": memoryview(content)} for name, content in files]


def stop_at(panel, step: int) -> None:
    """Press Stop as soon as this step is shown."""
    panel.parts.progress.observe(lambda change: change.new == step and panel.parts.stop.click(), "value")


def shown(panel) -> Image.Image:
    return Image.open(io.BytesIO(panel.parts.picture.value)).convert("RGB")


def again(panel) -> Image.Image:
    """What the code under the picture draws."""
    *lines, last = panel.parts.code.value.split("\n")
    names = {}
    exec("\n".join(lines), names)
    return eval(last, names)


def gradient(width: int, height: int) -> bytes:
    return to_png(Image.linear_gradient("L").resize((width, height)).convert("RGB"))


# The playground


def test_the_first_picture_is_there_at_once(play, klein):
    assert shown(play).tobytes() == klein(PROMPT, seed=7, progress=False).tobytes()
    assert "seed 7" in play.parts.status.value
    assert len(play.parts.gallery.children) == 1
    assert not play.parts.draw.disabled and play.parts.stop.disabled


def test_generate_and_the_call_that_draws_it_again(play):
    before = shown(play)
    draw(play, prompt='a "yellow" star', width=64, height=80, steps=3, seed=2**33)
    assert shown(play).size == (64, 80) != before.size
    assert again(play).tobytes() == shown(play).tobytes()
    assert "seed 8589934592" in play.parts.status.value


def test_every_step_is_shown(play):
    seen = []
    play.parts.picture.observe(lambda change: seen.append(change.new), "value")
    draw(play, steps=5, seed=1)
    assert len(set(seen)) == 5
    assert play.parts.progress.value == play.parts.progress.max == 5


def test_with_references(play, tmp_path, monkeypatch):
    files = {"a.png": gradient(96, 64), "b.png": gradient(70, 70)}
    upload(play, *files.items())
    assert (play.parts.width.value, play.parts.height.value) == (96, 64)
    assert len(play.parts.references.children) == 3  # two pictures and the button that clears them
    draw(play, prompt="put both together", steps=2)
    monkeypatch.chdir(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert again(play).tobytes() == shown(play).tobytes()
    play.parts.clear.click()
    assert play.parts.width.value == 96 == play.parts.height.value
    assert not play.parts.references.children
    draw(play, prompt="put both together", steps=2)
    assert "Image.open" not in play.parts.code.value


def test_the_code_has_what_the_model_was_opened_with():
    panel = widgets.playground(Klein.from_pretrained("nano", loras=[("outlined", 0.5)], quantize=8))
    draw(panel, steps=1)
    assert again(panel).tobytes() == shown(panel).tobytes()


def test_a_reference_is_read_as_klein_reads_it(play, tmp_path, monkeypatch):
    image = Image.new("RGBA", (128, 96), (255, 0, 0, 255))
    image.paste((0, 0, 0, 0), (64, 0, 128, 96))  # transparent, which is white behind
    turned = Image.Exif()
    turned[0x0112] = 6
    image.save(tmp_path / "a.png", exif=turned)
    upload(play, ("a.png", (tmp_path / "a.png").read_bytes()))
    assert (play.parts.width.value, play.parts.height.value) == (80, 112)
    draw(play, prompt="make it night", steps=1)
    monkeypatch.chdir(tmp_path)
    assert again(play).tobytes() == shown(play).tobytes()


def test_it_begins_with_a_critter():
    panel = widgets.playground(Klein.from_pretrained("critters"))
    assert panel.parts.prompt.value.startswith("a blue critter") and len(panel.parts.gallery.children) == 1
    assert again(panel).tobytes() == shown(panel).tobytes() and "never learned" not in panel.parts.status.value


def test_a_base_model_has_guidance():
    base = Klein.from_pretrained("nano-base")
    panel = widgets.playground(base)
    assert panel.parts.gallery.children == ()  # a slow model does not draw before it is asked to
    draw(panel, width=32, height=32, steps=2, guidance=2.5)
    assert "guidance=2.5" in panel.parts.code.value and 'from_pretrained("nano-base")' in panel.parts.code.value
    assert again(panel).tobytes() == shown(panel).tobytes()


def test_stop_in_the_middle(play):
    stop_at(play, 3)
    draw(play, steps=500, seed=5)
    assert 3 <= play.parts.progress.value <= 4
    assert "stopped after" in play.parts.status.value and "of 500 steps" in play.parts.status.value
    assert not play.parts.draw.disabled and play.parts.stop.disabled
    assert len(play.parts.gallery.children) == 1  # of what is finished
    draw(play, steps=1)  # and it draws again
    assert "stopped" not in play.parts.status.value


def test_stop_before_the_first_step(play, monkeypatch):
    """Is heard after it."""
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (play.parts.stop.click(), start(thread)))
    play.parts.draw.click()
    assert play.idle.wait(HANGS)
    assert "stopped after 1 of 4 steps" in play.parts.status.value and len(play.parts.gallery.children) == 1


def test_draw_while_drawing_does_nothing(play):
    play.parts.progress.observe(lambda change: change.new == 2 and play.generate(), "value")
    draw(play, steps=5)
    assert len(play.parts.gallery.children) == 2


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"width": 100}, "The width must be a multiple of 16 pixels, 100 is not: try 96."),
        ({"steps": 0}, "at least 1 and at most 1000, not 0."),
        ({"seed": -1}, "A seed is a whole number from 0"),
        ({"prompt": "a red circle " * 40}, "shorten"),  # found out while drawing, in the thread
    ],
)
def test_wrong_requests_are_answered_in_a_sentence(play, values, sentence):
    before = play.parts.picture.value
    draw(play, **values)
    assert sentence in play.parts.status.value and "kleinlite-wrong" in play.parts.status.value
    assert play.parts.picture.value == before and len(play.parts.gallery.children) == 1
    draw(play, prompt=PROMPT, width=96, steps=1, seed=1)
    assert "kleinlite-wrong" not in play.parts.status.value


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"no picture at all", "x.png is not a picture"),
        (gradient(96, 96)[:200], "x.png: The picture cannot be read (image file is truncated"),
        (gradient(20, 20), "A reference picture needs sides of at least 64 pixels"),
    ],
)
def test_wrong_references_are_answered_in_a_sentence(play, content, sentence):
    upload(play, ("x.png", content))
    assert sentence in play.parts.status.value
    draw(play)
    assert sentence in play.parts.status.value and len(play.parts.gallery.children) == 1


def test_what_the_reader_writes_is_shown_as_text(play):
    draw(play, prompt="<b>$x$ & 'y'</b>", steps=1)
    assert "&lt;b&gt;" in play.parts.status.value and "<b>" in play.parts.code.value
    assert again(play).tobytes() == shown(play).tobytes()


def test_gallery_brings_a_picture_back(play):
    first, code = play.parts.picture.value, play.parts.code.value
    draw(play, prompt="a yellow star", seed=3)
    assert play.parts.picture.value != first and len(play.parts.gallery.children) == 2
    oldest = play.parts.gallery.children[-1]
    oldest.click()
    assert play.parts.picture.value == first and play.parts.code.value == code
    assert PROMPT in play.parts.status.value


def test_dice_and_enter(play):
    play.parts.dice.click()
    assert play.parts.seed.value != 7
    play.parts.prompt._handle_custom_msg({"event": "submit"}, [])  # what the browser sends for Enter
    assert play.idle.wait(HANGS)
    assert f"seed={play.parts.seed.value}" in play.parts.code.value


# The explorers


def moves(panel, **values) -> None:
    """Every control changes the picture, and setting it back brings the picture back; from another thread, too.

    JupyterLab sends the messages of widgets to a thread of their own, and MLX finishes no other thread's work.
    """
    start, wrong = panel.parts.picture.value, []

    def move():
        for name, value in values.items():
            control = getattr(panel.parts, name)
            before, control.value = control.value, value
            if panel.parts.picture.value == start:
                wrong.append(f"{name} changes nothing")
            control.value = before
            if panel.parts.picture.value != start:
                wrong.append(f"{name} does not come back")

    def elsewhere():
        try:
            move()
        except Exception as error:
            wrong.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    move()
    assert wrong == []


def test_schedule_explorer():
    panel = widgets.schedule_explorer()
    moves(panel, steps=20, size=512)
    assert empirical_mu((panel.parts.size.value // 16) ** 2, 4) == pytest.approx(2.29, abs=0.01)  # as the picture says


def test_rope_explorer():
    panel = widgets.rope_explorer()
    moves(panel, row=0, column=15, among=20)
    panel.parts.picture._handle_custom_msg({"row": 3, "column": 12}, [])  # what the browser sends for a click
    assert (panel.parts.row.value, panel.parts.column.value) == (3, 12)


def test_attention_viewer(klein):
    original = transformer.roped_attention
    panel = widgets.attention_viewer(klein, PROMPT)
    assert transformer.roped_attention is original
    assert [word for word, _ in panel.parts.word.options] == PROMPT.split()
    assert len(panel.parts.block.options) == 1 + BLOCKS
    first = panel.parts.word.options[1][1]
    moves(panel, word=first, step=4, block=3)
    widgets.attention_viewer(klein, r"$a^ $b$ \x_")  # no formula


def test_a_prompt_that_is_too_long_is_refused(klein):
    with pytest.raises(ValueError, match="shorten"):
        widgets.attention_viewer(klein, "a red circle " * 40)


# Where no widget can live


def test_a_panel_is_a_still_picture_too(klein, play):
    panels = [play, widgets.schedule_explorer(), widgets.rope_explorer()]
    panels += [widgets.attention_viewer(klein, PROMPT)]
    panels += [widgets.playground(Klein.from_pretrained("nano-base"))]
    for panel in panels:
        bundle, about = panel.show_still()
        assert "JupyterLab" in bundle["text/plain"]
        assert WIDGET in panel._repr_mimebundle_()
        ((kind, place),) = about.items()
        still = Image.open(io.BytesIO(base64.b64decode(bundle[kind])))
        assert still.size == (2 * place["width"], 2 * place["height"])  # sharp on good screens
        assert len(bundle[kind]) < 100_000


def test_a_notebook_without_a_browser_shows_the_still_picture():
    import nbformat
    from nbclient import NotebookClient

    code = "from kleinlite.book import widgets\n\nwidgets.playground()"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    NotebookClient(notebook, timeout=HANGS, kernel_name="python3").execute()
    still, live = notebook.cells[0].outputs
    film = Image.open(io.BytesIO(base64.b64decode(still["data"]["image/jpeg"])))
    assert WIDGET in live["data"] and WIDGET not in still["data"]
    assert film.width > 2 * film.height  # four steps side by side


def test_references_are_cut_as_the_pipeline_does(play):
    upload(play, ("a.png", gradient(100, 75)))
    size = prepare_reference(Image.new("RGB", (100, 75))).size
    assert (play.parts.width.value, play.parts.height.value) == size
    assert to_pixels(Image.new("RGB", size)).shape[1:3] == size[::-1]


def test_it_says_what_nano_never_learned(play):
    draw(play, prompt="a cat", steps=1)
    assert "nano never learned &quot;cat&quot;: it draws circles" in play.parts.status.value
    draw(play, prompt=PROMPT, steps=1)
    assert "never learned" not in play.parts.status.value
