"""Position ids.

We give every token four coordinates and build the rotation that lets attention feel the distance between them.

Promoted from notebooks/02_position_ids.ipynb: edit there, then run `make promote`. (seal ec0f5198)
"""

import mlx.core as mx

__all__ = ["text_ids", "image_ids", "reference_ids", "rope_table", "apply_rope"]


def text_ids(m: int) -> mx.array:
    """(m, 4) coordinates (t, h, w, l) of m text tokens: (0, 0, 0, position)."""
    l = mx.arange(m)
    zero = mx.zeros_like(l)
    return mx.stack([zero, zero, zero, l], axis=-1)


def image_ids(gh: int, gw: int, t: int = 0) -> mx.array:
    """(gh·gw, 4) coordinates (t, row, column, 0), row by row. The picture being made has t = 0."""
    h, w = mx.meshgrid(mx.arange(gh), mx.arange(gw), indexing="ij")
    h, w = h.flatten(), w.flatten()
    zero = mx.zeros_like(h)
    return mx.stack([zero + t, h, w, zero], axis=-1)


def reference_ids(grids: list[tuple[int, int]]) -> mx.array:
    """Coordinates of reference pictures of grid sizes (gh, gw): t = 10, 20, 30, …, each grid from (0, 0)."""
    return mx.concatenate([image_ids(gh, gw, t=10 + 10 * k) for k, (gh, gw) in enumerate(grids)])


def rope_table(
    ids: mx.array, axes: tuple[int, ...] = (32, 32, 32, 32), theta: float = 2000.0
) -> tuple[mx.array, mx.array]:
    """Cosines and sines of every token's angles: ids (s, 4) → two arrays (s, hd/2), hd = sum(axes).

    Axis a owns axes[a] channels, that is axes[a]/2 angles position·theta^(-2r/axes[a]). float32 always: bfloat16
    would make 512 of position 511.
    """
    angles = [
        ids[..., i, None].astype(mx.float32) * theta ** (-mx.arange(0, dim, 2, dtype=mx.float32) / dim)
        for i, dim in enumerate(axes)
    ]
    angles = mx.concatenate(angles, axis=-1)  # (s, hd/2)
    return mx.cos(angles), mx.sin(angles)


def apply_rope(x: mx.array, rope: tuple[mx.array, mx.array]) -> mx.array:
    """Turn each pair of neighbouring channels (2r, 2r+1) of x (b, nh, s, hd) by its angle; rope from `rope_table`."""
    cos, sin = rope
    pairs = x.astype(mx.float32).reshape(*x.shape[:-1], -1, 2)  # (b, nh, s, hd/2, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = mx.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)
