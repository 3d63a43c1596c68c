"""Packed weights as files have them: FP8, two layouts of NVFP4, MLX's own. Hand-written.

Codes and scales come as tensors of their own (`x.weight`, `x.weight_scale`, …). `assemble` puts together what belongs
to one matrix, in MLX's order, as a `Packed` of chapter 7; `load_weights` gives a module its weights, packed or not.
What each layer is, is decided by what lies there, never from a list: in FP8 files some layers are bfloat16, and which
ones differs from file to file.
"""

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ..quantisation import PACKINGS, STORED, Packed, Packing
from .packing import packed_layer

IGNORED = (".input_scale", ".scale_input", ".comfy_quant", "scaled_fp8")  # about activations, or for other programs


def find_packing(quantize: int | str | None) -> Packing | None:
    """The packing that `quantize=4` or `quantize="nvfp4"` stands for; ValueError, with the list, if there is none."""
    if quantize is not None and quantize not in PACKINGS:
        known = ", ".join(map(str, PACKINGS))
        raise ValueError(f"quantize is one of {known} (bits per weight, or a format), not {quantize!r}.")
    return PACKINGS.get(quantize)


def load_weights(
    module: nn.Module, weights: dict[str, mx.array | Packed], dtype: mx.Dtype, keep_narrow: bool = False
) -> nn.Module:
    """Give a module its weights by name: arrays as `dtype`, packed ones as they are. Returns the module.

    keep_narrow: matrices in a narrower type than `dtype` stay in it, and are cast when they are used.
    """
    layers, arrays = dict(module.named_modules()), {}
    for name, w in weights.items():
        path = name.removesuffix(".weight")
        is_matrix = isinstance(layers.get(path), (nn.Linear, nn.Embedding)) and name.endswith(".weight")
        if keep_narrow and is_matrix and isinstance(w, mx.array) and w.dtype.size < dtype.size:
            w = Packed({"weight": w}, STORED)
        if isinstance(w, Packed):
            module.update_modules(tree_unflatten([(path, packed_layer(layers[path], w, dtype))]))
        else:
            arrays[name] = w.astype(dtype)
    module.update(tree_unflatten(list(arrays.items())))
    return module.eval()


def assemble(
    arrays: dict[str, mx.array], metadata: dict[str, str] | None = None, mlx: Packing | None = None
) -> dict[str, mx.array | Packed]:
    """Codes and scales → packed matrices under the name of the weight; everything else as it is.

    metadata: the file's. mlx: how matrices with `.scales` are packed, from the part's config.json.
    """
    arrays = {name.replace(".scale_weight", ".weight_scale"): w for name, w in arrays.items()}
    arrays = {name: w for name, w in arrays.items() if not name.endswith(IGNORED)}
    swizzled = any(name.endswith(".weight_scale_2") for name in arrays) and is_swizzled(arrays, metadata or {})
    for name in [name for name in arrays if name.endswith(".weight")]:
        layer, codes = name.removesuffix(".weight"), arrays[name]
        if f"{layer}.scales" in arrays:
            if mlx is None:
                raise ValueError(
                    f"{name} is quantised and config.json does not say how (quantization): a file is missing."
                )
            found = {k: arrays.pop(f"{layer}.{k}", None) for k in ("weight", "scales", "biases", "global_scale")}
            arrays[name] = Packed({k: w for k, w in found.items() if w is not None}, mlx)
        elif codes.dtype == mx.uint8:
            scale, second = (arrays.pop(f"{layer}.{k}", None) for k in ("weight_scale", "weight_scale_2"))
            if scale is not None and scale.dtype == mx.uint8:
                arrays[name] = from_nvfp4(codes, scale, second, swizzled)
            else:
                scale = mx.array(1.0) if scale is None else scale
                tensors = {"weight": codes, "scales": scale_per_row(scale, len(codes))}
                arrays[name] = Packed(tensors, Packing("fp8", 8))
    return arrays


def scale_per_row(scale: mx.array, rows: int) -> mx.array:
    """One number for a matrix, or one per row → (rows, 1), float32."""
    return mx.broadcast_to(scale.astype(mx.float32).reshape(-1, 1), (rows, 1))


# ---------------------------------------------------------------- NVFP4, in two layouts


def from_nvfp4(codes: mx.array, scales: mx.array, second: mx.array | None, swizzled: bool) -> Packed:
    """An NVFP4 matrix of either layout, in MLX's order. ModelOpt's has that order already, Comfy's is swizzled."""
    rows, columns = codes.shape[0], codes.shape[1] // 8
    if swizzled:
        codes, scales = swap_nibbles(codes), mx.contiguous(unswizzle(scales, rows, columns))
    second = mx.array(1.0) if second is None else second
    tensors = {"weight": codes.view(mx.uint32), "scales": scales, "global_scale": scale_per_row(second, rows)}
    return Packed(tensors, PACKINGS["nvfp4"])


def swap_nibbles(codes: mx.array) -> mx.array:
    """The two halves of every byte change places."""
    return (codes >> 4) | (codes << 4)


def unswizzle(scales: mx.array, rows: int, columns: int) -> mx.array:
    """Scales in tiles of 128 × 4, padded to whole tiles → (rows, columns), row by row."""
    across = -(-columns // 4)
    tiles = scales.reshape(-1, across, 32, 4, 4)  # tile down, tile across, r mod 32, r div 32, c
    return tiles.transpose(0, 3, 2, 1, 4).reshape(-1, 4 * across)[:rows, :columns]


def is_swizzled(arrays: dict[str, mx.array], metadata: dict[str, str]) -> bool:
    """Does a file with NVFP4 matrices have Comfy's layout, not ModelOpt's?

    Its metadata may say, or the shape (padded to whole tiles). Else the layout wins in which rows and columns of the
    scales differ more from each other: some neurons and some inputs are larger, and the wrong order hides that.
    """
    if metadata.get("quantization") == "nvfp4":  # diffusers writes this, in ModelOpt's layout
        return False
    if "_quantization_metadata" in metadata or any(name.endswith(".comfy_quant") for name in arrays):
        return True
    plain = swizzled = 0.0
    layers = [name.removesuffix("_2") for name in sorted(arrays) if name.endswith(".weight_scale_2")]
    for name in layers[:: max(1, len(layers) // 8)]:
        rows, columns = arrays[name.removesuffix("_scale")].shape[0], arrays[name.removesuffix("_scale")].shape[1] // 8
        scales = arrays[name]
        if scales.shape != (rows, columns) or rows % 128 or columns % 4:
            return scales.shape != (rows, columns)
        plain += variance_explained(scales)
        swizzled += variance_explained(unswizzle(scales, rows, columns))
    return swizzled >= plain


def variance_explained(scales: mx.array) -> float:
    """How much of the variance of the scales' logarithms lies between rows and between columns: 0 to 1."""
    x = mx.log(mx.from_fp8(scales, mx.float32) + 2**-9)
    variance = lambda y: (y - y.mean()).square().mean().item()
    return (variance(x.mean(axis=0)) + variance(x.mean(axis=1))) / max(variance(x), 1e-9)
