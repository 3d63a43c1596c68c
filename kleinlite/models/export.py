"""Writes a quantized copy of a model, as a folder in the released layout.

The counterpart of chapter 8, which reads such folders: the same layout, configs in diffusers' words.
"""

import json
import math
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from tqdm.auto import tqdm

from ..errors import ExistingFileError, UserError
from ..files import check_disk_space, lock, write_json
from ..quantization import QUANT_SPECS, QuantizedMatrix, QuantSpec, quantize_matrix
from .checkpoint import Checkpoint, PartsArgument, open_checkpoint
from .download import ANYWHERE, Access
from .files import list_files, read_json
from .folders import INDEX
from .other_programs import MlxFolder
from .quantize_network import plain_matrix, should_quantize

DIFFUSERS_STEM = "diffusion_pytorch_model"  # how diffusers calls a part's weights
DRAFT = ".partial"
DTYPES = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16", mx.uint8: "U8", mx.uint32: "U32"}


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """A part's config.json, in its folder, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)


def write_safetensors(path: Path, arrays: dict[str, mx.array], done: Callable[[], None]) -> None:
    """A safetensors file, one array after the other: each is computed, written and forgotten before the next.

    `mx.save_safetensors` would compute all of them first. `arrays` is emptied; `done` is called after each.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for name, w in arrays.items():
        begin = end
        end += w.nbytes
        header[name] = {"dtype": DTYPES[w.dtype], "shape": list(w.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the numbers begin at a multiple of eight bytes
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in list(arrays):
            flat = mx.contiguous(arrays.pop(name)).reshape(-1).view(mx.uint8)
            file.write(memoryview(flat))  # type: ignore[arg-type]
            done()
        file.flush()
        os.fsync(file.fileno())


def quantize_weights(weights: dict[str, mx.array | QuantizedMatrix], p: QuantSpec) -> dict[str, mx.array]:
    """The tensors of a part whose matrices are quantized: `x.weight`, `x.scales`, … Nothing is computed yet.

    `weights` is emptied, so that nothing holds on to a matrix once its quantized form is written.
    """
    total = sum(w.shape[0] * w.shape[1] for w in weights.values() if len(w.shape) == 2)
    arrays: dict[str, mx.array] = {}
    for name in list(weights):
        w = plain_matrix(weights.pop(name))
        if len(w.shape) == 2 and should_quantize(w.shape, total, p):
            quantized = quantize_matrix(w, p).tensors
            arrays |= {f"{name.removesuffix('weight')}{tensor}": w for tensor, w in quantized.items()}
        else:
            arrays[name] = w
    return arrays


def quantize_model(
    name: str | Path, out: str | Path, quantize: int | str, *, parts: PartsArgument = None, access: Access = ANYWHERE,
    progress: bool = True,
) -> None:  # fmt: skip
    """Write a quantized copy of a model into the new folder `out`, which `Klein.from_pretrained(out)` then loads.

    name, quantize, parts, access: as for `open_checkpoint`. The transformer and the text encoder are quantized, one
    matrix at a time, so that little memory is needed; the layers of the text encoder that the model does not use are
    left out.
    `out` appears when it is whole. Raises ExistingFileError if there is one already, FileError if the disk is too
    small, UserError.
    """
    out = Path(out)
    if os.path.lexists(out):
        raise ExistingFileError(f"{out} is there already: name a new folder.")
    checkpoint = open_checkpoint(name, dtype=mx.bfloat16, quantize=quantize, parts=parts, access=access)
    if isinstance(checkpoint.home, MlxFolder):
        raise UserError(f"{name} is in another program's layout, of which no copy is written: name the released model.")
    out.parent.mkdir(parents=True, exist_ok=True)
    check_disk_space(out.parent, quantized_bytes(checkpoint))
    with (
        lock(out.with_name(f".{out.name}.lock")),
        tempfile.TemporaryDirectory(prefix=f".{out.name}.", suffix=DRAFT, dir=out.parent) as draft,
        tqdm(total=0, desc="quantizing", leave=False, disable=not progress) as bar,
    ):
        remove_drafts(out, Path(draft))
        folder = Path(draft) / out.name  # a folder with the usual rights, which a temporary one has not
        folder.mkdir()
        write_copy(folder, checkpoint, QUANT_SPECS[quantize], bar)
        os.replace(folder, out)


def quantized_bytes(checkpoint: Checkpoint) -> int:
    weights = [w for part in ("transformer", "text_encoder") for w in checkpoint.weights(part).values()]
    return int(sum(math.prod(w.shape) for w in weights) * checkpoint.bits[0] / 8)


def remove_drafts(out: Path, own: Path) -> None:
    """Remove what programs that were killed while they wrote `out` have left of it."""
    for path in out.parent.iterdir():
        name = re.fullmatch(rf"\.{re.escape(out.name)}\.\w{{8}}{re.escape(DRAFT)}", path.name)
        if name and path.is_dir() and path != own:
            shutil.rmtree(path, ignore_errors=True)


def copy_text_files(source: Path, folder: Path) -> None:
    """The JSON and text files of a tokenizer or a scheduler; no links but the hub's, for people publish the copy."""
    is_cache = "snapshots" in source.absolute().parts
    for path in list_files(source, "*"):
        if path.name in ("config.json", "generation_config.json") or path.name.endswith(".index.json"):
            continue  # of a text encoder, beside whose weights FLUX 3's tokenizer lies
        if path.suffix in (".json", ".txt", ".jinja") and path.is_file() and (is_cache or not path.is_symlink()):
            folder.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / path.name)


def write_copy(folder: Path, checkpoint: Checkpoint, spec: QuantSpec, bar: tqdm) -> None:
    """All files of the quantized copy: two parts quantized, the others as they are."""
    info = checkpoint.info
    configs = checkpoint.configs
    parts = info.family.parts
    for beside in ("tokenizer", "scheduler"):
        copy_text_files(checkpoint.home.part(beside), folder / beside)
    source = checkpoint.files["autoencoder"]
    if source.path.is_dir():
        config = read_json(source.path / "config.json")
    else:
        config = parts["autoencoder"].format(configs.autoencoder) | {"sample_size": info.size}
    write_config(folder / "vae", config)
    for file in source.files:
        shutil.copyfile(file, folder / "vae" / file.name)
    text_cfg = replace(configs.text_encoder, layers=max(configs.text_encoder.out_layers))
    quantized = {
        "text_encoder": ("model", parts["text_encoder"].format(text_cfg)),
        "transformer": (DIFFUSERS_STEM, parts["transformer"].format(configs.transformer)),
    }
    for part, (stem, config) in quantized.items():
        _, weights = checkpoint.take(part)
        arrays = quantize_weights(weights, spec)
        bar.total += len(arrays)
        config |= {"quantization": {"group_size": spec.group, "bits": spec.bits, "mode": spec.mode}}
        write_config(folder / part, config)
        write_safetensors(folder / part / f"{stem}.safetensors", arrays, bar.update)
    index = checkpoint.home.index | {
        "is_distilled": info.distilled,
        "text_encoder_out_layers": list(configs.text_encoder.out_layers),  # since fewer layers are left
    }
    if info.kv and info.family.kv_pipeline:
        index["_class_name"] = info.family.kv_pipeline
    index.pop("shares", None)  # the copy has all parts
    write_json(folder / INDEX, index)  # last, because a folder without it is no model
