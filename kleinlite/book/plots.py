"""Plots for the book. Each helper draws one figure and returns nothing, so that a plotting cell is one line.

Figures are small, on white (they must be legible on a dark page too), and have their axes and units named.
"""

import io
import textwrap
from collections.abc import Mapping, Sequence
from os.path import commonprefix
from typing import Any

import matplotlib.pyplot as plt
import mlx.core as mx
from IPython.display import Image as Picture, display
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import NullLocator
from PIL import Image

from ..cpu import setup

plt.rcParams.update({
    "figure.dpi": 80, "font.size": 9, "axes.titlesize": 9, "axes.spines.top": False, "axes.spines.right": False,
    "figure.facecolor": "white", "savefig.facecolor": "white", "axes.prop_cycle": plt.cycler(
        color=["#3a60d6", "#f08a24", "#3ca052", "#d63031", "#864ebe", "#2c2c36"]),
})  # fmt: skip
setup()  # each notebook's first cell imports this module, and its networks are often built by hand

# The way from a prompt to a picture: where each tensor stands, its name, its shape, the chapter that makes it.
STAGES = {
    "prompt": (0.7, 3.3, "text", ""), "tokens": (2.5, 3.3, "m ids · ch. 3", "03"),
    "features": (4.3, 3.3, "m × f · ch. 3", "03"),
    "noise": (0.7, 2.0, "n × 128 · ch. 4", "04"), "latents": (3.0, 2.0, "n × 128 · ch. 4", "04"),
    "transformer": (5.9, 2.0, "ch. 5", "05"), "velocity": (7.9, 2.0, "n × 128 · ch. 5", "05"),
    "clean latents": (9.9, 2.0, "n × 128 · ch. 4", "04"), "picture": (9.9, 0.7, "H × W × 3 · ch. 1", "01"),
    "references": (0.7, 0.7, "pictures", ""), "their latents": (3.0, 0.7, "r × 128 · ch. 1", "01"),
    "positions": (7.9, 3.3, "(t, h, w, l) · ch. 2", "02"),
}  # fmt: skip
ARROWS = [
    ("prompt", "tokens"), ("tokens", "features"), ("features", "transformer"), ("noise", "latents"),
    ("latents", "transformer"), ("transformer", "velocity"),
    ("clean latents", "picture"), ("references", "their latents"), ("their latents", "transformer"),
    ("positions", "transformer"),
]  # fmt: skip

# Networks in the order of their years, and what each brought: idea → the networks that have it.
ANCESTORS = "U-Net of DDPM\n2020", "DiT\n2022", "ViT-22B\n2023", "MMDiT (SD3)\n2024", "FLUX.1\n2024", "FLUX.2\n2025"
INHERITED = {
    "convolutions, big to small and back": [0], "noise level as waves": [0, 1, 3, 4, 5],
    "patches as tokens": [1, 2, 3, 4, 5], "time modulates norms, gates": [1, 3, 4, 5],
    "norms on queries and keys": [2, 3, 4, 5], "attention and MLP side by side": [2, 4, 5],
    "text and picture: own weights, one attention": [3, 4, 5], "single blocks after double ones": [4, 5],
    "rotary positions from coordinates": [4, 5], "shared modulations, no biases, SwiGLU": [5],
    "features of a chat model": [5],
}  # fmt: skip


def as_image(x: mx.array | Image.Image) -> Any:
    """What matplotlib can show: PIL pictures and maps (H, W) as they are, pixels (H, W, 3) from [-1, 1] to [0, 1]."""
    if isinstance(x, Image.Image):
        return x
    return (mx.clip(x / 2 + 0.5, 0, 1) if x.ndim == 3 else x).tolist()


def compress(picture: Image.Image) -> tuple[bytes, str]:
    """A file small enough to be committed with its notebook: a photo's JPEG or a plot's PNG of 256 colors; which."""
    file = io.BytesIO()
    picture = picture.convert("RGB")
    if picture.getcolors(4096) is None:  # more than that: plots have one or two thousand, by their soft edges
        picture.save(file, "JPEG", quality=75, optimize=True)
        return file.getvalue(), "jpeg"
    few = picture.quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=2, dither=Image.Dither.NONE)  # means keep the tints
    few.save(file, "PNG", optimize=True)
    return file.getvalue(), "png"


def show_figure(dots: int = 160, sharper: float = 2) -> None:
    """Show the figure, in more pixels than its place on the page has: good screens need twice as many."""
    drawn = io.BytesIO()
    plt.savefig(drawn, dpi=dots, bbox_inches="tight")
    plt.close()
    picture = Image.open(drawn)
    width, height = (round(side / sharper) for side in picture.size)
    file, kind = compress(picture)
    display(Picture(file, format=kind, width=width, height=height))


def make_grid(count: int, columns: int, size: tuple[float, float], **more: Any) -> tuple[Figure, list[Axes]]:
    """A figure of places without axes for `count` pictures, as many as `columns` in a row; and the places, in order.

    size: inches of one place.
    """
    rows = -(-count // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(size[0] * columns, size[1] * rows), squeeze=False, **more)
    for ax in axes.flat:
        ax.axis("off")
    return figure, list(axes.flat)


def show(images: Sequence[Any], titles: Sequence[str] = (), columns: int = 6, scale: float = 1.25) -> None:
    """Pictures side by side: PIL, or arrays (H, W, 3) in [-1, 1]."""
    titles = ["\n".join(textwrap.fill(line, int(17 * scale)) for line in title.split("\n")) for title in titles]
    words = max((0.1 + 0.15 * (title.count("\n") + 1) for title in titles), default=0)  # inches above each row
    _, axes = make_grid(len(images), min(columns, len(images)), (scale, scale + words))
    for ax, image in zip(axes, images):
        ax.imshow(as_image(image))
    for ax, title in zip(axes, titles):
        ax.set_title(title, fontsize=8)
    plt.tight_layout()
    show_figure(dots=150, sharper=1.5)


def rows(pictures: Mapping[str, Sequence[Image.Image]], scale: float = 0.8, titles: Sequence[str] = ()) -> None:
    """Rows of pictures, each with its name to the left; titles: of the columns."""
    columns = max(len(row) for row in pictures.values())  # inches
    words = 1.4
    width = scale * columns + words
    words_above = 0.2 if titles else 0.0
    height = scale * len(pictures) + words_above
    figure, axes = make_grid(len(pictures) * columns, columns, (width / columns, height / len(pictures)))
    for ax, title in zip(axes, titles):
        ax.set_title(title, fontsize=8, pad=3)
    for i, (name, row) in enumerate(pictures.items()):
        line = axes[i * columns : (i + 1) * columns]
        for ax, picture in zip(line, row):
            ax.imshow(as_image(picture))
        line[0].text(-0.08, 0.5, name, ha="right", va="center", fontsize=8, transform=line[0].transAxes)
    top = 1 - words_above / height
    figure.subplots_adjust(left=words / width, right=1, bottom=0, top=top, wspace=0.04, hspace=0.04)
    show_figure(dots=120, sharper=1.2)  # 0.8 inches are the 96 pixels of a nano picture


def maps(
    arrays: Sequence[mx.array], titles: Sequence[str] = (), columns: int = 4, scale: float = 1.5, cmap: str = "viridis",
    limits: tuple[float, float] | None = None, label: str = "",
) -> None:  # fmt: skip
    """Several (H, W) maps of numbers in color, one scale for all of them, with its bar."""
    low, high = limits or (min(float(a.min()) for a in arrays), max(float(a.max()) for a in arrays))
    columns = min(columns, len(arrays))
    tall = scale * arrays[0].shape[0] / arrays[0].shape[1]
    size = (scale + 0.6 / columns, max(tall + 0.2, 0.8))
    figure, axes = make_grid(len(arrays), columns, size, layout="constrained")
    for ax, a in zip(axes, arrays):
        numbers = a.astype(mx.float32).tolist()
        shown = ax.imshow(numbers, cmap=cmap, vmin=low, vmax=high, interpolation="nearest")
    for ax, title in zip(axes, titles):
        ax.set_title(title, fontsize=8)
    figure.colorbar(shown, ax=axes, label=label, shrink=0.9)
    show_figure()


def patterns(masks: dict[str, mx.array], pieces: dict[str, int]) -> None:
    """Who attends to whom: masks (s, s), True where a row attends to a column; pieces: how many tokens of each kind."""
    ends = [sum(list(pieces.values())[: i + 1]) for i in range(len(pieces))]
    middles = [end - size / 2 for end, size in zip(ends, pieces.values())]
    _, axes = plt.subplots(1, len(masks), figsize=(3.1 * len(masks), 3.0), squeeze=False, layout="constrained")
    for ax, (name, mask) in zip(axes.flat, masks.items()):
        ax.imshow(mask.tolist(), cmap="Blues", vmin=-0.2, vmax=1.6, interpolation="nearest",
                  extent=(0, ends[-1], ends[-1], 0))  # fmt: skip
        ax.set(title=name, xlabel="attended to", xticks=middles, yticks=middles)
        ax.set_xticklabels(pieces, fontsize=8)
        ax.set_yticklabels(pieces, fontsize=8, rotation=90, va="center")
        ax.tick_params(length=0)
        for end in ends[:-1]:
            ax.axhline(end, color="white"), ax.axvline(end, color="white")
    axes.flat[0].set_ylabel("attends")
    show_figure()


def lines(
    series: dict[str, tuple], xlabel: str, ylabel: str, logx: bool = False, logy: bool = False, marker: str = "o",
    legend_above: bool = False,
) -> None:  # fmt: skip
    """Curves by name: {"name": (xs, ys)}; the legend stands above them where no corner is free."""
    _, ax = plt.subplots(figsize=(5.2, 2.8))
    for name, (xs, ys) in series.items():
        ax.plot(list(xs), list(ys), label=name, marker=marker, markersize=3, linewidth=1.4)
    ax.set(xlabel=xlabel, ylabel=ylabel, xscale="log" if logx else "linear", yscale="log" if logy else "linear")
    if logx:  # powers of ten are too far apart for a handful of values
        ticks = list(next(iter(series.values()))[0])
        ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        ax.xaxis.set_minor_locator(NullLocator())
    ax.grid(alpha=0.25)
    if legend_above:
        ax.legend(fontsize=8, frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1))
    elif len(series) > 1:
        ax.legend(fontsize=8, framealpha=0.85, edgecolor="none")  # readable where it lies over a curve
    plt.tight_layout()
    show_figure()


def bars(names: Sequence[str], values: Sequence[float], xlabel: str) -> None:
    """Horizontal bars with their values written at the end."""
    _, ax = plt.subplots(figsize=(5.2, 0.26 * len(names) + 0.7))
    shown = ax.barh(list(names), list(values))
    ax.bar_label(shown, fmt="{:,.4g}", fontsize=7, padding=2)
    ax.invert_yaxis()
    ax.set_xlabel(xlabel)
    plt.tight_layout()
    show_figure()


def points(clouds: dict[str, mx.array], paths: mx.array | None = None, panels: bool = False) -> None:
    """Clouds of 2-D points (n, 2) by name and, if given, paths (steps, n, 2) between them; or a panel for each."""
    count = len(clouds) if panels else 1
    _, axes = plt.subplots(1, count, figsize=(3.8, 3.6) if count == 1 else (2.3 * count, 2.5))
    axes = list(axes) if panels else [axes] * len(clouds)
    if paths is not None:
        for i in range(min(paths.shape[1], 60)):
            axes[0].plot(paths[:, i, 0].tolist(), paths[:, i, 1].tolist(), color="#999", linewidth=0.5, alpha=0.7)
    for ax, (name, xy), color in zip(axes, clouds.items(), ("C0", "C1", "C2", "C3")):
        ax.scatter(xy[:, 0].tolist(), xy[:, 1].tolist(), s=4, label=name, alpha=0.7, color=color)
        ax.set(xlim=(-3, 3), ylim=(-3, 3), xlabel="x", aspect="equal")
        if panels:
            ax.set_title(name, fontsize=8)
        else:
            ax.legend(frameon=False, fontsize=8, markerscale=2, loc="upper right")
    axes[0].set_ylabel("y")
    plt.tight_layout()
    show_figure()


def overview(*marks: str, steps: int = 4, channels: int = 128) -> None:
    """From prompt to picture: the tensors and the loop; boxes named in `marks`, or of such a chapter ("05"), stand out.

    steps, channels: of the loop, and of a latent token.
    """
    _, ax = plt.subplots(figsize=(7.4, 2.9))
    ax.set(xlim=(0, 10.6), ylim=(0.1, 4.1))
    ax.axis("off")
    for start, end in ARROWS:
        (x0, y0) = STAGES[start][:2]
        (x1, y1) = STAGES[end][:2]
        right = (x1 > x0) - (x1 < x0)
        down = (y0 > y1) - (y0 < y1)
        tip = (x1 - (0.4 if down else 0.7) * right, y1 + 0.45 * down)  # on the box's side, its upper or its lower edge
        tail = (x0 + 0.7 * right, y0 - (0 if right else 0.45) * down)
        ax.annotate("", tip, tail, arrowprops={"arrowstyle": "->", "color": "#555"})
    loop = {"arrowstyle": "->", "color": "#f08a24", "linewidth": 1.6, "connectionstyle": "arc3,rad=-0.2"}
    ax.annotate("", (3.3, 1.55), (7.8, 1.55), arrowprops=loop)
    ax.text(6.8, 0.85, f"a step, {steps} times", ha="center", fontsize=7.5, color="#c2620a")
    ax.annotate("", (9.2, 2.0), (8.6, 2.0), arrowprops=loop | {"connectionstyle": "arc3"})
    ax.text(8.9, 2.15, "the last", ha="center", fontsize=7.5, color="#c2620a")
    ax.text(5.9, 3.3, "time t", ha="center", va="center", fontsize=8)
    ax.annotate("", (5.9, 2.45), (5.9, 3.15), arrowprops={"arrowstyle": "->", "color": "#555"})
    for name, (x, y, shape, chapter) in STAGES.items():
        on = name in marks or chapter in marks
        ink = "white" if on else "black"
        face = "#3a60d6" if on else "#fdf3e7" if name == "transformer" else "#eef1f8"
        style: Any = {"boxstyle": "round,pad=0.06", "facecolor": face, "edgecolor": "#8a94b8"}
        ax.add_patch(FancyBboxPatch((x - 0.56, y - 0.32), 1.12, 0.64, **style))
        ax.text(x, y + 0.1, name, ha="center", va="center", fontsize=7.5, color=ink, weight="bold")
        ax.text(x, y - 0.17, shape.replace("128", str(channels)), ha="center", va="center", fontsize=6, color=ink)
    plt.subplots_adjust(0, 0, 1, 1)
    show_figure()


def lineage() -> None:
    """Which idea came into the transformer when: a line from the first of these networks that has it to the last."""
    _, ax = plt.subplots(figsize=(7.4, 3.3))
    for y, (idea, has) in enumerate(INHERITED.items()):
        color = "#3a60d6" if has[-1] == len(ANCESTORS) - 1 else "#9a9aa5"
        ax.plot([has[0], has[-1]], [y, y], color=color, linewidth=1.5, alpha=0.5)
        ax.scatter(has, [y] * len(has), color=color, s=26, zorder=3)
        ax.text(has[0] - 0.1, y, idea, ha="right", va="center", fontsize=7.5)
    ax.set_xticks(range(len(ANCESTORS)), ANCESTORS, fontsize=8)
    ax.set(xlim=(-2.2, len(ANCESTORS) - 0.7), ylim=(len(INHERITED) - 0.4, -0.7))
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.yaxis.set_visible(False)
    for side in ax.spines.values():
        side.set_visible(False)
    plt.tight_layout()
    show_figure()


def blocks() -> None:
    """The two kinds of block side by side: text and picture apart, then glued together."""
    _, ax = plt.subplots(figsize=(7.4, 3.9))
    ax.set(xlim=(0, 12.4), ylim=(0, 8.2))
    ax.axis("off")

    middle: Any = {"ha": "center", "va": "center"}

    def box(x: float, y: float, text: str, width: float = 1.9, color: str = "#eef1f8") -> None:
        style: Any = {"boxstyle": "round,pad=0.05", "facecolor": color, "edgecolor": "#8a94b8"}
        ax.add_patch(FancyBboxPatch((x - width / 2, y - 0.3), width, 0.6, **style))
        ax.text(x, y, text, fontsize=7, **middle)

    def arrow(x0: float, y0: float, x1: float, y1: float) -> None:
        ax.annotate("", (x1, y1), (x0, y0), arrowprops={"arrowstyle": "->", "color": "#555"})

    def down(x: float, *ends: tuple[float, float]) -> None:
        for top, bottom in ends:
            arrow(x, top, x, bottom)

    def residual(x: float, top: float, bottom: float, aside: float) -> None:
        """The residual stream: past the boxes, into the next plus."""
        ax.plot([x, x + aside, x + aside], [top, top, bottom], color="#555", linewidth=1)
        arrow(x + aside, bottom, x + (0.2 if aside > 0 else -0.2), bottom)
        plus = {"boxstyle": "circle,pad=0.12", "fc": "white"}
        ax.text(x, bottom, "+", fontsize=9, bbox=plus, **middle)

    for x, side, name, color in ((1.6, -1, "text (m, d)", "#fdf3e7"), (5.2, 1, "picture (n, d)", "#e7f3ec")):
        ax.text(x, 7.95, name, fontsize=8, weight="bold", **middle)
        read = "norm · scale, shift"
        out = "MLP (SwiGLU) · gate"
        for y, text in ((7.2, read), (6.4, "q, k, v"), (4.4, "projection · gate"), (2.8, read), (2.0, out)):
            box(x, y, text, color=color)
        arrow(x, 6.1, x - side * 0.4, 5.75)
        arrow(x - side * 0.4, 5.1, x, 4.75)
        residual(x, 7.66, 3.6, side * 1.25)
        residual(x, 3.28, 1.2, side * 1.25)
        down(x, (7.78, 7.55), (6.9, 6.75), (4.1, 3.8), (3.4, 3.15), (2.5, 2.35), (1.7, 1.4), (1.0, 0.6))
    box(3.4, 5.43, "attention over m + n tokens", width=5.3, color="#e3e9fb")
    ax.text(3.4, 0.3, "double block: own weights, one attention", fontsize=8, **middle)

    x = 10.0
    ax.text(x, 7.95, "text and picture (m + n, d)", fontsize=8, weight="bold", **middle)
    box(x, 7.2, "norm · scale, shift")
    box(x, 6.4, "one matrix: q, k, v | gate, up", width=3.4)
    box(x - 1.0, 5.43, "attention", color="#e3e9fb")
    box(x + 1.1, 5.43, "SwiGLU")
    box(x, 4.4, "one matrix · gate", width=3.4)
    for aside in (-1.0, 1.1):
        down(x + aside, (6.1, 5.78))
        arrow(x + aside, 5.1, x + aside * 0.8, 4.75)
    residual(x, 7.66, 3.6, 2.3)
    down(x, (7.78, 7.55), (6.9, 6.75), (4.1, 3.8), (3.4, 2.9))
    ax.text(x, 0.3, "single block: one stream, side by side", fontsize=8, **middle)
    plt.subplots_adjust(0, 0, 1, 1)
    show_figure()


def tree_rows(names: Sequence[str], before: str = "", depth: int = 0) -> list[tuple[int, str, str]]:
    """Dotted names as the rows of a tree: depth, what stands there, the whole name ("" where branches begin)."""
    branches: dict[str, list[str]] = {}
    for name in names:
        branches.setdefault(name[len(before) :].split(".")[0], []).append(name)
    found = []
    for own in branches.values():
        if len(own) == 1:
            found.append((depth, own[0][len(before) :], own[0]))
        else:
            stem = commonprefix(own).rpartition(".")[0] + "."
            found += [(depth, stem[len(before) :], ""), *tree_rows(own, stem, depth + 1)]
    return found


def name_trees(pairs: dict[str, Sequence[str]], titles: tuple[str, str]) -> None:
    """Two trees of names and lines between them: each name on the left with those on the right that it became."""
    sides = tree_rows(list(pairs)), tree_rows([name for names in pairs.values() for name in names])
    size = 7.2  # of the letters, in points
    letter = 0.602 * size / 72  # inches
    row = 0.165
    height = row * (max(map(len, sides)) + 2)
    figure = plt.figure(figsize=(7.4, height))
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, 7.4), ylim=(height, 0))
    ax.axis("off")
    ends: list[dict[str, tuple[float, float]]] = []
    for side, (start, title, found) in enumerate(zip((0.05, 4.35), titles, sides)):
        ax.text(start, row, title, fontsize=size + 1.5, weight="bold", va="center")
        ends.append({})
        for i, (depth, text, name) in enumerate(found):
            x = start + 0.14 * depth
            y = row * (i + 2.5)
            ink = "black" if name else "#777"
            ax.text(x, y, text, fontsize=size, family="DejaVu Sans Mono", va="center", color=ink)
            ends[side][name] = (x - 0.05 if side else x + len(text) * letter + 0.1, y)
    for ours, theirs in pairs.items():
        color = "#f08a24" if "txt" in ours else "#3ca052" if "img" in ours else "#3a60d6"
        for name in theirs:
            (x0, y0) = ends[0][ours]
            (x1, y1) = ends[1][name]
            ax.plot([x0, 2.75, 4.25, x1], [y0, y0, y1, y1], color=color, linewidth=0.9)
    show_figure(sharper=1.65)
