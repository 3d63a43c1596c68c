"""Quantized matrices: decoding, and products. Hand-written; chapter 7 tells the idea, on codes of 4 bits.

On a Linux CPU `mx.quantized_matmul` is a slow loop, and `mx.dequantize` takes several times as long as a product with
few tokens. But the *first* codes of all words are a matrix of their own, of every n-th column: one mask, one cast and
one multiplication over whole arrays decode it. So a product is a sum of n small ones, each with an n-th of the matrix.
(MLX works ahead on a CPU: several n-ths are in memory at a time, about one decoded matrix in all. Time is saved, not
memory.) A group's bias needs no decoding: it meets the sum of the group's inputs.

- In 3, 5 and 6 bits codes cross the borders of bytes; three or five bytes, read as one number, hold a whole count.
- A four-bit float has eight sizes; doubled (0, 1, 2, 3, 4, 6, 8, 12) they fit as digits into 0xC8643210.
- An eight-bit float's bits, put where float32 has its own, are the same number with an exponent that is 120 too small.

In all functions tensors are "weight" and, where the mode has them, "scales", "biases", "global_scale"; mode, bits and
group are those of `kleinlite.quantization.QuantSpec`.
"""

import mlx.core as mx


def quantized_matmul(x: mx.array, tensors: dict[str, mx.array], mode: str, bits: int, group: int) -> mx.array:
    """x @ W.T with a quantized W, (…, d_in) → (…, d_out), as x's type."""
    y = matmul_in_pieces(x.reshape(-1, x.shape[-1]).astype(mx.float32), tensors, mode, bits, group)
    return y.reshape(*x.shape[:-1], -1).astype(x.dtype)


def matmul_in_pieces(x: mx.array, tensors: dict[str, mx.array], mode: str, bits: int, group: int) -> mx.array:
    """The same, decoded piece by piece in float32. (n, d_in) → (n, d_out)"""
    weight = tensors["weight"]
    if mode == "stored":
        return x @ weight.astype(mx.float32).T
    if mode == "fp8":
        return (x @ decode_e4m3(weight).T) * tensors["scales"].T
    scales = decode_scales(tensors["scales"], mode)
    if mode == "mxfp8":
        w = decode_e4m3(weight.view(mx.uint8)).reshape(*scales.shape, group)
        return x @ (w * scales[..., None]).reshape(len(weight), -1).T
    words, n = whole_words(weight, bits)
    scales = mx.repeat(scales, group // n, axis=1)
    decode = decode_affine if mode == "affine" else decode_e2m1
    mask = mx.array(2**bits - 1, dtype=words.dtype)
    y = mx.zeros((len(x), len(words)))
    if "biases" in tensors:
        y = x.reshape(len(x), -1, group).sum(axis=-1) @ tensors["biases"].astype(mx.float32).T
    for k in range(n):
        w = decode(words, mx.array(bits * k, dtype=words.dtype), mask, scales)  # (d_out, d_in/n)
        y = mx.addmm(y, x[:, k::n], w.T)
    return y * tensors["global_scale"].T if "global_scale" in tensors else y


def whole_words(codes: mx.array, bits: int) -> tuple[mx.array, int]:
    """Quantized codes (d_out, d_in·bits/32) → words that hold a whole number of codes (d_out, d_in/n), and that n."""
    if 32 % bits == 0:
        return codes, 32 // bits
    span = {3: 3, 5: 5, 6: 3}[bits]  # after this many bytes the borders fall together again
    kind = mx.uint32 if span < 4 else mx.uint64
    by_byte = codes.view(mx.uint8).reshape(len(codes), -1, span).astype(kind)
    return sum((by_byte[..., j] << 8 * j for j in range(1, span)), by_byte[..., 0]), 8 * span // bits


@mx.compile
def decode_affine(words: mx.array, shift: mx.array, mask: mx.array, scale: mx.array) -> mx.array:
    """One code of each word, times its group's scale."""
    return ((words >> shift) & mask).astype(mx.float32) * scale


@mx.compile
def decode_e2m1(words: mx.array, shift: mx.array, mask: mx.array, scale: mx.array) -> mx.array:
    """One four-bit float of each word, times its group's scale: a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6."""
    code = (words >> shift) & mask
    twice = (mx.array(0xC8643210, dtype=mx.uint32) >> (4 * (code & 7))) & 15
    return twice.astype(mx.float32) * (0.5 - (code >> 3).astype(mx.float32)) * scale


@mx.compile
def decode_e4m3(codes: mx.array) -> mx.array:
    """E4M3 bytes as float32: their bits put where float32 has its own, then 2¹²⁰ for the other bias. Exact."""
    bits = codes.astype(mx.uint32)
    return (((bits & 127) << 20) | ((bits & 128) << 24)).view(mx.float32) * 2.0**120


def decode_scales(scales: mx.array, mode: str) -> mx.array:
    """The scales as float32, (d_out, groups)."""
    if mode == "nvfp4":
        return mx.from_fp8(scales, mx.float32)
    if mode in ("mxfp4", "mxfp8"):  # eight bits of exponent, just where float32 has its own
        return (scales.astype(mx.uint32) << 23).view(mx.float32)
    return scales.astype(mx.float32)
