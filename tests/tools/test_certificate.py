"""A certificate carries the code that passed the tests and drew its picture; on any other picture its check fails."""

import json

import pytest
from PIL import Image

from tools import certificate, promote, workbook

CHAPTER = workbook.ROOT / "notebooks" / "04_sampling.ipynb"


@pytest.fixture(scope="module")
def module() -> promote.Module:
    return next(m for m in promote.build_modules([CHAPTER]) if m.path == "kleinlite/sampling.py")


@pytest.fixture
def made(module, monkeypatch):
    """A certificate of the book's own bodies, in a folder that git does not know."""

    def make(folder):
        monkeypatch.setattr(certificate, "read_mine", lambda chapter, root: (CHAPTER, module))
        return certificate.make("04", "Ada", folder)

    return make


@pytest.fixture
def quick(monkeypatch):
    """Neither tests nor noise: a picture that depends on the code."""

    def draw(module, who, root):
        return 7, Image.new("RGB", (96, 96), (len(module.text) % 256, len(who), 0))

    monkeypatch.setattr(certificate, "draw_and_test", draw)


@pytest.mark.usefixtures("quick")
def test_it_can_be_checked_and_not_be_changed(made, tmp_path, capsys):
    file = made(tmp_path)
    assert file.name == "certificate-04.png"
    certificate.check(file, tmp_path)
    said = capsys.readouterr().out
    assert "def euler(" in said and said.endswith("Ada's code passes 7 tests and draws this picture.\n")
    with Image.open(file) as sheet:
        words = sheet.text
        other = sheet.copy()
    other.paste("green", (0, 0, 40, 40))
    kept = certificate.PngImagePlugin.PngInfo()
    kept.add_itxt(certificate.KEY, words[certificate.KEY])
    other.save(tmp_path / "other.png", pnginfo=kept)
    with pytest.raises(SystemExit, match="draws another picture than"):
        certificate.check(tmp_path / "other.png", tmp_path)
    other.save(tmp_path / "plain.png")
    with pytest.raises(SystemExit, match=r"plain\.png is no certificate of this book"):
        certificate.check(tmp_path / "plain.png", tmp_path)
    kept = certificate.PngImagePlugin.PngInfo()
    kept.add_itxt(certificate.KEY, json.dumps(json.loads(words[certificate.KEY]) | {"path": "../../elsewhere.py"}))
    other.save(tmp_path / "path.png", pnginfo=kept)
    with pytest.raises(SystemExit, match="is no certificate"):
        certificate.check(tmp_path / "path.png", tmp_path)


def test_chapters_without_a_picture_have_none(monkeypatch, tmp_path):
    other = promote.Module("", "kleinlite/lora.py", "", [])
    monkeypatch.setattr(certificate, "read_mine", lambda *_: (tmp_path / "14_lora.ipynb", other))
    with pytest.raises(SystemExit, match="14_lora draws no picture by itself: chapters 1 to 6"):
        certificate.make("14", "Ada", tmp_path)


@pytest.mark.slow
def test_the_books_own_bodies_pass_and_a_wrong_one_does_not(module):
    tests, picture = certificate.draw_and_test(module, "Ada")
    assert tests > 10 and picture.size == (96, 96) and len(picture.getcolors(96 * 96)) > 50
    wrong = module._replace(text=module.text.replace("def shift_time(", "def shift_time_(", 1))
    with pytest.raises(SystemExit, match="does not pass the book's tests: no certificate"):
        certificate.draw_and_test(wrong, "Ada")
