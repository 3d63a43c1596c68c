"""What diffusers' KV pipeline computes with the tiny model: writes `tests/pipelines/kv/`.

The model itself is `tests/pipelines/tiny`, which make_pipeline_golden.py writes; `Flux2KleinKVPipeline` takes the same
parts and runs them in the 9b-kv way, so the weights need not have been trained for it. To make the values again:

    pip install -e ".[dev]"
    python -m tools.goldens.make_kv_golden            # seconds
    python -m tools.goldens.make_kv_golden --check    # compute again and compare, write nothing

`expected.safetensors` has, for each run in `meta.json`, `<run>.trajectory`: the noise and the latents after every step,
(steps + 1, pictures, n, 128), and `<run>.image`: (pictures, h, w, 3), 8 bits. References are those of `tiny/meta.json`.
"""

import json
from pathlib import Path

import torch
from diffusers import Flux2KleinKVPipeline
from diffusers.utils import logging
from safetensors.torch import load_file, save_file

from tools.goldens import PIPELINES
from tools.goldens.make_goldens import File, asked_to_check
from tools.goldens.make_pipeline_golden import REFERENCES, gradients, prepare
from tools.goldens.run_diffusers import load

FOLDER = PIPELINES / "kv"
RUNS = {
    "none": {"prompts": ["a red circle"], "width": 32, "height": 32, "steps": 2, "refs": 0},
    "one": {"prompts": ["make it blue"], "width": None, "height": None, "steps": 3, "refs": 1},
    "two": {"prompts": ["put both together"], "width": 32, "height": 48, "steps": 4, "refs": 2},
    "batch": {"prompts": ["make it blue", "a star"], "width": 48, "height": 16, "steps": 2, "refs": 2},
}


def compute():
    """The tensors of all runs."""
    plain, settings = load(PIPELINES / "tiny")
    pipeline = Flux2KleinKVPipeline(**plain.components)
    pipeline.set_progress_bar_config(disable=True)
    file = File("kv")
    for k, (run, wish) in enumerate(RUNS.items()):
        width, height = wish["width"], wish["height"]
        if width is None:  # the pipeline takes the first reference's
            height, width = prepare(pipeline.image_processor, REFERENCES[0]).shape[:2]
        b, gh, gw = len(wish["prompts"]), height // 16, width // 16
        noise = torch.randn(b, gh * gw, 128, generator=torch.Generator().manual_seed(90 + k))
        noise = (noise * 64).round() / 64  # bits that any machine agrees on
        path, tokens = [noise], []
        hook = pipeline.transformer.x_embedder.register_forward_hook(lambda *x, t=tokens: t.append(x[-1].shape[1]))
        pictures = pipeline(
            prompt=wish["prompts"],
            image=[gradients(*size) for size in REFERENCES[: wish["refs"]]] or None,
            width=wish["width"],
            height=wish["height"],
            num_inference_steps=wish["steps"],
            latents=noise.reshape(b, gh, gw, 128).permute(0, 3, 1, 2).contiguous(),
            callback_on_step_end=lambda pipe, i, t, x, p=path: p.append(x["latents"]) or x,
            **settings,
        ).images
        hook.remove()
        assert tokens[1:] == [gh * gw] * (wish["steps"] - 1), "the cache was not used"
        assert (tokens[0] > gh * gw) == (wish["refs"] > 0)
        levels = [torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8) for picture in pictures]
        file.put(run, {"trajectory": torch.stack(path)})
        file[f"{run}.image"] = torch.stack(levels).reshape(b, height, width, 3)
    return file


def main():
    only_check = asked_to_check(__doc__)
    logging.set_verbosity_error()
    file, path = compute(), FOLDER / "expected.safetensors"
    meta = {"runs": RUNS, "with": json.loads(file.metadata()["made"])["with"]}
    if only_check:
        old = load_file(path)
        same = old.keys() == file.keys() and all(
            torch.allclose(old[k].float(), v.float(), 1e-4, 1e-4) for k, v in file.items()
        )
        same = same and json.loads((FOLDER / "meta.json").read_text()) == meta
        raise SystemExit(0 if same else f"{path} holds something else")
    FOLDER.mkdir(exist_ok=True)
    save_file(dict(file), path)
    path.chmod(0o644)
    (FOLDER / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    print(f"{path.stat().st_size / 1000:.1f} kB  {path.relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
