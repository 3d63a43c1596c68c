"""The tables of the page "Which machine runs what", from the plan and the operations of each model.

python site/machines.py     write them into notebooks/machines.md
"""

from dataclasses import replace
from pathlib import Path

from kleinlite.flux3 import Flux3Config
from kleinlite.inference.machine_memory import plan_networks, window_configs
from kleinlite.memory import count_prompt, count_step
from kleinlite.models.configs import RELEASED_CONFIGS
from kleinlite.models.registry import MODELS
from kleinlite.quantization import QUANT_SPECS
from kleinlite.z_image import ZImageConfig

PAGE = Path(__file__).resolve().parents[1] / "notebooks" / "machines.md"
MACS = (8, 16, 24, 32, 36, 48, 64, 96, 128, 192)  # GB

# TFLOP/s in 16 bits without sparsity. M1 and M1 Max: Apple's own numbers. Other Macs: units · 2 · clock. Cards:
# tensor cores that add up in float32, as the makers' data sheets have them.
CHIPS = {
    "M1": 2.6, "M4": 4.0, "M4 Pro": 8.0, "M1 Max": 10.4, "M3 Max": 14.3, "M4 Max": 17.2,
    "RTX 3060": 25, "RTX 3090": 71, "RTX 4090": 165,
}  # fmt: skip


def precisions(size: str) -> dict[str, tuple[float, float]]:
    """Bits per weight of the transformer and of the text encoder in each row of the page."""
    rows = {"bfloat16": (16, 16)} | {f"{bits} bits": (QUANT_SPECS[bits].bits_per_weight,) * 2 for bits in (8, 4)}
    if size in ("z-image", "flux3"):  # their makers publish no smaller files
        return rows
    stored = 8 * MODELS[f"{size}-fp8"].transformer_bytes / MODELS[size].size.transformer_parameters
    return rows | {"FP8 or NVFP4 file": (stored, 16)}  # an NVFP4 file is smaller, but the text encoder decides


def fits(needed: float) -> int:
    """The GB of the smallest Mac whose GPU may use that much."""
    return next(mac for mac in MACS if needed <= mac * 2**30 * (2 / 3 if mac <= 36 else 3 / 4))


def table() -> list[str]:
    """The rows of "Which machine runs what": memory at most, and the smallest Mac, for two sizes of picture."""
    lines = []
    known = {"4b": "`4b`, `base-4b`", "9b": "`9b`, `base-9b`, `9b-kv`", "z-image": "`z-image-turbo`"}
    known["flux3"] = "`flux3`, `flux3-base`"
    for size, names in known.items():
        configs = window_configs(RELEASED_CONFIGS[size])
        for precision, bits in precisions(size).items():
            plans = [plan_networks(configs, width=side, height=side, bits=bits, cpu=False) for side in (512, 1024)]
            cells = [cell for plan in plans for cell in (f"{plan.peak_bytes / 1e9:.1f}", str(fits(plan.peak_bytes)))]
            lines.append(f"| {names} | {precision} | {' | '.join(cells)} |")
            names = ""
    return lines


def count_operations(size: str, side: int) -> tuple[int, int]:
    """Of a short prompt, and of one step for a picture of this side."""
    cfg, text_encoder, _ = window_configs(RELEASED_CONFIGS[size])
    text, image = text_encoder.max_length, (side // 16) ** 2
    if isinstance(cfg, ZImageConfig):  # refiners see the text alone or the picture alone
        text, text_encoder = 32, replace(text_encoder, max_length=32)  # it reads no padding but up to a multiple of 32
        step = count_blocks(cfg.layers, 12 * cfg.d**2, cfg.d, text + image)
        step += sum(count_blocks(cfg.refiners, 12 * cfg.d**2, cfg.d, tokens) for tokens in (text, image))
    elif isinstance(cfg, Flux3Config):  # and so do a mode's own blocks
        step = count_blocks(cfg.single_blocks, 13 * cfg.d**2, cfg.d, text + image)
        step += sum(count_blocks(cfg.mode_blocks, 13 * cfg.d**2, cfg.d, tokens) for tokens in (text, image))
    else:
        step = count_step(cfg, text, image).total
    return count_prompt(text_encoder).total, step


def count_blocks(blocks: int, weights: int, d: int, tokens: int) -> int:
    """Of blocks with `weights` weights each: two operations per weight and token, and attention."""
    return blocks * (2 * weights * tokens + 4 * tokens**2 * d)


def tell_seconds(time: float) -> str:
    """As many digits as a prediction deserves: 118, 5.4, 0.71."""
    return f"{time:.{0 if time >= 10 else 1 if time >= 1 else 2}f}"


def seconds_table() -> list[str]:
    """The rows of "How long it takes": the prompt with all steps, if nothing but matmuls took time."""
    lines = []
    for chip, tflops in CHIPS.items():
        cells = [chip, f"{tflops:g}"]
        for size, side, steps in (
            ("4b", 512, 4),
            ("4b", 1024, 4),
            ("9b", 1024, 4),
            ("z-image", 1024, 8),
            ("flux3", 1024, 16),
        ):
            prompt, step = (operations / 1e12 / tflops for operations in count_operations(size, side))
            cells.append(tell_seconds(prompt + steps * step))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def replace_rows(lines: list[str], start: str, rows: list[str]) -> list[str]:
    """The page's lines with other rows in the table whose first row begins so."""
    first = next(i for i, line in enumerate(lines) if line.startswith(start))
    last = next(i for i in range(first, len(lines)) if not lines[i].startswith("|"))
    return [*lines[:first], *rows, *lines[last:]]


def main() -> None:
    lines = PAGE.read_text("utf-8").split("\n")
    lines = replace_rows(lines, "| `4b`, `base-4b` | bfloat16", table())
    lines = replace_rows(lines, "| M1 |", seconds_table())
    PAGE.write_text("\n".join(lines), "utf-8")


if __name__ == "__main__":
    main()
