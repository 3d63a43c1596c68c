"""What all panels are made of: controls of ipywidgets and three of our own, in a frame that has a still picture.

Our own are anywidgets, each a few lines of JavaScript beside this file, so that they live wherever ipywidgets do:
JupyterLab, Colab, VS Code.
"""

import base64
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anywidget
import ipywidgets as ipw
import traitlets
from IPython.display import display
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from ..plots import as_image, compress

__all__ = ["Clickable", "Code", "Files", "Panel", "make_row", "make_thumbnail", "show_pictures", "to_png"]

HERE = Path(__file__).parent
STYLE = f"<style>{(HERE / 'style.css').read_text('utf-8')}</style>"


class Files(anywidget.AnyWidget):
    """A button that asks for pictures, and a field to drop them on. `value`: dicts of `name` and `content`, bytes."""

    _esm = HERE / "files.js"
    value = traitlets.List(traitlets.Dict()).tag(sync=True, echo_update=False)  # pictures need not travel back


class Code(anywidget.AnyWidget):
    """Lines of code in a box, with a button that copies them."""

    _esm = HERE / "code.js"
    value = traitlets.Unicode().tag(sync=True)


class Clickable(anywidget.AnyWidget):
    """A PNG picture to click on: clicked(row, column) is called with a cell of a grid over it.

    area: left, top, width and height of that grid, as shares of the picture. title: shown beside the mouse.
    """

    _esm = HERE / "clickable.js"
    value = traitlets.Bytes().tag(sync=True)
    rows = traitlets.Int(1).tag(sync=True)
    columns = traitlets.Int(1).tag(sync=True)
    area = traitlets.Tuple((0.0, 0.0, 1.0, 1.0)).tag(sync=True)
    title = traitlets.Unicode().tag(sync=True)

    def __init__(self, clicked: Callable[[int, int], object], **traits: Any) -> None:
        super().__init__(**traits)
        self.clicked = clicked
        self.add_class("kleinlite-clickable")
        self.on_msg(lambda _, cell, __: self.click(**cell))

    def click(self, row: int = 0, column: int = 0) -> None:
        """What a click with the mouse does."""
        self.clicked(row, column)


class Panel(ipw.VBox):
    """Controls and what they make. `parts` has them by name; `still` is the PNG for where no widget can live."""

    def __init__(self, rows: list[ipw.Widget], **parts: ipw.Widget):
        super().__init__([ipw.HTML(STYLE, layout={"display": "none"}), *rows])
        self.add_class("kleinlite")
        self.parts = SimpleNamespace(**parts)

    @property
    def still(self) -> bytes:
        return self.parts.picture.value

    def show_still(self) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
        """The still as an output of Jupyter, and its size there."""
        still = Image.open(io.BytesIO(self.still))
        (file, kind) = compress(still)
        words = "Something to play with: run this cell in JupyterLab."
        picture = {"text/plain": words, f"image/{kind}": base64.b64encode(file).decode()}
        return picture, {f"image/{kind}": {"width": still.width // 2, "height": still.height // 2}}

    def _ipython_display_(self) -> None:
        """Two outputs: the still, which stays in a saved notebook, and the controls, which hide it while they live."""
        picture, size = self.show_still()
        display(picture, metadata=size, raw=True)
        display(self._repr_mimebundle_(), raw=True)


def to_png(picture: Image.Image | Figure) -> bytes:
    """A picture, or a figure with twice the pixels of its place, as a PNG file's bytes."""
    file = io.BytesIO()
    if isinstance(picture, Figure):
        picture.savefig(file, dpi=2 * picture.dpi)
    else:
        picture.save(file, "PNG")
    return file.getvalue()


def make_thumbnail(picture: Image.Image, side: int) -> Image.Image:
    """A copy that fits into a square."""
    copy = picture.copy()
    copy.thumbnail((side, side))
    return copy


def show_pictures(axes: Iterable[Axes], pictures: dict[str, Image.Image]) -> None:
    """Pictures by title, one to an axis."""
    for ax, (title, picture) in zip(axes, pictures.items()):
        ax.imshow(as_image(picture))
        ax.set_title(title, parse_math=False)
        ax.axis("off")


def make_row(*children: ipw.Widget, kinds: tuple[str, ...] = ("row",)) -> ipw.Box:
    """Widgets side by side; they wrap in a narrow window. kinds: classes of the style sheet."""
    box = ipw.Box(children)
    for kind in kinds:
        box.add_class(f"kleinlite-{kind}")
    return box
