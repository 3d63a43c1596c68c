"""The playground: fields for a request, the picture as it comes, those before, and the code that draws each again."""

import io
import json
import random
import threading
from collections.abc import Iterator
from html import escape
from time import perf_counter as clock
from typing import Any, cast

import ipywidgets as ipw
from matplotlib.figure import Figure
from PIL import Image

from ...errors import UserError
from ...inference.loras import record_loras
from ...inference.picture_file import to_rgb
from ...inference.request import check_request
from ...klein import Klein, Step
from ...models.checkpoint import ModelInfo
from ...nano.limits import describe_limits
from .panel import Clickable, Code, Files, Panel, make_row, make_thumbnail, show_pictures, to_png

__all__ = ["Playground", "playground"]

PROMPT = "a red house under a yellow sun"
PROMPTS = {"nano": PROMPT, "critters": "a blue critter with a crown and three eyes"}  # of quick models


def reproduction_code(klein: Klein, request: dict, files: list[str]) -> str:
    """The lines that draw a picture again."""

    def quoted(text: str) -> str:
        return json.dumps(text, ensure_ascii=False)

    said = [quoted(request["prompt"])]
    said += [f"{k}={v}" for k, v in request.items() if k not in ("prompt", "images")]
    if files:
        said.append(f"images=[{', '.join(f'Image.open({quoted(name)})' for name in files)}]")
    lines = ["from kleinlite import Klein", *["from PIL import Image"] * bool(files), ""]
    loaded = dict(klein.info.chosen)
    if klein.loras:
        loaded["loras"] = [(lora["file"], lora["scale"]) for lora in record_loras(klein.loras)]
    opened = ", ".join([quoted(klein.info.name), *(f"{name}={value!r}" for name, value in loaded.items())])
    return "\n".join([*lines, f"klein = Klein.from_pretrained({opened})", f"klein({', '.join(said)})"])


def make_controls(info: ModelInfo) -> dict[str, ipw.Widget]:
    """All that a playground consists of, by name."""

    def sized(pixels: int, kind: Any, *value: Any, **traits: Any) -> Any:
        return kind(*value, layout={"width": f"{pixels}px"}, **traits)

    prompt = PROMPTS.get(info.name, PROMPT)
    empty = to_png(Image.new("RGB", (info.size, info.size), "#e6e9f2"))
    return {
        "prompt": ipw.Text(prompt, placeholder="What should it draw?", layout={"flex": "1 1 300px", "width": "auto"}),
        "draw": sized(96, ipw.Button, description="Draw", icon="paint-brush", button_style="primary"),
        "stop": sized(84, ipw.Button, description="Stop", icon="stop", disabled=True),
        "width": sized(76, ipw.IntText, info.size, step=16, description="width"),
        "height": sized(76, ipw.IntText, info.size, step=16, description="height"),
        "steps": sized(76, ipw.IntText, info.steps, description="steps"),
        "guidance": sized(76, ipw.FloatText, info.guidance, step=0.5, description="guidance"),
        "seed": sized(116, ipw.IntText, 7, description="seed"),
        "dice": sized(36, ipw.Button, icon="random", tooltip="another seed"),
        "files": Files().add_class("kleinlite-files"),
        "references": make_row(),
        "clear": sized(36, ipw.Button, icon="times", tooltip="no reference"),
        "picture": sized(336, ipw.Image, value=empty),
        "progress": ipw.IntProgress(layout={"width": "auto"}),
        "status": ipw.HTML(),
        "gallery": make_row(kinds=("gallery",)),
        "code": Code().add_class("kleinlite-code"),
    }


def open_pictures(files: list[dict]) -> list[Image.Image]:
    """What the field for references holds, as pictures."""
    pictures = []
    for file in files:
        try:
            pictures.append(to_rgb(Image.open(io.BytesIO(file["content"]))))  # as `Klein` reads it
        except ValueError as error:
            raise UserError(f"{file['name']}: {error}") from None
        except (OSError, Image.DecompressionBombError):
            raise UserError(f"{file['name']} is not a picture, or one of a kind that cannot be read.") from None
    return pictures


class Playground(Panel):
    """Fields for a request, the picture as it comes, and those before. Draws in a thread, so that Stop can be heard."""

    def __init__(self, klein: Klein):
        self.klein = klein
        self.stop_requested = threading.Event()
        self.idle = threading.Event()
        self.previews: list[tuple[float, Image.Image]] = []  # noise level and picture of each step of the last run
        info = klein.info
        parts = make_controls(info)
        hidden = {"guidance"} if info.distilled else set()

        def pick(names: str) -> list[Any]:
            return [parts[name] for name in names.split() if name not in hidden]

        numbers = pick("width height steps guidance seed dice files references")
        rows = [make_row(*pick("prompt draw stop")), make_row(*numbers, kinds=("row", "fields"))]
        rows += pick("progress status")
        side = ipw.VBox(pick("gallery code")).add_class("kleinlite-side")
        super().__init__([*rows, make_row(parts["picture"], side, kinds=("stage",))], **parts)
        parts["draw"].on_click(self.generate)
        parts["prompt"].on_msg(self.on_enter)
        parts["stop"].on_click(lambda _: self.stop_requested.set())
        parts["dice"].on_click(lambda _: parts["seed"].set_trait("value", random.randrange(2**31)))
        parts["clear"].on_click(lambda _: parts["files"].set_trait("value", []))
        parts["files"].observe(self.show_references, "value")
        self.show_references()
        self.idle.set()
        self.show_status("Say what you want to see, and press Draw.")
        if info.name in PROMPTS:  # it takes a moment, and there is something to see
            self.generate()
            self.idle.wait()

    def show_status(self, text: str, kind: str = "fine") -> None:
        self.parts.status.value = f'<div role="status" class="kleinlite-{kind}">{escape(text)}</div>'

    def show_references(self, _: object = None) -> None:
        """Show the references small, and let the first one decide the size."""
        parts = self.parts
        pictures = []
        try:
            pictures = open_pictures(parts.files.value)
            request = check_request(self.klein.info, "", {"images": pictures})
            parts.width.value = request.width
            parts.height.value = request.height
            self.show_status("")
        except ValueError as error:
            self.show_status(str(error), "wrong")
        thumbnails = [ipw.Image(value=to_png(make_thumbnail(p, 56)), layout={"height": "28px"}) for p in pictures]
        parts.references.children = [*thumbnails, parts.clear] if parts.files.value else []

    def on_enter(self, _: object, message: dict[str, Any], __: object) -> None:
        if message.get("event") == "submit":
            self.generate()

    def generate(self, _: object = None) -> None:
        """Start to draw what the fields say, or say what is wrong with it; returns at once."""
        parts = self.parts
        info = self.klein.info
        if not self.idle.is_set():
            return
        names = ["prompt", "width", "height", "steps", *([] if info.distilled else ["guidance"]), "seed"]
        try:
            request = {name: getattr(parts, name).value for name in names}
            request["images"] = open_pictures(parts.files.value)
            steps = self.klein.stream(**request, progress=False)
        except (ValueError, MemoryError) as error:
            return self.show_status(str(error), "wrong")
        self.stop_requested.clear()
        self.idle.clear()
        parts.draw.disabled = True
        parts.stop.disabled = False
        parts.progress.value = 0
        parts.progress.max = request["steps"]
        self.show_status("reading the prompt")
        code = reproduction_code(self.klein, request, [file["name"] for file in parts.files.value])
        parts.code.value = code
        threading.Thread(target=self.show_steps, args=(steps, request, code), daemon=True).start()

    def show_steps(self, steps: Iterator[Step], request: dict, code: str) -> None:
        """Run in a thread of its own: shows every step, and looks between two of them whether Stop was pressed."""
        parts = self.parts
        info = self.klein.info
        self.previews = []
        start = clock()
        try:
            for done, step in enumerate(steps, 1):
                preview = cast(Image.Image, step.preview(fast=step.t_next > 0))
                self.previews.append((step.t, make_thumbnail(preview, 192)))
                parts.picture.value = to_png(preview)
                parts.progress.value = done
                if self.stop_requested.is_set() and step.t_next:
                    return self.show_status(f"stopped after {done} of {request['steps']} steps")
                self.show_status(f"step {done} of {request['steps']}, noise level {step.t:.3f} → {step.t_next:.3f}")
            words = f"{request['prompt']} · seed {request['seed']} · {clock() - start:.1f} s"
            note = "" if self.klein.loras else describe_limits(info.name, info.size, request["prompt"], *preview.size)
            words += f" · {note}" if note else ""
            self.add_to_gallery(preview, words, code)
        except Exception as error:  # nobody else hears of it in a thread
            self.show_status(str(error), "wrong")
        finally:
            parts.stop.disabled = True
            parts.draw.disabled = False
            self.idle.set()

    def add_to_gallery(self, picture: Image.Image, words: str, code: str) -> None:
        """Show a finished picture with what made it, and keep it small to come back to."""
        file = to_png(picture)

        def show(*_: object) -> None:
            self.parts.picture.value = file
            self.parts.code.value = code
            self.show_status(words)

        show()
        thumbnail = Clickable(show, value=to_png(make_thumbnail(picture, 144)), title=words, layout={"width": "72px"})
        self.parts.gallery.children = [thumbnail, *self.parts.gallery.children]

    @property
    def still(self) -> bytes:
        """The last run as a film strip."""
        if not self.previews:
            return super().still
        picks = sorted({round(i * (len(self.previews) - 1) / 5) for i in range(6)})
        width, height = self.previews[0][1].size
        figure = Figure(figsize=(1.5 * len(picks), 1.5 * height / width + 0.2), layout="constrained")
        titles = {f"step {i + 1}, t = {self.previews[i][0]:.2f}": self.previews[i][1] for i in picks}
        show_pictures(figure.subplots(1, len(picks), squeeze=False)[0], titles)
        return to_png(figure)


def playground(klein: Klein | None = None) -> Playground:
    """Ask, watch, stop, look back: the whole pipeline with buttons. klein-nano if no model is given."""
    return Playground(klein or Klein.from_pretrained())
