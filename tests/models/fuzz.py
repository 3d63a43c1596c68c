"""The long run of what the tests do briefly: `make fuzz`, or python tests/models/fuzz.py SECONDS [SEED].

Damages headers of weight files, and the JSON of a model's folder in one to three places, until the time is over. Ends
with a traceback, and the seed, where something was read that the safetensors library refuses, read otherwise, or
refused without a sentence.
"""

import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import mlx.core as mx
from damage import ODD, change, damage_header, one_sentence, places, weights_are_read_as_written_or_refused
from stand_in_hub import TINY

from kleinlite.models.opening import open_checkpoint

MODELS = (TINY, TINY.parent / "z_image")
CONFIGS = ("transformer/config.json", "vae/config.json", "text_encoder/config.json", "model_index.json")


def damaged_config(model: Path, source: Path, file: str, rng: random.Random) -> bool:
    """Whether a model with one damaged file is opened."""
    words = json.loads((source / file).read_text())
    for _ in range(rng.randint(1, 3)):
        place = rng.choice(places(words)[1:] or [()])
        words = change(words, place, rng.choice([*ODD, change, rng.randrange(-5, 5000), rng.random()]))
    (model / file).write_text(json.dumps(words))
    try:
        open_checkpoint(model, dtype=mx.float32)
        return True
    except (ValueError, OSError) as error:
        assert one_sentence(error), repr(error)
        return False
    finally:
        shutil.copyfile(source / file, model / file)


def main(seconds: float, seed: int) -> None:
    rng, end, counts = random.Random(seed), time.monotonic() + seconds, {}
    data = (TINY / "vae/diffusion_pytorch_model.safetensors").read_bytes()
    print(f"seed {seed}")
    with tempfile.TemporaryDirectory() as temporary:
        models = {source: Path(shutil.copytree(source, f"{temporary}/{source.name}")) for source in MODELS}
        path = Path(temporary) / "x.safetensors"
        while time.monotonic() < end:
            for _ in range(20):
                path.write_bytes(damage_header(data, rng))
                kind = "weights", weights_are_read_as_written_or_refused(path)
                counts[kind] = counts.get(kind, 0) + 1
            source = rng.choice(MODELS)
            kind = "config", damaged_config(models[source], source, rng.choice(CONFIGS), rng)
            counts[kind] = counts.get(kind, 0) + 1
    for (what, read), count in sorted(counts.items()):
        print(f"{what:8} {'read' if read else 'refused':8} {count:,}")


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(10**6))
