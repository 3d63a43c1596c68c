"""Position ids.

Attention sees a bag of patches. How does a patch know where it is?

Letters: b pictures, s tokens, nh heads, hd channels of a head, gh and gw rows and columns of a picture's tokens.

Sources: the released FLUX.2 transformer (the four axes, their order and theta), as diffusers' Flux2PosEmbed
computes them.

Promoted from notebooks/02_position_ids.ipynb: edit there, then run `make promote`. (seal f4dd56d0)
"""

import mlx.core as mx

__all__ = ["text_ids", "image_ids", "reference_ids", "Rope", "rope_table", "apply_rope"]


def text_ids(m: int) -> mx.array:
    """(m, 4) coordinates (t, h, w, l) of m text tokens: (0, 0, 0, position)."""
    l = mx.arange(m)
    zero = mx.zeros_like(l)
    return mx.stack([zero, zero, zero, l], axis=-1)


def image_ids(gh: int, gw: int, t: int = 0) -> mx.array:
    """(gh·gw, 4) coordinates (t, row, column, 0), row by row. The picture being made has t = 0."""
    h, w = mx.meshgrid(mx.arange(gh), mx.arange(gw), indexing="ij")
    h = h.flatten()
    w = w.flatten()
    zero = mx.zeros_like(h)
    return mx.stack([zero + t, h, w, zero], axis=-1)


def reference_ids(grids: list[tuple[int, int]]) -> mx.array:
    """Coordinates of reference pictures of grid sizes (gh, gw): t = 10, 20, 30, …, each grid from (0, 0)."""
    return mx.concatenate([image_ids(gh, gw, t=10 + 10 * k) for k, (gh, gw) in enumerate(grids)])


Rope = tuple[mx.array, mx.array]  # cosines and sines of every token's angles, (s, hd/2) each


def rope_table(ids: mx.array, axes: tuple[int, ...] = (32, 32, 32, 32), theta: float = 2000.0) -> Rope:
    """Cosines and sines of every token's angles: ids (s, 4) → two arrays (s, hd/2), hd = sum(axes).

    Axis a owns axes[a] channels, that is axes[a]/2 angles position·theta^(-2r/axes[a]). float32 always: bfloat16
    would round position 511 to 512.
    """
    per_axis = [
        ids[..., i, None].astype(mx.float32) * theta ** (-mx.arange(0, dim, 2, dtype=mx.float32) / dim)
        for i, dim in enumerate(axes)
    ]
    angles = mx.concatenate(per_axis, axis=-1)  # (s, hd/2)
    return mx.cos(angles), mx.sin(angles)


def apply_rope(x: mx.array, rope: Rope) -> mx.array:
    """Turn each pair of neighboring channels (2r, 2r+1) of x (b, nh, s, hd) by its angle; rope from `rope_table`.

    RoFormer, Su et al. 2021, arXiv 2104.09864.
    """
    cos, sin = rope
    pairs = x.astype(mx.float32).reshape(*x.shape[:-1], -1, 2)  # (b, nh, s, hd/2, 2)
    even = pairs[..., 0]
    odd = pairs[..., 1]
    turned = mx.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)
