"""`kleinlite quantize`: a model in fewer bits, as a folder."""

import argparse
import sys

from ..models.download import Access
from ..models.export import quantize_model
from .shared import check_folder, name_quantization


def run(args: argparse.Namespace) -> None:
    out = args.output or args.folder
    if out is None or args.quantize is None:
        args.parser.error("name the new folder, and the bits: kleinlite quantize 4b klein-4bit --quantize 4")
    check_folder(out.parent)
    access = Access(local_files_only=args.offline)
    quantize_model(args.model, out, args.quantize, parts=args.parts, access=access, progress=sys.stderr.isatty())
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{out}: {args.model} in {name_quantization(args.quantize)}, {size / 1e6:,.1f} MB")
