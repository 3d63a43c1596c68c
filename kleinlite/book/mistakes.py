"""What if this line were wrong? Draws with one known mistake at a time, and says which checks notice.

A mistake is a context: `line` changes a piece of a function's source for as long as it lasts, and whatever else patches
something will do as well. So the package itself needs no switches.

>>> wrong = {"linear schedule": mistakes.line(schedule, "shift_time(t, shift)", "t")}
>>> effects = mistakes.compare(draw, cases, wrong, {"first step": lambda: schedule(4, 36)[1] > 0.9})
"""

import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import mlx.core as mx
from PIL import Image

from ..errors import UserError
from ..nano.evaluate import examine, to_array
from ..scenes import Scene
from . import plots

__all__ = ["line", "Effect", "compare"]


class line(AbstractContextManager[None]):  # a context's name, as contextlib's own are
    """`function` with a piece of its source replaced, wherever it is called, while the context lasts.

    In a workbook the function may be the reader's, in other words: then the book's own is put in its place, with the
    piece replaced, and the reader's comes back after it.
    """

    def __init__(self, function: Callable[..., Any], right: str, wrong: str):
        book = function
        if right not in inspect.getsource(function):
            book = book_function(function, right) or function
        source = textwrap.dedent(inspect.getsource(book))
        if source.count(right) != 1:
            raise UserError(f"{function.__qualname__} must have {right!r} once, not {source.count(right)} times.")
        names = book.__globals__ | function.__globals__
        exec(source.replace(right, wrong), names)
        self.function = function
        self.original = function.__code__
        self.changed = names[function.__name__].__code__

    def __enter__(self) -> None:
        self.function.__code__ = self.changed

    def __exit__(self, *error: object) -> None:
        self.function.__code__ = self.original


def book_function(function: Callable[..., Any], piece: str) -> Any:
    """The book's function or method of this name that has this piece, if the notebook's is a reader's; else None."""
    owner, _, name = function.__qualname__.rpartition(".")
    for room, module in [*sys.modules.items()] if function.__module__ == "__main__" else []:
        if room.startswith("kleinlite."):
            found = vars(vars(module).get(owner, module)).get(name)
            if inspect.isfunction(found) and found.__module__ == room and piece in inspect.getsource(found):
                return found
    return None


class Effect(NamedTuple):
    """What a mistake does: to the pictures, to what they show, and to the checks."""

    levels: float  # mean difference from the right pictures, in levels of 255
    found: int  # attributes that the captions ask for and the judge sees
    attributes: int  # that the captions ask for
    caught: list[str]  # the checks that fail

    @property
    def asked(self) -> float:
        """Share of what the captions ask for that the judge sees."""
        return self.found / self.attributes


def compare(
    draw: Callable[[], list[Image.Image]], cases: list[tuple[Scene, str]],
    wrong: Mapping[str, AbstractContextManager[Any]], checks: dict[str, Callable[[], bool]],
) -> dict[str, Effect]:  # fmt: skip
    """Draw rightly, then with each mistake: show the first four pictures, print who notices, return the effects.

    draw makes a picture for each case, a scene and its caption. wrong has the mistakes by name; checks has by name what
    is True as long as nothing is wrong.
    """
    rows: dict[str, list[Image.Image]] = {}
    effects: dict[str, Effect] = {}
    right: list[Image.Image] = []
    worlds: dict[str, AbstractContextManager[Any]] = {"right": nullcontext(), **wrong}
    for name, world in worlds.items():
        with world:
            pictures = draw()
            caught = [check for check, holds in checks.items() if not holds()]
        right = right or pictures
        off = [255 * float(mx.abs(to_array(a) - to_array(b)).mean()) for a, b in zip(pictures, right)]
        seen = [ok for result in examine(pictures, cases) for ok in result.values()]
        effects[name] = Effect(sum(off) / len(off), sum(seen), len(seen), caught)
        rows[textwrap.fill(name, 20)] = pictures[:4]
    plots.rows(rows)
    if effects["right"].caught:
        raise UserError(f"A check that fails without a mistake tells nothing: {', '.join(effects['right'].caught)}.")
    for name in wrong:
        print(f"{name}: caught by {', '.join(effects[name].caught) or 'no check of this chapter'}")
    return effects
