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

| spelling | first tensor | largest difference |
|---|---|--:|
"""
NAMES = {
    None: "no adapter",
    "a-diffusers": "diffusers and PEFT, alpha in the header",
    "a-diffusers-no-metadata": "the same without a header: half as strong",
    "a-diffusers-alpha-keys": "the same with alpha as tensors",
    "a-peft": "PEFT's wrapper",
    "a-bare": "no prefix, `.default.`",
    "a-comfy": "single-file names, as ComfyUI reads them",
    "a-comfy-alpha": "the same with down, up and alpha",
    "a-kohya": "kohya: underscores for dots",
    "a-bf16": "diffusers, rounded to bfloat16",
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
    for name, title in NAMES.items():
        run, first = "none", ""
        if name:
            adapter, run = g.open(name), spellings[name].split(" ")[0]
            attach(g.net, "x", adapter.deltas(g.net))
            first = f"`{min(mx.load(str(adapter.path)))}`"
        steps = g.steps()
        detach(g.net, "x")
        pairs = ((steps[0].velocity, f"{run}.velocity0"), (steps[-1].latents, f"{run}.final"))
        far = max(mx.abs(got - g.expected[want]).max().item() for got, want in pairs)
        text += f"| {title} | {first} | {far:.0e} |\n"
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
