"""What train.py may not do, and whether anything else has changed. For honest mistakes: it is no sandbox."""

import ast
import zlib
from pathlib import Path

from kleinlite.errors import UserError

MOST_LINES = 200
FOLDER = Path(__file__).parent
TRAIN = FOLDER / "train.py"
ALLOWED = {  # modules, and the names that may be taken from them; None: all
    "mlx.core": None, "mlx.nn": None, "mlx.optimizers": None, "mlx.utils": None, "math": None, "random": None,
    "itertools": None, "functools": None, "dataclasses": None, "collections": None, "collections.abc": None,
    "typing": None, "kleinlite.training": None, "kleinlite.sampling": None, "kleinlite.transformer": None,
    "given": {"Given"},
}  # fmt: skip
BUILTINS = {"eval", "exec", "compile", "open", "getattr", "globals", "vars"}


def check_train(source: str) -> None:
    """Raises UserError with the first thing in train.py's text that the rules do not allow."""
    lines = len(source.splitlines())
    if lines > MOST_LINES:
        raise UserError(f"train.py has {lines} lines: the rules allow {MOST_LINES}.")
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise UserError(f"train.py, line {error.lineno}: this is no Python ({error.msg}).") from error
    for node in ast.walk(tree):
        modules: list[tuple[str, set[str]]] = []
        if isinstance(node, ast.Import):
            modules = [(alias.name, set()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [(node.module or "", {alias.name for alias in node.names})]
        for module, names in modules:
            allowed = ALLOWED.get(module, set())
            if module not in ALLOWED or (allowed is not None and not names <= allowed):
                raise UserError(f"train.py, line {node.lineno}: it may not import {module or '.'}.")
        called = isinstance(node, ast.Name) and node.id in BUILTINS
        loads = isinstance(node, ast.Attribute) and node.attr == "load"  # other weights
        said = getattr(node, "id", None) or getattr(node, "attr", None) or ""
        if called or loads or (said.startswith("_") and said != "_"):
            raise UserError(f"train.py, line {node.lineno}: it may not use {said}.")


def locked_files(root: Path = FOLDER.parents[1]) -> str:
    """Eight digits that change with any module of the package or the recipe other than train.py."""
    crc = 0
    for path in sorted([*root.glob("kleinlite/**/*.py"), *root.glob("recipe/**/*.py")]):
        if path.relative_to(root) != TRAIN.relative_to(FOLDER.parents[1]):
            crc = zlib.crc32(path.relative_to(root).as_posix().encode() + path.read_bytes(), crc)
    return f"{crc:08x}"
