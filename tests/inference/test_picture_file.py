"""Pictures and their files: modes that lose nothing, drafts that nobody sees, metadata from strangers."""

import array
import json
import os
import pickle
import stat
import struct
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image, PngImagePlugin

from kleinlite import Klein, files, picture_info, save_picture
from kleinlite.errors import FileError, UserError
from kleinlite.inference import picture_file
from kleinlite.inference.picture_file import is_lora, open_picture, read_metadata, to_rgb
from kleinlite.klein import as_reference

MADE = {"model": "nano", "prompt": "a", "seed": 1, "steps": 4, "guidance": 1.0}
MADE |= {"negative_prompt": "", "width": 64, "height": 64, "references": 0}


def reds(image: Image.Image) -> list[int]:
    return list(image.tobytes()[::3])


# ---------------------------------------------------------------- any picture in 8-bit RGB


def test_a_transparent_level_of_sixteen_bits_leaves_the_others(tmp_path):
    Image.new("I;16", (64, 64), 20000).save(tmp_path / "a.png", transparency=5)
    assert to_rgb(Image.open(tmp_path / "a.png")).getpixel((9, 9)) == (78, 78, 78)


@pytest.mark.parametrize("mode", ["I;16", "I;16L", "I;16B", "I"])
def test_sixteen_bits_are_scaled(mode):
    values = array.array("i" if mode == "I" else "H", [0, 128, 257, 32768, 65278, 65535])
    if mode == "I;16B" and sys.byteorder == "little":
        values.byteswap()
    assert reds(to_rgb(Image.frombytes(mode, (6, 1), values.tobytes()))) == [0, 0, 1, 128, 254, 255]


def test_a_sixteen_bit_file_and_its_eight_bits(tmp_path):
    """A reference of 16 bits is the same picture as one of 8."""
    deep = Image.frombytes("I;16", (256, 64), array.array("H", [257 * x for x in range(256)] * 64).tobytes())
    deep.save(tmp_path / "deep.png")
    flat = Image.frombytes("L", (256, 64), bytes(range(256)) * 64)
    assert as_reference(Image.open(tmp_path / "deep.png")).tobytes() == as_reference(flat).tobytes()


def picture_of(levels: list, mode: str = "F") -> Image.Image:
    """A row of pixels with these levels."""
    kind = {"F": "f", "I": "i", "I;16": "H"}[mode]
    return Image.frombytes(mode, (len(levels), 1), array.array(kind, levels).tobytes())


@pytest.mark.parametrize("white", [1, 255, 65535])
@pytest.mark.parametrize("beyond", [0, 2e-7, 0.004, 0.25])  # rounding to float32, to bfloat16, LANCZOS
def test_floating_point_is_scaled(white, beyond):
    levels = [0, white / 4, white / 2, white, white * (1 + beyond), -white * beyond]
    assert reds(to_rgb(picture_of(levels))) == [0, 64, 128, 255, 255, 0]


@pytest.mark.parametrize("mode", ["I", "I;16"])
@pytest.mark.parametrize("brightest", [16, 128, 255])
def test_eight_bits_in_a_wider_kind(mode, brightest):
    assert reds(to_rgb(picture_of([0, 5, brightest], mode))) == [0, 5, brightest]


def test_one_dark_color_is_that_color():
    for image in (Image.new("RGB", (2, 1)), picture_of([0, 0]), picture_of([0, 0], "I")):
        assert reds(to_rgb(image)) == [0, 0]
    assert to_rgb(Image.new("RGB", (2, 1), (9, 0, 0))).getpixel((1, 0)) == (9, 0, 0)


WITHOUT_WHITE = [  # levels, and the kinds in which they have no meaning
    ([0, 70_000], "I"), ([-1, 200], "I"), ([0, 1], "I I;16"), ([0, 15], "I I;16"), ([0, 256], "I I;16"),
    ([0, 341], "F"),
    ([0, 1023], "I I;16 F"), ([4095, 4095], "I I;16 F"), ([0, 2**14 - 1], "I I;16 F"), ([-1, 1], "F"),
    ([0, 2], "F"), ([0, 0.05], "F"), ([0, 1e5], "F"), ([0, float("nan"), 1], "F"), ([0, float("inf")], "F"),
]  # fmt: skip


@pytest.mark.parametrize("levels, mode", [(levels, mode) for levels, kinds in WITHOUT_WHITE for mode in kinds.split()])
def test_levels_without_a_white_are_refused(levels, mode):
    with pytest.raises(ValueError, match="levels from .* has no known white"):
        to_rgb(picture_of(levels, mode))


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "LA"])
def test_a_picture_of_eight_bits_in_which_nothing_is_seen_is_refused(mode):
    image = Image.new("L", (4, 4), 15)
    image.putpixel((0, 0), 0)
    with pytest.raises(ValueError, match="brightest level of the picture is 15 of 255"):
        to_rgb(image.convert(mode))
    with pytest.raises(ValueError, match="0×4 is empty"):
        to_rgb(Image.new(mode, (0, 4)))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "RGBa", "P"])
def test_what_is_transparent_is_white(mode, tmp_path):
    if mode == "P":
        image = Image.new("P", (4, 4))
        image.putpalette([255, 0, 0] * 256)
        image.info["transparency"] = 0
    else:
        image = Image.new("RGBA", (4, 4), (255, 0, 0, 0)).convert(mode)
        if mode == "PA":
            image.putalpha(0)  # which Pillow below 12 loses on the way
    assert to_rgb(image).tobytes() == b"\xff" * 48
    half = Image.new("RGBA", (1, 1), (0, 0, 0, 128))
    assert reds(to_rgb(half)) == [127]
    opaque = Image.new("RGBA", (1, 1), (10, 20, 30, 255))
    assert to_rgb(opaque).tobytes() == bytes([10, 20, 30])


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"])
def test_other_modes_are_as_pillow_has_them(mode):
    image = Image.linear_gradient("L").convert("RGB")
    image = image.convert(mode) if mode != "LAB" else Image.new("LAB", (8, 8), (50, 10, 20))
    assert to_rgb(image).tobytes() == image.convert("RGB").tobytes()


# ---------------------------------------------------------------- color profiles, and much text

D50 = (0.9642, 1.0, 0.8249)
P3 = [(0.51512, 0.24120, -0.00105), (0.29198, 0.69225, 0.04189), (0.15710, 0.06657, 0.78407)]
ADOBE = [(0.60974, 0.31111, 0.01947), (0.20528, 0.62567, 0.06087), (0.14919, 0.06322, 0.74457)]


def make_profile(primaries: list, gamma: float = 2.2, space: bytes = b"RGB ") -> bytes:
    """An ICC profile: the primaries as XYZ under D50, and one exponent; of grey none, and one curve."""

    def xyz(v):
        return b"XYZ \0\0\0\0" + b"".join(struct.pack(">i", round(x * 65536)) for x in v)

    curve = b"curv\0\0\0\0" + struct.pack(">IH", 1, round(gamma * 256)) + b"\0\0"
    tags = {b"desc": b"desc\0\0\0\0" + struct.pack(">I", 5) + b"wide\0" + b"\0" * 78, b"wtpt": xyz(D50)}
    tags |= {letter + b"XYZ": xyz(v) for letter, v in zip((b"r", b"g", b"b"), primaries)}
    tags |= dict.fromkeys([b"rTRC", b"gTRC", b"bTRC"] if primaries else [b"kTRC"], curve)
    at, table, body = 132 + 12 * len(tags), struct.pack(">I", len(tags)), b""
    for tag, data in tags.items():
        data += b"\0" * (-len(data) % 4)
        table += tag + struct.pack(">II", at + len(body), len(data))
        body += data
    kind = struct.pack(">I4sI4s4s4s12s4s", 128 + len(table) + len(body), b"none", 0x02400000, b"mntr", space, b"XYZ ",
                       struct.pack(">6H", 2026, 1, 1, 0, 0, 0), b"acsp")  # fmt: skip
    return (kind.ljust(68, b"\0") + xyz(D50)[8:]).ljust(128, b"\0") + table + body


def test_grey_and_its_profile(tmp_path):
    Image.new("L", (96, 96), 100).save(tmp_path / "x.png", icc_profile=make_profile([], 1.8, b"GRAY"))
    wanted = 255 * (1.055 * ((100 / 255) ** 1.8) ** (1 / 2.4) - 0.055)
    assert to_rgb(open_picture(tmp_path / "x.png")).getpixel((8, 8)) == pytest.approx((wanted,) * 3, abs=1.01)


def test_a_picture_that_may_not_be_read(tmp_path, monkeypatch):
    Image.new("RGB", (96, 96)).save(tmp_path / "x.png")

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Image, "open", refuse)
    with pytest.raises(FileError, match="x.png: Permission denied.$"):
        open_picture(tmp_path / "x.png")


def test_a_note_of_git_lfs_in_a_pictures_place(tmp_path):
    path = tmp_path / "x.png"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(UserError, match="git-lfs's note.*git lfs pull"):
        open_picture(path)


@pytest.mark.parametrize(
    "primaries, gamma, right", [(P3, 2.2, (219, 37, 49)), (ADOBE, 2.19921875, (231, 57, 57))], ids=["P3", "Adobe RGB"]
)
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P"])
def test_another_profile_becomes_srgb(tmp_path, primaries, gamma, right, mode):
    image = Image.new("RGB", (96, 96), (200, 60, 60))
    image = image.quantize() if mode == "P" else image.convert(mode)
    image.save(tmp_path / "x.png", icc_profile=make_profile(primaries, gamma))
    read = to_rgb(open_picture(tmp_path / "x.png"))
    assert read.getpixel((8, 8)) == right and "icc_profile" not in read.info
    assert to_rgb(read).getpixel((8, 8)) == right, "once"


def test_what_is_transparent_stays_so_under_a_profile(tmp_path):
    image = Image.new("RGBA", (96, 96), (200, 60, 60, 255))
    image.paste((200, 60, 60, 0), (0, 0, 48, 96))
    image.save(tmp_path / "x.png", icc_profile=make_profile(P3))
    read = to_rgb(open_picture(tmp_path / "x.png"))
    assert read.getpixel((8, 8)) == (255, 255, 255) and read.getpixel((80, 8)) == (219, 37, 49)


@pytest.mark.parametrize("profile", [b"x", make_profile(P3)[:300], make_profile([], 1.8, b"GRAY"), b""])
def test_a_profile_that_is_damaged_or_not_for_this_picture_is_passed_over(tmp_path, profile):
    Image.new("RGB", (96, 96), (200, 60, 60)).save(tmp_path / "x.png", icc_profile=profile)
    assert to_rgb(open_picture(tmp_path / "x.png")).getpixel((8, 8)) == (200, 60, 60)


@pytest.mark.parametrize("kind", ["zTXt", "iTXt", "tEXt"])
def test_a_png_with_much_text(tmp_path, kind):
    chunks = PngImagePlugin.PngInfo()
    for i in range(70 if kind == "tEXt" else 1):
        words = '{"id": 1}' * 150_000
        if kind == "iTXt":
            chunks.add_itxt("XML:com.adobe.xmp", words, zip=True)
        else:
            chunks.add_text(f"workflow{i}", words, zip=kind == "zTXt")
    Image.new("RGB", (96, 96)).save(tmp_path / "x.png", pnginfo=chunks)
    assert to_rgb(open_picture(tmp_path / "x.png")).size == (96, 96)


def test_a_png_with_text_without_end(tmp_path):
    chunks = PngImagePlugin.PngInfo()
    chunks.add_text("workflow", "x" * (2**26 + 1), zip=True)
    Image.new("RGB", (96, 96)).save(tmp_path / "x.png", pnginfo=chunks)
    with pytest.raises(UserError, match="cannot be read as a picture"):
        open_picture(tmp_path / "x.png")


def test_photographs_are_turned_upright():
    image = Image.linear_gradient("L").resize((80, 112)).convert("RGB")
    turned = image.transpose(Image.Transpose.ROTATE_90)
    turned.getexif()[274] = 6
    assert to_rgb(turned).tobytes() == image.tobytes()
    assert to_rgb(to_rgb(turned)).tobytes() == image.tobytes(), "once"


def test_too_many_pixels_are_refused_before_they_are_decoded(tmp_path, recwarn, monkeypatch):
    path = tmp_path / "large.png"
    Image.new("1", (13_000, 13_000)).save(path)  # 169 million pixels in 21 kB
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", lambda _: pytest.fail("it was decoded"))
    with pytest.raises(ValueError, match=r"large.png has more than 89 million pixels"):
        open_picture(path)
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    with pytest.raises(ValueError, match="13000×13000 is too large, at most 89 million"):
        as_reference(Image.open(path))
    assert [w for w in recwarn if "kleinlite" in str(w.filename)] == []


def test_a_picture_that_breaks_off_is_a_sentence(tmp_path):
    path = tmp_path / "cut.png"
    Image.effect_noise((80, 80), 50).save(path)
    path.write_bytes(path.read_bytes()[:2000])
    for read in (open_picture, lambda path: as_reference(Image.open(path))):
        with pytest.raises(ValueError, match="cannot be read"):
            read(path)


# ---------------------------------------------------------------- writing


def test_many_processes_write_one_name(tmp_path):
    """Whoever comes last wins; at every moment the file is one of theirs, whole."""
    code = "import sys\nfrom PIL import Image\nfrom kleinlite import save_picture\n"
    code += "image = Image.effect_noise((300, 300), 50)\n"
    code += "for i in range(30): save_picture(image, sys.argv[1])"
    path = tmp_path / "x.png"
    environment = os.environ | {"KLEINLITE_CPU": "off"}
    writers = [subprocess.Popen([sys.executable, "-c", code, path], env=environment) for _ in range(3)]
    seen = 0
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            Image.open(path).load()
            seen += 1
    assert [writer.returncode for writer in writers] == [0, 0, 0] and seen > 0
    assert os.listdir(tmp_path) == ["x.png"]


def test_a_link_in_the_drafts_way_is_not_followed(tmp_path, monkeypatch):
    precious = tmp_path / "precious.txt"
    precious.write_text("precious")
    monkeypatch.setattr("kleinlite.files.secrets.token_hex", lambda _: "1")
    (tmp_path / ".kleinlite-1.partial.png").symlink_to(precious)
    with pytest.raises(FileError):
        save_picture(Image.new("RGB", (8, 8)), tmp_path / "x.png")
    assert precious.read_text() == "precious"


def test_permissions_are_kept(tmp_path):
    path, mode = tmp_path / "x.png", lambda path: stat.S_IMODE(path.stat().st_mode)
    old = os.umask(0o027)
    try:
        save_picture(Image.new("RGB", (8, 8)), path)
        assert mode(path) == 0o640  # as the umask says
        path.chmod(0o600)
        save_picture(Image.new("RGB", (8, 8)), path)
        assert mode(path) == 0o600
    finally:
        os.umask(old)


def test_leftovers_go_with_the_next_picture(tmp_path):
    old, new, other = (tmp_path / name for name in (".kleinlite-1.partial", ".kleinlite-2.partial", ".y.partial"))
    for draft in (old, new, other):
        draft.touch()
    for draft in (old, other):
        os.utime(draft, (0, 0))
    save_picture(Image.new("RGB", (8, 8)), tmp_path / "x.png")
    assert sorted(os.listdir(tmp_path)) == [".kleinlite-2.partial", ".y.partial", "x.png"]  # one may be in work


def test_a_name_as_long_as_names_can_be(tmp_path):
    save_picture(Image.new("RGB", (8, 8)), tmp_path / ("x" * 251 + ".png"))


@pytest.mark.parametrize("name", ["a.jpg", "a", ".", "folder.png"])
def test_a_picture_is_a_png_by_its_name_too(name, tmp_path):
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ValueError, match=r"a\.png\.$|is a folder: name a file in it"):
        save_picture(Image.new("RGB", (8, 8)), tmp_path / name)
    assert os.listdir(tmp_path) == ["folder.png"]


def test_a_failure_leaves_the_old_picture(tmp_path, monkeypatch):
    path = tmp_path / "x.png"
    save_picture(Image.new("RGB", (8, 8)), path)
    before = path.read_bytes()
    monkeypatch.setattr(files.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match=r"x\.png: No space left on device\."):
        save_picture(Image.new("RGB", (9, 9)), path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["x.png"]


# ---------------------------------------------------------------- what a picture says about itself


def say(path: Path, text: str) -> Path:
    chunk = PngImagePlugin.PngInfo()
    chunk.add_itxt("kleinlite", text)
    Image.new("RGB", (16, 16)).save(path, pnginfo=chunk)
    return path


@pytest.mark.parametrize(
    "text",
    ["[" * 5000 + "]" * 5000, '{"a":' * 5000 + "1" + "}" * 5000, "{", "5", "null", "[1]", '"x"', "1" * 5000, "\0"],
)
def test_damaged_metadata(text, tmp_path):
    path = say(tmp_path / "x.png", text)
    for read in (picture_info, read_metadata):
        with pytest.raises(ValueError, match="damaged"):
            read(path)


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers(), max_size=2)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from([*MADE, "quantize", "parts", "noise", "x"]), values))
def test_any_metadata_is_whole_or_refused(tmp_path_factory, said):
    path = say(tmp_path_factory.getbasetemp() / "said.png", json.dumps(MADE | said))
    try:
        made = read_metadata(path)
    except ValueError as error:
        assert "said.png" in str(error)
    else:
        assert all(isinstance(made[name], kind) for name, kind in picture_file.REMEMBERED.items() if name in made)
        assert isinstance(made.get("parts", ""), (str, dict))


def test_noise_stands_for_a_seed(tmp_path):
    said = {name: value for name, value in MADE.items() if name != "seed"}
    assert read_metadata(say(tmp_path / "x.png", json.dumps(said | {"noise": True})))["noise"] is True
    for damaged in (said | {"noise": 1}, MADE | {"parts": {"autoencoder": 5}}, MADE | {"parts": ["4b"]}):
        with pytest.raises(ValueError, match="damaged"):
            read_metadata(say(tmp_path / "x.png", json.dumps(damaged)))


def test_a_missing_file_is_a_sentence(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        picture_info(tmp_path / "nowhere.png")


def test_every_way_to_save_a_picture_keeps_what_made_it(tmp_path):
    picture = Klein.from_pretrained()("a red star", steps=1, seed=3, progress=False)
    made = picture_info(picture)
    assert made["prompt"] == "a red star"
    picture.save(tmp_path / "a.png")
    picture.save(tmp_path / "b", "PNG", optimize=True)
    save_picture(picture, tmp_path / "c.png")
    again = pickle.loads(pickle.dumps(picture))
    again.save(tmp_path / "d.png")
    for name in ("a.png", "b", "c.png", "d.png"):
        assert picture_info(tmp_path / name) == made
        assert open_picture(tmp_path / name).tobytes() == picture.tobytes()
    save_picture(Image.open(tmp_path / "c.png"), tmp_path / "g.png")
    assert picture_info(tmp_path / "g.png") == made
    picture.save(tmp_path / "e.jpg")
    picture.save(tmp_path / "f.png", pnginfo=None)  # whoever does not want it says so
    with pytest.raises(UserError, match="does not say"):
        picture_info(tmp_path / "f.png")


def test_a_picture_names_no_adapter_in_another_folder():
    said = {"file": "style.safetensors", "scale": 0.5, "sha256": "0" * 64}
    assert is_lora(said)
    assert not is_lora(said | {"file": "../style.safetensors"}) and not is_lora(said | {"file": "/etc/passwd"})
