"""What is known of a model: from the registry before its files are here, else from the files themselves."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from .checkpoint import Checkpoint, ModelInfo, PartsArgument, open_checkpoint
from .configs import RELEASED_CONFIGS
from .download import ANYWHERE, Access, find_cached, required_repositories
from .families import Configs, family_of
from .formats import find_quant_spec
from .registry import BUNDLED_LICENSE, ReleasedModel, find_bundled, find_released

STORED_BITS = 16.0  # of the released weights, as they are in memory: what is stored wider is cast


class ModelFacts(NamedTuple):
    """What is known of a model."""

    info: ModelInfo
    configs: Configs | None  # None: of a repository that is not here, nothing; `info` then has a base klein's values
    bits: tuple[float, float]  # per weight of the transformer and of the text encoder, as they will be in memory
    is_quantized: bool  # whether its weights come in few bits and so cannot be quantized again
    here: bool  # whether its files are on this machine
    released: ReleasedModel | None  # what the registry says of it
    license: str  # "" where only the model's page can tell
    open: Callable[[], Checkpoint]  # fetches what is not here; what has been opened is not opened again


def is_here(name: str) -> bool:
    """Whether a model can be opened without a download. Raises UserError for what is no name."""
    return find_bundled(name) is not None or Path(name).exists() or find_cached(name) is not None


def find_facts(
    name: str, quantize: int | str | None = None, parts: PartsArgument = None, *, dtype: mx.Dtype = mx.float32,
    access: Access = ANYWHERE,
) -> ModelFacts:  # fmt: skip
    """What is known of a model without a download of it; the arguments are those of `open_checkpoint`.

    Of a released model the registry knows it all, whether its files are here or not. Raises UserError or FileError.
    """
    spec = find_quant_spec(quantize)
    open_once = cache(partial(open_checkpoint, name, dtype=dtype, quantize=quantize, parts=parts, access=access))
    released = find_released(name)
    if released and not Path(name).exists():
        configs = RELEASED_CONFIGS[released.size.name]
        cfg = configs.transformer
        most = configs.text_encoder.max_length
        info = ModelInfo(name, released.distilled, 1024, most, released.kv, cfg.d_latent, family_of(cfg))
        stored = 8 * released.transformer_bytes / released.size.transformer_parameters
        bits = (spec.bits_per_weight, spec.bits_per_weight) if spec else (min(STORED_BITS, stored), STORED_BITS)
        here = find_cached(name) is not None
        return ModelFacts(info, configs, bits, released.quantized, here, released, released.size.license, open_once)
    if is_here(name):
        found = open_once()
        license = BUNDLED_LICENSE if find_bundled(name) else ""
        return ModelFacts(found.info, found.configs, found.bits, found.is_quantized, True, None, license, open_once)
    required_repositories(name)  # or the name is refused
    info = ModelInfo(name, distilled=False, size=1024, max_length=512)
    return ModelFacts(info, None, (STORED_BITS, STORED_BITS), False, False, None, "", open_once)
