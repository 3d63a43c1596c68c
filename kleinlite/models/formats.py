"""Quantized weights as files have them: FP8, two layouts of NVFP4, MLX's own.

Codes and scales come as tensors of their own (`x.weight`, `x.weight_scale`, …). `assemble` puts together what belongs
to one matrix, in MLX's order, as a `QuantizedMatrix` of chapter 7; `load_weights` gives a module its
weights, quantized or not.
The kind of each layer follows from its tensors, never from a list: in FP8 files some layers are bfloat16, and which
ones differs from file to file.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ..checkpoints import Conversion, match, rename, to_mlx
from ..errors import UserError, clip, first_few
from ..quantization import QUANT_SPECS, UNQUANTIZED, QuantizedMatrix, QuantSpec
from .files import read_json
from .part_format import Rules
from .quantize_network import join, quantized_layer

NOTHING: Mapping[str, Any] = {}
GROUP = 64  # weights that share a scale, where mflux has quantized
IGNORED = (".input_scale", ".scale_input", ".comfy_quant", "scaled_fp8")  # about activations, or for other programs
Weights = dict[str, mx.array | QuantizedMatrix]  # by our names

COMFY_WORDS = "_quantization_metadata"
COMFY_FORMATS = ("float8_e4m3fn", "nvfp4")  # as a file says of a layer how it is packed, those that we read
PACKINGS = {  # how the names of their tensors end → formats of other programs
    ".SCB": "bitsandbytes' 8 bits", ".absmax": "bitsandbytes' 4 bits", ".svd_up": "SDNQ", ".zero_point": "SDNQ",
    ".wscales": "nunchaku", ".qweight": "GPTQ or AWQ", "._data": "quanto", "qdata": "torchao", ".W_q": "HQQ",
    ".weight_packed": "compressed-tensors", ".weight_scale_inv": "FP8 in blocks", ".weight_scales": "EETQ",
}  # fmt: skip


def check_packing(path: Path, tensors: Mapping[str, Any]) -> None:
    """Refuse weights in few bits as other programs write them, by their name. tensors: a header's. Raises UserError."""
    found = next((title for end, title in PACKINGS.items() if any(name.endswith(end) for name in tensors)), None)
    coded = [name for name, tensor in tensors.items() if name.endswith(".weight") and tensor["dtype"] in ("I8", "U8")]
    if any(f"{name.removesuffix('.weight')}.scale" in tensors for name in coded):
        found = "SDNQ"
    if found or any(tensors[name]["dtype"] == "I8" for name in coded):
        refuse_packing(path, found or "int8")


def refuse_packing(what: object, packing: str) -> NoReturn:
    raise UserError(
        f"{what} is packed as {packing}, which kleinlite does not read: take the model's bfloat16, FP8 or NVFP4 file."
    )


def read_comfy_layers(arrays: dict[str, mx.array], metadata: Mapping[str, str]) -> set[str]:
    """The layers that a file says are packed, in tensors or in the header. Raises UserError for how it says so."""
    header = parse_words(COMFY_WORDS, metadata.get(COMFY_WORDS, "{}"))
    layers = dict(parse_words(COMFY_WORDS, header.get("layers", {})))
    for name, w in arrays.items():
        if name.endswith(".comfy_quant"):
            layers[name.removesuffix(".comfy_quant")] = bytes(cast(list, w.flatten().astype(mx.uint8).tolist()))
    for layer, words in layers.items():
        said = parse_words(layer, words)
        if said.get("format", COMFY_FORMATS[0]) not in COMFY_FORMATS:
            refuse_packing(clip(layer), clip(str(said["format"])))
        if said.get("convrot"):
            refuse_packing(clip(layer), "a rotated matrix (convrot)")
    return {*layers}


def parse_words(name: str, said: Any) -> dict[str, Any]:
    """A dictionary in a header, or the JSON of one. Raises UserError for anything else."""
    with suppress(ValueError, RecursionError):
        said = json.loads(said) if isinstance(said, str | bytes) else said
    if not isinstance(said, dict):
        raise UserError(f"What the file says about {clip(name)} is damaged: download it again.")
    return said


def find_quant_spec(quantize: int | str | None) -> QuantSpec | None:
    """The format that `quantize=4` or `quantize="nvfp4"` stands for. Raises UserError, with the list."""
    if quantize is not None and quantize not in QUANT_SPECS:
        known = ", ".join(map(str, QUANT_SPECS))
        raise UserError(f"quantize is one of {known} (bits per weight, or a format), not {quantize!r}.")
    return None if quantize is None else QUANT_SPECS[quantize]


def match_weights(module: nn.Module, arrays: Weights, rules: Rules) -> Weights:
    """Give every parameter of `module` its tensor, whatever layout the files have. Raises UserError on what is off.

    rules: what the released folders call our tensors, a `PartFormat`'s; a single file has our own names already.
    """
    arrays = {name: w for name, w in arrays.items() if not name.endswith("num_batches_tracked")}  # of the batch norm
    parameters = dict(tree_flatten(module.parameters()))
    released_names = [rename(name, rules) for name in parameters]
    if sum(name in arrays for name in parameters) > sum(all(n in arrays for n in names) for names in released_names):
        rules = []
    for name, parameter in parameters.items():  # some files keep the autoencoder's attention as 1×1 convolutions
        array = arrays.get(name)
        if parameter.ndim == 2 and isinstance(array, mx.array) and array.shape[2:] == (1, 1):
            arrays[name] = array.squeeze((2, 3))
    weights = match(module, arrays, rules, convert_quantized)
    plain = {name: w for name, w in weights.items() if isinstance(w, mx.array)}
    wrong = [f"{name} ({w.dtype})" for name, w in plain.items() if not mx.issubdtype(w.dtype, mx.floating)]
    if wrong:
        raise UserError(f"{first_few(wrong)} should have real numbers: take another file of this model.")
    return weights


def convert_quantized(tensors: list[Any], conversion: Conversion | None) -> mx.array | QuantizedMatrix:
    """Chapter 8's `to_mlx`, for quantized matrices too."""
    if not any(isinstance(w, QuantizedMatrix) for w in tensors):
        return to_mlx(tensors, conversion)
    if len({(type(w), getattr(w, "spec", None)) for w in tensors}) > 1:
        return to_mlx([w.decode() if isinstance(w, QuantizedMatrix) else w for w in tensors], conversion)
    return join(tensors).map(lambda rows: to_mlx([rows], conversion))


def load_weights(
    module: nn.Module, weights: dict[str, mx.array | QuantizedMatrix], dtype: mx.Dtype, keep_narrow: bool = False
) -> nn.Module:
    """Give a module its weights by name: arrays as `dtype`, quantized ones as they are. Returns the module.

    keep_narrow: matrices in a narrower type than `dtype` stay in it, and are cast when they are used.
    """
    layers = dict(module.named_modules())
    arrays = {}
    for name, w in weights.items():
        path = name.removesuffix(".weight")
        is_matrix = isinstance(layers.get(path), (nn.Linear, nn.Embedding)) and name.endswith(".weight")
        if keep_narrow and is_matrix and isinstance(w, mx.array) and w.dtype.size < dtype.size:
            w = QuantizedMatrix({"weight": w}, UNQUANTIZED)
        if isinstance(w, QuantizedMatrix):
            module.update_modules(tree_unflatten([(path, quantized_layer(layers[path], w, dtype))]))
        else:
            arrays[name] = w.astype(dtype)
    module.update(tree_unflatten(list(arrays.items())))
    return module.eval()


def assemble(
    arrays: dict[str, mx.array], metadata: Mapping[str, str] = NOTHING, mlx: Mapping[str, QuantSpec] = NOTHING
) -> dict[str, mx.array | QuantizedMatrix]:
    """Codes and scales → quantized matrices under the name of the weight; everything else as it is.

    metadata: the file's. mlx: how matrices with `.scales` are quantized, from the part's config.json: by layer, and
    under "" all others.
    """
    said = read_comfy_layers(arrays, metadata)
    arrays = {name.replace(".scale_weight", ".weight_scale"): w for name, w in arrays.items()}
    arrays = {name: w for name, w in arrays.items() if not name.endswith(IGNORED)}
    found: Weights = {}
    swizzled = any(name.endswith(".weight_scale_2") for name in arrays) and is_swizzled(arrays, metadata)
    group = 32 if metadata.get("format") == "gguf" else GROUP  # GGUF and mflux have no config.json
    for name in [name for name in arrays if name.endswith(".weight")]:
        layer = name.removesuffix(".weight")
        codes = arrays[name]
        if f"{layer}.scales" in arrays:
            kinds = [k for k in ("weight", "scales", "biases", "global_scale") if f"{layer}.{k}" in arrays]
            tensors = {k: arrays.pop(f"{layer}.{k}") for k in kinds}
            spec = mlx.get(layer) or mlx.get("") or affine_spec(codes, tensors["scales"], group)
            found[name] = from_mlx(name, tensors, spec)
        elif codes.dtype == mx.uint8:
            if layer in said and f"{layer}.weight_scale" not in arrays:
                refuse_scales(name)
            scale = arrays.pop(f"{layer}.weight_scale", mx.array(1.0))
            second = arrays.pop(f"{layer}.weight_scale_2", mx.array(1.0))
            is_nvfp4 = scale.dtype == mx.uint8
            found[name] = from_nvfp4(name, codes, scale, second, swizzled) if is_nvfp4 else from_fp8(name, codes, scale)
    plain = {name: mx.from_fp8(w, mx.bfloat16) if w.dtype == mx.uint8 else w for name, w in arrays.items()}
    return plain | found


def read_quant_specs(path: Path) -> dict[str, QuantSpec]:
    """What a folder's config.json says of its quantized matrices, in the words of MLX's own tools, by layer.

    Under "" stands what holds for layers without words of their own.
    """
    config = path / "config.json"
    words = read_json(config).get("quantization") if config.exists() else None
    if not isinstance(words, dict) or not words:
        return {}
    layers = {name: own for name, own in words.items() if isinstance(own, dict)}
    said = {name: words | own for name, own in {"": words, **layers}.items()}
    return {
        name: QuantSpec(own.get("mode", "affine"), own.get("bits", 4), own.get("group_size", GROUP))
        for name, own in said.items()
    }


def narrow(w: mx.array | QuantizedMatrix) -> mx.array | QuantizedMatrix:
    """A matrix in float32, as in Z-Image's files, as bfloat16; anything else as it is."""
    if isinstance(w, mx.array) and w.ndim == 2 and w.dtype == mx.float32:
        return w.astype(mx.bfloat16)
    return w


def refuse_scales(name: str) -> NoReturn:
    raise UserError(
        f"{clip(name)} is quantized, and its scales do not fit (missing, or of another type or shape): download it "
        "again, or take the bfloat16 file."
    )


def from_mlx(name: str, tensors: dict[str, mx.array], spec: QuantSpec) -> QuantizedMatrix:
    """A matrix that MLX has packed. Raises UserError."""
    matrix = QuantizedMatrix(tensors, spec)
    try:
        matrix.decode()  # lazy: MLX only looks whether they belong together
    except (ValueError, TypeError):
        refuse_scales(name)
    return matrix


def from_fp8(name: str, codes: mx.array, scale: mx.array) -> QuantizedMatrix | mx.array:
    """A matrix of FP8 with a scale, or one per row; a convolution's kernel is decoded. Raises UserError."""
    if codes.ndim != 2:
        return mx.from_fp8(codes, mx.float32) * scale_per_row(name, scale, 1)[0]
    tensors = {"weight": codes, "scales": scale_per_row(name, scale, len(codes))}
    return QuantizedMatrix(tensors, QuantSpec("fp8", 8))


def affine_spec(codes: mx.array, scales: mx.array, group: int) -> QuantSpec:
    """How MLX has quantized a matrix in such groups: the bits by how many words of codes there are."""
    words = codes.shape[-1]
    groups = scales.shape[-1]
    bits = next((bits for bits in (2, 3, 4, 5, 6) if 32 * words == bits * group * groups), 8)
    return QuantSpec("affine", bits, group)


def scale_per_row(name: str, scale: mx.array, rows: int) -> mx.array:
    """One number for a matrix, or one per row → (rows, 1), float32. Raises UserError."""
    if scale.size not in (1, rows):
        refuse_scales(name)
    return mx.broadcast_to(scale.astype(mx.float32).reshape(-1, 1), (rows, 1))


# ---------------------------------------------------------------- NVFP4, in two layouts


def from_nvfp4(name: str, codes: mx.array, scales: mx.array, second: mx.array, swizzled: bool) -> QuantizedMatrix:
    """An NVFP4 matrix of either layout, in MLX's order, which ModelOpt's has already. Raises UserError."""
    rows, width = codes.shape
    columns = width // 8
    size = -(-rows // 128) * 128 * -(-columns // 4) * 4
    if scales.size != size if swizzled else scales.shape != (rows, columns):
        refuse_scales(name)
    if swizzled:
        codes = swap_nibbles(codes)
        scales = mx.contiguous(unswizzle(scales, rows, columns))
    tensors = {"weight": codes.view(mx.uint32), "scales": scales, "global_scale": scale_per_row(name, second, rows)}
    return QuantizedMatrix(tensors, QUANT_SPECS["nvfp4"])


def swap_nibbles(codes: mx.array) -> mx.array:
    """The two halves of every byte change places."""
    return (codes >> 4) | (codes << 4)


def unswizzle(scales: mx.array, rows: int, columns: int) -> mx.array:
    """Scales in tiles of 128 × 4, padded to whole tiles → (rows, columns), row by row."""
    across = -(-columns // 4)
    tiles = scales.reshape(-1, across, 32, 4, 4)  # tile down, tile across, r mod 32, r div 32, c
    return tiles.transpose(0, 3, 2, 1, 4).reshape(-1, 4 * across)[:rows, :columns]


def is_swizzled(arrays: dict[str, mx.array], metadata: Mapping[str, str]) -> bool:
    """Does a file with NVFP4 matrices have Comfy's layout, not ModelOpt's?

    Its metadata may say, or the shape (padded to whole tiles). Else the layout wins in which rows and columns of the
    scales differ more from each other: some neurons and some inputs are larger, and the wrong order hides that.
    """
    if metadata.get("quantization") == "nvfp4":  # diffusers writes this, in ModelOpt's layout
        return False
    if COMFY_WORDS in metadata or any(name.endswith(".comfy_quant") for name in arrays):
        return True
    plain = swizzled = 0.0
    layers = [name for name in sorted(arrays) if {f"{name}_scale", f"{name}_scale_2"} <= arrays.keys()]
    for name in layers[:: max(1, len(layers) // 8)]:
        rows, width = arrays[name].shape
        columns = width // 8
        scales = arrays[f"{name}_scale"]
        if scales.shape != (rows, columns) or rows % 128 or columns % 4:
            return scales.shape != (rows, columns)
        plain += variance_explained(scales)
        swizzled += variance_explained(unswizzle(scales, rows, columns))
    return swizzled >= plain


def variance_explained(scales: mx.array) -> float:
    """How much of the variance of the scales' logarithms lies between rows and between columns: 0 to 1."""
    x = mx.log(mx.from_fp8(scales, mx.float32) + 2**-9)
    between = mx.var(x.mean(axis=0)) + mx.var(x.mean(axis=1))
    return cast(float, (between / mx.maximum(mx.var(x), 1e-9)).item())
