"""`kleinlite info`: what made a picture, what an adapter changes, or the versions for a bug report."""

import argparse
import platform
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from .. import __version__
from ..cpu import bfloat16_name, blas_name, setup
from ..errors import printable
from ..inference.picture_file import read_metadata
from ..models.adapters import describe_adapter, find_adapter, open_adapter
from ..models.files import looks_like_weights


def run(args: argparse.Namespace) -> None:
    for name, value in find_facts(args.file).items():
        print(printable(f"{name:16}{value}"))


def find_facts(file: str | None) -> dict[str, Any]:
    if file is not None:
        return describe_adapter(open_adapter(file)) if looks_like_weights(find_adapter(file)) else read_metadata(file)
    setup()
    return {
        "kleinlite": __version__,
        "mlx": version("mlx"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": f"{mx.default_device()}, {mx.device_info().get('device_name', 'unknown')}",
        "BLAS": blas_name() or "MLX's own",
        "bfloat16": bfloat16_name() or "MLX's own",
    }
