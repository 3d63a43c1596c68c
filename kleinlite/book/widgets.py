"""Things to play with, in JupyterLab: a playground and four explorers, thin over the rest of the package.

Hand-written; needs ipywidgets.

>>> from kleinlite import widgets
>>> widgets.playground()

Every function returns a `Panel`. Its controls are in `panel.parts` by name, and do without a browser what they do in
one: set a value, call `click()`. Where no widget can live, on the site or in a notebook that a test runs, a panel is
its `still` picture: both travel in one output, and whoever shows it takes the livelier one that it can.
"""

from __future__ import annotations

import base64
import io
import json
import math
import random
import re
import threading
from collections.abc import Callable, Iterator
from html import escape
from queue import SimpleQueue
from time import perf_counter as clock
from types import SimpleNamespace

import ipywidgets as ipw
import mlx.core as mx
from matplotlib.figure import Figure
from PIL import Image

from .. import transformer
from ..cpu import softmax
from ..models.opening import ModelInfo
from ..pipeline import Klein, Step, prepare_reference, to_images, to_pixels
from ..position_ids import apply_rope, image_ids, rope_table
from ..sampling import empirical_mu, schedule
from ..text_encoder import TEMPLATE
from .plots import as_image, light

__all__ = ["playground", "schedule_explorer", "rope_explorer", "attention_viewer", "latent_explorer"]

STYLE = """<style>
.kleinlite { max-width: 880px; padding: 4px; gap: 10px; }
.kleinlite, .kleinlite .widget-box { overflow: visible; }
.kleinlite > *, .kleinlite .widget-box > *, .kleinlite .widget-image { margin: 0; }
.kleinlite .widget-image { align-self: flex-start; max-width: 100%; height: auto; border-radius: 4px; }
.kleinlite .widget-html, .kleinlite .widget-html-content { min-height: 0; height: auto; line-height: 1.5; }
.kleinlite .widget-hprogress, .kleinlite .progress { height: 4px; margin: 0; border-radius: 2px; }
.kleinlite .widget-toggle-buttons { flex: 1 1 100%; flex-flow: row wrap; height: auto; }
.kleinlite .widget-toggle-button, .kleinlite .widget-label { width: auto; }
.kleinlite-row { flex-flow: row wrap; align-items: flex-end; gap: 8px 12px; }
.kleinlite-row > .widget-inline-hbox { max-width: 100%; }
.kleinlite-fields > .widget-inline-hbox { flex-direction: column; align-items: stretch; height: auto; }
.kleinlite-fields .widget-label { height: 20px; margin: 0; text-align: left; font-size: 12px; line-height: 20px;
  color: var(--jp-ui-font-color2, #555); }
.kleinlite-drop { padding: 0 10px; border: 1px dashed var(--jp-border-color0, #999); border-radius: 3px;
  font-size: 12px; line-height: 26px; color: var(--jp-ui-font-color2, #555); }
.kleinlite-wrong { color: var(--jp-error-color1, #c62828); font-weight: 600; }
.kleinlite-stage { flex-flow: row wrap; align-items: flex-start; gap: 16px; }
.kleinlite-side { flex: 1 1 280px; gap: 12px; }
.kleinlite .kleinlite-gallery { flex-flow: row wrap; gap: 6px; max-height: 160px; overflow: hidden auto; }
.kleinlite-click { position: relative; width: fit-content; max-width: 100%; }
.kleinlite-over { position: absolute; gap: 0; }
.kleinlite-over > button.jupyter-button { width: auto; min-width: 0; height: auto; padding: 0; border: 0;
  background: transparent; box-shadow: none; cursor: pointer; }
.kleinlite-over > button:is(:hover, :focus-visible) { outline: 2px solid #3a60d6; outline-offset: -2px; }
.kleinlite-call { padding: 8px 10px; border-radius: 4px; background: var(--jp-layout-color2, #f2f2f2); }
.kleinlite-call code { white-space: pre-wrap; overflow-wrap: anywhere; background: none; padding: 0;
  font: 12px/1.5 var(--jp-code-font-family, monospace); color: var(--jp-ui-font-color1, #222); }
.kleinlite-call button { float: right; border: 0; padding: 0 4px; background: none; cursor: pointer;
  font: 12px/1.5 var(--jp-ui-font-family, sans-serif); color: var(--jp-brand-color1, #3a60d6); }
</style>"""


PROMPT = "a red circle above a blue square"

# ipywidgets has no field for files to be dropped on. This one takes the dropped files for those that the upload button
# beside it would have asked for: its click opens a dialog through an input, whose click is another one meanwhile.
DROP = """event.preventDefault(); event.stopPropagation();
const files = event.dataTransfer.files, asked = HTMLInputElement.prototype.click;
HTMLInputElement.prototype.click = function () { this.files = files; this.dispatchEvent(new Event('change')); };
try { this.closest('.kleinlite').querySelector('.widget-upload').click(); }
finally { HTMLInputElement.prototype.click = asked; }"""
ON = f'ondragover="event.preventDefault()" ondrop="{escape(DROP)}"'
FIELD = f'<div class="kleinlite-drop" {ON}>or drop it here</div>'


class Panel(ipw.VBox):
    """Controls and what they make. `parts` has them by name; `still` is the PNG for where no widget can live."""

    def __init__(self, rows: list[ipw.Widget], **parts: ipw.Widget):
        super().__init__([ipw.HTML(STYLE, layout={"display": "none"}), *rows])
        self.add_class("kleinlite")
        self.parts = SimpleNamespace(**parts)

    @property
    def still(self) -> bytes:
        return self.parts.picture.value

    def _repr_mimebundle_(self, **kwargs) -> tuple[dict, dict]:
        live, still = super()._repr_mimebundle_(**kwargs), Image.open(io.BytesIO(self.still))
        (file, kind), size = light(still), {"width": still.width // 2, "height": still.height // 2}
        words = "Something to play with: run this cell in JupyterLab."
        picture = {"text/plain": words, f"image/{kind}": base64.b64encode(file).decode()}
        return live | picture, {f"image/{kind}": size}


def png(picture: Image.Image | Figure) -> bytes:
    """A picture, or a figure with twice the pixels of its place (see `plots.finish`), as a PNG file's bytes."""
    file = io.BytesIO()
    if isinstance(picture, Figure):
        picture.savefig(file, dpi=2 * picture.dpi)
    else:
        picture.save(file, "PNG")
    return file.getvalue()


def small(picture: Image.Image, side: int) -> Image.Image:
    """A copy that fits into a square."""
    copy = picture.copy()
    copy.thumbnail((side, side))
    return copy


def show_all(axes, pictures: dict[str, Image.Image]) -> None:
    """Pictures by title, one to an axis."""
    for ax, (title, picture) in zip(axes, pictures.items()):
        ax.imshow(as_image(picture))
        ax.set_title(title, parse_math=False)
        ax.axis("off")


def row(*children: ipw.Widget, kinds=("row",)) -> ipw.Box:
    """Widgets side by side; they wrap in a narrow window."""
    box = ipw.Box(children)
    for kind in kinds:
        box.add_class(f"kleinlite-{kind}")
    return box


def clickable(picture: ipw.Image, clicked: Callable, rows=1, columns=1, area=(0, 0, 1, 1), tip: str = "") -> ipw.Box:
    """A picture under a grid of invisible buttons: clicked(row, column). area: left, top, width, height, as shares."""
    layout, style = ipw.Layout(), ipw.ButtonStyle()  # one for all buttons
    cells, buttons = [(i, j) for i in range(rows) for j in range(columns)], []
    for i, j in cells:
        buttons.append(ipw.Button(tooltip=tip, layout=layout, style=style, tabbable=len(cells) == 1))
        buttons[-1].on_click(lambda _, i=i, j=j: clicked(i, j))
    place = {side: f"{share:.2%}" for side, share in zip(("left", "top", "width", "height"), area)}
    place |= {"grid_template_rows": f"repeat({rows}, 1fr)", "grid_template_columns": f"repeat({columns}, 1fr)"}
    return row(picture, ipw.GridBox(buttons, layout=place).add_class("kleinlite-over"), kinds=["click"])


# The playground


def call(model: str, wish: dict, files: list[str], stopped: int = 0) -> str:
    """The lines that draw a picture again; stopped: after how many steps, if it was."""
    quoted = lambda text: json.dumps(text, ensure_ascii=False)
    words = [quoted(wish["prompt"]), *(f"{k}={v}" for k, v in wish.items() if k not in ("prompt", "images"))]
    if files:
        words.append(f"images=[{', '.join(f'Image.open({quoted(name)})' for name in files)}]")
    lines = ["from kleinlite import Klein", *["from PIL import Image"] * bool(files), ""]
    lines += [f"klein = Klein.from_pretrained({quoted(model)})"]
    if not stopped:
        return "\n".join([*lines, f"klein({', '.join(words)})"])
    lines += [f"*_, step = islice(klein.stream({', '.join(words)}), {stopped})", "step.preview()"]
    return "\n".join(["from itertools import islice", "", *lines])


JOBS: SimpleQueue[Callable] = SimpleQueue()


def work() -> None:
    """One thread draws for all playgrounds, and never ends: MLX keeps what it sets up for a thread to its exit."""
    while True:
        JOBS.get()()


threading.Thread(target=work, name="kleinlite", daemon=True).start()


def fields(info: ModelInfo) -> dict[str, ipw.Widget]:
    """All that a playground consists of, by name."""
    wide = lambda pixels, kind, *value, **traits: kind(*value, layout={"width": f"{pixels}px"}, **traits)
    empty = png(Image.new("RGB", (info.size, info.size), "#e6e9f2"))
    return {
        "prompt": ipw.Text(PROMPT, placeholder="What shall be drawn?", layout={"flex": "1 1 300px", "width": "auto"}),
        "draw": wide(96, ipw.Button, description="Draw", icon="paint-brush", button_style="primary"),
        "stop": wide(84, ipw.Button, description="Stop", icon="stop", disabled=True),
        "width": wide(76, ipw.IntText, info.size, step=16, description="width"),
        "height": wide(76, ipw.IntText, info.size, step=16, description="height"),
        "steps": wide(76, ipw.IntText, info.steps, description="steps"),
        "guidance": wide(76, ipw.FloatText, info.guidance, step=0.5, description="guidance"),
        "seed": wide(116, ipw.IntText, 7, description="seed"),
        "dice": wide(36, ipw.Button, icon="random", tooltip="another seed"),
        "upload": wide(136, ipw.FileUpload, accept="image/*", multiple=True, description="Reference"),
        "drop": ipw.HTML(FIELD),
        "references": row(),
        "clear": wide(36, ipw.Button, icon="times", tooltip="no reference"),
        "picture": wide(336, ipw.Image, value=empty),
        "progress": ipw.IntProgress(layout={"width": "auto"}),
        "says": ipw.HTML(),
        "gallery": row(kinds=["gallery"]),
        "call": ipw.HTML(),
    }


def uploaded(files: tuple[dict, ...]) -> list[Image.Image]:
    """What the upload field holds, as pictures."""
    pictures = []
    for file in files:
        try:
            pictures.append(Image.open(io.BytesIO(file["content"])).convert("RGB"))
        except OSError:
            raise ValueError(f"{file['name']} is not a picture, or one of a kind that cannot be read.") from None
    return pictures


def copyable(code: str) -> str:
    """Code in a box, with a button that copies it."""
    copy = "navigator.clipboard.writeText(this.nextSibling.innerText).then(() => this.innerText = 'copied')"
    lines = f'<button onclick="{escape(copy)}">copy</button><code>{escape(code)}</code>'
    return f'<div class="kleinlite-call">{lines}</div>'


class Playground(Panel):
    """Fields for a wish, the picture as it comes, and those before. Draws in a thread, so that Stop can be heard."""

    def __init__(self, klein: Klein):
        self.klein, self.halt, self.idle = klein, threading.Event(), threading.Event()
        self.film, self.code, info = [], "", klein.info
        # Weights are read when first used, and MLX lets no thread finish what another began. So read them here.
        mx.eval([part.parameters() for part in (klein.text_encoder, klein.transformer, klein.autoencoder)])
        parts = fields(info)
        hidden = {"guidance"} if info.distilled else set()
        pick = lambda names: [parts[name] for name in names.split() if name not in hidden]
        numbers = pick("width height steps guidance seed dice upload drop references")
        rows = [row(*pick("prompt draw stop")), row(*numbers, kinds=["row", "fields"]), *pick("progress says")]
        side = ipw.VBox(pick("gallery call")).add_class("kleinlite-side")
        super().__init__([*rows, row(parts["picture"], side, kinds=["stage"])], **parts)
        parts["draw"].on_click(self.generate)
        parts["prompt"].on_msg(lambda _, message, __: message.get("event") == "submit" and self.generate())  # Enter
        parts["stop"].on_click(lambda _: self.halt.set())
        parts["dice"].on_click(lambda _: parts["seed"].set_trait("value", random.randrange(2**31)))
        parts["clear"].on_click(lambda _: parts["upload"].set_trait("value", ()))
        parts["upload"].observe(self.refer, "value")
        self.refer()
        self.idle.set()
        self.say("Say what you want to see, and press Draw.")
        if info.name == "nano":  # it takes a moment, and there is something to see
            self.generate()
            self.idle.wait()

    def say(self, text: str, kind: str = "fine") -> None:
        self.parts.says.value = f'<div role="status" class="kleinlite-{kind}">{escape(text)}</div>'

    def refer(self, _=None) -> None:
        """Show the references small, and let the first one decide the size."""
        parts, size, pictures = self.parts, self.klein.info.size, []
        try:
            pictures = uploaded(parts.upload.value)
            sizes = [prepare_reference(picture).size for picture in pictures]
            parts.width.value, parts.height.value = [*sizes, (size, size)][0]
            self.say("")
        except ValueError as error:
            self.say(str(error), "wrong")
        shown = [ipw.Image(value=png(small(p, 56)), layout={"height": "28px"}) for p in pictures]
        parts.references.children = [*shown, parts.clear] if parts.upload.value else []

    def generate(self, _=None) -> None:
        """Start to draw what the fields say, or say what is wrong with it; returns at once."""
        parts, info = self.parts, self.klein.info
        if not self.idle.is_set():
            return
        asked = ["prompt", "width", "height", "steps", *([] if info.distilled else ["guidance"]), "seed"]
        try:
            wish = {name: getattr(parts, name).value for name in asked} | {"images": uploaded(parts.upload.value)}
            steps = self.klein.stream(**wish, progress=False)
        except ValueError as error:
            return self.say(str(error), "wrong")
        self.halt.clear()
        self.idle.clear()
        parts.draw.disabled, parts.stop.disabled = True, False
        parts.progress.value, parts.progress.max = 0, wish["steps"]
        files = [file["name"] for file in parts.upload.value]
        self.say("reading the prompt")
        self.tell(call(info.name, wish, files))
        JOBS.put(lambda: self.follow(steps, wish, files))

    def follow(self, steps: Iterator[Step], wish: dict, files: list[str]) -> None:
        """The run, in the worker's thread: shows every step, and listens to Stop between two of them."""
        parts, film, start = self.parts, [], clock()
        try:
            while not self.halt.is_set() and (step := next(steps, None)):
                preview = step.preview()
                film.append((step.t, small(preview, 192)))
                parts.picture.value, parts.progress.value = png(preview), len(film)
                self.say(f"step {len(film)} of {wish['steps']}, noise level {step.t:.3f} → {step.t_next:.3f}")
            if not film:
                return self.say("stopped before the first step")
            self.film, stopped = film, len(film) if len(film) < wish["steps"] else 0
            end = f"stopped after {stopped} of {wish['steps']} steps" if stopped else f"{clock() - start:.1f} s"
            words = f"{wish['prompt']} · seed {wish['seed']} · {end}"
            self.keep(preview, words, call(self.klein.info.name, wish, files, stopped))
        except Exception as error:  # nobody else hears of it in a thread
            self.say(str(error), "wrong")
        finally:
            parts.stop.disabled, parts.draw.disabled = True, False
            self.idle.set()

    def tell(self, code: str) -> None:
        """Show the lines that draw the picture."""
        self.code, self.parts.call.value = code, copyable(code)

    def keep(self, picture: Image.Image, words: str, code: str) -> None:
        """Show a finished picture with what made it, and put it into the gallery to come back to."""
        file = png(picture)

        def show(*_):
            self.parts.picture.value = file
            self.tell(code)
            self.say(words)

        show()
        thumbnail = ipw.Image(value=png(small(picture, 144)), layout={"width": "72px"})
        self.parts.gallery.children = [clickable(thumbnail, show, tip=words), *self.parts.gallery.children]

    @property
    def still(self) -> bytes:
        """The last run as a film strip."""
        if not self.film:
            return super().still
        picks = sorted({round(i * (len(self.film) - 1) / 5) for i in range(6)})
        width, height = self.film[0][1].size
        figure = Figure(figsize=(1.5 * len(picks), 1.5 * height / width + 0.2), layout="constrained")
        titles = {f"step {i + 1}, t = {self.film[i][0]:.2f}": self.film[i][1] for i in picks}
        show_all(figure.subplots(1, len(picks), squeeze=False)[0], titles)
        return png(figure)


def playground(klein: Klein | None = None) -> Playground:
    """Wish, watch, stop, look back: the whole pipeline with buttons. klein-nano if no model is given."""
    return Playground(klein or Klein.from_pretrained())


# The explorers


def explorer(draw: Callable[..., Figure], **controls: ipw.Widget) -> Panel:
    """Controls over the figure that `draw` makes of their values, drawn again whenever one of them changes."""
    picture = ipw.Image()

    def redraw(_=None):
        figure = draw(**{name: control.value for name, control in controls.items()})
        picture.layout.width = f"{figure.get_figwidth() * figure.dpi:.0f}px"
        picture.value = png(figure)

    for name, control in controls.items():
        control.description = name
        control.observe(redraw, "value")
    redraw()
    return Panel([row(*controls.values()), picture], picture=picture, **controls)


def schedule_explorer() -> Panel:
    """Where klein's steps go, beside a straight line and a power of it: by number of steps and size of picture."""

    def draw(steps, size):
        n = (size // 16) ** 2
        mu, line = empirical_mu(n, steps), [1 - i / steps for i in range(steps + 1)]
        figure = Figure(figsize=(8, 3), layout="constrained")
        left, right = figure.subplots(1, 2)
        for name, times in {"klein": schedule(steps, n), "linear": line, "power 1/5": [t**0.2 for t in line]}.items():
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

    return explorer(draw, steps=ipw.IntSlider(4, 1, 50), size=ipw.IntSlider(1024, 64, 2048, 16))


def rope_explorer(grid: int = 16) -> Panel:
    """What one patch sees of the others by position alone; choose it by sliders, or click on it in the first map."""
    ones, times = mx.ones((1, 1, grid * grid, 128)), (0, 10, 20, 30)
    turned = {t: apply_rope(ones, rope_table(image_ids(grid, grid, t)))[0, 0] for t in times}  # (grid², 128) each
    axes = {"all axes": slice(0, 128), "only h": slice(32, 64), "only w": slice(64, 96)}
    similar = lambda t, part, here: turned[t][:, part] @ turned[0][here, part].T / (part.stop - part.start)
    lowest = {name: min(similar(t, part, slice(None)).min().item() for t in times) for name, part in axes.items()}
    share, tall = 0.32, 0.88  # one map's width and height, as shares of the figure

    def draw(row, column, among):
        figure = Figure(figsize=(7.5, 7.5 * share / tall))
        for i, (name, part) in enumerate(axes.items()):
            ax = figure.add_axes((0.005 + 0.335 * i, 0.01, share, tall))
            seen = similar(among, part, row * grid + column).reshape(grid, grid)
            ax.imshow(seen.tolist(), vmin=lowest[name], vmax=1, interpolation="nearest")
            ax.plot([column], [row], "s", markerfacecolor="none", markeredgecolor="#d63031", markersize=8)
            ax.set_title(f"{name}: {seen.min().item():.2f} to {seen.max().item():.2f}")
            ax.axis("off")
        return figure

    sides = {side: ipw.IntSlider(at, 0, grid - 1) for side, at in (("row", grid // 2), ("column", grid // 3))}
    pictures = [("its own picture", 0), *((f"a reference at t = {t}", t) for t in times[1:])]
    panel = explorer(draw, **sides, among=ipw.ToggleButtons(options=pictures))

    def clicked(row, column):
        panel.parts.row.value, panel.parts.column.value = row, column

    maps = clickable(panel.parts.picture, clicked, grid, grid, area=(0.005, 0.99 - tall, share, tall))
    panel.children = [*panel.children[:-1], maps]
    return panel


def watch_attention(klein: Klein, prompt: str, seed: int, size: int | None = None) -> tuple[list[Step], list[mx.array]]:
    """Draw once: the steps, and for each what picture tokens give to text tokens, (blocks, n, m), mean of the heads."""
    steps, maps, caught, m, me = [], [], [], klein.info.tokens, threading.get_ident()
    blocks = len(klein.transformer.double_blocks) + len(klein.transformer.single_blocks)
    honest = transformer.roped_attention

    def spying(q, k, v, rope):
        if threading.get_ident() == me:  # not the playground's thread
            q_, k_ = apply_rope(q, rope)[:, :, m:], apply_rope(k, rope)
            weights = softmax((q_ @ k_.swapaxes(-1, -2)).astype(mx.float32) * q.shape[-1] ** -0.5)  # (b, nh, n, m + n)
            caught.append(weights[0, :, :, :m].mean(axis=0))
            mx.eval(caught[-1])
        return honest(q, k, v, rope)

    transformer.roped_attention = spying
    try:
        for step in klein.stream(prompt, seed=seed, width=size, height=size, progress=False):
            steps.append(step)
            maps.append(mx.stack(caught[:blocks]))  # with guidance, the prompt's pass comes first
            caught.clear()
    finally:
        transformer.roped_attention = honest
    mx.eval(maps)
    return steps, maps


def attention_viewer(klein: Klein, prompt: str, seed: int = 7, size: int | None = None) -> Panel:
    """Which patches look at a word of the prompt: in which block, at which step."""
    if not prompt.split():
        raise ValueError("There is no word in the prompt to look at: give it one.")
    steps, maps = watch_attention(klein, prompt, seed, size)
    previews, start = [step.preview() for step in steps], TEMPLATE.index("{}")
    gh, gw = previews[0].height // 16, previews[0].width // 16
    spans = klein.tokenizer.encode(TEMPLATE.format(prompt)).offsets  # where in the text each token stands
    words = [(found[0], (start + found.start(), start + found.end())) for found in re.finditer(r"\S+", prompt)]

    def draw(word, step, block):
        tokens = [i for i, (first, end) in enumerate(spans) if first < word[1] and end > word[0]]
        seen = maps[step - 1][:, :, tokens].sum(axis=-1)  # (blocks, n)
        seen = (seen.mean(axis=0) if block < 0 else seen[block]).reshape(gh, gw)
        figure = Figure(figsize=(6.4, 2.9), layout="constrained")
        left, right = figure.subplots(1, 2)
        word_ = prompt[word[0] - start : word[1] - start]
        preview, title = previews[step - 1], f"who looks at “{word_}”"
        show_all((left, right), {f"expected after step {step}": preview, title: preview.convert("L").convert("RGB")})
        shown = right.imshow((seen / seen.mean()).tolist(), extent=right.images[0].get_extent(), alpha=0.7, vmin=0)
        figure.colorbar(shown, ax=right, label="attention / mean")
        return figure

    kinds = {"double": len(klein.transformer.double_blocks), "single": len(klein.transformer.single_blocks)}
    blocks = ["mean of all", *(f"{kind} {i + 1}" for kind, count in kinds.items() for i in range(count))]
    longest = max(words, key=lambda word: len(word[0]))[1]
    return explorer(
        draw,
        word=ipw.ToggleButtons(options=words, value=longest),
        step=ipw.IntSlider((len(steps) + 1) // 2, 1, len(steps)),
        block=ipw.SelectionSlider(options=[(name, i - 1) for i, name in enumerate(blocks)]),
    )


def latent_explorer(klein: Klein, picture: Image.Image) -> Panel:
    """Push one of the 128 packed channels up or down in every patch, and see what the decoder makes of it."""
    latents = klein.autoencoder.encode(to_pixels(prepare_reference(picture)))  # (1, gh, gw, 128)
    before = klein.autoencoder.decode(latents)

    def draw(channel, push):
        after = klein.autoencoder.decode(latents + push * (mx.arange(latents.shape[-1]) == channel))
        figure = Figure(figsize=(7.2, 2.4), layout="constrained")
        *left, right = figure.subplots(1, 3)
        show_all(left, {"decoded": to_images(before)[0], f"channel {channel}, {push:+.1f}": to_images(after)[0]})
        levels = 127.5 * mx.abs(after - before)[0].mean(axis=-1)
        shown = right.imshow(levels.tolist(), vmin=0, vmax=max(1, levels.max().item()))
        right.set_title("difference")
        right.axis("off")
        figure.colorbar(shown, ax=right, label="levels of 255")
        return figure

    channel, push = ipw.IntSlider(52, 0, latents.shape[-1] - 1), ipw.FloatSlider(3.0, min=-6, max=6, step=0.5)
    return explorer(draw, channel=channel, push=push)
