"""What is typed, as numbers and names: the types of the command line's options."""

import argparse
import os
import re
from pathlib import Path

from ..errors import UserError


def parse_size(text: str) -> tuple[int, int]:
    """WxH, or one number for both"""
    found = re.fullmatch(r"(\d+)(?: *[x×] *(\d+))?", text.strip(), re.IGNORECASE)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not WIDTHxHEIGHT in pixels, such as 96x96 or 512x768")
    return int(found[1]), int(found[2] or found[1])


def parse_extension(text: str) -> tuple[int, ...]:
    """L,T,R,B"""
    if not re.fullmatch(r"\d+(,\d+){3}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not LEFT,TOP,RIGHT,BOTTOM in pixels, such as 0,0,64,0")
    return tuple(map(int, text.split(",")))


def parse_rank(text: str) -> int | dict[str, int]:
    """R, or KIND=R,KIND=R"""
    if not re.fullmatch(r"-?\d+|\w+=\d+(,\w+=\d+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no rank, nor one for each kind, such as qkv=16,linear1=8")
    pairs = [pair.split("=") for pair in text.split(",")]
    return int(text) if "=" not in text else {kind: int(rank) for kind, rank in pairs}


def parse_quantization(text: str) -> int | str:
    return int(text) if text.isdecimal() else text  # `find_quant_spec` knows what there is


def parse_lora(text: str) -> tuple[str, float]:
    """FILE or FILE:SCALE"""
    file, colon, scale = text.rpartition(":")
    if not colon or len(file) == 1 or os.path.exists(text):  # one letter is a drive
        return text, 1.0
    try:
        return file, float(scale)
    except ValueError:
        told = f"{scale!r} in {text!r} is not a scale, a number such as 0.7 (a prompt stands before --lora)"
        raise argparse.ArgumentTypeError(told) from None


def read_prompts(path: Path) -> list[str]:
    """The lines of a file that are not empty. Raises UserError."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"{path} cannot be read ({why}): name a text file with one prompt a line.") from None
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"{path} has no prompt in it: write one prompt a line.")
    return prompts
