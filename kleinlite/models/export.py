"""Writes a model as a folder in the released layout: a trained one in float16, or a released one quantised.

The counterpart of chapter 8, which reads such folders: the same names, the same layout, configs in diffusers' words.
`Klein.from_pretrained` loads both kinds; what is not quantised, diffusers loads as well.
"""

import contextlib
import json
import math
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from filelock import FileLock, Timeout
from mlx.utils import tree_flatten
from tokenizers import Tokenizer
from tqdm.auto import tqdm

from ..autoencoder import Autoencoder, AutoencoderConfig
from ..checkpoints import rename, swap_halves
from ..quantisation import Packed, Packing, pack_matrix
from ..text_encoder import TextEncoder, TextEncoderConfig
from ..transformer import Transformer
from .configs import (
    LAYOUT,
    format_autoencoder_config,
    format_model_index,
    format_text_encoder_config,
    format_transformer_config,
)
from .files import is_inside, list_weights_files, read_json
from .names import AUTOENCODER_NAMES, TEXT_ENCODER_NAMES, TRANSFORMER_NAMES
from .opening import Checkpoint, open_checkpoint, part_folder
from .packing import unpacked, worth_packing

DIFFUSERS_STEM = "diffusion_pytorch_model"  # how diffusers calls a part's weights
SHARD_BYTES = 5 * 10**9  # bytes of weights in one file; the released shards are about as large


def to_released(module: nn.Module, rules: list[tuple[str, ...]], dtype: mx.Dtype) -> dict[str, mx.array]:
    """A module's weights under the released folder's names and in its layout: the way back from chapter 8's `match`."""
    arrays = {}
    for name, w in tree_flatten(module.parameters()):
        w = w.astype(dtype).transpose(0, 3, 1, 2) if w.ndim == 4 else w.astype(dtype)
        names = rename(name, rules)
        if names == ["norm_out.linear.weight"]:
            w = swap_halves(w)
        arrays.update(zip(names, mx.split(w, len(names))))
    return arrays


def write_json(path: Path, found: dict) -> None:
    """A JSON file, laid out as the released ones are, in a folder that is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def save_part(folder: Path, module: nn.Module, rules: list[tuple[str, ...]], stem: str, config: dict) -> None:
    """One part of a model: config.json and its weights, float16, under the released folder's names."""
    write_json(folder / "config.json", config)
    arrays = to_released(module, rules, mx.float16)
    if "bn.running_mean" in arrays:
        arrays["bn.num_batches_tracked"] = mx.array(0, dtype=mx.int64)  # diffusers expects it
    mx.save_safetensors(str(folder / f"{stem}.safetensors"), arrays, {"format": "pt"})


def save_transformer(folder: Path, transformer: Transformer, text_cfg: TextEncoderConfig, distilled: bool) -> None:
    """A transformer and the model_index.json that makes its folder a model; the other parts may be beside it."""
    config = format_transformer_config(transformer._cfg)
    save_part(folder / "transformer", transformer, TRANSFORMER_NAMES, DIFFUSERS_STEM, config)
    write_json(folder / "model_index.json", format_model_index(text_cfg, distilled))


def save_encoders(
    folder: Path, autoencoder: Autoencoder, cfg: AutoencoderConfig, size: int,
    text_encoder: TextEncoder, tokenizer: Tokenizer,
) -> None:  # fmt: skip
    """The parts around the transformer, in the released layout that diffusers reads as well."""
    config = format_autoencoder_config(cfg, size)
    save_part(folder / "vae", autoencoder, AUTOENCODER_NAMES, DIFFUSERS_STEM, config)
    config = format_text_encoder_config(text_encoder._cfg)
    save_part(folder / "text_encoder", text_encoder, TEXT_ENCODER_NAMES, "model", config)
    for file in ("tokenizer/tokenizer_config.json", "tokenizer/chat_template.jinja", "scheduler/scheduler_config.json"):
        (folder / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(LAYOUT / file, folder / file)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))


# ---------------------------------------------------------------- a quantised copy

DTYPES = {
    mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16", mx.uint8: "U8", mx.uint32: "U32", mx.int64: "I64",
}  # fmt: skip


def write_safetensors(path: Path, arrays: dict[str, mx.array], done: Callable[[], None]) -> None:
    """A safetensors file, one array after the other: each is computed, written and forgotten before the next.

    `mx.save_safetensors` would compute all of them first. `arrays` is emptied; `done` is called after each.
    """
    header, end = {"__metadata__": {"format": "mlx"}}, 0
    for name, w in arrays.items():
        begin, end = end, end + w.nbytes
        header[name] = {"dtype": DTYPES[w.dtype], "shape": list(w.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the numbers begin at a multiple of eight bytes
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in list(arrays):
            flat = mx.contiguous(arrays.pop(name)).reshape(-1).view(mx.uint8)
            file.write(memoryview(flat))
            done()
        file.flush()
        os.fsync(file.fileno())


def pack_weights(weights: dict[str, mx.array | Packed], p: Packing) -> dict[str, mx.array]:
    """The tensors of a part whose matrices are packed: `x.weight`, `x.scales`, … Nothing is computed yet.

    `weights` is emptied, so that nothing holds on to a matrix once its packed form is written.
    """
    total = sum(w.shape[0] * w.shape[1] for w in weights.values() if w.ndim == 2)
    arrays = {}
    for name in list(weights):
        w = unpacked(weights.pop(name))
        if w.ndim == 2 and worth_packing(w.shape, total, p):
            packed = pack_matrix(w, p).tensors
            arrays |= {f"{name.removesuffix('weight')}{tensor}": w for tensor, w in packed.items()}
        else:
            arrays[name] = w
    return arrays


def split_shards(arrays: dict[str, mx.array], limit: int) -> list[dict[str, mx.array]]:
    """The arrays in shards of at most `limit` bytes."""
    shards, size = [{}], 0
    for name, w in arrays.items():
        if shards[-1] and size + w.nbytes > limit:
            shards, size = [*shards, {}], 0
        shards[-1][name] = w
        size += w.nbytes
    return shards


def write_part(
    folder: Path, stem: str, config: dict, arrays: dict[str, mx.array], done: Callable[[], None],
    limit: int = SHARD_BYTES,
) -> None:  # fmt: skip
    """A part's config.json and its weights: one file, or shards of at most `limit` bytes and their index."""
    write_json(folder / "config.json", config)
    shards = split_shards(arrays, limit)
    arrays.clear()  # see `write_safetensors`
    if len(shards) == 1:
        return write_safetensors(folder / f"{stem}.safetensors", shards[0], done)
    files = {f"{stem}-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, start=1)}
    places = {name: file for file, shard in files.items() for name in shard}
    write_json(folder / f"{stem}.safetensors.index.json", {"metadata": {}, "weight_map": places})
    for file, shard in files.items():
        write_safetensors(folder / file, shard, done)


def quantize_model(
    name: str | Path,
    out: str | Path,
    quantize: int | str,
    *,
    parts: str | Path | dict[str, str | Path] | None = None,
    progress: bool = True,
) -> None:
    """Write a quantised copy of a model into the new folder `out`, which `Klein.from_pretrained(out)` then loads.

    name, quantize, parts: as for `open_checkpoint`. The transformer and the text encoder are packed, one matrix at a
    time, so that little memory is needed; the layers of the text encoder that klein does not use are left out. `out`
    appears when it is whole. Raises FileExistsError if there is one already, OSError if the disk is too small.
    """
    out = Path(out)
    if os.path.lexists(out):
        raise FileExistsError(f"{out} is there already: name a new folder.")
    checkpoint = open_checkpoint(name, dtype=mx.bfloat16, quantize=quantize, parts=parts)
    out.parent.mkdir(parents=True, exist_ok=True)
    check_disk_space(out, checkpoint)
    with (
        lock_folder(out),
        tempfile.TemporaryDirectory(prefix=f".{out.name}.", suffix=DRAFT, dir=out.parent) as draft,
        tqdm(total=0, desc="quantising", leave=False, disable=not progress) as bar,
    ):
        folder = Path(draft) / out.name  # a folder with the usual rights, which a temporary one has not
        folder.mkdir()
        write_copy(folder, checkpoint, bar)
        if os.path.lexists(out):
            raise FileExistsError(f"{out} appeared while its copy was written: name a new folder.")
        os.replace(folder, out)


def check_disk_space(out: Path, checkpoint: Checkpoint) -> None:
    """Refuse a copy for which the disk has no room. Raises OSError."""
    weights = [w for part in ("transformer", "text_encoder") for w in checkpoint.weights(part).values()]
    needed = sum(math.prod(w.shape) for w in weights) * checkpoint.packing.bits_per_weight / 8
    free = shutil.disk_usage(out.parent).free
    if needed > free:
        raise OSError(
            f"{out} will take {needed / 1e9:.1f} GB and its disk has {free / 1e9:.1f} GB left: make room there, or "
            "name a folder on another disk."
        )


DRAFT = ".partial"


@contextlib.contextmanager
def lock_folder(out: Path) -> Iterator[None]:
    """Within, no other program writes `out`; what one that was killed has left of it is removed. Raises ValueError."""
    lock = FileLock(out.with_name(f".{out.name}.lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise ValueError(f"Another program is writing {out}: wait until it is done, or name another folder.") from None
    try:
        for path in out.parent.iterdir():
            if re.fullmatch(rf"\.{re.escape(out.name)}\.\w{{8}}{re.escape(DRAFT)}", path.name) and path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)  # while it is held: nobody else can have it
        lock.release()


def copy_text_files(source: Path, folder: Path) -> None:
    """The JSON and text files of a tokenizer or a scheduler: only those that lie there, for people publish the copy."""
    for path in sorted(source.glob("*")):
        if path.suffix in (".json", ".txt", ".jinja") and path.is_file() and is_inside(path, source):
            folder.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / path.name)


def write_copy(folder: Path, checkpoint: Checkpoint, bar: tqdm) -> None:
    """All files of the quantised copy: two parts packed, the others as they are."""
    info, index = checkpoint.info, read_json(checkpoint.folder / "model_index.json")
    index |= {"is_distilled": info.distilled}
    index |= {"text_encoder_out_layers": list(checkpoint.parts["text_encoder"][0].taps)}  # fewer layers are left
    if info.kv:
        index["_class_name"] = "Flux2KleinKVPipeline"
    for beside in ("tokenizer", "scheduler"):
        copy_text_files(part_folder(checkpoint.folder, beside), folder / beside)
    cfg, path = checkpoint.parts["vae"]
    config = read_json(path / "config.json") if path.is_dir() else format_autoencoder_config(cfg, info.size)
    write_json(folder / "vae" / "config.json", config)
    for file in list_weights_files(path):
        shutil.copyfile(file, folder / "vae" / file.name)
    configs = {part: cfg for part, (cfg, _) in checkpoint.parts.items()}
    layers = {"num_hidden_layers": max(configs["text_encoder"].taps)}
    packed = {
        "text_encoder": ("model", format_text_encoder_config(configs["text_encoder"]) | layers),
        "transformer": (DIFFUSERS_STEM, format_transformer_config(configs["transformer"])),
    }
    p = checkpoint.packing
    for part, (stem, config) in packed.items():
        arrays = pack_weights(checkpoint.weights(part), p)
        bar.total += len(arrays)
        config |= {"quantization": {"group_size": p.group, "bits": p.bits, "mode": p.mode}}
        write_part(folder / part, stem, config, arrays, bar.update)
    write_json(folder / "model_index.json", index)  # last, because a folder without it is no model
