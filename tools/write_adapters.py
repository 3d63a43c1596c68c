"""Write the page on adapter files: eight spellings with how far each is from diffusers, and how files are refused.

python -m tools.write_adapters
"""

import json
import sys
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[1] / "tests" / room) for room in ("", "models", "models/adapters"))

import mlx.core as mx
from test_file import META, OWN, Golden, attach, detach, open_adapter

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "notebooks" / "adapters.md"
HEAD = """# Adapter files

<!-- written by tools/write_adapters.py -->

> Will kleinlite read my LoRA, and draw what it was made for?

A [LoRA](14_lora.ipynb) for klein comes in many spellings. You load each in the same way: `--lora FILE`, in Python
`klein.loras.add(file)`.

## Read

Here is one adapter in eight spellings. The last column is the largest difference from diffusers and PEFT, in the
velocity or in the latents after four steps. The values go up to 3.4, so every difference is rounding.

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
Who writes what follows the programs' source code of summer 2026. For fal it follows what users report.

## alpha

The change is scaled by alpha / r. kleinlite takes the tensor's alpha, else the header's, else a factor of 1.

- kohya's program sets alpha to 1 unless told otherwise. At rank 32, ignoring it makes the change
  32 times as strong.
- diffusers reads alpha from the header and ComfyUI does not, so one file can have two strengths.
- Of a LoKr with two whole matrices no shape tells r. PEFT's config and LyCORIS's header say it; else the factor is 1.
- ai-toolkit [sets alpha to the rank](https://github.com/ostris/ai-toolkit/blob/main/toolkit/lora_special.py), so its
  factor is 1.

## Variants

kleinlite reads these as well:

- **LoKr** ([Yeh et al. 2023](https://arxiv.org/abs/2309.14859)) is a Kronecker product: each number of a small matrix
  times a whole block.
- **LoHa** ([Hyeon-Woo et al. 2021](https://arxiv.org/abs/2108.06098)) multiplies two low-rank matrices number by
  number.
- **DoRA** ([Liu et al. 2024](https://arxiv.org/abs/2402.09353)) has a LoRA for the direction of each row, and a number
  for its length. Only scale 1 has a meaning. LyCORIS makes it of LoKr and LoHa as well.
- **rsLoRA** ([Kalajdzievski 2023](https://arxiv.org/abs/2312.03732)) scales by alpha / √r.

## Refused

Nothing of a refused file is added.

| file | what kleinlite says |
|---|---|
"""
SHOWN = ("other-width", "flux1-diffusers", "text-encoder-only", "a-checkpoint", "not-a-number")  # of the refused files


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
    for name in SHOWN:
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
