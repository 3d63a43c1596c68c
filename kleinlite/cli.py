"""The command line: `kleinlite generate`, `models`, `download`, `quantize`, `train-lora`, `info`.

What is slow to import is imported by the command that needs it, so that `--help` answers at once. A mistake
in what was typed, or in a file, ends with one sentence on stderr and status 2, and leaves no file behind.
Ctrl-C ends with status 130. A mistake in this program keeps its traceback.
"""

import argparse
import itertools
import os
import platform
import re
import signal
import sys
import tempfile
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from . import __version__
from .completion import SHELLS, find_commands, write_completion
from .errors import USER_ERRORS, MissingFileError, Parser, UserError, notes_may_be_lost, printable, run_command
from .models.registry import SMALL_DECODER

if TYPE_CHECKING:
    from mlx.core.distributed import Group
    from PIL import Image

    from .inference.request import Options, Request
    from .klein import Klein
    from .models.checkpoint import ModelInfo
    from .models.lora_files import Adapter

Job = tuple[Path, str, int]  # file, prompt and seed of a picture
Adapters = list[tuple["Adapter", float]]  # and their scales
RAW_HELP = argparse.RawDescriptionHelpFormatter
EXAMPLES = """\
examples:
  kleinlite generate "a red house under a yellow sun" --seed 7 -o house.png
  kleinlite generate "make the house blue" --image house.png --seed 7 -o blue.png
  kleinlite generate --like house.png --seed 8
  mlx.launch -n 2 -- python -m kleinlite generate --prompts wishes.txt     on several machines: each its share
"""
NANO = """\
What nano, the model that comes with kleinlite, draws: circles, squares, triangles, stars, hearts,
diamonds, houses, trees and boats, in nine colors, on a plain background or in a landscape by day, at
sunset or at night, in 96x96 pixels; and changes of these: "make it night", "turn the circle into a star",
"remove the tree". For all else take --model 4b.
"""

QUANTIZE = "3, 4, 5, 6 or 8 bits, or mxfp4, mxfp8, nvfp4"
QUANTIZE_EXAMPLES = """\
examples:
  kleinlite quantize 4b klein-4bit --bits 4
  kleinlite generate "a red circle" --model klein-4bit
  hf upload YOU/klein-4bit klein-4bit     then --model YOU/klein-4bit works everywhere
"""

LORA_EXAMPLES = """\
examples:
  kleinlite train-lora arrows --model nano-base -o arrow.safetensors     a dozen drawn arrows of 96x96 pixels do
  kleinlite train-lora my-dog --model base-4b --size 512x512 --quantize 4 -o dog.safetensors
  kleinlite generate "a photo of my dog on the moon" --model 4b --lora dog.safetensors:0.9
Stopped by Ctrl-C, the same command goes on where it was, and with more --steps a finished one does, too. Samples are
in dog.training: look at them, they say more than the loss on held-out pictures, of which there are some where there are
20 pictures or more.
"""

# ---------------------------------------------------------------- what is typed


def parse_size(text: str) -> tuple[int, int]:
    """WxH, or one number for both"""
    found = re.fullmatch(r"(\d{1,12})(?: *[x×] *(\d{1,12}))?", text.strip(), re.IGNORECASE)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not WIDTHxHEIGHT in pixels, such as 96x96 or 512x768")
    return int(found[1]), int(found[2] or found[1])


def parse_number(kind: type[int | float], words: str) -> Callable[[str], int | float]:
    """A type for argparse, whose own sentences say `invalid int value`."""

    def parse(text: str) -> int | float:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {words}") from None

    return parse


INTEGER = parse_number(int, "a whole number")
NUMBER = parse_number(float, "a number")


def parse_extension(text: str) -> tuple[int, ...]:
    """L,T,R,B"""
    if not re.fullmatch(r"\d{1,6}(,\d{1,6}){3}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not LEFT,TOP,RIGHT,BOTTOM in pixels, such as 0,0,64,0")
    return tuple(map(int, text.split(",")))


def parse_rank(text: str) -> int | dict[str, int]:
    """R, or KIND=R,KIND=R"""
    if "=" not in text:
        return int(INTEGER(text))
    pairs = [pair.partition("=") for pair in text.split(",")]
    ranks = {kind.strip(): int(INTEGER(rank)) for kind, equals, rank in pairs if equals}
    if len(ranks) < len(pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not one rank for each kind, such as qkv=16,linear1=8")
    return ranks


def parse_quantization(text: str) -> int | str:
    return int(text) if text.isdecimal() else text  # `find_quant_spec` knows what there is


def parse_lora(text: str) -> tuple[str, float]:
    """FILE or FILE:SCALE"""
    file, colon, scale = text.rpartition(":")
    with suppress(OSError):  # a name too long for a file
        if Path(text).exists():
            return text, 1.0
    if not colon:
        return text, 1.0
    try:
        return file, float(scale)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{scale!r} in {text!r} is not a scale, a number such as 0.7 (a prompt stands before --lora)"
        ) from None


def make_parser() -> Parser:
    parser = Parser(prog="kleinlite", description="Draw pictures with FLUX.2 [klein], built from scratch in MLX.")
    parser.add_argument("--version", action="version", version=f"kleinlite {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def command(name: str, run: Callable[..., None], about: str, **more: Any) -> Callable[..., Any]:
        sub = commands.add_parser(name, help=about, description=about, allow_abbrev=False, **more)
        sub.set_defaults(run=run, parser=sub)
        return sub.add_argument

    about = "draw a picture; what is not said comes from the model's own files"
    add = command("generate", generate, about, epilog=f"{EXAMPLES}\n{NANO}", formatter_class=RAW_HELP)
    add("prompt", nargs="?", metavar="PROMPT", help="what to draw, in quotes; with --image: what to change")
    add("--model", metavar="NAME", help="see `kleinlite models`; or a hub repository, folder or file (default: nano)")
    add("--size", type=parse_size, metavar="WxH", help="pixels, multiples of 16 (default: the model's, or --image's)")
    add("--steps", type=INTEGER, metavar="N", help="looks at the picture on its way out of the noise")
    about = "how far to follow the prompt: bases from 1, Z-Image from 0"
    add("--guidance", type=NUMBER, metavar="G", help=about)
    add("--negative", metavar="TEXT", help="what to stay away from; needs guidance")
    add("--seed", type=INTEGER, metavar="N", help="the same seed draws the same picture (default: a random one)")
    bits = f"weights in fewer bits: {QUANTIZE} (default: as they are)"
    add("--quantize", type=parse_quantization, metavar="Q", help=bits)
    add("--image", nargs="+", action="extend", metavar="REF", help="pictures to edit or to combine")
    add("--mask", metavar="FILE", help="what of the first --image is drawn anew: white is, black stays to the bit")
    about = "how much of the first --image is drawn anew: of 4 steps above 0.75 all, above 0.5 three, above 0.25 two, "
    add("--strength", type=NUMBER, metavar="S", help=about + "else one (default: 1)")
    about = "pixels to add to the first --image: left, top, right, bottom, such as 0,0,64,0"
    add("--extend", type=parse_extension, metavar="L,T,R,B", help=about)
    loras = "adapters to add, each with its scale if not 1: style.safetensors:0.7; or for nano cross, outlined, "
    loras += "one-look (with --steps 1)"
    add("--lora", nargs="+", action="extend", type=parse_lora, metavar="FILE[:SCALE]", help=loras)
    like = "draw again what this picture says about itself; other options override, and another --model brings "
    add("--like", metavar="FILE", help=like + "its own steps and guidance")
    output = "a .png file, replaced if there is one (default: a new file here, named after prompt and seed)"
    add("-o", "--output", type=Path, metavar="FILE", help=output)
    about = "show every step: in this .png file, which is rewritten, or without one in the terminal"
    add("--watch", nargs="?", const="", metavar="FILE", help=about)
    about = "draw each line of this file, seeds counting up from --seed (here 0 if not given), into the "
    about += "folder -o (made if it is not there; default: this one); pictures that are there are left out, so that "
    about += "the same command goes on"
    add("--prompts", type=Path, metavar="FILE", help=about)
    about = "for a --model that is one file with a transformer: the model that has its other parts, such as 4b"
    add("--parts", metavar="NAME", help=about)
    about = f"a narrower decoder: {SMALL_DECODER}, or a model's folder or autoencoder file"
    add("--decoder", metavar="NAME", help=about)
    add("--offline", action="store_true", help="download nothing, and ask no network")

    command("models", models, "list the models that have a name, and which of them are on this machine")
    about = "fetch a model, or what is new in it, and print where it is"
    add = command("download", download, about)
    add("model", metavar="MODEL", help="see `kleinlite models`; or a hub repository, owner/name")
    add("--plan", action="store_true", help="only say what it takes, and ask no network")
    about = "write a model in fewer bits, as a folder that is loaded like the model itself"
    add = command("quantize", quantize, about, epilog=QUANTIZE_EXAMPLES, formatter_class=RAW_HELP)
    add("model", metavar="MODEL", help="see `kleinlite models`; or a hub repository, folder or file")
    add("output", type=Path, metavar="OUT", help="the new folder")
    add("--bits", type=parse_quantization, metavar="N", help="bits per weight: 3, 4, 5, 6 or 8")
    add("--mode", metavar="MODE", help="in place of --bits: mxfp4, mxfp8 or nvfp4")
    add("--offline", action="store_true", help="download nothing, and ask no network")
    about = "teach a model something new: train an adapter on a folder of pictures with captions, dog.png and dog.txt"
    add = command("train-lora", train_lora, about, epilog=LORA_EXAMPLES, formatter_class=RAW_HELP)
    add("folder", type=Path, metavar="FOLDER", help="pictures, captions, for edits the pictures before: dog_ref.png")
    add("--model", default="base-4b", metavar="NAME", help="a base model: base-4b (default), base-9b, nano-base")
    add("-o", "--output", type=Path, required=True, metavar="FILE", help="the adapter, a .safetensors file")
    about = "how much it can learn, and its size (default: 16); or for some kinds of matrices: qkv=16,linear1=8"
    add("--rank", type=parse_rank, default=16, metavar="R", help=about)
    add("--steps", type=INTEGER, default=500, metavar="N", help="steps of training (default: 500); more of them go on")
    about = "the peak of the learning rate (default: by the model's width, 1e-4 for base-4b, 1.2e-3 for nano-base)"
    add("--rate", type=NUMBER, metavar="X", help=about)
    add("--batch", type=INTEGER, default=1, metavar="B", help="pictures at a time (default: 1)")
    add("--accumulate", type=INTEGER, default=4, metavar="N", help="batches that make one step (default: 4)")
    add("--size", type=parse_size, metavar="WxH", help="scale and cut all pictures (default: as they are)")
    add("--quantize", type=parse_quantization, metavar="Q", help=f"train beside weights in fewer bits: {QUANTIZE}")
    add("--layout", choices=("diffusers", "comfy"), default="diffusers", help="whose names the file has")
    add("--seed", type=INTEGER, default=0, metavar="N", help="of its beginning and of its batches (default: 0)")
    add("--every", type=INTEGER, default=100, metavar="N", help="steps between two looks at it (default: 100)")
    add("--plan", action="store_true", help="only say how much memory it takes")
    add("--offline", action="store_true", help="download nothing, and ask no network")
    about = 'print a script that completes commands and options: eval "$(kleinlite completion bash)"'
    add = command("completion", completion, about)
    add("shell", choices=SHELLS, help="whose words it is written in")
    about = "show what made a picture, what an adapter changes or, without a file, the versions for a bug report"
    add = command("info", info, about)
    add("file", nargs="?", metavar="FILE", help="a picture that kleinlite wrote, or an adapter")
    return parser


# ---------------------------------------------------------------- files


def number_names(first: Path) -> Iterator[Path]:
    """a-red-circle-7.png, then a-red-circle-7-2.png, and so on."""
    yield first
    for i in itertools.count(2):
        yield first.with_name(f"{first.stem}-{i}{first.suffix}")


def make_stem(prompt: str) -> str:
    """The beginning of a file's name: a-red-circle."""
    plain = unicodedata.normalize("NFKD", prompt).encode("ascii", "ignore").decode().lower()
    return "-".join(re.findall("[a-z0-9]+", plain))[:60].strip("-") or "picture"


def check_output(path: Path) -> None:
    """Refuse a file that could not be written, before there is a picture to lose."""
    from .inference.picture_file import check_png_name

    check_png_name(path)
    check_folder(path.parent)


def check_folder(folder: Path) -> None:
    """Refuse a folder in which nothing could be written."""
    if not folder.is_dir():
        raise UserError(f"The folder {folder} does not exist: make it first, or name another.")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"Nothing can be written in {folder} ({error.strerror}): name another folder.") from None


# ---------------------------------------------------------------- generate


def resolve_arguments(args: argparse.Namespace) -> tuple[str, dict[str, Any], Adapters, str, "Options"]:
    """The model's name, how to open it, its adapters and their scales, the prompt and the call's options.

    Each is what was typed, else what --like says.
    """
    from .inference.loras import find_recorded_loras
    from .inference.picture_file import open_picture, open_reference, read_metadata
    from .models.describe import is_here
    from .models.lora_files import open_adapter

    if args.model is not None and not args.model.strip():
        raise UserError("--model is empty: name a model, see `kleinlite models`, or leave it out for nano.")
    like = read_metadata(args.like) if args.like is not None else {}
    model = args.model or like.get("model", "nano")
    if args.model is None and not is_here(model):  # a picture may come from anybody
        raise UserError(
            f"{args.like} was drawn with {model!r}, which is not on this machine: if you trust it, say --model {model}."
        )
    if model != like.get("model"):
        like = {key: value for key, value in like.items() if key not in ("steps", "guidance", "quantize", "parts")}
    if like.get("references") and not args.image:
        was = f"{args.like} was made from {like['references']} other picture(s), which it does not contain"
        raise UserError(f"{was}: name them with --image.")
    if like.get("mask") and args.mask is None:
        raise UserError(f"{args.like} was drawn through a mask, which it does not contain: name it with --mask.")
    if like.get("noise") and args.seed is None:
        raise UserError(f"{args.like} was drawn from noise that was given, which it does not contain: name a --seed.")
    parts = like.get("parts") or {}
    try:
        fetch_other_parts(parts, offline=True)
    except MissingFileError:
        *_, place = parts.values() if isinstance(parts, dict) else [parts]
        was = f"{args.like} was drawn with parts of {place!r}, which is not on this machine"
        raise UserError(f"{was}: if you trust it, fetch it with `kleinlite download {place}`.") from None
    parts = args.parts or parts
    if args.decoder is not None:
        parts = replace_decoder(parts, args.decoder)

    def pick(name: str, typed: Any, default: Any = None) -> Any:
        return like.get(name, default) if typed is None else typed

    prompt = pick("prompt", args.prompt)
    if args.prompts is not None:
        if args.prompt is not None:
            raise UserError("A prompt and --prompts are given: leave one of them out.")
        prompt = read_prompts(args.prompts)[0]  # the others need the same files and options
    if prompt is None:
        args.parser.error('say what to draw, in quotes, before --image and --lora: kleinlite generate "a red circle"')
    if "box" in like:  # it has the size of the picture that it was made from
        like = {key: value for key, value in like.items() if key not in ("width", "height")}
    width, height = args.size or (like.get("width"), like.get("height"))
    settings = {
        "quantize": pick("quantize", args.quantize),
        "parts": parts,
    }
    loras = find_recorded_loras(like, args.like) if args.lora is None else args.lora
    adapters = [(open_adapter(file), scale) for file, scale in loras]  # here, once
    options: Options = {
        "images": [open_reference(path) for path in args.image or ()],
        "mask": None if args.mask is None else open_picture(args.mask),
        "strength": pick("strength", args.strength),
        "extend": pick("extend", args.extend),
        "width": width,
        "height": height,
        "steps": pick("steps", args.steps),
        "guidance": pick("guidance", args.guidance),
        "negative_prompt": pick("negative_prompt", args.negative, ""),
        "seed": pick("seed", 0 if args.seed is None and args.prompts else args.seed),
        "progress": sys.stderr.isatty() and args.watch != "",  # or they would draw over each other
    }
    return model, settings, adapters, prompt, options


def ensure_fetched(model: str, offline: bool) -> None:
    """See that a model's files are on this machine."""
    from .models.describe import is_here
    from .models.download import fetch_model

    if not is_here(model):
        fetch_model(model, offline=offline)


def fetch_other_parts(parts: str | dict[str, str], offline: bool) -> None:
    """See that what `parts` names is on this machine: a model but for its transformer, or one part each."""
    from .models.describe import is_here
    from .models.download import fetch_model, fetch_parts

    for place in parts.values() if isinstance(parts, dict) else [parts]:
        if not is_here(place):
            fetch = fetch_model if isinstance(parts, dict) else fetch_parts
            fetch(place, offline=offline)


def replace_decoder(parts: str | dict[str, str], decoder: str) -> dict[str, str]:
    """`parts` with another autoencoder. Raises UserError where all parts come from one model."""
    if isinstance(parts, str):
        raise UserError(f"All parts are those of {parts!r}: --decoder cannot replace one of them.")
    return {**parts, "vae": decoder}


def read_prompts(path: Path) -> list[str]:
    """The lines of a file that are not empty. Raises UserError."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: name a text file with one prompt a line.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as UTF-8 text ({error}): write one prompt a line.") from None
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"{path} has no prompt in it: write one prompt a line.")
    return prompts


def generate(args: argparse.Namespace) -> None:
    """Draw; under `mlx.launch` each machine its own share of --prompts, or all of them one picture together."""
    import mlx.core as mx

    from .inference.machines import own_temporary_folder, say_who_is_lost

    group = mx.distributed.init()
    own_temporary_folder(group)
    with say_who_is_lost(), ending_soon():
        generate_in(group, args)


@contextmanager
def ending_soon() -> Iterator[None]:
    """Within, Ctrl-C ends the process after a second, should it not have ended by then.

    A step is one call into MLX, which may take a minute, and Python hears of Ctrl-C between two calls. The system
    writes it into a pipe at once, from which a thread reads.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    ended = threading.Event()

    def end() -> None:
        if os.read(reading, 1) == bytes([signal.SIGINT]) and not ended.wait(1):
            print("\n" * sys.stderr.isatty() + "kleinlite: stopped.", file=sys.stderr, flush=True)  # below the bar
            os._exit(130)
        os.close(reading)

    before = signal.set_wakeup_fd(writing)
    threading.Thread(target=end, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(before)
        os.close(writing)


def generate_in(group: "Group", args: argparse.Namespace) -> None:
    from .inference.machines import from_first
    from .klein import Klein

    if args.watch:
        check_output(Path(args.watch))
    model, settings, adapters, prompt, options = resolve_arguments(args)
    request, info = check_before_loading(args, model, settings, adapters, prompt, options, group)
    seed = request.seeds[0]
    if options["seed"] is None:
        seed = from_first([seed], group)[0]
    if args.prompts is None:
        jobs = [(args.output or Path(f"{make_stem(prompt)}-{seed}.png"), prompt, seed)]
    else:
        jobs = leave_out_drawn(list_jobs(read_prompts(args.prompts), args.output or Path(), seed), group)
    ensure_fetched(model, args.offline)
    fetch_other_parts(settings["parts"], args.offline)
    klein = Klein.from_pretrained(model, **settings, group=None if args.prompts else group)
    klein.loras.add_all(adapters)
    klein.parts.check_memory(request)  # before anything is said of it
    if group.rank() == 0:
        for note in list_notes(request, info, adapters, [prompt for _, prompt, _ in jobs]):
            print(printable(note), file=sys.stderr)
    quantize = settings["quantize"]
    name = model if quantize is None else f"{model} in {name_quantization(quantize)}"
    name += "".join(f" + {lora} × {scale:g}" for lora, scale in klein.loras.items())
    is_first = group.rank() == 0
    if args.prompts is None:
        replaces = args.output is not None
        draw_job(klein, name, jobs[0], options, args.watch, saves=is_first, prints=is_first, replaces=replaces)
    else:
        if args.output:
            args.output.mkdir(exist_ok=True)
        draw_share(klein, name, jobs, options, args.watch, group)


def draw_job(
    klein: "Klein", name: str, job: Job, options: "Options", watch: str | None, *, saves: bool, prints: bool,
    replaces: bool = True,
) -> None:  # fmt: skip
    """One picture into its file, and a line about it. Where all machines draw it together, the first one does both.

    replaces: whether a file of that name is replaced; else the picture takes the next name that is free.
    """
    from .files import take_free_name
    from .inference.picture_file import save_picture, write_png

    path, prompt, seed = job
    options = {**options, "seed": seed}
    start = time.perf_counter()
    if not saves:
        for _ in klein.stream(prompt, **options):
            pass
        return
    picture = draw(klein, prompt, options, watch)
    seconds = time.perf_counter() - start
    if replaces:
        save_picture(picture, path)
    else:
        path = take_free_name(number_names(path), lambda draft: write_png(picture, draft))
    if prints:
        about = f"{path}: {picture.width}x{picture.height}, {name}, seed {seed}, {seconds:.1f} s"
        print(printable(about), flush=True)


def draw_share(
    klein: "Klein", name: str, jobs: list[Job], options: "Options", watch: str | None, group: "Group"
) -> None:
    """Every N-th picture on each of N machines; at last the first machine says what is missing.

    A machine that fails waits for the others, since `mlx.launch` would end them. Raises UserError if another failed.
    """
    from .inference.machines import any_of

    is_first = group.rank() == 0
    failure: Exception | None = None
    try:
        for job in jobs[group.rank() :: group.size()]:
            draw_job(klein, name, job, options, watch, saves=True, prints=is_first)
    except Exception as error:
        failure = error
    drawn = [path.exists() for path, *_ in jobs]
    with suppress(RuntimeError):  # a machine was lost: what is here counts
        drawn = any_of(drawn, group)
    if is_first and group.size() > 1:
        for (path, *_), done in zip(jobs, drawn):
            if not done:
                print(printable(f"{path} is missing."))
    if failure:
        raise failure
    if is_first and not all(drawn):
        raise UserError(f"{drawn.count(False)} of {len(jobs)} pictures are missing: the same command draws them.")


def list_jobs(prompts: list[str], folder: Path, seed: int) -> list[Job]:
    """File, prompt and seed of each picture. The seeds count up, so that a list can be resumed.

    0003-a-red-circle-9.png is the third prompt, drawn with seed 9.
    """
    return [
        (folder / f"{i + 1:04}-{make_stem(prompt)}-{seed + i}.png", prompt, seed + i)
        for i, prompt in enumerate(prompts)
    ]


def leave_out_drawn(jobs: list[Job], group: "Group") -> list[Job]:
    """The pictures that are not there yet, on any machine."""
    from .inference.machines import any_of

    drawn = any_of([path.exists() for path, *_ in jobs], group)
    if group.rank() == 0:
        for (path, *_), done in zip(jobs, drawn):
            if done:
                print(printable(f"{path} is there already."))
    return [job for job, done in zip(jobs, drawn) if not done]


def draw(klein: "Klein", prompt: str, options: "Options", watch: str | None) -> "Image.Image":
    """One picture; watch: the file in which every step is shown, "" for the terminal."""
    if watch is None:
        return klein(prompt, **options)
    from .inference.watch import Watcher

    watcher = Watcher(Path(watch) if watch else None)
    for step in klein.stream(prompt, **options):
        watcher.show(cast("Image.Image", step.preview(fast=True)))
    picture = cast("Image.Image", step.preview())  # of one prompt
    watcher.show(picture)
    return picture


def list_notes(request: "Request", info: "ModelInfo", adapters: Adapters, prompts: list[str]) -> list[str]:
    """What is to be said before it is drawn: what will not come out, and why."""
    from .nano.limits import describe_limits

    notes = []
    if not all(prompt.strip() for prompt in prompts):
        notes.append("The prompt is empty: the picture may be of anything.")
    if request.steps > 1 and any(adapter.source == "one-look" for adapter, _ in adapters):
        notes.append("one-look draws in a single step: add --steps 1.")
    if not adapters:
        size = request.width, request.height
        notes += [describe_limits(info.name, info.size, prompt, *size) for prompt in prompts]
    return [note for note in dict.fromkeys(notes) if note]


def check_before_loading(
    args: argparse.Namespace, model: str, settings: dict[str, Any], adapters: Adapters, prompt: str,
    options: "Options", group: "Group",
) -> tuple["Request", "ModelInfo"]:  # fmt: skip
    """Refuse what can be refused before gigabytes are fetched; the files have the last word."""
    from .inference.loras import Loras
    from .inference.memory_check import FEWER_BITS, check_memory, plan_model
    from .klein import prepare_request
    from .models.describe import describe

    quantize = settings["quantize"]
    if Path(model).exists():
        fetch_other_parts(settings["parts"], args.offline)  # of which its own description is made
    facts = describe(model, quantize, settings["parts"])
    if facts.configs is None:  # how its family counts guidance, its files will tell
        request = prepare_request(facts.info, prompt, {**options, "guidance": None})
    else:
        request = prepare_request(facts.info, prompt, options)
    if args.prompts is not None:
        folder = args.output or Path()
        check_folder(folder if os.path.lexists(folder) else folder.parent)
    elif group.rank() == 0:  # which saves
        check_output(args.output) if args.output else check_folder(Path())
    if facts.configs:
        Loras(facts.configs.transformer).add_all(adapters)
    if facts.configs and not facts.here:
        size: dict[str, Any] = {"width": request.width, "height": request.height, "prompts": [prompt]}
        size["machines"] = 1 if args.prompts else group.size()
        choice = () if quantize or facts.is_quantized else FEWER_BITS
        check_memory(plan_model(facts, **size), {bits: plan_model(describe(model, bits), **size) for bits in choice})
    return request, facts.info


def name_quantization(quantize: int | str) -> str:
    return f"{quantize} bits" if isinstance(quantize, int) else quantize


# ---------------------------------------------------------------- info, models


def info(args: argparse.Namespace) -> None:
    if args.file is not None:
        from .inference.picture_file import read_metadata
        from .models.files import is_safetensors
        from .models.lora_files import describe_adapter, find_adapter, open_adapter

        if is_safetensors(find_adapter(args.file)):
            return print_facts(describe_adapter(open_adapter(args.file)))
        return print_facts(read_metadata(args.file))
    import mlx.core as mx

    from .cpu import blas_name, setup

    setup()

    print_facts({"kleinlite": __version__, "mlx": version("mlx"), "python": platform.python_version()})
    device = f"{mx.default_device()}, {mx.device_info().get('device_name', 'unknown')}"
    print_facts({"platform": platform.platform(), "device": device, "BLAS": blas_name() or "MLX's own"})


def print_facts(facts: dict) -> None:
    """One line per fact."""
    for name, value in facts.items():
        print(printable(f"{name:16}{value}"))


# ---------------------------------------------------------------- models, download, quantize, train-lora


def models(args: argparse.Namespace) -> None:
    from .inference.memory_check import machine_memory
    from .models.registry import BUNDLED, MODELS, SMALL_DECODER, SMALL_DECODER_BYTES

    head = "name", "steps", "parameters", "memory, GB", "download", "licence", "fits", "here"
    rows = [head, *map(describe_model, [*BUNDLED, *MODELS])]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    print(
        "\nA distilled model has its guidance built in. Parameters: the transformer's + the text encoder's."
        "\nMemory: for a picture of 512x512 (nano: 96x96), weights as published / in 8 bits / in 4 (`--quantize`);"
        f"\nPython and MLX take 0.1 GB more. Fits: into the {machine_memory()[0] / 1e9:.1f} GB of this machine."
        "\nWhat is not here is fetched on first use, or by `kleinlite download NAME`, from huggingface.co, a"
        "\ngated model after you have accepted its licence there and logged in with `hf auth login`."
        f"\nBeside them, {SMALL_DECODER} ({SMALL_DECODER_BYTES / 1e6:.0f} MB, Apache-2.0): "
        f"`--decoder {SMALL_DECODER}`."
    )


def describe_model(name: str) -> tuple[str, ...]:
    """One row of the table."""
    from .inference.memory_check import FEWER_BITS, machine_memory, plan_model
    from .memory import count_parameters
    from .models.describe import describe
    from .models.families import network_of

    facts = describe(name)
    released = facts.released
    if released:
        counts = [released.size.transformer_parameters, released.size.text_encoder_parameters]
        settings = [None] if facts.is_quantized else [None, *FEWER_BITS]
        plans = {bits: plan_model(describe(name, bits), width=512, height=512) for bits in settings}
        here = "yes" if facts.here else "no, gated" if released.size.gated else "no"
    else:
        assert facts.configs is not None  # a bundled model is here
        networks: list[Any] = [facts.configs.transformer, facts.configs.text_encoder]
        counts = [count_parameters(network_of(cfg), cfg) for cfg in networks]
        plans = {None: plan_model(facts, width=facts.info.size, height=facts.info.size)}
        here = "bundled"
    most = machine_memory()[0]
    fitting = [bits for bits, plan in plans.items() if plan.peak_bytes <= most]
    shown = [plan.peak_bytes for bits, plan in plans.items() if bits in (None, 8, 4)]
    return (
        name,
        f"{facts.info.steps}, distilled" if facts.info.distilled else str(facts.info.steps),
        " + ".join(f"{n / 1e9:.1f} B" if n >= 1e9 else f"{n / 1e6:.1f} M" for n in counts),
        " / ".join(f"{n / 1e9:.{1 if n > 1e9 else 2}f}" for n in shown),
        f"{facts.download_bytes / 1e9:.1f} GB" if released else "none",
        facts.license,
        "no" if not fitting else "yes" if fitting[0] is None else f"--quantize {fitting[0]}",
        here,
    )


def download(args: argparse.Namespace) -> None:
    from .models.download import download_model, find_cached, plan_offline
    from .models.registry import find_bundled

    if find_bundled(args.model):
        return print(f"{args.model} comes with kleinlite: there is nothing to download.")
    if Path(args.model).exists():
        raise UserError(f"{args.model} is on this machine already: name a model of `kleinlite models`, or owner/name.")
    if args.plan:
        return print(plan_offline(args.model))
    download_model(args.model)
    print(find_cached(args.model))


def quantize(args: argparse.Namespace) -> None:
    from .models.export import quantize_model
    from .models.formats import find_quant_spec

    if (args.bits is None) == (args.mode is None):
        args.parser.error("give either --bits N or --mode MODE: kleinlite quantize 4b klein-4bit --bits 4")
    quantize = args.mode if args.bits is None else args.bits
    out = args.output
    find_quant_spec(quantize)
    if os.path.lexists(out):
        raise UserError(f"{out} is there already: name a new folder.")
    check_folder(out.parent)
    ensure_fetched(args.model, args.offline)
    quantize_model(args.model, out, quantize, progress=sys.stderr.isatty())
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{out}: {args.model} in {name_quantization(quantize)}, {size / 1e6:,.1f} MB")


def train_lora(args: argparse.Namespace) -> None:
    from .klein import Klein
    from .models.describe import check_base, describe
    from .trainer.folder import read_folder
    from .trainer.lora import LoraTrainer, check_output
    from .trainer.memory_plan import check_plan, plan_model_training
    from .trainer.settings import Settings

    out = args.output
    if out.suffix != ".safetensors" or out.is_dir():
        raise UserError(f"{out} is not an adapter's file: name one that ends in .safetensors.")
    check_folder(out.parent)
    check_output(out)
    facts = describe(args.model, args.quantize)
    settings = Settings(
        rank=args.rank, steps=args.steps, rate=args.rate, batch=args.batch, accumulate=args.accumulate,
        seed=args.seed, every=args.every, layout=args.layout,
    )  # fmt: skip
    check_base(facts.info)
    examples = read_folder(args.folder, args.size)
    if not (args.plan and facts.released):
        ensure_fetched(args.model, args.offline)
    plan = plan_model_training(args.model, examples, settings, quantize=args.quantize)
    print(f"{len(examples)} pictures of {examples[0].picture.width}x{examples[0].picture.height}. Memory: {plan}.")
    if args.plan:
        return
    check_plan(plan)
    trainer = LoraTrainer(Klein.from_pretrained(args.model, quantize=args.quantize), examples, out, settings)
    trainer.train()
    print(
        f"{out}: {out.stat().st_size / 1e6:.1f} MB; how it went is in {trainer.folder}. "
        f"Not there yet? The same command goes on with --steps {2 * args.steps}."
    )


def completion(args: argparse.Namespace) -> None:
    print(write_completion(make_parser(), args.shell))


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    with notes_may_be_lost():
        return run_command_line(argv)


IN_A_SHELL = (  # how a sentence of the package says what this command line has an option for
    (r"\bparts=\{.*?\}", "--decoder NAME"),
    (r"\bimages=\[\w+\]", "--image FILE"),
    (r"\b(quantize|parts)=(['\"]?)([\w-]+)\2", r"--\1 \3"),
)


def run_in_a_shell(args: argparse.Namespace) -> None:
    """Run the command; what it refuses is told in the words of a shell."""
    try:
        args.run(args)
    except USER_ERRORS as error:
        told = str(error)
        for python, shell in IN_A_SHELL:
            told = re.sub(python, shell, told)
        raise type(error)(told) from error


def check_command(parser: Parser, words: list[str]) -> None:
    """Refuse a line that begins with no command, and guess what was meant: one misspelled, or a prompt."""
    commands = dict(find_commands(parser))
    if not words or words[0].startswith("-") or words[0] in commands:
        return
    close = get_close_matches(words[0], commands, 1)
    prompt = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    if len(prompt) == 2 and " " in prompt[1]:  # another word for generate, and a prompt in quotes
        prompt = prompt[1:]
    meant = close[0] if close else f'generate "{" ".join(prompt)}"'
    parser.error(f"{words[0]!r} is no command: did you mean `kleinlite {meant}`?")


def run_command_line(argv: list[str] | None) -> int:
    parser = make_parser()
    check_command(parser, sys.argv[1:] if argv is None else argv)
    args, unknown = parser.parse_known_args(argv)
    command = getattr(args, "parser", parser)
    if unknown:
        hint = ": does the prompt need quotes?" if "prompt" in args and not unknown[0].startswith("-") else ""
        close = get_close_matches(unknown[0], command._option_string_actions, 1)
        hint = f": did you mean {close[0]}?" if close else hint
        command.error(f"{' '.join(unknown)} is not understood{hint}")
    if command is parser:
        parser.print_help()
        return 0
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may lack the letters of a prompt
    return run_command(run_in_a_shell, args)
