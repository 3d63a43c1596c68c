"""The successor: FLUX 3 Image Klein.

klein's successor stands behind a gate, and we have never seen its files. Can we port it all the same, difference by
difference, and know that the port is right?

Letters: b pictures, (gh, gw) rows and columns of patches, n = gh·gw picture tokens, r reference tokens, m text
tokens, d width, s where a step ends.

Sources: names and constants: diffusers' transformer_flux3.py, mflux 0.24 and flux3-mlx 0.1, not the released files,
which are gated and which we have not seen. Flow maps: Boffi et al. 2024, arXiv 2406.07507.

Promoted from notebooks/flux3.ipynb: edit there, then run `make promote`. (seal e680bee6)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from PIL import Image
from tokenizers import Tokenizer

from . import transformer as flux2
from .errors import UserError
from .position_ids import apply_rope, image_ids, rope_table, text_ids
from .text_encoder import PAD, Layer, TextEncoder
from .z_image import PLAIN_TEMPLATE

__all__ = [
    "Flux3Config", "ParallelBlock", "mode_ids", "Flux3Transformer", "padding_row", "encode_window",
    "flux3_velocity_field", "canvas_size", "fill_canvas",
]  # fmt: skip


@dataclass(frozen=True)
class Flux3Config(flux2.TransformerConfig):
    """The transformer in numbers. The defaults are the released distilled model's; the rest is FLUX.2's."""

    double_blocks: int = 0  # none is left
    mode_blocks: int = 5  # for each mode
    single_blocks: int = 28  # the joint ones
    d_text: int = 20480
    theta: float = 10000.0
    flow_map: bool = True  # given where a step ends; the base model is not


class ParallelBlock(nn.Module):
    """FLUX.2's single block, its two matrices cut into six: attention next to MLP. (b, rows, d) → (b, rows, d)"""

    def __init__(self, cfg: Flux3Config):
        super().__init__()
        self.q_proj = flux2.linear(cfg.d, cfg.d)
        self.k_proj = flux2.linear(cfg.d, cfg.d)
        self.v_proj = flux2.linear(cfg.d, cfg.d)
        self.attn_out = flux2.linear(cfg.d, cfg.d)
        self.mlp_in = flux2.linear(cfg.d, 2 * cfg.d_mlp)
        self.mlp_out = flux2.linear(cfg.d_mlp, cfg.d)
        self.norm = flux2.QKNorm(cfg.head_dim)
        self.act = flux2.SwiGLU()
        self.heads = cfg.heads

    def __call__(self, x: mx.array, mod: flux2.Mod, rope: tuple[mx.array, mx.array]) -> mx.array:
        y = flux2.modulate(x, mod.shift, mod.scale)
        q, k, v = (flux2.split_heads(w(y), 1, self.heads)[0] for w in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.norm(q.astype(mx.float32), k.astype(mx.float32))  # in float32 until they are rotated
        q, k = (apply_rope(rows, rope).astype(v.dtype) for rows in (q, k))
        mixed = flux2.join_heads(mx.fast.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5))
        return x + mod.gate * (self.attn_out(mixed) + self.mlp_out(self.act(self.mlp_in(y))))


def mode_ids(m: int, grid: tuple[int, int], grids: Sequence[tuple[int, int]] = ()) -> dict[str, mx.array]:
    """(t, h, w, l) by mode: m words (0, 0, 0, k), a picture (0, i/2, j/2, 0), references the same with l = -1, -2, …"""
    half = mx.array([1, 0.5, 0.5, 1])
    ids = {"txt": text_ids(m), "image": half * image_ids(*grid)}
    if grids:
        own = [half * image_ids(*size) - mx.array([0, 0, 0, r]) for r, size in enumerate(grids, start=1)]
        ids["image_cond"] = mx.concatenate(own)
    return ids


class Flux3Transformer(nn.Module):
    """Text, picture, references pass blocks of their own, then joint ones (diffusers 0.42's transformer_flux3.py)."""

    def __init__(self, cfg: Flux3Config):
        super().__init__()
        self.cfg = cfg
        self.txt_in = flux2.linear(cfg.d_text, cfg.d)
        self.emb_in = {mode: flux2.linear(cfg.d_latent, cfg.d) for mode in ("image", "image_cond")}
        self.time_in = flux2.TimeEmbedding(cfg.d_time, cfg.d)
        if cfg.flow_map:
            self.ref_time_in = flux2.TimeEmbedding(cfg.d_time, cfg.d)
        self.early_stream_modulations = {mode: flux2.Modulation(cfg.d, 1) for mode in ("txt", "image", "image_cond")}
        self.single_stream_modulations = {mode: flux2.Modulation(cfg.d, 1) for mode in ("txt", "image", "image_cond")}
        self.txt_mode_blocks = [ParallelBlock(cfg) for _ in range(cfg.mode_blocks)]
        self.content_mode_blocks = {mode: [ParallelBlock(cfg) for _ in range(cfg.mode_blocks)] for mode in self.emb_in}
        self.single_blocks = [ParallelBlock(cfg) for _ in range(cfg.single_blocks)]
        self.final_layer = {"image": flux2.FinalLayer(cfg)}

    def waves(self, t: float | mx.array, dtype: mx.Dtype) -> mx.array:
        """Chapter 5's features of a noise level, a number or (b,), rounded as the authors do: (1 or b, d_time)"""
        return flux2.time_features(mx.array(t, dtype=dtype).reshape(-1), self.cfg.d_time).astype(dtype)

    def __call__(
        self, img: mx.array, txt: mx.array, references: mx.array | None, t: float | mx.array, t_next: float | mx.array,
        ids: dict[str, mx.array],
    ) -> mx.array:  # fmt: skip
        """Velocity of img (b, n, 128) from t to t_next; txt (b, m, d_text) and references (b, r, 128) stay at t = 0."""
        rows = {"txt": self.txt_in(txt), "image": self.emb_in["image"](img)}
        if references is not None:
            rows["image_cond"] = self.emb_in["image_cond"](references)
        aim = self.ref_time_in(self.waves(t_next, img.dtype)) if self.cfg.flow_map else 0
        vecs = {mode: self.time_in(self.waves(t if mode == "image" else 0 * t, img.dtype)) + aim for mode in rows}
        mods = []
        for mode, vec in vecs.items():  # vec (1 or b, d)
            rope = rope_table(ids[mode], self.cfg.axes, self.cfg.theta)
            (early,) = self.early_stream_modulations[mode](vec)
            for block in self.txt_mode_blocks if mode == "txt" else self.content_mode_blocks[mode]:
                rows[mode] = block(rows[mode], early, rope)
            (joint,) = self.single_stream_modulations[mode](vec)
            vectors = mx.concatenate(list(joint), axis=-1)  # (1 or b, 1, 3·d)
            mods.append(mx.repeat(vectors, rows[mode].shape[1], axis=1))
        mod = flux2.Mod(*mx.split(mx.concatenate(mods, axis=1), 3, axis=-1))  # by row: (1 or b, m + n + r, d)
        rope = rope_table(mx.concatenate(list(ids.values())), self.cfg.axes, self.cfg.theta)
        x = mx.concatenate(list(rows.values()), axis=1)  # text, picture, references: (b, m + n + r, d)
        for block in self.single_blocks:
            x = block(x, mod, rope)
        return self.final_layer["image"](x[:, txt.shape[1] :][:, : img.shape[1]], vecs["image"])


def padding_row(layer: Layer, pad: mx.array, x: mx.array) -> mx.array:
    """One layer for a padding token (1, 1, d) at position 1 that sees nothing but the prompt x (1, m, d)."""
    attn = layer.self_attn
    y = layer.input_layernorm(pad)
    x = layer.input_layernorm(x)
    q = attn.q_norm(flux2.split_heads(attn.q_proj(y), 1, attn.heads)[0])
    k = attn.k_norm(flux2.split_heads(attn.k_proj(x), 1, attn.kv_heads)[0])
    v = flux2.split_heads(attn.v_proj(x), 1, attn.kv_heads)[0]
    q = mx.fast.rope(q, attn.head_dim, traditional=False, base=attn.theta, scale=1.0, offset=1)
    k = mx.fast.rope(k, attn.head_dim, traditional=False, base=attn.theta, scale=1.0, offset=0)
    pad = pad + attn.o_proj(flux2.join_heads(mx.fast.scaled_dot_product_attention(q, k, v, scale=attn.head_dim**-0.5)))
    return pad + layer.mlp(layer.post_attention_layernorm(pad))


def encode_window(encoder: TextEncoder, tokenizer: Tokenizer, prompt: str, most: int = 4096) -> mx.array:
    """The tapped states of a prompt and of the padding up to 80, 160, … `most` tokens: (1, 80·k, features)

    Raises UserError if prompt and template have more than `most` tokens.
    """
    ids = tokenizer.encode(PLAIN_TEMPLATE.format(prompt)).ids
    if len(ids) > most:
        raise UserError(f"The prompt has {len(ids)} tokens and this model reads {most}: shorten {prompt[:40]!r}….")
    states = encoder.hidden_states(mx.array([ids]), mx.array([[True] * len(ids)]), max(encoder.cfg.out_layers))
    pads = [encoder.embed_tokens(mx.array([[tokenizer.token_to_id(PAD)]]))]  # all padding is alike: one row is enough
    for layer, x in zip(encoder.layers, states):
        pads.append(padding_row(layer, pads[-1], x))
    real, pad = (mx.concatenate([rows[k] for k in encoder.cfg.out_layers], axis=-1) for rows in (states, pads))
    return mx.concatenate([real, mx.repeat(pad, min(-len(ids) % 80, most - len(ids)), axis=1)], axis=1)


def flux3_velocity_field(
    transformer: Flux3Transformer, features: list[mx.array], grid: tuple[int, int],
    references: Sequence[mx.array] = (),
) -> Callable[[mx.array, float, float], mx.array]:  # fmt: skip
    """Where to go from latents x (b, n, 128) at noise level t in a step to t_next, as a function of (x, t, t_next).

    features: of each picture's prompt, (1, m, d_text). references: latents (b, gh, gw, 128), a picture each.
    """
    grids = [(z.shape[1], z.shape[2]) for z in references]
    tokens = mx.concatenate([z.flatten(1, 2) for z in references], axis=1) if references else None

    def velocity(x: mx.array, t: float, t_next: float) -> mx.array:
        rows = []
        for i, txt in enumerate(features):
            own = None if tokens is None else tokens[i : i + 1].astype(txt.dtype)
            img = x[i : i + 1].astype(txt.dtype)
            rows.append(transformer(img, txt, own, t, t_next, mode_ids(txt.shape[1], grid, grids)))
        return mx.concatenate(rows)

    return velocity


def canvas_size(width: int, height: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """A lone reference's own size, shrunk to at most 4 · 1024² pixels, and its canvas, in multiples of 16."""
    scale = min(1.0, math.sqrt(4 * 1024**2 / (width * height)), 4096 / max(width, height))
    while True:
        w, h = (max(1, round(side * scale)) for side in (width, height))
        canvas_w, canvas_h = (min(max(-(-side // 16) * 16, 64), 4096) for side in (w, h))
        if canvas_w * canvas_h <= 4 * 1024**2:
            return (w, h), (canvas_w, canvas_h)
        scale *= 0.995


def fill_canvas(image: Image.Image) -> tuple[Image.Image, tuple[int, int, int, int]]:
    """A lone reference on its canvas, filled by reflection, and its box there, to which the result is cut back."""
    (w, h), canvas = canvas_size(*image.size)
    shrunk = image.convert("RGB").resize((w, h), Image.Resampling.LANCZOS)
    pixels = mx.array(memoryview(shrunk.tobytes())).reshape(h, w, 3)  # type: ignore[arg-type]
    twice = min(w, h) <= 16  # then the outermost pixel is mirrored as well
    left, top = ((whole - side) // 2 for whole, side in zip(canvas, (w, h)))
    for axis, (side, wanted, start) in enumerate([(h, canvas[1], top), (w, canvas[0], left)]):
        i = (mx.arange(wanted) - start) % (2 * side - 2 + 2 * twice)
        pixels = mx.take(pixels, mx.minimum(i, 2 * side - 2 + twice - i), axis=axis)
    filled = Image.frombytes("RGB", canvas, bytes(memoryview(pixels)))  # type: ignore[arg-type]
    return filled, (left, top, left + w, top + h)
