"""A certificate: a picture that a reader's own code drew, and the code inside it, so that anybody can check it.

    python -m tools.certificate 05 "Ada Lovelace"        certificate-05.png, once the book's tests pass
    python -m tools.certificate check certificate-05.png    runs the tests on its code, and draws the picture again

A check runs the code that the file carries, so read it first where you do not know its author; `check` prints it.
"""

import argparse
import json
import re
import subprocess
import zlib
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, PngImagePlugin

from tools import promote
from tools.holes import HOLES
from tools.workbook import DRAWN, ROOT, read_mine, repository_with, run_in, run_tests

KEY = "kleinlite certificate"
PROMPT = "a red house under a yellow sun"
DRAW = f"""\
import sys
from kleinlite import Klein
Klein.from_pretrained()({PROMPT!r}, seed=int(sys.argv[1]), progress=False).save(sys.argv[2])"""
SCALE = 4  # pixels of the certificate for one of the picture
CLOSE = 8  # levels by which the picture of another machine may differ, at most


def draw_and_test(module: promote.Module, who: str, root: Path = ROOT) -> tuple[int, Image.Image]:
    """How many of the book's tests pass on a module, and the picture that it draws from the noise of a name.

    Raises SystemExit with a sentence if a test fails.
    """
    name = Path(module.path).stem
    with repository_with(module, root) as folder:
        done = run_tests(folder, name)
        if done.returncode:
            raise SystemExit(f"{done.stdout[-2000:]}\nThis {name} does not pass the book's tests: no certificate.")
        drawn = run_in(folder, "-c", DRAW, str(zlib.crc32(who.encode())), "picture.png")
        if drawn.returncode:
            raise SystemExit(f"{drawn.stderr[-2000:]}\nThis {name} passes the tests and draws nothing.")
        with Image.open(folder / "picture.png") as picture:
            return int(re.findall(r"(\d+) passed", done.stdout)[-1]), picture.convert("RGB")


def lay_out(picture: Image.Image, lines: list[str]) -> Image.Image:
    """The picture, and below it what it certifies."""
    width = SCALE * picture.width
    sheet = Image.new("RGB", (width, SCALE * picture.height + 28 * len(lines) + 24), "white")
    sheet.paste(picture.resize((width, SCALE * picture.height), Image.Resampling.NEAREST))
    pen = ImageDraw.Draw(sheet)
    for i, line in enumerate(lines):
        font = ImageFont.load_default(22 if i == 0 else 15)
        pen.text((width / 2, SCALE * picture.height + 26 + 28 * i), line, "#1e293b", font, anchor="mm")
    return sheet


def make(chapter: str, who: str, root: Path = ROOT) -> Path:
    """Write the certificate of a chapter's workbook; returns its file."""
    path, module = read_mine(chapter, root)
    name = Path(module.path).stem
    if name not in DRAWN:
        raise SystemExit(f"{path.stem} draws no picture by itself: chapters 1 to 6 have certificates.")
    tests, picture = draw_and_test(module, who, root)
    asked = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, cwd=root, capture_output=True, text=True).stdout.strip()
    title = json.loads(path.read_text("utf-8"))["cells"][0]["source"][0].lstrip("# ").strip()
    lines = [
        who, f"wrote {len(HOLES[name])} bodies of chapter {int(path.stem[:2])}, {title},",
        f"which pass {tests} tests and drew this picture.", f"kleinlite {commit}",
    ]  # fmt: skip
    words = PngImagePlugin.PngInfo()
    words.add_itxt(KEY, json.dumps({"who": who, "path": module.path, "tests": tests, "code": module.text}))
    file = root / f"certificate-{path.stem[:2]}.png"
    lay_out(picture, lines).save(file, pnginfo=words)
    print(f"{file.name}: send it, and anybody can check it by `make certificate CHECK={file.name}`.")
    return file


def check(file: Path, root: Path = ROOT) -> None:
    """Run the code of a certificate. Raises SystemExit with a sentence if it is not what it says."""
    with Image.open(file) as sheet:
        said = json.loads(getattr(sheet, "text", {}).get(KEY, "{}"))
        pixels = np.asarray(sheet.convert("RGB"), dtype=int)
    if not said or Path(said["path"]).stem not in DRAWN:
        raise SystemExit(f"{file} is no certificate of this book.")
    print(said["code"])
    module = promote.Module("", f"kleinlite/{Path(said['path']).stem}.py", said["code"], [])
    tests, picture = draw_and_test(module, said["who"], root)
    again = np.asarray(picture, dtype=int)
    shown = pixels[: SCALE * len(again) : SCALE, ::SCALE]
    if shown.shape != again.shape or np.abs(shown - again).max() > CLOSE:
        raise SystemExit(f"{said['who']}'s code passes {tests} tests, but draws another picture than {file} shows.")
    print(f"{said['who']}'s code passes {tests} tests and draws this picture.")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make a certificate of a chapter's workbook, or check one.")
    parser.add_argument("chapter", help="5, 05 or 05_transformer; or check")
    parser.add_argument("who", help="the name that stands on it; with check, its file")
    options = parser.parse_args(argv)
    if options.chapter == "check":
        check(Path(options.who))
    else:
        make(options.chapter, options.who)


if __name__ == "__main__":
    main()
