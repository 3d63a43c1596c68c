"""The command line: `kleinlite generate` and its neighbors. A module beside this one does the work of each command.

What is slow to import is imported by the command that needs it, so that `--help` answers at once. A mistake in what was
typed, or in a file, ends with one sentence on stderr and status 2, and leaves no file behind. Ctrl-C ends with status
130. A mistake in this program keeps its traceback.
"""

import argparse
import logging
import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import Parser, run_command
from .words import parse_extension, parse_lora, parse_quantization, parse_rank, parse_size, read_prompts as read_prompts

RAW_HELP = argparse.RawDescriptionHelpFormatter
EXAMPLES = """\
examples:
  kleinlite generate "a red house under a yellow sun" --seed 7 -o house.png
  kleinlite generate "make the house blue" --image house.png --seed 7 -o blue.png
  kleinlite generate --like house.png --seed 8
  mlx.launch -n 2 -- python -m kleinlite generate --prompts wishes.txt     on several machines: each its share
"""
OFFLINE = "download nothing, and ask no network"
PARTS = "the model with the other parts of a model that is a transformer's file"
QUANTIZE = "3, 4, 5, 6 or 8 bits, or mxfp4, mxfp8, nvfp4"
QUANTIZE_EXAMPLES = """\
examples:
  kleinlite quantize 4b klein-4bit --quantize 4
  kleinlite generate "a red circle" --model klein-4bit
  hf upload YOU/klein-4bit klein-4bit     then --model YOU/klein-4bit works everywhere
"""
LORA_EXAMPLES = """\
examples:
  kleinlite train-lora arrows --model nano-base -o arrow.safetensors     a dozen drawn arrows of 96x96 pixels do
  kleinlite train-lora my-dog --model base-4b --size 512x512 --quantize 4 -o dog.safetensors
  kleinlite generate "a photo of my dog on the moon" --model 4b --lora dog.safetensors:0.9
Stopped by Ctrl-C, the same command goes on where it was, and with more --steps a finished one does, too. Samples are
in dog.training: look at them, they say more than the loss.
"""


def make_parser() -> Parser:
    """The command line: a command's module has its name, and in it `run`."""
    parser = Parser(prog="kleinlite", description="Draw pictures with FLUX.2 [klein], built from scratch in MLX.")
    parser.add_argument("--version", action="version", version=f"kleinlite {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def command(name: str, about: str, **more: Any) -> Callable[..., Any]:
        sub = commands.add_parser(name, help=about, description=about, allow_abbrev=False, **more)
        sub.set_defaults(command=name, parser=sub)
        return sub.add_argument

    about = "draw a picture; what is not said comes from the model's own files"
    add = command("generate", about, epilog=EXAMPLES, formatter_class=RAW_HELP)
    add("prompt", nargs="?", metavar="PROMPT", help="what to draw, in quotes; with --image: what to change")
    add("--model", metavar="NAME", help="see `kleinlite models`; or a hub repository, folder or file (default: nano)")
    add("--size", type=parse_size, metavar="WxH", help="pixels, multiples of 16 (default: the model's, or --image's)")
    add("--steps", type=int, metavar="N", help="sampling steps (default: the model's)")
    add("--guidance", type=float, metavar="G", help="how far to follow the prompt: bases from 1, Z-Image from 0")
    add("--negative", metavar="TEXT", help="what to stay away from; needs guidance")
    add("--seed", type=int, metavar="N", help="the same seed draws the same picture (default: a random one)")
    add("--quantize", type=parse_quantization, metavar="Q", help=f"weights in fewer bits: {QUANTIZE}")
    add("--image", nargs="+", action="extend", metavar="REF", help="pictures to edit or to combine")
    add("--mask", metavar="FILE", help="what of the first --image is drawn anew: white is, black stays to the bit")
    add("--strength", type=float, metavar="S", help="how much of the first --image is drawn anew, up to 1 (default)")
    add("--extend", type=parse_extension, metavar="L,T,R,B", help="pixels to add to the first --image, as 0,0,64,0")
    about = "adapters, each with its scale if not 1: style.safetensors:0.7; for nano also cross, outlined, one-look"
    add("--lora", nargs="+", action="extend", type=parse_lora, metavar="FILE[:SCALE]", help=about)
    add("--like", metavar="FILE", help="draw again what this picture says about itself; other options override it")
    about = "a .png file, replaced if there is one (default: a new file here, named after prompt and seed)"
    add("-o", "--output", type=Path, metavar="FILE", help=about)
    add("--watch", type=Path, metavar="FILE", help="show every step in this .png file, which is rewritten")
    about = "draw each line of this file into the folder -o, seeds counting up; what is drawn already is left out"
    add("--prompts", type=Path, metavar="FILE", help=about)
    add("--parts", metavar="NAME", help=PARTS)
    add("--decoder", metavar="NAME", help="another decoder: small-decoder, taef2 (tiny), a model's or a file's")
    add("--offline", action="store_true", help=OFFLINE)

    command("models", "list the models that have a name, and which of them are on this machine")
    add = command("download", "fetch a model, or what is new in it, and print where it is")
    add("model", metavar="MODEL", help="see `kleinlite models`; or a hub repository, owner/name")
    add("--plan", action="store_true", help="only say which files it takes, and how many bytes")
    add = command("quantize", "write a model in fewer bits", epilog=QUANTIZE_EXAMPLES, formatter_class=RAW_HELP)
    add("model", metavar="MODEL", help="see `kleinlite models`; or a hub repository, folder or file")
    add("folder", type=Path, nargs="?", metavar="OUT", help="the new folder; or -o OUT")
    add("-o", "--output", type=Path, metavar="OUT", help=argparse.SUPPRESS)
    add("--quantize", "--bits", "--mode", type=parse_quantization, metavar="Q", help=QUANTIZE)
    add("--parts", metavar="NAME", help=PARTS)
    add("--offline", action="store_true", help=OFFLINE)
    about = "teach a model something new: train an adapter on a folder of pictures with captions, dog.png and dog.txt"
    add = command("train-lora", about, epilog=LORA_EXAMPLES, formatter_class=RAW_HELP)
    add("folder", type=Path, metavar="FOLDER", help="pictures, captions, for edits the pictures before: dog_ref.png")
    add("--model", default="base-4b", metavar="NAME", help="a base model: base-4b (default), base-9b, nano-base")
    add("-o", "--output", type=Path, required=True, metavar="FILE", help="the adapter, a .safetensors file")
    add("--rank", type=parse_rank, default=16, metavar="R", help="its size (default: 16), or by kind: qkv=16,linear1=8")
    add("--steps", type=int, default=500, metavar="N", help="steps of training (default: 500); more of them go on")
    add("--rate", type=float, metavar="X", help="the peak of the learning rate (default: by the model's width)")
    add("--batch", type=int, default=1, metavar="B", help="pictures at a time (default: 1)")
    add("--accumulate", type=int, default=4, metavar="N", help="batches that make one step (default: 4)")
    add("--size", type=parse_size, metavar="WxH", help="scale and cut all pictures (default: as they are)")
    add("--quantize", type=parse_quantization, metavar="Q", help=f"train beside weights in fewer bits: {QUANTIZE}")
    add("--parts", metavar="NAME", help=PARTS)
    add("--layout", choices=("diffusers", "comfy"), default="diffusers", help="whose names the file has")
    add("--seed", type=int, default=0, metavar="N", help="of its beginning and of its batches (default: 0)")
    add("--every", type=int, default=100, metavar="N", help="steps between two samples (default: 100)")
    add("--plan", action="store_true", help="only say how much memory it takes")
    add("--offline", action="store_true", help=OFFLINE)
    about = 'print a script that completes commands and options: eval "$(kleinlite completion bash)"'
    add = command("completion", about)
    add("shell", choices=("bash", "zsh", "fish"), help="whose words it is written in")
    add = command("info", "show what made a picture, what an adapter changes, or the versions for a bug report")
    add("file", nargs="?", metavar="FILE", help="a picture that kleinlite wrote, or an adapter")
    return parser


def run_named(args: argparse.Namespace) -> None:
    """The command, whose module is imported only now."""
    import_module(f".{args.command.replace('-', '_')}", __name__).run(args)


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = make_parser()
    words = sys.argv[1:] if argv is None else argv
    commands: Any = parser._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    if words and words[0] not in commands and not words[0].startswith("-"):
        prompt = next((word for word in words[:2] if " " in word), words[0])  # or after another word for generate
        meant = [*get_close_matches(words[0], commands, 1), f'generate "{prompt}"'][0]
        parser.error(f"{words[0]!r} is no command: did you mean `kleinlite {meant}`?")
    args, unknown = parser.parse_known_args(argv)
    command = getattr(args, "parser", parser)
    if unknown:
        close = get_close_matches(unknown[0], command._option_string_actions, 1)
        hint = ": does the prompt need quotes?" if "prompt" in args and not unknown[0].startswith("-") else ""
        hint = f": did you mean {close[0]}?" if close else hint
        command.error(f"{' '.join(unknown)} is not understood{hint}")
    if command is parser:
        parser.print_help()
        return 0
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may lack the letters of a prompt
    notes = logging.StreamHandler()  # what the package logs belongs on stderr
    logging.getLogger("kleinlite").addHandler(notes)
    try:
        return run_command(run_named, args)
    finally:
        logging.getLogger("kleinlite").removeHandler(notes)
