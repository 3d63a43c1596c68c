"""What notebooks and workbooks import: plots, widgets, the small world, mistakes, holes and their lights."""

from importlib.util import find_spec

for library in ("matplotlib", "ipywidgets", "anywidget"):
    if find_spec(library) is None:
        way_out = 'pip install "kleinlite[book] @ git+https://github.com/kleinlite/kleinlite"'
        raise ImportError(f"kleinlite.book needs {library}: {way_out}")
