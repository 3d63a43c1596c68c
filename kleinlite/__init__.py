"""kleinlite: FLUX.2 [klein] built from scratch in MLX, by the notebooks of a book.

>>> from kleinlite import Klein
>>> Klein.from_pretrained()("a red circle above a blue square", seed=7).save("picture.png")
"""

from .cpu import setup

setup()  # before the first large array: a fast matrix product where MLX's own is slow

__all__ = ["Klein", "picture_info", "save_picture"]
__version__ = "0.3.0"


def __getattr__(name: str):
    # The pipeline imports everything else; `python -m kleinlite.book.promote` should not have to.
    if name == "Klein":
        from .pipeline import Klein

        return Klein
    if name in __all__:
        from .drawing import picture_file

        return getattr(picture_file, name)
    raise AttributeError(f"module 'kleinlite' has no attribute {name!r}")
