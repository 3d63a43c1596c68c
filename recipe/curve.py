"""The curves of a run of the recipe, from its log: a panel for each of the long stages.

python -m recipe.curve RUNS/log curve.png
"""

import re
import sys
from pathlib import Path

from matplotlib.figure import Figure

PANELS = (
    ("autoencoder", "PSNR", "autoencoder: dB on held-out scenes"),
    ("transformer", "loss", "transformer: loss"),
    ("distill", "loss", "distillation: loss"),
)


def read_curve(text: str, stage: str, quantity: str) -> tuple[list[int], list[float]]:
    """Steps and values. A step that was done again counts once."""
    rows = re.findall(rf"^{stage} (\d+): .*?{quantity} ([\d.]+)", text, re.M)
    return tuple(map(list, zip(*sorted({int(step): float(value) for step, value in rows}.items()))))


def draw_curves(text: str) -> Figure:
    """A panel for each of the long stages."""
    figure = Figure(figsize=(8, 2.2), layout="constrained", dpi=110)
    for ax, (stage, quantity, title) in zip(figure.subplots(1, len(PANELS)), PANELS):
        ax.plot(*read_curve(text, stage, quantity), linewidth=1.4)
        ax.set_title(title, fontsize=9)
        ax.set_xlabel("step", fontsize=8)
        ax.tick_params(labelsize=8)
        ax.grid(alpha=0.25)
    return figure


if __name__ == "__main__":
    log, out = sys.argv[1:]
    draw_curves(Path(log).read_text("utf-8")).savefig(out)
