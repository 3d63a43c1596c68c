"""kleinlite: FLUX.2 [klein] built from scratch in MLX, by the notebooks of a book.

>>> from kleinlite import Klein, save_picture
>>> klein = Klein.from_pretrained()
>>> save_picture(klein("a red house under a yellow sun", seed=7, progress=False), "house.png")
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .inference.picture_file import picture_info as picture_info, save_picture as save_picture
    from .klein import Klein as Klein

__all__ = ["Klein", "picture_info", "save_picture"]
__version__ = "0.4.0"


def __getattr__(name: str) -> Any:
    # Importing the pipeline imports everything else; `import kleinlite.scenes` should not have to.
    if name == "Klein":
        from .klein import Klein

        return Klein
    if name in __all__:
        from .inference import picture_file

        return getattr(picture_file, name)
    raise AttributeError(f"module 'kleinlite' has no attribute {name!r}")
