"""The notebook runner: what it stores, and that the book's own notebooks are stored that way."""

import base64
import io
import json
from pathlib import Path

import pytest
from PIL import Image

from tools import notebooks

ROOT = Path(__file__).resolve().parents[2]
BOOK = notebooks.find_notebooks([])


def code(source: str, *outputs: dict, count: int | None = None, **more) -> dict:
    return {
        "cell_type": "code",
        "metadata": more.pop("metadata", {}),
        "source": source,
        "execution_count": count,
        "outputs": list(outputs),
        **more,
    }


def stream(text: str, name: str = "stdout") -> dict:
    return {"output_type": "stream", "name": name, "text": text}


def shown(**data) -> dict:
    data = {mime.replace("_", "/"): value for mime, value in data.items()}
    size = {"width": 9, "height": 6}
    return {
        "output_type": "display_data",
        "data": data,
        "metadata": {"image/png": size | {"needs_background": "light"}},
    }


def cleaned(*cells: dict) -> list[dict]:
    book = {"cells": list(cells), "metadata": {"widgets": {"state": 1}}, "nbformat": 4, "nbformat_minor": 2}
    result = notebooks.clean_notebook(book)
    assert notebooks.clean_notebook(result) == result, "cleaning twice changes nothing"
    assert result["metadata"] == {"kernelspec": notebooks.KERNEL, "language_info": {"name": "python"}}
    return result["cells"]


def test_counts_ids_and_metadata():
    timing = {"execution": {"iopub.status.busy": "12:00"}, "tags": ["remove-cell"], "alt": "A cat."}
    result = {
        "output_type": "execute_result",
        "data": {"text/plain": "2"},
        "execution_count": 9,
        "metadata": {},
    }
    cells = cleaned(
        code("1 + 1", result, count=9, id="a", metadata=timing),
        code("", id="a"),
        code("x = 1", count=17),
    )
    assert [cell["execution_count"] for cell in cells] == [1, None, 2]
    assert cells[0]["outputs"][0]["execution_count"] == 1
    assert cells[0]["metadata"] == {"tags": ["remove-cell"], "alt": "A cat."}
    assert [cell["id"] for cell in cells] == ["a", "a-2", "cell-3"]


def test_streams():
    (cell,) = cleaned(
        code(
            "x",
            stream("one "),
            stream("line\n"),
            stream("100%|####| 4/4 [00:01]\n", "stderr"),
            stream("step 1\rstep 2\rstep 3\ndone\r\n"),
            count=1,
        )
    )
    assert cell["outputs"] == [
        {"name": "stdout", "output_type": "stream", "text": ["one line\n", "step 3\n", "done\r\n"]}
    ]


def test_pictures_are_stored_once():
    both = shown(image_png="PNG", image_jpeg="JPEG", text_plain="<PIL.Image.Image at 0x7F0012345678>")
    (cell,) = cleaned(code("x", both, shown(image_jpeg="JPEG"), count=1))
    first, second = cell["outputs"]
    assert first["data"] == {"image/png": "PNG", "text/plain": ["<PIL.Image.Image at 0x…>"]}
    assert first["metadata"] == {"image/png": {"width": 9, "height": 6}}
    assert second["metadata"] == {} and second["data"] == {"image/jpeg": "JPEG"}


def test_widgets_are_dropped():
    (cell,) = cleaned(code("x", shown(**{notebooks.WIDGET: {"model_id": "f00"}, "text/plain": "IntSlider()"}), count=1))
    assert cell["outputs"] == []


@pytest.mark.parametrize("kind", ["image/png", "image/jpeg"])
def test_a_widget_leaves_its_still_picture_behind(kind):
    live = {notebooks.WIDGET: {"model_id": "f00"}, kind: "DATA", "text/plain": "Something to play with."}
    (cell,) = cleaned(code("x", shown(**live), count=1))
    assert cell["outputs"][0]["data"] == {kind: "DATA", "text/plain": ["Something to play with."]}


def test_no_folder_of_this_machine():
    trace = {
        "output_type": "error",
        "ename": "E",
        "evalue": f"{ROOT}/x.py",
        "traceback": [f"a {ROOT}/x.py\nb"],
    }
    said = f"{ROOT}/kleinlite/cpu and {Path.home()}/models and {ROOT}"
    (cell,) = cleaned(code("x", stream(said), trace, count=1))
    assert cell["outputs"][0]["text"] == ["kleinlite/cpu and ~/models and "]
    assert cell["outputs"][1]["evalue"] == "x.py" and cell["outputs"][1]["traceback"] == ["a x.py", "b"]


def test_two_runs_store_the_same_bytes(tmp_path, capsys):
    """A real kernel: text, pictures, a progress bar, a cell that raises, and one that is not to be run."""
    pytest.importorskip("nbclient")
    pytest.importorskip("matplotlib")
    tmp_path = tmp_path / "live"  # what the site makes is called so, too
    (tmp_path / "notebooks").mkdir(parents=True)
    path = tmp_path / "notebooks" / "01_demo.ipynb"
    cells = [
        code("import os, warnings\nprint(object(), os.getcwd())\nwarnings.warn('old')\nprint(set('abcdefgh'))"),
        code("from PIL import Image\nImage.new('RGB', (8, 8), 'red')"),
        code("import matplotlib.pyplot as plt\nplt.plot([1, 2]);"),
        code("from tqdm.auto import tqdm\nfor i in tqdm(range(3)):\n    print(i)"),
        code("# NBVAL_RAISES_EXCEPTION\n1 / 0"),
        code("# NBVAL_SKIP\nraise RuntimeError('not here')", stream("from a Mac"), count=3),
    ]
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    assert notebooks.main(["run"], tmp_path) == 0
    first = path.read_text()
    said = capsys.readouterr()
    assert "01_demo.ipynb: changed" in said.out and "code cell 1 wrote to stderr, not kept" in said.err
    assert notebooks.main(["run", "01"], tmp_path) == 0
    assert path.read_text() == first and "unchanged" in capsys.readouterr().out
    assert json.loads(first)["metadata"][notebooks.DRAWN_BY]["weights"] == notebooks.bundled_weights()
    assert notebooks.main(["run"], tmp_path) == 0
    assert "0 of 1 notebooks to run" in capsys.readouterr().out
    stored = json.loads(first)["cells"]
    assert [cell["execution_count"] for cell in stored] == [1, 2, 3, 4, 5, 6]
    assert len(stored[0]["outputs"]) == 1 and "old" not in str(stored[0]["outputs"])
    assert list(stored[1]["outputs"][0]["data"]) == ["image/png", "text/plain"]
    assert stored[3]["outputs"] == [{"name": "stdout", "output_type": "stream", "text": ["0\n", "1\n", "2\n"]}]
    assert stored[4]["outputs"][0]["ename"] == "ZeroDivisionError"
    assert stored[5]["outputs"][0]["text"] == ["from a Mac"]
    assert stored[5]["metadata"] == {}


def test_a_notebook_that_fails_is_left_as_it_was(tmp_path, capsys):
    pytest.importorskip("nbclient")
    (tmp_path / "notebooks").mkdir()
    path = tmp_path / "notebooks" / "01_demo.ipynb"
    path.write_text(json.dumps({"cells": [code("1 / 0")], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    before = path.read_bytes()
    assert notebooks.main(["run"], tmp_path) == 1
    assert path.read_bytes() == before and "ZeroDivisionError" in capsys.readouterr().err


def picture(*levels: int) -> str:
    file = io.BytesIO()
    Image.frombytes("L", (len(levels), 1), bytes(levels)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def drawn(drawn_by: str, *cells: dict) -> dict:
    return {"cells": cleaned(*cells), "metadata": {notebooks.DRAWN_BY: {"code": drawn_by}}}


def test_a_stored_picture_stays_unless_it_changed():
    stored = drawn("old", code("x", shown(image_png=picture(9, 9), text_plain="old"), count=1, id="a"))
    for levels, kept in (((12, 9), True), ((13, 9), False), ((9, 9, 9), False)):
        new = drawn("new", code("x", shown(image_png=picture(*levels), text_plain="new"), count=1, id="a"))
        notebooks.keep_stored(new, stored)
        data = new["cells"][0]["outputs"][0]["data"]
        assert data["image/png"] == (picture(9, 9) if kept else picture(*levels)) and data["text/plain"] == ["new"]


@pytest.mark.parametrize("tags, now, kept", [(["varies"], "old", True), ([], "old", False), (["varies"], "new", False)])
def test_what_varies_from_machine_to_machine_stays_unless_something_changed(tags, now, kept):
    stored = drawn("old", code("x", stream("3 s\n"), count=1, id="a"))
    new = drawn(now, code("x", stream("4 s\n"), count=1, id="a", metadata={"tags": tags}))
    notebooks.keep_stored(new, stored)
    assert new["cells"][0]["outputs"][0]["text"] == ["3 s\n" if kept else "4 s\n"]


EXPLAINED = '''"""Another title.

Promoted from notebooks/01_chapter.ipynb, in other words."""
# a comment
x = 1
class Empty:
    """Nothing, said
    at length."""
'''


def test_what_drew_a_notebook(tmp_path, monkeypatch):
    """Its code, the chapters' modules that it names, and weights wherever they lie; no comment, no other module."""
    package = tmp_path / "kleinlite"
    weights = package / "nano" / "weights" / "vae"
    weights.mkdir(parents=True)
    chapter = '"""A title.\n\nPromoted from notebooks/01_chapter.ipynb.\n"""\n'
    (package / "chapter.py").write_text(chapter + 'x = 1\n\n\nclass Empty:\n    """No."""\n')
    (package / "other.py").write_text(chapter + "y = 1\n")
    (package / "errors.py").write_text("z = 1\n")
    (weights / "a.safetensors").write_bytes(b"weights")
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    book = {"cells": [code("%matplotlib inline\nfrom kleinlite import chapter, errors  # it")], "metadata": {}}

    def now() -> list[str]:
        notebooks.chapter_module.cache_clear()
        notebooks.bundled_weights.cache_clear()
        return notebooks.what_changed(book)

    try:
        assert now() == ["code", "modules", "weights"]
        book["metadata"][notebooks.DRAWN_BY] = notebooks.fingerprints(book)
        assert now() == []
        (package / "other.py").write_text(chapter + "y = 2\n")
        (package / "errors.py").write_text("z = 2\n")
        (package / "chapter.py").write_text(EXPLAINED)
        weights.rename(package / "nano" / "weights" / "autoencoder")
        assert now() == []
        (package / "chapter.py").write_text(chapter + "x = 2\n")
        assert now() == ["modules"]
        book["cells"][0]["source"] += "\nchapter.f()"
        (package / "nano" / "weights" / "autoencoder" / "a.safetensors").write_bytes(b"others")
        assert now() == ["code", "modules", "weights"]
    finally:
        notebooks.chapter_module.cache_clear()
        notebooks.bundled_weights.cache_clear()


@pytest.mark.parametrize("path", BOOK, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_book_is_stored_clean(path):
    text = path.read_text("utf-8")
    book = json.loads(text)
    assert text == notebooks.to_json(notebooks.clean_notebook(book)), "run `make clean-notebooks`"
    unfinished = [i for i, cell in enumerate(book["cells"]) if "TODO" in "".join(cell["source"])]
    assert not unfinished, f"cell {unfinished[0]} still has a TODO"
    written = [cell for cell in book["cells"] if cell["cell_type"] == "code" and "".join(cell["source"]).strip()]
    to_run = [(i, c) for i, c in enumerate(written, start=1) if "nbval-skip" not in notebooks.tags_of(c)]
    to_run = [(i, c) for i, c in to_run if c["id"] != "first-cell"]  # which does nothing here
    missing = [i for i, cell in to_run if not cell["execution_count"]]
    assert not missing, (
        f"{len(missing)} cells were never run, code cell {missing[0]} first: run `make run-notebooks NB={path.stem}`"
    )
    changed = notebooks.what_changed(book)
    assert not changed, f"outputs of other {' and other '.join(changed)}: `make run-notebooks`"
