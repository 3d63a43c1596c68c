"""MLX at a good speed on a Linux CPU. On a Mac or with a GPU nothing here changes anything.

MLX is made for Apple's chips. Its Linux CPU build gives the same results, but five things in it are slow or large:

- matrix products, 30 to 100 times: the wheel brings the reference BLAS. `setup` puts OpenBLAS in its place, whose
  threads sleep when there is nothing to do; where other programs keep the cores busy, a small model's products take
  one thread (`idle_cores_only`);
- large arrays: each goes back to the kernel after every operation and has to be asked for again. `setup`
  tells the C library to keep them;
- exp, 5 to 8 times, and with it silu, softmax and attention: MLX works it out one value at a time.
  The functions here use an exp made of plain MLX operations, which run on several values at once;
- products in bfloat16: one value at a time. They are done in float32; or, with `pip install -e ".[bf16]"` and a
  processor that multiplies bfloat16, by oneDNN (`bfloat16_name`), twice as fast as in float32;
- convolutions and attention, which are large: MLX lays out every pixel's neighborhood, nine times the picture for a
  3 × 3 filter, or all scores at once, and starts on the next operation before the last is done. `conv2d` and
  `attention` work on a few rows at a time, in less memory; and 3 × 3 filters multiply half as often.

Inside `mx.compile` those operations become two or three loops; so compile a training step. MLX compiles with g++;
where there is none, it runs the operations one by one.

    python -m benchmarks.operations     times this module against MLX's own operations, in a clone
    KLEINLITE_CPU=off                   switches all of it off
"""

from .bfloat16 import bfloat16_name
from .blas import blas_name, give_back, idle_cores_only, setup
from .convolution import conv2d, upsample_conv2d
from .layers import speed_up
from .operations import FAST, affine, attention, silu, softmax

__all__ = [
    "FAST", "affine", "attention", "bfloat16_name", "blas_name", "conv2d", "give_back", "idle_cores_only", "setup",
    "silu", "softmax", "speed_up", "upsample_conv2d",
]  # fmt: skip
