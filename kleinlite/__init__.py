"""kleinlite: FLUX.2 [klein] built from scratch in MLX, by the notebooks of a book.

>>> from kleinlite import Klein, save_picture
>>> klein = Klein.from_pretrained()
>>> save_picture(klein("a red house under a yellow sun", seed=7, progress=False), "house.png")

`help(Klein.__call__)` says what a call takes. A mistake that you can mend raises one of the four errors below.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import FileError, HubError, MemoryLimitError, UserError
    from .inference.picture_file import picture_info, save_picture
    from .klein import Klein

__all__ = ["FileError", "HubError", "Klein", "MemoryLimitError", "UserError", "picture_info", "save_picture"]
__version__ = "0.5.0"

warnings.filterwarnings("ignore", "IProgress not found")  # tqdm, in a notebook without ipywidgets: plain bars do
_HOMES = {"Klein": "klein", "picture_info": "inference.picture_file", "save_picture": "inference.picture_file"}


def __getattr__(name: str) -> Any:
    # Importing the pipeline imports everything else; `import kleinlite.scenes` should not have to.
    if name in __all__:
        return getattr(import_module(f".{_HOMES.get(name, 'errors')}", __name__), name)
    raise AttributeError(f"module 'kleinlite' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]  # for Tab and help()
