"""Writes a model as a folder in the released layout: a trained one in float16, or a released one quantised.

The counterpart of chapter 8, which reads such folders: the same names, the same layout, configs in diffusers' words.
`Klein.from_pretrained` loads both kinds; what is not quantised, diffusers loads as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator
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
from ..text_encoder import PAD, TextEncoder, TextEncoderConfig
from ..transformer import Transformer
from .configs import (
    format_autoencoder_config,
    format_model_index,
    format_text_encoder_config,
    format_transformer_config,
)
from .files import is_inside, list_weights_files, read_json
from .names import AUTOENCODER_NAMES, TEXT_ENCODER_NAMES, TRANSFORMER_NAMES
from .opening import Checkpoint, open_checkpoint, part_folder
from .packing import unpacked, worth_packing

SCHEDULER_JSON = {
    "_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0,
    "use_dynamic_shifting": True, "time_shift_type": "exponential", "base_shift": 0.5, "max_shift": 1.15,
    "base_image_seq_len": 256, "max_image_seq_len": 4096, "shift_terminal": None, "invert_sigmas": False,
    "stochastic_sampling": False, "use_karras_sigmas": False, "use_exponential_sigmas": False, "use_beta_sigmas": False,
}  # fmt: skip


TOKENIZER_JSON = {
    "tokenizer_class": "Qwen2Tokenizer", "pad_token": PAD, "eos_token": "<|im_end|>", "bos_token": None,
    "unk_token": None, "add_prefix_space": False, "model_max_length": 40960,
}  # fmt: skip


CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}"
)


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


def save_part(folder: Path, module: nn.Module, rules: list[tuple[str, ...]], stem: str, config: dict) -> None:
    """One part of a model: config.json and its weights, float16, under the released folder's names."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    arrays = to_released(module, rules, mx.float16)
    if "bn.running_mean" in arrays:
        arrays["bn.num_batches_tracked"] = mx.array(0, dtype=mx.int64)  # diffusers expects it
    mx.save_safetensors(str(folder / f"{stem}.safetensors"), arrays, {"format": "pt"})


def save_transformer(folder: Path, transformer: Transformer, text_cfg: TextEncoderConfig, distilled: bool) -> None:
    """A transformer and the model_index.json that makes its folder a model; the other parts may be beside it."""
    config = format_transformer_config(transformer._cfg)
    save_part(folder / "transformer", transformer, TRANSFORMER_NAMES, "diffusion_pytorch_model", config)
    (folder / "model_index.json").write_text(json.dumps(format_model_index(text_cfg, distilled), indent=1) + "\n")


def save_encoders(
    folder: Path, autoencoder: Autoencoder, cfg: AutoencoderConfig, size: int,
    text_encoder: TextEncoder, tokenizer: Tokenizer,
) -> None:  # fmt: skip
    """The parts around the transformer, in the released layout that diffusers reads as well."""
    save_part(
        folder / "vae",
        autoencoder,
        AUTOENCODER_NAMES,
        "diffusion_pytorch_model",
        format_autoencoder_config(cfg, size),
    )
    save_part(
        folder / "text_encoder",
        text_encoder,
        TEXT_ENCODER_NAMES,
        "model",
        format_text_encoder_config(text_encoder._cfg),
    )
    (folder / "tokenizer").mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_JSON, indent=1) + "\n")
    (folder / "tokenizer" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "scheduler").mkdir(exist_ok=True)
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(SCHEDULER_JSON, indent=1) + "\n")


# ---------------------------------------------------------------- a quantised copy

SHARD_BYTES = 5 * 10**9  # bytes of weights in one file; the released shards are about as large
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


def split_shards(arrays: dict[str, mx.array], limit: int = SHARD_BYTES) -> Iterable[dict[str, mx.array]]:
    """The arrays in portions of at most `limit` bytes."""
    portions, size = [{}], 0
    for name, w in arrays.items():
        if portions[-1] and size + w.nbytes > limit:
            portions, size = [*portions, {}], 0
        portions[-1][name] = w
        size += w.nbytes
    return portions


def write_quantized_part(folder: Path, checkpoint: Checkpoint, part: str, stem: str, config: dict, bar: tqdm) -> None:
    """A part's config.json, its packed weights in shards, and their index."""
    p = checkpoint.packing
    config |= {"quantization": {"group_size": p.group, "bits": p.bits, "mode": p.mode}}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    portions = split_shards(pack_weights(checkpoint.weights(part), p))
    files = [f"{stem}-{i:05}-of-{len(portions):05}.safetensors" for i in range(1, len(portions) + 1)]
    files = files if len(files) > 1 else [f"{stem}.safetensors"]
    places = {name: file for file, portion in zip(files, portions) for name in portion}
    bar.total += len(places)
    for file, portion in zip(files, portions):
        write_safetensors(folder / file, portion, bar.update)
    if len(files) > 1:
        index = {"metadata": {}, "weight_map": places}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


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
    appears when it is whole. Raises FileExistsError if there is one already.
    """
    out = Path(out)
    if os.path.lexists(out):
        raise FileExistsError(f"{out} is there already: name a new folder.")
    checkpoint = open_checkpoint(name, dtype=mx.bfloat16, quantize=quantize, parts=parts)
    out.parent.mkdir(parents=True, exist_ok=True)
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


def copy_words(source: Path, folder: Path) -> None:
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
        copy_words(part_folder(checkpoint.folder, beside), folder / beside)
    cfg, path = checkpoint.parts["vae"]
    (folder / "vae").mkdir()
    config = read_json(path / "config.json") if path.is_dir() else format_autoencoder_config(cfg, info.size)
    (folder / "vae" / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    for file in list_weights_files(path):
        shutil.copyfile(file, folder / "vae" / file.name)
    cfg, _ = checkpoint.parts["text_encoder"]
    config = format_text_encoder_config(cfg) | {"num_hidden_layers": max(cfg.taps)}
    write_quantized_part(folder / "text_encoder", checkpoint, "text_encoder", "model", config, bar)
    config = format_transformer_config(checkpoint.parts["transformer"][0])
    write_quantized_part(folder / "transformer", checkpoint, "transformer", "diffusion_pytorch_model", config, bar)
    # Last, because a folder without it is no model.
    (folder / "model_index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
