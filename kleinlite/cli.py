"""The command line: `kleinlite generate`, `kleinlite info`, `kleinlite models`. Hand-written.

What is slow to import is imported by the command that needs it, so that `--help` answers at once. A mistake
in what was typed, or in a file, ends with one sentence on stderr and status 2, and leaves no file behind.
Ctrl-C ends with status 130. A mistake in this program keeps its traceback.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import re
import sys
import tempfile
import time
import traceback
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from . import __version__

if TYPE_CHECKING:
    from PIL import Image

    from .pipeline import Klein

PARTS = ("transformer", "text_encoder", "vae")
PLAIN = argparse.RawDescriptionHelpFormatter
EXAMPLES = """\
examples:
  kleinlite generate "a red circle above a blue square" --seed 7 -o circle.png
  kleinlite generate "make the circle green" --image circle.png
  kleinlite generate --like circle.png --seed 8
"""


class Facts(NamedTuple):
    """What there is to know about a released model before it is fetched."""

    transformer: int  # parameters
    text_encoder: int
    gigabytes: float  # of the files that we fetch
    licence: str
    gated: bool  # fetched only by those who accepted the licence


SMALL = Facts(3_875_544_576, 4_022_468_096, 16.0, "Apache-2.0", gated=False)
LARGE = Facts(9_078_581_248, 8_190_735_360, 34.7, "FLUX Non-Commercial", gated=True)
RELEASED = {"4b": SMALL, "base-4b": SMALL, "9b": LARGE, "base-9b": LARGE}

# What a picture of ours remembers: see `Request.describe`.
REMEMBERED = {"model": str, "prompt": str, "seed": int, "steps": int, "guidance": (int, float)}
REMEMBERED |= {"negative_prompt": str, "width": int, "height": int, "references": int}

# ---------------------------------------------------------------- what is typed


class Parser(argparse.ArgumentParser):
    """argparse, with a sentence in place of the usage block."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message} (see `{self.prog} --help`)\n")


def size(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)[x×](\d+)", text, re.IGNORECASE)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not WIDTHxHEIGHT in pixels, such as 96x96 or 512x768")
    return int(found[1]), int(found[2])


def whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def decimal(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def make_parser() -> Parser:
    parser = Parser(prog="kleinlite", description="Draw pictures with FLUX.2 [klein], built from scratch in MLX.")
    parser.add_argument("--version", action="version", version=f"kleinlite {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def command(name, run, about, **more):
        sub = commands.add_parser(name, help=about, description=about, allow_abbrev=False, **more)
        sub.set_defaults(run=run, parser=sub)
        return sub.add_argument

    about = "draw a picture; what is not said comes from the model's own files"
    add = command("generate", generate, about, epilog=EXAMPLES, formatter_class=PLAIN)
    add("prompt", nargs="?", metavar="PROMPT", help="what to draw, in quotes; with --image: what to change")
    add("--model", metavar="NAME", help="see `kleinlite models`; or a hub repository or a folder (default: nano)")
    add("--size", type=size, metavar="WxH", help="pixels, multiples of 16 (default: the model's, or --image's)")
    add("--steps", type=whole, metavar="N", help="looks at the picture on its way out of the noise")
    add("--guidance", type=decimal, metavar="G", help="how far to follow the prompt, from 1; base models only")
    add("--negative", metavar="TEXT", help="what to stay away from; needs guidance")
    add("--seed", type=whole, metavar="N", help="the same seed draws the same picture (default: a random one)")
    add("--image", nargs="+", action="extend", metavar="REF", help="pictures to edit or to combine")
    like = "draw again what this picture says about itself; other options override, and another --model brings "
    add("--like", metavar="FILE", help=like + "its own steps and guidance")
    output = "a .png file, replaced if there is one (default: a new file here, named after prompt and seed)"
    add("-o", "--output", type=Path, metavar="FILE", help=output)

    add = command("info", info, "show what made a picture or, without a file, the versions for a bug report")
    add("file", nargs="?", metavar="FILE", help="a picture that kleinlite wrote")
    command("models", models, "list the models that have a name, and which of them are on this machine")
    return parser


# ---------------------------------------------------------------- files


def open_picture(path: str) -> Image.Image:
    """A picture from a file, turned upright as its camera says."""
    from PIL import Image, ImageOps

    if not Path(path).is_file():
        what = "is a folder" if Path(path).is_dir() else "does not exist"
        raise ValueError(f"{path} {what}: name a picture's file.")
    try:
        with Image.open(path) as image:
            image.load()  # text chunks may come after the pixels
            return ImageOps.exif_transpose(image)
    except Exception as error:  # there are many ways to stumble over a broken file, and Pillow knows them
        why = "" if isinstance(error, Image.UnidentifiedImageError) else f" ({error})"
        raise ValueError(f"{path} cannot be read as a picture{why}: use a PNG, JPEG or WebP file.") from None


def open_reference(path: str) -> Image.Image:
    """A picture that the model can take as a reference."""
    from .pipeline import prepare_reference

    image = open_picture(path)
    try:
        prepare_reference(image)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return image


def read_metadata(path: str) -> dict:
    """What made the picture in a file."""
    from .pipeline import picture_info

    image = open_picture(path)
    try:
        made = picture_info(image)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    known = made if isinstance(made, dict) else {}
    if not all(isinstance(known.get(name), kind) for name, kind in REMEMBERED.items()):
        raise ValueError(f"{path}: what it says about itself is damaged: give the prompt and the options instead.")
    return made


def new_name(prompt: str, seed: int) -> Path:
    """A new file in this folder: a-red-circle-7.png or, if that is there, a-red-circle-7-2.png, and so on."""
    plain = unicodedata.normalize("NFKD", prompt).encode("ascii", "ignore").decode().lower()
    stem = "-".join(re.findall("[a-z0-9]+", plain))[:60].strip("-") or "picture"
    names = itertools.chain([f"{stem}-{seed}.png"], (f"{stem}-{seed}-{i}.png" for i in itertools.count(2)))
    return next(path for path in map(Path, names) if not os.path.lexists(path))


def check_output(path: Path) -> None:
    """Refuse a file that could not be written, before there is a picture to lose."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file in it, such as {path / 'picture.png'}.")
    if path.suffix.lower() != ".png":
        example = path.with_suffix(".png") if path.name else "picture.png"
        raise ValueError(f"Pictures are written as PNG and {path} does not end in .png: try {example}.")
    if not path.parent.is_dir():
        raise ValueError(f"The folder {path.parent} does not exist: make it first, or name another.")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        message = f"Nothing can be written in {path.parent} ({error.strerror}): name another folder."
        raise ValueError(message) from None


# ---------------------------------------------------------------- generate


def choose(args: argparse.Namespace) -> tuple[str, dict]:
    """The model's name and `Klein.__call__`'s arguments: what was typed and, else, what --like says."""
    like = read_metadata(args.like) if args.like else {}
    model = args.model or like.get("model", "nano")
    if model != like.get("model"):
        like = {key: value for key, value in like.items() if key not in ("steps", "guidance")}
    if like.get("references") and not args.image:
        was = f"{args.like} was made from {like['references']} other picture(s), which it does not contain"
        raise ValueError(f"{was}: name them with --image.")

    def pick(name, typed, default=None):
        return like.get(name, default) if typed is None else typed

    prompt, negative = pick("prompt", args.prompt), pick("negative_prompt", args.negative, "")
    if prompt is None:
        args.parser.error('say what to draw, in quotes and before --image: kleinlite generate "a red circle"')
    for text in (prompt, negative):
        if any("\ud800" <= c <= "\udfff" for c in text):  # how Python carries bytes that are not UTF-8
            raise ValueError(f"{text!r} is not valid UTF-8 text: check the terminal's encoding.")
    width, height = args.size or (like.get("width"), like.get("height"))
    return model, {
        "prompt": prompt,
        "images": [open_reference(path) for path in args.image or ()],
        "width": width,
        "height": height,
        "steps": pick("steps", args.steps),
        "guidance": pick("guidance", args.guidance),
        "negative_prompt": negative,
        "seed": pick("seed", args.seed),
    }


def load(model: str) -> Klein:
    """The model; what goes wrong on its way from the hub is told in a sentence."""
    from .checkpoints import HUB
    from .pipeline import Klein

    try:
        return Klein.from_pretrained(model)
    except Exception as error:
        if not from_the_hub(error):
            raise
        repo, kinds = HUB.get(model.lower(), model), [kind.__name__ for kind in type(error).__mro__]
        if "GatedRepoError" in kinds:
            problem = f"{repo} is gated"
            way_out = f"accept its licence at https://huggingface.co/{repo} and log in with `hf auth login`"
        elif "RepositoryNotFoundError" in kinds or "HFValidationError" in kinds:
            problem = f"There is no folder {repo}, and the hub shows no repository of that name"
            way_out = "check the name or, if it is private, log in with `hf auth login`"
        else:
            why = str(error.__cause__ or error).strip().split("\n")[0][:120].rstrip(".")
            problem = f"{repo} is not on this machine, or not all of it, and could not be fetched ({why})"
            offline = os.environ.get("HF_HUB_OFFLINE", "0") != "0"
            way_out = "unset HF_HUB_OFFLINE" if offline else "check the name and the network"
            way_out += ", or use a model that needs no download, such as nano"
        raise ValueError(f"{problem}: {way_out}.") from error


def from_the_hub(error: Exception) -> bool:
    """Whether a download failed for a reason outside this program."""
    if isinstance(error, OSError) and error.filename:  # the disk's reason
        return False
    if type(error).__module__.startswith(("huggingface_hub", "httpx", "requests")):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    through = any("huggingface_hub" in Path(frame.filename).parts for frame in frames)
    return through and isinstance(error, (OSError, RuntimeError))


def generate(args: argparse.Namespace) -> None:
    from .checkpoints import HUB, ModelInfo
    from .pipeline import check_request, save_picture

    model, wishes = choose(args)
    # What can be found before gigabytes are fetched. The model's own files have the last word, in the call.
    distilled = model.lower() in HUB and not model.lower().startswith("base")
    request = check_request(ModelInfo(model, distilled, size=1024, tokens=512), **wishes)
    prompt, seed = request.prompts[0], request.seeds[0]
    check_output(args.output or new_name(prompt, seed))
    klein = load(model)
    start = time.perf_counter()
    picture = klein(**wishes | {"seed": seed}, progress=sys.stderr.isatty())
    seconds = time.perf_counter() - start
    path = args.output or new_name(prompt, seed)
    save_picture(picture, path)
    print(f"{path}: {picture.width}x{picture.height}, {model}, seed {seed}, {seconds:.1f} s")


# ---------------------------------------------------------------- info, models


def info(args: argparse.Namespace) -> None:
    if args.file is not None:
        return show(read_metadata(args.file))
    import mlx.core as mx

    from .cpu import blas

    show({"kleinlite": __version__, "mlx": mx.__version__, "python": platform.python_version()})
    device = f"{mx.default_device()}, {mx.device_info().get('device_name', 'unknown')}"
    show({"platform": platform.platform(), "device": device, "BLAS": blas() or "MLX's own"})


def show(facts: dict) -> None:
    """One line per fact; control characters escaped, a picture may come from anywhere."""
    for name, value in facts.items():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(value))
        print(f"{name:16}{text}")


def models(args: argparse.Namespace) -> None:
    from .checkpoints import BUNDLED, HUB

    rows = [("name", "steps", "parameters", "download", "licence", "here"), *map(describe, [*BUNDLED, *HUB])]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    print(
        "\nA distilled model has its guidance built in. Parameters: the transformer's + the text encoder's."
        "\nWhat is not here is fetched on first use from https://huggingface.co/black-forest-labs, a gated"
        "\nmodel after you have accepted its licence there and logged in with `hf auth login`."
    )


def describe(name: str) -> tuple[str, ...]:
    """One row of the table: from the files if they are here, else from what is known about the release."""
    from .checkpoints import BUNDLED, HUB, ModelInfo, find_folder, read_json

    bundled, facts, distilled = name in BUNDLED, RELEASED.get(name), not name.startswith("base")
    folder = find_folder(name) if bundled else downloaded(HUB[name])
    sizes = count(folder) if folder else []
    if sizes:
        distilled = bool(read_json(folder / "model_index.json").get("is_distilled"))
    elif bundled:
        return name, "", "", "", "", "not in this version"
    steps = ModelInfo(name, distilled, size=0, tokens=0).steps
    parameters = [f"{n / 1e9:.1f} B" if n >= 1e9 else f"{n / 1e6:.1f} M" for n in sizes or facts[:2]]
    return (
        name,
        f"{steps}, distilled" if distilled else str(steps),
        " + ".join(parameters),
        "none" if bundled else f"{facts.gigabytes} GB",
        "Apache-2.0" if bundled else facts.licence,
        "bundled" if bundled else "yes" if sizes else "no, gated" if facts.gated else "no",
    )


def downloaded(repo: str) -> Path | None:
    """Where a hub repository's files are on this machine, if they are; does not ask the network."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, "model_index.json")
    return Path(found).parent if isinstance(found, str) else None


def count(folder: Path) -> list[int]:
    """Parameters of a model's transformer and text encoder; [] if a file is missing or was cut short."""
    from .checkpoints import load_files, part, read_json

    try:
        read_json(folder / "model_index.json")
        return [sum(w.size for w in load_files(part(folder, name)).values()) for name in PARTS][:2]
    except (OSError, ValueError):
        return []


# ---------------------------------------------------------------- what goes wrong


def raised_here(error: Exception) -> bool:
    """Whether it comes from a `raise` in this package, and so is a sentence, and not from a call that failed."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return Path(last.filename).parent == Path(__file__).parent and last.line.startswith("raise ")


def explain(error: Exception) -> str | None:
    """The sentence for a mistake that the person at the keyboard can mend; None for a bug."""
    if isinstance(error, (ValueError, OSError)) and raised_here(error):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}." if error.filename else f"{error.strerror}."
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "malloc]" in str(error)):
        return "There is not enough memory for this: try a smaller --size, or fewer --image pictures."
    return None


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = make_parser()
    args, unknown = parser.parse_known_args(argv)
    command = getattr(args, "parser", parser)
    if unknown:
        hint = ": does the prompt need quotes?" if "prompt" in args and not unknown[0].startswith("-") else ""
        command.error(f"{' '.join(unknown)} is not understood{hint}")
    if command is parser:
        parser.print_help()
        return 0
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may lack the letters of a prompt
    try:
        args.run(args)
    except KeyboardInterrupt:
        print("kleinlite: stopped.", file=sys.stderr)
        return 130
    except Exception as error:
        sentence = explain(error)
        if sentence is None:
            raise
        print(f"kleinlite: {sentence}", file=sys.stderr)
        return 2
    return 0
