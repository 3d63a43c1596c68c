"""The atlas of wrong pictures: it shows every mistake of the chapters, as they store it."""

import base64
import io
import json
from pathlib import Path

import atlas
import pytest
from PIL import Image

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
STORED = {path.name: json.loads(path.read_text("utf-8")) for path in sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))}
PAGE = (NOTEBOOKS / "atlas.md").read_text("utf-8")


def shown(data: str, words: str, size: dict[str, int]) -> str:
    assert Image.open(io.BytesIO(base64.b64decode(data))).size == (size["width"], size["height"])
    return f"picture of {size['width']} × {size['height']}: {words}"


def test_every_mistake_of_the_chapters_is_there():
    shown = {(f"{chapter}.ipynb", name) for chapter, name in atlas.MARKER.findall(PAGE)}
    compared = {(chapter, name) for chapter, notebook in STORED.items() for name in atlas.read_mistakes(notebook)}
    assert len(compared) > 10 and shown == compared, "notebooks/atlas.md shows each mistake, and no other"


def test_what_an_entry_says():
    mistakes = atlas.read_mistakes(STORED["02_position_ids.ipynb"])
    swapped = mistakes["h and w swapped"]
    assert (swapped.where, swapped.caught) == ("position_ids.image_ids", "last id")
    assert swapped.code == "```diff\n- zero + t, h, w, zero\n+ zero + t, w, h, zero\n```"
    halves = mistakes["pairs by halves"]
    assert "+ mx.split(x, 2, axis=-1)[0]" in halves.code, "a name is written out"
    size = halves.picture.size
    right = [mistake.picture.crop((0, 0, size[0], size[1] // 2)) for mistake in mistakes.values()]
    assert size == (384, 192) and all(picture.tobytes() == right[0].tobytes() for picture in right)
    assert halves.picture.tobytes() != swapped.picture.tobytes()
    text = atlas.insert_mistakes("Look:\n\n{{#mistake 02_position_ids: h and w swapped}}\n", STORED, shown)
    assert text.startswith("Look:") and "](02_position_ids.ipynb#what-if-this-line-were-wrong)" in text
    assert "picture of 384 × 192: Four pictures drawn rightly, and below them with the mistake: h and w swapped" in text
    assert text.rstrip().endswith("Caught by the check: *last id*.")


def test_a_marker_that_is_only_talked_about():
    assert atlas.insert_mistakes(r"`\{{#mistake 02_position_ids: x}}`", STORED, shown).startswith("`\\{{#mistake")


def test_a_method_that_was_replaced():
    patched = atlas.read_mistakes(STORED["01_autoencoder.ipynb"])
    assert patched["statistics left out"].where == "LatentBatchNorm.denormalize"
    assert "def other_groups(self, x):" in patched["MLX's group order"].code


@pytest.mark.parametrize(
    ("marker", "sentence"),
    [
        ("02_position_ids: no such thing", "02_position_ids.ipynb compares no mistake called “no such thing”"),
        ("00_idea: x", "00_idea.ipynb compares no mistake called “x”"),
        ("99_nowhere: x", "99_nowhere.ipynb compares no mistake"),
    ],
)
def test_a_mistake_that_is_not_there(marker, sentence):
    with pytest.raises(LookupError, match=sentence):
        atlas.insert_mistakes(f"{{{{#mistake {marker}}}}}", STORED, shown)


def test_outputs_of_another_run():
    """The cell was changed, or its picture has another layout: nobody's rows are shown under a wrong name."""
    notebook = json.loads(json.dumps(STORED["05_transformer.ipynb"]))
    compared = next(c for c in notebook["cells"] if "mistakes.compare(" in "".join(c["source"]))
    (text,) = (output for output in compared["outputs"] if output["output_type"] == "stream")
    text["text"] = [line.replace("epsilon 1e-5:", "epsilon:") for line in text["text"]]
    with pytest.raises(LookupError, match=r"cannot be shown: .* run the notebook"):
        atlas.insert_mistakes("{{#mistake 05_transformer: epsilon 1e-5}}", {"05_transformer.ipynb": notebook}, shown)
    text["text"] = text["text"][:1]
    with pytest.raises(LookupError, match="is not 2 rows of 96 pixels"):
        atlas.insert_mistakes("{{#mistake 05_transformer: epsilon 1e-5}}", {"05_transformer.ipynb": notebook}, shown)
