"""What `benchmarks.peers` times, and how much work each stage is. Hand-written."""

from typing import NamedTuple

from mlx.utils import tree_flatten

from benchmarks.workers.loop import BATCH, COPY, HEAD_SIZE, HEADS, PRODUCT, SMALL, TEXT_TOKENS, TOKENS, WIDTH
from kleinlite.autoencoder import Autoencoder, AutoencoderConfig
from kleinlite.memory import count_prompt, count_step
from kleinlite.text_encoder import TextEncoderConfig
from kleinlite.transformer import TransformerConfig

PROGRAMS = ("kleinlite", "diffusers", "mflux")
BUSY = ", one core busy"
STAGES = {  # name → what it is
    "product": "matmul, 1536 × 3072 × 9216",
    "copy": "x + 1 for 34 million values",
    "attention": "24 heads × 1536 tokens × 128",
    "silu · up": "the gate of an MLP, 1536 × 9216",
    "modulated norm": "layer norm, scale and shift, 1536 × 3072",
    "step": "1 double and 2 single blocks of the 4B, 1024 + 512 tokens",
    "step, 8 bits": "the same, quantized",
    "step, 4 bits": "the same, quantized",
    "step, bfloat16": "the same in bfloat16",
    f"step{BUSY}": "the same beside another program",
    "training": "gradients of 7 small blocks",
    "text encoder": "{layers} layers of Qwen3-4B, 512 tokens",
    "decode 256²": "the released autoencoder's decoder",
    "decode 512²": "the same, four times the pixels",
    "picture": "klein-nano, four steps, in a warm process",
    "start to PNG": "the same, from the shell",
}
TOGETHER = tuple(stage for stage in STAGES if stage.startswith("step"))  # these share their turns, to be compared


class Timing(NamedTuple):
    """What the turns of one stage in one program cost."""

    seconds: list[float]
    processor: list[float]  # seconds of all threads
    peak_bytes: int  # beyond what was held before the stage

    @property
    def best(self) -> float:
        return min(self.seconds)


def count_work(layers: int) -> dict[str, tuple[float, float]]:
    """Of a stage: multiplications and additions, and the bytes that it reads and writes at least if it is no product.

    Convolutions are counted as written; Winograd's algorithm does with fewer.
    """
    s = TOKENS + TEXT_TOKENS
    small = TransformerConfig(**SMALL)
    step = count_step(TransformerConfig(double_blocks=1, single_blocks=2), TEXT_TOKENS, TOKENS).total
    return dict.fromkeys(TOGETHER, (step, 0)) | {
        "product": (2 * PRODUCT[0] * PRODUCT[1] * PRODUCT[2], 0),
        "copy": (0, 2 * 4 * COPY),
        "attention": (4 * HEADS * s * s * HEAD_SIZE, 0),
        "silu · up": (0, 3 * 4 * s * 3 * WIDTH),
        "modulated norm": (0, 2 * 4 * s * WIDTH),
        "training": (3 * BATCH * count_step(small, 32, 36).total, 0),  # backwards there are two products for each
        "text encoder": (count_prompt(TextEncoderConfig(out_layers=(layers,), max_length=TEXT_TOKENS)).total, 0),
        "decode 256²": (count_decode(256), 0),
        "decode 512²": (count_decode(512), 0),
    }


def count_decode(side: int) -> int:
    """Multiplications and additions of the released decoder for a square picture."""
    cfg, flops = AutoencoderConfig(), 0
    last = len(cfg.channels) - 1
    for name, w in tree_flatten(Autoencoder(cfg).decoder.parameters()):
        level = int(name.split(".")[1]) if name.startswith("up.") else 0 if name.startswith("conv_out") else last
        pixels = (side >> level - ("upsample" in name)) ** 2
        flops += 2 * w.size * pixels * (w.ndim > 1)
    return flops + 4 * (side >> last) ** 4 * cfg.channels[-1]
