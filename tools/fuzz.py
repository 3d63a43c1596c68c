"""The long run of what the tests do briefly: `make fuzz`, or python -m tools.fuzz SECONDS [SEED].

Until the time is over, in turn: headers of weight files, adapter files in nine spellings, and a model's configs, index,
header and packed matrices. Ends with a traceback, and the seed, where something was read that the safetensors library
refuses, read otherwise, or refused without a short sentence.
"""

import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[1] / "tests" / room) for room in ("", "models"))

import mlx.core as mx
from damage import (
    damage_header,
    damage_model,
    damage_tensor,
    damage_words,
    one_sentence,
    weights_are_read_as_written_or_refused,
    write_packed_model,
)
from stand_in_hub import TINY

from kleinlite.errors import USER_ERRORS
from kleinlite.models.adapters import describe_adapter, open_adapter
from kleinlite.models.checkpoint import open_checkpoint
from tools.goldens import GOLDENS

ADAPTERS = sorted((GOLDENS / "lora").glob("a-*.safetensors"))


def told_shortly(error: Exception, path: Path) -> bool:
    return one_sentence(error) and len(str(error)) < 300 + len(str(path))


def damaged_adapter(path: Path, net, rng: random.Random) -> bool:
    """Whether an adapter is understood after its header, its words or a tensor was damaged."""
    source = rng.choice(ADAPTERS)
    kind = rng.randrange(3)
    if kind == 0:
        path.write_bytes(damage_header(source.read_bytes(), rng))
    else:
        arrays, words = mx.load(str(source), return_metadata=True)
        arrays = damage_tensor(arrays, rng) if kind == 1 else arrays
        words = damage_words(words, rng) if kind == 2 else words
        mx.save_safetensors(str(path), arrays, words)
    try:
        adapter = open_adapter(path)
        told = describe_adapter(adapter)
        assert all(len(words) < 500 and words.isprintable() for name, words in told.items()), told
        mx.eval([delta.parameters() for delta in adapter.deltas(net).values()])
        return True
    except USER_ERRORS as error:
        assert told_shortly(error, path), repr(error)
        return False


def damaged_model(model: Path, rng: random.Random) -> bool:
    """Whether a model is loaded after one thing in its files was damaged; then the files are as they were."""
    before = {path: path.read_bytes() for path in model.rglob("*.*")}
    damage_model(model, rng)
    try:
        checkpoint = open_checkpoint(model, dtype=mx.float32)
        mx.eval(checkpoint.load_transformer().parameters())
        return True
    except USER_ERRORS as error:
        assert one_sentence(error), repr(error)
        return False
    finally:
        for path, data in before.items():
            path.write_bytes(data)


def main(seconds: float, seed: int) -> None:
    rng = random.Random(seed)
    end = time.monotonic() + seconds
    counts: Counter[tuple[str, bool]] = Counter()
    data = (TINY / "vae/diffusion_pytorch_model.safetensors").read_bytes()
    net = open_checkpoint(TINY, dtype=mx.float32).load_transformer()
    print(f"seed {seed}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = write_packed_model(folder / "model")
        while not counts or time.monotonic() < end:
            for _ in range(20):
                path = folder / "x.safetensors"
                path.write_bytes(damage_header(data, rng))
                counts["weights", weights_are_read_as_written_or_refused(path)] += 1
                counts["adapter", damaged_adapter(folder / "y.safetensors", net, rng)] += 1
                counts["model", damaged_model(model, rng)] += 1
    for (what, read), count in sorted(counts.items()):
        print(f"{what:8} {'read' if read else 'refused':8} {count:,}")


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(10**6))
