"""A folder of pictures and captions: what is read, and what gets a sentence."""

import unicodedata

import pytest
from PIL import Image

from kleinlite.nano.crosses import cross
from kleinlite.trainer.folder import read_folder


def test_a_folder_is_read_in_order(folder):
    examples = read_folder(folder)
    assert [e.name for e in examples] == list("012345")
    assert [e.caption for e in examples] == [cross(seed)[1] for seed in range(6)]
    assert all(e.picture.size == (96, 96) and e.references == () for e in examples)
    assert {e.picture.size for e in read_folder(folder, (64, 80))} == {(64, 80)}


@pytest.mark.parametrize("size", [None, (64, 64)])
def test_what_is_transparent_is_white_and_16_bits_are_scaled(folder, size):
    """As for a reference picture: an adapter learns what a call would see."""
    Image.new("RGBA", (96, 96), (0, 0, 0, 0)).save(folder / "0.png")
    Image.new("I;16", (96, 96), 128 * 257).save(folder / "1.png")
    clear, grey, *_ = read_folder(folder, size)
    assert clear.picture.getpixel((5, 5)) == (255, 255, 255) and grey.picture.getpixel((5, 5)) == (128, 128, 128)


def test_references_belong_to_their_picture(folder):
    for seed in range(6):
        for suffix in ("_ref1", "_ref2"):
            Image.new("RGB", (64, 96), (seed, 0, 0)).save(folder / f"{seed}{suffix}.png")
    assert [[r.getpixel((0, 0))[0] for r in e.references] for e in read_folder(folder)] == [[i, i] for i in range(6)]


def test_references_come_by_their_numbers(folder):
    for seed in range(6):
        for number, suffix in ((40, "_ref"), (90, "_ref9"), (100, "_ref10"), (110, "_ref110")):
            Image.new("RGB", (64, 96), (number, 0, 0)).save(folder / f"{seed}{suffix}.png")
    for example in read_folder(folder):
        assert [r.getpixel((0, 0))[0] for r in example.references] == [40, 90, 100, 110]


def test_examples_come_by_their_numbers(folder):
    for kind in ("png", "txt"):
        (folder / f"1.{kind}").rename(folder / f"10.{kind}")
    assert [e.name for e in read_folder(folder)] == ["0", "2", "3", "4", "5", "10"]


@pytest.mark.parametrize("pictures", ["NFC", "NFD"])
@pytest.mark.parametrize("others", ["NFC", "NFD"])
def test_an_accent_is_the_same_however_it_is_written(folder, caplog, pictures, others):
    (folder / "3.png").rename(folder / f"{unicodedata.normalize(pictures, 'Café3')}.png")
    (folder / "3.txt").rename(folder / f"{unicodedata.normalize(others, 'café3')}.txt")
    for stem in ("0", "1", "2", "4", "5", unicodedata.normalize(others, "café3")):
        Image.new("RGB", (96, 96)).save(folder / f"{stem}_ref.png")
    assert [len(e.references) for e in read_folder(folder)] == [1] * 6 and caplog.messages == []
    assert {e.name for e in read_folder(folder)} == {*"01245", unicodedata.normalize(pictures, "Café3")}


def test_names_that_are_one_to_the_eye_are_refused(folder):
    for form in ("NFC", "NFD"):
        Image.new("RGB", (96, 96)).save(folder / f"{unicodedata.normalize(form, 'é')}.png")
    if len(list(folder.glob("*.png"))) == 7:
        pytest.skip("this disk takes both for one name")
    with pytest.raises(ValueError, match="differ in capitals alone, or in how their letters are written"):
        read_folder(folder)


def break_it(folder, how):
    if how == "no captions":
        for path in folder.glob("*.txt"):
            path.unlink()
    elif how == "one picture":
        for path in folder.glob("[1-5]*"):
            path.unlink()
    elif how == "nothing":
        for path in folder.iterdir():
            path.unlink()
    elif how == "sizes":
        Image.new("RGB", (64, 64)).save(folder / "3.png")
    elif how == "damaged":
        (folder / "3.png").write_bytes(b"\x89PNG\r\n")
    elif how == "empty caption":
        (folder / "3.txt").write_text(" \n")
    elif how == "not text":
        (folder / "3.txt").write_bytes(b"\xff\xfe\x00")
    elif how == "tiny":
        Image.new("RGB", (32, 32)).save(folder / "3.png")
    elif how == "some references":
        Image.new("RGB", (96, 96)).save(folder / "3_ref.png")


BAD = {
    "no captions": "0.txt, .*1.txt, .*and 2 more missing: every picture needs a caption",
    "one picture": "There is one picture in",
    "nothing": "There is no picture in",
    "sizes": r"differ in size \(5 of 96x96, 1 of 64x64\): scale and cut them with --size 96x96",
    "damaged": "3.png cannot be read as a picture",
    "empty caption": "3.txt is empty",
    "not text": "3.txt is not UTF-8",
    "tiny": "3.png: .*at least 64 pixels",
    "some references": "3.png: most pictures here have 0 references",
}


@pytest.mark.parametrize("how", BAD)
def test_a_bad_folder_gets_a_sentence(folder, how):
    break_it(folder, how)
    with pytest.raises(ValueError, match=BAD[how]) as error:
        read_folder(folder)
    assert str(error.value).endswith(".")


@pytest.mark.parametrize("ending", ["jfif", "JPG"])
def test_pictures_of_all_kinds_that_pillow_reads(folder, ending):
    (folder / "3.png").unlink()
    Image.new("RGB", (96, 96)).save(folder / f"3.{ending}", "JPEG" if ending == "jfif" else None)
    assert len(read_folder(folder)) == 6


@pytest.mark.parametrize("there", [True, False])
def test_a_caption_without_a_picture_is_named(folder, there):
    (folder / "3.png").unlink()
    if there:
        (folder / "3.heic").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    with pytest.raises(ValueError, match="3.txt: no picture of that name can be read"):
        read_folder(folder)


def test_what_is_left_out_is_said_and_hidden_files_are_nobodys(folder, caplog):
    for name in ("._0.png", "._0.txt", ".thumb.jpg", ".DS_Store"):
        (folder / name).write_bytes(b"\0\5\x16\7")
    assert len(read_folder(folder)) == 6 and caplog.messages == []
    (folder / "more").mkdir()
    (folder / "notes.md").write_text("")
    Image.new("RGB", (96, 96)).save(folder / "9_ref.png")  # of no picture
    Image.new("RGB", (96, 96)).save(folder / "3.jpg")  # beside 3.png, under one caption
    read_folder(folder)
    assert caplog.messages == ["Nothing is learned from 3.jpg, 9_ref.png, more, notes.md."]


def test_a_caption_as_windows_saves_it(folder):
    (folder / "0.txt").write_text("a red cross", encoding="utf-8-sig")
    assert read_folder(folder)[0].caption == "a red cross"


@pytest.mark.parametrize(
    "size, sentence",
    [
        ((100, 96), "The width must be a multiple of 16 pixels, 100 is not: try 96"),
        ((96, 0), "The height must be a multiple of 16 pixels, 0 is not: try 16"),
    ],
)
def test_a_size_that_pictures_cannot_get(folder, size, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_folder(folder, size)


def test_the_largest_size(folder):
    for size in ((1024, 1024), (2048, 2048)):
        assert {e.picture.size for e in read_folder(folder, size)} == {(1024, 1024)}


def test_what_is_no_folder(tmp_path):
    with pytest.raises(ValueError, match="is no folder"):
        read_folder(tmp_path / "none")
