"""`kleinlite quantize`: a model in fewer bits, as a folder."""

import argparse
import sys

from ..models.download import Access
from ..models.export import quantize_model
from .shared import check_folder, name_quantization


def run(args: argparse.Namespace) -> None:
    if (args.bits is None) == (args.mode is None):
        args.parser.error("give either --bits N or --mode MODE: kleinlite quantize 4b klein-4bit --bits 4")
    quantize = args.mode if args.bits is None else args.bits
    out = args.output
    check_folder(out.parent)
    access = Access(local_files_only=args.offline)
    quantize_model(args.model, out, quantize, parts=args.parts, access=access, progress=sys.stderr.isatty())
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{out}: {args.model} in {name_quantization(quantize)}, {size / 1e6:,.1f} MB")
