"""The workbook's check: is the reader's function right, and if not, where does it differ?

`check` tries a hole out twice: as it is, and with the reader's body instead of the book's, so that a mistake in one
function never turns the light of another one red.
"""

import importlib
import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from tools.holes import HOLES, ROUNDED_ONCE, find_function, try_out

__all__ = ["check", "installed"]


@contextmanager
def installed(chapter: str, names: dict[str, Any], holes: list[str] | None = None) -> Iterator[None]:
    """The promoted module runs on the reader's bodies while the context lasts, and so does all that imports from it.

    names: the notebook's `globals()`, which may hold helpers of the reader's own. holes: only these, instead of all.
    """
    module = vars(importlib.import_module(f"kleinlite.{chapter}"))
    scope = module | {name: value for name, value in names.items() if is_own(name, value, chapter, module)}
    before = {}
    try:
        for hole in HOLES[chapter] if holes is None else holes:
            function = find_function(module, hole)
            before[function] = function.__code__
            module[f"my {hole}"] = move(find_function(names, hole), scope)
            function.__code__ = forward.__code__.replace(co_names=(f"my {hole}",))
        yield
    finally:
        for function, code in before.items():
            function.__code__ = code
        for name in [name for name in module if name.startswith("my ")]:
            del module[name]


def forward(*args: Any, **options: Any) -> Any:
    """Its code takes the place of a book's function, which others have imported, and calls the reader's."""
    return READER(*args, **options)  # type: ignore[name-defined]  # noqa: F821, the name is put in later


def move(function: Any, scope: dict[str, Any]) -> Any:
    """The reader's function, without decorators, where it sees the book's definitions and the reader's helpers."""
    plain = inspect.unwrap(function)
    if not isinstance(plain, FunctionType):
        return plain
    defaults = [scope.get(value.__name__, value) if callable(value) else value for value in plain.__defaults__ or ()]
    moved = FunctionType(plain.__code__, scope, plain.__name__, tuple(defaults), plain.__closure__)
    moved.__kwdefaults__ = plain.__kwdefaults__
    return moved


def is_own(name: str, value: Any, chapter: str, module: dict[str, Any]) -> bool:
    """Whether the reader has written something: a name that is not in the book, or a helper with another body."""
    theirs = module.get(name)
    if isinstance(value, FunctionType) and isinstance(theirs, FunctionType) and name not in HOLES[chapter]:
        codes = value.__code__, theirs.__code__
        return len({(code.co_code, code.co_names) for code in codes}) == 2
    return name not in module


def check(hole: str, names: dict[str, Any]) -> None:
    """Say in a line whether a function of the reader's is right: check("sampling.noised", globals())."""
    chapter = next(chapter for chapter in HOLES if hole.startswith(f"{chapter}."))
    name = hole.removeprefix(f"{chapter}.")
    wrong = find_mistake(chapter, name, names)
    print(f"\033[31m✗ {name}: {wrong}\033[0m" if wrong else f"\033[32m✓ {name}: right\033[0m")


def find_mistake(chapter: str, name: str, names: dict[str, Any]) -> str | None:
    """A sentence on what is wrong with the reader's function, or None."""
    function = find_function(names, name)
    if not callable(function):
        return "there is no such function yet: run the cell above first."
    book = find_function(vars(importlib.import_module(f"kleinlite.{chapter}")), name)
    if other := find_other_default(function, book):
        return other
    for half in [False] if chapter == "measuring" else [False, True]:
        if wrong := compare(chapter, name, names, half):
            return f"in bfloat16, {wrong}" if half else wrong
    return None


def compare(chapter: str, name: str, names: dict[str, Any], half: bool) -> str | None:
    """A sentence on what the reader's function does otherwise than the book's, or None. half: in bfloat16."""
    right: Any = tree_flatten(try_out(chapter, name, half))
    try:
        with installed(chapter, names, [name]):
            found: Any = tree_flatten(try_out(chapter, name, half))
            mx.eval([value for _, value in found if isinstance(value, mx.array)])
    except NotImplementedError:
        return "still empty. Write its body in the cell above, run that cell, then this one."
    except (Exception, SystemExit) as error:  # whatever a reader's first try may raise
        lines = [frame for frame in inspect.trace() if frame.function == name.rpartition(".")[2]]
        text = (lines[-1].code_context or [""])[0].strip() if lines else ""
        at = f", at `{text}`" if text else ""
        return f"it stops{at}, with {type(error).__name__}: {error}"
    return find_difference(found, right, 0.1 if half and name not in ROUNDED_ONCE else 1e-4)


def find_other_default(mine: Any, book: FunctionType) -> str | None:
    """A sentence on the first default that is not the book's, or None. More arguments are the reader's own affair."""
    given = inspect.signature(mine).parameters
    for name, parameter in inspect.signature(book).parameters.items():
        right = parameter.default
        if name in given and not callable(right) and given[name].default != right:
            found = "none" if given[name].default is parameter.empty else shorten(given[name].default)
            return f"the default of {name} is {found}, expected {shorten(right)}."
    return None


def find_difference(found: list[tuple[str, Any]], right: list[tuple[str, Any]], tolerance: float = 1e-4) -> str | None:
    """A sentence on the first value that differs, or None. Both flattened: [(path, value), …]."""
    if [path for path, _ in found] != [path for path, _ in right]:
        if len(found) == 1 and found[0][1] is None:
            return "it returns nothing. Is `return` missing?"
        return f"it returns {len(found)} value(s) in another order or form than the {len(right)} expected."
    for (path, mine), (_, value) in zip(found, right):
        where = f" (part {path} of the answer)" if path else ""
        if not isinstance(value, mx.array):
            if not is_same(mine, value):
                return f"it returns {shorten(mine)}, expected {shorten(value)}{where}."
        elif not isinstance(mine, mx.array):
            return f"it returns {shorten(mine)}, expected an array of shape {value.shape}{where}."
        elif mine.shape != value.shape:
            return f"the shape is {mine.shape}, expected {value.shape}{where}."
        elif mine.dtype != value.dtype:
            kinds = [str(x.dtype).removeprefix("mlx.core.") for x in (mine, value)]
            return f"the numbers are {kinds[0]}, expected {kinds[1]}{where}."
        elif value.size == 1 and not agree(mine, value, tolerance).item():
            return f"it returns {shorten(mine.item())}, expected {shorten(value.item())}{where}."
        elif not agree(mine, value, tolerance).all().item():
            return f"{list_differences(mine, value, tolerance)}{where}."
    return None


def is_same(mine: Any, right: Any) -> bool:
    """Equal; numbers within 1e-4 of the right one."""
    if isinstance(right, float) and isinstance(mine, (int, float)):
        return math.isclose(mine, right, rel_tol=1e-4, abs_tol=1e-9)
    return bool(mine == right)


def agree(mine: mx.array, right: mx.array, tolerance: float) -> mx.array:
    """Where two arrays of one shape are equal, within this part of the largest value; whole numbers exactly."""
    if not mx.issubdtype(right.dtype, mx.floating):
        return mine == right
    return mx.abs(mine - right) <= tolerance * mx.maximum(mx.abs(right).max(), 1e-6)


def list_differences(mine: mx.array, right: mx.array, tolerance: float) -> str:
    """The first three entries that differ, and how many do; the shapes are the same."""
    places = np.argwhere(~np.asarray(agree(mine, right, tolerance))).tolist()
    shown = []
    for place in places[:3]:
        values = [shorten(x[tuple(place)].item()) for x in (mine, right)]
        shown.append(f"{place} is {values[0]}, expected {values[1]}")
    return f"the shape {right.shape} is right, but {len(places)} of {right.size} entries differ: {'; '.join(shown)}"


def shorten(value: Any) -> str:
    """A value in a few characters."""
    text = f"{value:.4g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
