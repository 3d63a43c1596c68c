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

A [LoRA](14_lora.ipynb) for klein comes in many spellings, and many files that look like one are not. Here is one
adapter in nine of them, read by kleinlite: its velocity, and the picture's latents after four steps, compared with what
diffusers and PEFT compute (float32, values up to 3.4). Ten other files are not read at all, each with the sentence that
says why. All lie in `tests/goldens/lora`; the script beside that folder made them.

## Names

A name is the path of a matrix, and which of the two thin matrices this is: A or `down`, B or `up`. Three traps:

- **q, k and v.** The released folders, and so diffusers, have three matrices in the double blocks. The single files
  and kleinlite have one. From one to three is easy: all share A, and B is cut in three. The other way, each third of
  the rows gets a change of its own.
- **Underscores.** `lora_unet_double_blocks_0_img_attn_qkv` does not tell which underscores were dots. So kleinlite
  writes the path of every matrix with underscores, and looks the name up among those.
- **The last modulation.** It is (scale, shift) in the released folders, and (shift, scale) in the single file and here.
  The halves of B's rows change places; A's rows must not. diffusers swapped both for FLUX.1 until June 2026
  ([issue 13998](https://github.com/huggingface/diffusers/issues/13998)).

## alpha

The change is scaled by alpha / r. Alpha stands in a tensor of its own, in the header, or nowhere. kleinlite decides for
each matrix: the tensor's alpha, else the header's, else a factor of 1.

- kohya's program sets alpha to 1 unless told otherwise. At rank 32 the factor is 1/32. A reader that overlooks it draws
  noise. A factor of 1/32 where none was meant is the LoRA that "does nothing".
- diffusers reads alpha from the header and ComfyUI does not, so one file can have two strengths.
- rsLoRA ([Kalajdzievski 2023](https://arxiv.org/abs/2312.03732)) scales by alpha / √r. Only the header says so.
- The recipe "128/64/64/32" for klein is linear/alpha/conv/alpha. klein's transformer has no convolutions, and
  ai-toolkit, whose words these are,
  [sets alpha to the rank](https://github.com/ostris/ai-toolkit/blob/main/toolkit/lora_special.py). What is left is rank
  128 and a factor of 1.

## Variants

- **LoKr** ([Yeh et al. 2023](https://arxiv.org/abs/2309.14859)) is a Kronecker product: each number of a small matrix
  times a whole block. With both factors whole, alpha means nothing; ai-toolkit writes 9999999999.
- **LoHa** ([Hyeon-Woo et al. 2021](https://arxiv.org/abs/2108.06098)) multiplies two low-rank matrices number by
  number. Its rank can be the product of theirs. The whole change is computed at each call.
- **DoRA** ([Liu et al. 2024](https://arxiv.org/abs/2402.09353)) has a LoRA for the direction of each row, and a number
  for its length. The paper has lengths of columns, PEFT of rows. Only scale 1 has a meaning.

Their code is `kleinlite/lora_variants.py`.

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
