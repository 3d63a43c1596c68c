"""Three explorers: sliders over a figure that is drawn again whenever one of them moves."""

import math
import re
from collections.abc import Callable
from typing import Any, cast

import ipywidgets as ipw
import mlx.core as mx
from matplotlib.figure import Figure
from PIL import Image

from ...inside import record_attention
from ...klein import Klein
from ...position_ids import apply_rope, image_ids, rope_table
from ...sampling import empirical_mu, schedule
from ...text_encoder import TEMPLATE
from ...transformer import TransformerConfig
from .panel import Clickable, Panel, make_row, show_pictures, to_png

__all__ = ["attention_viewer", "rope_explorer", "schedule_explorer"]


def make_explorer(draw: Callable[..., Figure], picture: ipw.Image | Clickable, **controls: ipw.Widget) -> Panel:
    """Controls over the figure that `draw` makes of their values; shown in `picture`, which may be clicked on."""

    def redraw(_: object = None) -> None:
        figure = draw(**{name: control.value for name, control in controls.items()})
        picture.layout.width = f"{figure.get_figwidth() * figure.dpi:.0f}px"
        picture.value = to_png(figure)

    for name, control in controls.items():
        control.description = name
        control.observe(redraw, "value")
    redraw()
    return Panel([make_row(*controls.values()), picture], picture=picture, **controls)


def schedule_explorer() -> Panel:
    """Where klein's steps go, beside even ones: by number of steps and size of picture."""

    def draw(steps: int, size: int) -> Figure:
        n = (size // 16) ** 2
        mu = empirical_mu(n, steps)
        line = [1 - i / steps for i in range(steps + 1)]
        figure = Figure(figsize=(8, 3), layout="constrained")
        left, right = figure.subplots(1, 2)
        for name, times in {"klein": schedule(steps, n), "linear": line}.items():
            left.plot(range(steps + 1), times, label=name, marker="o", markersize=3, linewidth=1.4)
        left.set(xlabel="step", ylabel="noise level t", title=f"{steps} steps, {size} × {size} pixels")
        left.xaxis.get_major_locator().set_params(integer=True)
        left.legend(frameon=False, fontsize=8)
        tokens = range(16, 16385, 16)
        right.plot(tokens, [empirical_mu(count, steps) for count in tokens], ".", markersize=1)  # no line over the jump
        right.plot([n], [mu], "o")
        right.set(ylim=(0, 3.5), xlabel="image tokens n", ylabel="mu")
        right.set_title(f"n = {n:,}: mu = {mu:.2f}, shift {math.exp(mu):.2f}")
        return figure

    return make_explorer(draw, ipw.Image(), steps=ipw.IntSlider(4, 1, 50), size=ipw.IntSlider(1024, 64, 2048, 16))


def rope_explorer() -> Panel:
    """What one patch sees of the others by position alone; choose it by sliders, or click on it in the first map."""
    grid = 16  # patches a side
    ones = mx.ones((1, 1, grid * grid, 128))
    times = (0, 10, 20, 30)
    turned = {t: apply_rope(ones, rope_table(image_ids(grid, grid, t)))[0, 0] for t in times}  # (grid², 128) each
    axes = {"all axes": slice(0, 128), "only h": slice(32, 64), "only w": slice(64, 96)}

    def similar(t: int, part: slice, here: int | slice) -> Any:
        return turned[t][:, part] @ turned[0][here, part].T / (part.stop - part.start)

    lowest = {name: min(similar(t, part, slice(None)).min().item() for t in times) for name, part in axes.items()}
    width = 0.32  # of one map, as shares of the figure
    height = 0.88

    def draw(row: int, column: int, among: int) -> Figure:
        figure = Figure(figsize=(7.5, 7.5 * width / height))
        for i, (name, part) in enumerate(axes.items()):
            ax = figure.add_axes((0.005 + 0.335 * i, 0.01, width, height))
            seen = similar(among, part, row * grid + column).reshape(grid, grid)
            ax.imshow(seen.tolist(), vmin=lowest[name], vmax=1, interpolation="nearest")
            ax.plot([column], [row], "s", markerfacecolor="none", markeredgecolor="#d63031", markersize=8)
            ax.set_title(f"{name}: {seen.min().item():.2f} to {seen.max().item():.2f}")
            ax.axis("off")
        return figure

    sides = {side: ipw.IntSlider(at, 0, grid - 1) for side, at in (("row", grid // 2), ("column", grid // 3))}
    pictures = [("its own picture", 0), *((f"a reference at t = {t}", t) for t in times[1:])]

    def choose(row: int, column: int) -> None:
        sides["row"].value = row
        sides["column"].value = column

    maps = Clickable(choose, rows=grid, columns=grid, area=(0.005, 0.99 - height, width, height))
    return make_explorer(draw, maps, **sides, among=ipw.ToggleButtons(options=pictures))


def attention_viewer(klein: Klein, prompt: str) -> Panel:
    """Which patches look at a word of the prompt: in which block, at which step."""
    steps, maps = record_attention(klein, prompt, seed=7)
    previews = [cast(Image.Image, step.preview()) for step in steps]  # of one prompt
    start = TEMPLATE.index("{}")
    gh = previews[0].height // 16
    gw = previews[0].width // 16
    spans = klein.tokenizer.encode(TEMPLATE.format(prompt)).offsets  # where in the text each token stands
    words = [(found[0], (start + found.start(), start + found.end())) for found in re.finditer(r"\S+", prompt)]

    def draw(word: tuple[int, int], step: int, block: int) -> Figure:
        tokens = [i for i, (first, end) in enumerate(spans) if first < word[1] and end > word[0]]
        seen = maps[step - 1][:, :, tokens].sum(axis=-1)  # (blocks, n)
        seen = (seen.mean(axis=0) if block < 0 else seen[block]).reshape(gh, gw)
        figure = Figure(figsize=(6.4, 2.9), layout="constrained")
        left, right = figure.subplots(1, 2)
        word_ = prompt[word[0] - start : word[1] - start]
        preview = previews[step - 1]
        gray = preview.convert("L").convert("RGB")
        show_pictures((left, right), {f"expected after step {step}": preview, f"what attends to “{word_}”": gray})
        shown = right.imshow((seen / seen.mean()).tolist(), extent=right.images[0].get_extent(), alpha=0.7, vmin=0)
        figure.colorbar(shown, ax=right, label="attention / mean")
        return figure

    cfg = cast(TransformerConfig, klein.parts.configs.transformer)
    kinds = {"double": cfg.double_blocks, "single": cfg.single_blocks}
    blocks = ["mean of all", *(f"{kind} {i + 1}" for kind, count in kinds.items() for i in range(count))]
    longest = max(words, key=lambda word: len(word[0]))[1]
    word = ipw.ToggleButtons(options=words, value=longest)
    step = ipw.IntSlider((len(steps) + 1) // 2, 1, len(steps))
    block = ipw.SelectionSlider(options=[(name, i - 1) for i, name in enumerate(blocks)])
    return make_explorer(draw, ipw.Image(), word=word, step=step, block=block)
