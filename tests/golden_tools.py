"""Reference values for the tests: read them, fill a module with their weights, compare with them."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

GOLDENS = Path(__file__).parent / "goldens"
# Differences are measured against the largest reference value. float32 on a CPU agrees to about 2e-6.
TIGHT = 1e-5 if mx.default_device() == mx.Device(mx.cpu) else 1e-4
LOOSE = 1e-4  # what follows a time: the last bit of exp moves the cosines of 1000 radians by 5e-5


class Golden(dict):
    """The tensors of one file by name, and in `config` what its modules were made of."""

    def __init__(self, name: str):
        arrays, metadata = mx.load(str(GOLDENS / f"{name}.safetensors"), return_metadata=True)
        super().__init__(arrays)
        self.config = json.loads(metadata["made"])["config"]

    def under(self, prefix: str) -> dict[str, mx.array]:
        """The tensors whose names begin with `prefix.`, without it."""
        found = {name[len(prefix) + 1 :]: w for name, w in self.items() if name.startswith(f"{prefix}.")}
        assert found, f"no tensor begins with {prefix}."
        return found


def fill(module: nn.Module, weights: dict[str, mx.array]) -> nn.Module:
    """Give every parameter of the module its reference weight: none missing, none left over, all of the right shape."""
    weights = {name: w.transpose(0, 2, 3, 1) if w.ndim == 4 else w for name, w in weights.items()}
    ours = {name: w.shape for name, w in tree_flatten(module.parameters())}
    theirs = {name: w.shape for name, w in weights.items()}
    assert ours == theirs, f"only here or of another shape: {sorted(ours.items() ^ theirs.items())}"
    module.update(tree_unflatten(list(weights.items())))
    return module.eval()


def nhwc(x: mx.array) -> mx.array:
    return x.transpose(0, 2, 3, 1)


def nchw(x: mx.array) -> mx.array:
    return x.transpose(0, 3, 1, 2)


def check(got: mx.array, want, tolerance: float = TIGHT, absolute: bool = False) -> None:
    """Every value of `got` is within tolerance · (largest value of `want`) of `want`; if not, show the worst ones."""
    want = want if isinstance(want, mx.array) else mx.array(want, dtype=mx.float32)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    got, want = got.astype(mx.float32).flatten(), want.astype(mx.float32).flatten()
    limit = tolerance * (1.0 if absolute else mx.abs(want).max().item())
    difference = mx.abs(got - want)
    difference = mx.where(mx.isnan(difference), mx.inf, difference)
    if difference.max().item() <= limit:
        return
    worst = mx.argsort(-difference)[:5].tolist()
    rows = [f"  flat index {i}: {got[i].item():.7g}, expected {want[i].item():.7g}" for i in worst]
    count = mx.sum(difference > limit).item()
    raise AssertionError("\n".join([f"{count} of {got.size} values differ by more than {limit:.2g}:", *rows]))
