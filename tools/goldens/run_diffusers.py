"""Run a model folder with diffusers' own pipeline, to compare our pictures with theirs.

    pip install -e ".[dev]"
    python -m tools.goldens.run_diffusers FOLDER "a red circle" --size 96x64 --steps 4 -o out.png
    python -m tools.goldens.run_diffusers FOLDER "make it blue" --image out.png --noise noise.safetensors -o blue.png

Everything runs in float32. `--noise` takes the tensor "noise" of a safetensors file: (1, n, 128), one row per
token, row-major, as it enters the transformer. `model_index.json` may hold two fields that diffusers does not
know and ignores; they are read here and handed to its call: `text_encoder_out_layers`, `max_sequence_length`.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import transformers
from diffusers import Flux2KleinPipeline
from diffusers.utils import logging
from PIL import Image
from safetensors.torch import load_file


def load(folder, device="cpu"):
    """The pipeline, and the settings for its call that stand in the folder."""
    folder = Path(folder)
    logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it would warn that it ignores the two fields
    pipeline = Flux2KleinPipeline.from_pretrained(folder, dtype=torch.float32).to(device)
    logging.set_verbosity(verbosity)
    pipeline.set_progress_bar_config(disable=True)
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    settings = {
        "text_encoder_out_layers": tuple(index.get("text_encoder_out_layers", (9, 18, 27))),
        "max_sequence_length": index.get("max_sequence_length", 512),
    }
    return pipeline, settings


def as_latents(noise, rows, columns):
    """(1, n, c) tokens -> (1, c, rows, columns), the shape that the pipeline takes and packs again."""
    if noise.shape[1] != rows * columns:
        raise SystemExit(f"the noise has {noise.shape[1]} tokens, the picture {rows} x {columns}")
    return noise.float().reshape(1, rows, columns, -1).permute(0, 3, 1, 2).contiguous()


def draw(pipeline, settings, prompt, *, size=None, steps=None, guidance=None, noise=None, seed=0, images=()):
    """One picture, as a PIL image."""
    distilled = pipeline.config.is_distilled
    if steps is None:
        steps = 4 if distilled else 50
    if guidance is None:
        guidance = 1.0 if distilled else 4.0
    if size is None and images:  # diffusers' choice: the first reference, at most 1024² pixels
        first = images[0]
        if first.width * first.height > 1024**2:
            first = pipeline.image_processor._resize_to_target_area(first, 1024**2)
        size = first.size
    patch = 2 * pipeline.vae_scale_factor  # pixels per token, 16
    columns, rows = (side // patch for side in size or (1024, 1024))
    return pipeline(
        prompt=prompt,
        image=list(images) or None,
        width=columns * patch,
        height=rows * patch,
        num_inference_steps=steps,
        guidance_scale=guidance,
        generator=torch.Generator().manual_seed(seed),
        latents=None if noise is None else as_latents(noise, rows, columns),
        **settings,
    ).images[0]


def parse_size(text):
    sides = [int(side) for side in text.lower().split("x")]
    return (sides * 2)[:2]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", help="a model in the layout of the released repositories")
    parser.add_argument("prompt")
    parser.add_argument("--size", type=parse_size, help="WIDTHxHEIGHT, or one number")
    parser.add_argument("--steps", type=int, help="default 4, or 50 for a base model")
    parser.add_argument("--guidance", type=float, help="base models only; default 4")
    parser.add_argument("--noise", help="safetensors file with the tensor 'noise'")
    parser.add_argument("--seed", type=int, default=0, help="of diffusers' own noise, without --noise")
    parser.add_argument("--image", nargs="+", default=[], metavar="REF", help="reference pictures")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("-o", "--output", default="out.png")
    args = parser.parse_args()

    start = time.time()
    pipeline, settings = load(args.folder, args.device)
    loaded = time.time()
    picture = draw(
        pipeline,
        settings,
        args.prompt,
        size=args.size,
        steps=args.steps,
        guidance=args.guidance,
        noise=load_file(args.noise)["noise"] if args.noise else None,
        seed=args.seed,
        images=[Image.open(path).convert("RGB") for path in args.image],
    )
    picture.save(args.output)
    seconds = f"loaded in {loaded - start:.1f} s, drawn in {time.time() - loaded:.1f} s"
    print(f"{args.output}: {picture.width}x{picture.height}, {seconds}")


if __name__ == "__main__":
    main()
