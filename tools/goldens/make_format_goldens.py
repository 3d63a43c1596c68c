"""Matrices in FP8 and in both layouts of NVFP4, byte by byte, and what they stand for: `goldens/formats.safetensors`.

    python -m tools.goldens.make_format_goldens     # torch and numpy; nothing here depends on MLX or on kleinlite

The codes are drawn, not quantized: every code and every kind of scale occurs. Values are worked out one by one, from
the definition of the format and the place of each byte in its layout.
"""

import numpy as np
import torch
from safetensors.torch import save_file

from tools.goldens import GOLDENS

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
ROWS, COLUMNS = 130, 96  # a little more than a tile of 128 rows and of 4 scales, so that both kinds of padding occur


def fp8(draw: np.random.Generator) -> dict[str, torch.Tensor]:
    """`weight` with one scale (`one.*`) or one per row (`row.*`)."""
    codes = draw.integers(0, 256, (24, 40)).astype(np.uint8)
    codes[(codes & 127) == 127] = 0  # not a number
    weight = torch.from_numpy(codes).view(torch.float8_e4m3fn)
    scale, rows = torch.tensor(0.0123), torch.from_numpy(draw.uniform(0.001, 0.1, 24).astype(np.float32))
    value = weight.to(torch.float32)
    return {
        "fp8.weight": weight, "fp8.one.scale": scale, "fp8.one.value": value * scale,
        "fp8.row.scale": rows, "fp8.row.value": value * rows[:, None],
    }  # fmt: skip


def nvfp4(draw: np.random.Generator) -> dict[str, torch.Tensor]:
    """The same matrix in ModelOpt's layout (`plain.*`) and in Comfy's (`tiled.*`)."""
    groups = COLUMNS // 16
    codes = draw.integers(0, 16, (ROWS, COLUMNS))
    bytes_of_scales = draw.integers(1, 127, (ROWS, groups)).astype(np.uint8)  # positive, the smallest ones too
    scale = torch.from_numpy(bytes_of_scales).view(torch.float8_e4m3fn).to(torch.float32).numpy()
    second = 2.0**-7
    low_first = np.zeros((ROWS, COLUMNS // 2), np.uint8)
    high_first = np.zeros((ROWS, COLUMNS // 2), np.uint8)
    value = np.zeros((ROWS, COLUMNS), np.float64)
    across = -(-groups // 4)
    tiled = np.zeros(-(-ROWS // 128) * 128 * across * 4, np.uint8)
    for r in range(ROWS):
        for c in range(COLUMNS):
            code = int(codes[r, c])
            low_first[r, c // 2] |= code << (4 if c % 2 else 0)
            high_first[r, c // 2] |= code << (0 if c % 2 else 4)
            value[r, c] = E2M1[code] * scale[r, c // 16] * second
        for g in range(groups):
            offset = (r // 128 * across + g // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + g % 4
            tiled[offset] = bytes_of_scales[r, g]
    half = value.astype(np.float16)
    assert (half == value).all()  # seven bits and few exponents: float16 holds them

    def e4m3(x):
        return torch.from_numpy(x).view(torch.float8_e4m3fn)

    return {
        "nvfp4.second": torch.tensor(second), "nvfp4.value": torch.from_numpy(half),
        "nvfp4.plain.weight": torch.from_numpy(low_first), "nvfp4.plain.scale": e4m3(bytes_of_scales),
        "nvfp4.tiled.weight": torch.from_numpy(high_first), "nvfp4.tiled.scale": e4m3(tiled.reshape(-1, across * 4)),
    }  # fmt: skip


if __name__ == "__main__":
    draw = np.random.Generator(np.random.PCG64(0))
    save_file(fp8(draw) | nvfp4(draw), GOLDENS / "formats.safetensors")
