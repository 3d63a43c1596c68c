"""Write the page on adapter files: nine spellings with how far each is from diffusers, and how ten files are refused.

python tests/write_adapters.py
"""

import json
import sys
from pathlib import Path

import mlx.core as mx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "models"))
from test_lora_files import META, OWN, Golden, attach, detach, open_adapter  # noqa: E402

PAGE = ROOT / "notebooks" / "adapters.md"
HEAD = """# Adapter files

<!-- written by tests/write_adapters.py -->

A LoRA for klein comes in many spellings, and many files that look like one are not. [Chapter 14](14_lora.ipynb) says
what the names mean. Here is one adapter in nine of them, read by kleinlite: its velocity, and the picture's latents
after four steps, compared with what diffusers and PEFT compute (float32, values up to 3.4). Ten other files are not
read at all, each with the sentence that says why. All lie in `tests/goldens/lora`; the script beside that folder made
them.

## Read

*Written by* names programs that save so, by their source code of summer 2026 (fal's by what its users report). Others
may do so too, and files are converted.

| spelling | written by | first tensor | largest difference |
|---|---|---|--:|
"""
NAMES = {  # what the page calls a file, and which programs write so
    None: ("no adapter: how far the two programs differ anyway", ""),
    "a-diffusers": ("diffusers and PEFT, alpha in the header", "diffusers' training scripts"),
    "a-diffusers-no-metadata": (
        "the same, its header lost: half as strong",
        "without a header from the start, and with a B that needs no alpha: mflux, OneTrainer (*Diffusers*)",
    ),
    "a-diffusers-alpha-keys": ("the same with alpha as tensors", "no program that we know"),
    "a-peft": ("PEFT's wrapper", "PEFT (`save_pretrained`); around single-file names, fal's trainer"),
    "a-bare": ("no prefix, `.default.`", "DiffSynth-Studio, with or without `.default.`"),
    "a-comfy": ("single-file names, as ComfyUI reads them", "ai-toolkit"),
    "a-comfy-alpha": (
        "the same with down, up and alpha",
        "with A and B for down and up: SimpleTuner (`comfyui`), OneTrainer (*Comfy*)",
    ),
    "a-kohya": ("kohya: underscores for dots", "musubi-tuner, OneTrainer (*Kohya*)"),
    "a-bf16": ("diffusers, rounded to bfloat16", "as the first"),
}
REFUSED = """
Beside these: `lora_transformer_` and `lycoris_` prefixes, `sformer_blocks`, a missing dot before `qkv`, suffixes
without `.weight`; LoKr, LoHa and DoRA; mixed ranks, and every matrix outside the blocks.

## Refused

Nothing of a refused file is added. Every name must find its place, every change must be whole, finite and of the right
shape.

| file | what kleinlite says |
|---|---|
"""


def page() -> str:
    g = Golden()
    spellings = {"a-diffusers": "a@1.0", **META["must_give"]}
    text = HEAD
    for name, (title, written_by) in NAMES.items():
        run, first = "none", ""
        if name:
            adapter, run = g.open(name), spellings[name].split(" ")[0]
            attach(g.net, "x", adapter.deltas(g.net))
            first = f"`{min(mx.load(str(adapter.path)))}`"
        steps = g.steps()
        detach(g.net, "x")
        pairs = ((steps[0].velocity, f"{run}.velocity0"), (steps[-1].latents, f"{run}.final"))
        far = max(mx.abs(got - g.expected[want]).max().item() for got, want in pairs)
        text += f"| {title} | {written_by} | {first} | {far:.0e} |\n"
    text += REFUSED
    for name in META["must_refuse"]:
        path = OWN / "refuse" / f"{name}.safetensors"
        try:
            open_adapter(path).deltas(g.net)
        except ValueError as refusal:
            said = str(refusal).replace(str(path), "x.safetensors")
            text += f"| {name.replace('-', ' ')} | {said} |\n"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(json.dumps(str(PAGE.relative_to(ROOT))), "is written.")
