"""z-nano, the small Z-Image of chapter 17, from the file that the book keeps. `recipe/z_nano.py` trained it."""

from pathlib import Path

import mlx.core as mx

from ..models.formats import assemble, load_weights
from ..quantization import QuantizedMatrix, QuantSpec
from ..trainer.run import read_arrays
from ..z_image import ZImageConfig, ZImageTransformer

CONFIG = ZImageConfig(layers=4, refiners=1, heads=4, axes=(16, 24, 24), d_latent=128, d_text=96)
SPEC = QuantSpec("affine", 6, 64)  # of the matrices in the file


def turned(name: str, w: mx.array) -> mx.array:
    """Rows of `w2` have 682 numbers, which are no whole groups of 64; its columns have."""
    return w.T if name.endswith("w2.weight") else w


def load_z_nano(path: Path | str) -> ZImageTransformer:
    """z-nano from its file, in float32. Raises UserError."""
    net = ZImageTransformer(CONFIG)
    weights: dict[str, mx.array | QuantizedMatrix] = {}
    for name, w in assemble(read_arrays(Path(path))[0], mlx={"": SPEC}).items():
        weights[name] = turned(name, w.decode() if isinstance(w, QuantizedMatrix) else w)
    load_weights(net, weights, mx.float32)
    return net
