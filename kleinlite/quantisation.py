"""Quantisation.

We keep the weights in 8 bits or in 4, by a formula short enough to work out by hand, and multiply with them as they
are.

Promoted from notebooks/10_quantisation.ipynb: edit there, then run `make promote`. (seal 6749aed5)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

__all__ = [
    "Packing",
    "PACKINGS",
    "packing",
    "Packed",
    "pack_matrix",
    "join",
    "to_words",
    "affine_code",
    "e2m1_code",
    "from_e4m3",
    "float_scales",
    "multiply_on_cpu",
    "multiply",
    "swap_nibbles",
    "unswizzle",
    "order",
    "is_swizzled",
    "IGNORED",
    "assemble",
    "per_row",
    "from_nvfp4",
    "PackedLinear",
    "PackedEmbedding",
    "STORED",
    "packed_layer",
    "fill",
    "plain",
    "worth_packing",
    "quantise",
]


@dataclass(frozen=True)
class Packing:
    """How a matrix is packed: what a code means, its bits, and how many of them in a row share a scale."""

    mode: str  # "affine", "mxfp4", "mxfp8", "nvfp4"; "fp8": a scale per row; "stored": plain numbers, no codes
    bits: int
    group: int = 0

    @property
    def bits_per_weight(self) -> float:
        """With scales (and biases, if affine): 16 bits each in affine groups, 8 bits in the others."""
        return self.bits + {"affine": 32, "mxfp4": 8, "mxfp8": 8, "nvfp4": 8}.get(self.mode, 0) / (self.group or 1)


PACKINGS = {
    **{bits: Packing("affine", bits, 64) for bits in (3, 4, 5, 6, 8)},
    "mxfp4": Packing("mxfp4", 4, 32),
    "mxfp8": Packing("mxfp8", 8, 32),
    "nvfp4": Packing("nvfp4", 4, 16),
}


def packing(quantize: int | str | None) -> Packing | None:
    """The packing that a reader's wish (`quantize=4`, `quantize="nvfp4"`) stands for."""
    if quantize is not None and quantize not in PACKINGS:
        known = ", ".join(map(str, PACKINGS))
        raise ValueError(f"quantize is one of {known} (bits per weight, or a format), not {quantize!r}.")
    return PACKINGS.get(quantize)


@dataclass(frozen=True)
class Packed:
    """A matrix (d_out, d_in) in fewer bits: arrays of d_out rows each, and how to read them."""

    tensors: dict[str, mx.array]  # "weight", and where the packing has them "scales", "biases", "global_scale"
    packing: Packing

    ndim = 2

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix, not of its words."""
        rows, columns = self.tensors["weight"].shape
        words = self.packing.mode not in ("stored", "fp8")
        return rows, columns * 32 // self.packing.bits if words else columns

    def map(self, f: Callable[[mx.array], mx.array]) -> "Packed":
        """The same for every array: choose or reorder rows."""
        return Packed({name: f(w) for name, w in self.tensors.items()}, self.packing)

    def decode(self, dtype: mx.Dtype = mx.float32) -> mx.array:
        """The matrix itself, or rows of it: (…, d_in)"""
        t, p = self.tensors, self.packing
        if p.mode == "stored":
            return t["weight"].astype(dtype)
        if p.mode == "fp8":
            return (mx.from_fp8(t["weight"], mx.float32) * t["scales"]).astype(dtype)
        scales, biases = t["scales"], t.get("biases")
        if p.mode == "affine":
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        w = mx.dequantize(t["weight"], scales, biases, p.group, p.bits, p.mode, dtype=mx.float32)
        return (w * t.get("global_scale", 1.0)).astype(dtype)


def pack_matrix(w: mx.array, p: Packing) -> Packed:
    """A matrix (d_out, d_in) in `p`'s bits; d_in must be a multiple of the group."""
    if p.mode != "nvfp4":
        return Packed(dict(zip(("weight", "scales", "biases"), mx.quantize(w, p.group, p.bits, p.mode))), p)
    largest = mx.maximum(mx.abs(w).max().astype(mx.float32), 1e-30) / (448 * 6)  # largest scale times largest code
    codes, scales = mx.quantize(w.astype(mx.float32) / largest, p.group, p.bits, p.mode)
    return Packed({"weight": codes, "scales": scales, "global_scale": mx.full((w.shape[0], 1), largest)}, p)


def join(parts: list[Packed]) -> Packed:
    """Matrices of the same width and packing, one below the other."""
    if len({(p.packing, *p.tensors, p.shape[1]) for p in parts}) > 1:
        raise ValueError("Matrices that are packed in different ways cannot be joined.")
    return Packed({k: mx.concatenate([p.tensors[k] for p in parts]) for k in parts[0].tensors}, parts[0].packing)


def to_words(codes: mx.array, bits: int) -> tuple[mx.array, int]:
    """Packed codes (d_out, d_in·bits/32) → words that hold a whole number of codes (d_out, d_in/n), and that n."""
    if 32 % bits == 0:
        return codes, 32 // bits
    span = {3: 3, 5: 5, 6: 3}[bits]  # after so many bytes the borders fall together again
    kind = mx.uint32 if span < 4 else mx.uint64
    by_byte = codes.view(mx.uint8).reshape(len(codes), -1, span).astype(kind)
    return sum((by_byte[..., j] << 8 * j for j in range(1, span)), by_byte[..., 0]), 8 * span // bits


@mx.compile
def affine_code(words: mx.array, shift: mx.array, mask: mx.array, scale: mx.array) -> mx.array:
    """One code of each word, times its group's scale."""
    return ((words >> shift) & mask).astype(mx.float32) * scale


@mx.compile
def e2m1_code(words: mx.array, shift: mx.array, mask: mx.array, scale: mx.array) -> mx.array:
    """One four-bit float of each word, times its group's scale: a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6."""
    code = (words >> shift) & mask
    twice = (mx.array(0xC8643210, dtype=mx.uint32) >> (4 * (code & 7))) & 15
    return twice.astype(mx.float32) * (0.5 - (code >> 3).astype(mx.float32)) * scale


@mx.compile
def from_e4m3(codes: mx.array) -> mx.array:
    """E4M3 bytes as float32: their bits put where float32 has its own, then 2¹²⁰ for the other bias. Exact."""
    bits = codes.astype(mx.uint32)
    return (((bits & 127) << 20) | ((bits & 128) << 24)).view(mx.float32) * 2.0**120


def float_scales(packed: Packed) -> mx.array:
    """The scales as float32, (d_out, groups)."""
    scales, mode = packed.tensors["scales"], packed.packing.mode
    if mode == "nvfp4":
        return mx.from_fp8(scales, mx.float32)
    if mode in ("mxfp4", "mxfp8"):  # eight bits of exponent, just where float32 has its own
        return (scales.astype(mx.uint32) << 23).view(mx.float32)
    return scales.astype(mx.float32)


def multiply_on_cpu(x: mx.array, packed: Packed) -> mx.array:
    """x (n, d_in) times the matrix, in float32, decoded piece by piece. (n, d_in) → (n, d_out)"""
    t, p = packed.tensors, packed.packing
    if p.mode in ("stored", "fp8"):
        w = t["weight"].astype(mx.float32) if p.mode == "stored" else from_e4m3(t["weight"])
        return x @ w.T if p.mode == "stored" else (x @ w.T) * t["scales"].T
    scales = float_scales(packed)
    if p.mode == "mxfp8":
        w = from_e4m3(t["weight"].view(mx.uint8)).reshape(*scales.shape, p.group)
        return x @ (w * scales[..., None]).reshape(packed.shape).T
    words, n = to_words(t["weight"], p.bits)
    scales, code = mx.repeat(scales, p.group // n, axis=1), affine_code if p.mode == "affine" else e2m1_code
    mask, y = mx.array(2**p.bits - 1, dtype=words.dtype), mx.zeros((len(x), len(words)))
    if "biases" in t:
        y = x.reshape(len(x), -1, p.group).sum(axis=-1) @ t["biases"].astype(mx.float32).T
    for k in range(n):
        w = code(words, mx.array(p.bits * k, dtype=words.dtype), mask, scales)  # (d_out, d_in/n)
        y = mx.addmm(y, x[:, k::n], w.T)
    return y * t["global_scale"].T if "global_scale" in t else y


def multiply(x: mx.array, packed: Packed) -> mx.array:
    """x @ W.T with a packed W, (…, d_in) → (…, d_out), as x's type. Not inside `mx.compile` on a CPU: it evaluates."""
    t, p = packed.tensors, packed.packing
    if mx.default_device() == mx.Device(mx.cpu):
        y = multiply_on_cpu(x.reshape(-1, x.shape[-1]).astype(mx.float32), packed)
        y = y.reshape(*x.shape[:-1], -1).astype(x.dtype)
        mx.eval(y)  # so that one decoded layer at a time is in memory
        return y
    if p.mode in ("stored", "fp8"):
        [w] = mx.depends([t["weight"]], [x])  # so that no layer is decoded before its turn
        y = x @ (w.astype(x.dtype) if p.mode == "stored" else mx.from_fp8(w, x.dtype)).T
    else:
        y = mx.quantized_matmul(x, t["weight"], t["scales"], t.get("biases"), True, p.group, p.bits, p.mode)
    scale = t["scales"] if p.mode == "fp8" else t.get("global_scale")
    return (y if scale is None else y * scale[:, 0]).astype(x.dtype)


def swap_nibbles(codes: mx.array) -> mx.array:
    """The two halves of every byte change places."""
    return (codes >> 4) | (codes << 4)


def unswizzle(scales: mx.array, rows: int, columns: int) -> mx.array:
    """Scales in tiles of 128 × 4, padded to whole tiles → (rows, columns), row by row."""
    across = -(-columns // 4)
    tiles = scales.reshape(-1, across, 32, 4, 4)  # tile down, tile across, r mod 32, r div 32, c
    return tiles.transpose(0, 3, 2, 1, 4).reshape(-1, 4 * across)[:rows, :columns]


def order(scales: mx.array) -> float:
    """How much of the spread of the scales' logarithms lies between rows and between columns: 0 to 1."""
    x = mx.log(mx.from_fp8(scales, mx.float32) + 2**-9)
    spread = lambda y: (y - y.mean()).square().mean().item()
    return (spread(x.mean(axis=0)) + spread(x.mean(axis=1))) / max(spread(x), 1e-9)


def is_swizzled(arrays: dict[str, mx.array], said: dict[str, str]) -> bool:
    """Does a file with NVFP4 matrices have Comfy's layout, not ModelOpt's? `said`: the file's metadata."""
    if said.get("quantization") == "nvfp4":  # diffusers writes this, in ModelOpt's layout
        return False
    if "_quantization_metadata" in said or any(name.endswith(".comfy_quant") for name in arrays):
        return True
    plain = swizzled = 0.0
    layers = [name.removesuffix("_2") for name in sorted(arrays) if name.endswith(".weight_scale_2")]
    for name in layers[:: max(1, len(layers) // 8)]:
        rows, columns = arrays[name.removesuffix("_scale")].shape[0], arrays[name.removesuffix("_scale")].shape[1] // 8
        scales = arrays[name]
        if scales.shape != (rows, columns) or rows % 128 or columns % 4:
            return scales.shape != (rows, columns)
        plain, swizzled = plain + order(scales), swizzled + order(unswizzle(scales, rows, columns))
    return swizzled >= plain


IGNORED = (".input_scale", ".scale_input", ".comfy_quant", "scaled_fp8")  # about activations, or for other programs


def assemble(
    arrays: dict[str, mx.array], said: dict[str, str] | None = None, mlx: Packing | None = None
) -> dict[str, mx.array | Packed]:
    """Codes and scales → packed matrices under the name of the weight; everything else as it is.

    said: the file's metadata. mlx: how matrices with `.scales` are packed, from the part's config.json.
    """
    arrays = {name.replace(".scale_weight", ".weight_scale"): w for name, w in arrays.items()}
    arrays = {name: w for name, w in arrays.items() if not name.endswith(IGNORED)}
    swizzled = any(name.endswith(".weight_scale_2") for name in arrays) and is_swizzled(arrays, said or {})
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
                arrays[name] = Packed({"weight": codes, "scales": per_row(scale, len(codes))}, Packing("fp8", 8))
    return arrays


def per_row(scale: mx.array, rows: int) -> mx.array:
    """One number for a matrix, or one per row → (rows, 1), float32."""
    return mx.broadcast_to(scale.astype(mx.float32).reshape(-1, 1), (rows, 1))


def from_nvfp4(codes: mx.array, scales: mx.array, second: mx.array | None, swizzled: bool) -> Packed:
    """An NVFP4 matrix of either layout, in MLX's order."""
    rows, columns = codes.shape[0], codes.shape[1] // 8
    if swizzled:
        codes, scales = swap_nibbles(codes), mx.contiguous(unswizzle(scales, rows, columns))
    second = mx.array(1.0) if second is None else second
    tensors = {"weight": codes.view(mx.uint32), "scales": scales, "global_scale": per_row(second, rows)}
    return Packed(tensors, Packing("nvfp4", 4, 16))


class PackedLinear(nn.Module):
    """A matrix kept in fewer bits. (…, d_in) → (…, d_out)"""

    def __init__(self, packed: Packed):
        super().__init__()
        for name, w in packed.tensors.items():
            self[name] = w
        self._packing = packed.packing
        self.freeze()

    @property
    def packed(self) -> Packed:
        return Packed(dict(self), self._packing)

    def __call__(self, x: mx.array) -> mx.array:
        return multiply(x, self.packed)


class PackedEmbedding(PackedLinear):
    """A table of rows kept in fewer bits. (…) of whole numbers → (…, d)"""

    def __init__(self, packed: Packed, dtype: mx.Dtype):
        super().__init__(packed)
        self._dtype = dtype

    def __call__(self, ids: mx.array) -> mx.array:
        return self.packed.map(lambda w: w[ids]).decode(self._dtype)


STORED = Packing("stored", 16)


def packed_layer(layer: nn.Module, packed: Packed, dtype: mx.Dtype) -> nn.Module:
    """What stands in for a linear layer or an embedding."""
    embedding = isinstance(layer, (nn.Embedding, PackedEmbedding))
    return PackedEmbedding(packed, dtype) if embedding else PackedLinear(packed)


def fill(module: nn.Module, weights: dict[str, mx.array | Packed], dtype: mx.Dtype, keep: bool = False) -> nn.Module:
    """Give a module its weights by name: arrays as `dtype`, packed ones as they are.

    keep: matrices in a narrower type than `dtype` stay in it, and are cast when they are used.
    """
    layers, arrays = dict(module.named_modules()), {}
    for name, w in weights.items():
        path = name.removesuffix(".weight")
        matrix = isinstance(layers.get(path), (nn.Linear, nn.Embedding)) and name.endswith(".weight")
        if keep and matrix and isinstance(w, mx.array) and w.dtype.size < dtype.size:
            w = Packed({"weight": w}, STORED)
        if isinstance(w, Packed):
            module.update_modules(tree_unflatten([(path, packed_layer(layers[path], w, dtype))]))
        else:
            arrays[name] = w.astype(dtype)
    module.update(tree_unflatten(list(arrays.items())))
    return module.eval()


def plain(w: mx.array | Packed) -> mx.array:
    """A matrix to be packed (again): as stored, or decoded from FP8."""
    if isinstance(w, Packed):
        return w.tensors["weight"] if w.packing == STORED else w.decode(mx.bfloat16)
    return w


def worth_packing(shape: tuple[int, int], total: int, p: Packing) -> bool:
    """Whole groups in every row, and not so small against `total` weights that it would save nothing."""
    return shape[1] % p.group == 0 and shape[0] * shape[1] * 2000 >= total


def quantise(module: nn.Module, p: Packing, dtype: mx.Dtype, after: Callable[[], None] = lambda: None) -> nn.Module:
    """Pack the matrices of a module, one after the other; `after` is called after each. Returns the module.

    The largest comes first: while it is there in both forms, the others are not yet in memory.
    """
    layers = {path: m for path, m in module.named_modules() if isinstance(m, (nn.Linear, nn.Embedding, PackedLinear))}
    matrix = lambda m: m.packed if isinstance(m, PackedLinear) else m.weight
    sizes = {path: math.prod(matrix(layer).shape) for path, layer in layers.items()}
    total = sum(sizes.values())
    for path in sorted(layers, key=sizes.get, reverse=True):
        layer = layers.pop(path)
        w = matrix(layer)
        if worth_packing(w.shape, total, p):
            packed = pack_matrix(plain(w), p)
            mx.eval(packed.tensors)
            module.update_modules(tree_unflatten([(path, packed_layer(layer, packed, dtype))]))
        del layer, w
        after()
    return module
