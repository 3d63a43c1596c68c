"""An adapter becomes a file that diffusers, ComfyUI and we read alike."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...checkpoints import find_conversion, rename
from ...files import replace_file, spell
from ...lora import LoRA
from ..families import KLEIN

LAYOUTS = {"diffusers": "transformer", "comfy": "diffusion_model"}  # → what stands before its names


def write_adapter(
    path: str | Path, deltas: dict[str, LoRA], *, layout: str = "diffusers", dtype: mx.Dtype = mx.bfloat16,
    trained: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Write low-rank deltas of klein's matrices, by path, as an adapter file; in one move.

    B is written scaled, so that every reader finds the same strength. layout: "diffusers", or "comfy" for ComfyUI's
    names, which are ours. trained: what the header says of the training.
    """
    tensors = {}
    ranks = {}  # by PEFT's names of the modules
    for matrix, delta in deltas.items():
        names = [matrix]
        b = delta.scaling * delta.b
        if layout == "diffusers":
            names = [name.removesuffix(".weight") for name in rename(f"{matrix}.weight", KLEIN.transformer.names)]
            conversion = find_conversion(f"{matrix}.weight", KLEIN.transformer.names)
            b = conversion(b) if conversion else b
        for name, rows in zip(names, mx.split(b, len(names))):
            tensors[f"{LAYOUTS[layout]}.{name}.lora_A.weight"] = delta.a.astype(dtype)
            tensors[f"{LAYOUTS[layout]}.{name}.lora_B.weight"] = rows.astype(dtype)
            ranks[name] = len(delta.a)
    metadata = {"format": "pt", "kleinlite": json.dumps(trained or {})}
    if layout == "diffusers":  # the words of PEFT's LoraConfig
        r = max(ranks.values())
        others = {module: rank for module, rank in ranks.items() if rank != r}
        words = {"r": r, "lora_alpha": r, "rank_pattern": others, "alpha_pattern": others, "target_modules": [*ranks]}
        metadata["lora_adapter_metadata"] = json.dumps({f"transformer.{name}": value for name, value in words.items()})
    with replace_file(Path(path)) as draft:
        mx.save_safetensors(spell(draft), tensors, metadata)
