"""The command line: `kleinlite generate`, `models`, `download`, `quantize`, `train`, `train-lora`, `info`.

What is slow to import is imported by the command that needs it, so that `--help` answers at once. A mistake
in what was typed, or in a file, ends with one sentence on stderr and status 2, and leaves no file behind.
Ctrl-C ends with status 130. A mistake in this program keeps its traceback.
"""

import argparse
import itertools
import os
import platform
import re
import sys
import tempfile
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path

from . import __version__
from .errors import Parser, printable, run_command
from .nano import stages

RAW_HELP = argparse.RawDescriptionHelpFormatter
EXAMPLES = """\
examples:
  kleinlite generate "a red circle above a blue square" --seed 7 -o circle.png
  kleinlite generate "make the circle green" --image circle.png
  kleinlite generate --like circle.png --seed 8
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
  kleinlite train-lora my-dog --model base-4b --size 512x512 --quantize 4 -o dog.safetensors
  kleinlite generate "a photo of my dog on the moon" --model 4b --lora dog.safetensors:0.9
Stopped by Ctrl-C, the same command goes on where it was. Samples and the loss on held-out pictures are in dog.training.
"""

# ---------------------------------------------------------------- what is typed


def parse_size(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,12})[x×](\d{1,12})", text, re.IGNORECASE)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not WIDTHxHEIGHT in pixels, such as 96x96 or 512x768")
    return int(found[1]), int(found[2])


def parse_number(kind: type[int | float], words: str) -> Callable[[str], int | float]:
    """A type for argparse, whose own sentences say `invalid int value`."""

    def parse(text: str) -> int | float:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {words}") from None

    return parse


INTEGER, NUMBER = parse_number(int, "a whole number"), parse_number(float, "a number")


def parse_quantization(text: str) -> int | str:
    return int(text) if text.isdecimal() else text  # `find_packing` knows what there is


def parse_lora(text: str) -> tuple[str, float]:
    """FILE or FILE:SCALE"""
    file, colon, scale = text.rpartition(":")
    if not colon or Path(text).exists():
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

    def command(name, run, about, **more):
        sub = commands.add_parser(name, help=about, description=about, allow_abbrev=False, **more)
        sub.set_defaults(run=run, parser=sub)
        return sub.add_argument

    about = "draw a picture; what is not said comes from the model's own files"
    add = command("generate", generate, about, epilog=EXAMPLES, formatter_class=RAW_HELP)
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
    loras = "adapters to add, each with its strength if not 1: style.safetensors:0.7; or cross, outlined for nano"
    add("--lora", nargs="+", action="extend", type=parse_lora, metavar="FILE[:SCALE]", help=loras)
    like = "draw again what this picture says about itself; other options override, and another --model brings "
    add("--like", metavar="FILE", help=like + "its own steps and guidance")
    output = "a .png file, replaced if there is one (default: a new file here, named after prompt and seed)"
    add("-o", "--output", type=Path, metavar="FILE", help=output)
    add("--offline", action="store_true", help="download nothing, and ask no network")

    command("models", models, "list the models that have a name, and which of them are on this machine")
    about = "fetch a model, or what is new in it, and print where it is"
    add = command("download", download, about)
    add("model", metavar="MODEL", help="see `kleinlite models`; or a hub repository, owner/name")
    about = "write a model in fewer bits, as a folder that is loaded like the model itself"
    add = command("quantize", quantize, about, epilog=QUANTIZE_EXAMPLES, formatter_class=RAW_HELP)
    add("model", metavar="MODEL", help="see `kleinlite models`; or a hub repository, folder or file")
    add("output", type=Path, metavar="OUT", help="the new folder")
    add("--bits", type=parse_quantization, metavar="N", help="bits per weight: 3, 4, 5, 6 or 8")
    add("--mode", metavar="MODE", help="in place of --bits: mxfp4, mxfp8 or nvfp4")
    add("--offline", action="store_true", help="download nothing, and ask no network")
    command("train", train, stages.ABOUT)
    stages.add_arguments(commands.choices["train"])
    about = "teach a model something new: train an adapter on a folder of pictures with captions, dog.png and dog.txt"
    add = command("train-lora", train_lora, about, epilog=LORA_EXAMPLES, formatter_class=RAW_HELP)
    add("folder", type=Path, metavar="FOLDER", help="pictures, captions, for edits the pictures before: dog_ref.png")
    add("--model", default="base-4b", metavar="NAME", help="a base model: base-4b (default), base-9b, nano-base")
    add("-o", "--output", type=Path, required=True, metavar="FILE", help="the adapter, a .safetensors file")
    add("--rank", type=INTEGER, default=16, metavar="R", help="how much it can learn, and its size (default: 16)")
    add("--steps", type=INTEGER, default=500, metavar="N", help="steps of training (default: 500)")
    add("--rate", type=NUMBER, default=1e-4, metavar="X", help="the peak of the learning rate (default: 1e-4)")
    add("--batch", type=INTEGER, default=1, metavar="B", help="pictures at a time (default: 1)")
    add("--accumulate", type=INTEGER, default=4, metavar="N", help="batches that make one step (default: 4)")
    add("--size", type=parse_size, metavar="WxH", help="scale and cut all pictures (default: as they are)")
    add("--quantize", type=parse_quantization, metavar="Q", help=f"train beside weights in fewer bits: {QUANTIZE}")
    add("--layout", choices=("diffusers", "comfy"), default="diffusers", help="whose names the file has")
    add("--seed", type=INTEGER, default=0, metavar="N", help="of its beginning and of its batches (default: 0)")
    add("--every", type=INTEGER, default=100, metavar="N", help="steps between two looks at it (default: 100)")
    add("--plan", action="store_true", help="only say how much memory it takes")
    add("--offline", action="store_true", help="download nothing, and ask no network")
    about = "show what made a picture, what an adapter changes or, without a file, the versions for a bug report"
    add = command("info", info, about)
    add("file", nargs="?", metavar="FILE", help="a picture that kleinlite wrote, or an adapter")
    return parser


# ---------------------------------------------------------------- files


def find_free_name(prompt: str, seed: int) -> Path:
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
    check_folder(path.parent)


def check_folder(folder: Path) -> None:
    """Refuse a folder in which nothing could be written."""
    if not folder.is_dir():
        raise ValueError(f"The folder {folder} does not exist: make it first, or name another.")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"Nothing can be written in {folder} ({error.strerror}): name another folder.") from None


# ---------------------------------------------------------------- generate


def resolve_arguments(args: argparse.Namespace) -> tuple[str, dict, dict]:
    """The model's name, how to open it, and `check_request`'s arguments: what was typed, else what --like says."""
    from .drawing.loras import find_recorded_loras
    from .drawing.picture_file import read_metadata
    from .finetune.folder import read_reference

    if args.model is not None and not args.model.strip():
        raise ValueError("--model is empty: name a model, see `kleinlite models`, or leave it out for nano.")
    like = read_metadata(args.like) if args.like is not None else {}
    model = args.model or like.get("model", "nano")
    if args.model is None and not is_local(model):  # a picture may come from anybody
        raise ValueError(
            f"{args.like} was drawn with {model!r}, which is not on this machine: if you trust it, say --model {model}."
        )
    if model != like.get("model"):
        like = {key: value for key, value in like.items() if key not in ("steps", "guidance", "quantize", "parts")}
    if like.get("references") and not args.image:
        was = f"{args.like} was made from {like['references']} other picture(s), which it does not contain"
        raise ValueError(f"{was}: name them with --image.")
    if like.get("noise") and args.seed is None:
        raise ValueError(f"{args.like} was drawn from noise that was given, which it does not contain: name a --seed.")
    parts = like.get("parts") or {}
    for place in parts.values() if isinstance(parts, dict) else [parts]:
        if not is_local(place):
            was = f"{args.like} was drawn with parts of {place!r}, which is not on this machine"
            raise ValueError(f"{was}: if you trust it, fetch it with `kleinlite download {place}`.")

    def pick(name, typed, default=None):
        return like.get(name, default) if typed is None else typed

    prompt, negative = pick("prompt", args.prompt), pick("negative_prompt", args.negative, "")
    if prompt is None:
        args.parser.error('say what to draw, in quotes, before --image and --lora: kleinlite generate "a red circle"')
    width, height = args.size or (like.get("width"), like.get("height"))
    return (
        model,
        {
            "quantize": pick("quantize", args.quantize),
            "parts": parts,
            "loras": find_recorded_loras(like, args.like) if args.lora is None else args.lora,
        },
        {
            "prompt": prompt,
            "references": [read_reference(path) for path in args.image or ()],
            "width": width,
            "height": height,
            "steps": pick("steps", args.steps),
            "guidance": pick("guidance", args.guidance),
            "negative_prompt": negative,
            "seed": pick("seed", args.seed),
        },
    )


def is_local(model: str) -> bool:
    """Whether a model can be opened without a download."""
    from .models.download import find_cached
    from .models.registry import BUNDLED

    return model in BUNDLED or os.path.exists(model) or bool(find_cached(model))


def ensure_fetched(model: str, offline: bool) -> None:
    """See that a model's files are on this machine."""
    from .models.download import fetch_model
    from .models.registry import BUNDLED

    if model not in BUNDLED and not os.path.exists(model):
        fetch_model(model, offline=offline)


def generate(args: argparse.Namespace) -> None:
    from .drawing.loras import Loras
    from .drawing.memory_check import check_memory, plan_released
    from .drawing.picture_file import save_picture
    from .drawing.request import check_request
    from .models.adapters import open_adapter
    from .models.configs import RELEASED_CONFIGS
    from .models.download import find_cached
    from .models.families import family_of
    from .models.formats import find_packing
    from .models.opening import ModelInfo
    from .models.registry import find_released
    from .pipeline import Klein

    model, settings, arguments = resolve_arguments(args)
    quantize = settings["quantize"]
    # What can be found before gigabytes are fetched. The model's own files have the last word, below.
    released = find_released(model)
    if released:
        family = family_of(RELEASED_CONFIGS[released.size.name][0])
        info = ModelInfo(model, released.distilled, size=1024, tokens=512, family=family)
        request = check_request(info, **arguments)
    else:  # how its family counts guidance, its files will tell
        info = ModelInfo(model, distilled=False, size=1024, tokens=512)
        request = check_request(info, **arguments | {"guidance": None})
    prompt, seed = request.prompts[0], request.seeds[0]
    find_packing(quantize)
    check_output(args.output or find_free_name(prompt, seed))
    loras = Loras(RELEASED_CONFIGS[released.size.name][0]) if released else None
    for file, scale in settings["loras"]:
        open_adapter(file) if loras is None else loras.add(file, scale)
    if released and not find_cached(model):
        plan = lambda setting: plan_released(model, width=request.width, height=request.height, quantize=setting)
        choice = () if quantize or released.packed else (8, 6, 5, 4, 3)
        check_memory(plan(quantize), {bits: plan(bits) for bits in choice})
    ensure_fetched(model, args.offline)
    klein = Klein.from_pretrained(model, **settings)
    request = check_request(klein.info, **arguments | {"seed": seed})
    klein.check_memory(request)
    start = time.perf_counter()
    picture = klein.draw(request, progress=sys.stderr.isatty())
    seconds = time.perf_counter() - start
    path = args.output or find_free_name(prompt, seed)
    save_picture(picture, path)
    name = model if quantize is None else f"{model} in {name_quantization(quantize)}"
    name += "".join(f" + {lora} × {scale:g}" for lora, scale in klein.loras.items())
    print(printable(f"{path}: {picture.width}x{picture.height}, {name}, seed {seed}, {seconds:.1f} s"))


def name_quantization(quantize: int | str) -> str:
    return f"{quantize} bits" if isinstance(quantize, int) else quantize


# ---------------------------------------------------------------- info, models


def info(args: argparse.Namespace) -> None:
    if args.file is not None:
        from .drawing.picture_file import read_metadata
        from .models.adapters import describe_adapter, find_adapter, open_adapter

        if find_adapter(args.file).suffix == ".safetensors":
            return print_facts(describe_adapter(open_adapter(args.file)))
        return print_facts(read_metadata(args.file))
    import mlx.core as mx

    from .cpu import blas_name, blas_speeds

    print_facts({"kleinlite": __version__, "mlx": mx.__version__, "python": platform.python_version()})
    device = f"{mx.default_device()}, {mx.device_info().get('device_name', 'unknown')}"
    speeds = ", ".join(f"{name} {speed:.0f}" for name, speed in blas_speeds().items())
    blas = (blas_name() or "MLX's own") + (f" (the fastest here, in GFLOP/s: {speeds})" if speeds else "")
    print_facts({"platform": platform.platform(), "device": device, "BLAS": blas})


def print_facts(facts: dict) -> None:
    """One line per fact."""
    for name, value in facts.items():
        print(printable(f"{name:16}{value}"))


# ---------------------------------------------------------------- models, download, quantize, train


def models(args: argparse.Namespace) -> None:
    from .models.registry import BUNDLED, MODELS, SMALL_DECODER, SMALL_DECODER_BYTES

    head = "name", "steps", "parameters", "memory, GB", "download", "licence", "here"
    rows = [head, *map(describe_model, [*BUNDLED, *MODELS])]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    print(
        "\nA distilled model has its guidance built in. Parameters: the transformer's + the text encoder's."
        "\nMemory: for a picture of 512x512 (nano: 96x96), weights as published / in 8 bits / in 4 (`--quantize`)."
        "\nWhat is not here is fetched on first use, or by `kleinlite download NAME`, from huggingface.co, a"
        "\ngated model after you have accepted its licence there and logged in with `hf auth login`."
        f"\nBeside them, {SMALL_DECODER} ({SMALL_DECODER_BYTES / 1e6:.0f} MB, Apache-2.0): "
        f'Klein.from_pretrained("4b", parts={{"vae": "{SMALL_DECODER}"}}).'
    )


def describe_model(name: str) -> tuple[str, ...]:
    """One row of the table: of a bundled model from its files, of a released one from the registry."""
    import mlx.core as mx

    from .drawing.memory_check import plan_checkpoint, plan_released
    from .memory import count_parameters
    from .models.configs import RELEASED_CONFIGS
    from .models.download import find_cached
    from .models.families import family_of, network_of
    from .models.opening import open_checkpoint
    from .models.registry import MODELS

    model = MODELS.get(name)
    if model:
        configs = RELEASED_CONFIGS[model.size.name]
        distilled, sizes = model.distilled, [model.size.transformer_parameters, model.size.text_encoder_parameters]
        settings = [None] if model.packed else [None, 8, 4]
        plans = [plan_released(name, width=512, height=512, quantize=setting) for setting in settings]
        here = "yes" if find_cached(name) else "no, gated" if model.size.gated else "no"
    else:
        try:
            checkpoint = open_checkpoint(name, dtype=mx.float32)
        except (OSError, ValueError):
            return name, *[""] * 5, "not in this version"
        configs, info, here = checkpoint.configs, checkpoint.info, "bundled"
        distilled = info.distilled
        sizes = [count_parameters(network_of(cfg), cfg) for cfg in configs[:2]]
        plans = [plan_checkpoint(checkpoint, width=info.size, height=info.size)]
    steps = family_of(configs[0]).defaults[distilled][0]
    return (
        name,
        f"{steps}, distilled" if distilled else str(steps),
        " + ".join(f"{n / 1e9:.1f} B" if n >= 1e9 else f"{n / 1e6:.1f} M" for n in sizes),
        " / ".join(f"{n / 1e9:.{1 if n > 1e9 else 2}f}" for n in (plan.peak_bytes for plan in plans)),
        f"{model.download_bytes / 1e9:.1f} GB" if model else "none",
        model.size.license if model else "Apache-2.0",
        here,
    )


def download(args: argparse.Namespace) -> None:
    from .models.download import download_model, find_cached
    from .models.registry import BUNDLED

    if args.model in BUNDLED:
        return print(f"{args.model} comes with kleinlite: there is nothing to download.")
    if Path(args.model).exists():
        raise ValueError(f"{args.model} is on this machine already: name a model of `kleinlite models`, or owner/name.")
    download_model(args.model)
    print(find_cached(args.model))


def quantize(args: argparse.Namespace) -> None:
    from .models.export import quantize_model
    from .models.formats import find_packing

    if (args.bits is None) == (args.mode is None):
        args.parser.error("give either --bits N or --mode MODE: kleinlite quantize 4b klein-4bit --bits 4")
    quantize, out = args.mode if args.bits is None else args.bits, args.output
    find_packing(quantize)
    if os.path.lexists(out):
        raise ValueError(f"{out} is there already: name a new folder.")
    check_folder(out.parent)
    ensure_fetched(args.model, args.offline)
    quantize_model(args.model, out, quantize, progress=sys.stderr.isatty())
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{out}: {args.model} in {name_quantization(quantize)}, {size / 1e6:,.1f} MB")


def train_lora(args: argparse.Namespace) -> None:
    from .finetune.folder import read_folder
    from .finetune.plan import check_plan, plan_model_training
    from .finetune.settings import Settings
    from .finetune.trainer import LoraTrainer
    from .models.formats import find_packing
    from .models.registry import BUNDLED, MODELS, find_released
    from .pipeline import Klein

    out, released = args.output, find_released(args.model)
    if out.suffix != ".safetensors" or out.is_dir():
        raise ValueError(f"{out} is not an adapter's file: name one that ends in .safetensors.")
    check_folder(out.parent)
    find_packing(args.quantize)
    settings = Settings(
        rank=args.rank, steps=args.steps, rate=args.rate, batch=args.batch, accumulate=args.accumulate,
        seed=args.seed, every=args.every, layout=args.layout,
    )  # fmt: skip
    if args.model == "nano" or (released and released.distilled):
        base = f"base-{released.size.name}" if released else "nano-base"
        known = base in (*BUNDLED, *MODELS)
        way_out = f"train on {base}, and use the adapter on {args.model}" if known else "take base-4b or base-9b"
        raise ValueError(f"{args.model} is distilled: {way_out}.")
    examples = read_folder(args.folder, args.size)
    if not (args.plan and released):
        ensure_fetched(args.model, args.offline)
    plan = plan_model_training(args.model, examples[0], settings, quantize=args.quantize)
    print(f"{len(examples)} pictures of {examples[0].picture.width}x{examples[0].picture.height}. Memory: {plan}.")
    if args.plan:
        return
    check_plan(plan)
    trainer = LoraTrainer(Klein.from_pretrained(args.model, quantize=args.quantize), examples, out, settings)
    trainer.train()
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB; how it went is in {trainer.folder}")


def train(args: argparse.Namespace) -> None:
    from .nano import recipe

    recipe.train(args.folder, args.stage, args.steps, args.calibrate)


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
    return run_command(args.run, args)
