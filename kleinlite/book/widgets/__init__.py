"""Things to play with in Jupyter: a playground and three explorers, thin over the rest of the package.

>>> from kleinlite.book import widgets
>>> widgets.playground()

Every function returns a `Panel`. Its controls are in `panel.parts` by name, and do without a browser what they do in
one: set a value, call `click()`. Where no widget can live, on the site or in a notebook that a test runs, a panel is
its `still` picture. Both are outputs of its cell; the controls hide the picture while their kernel lives.
"""

from .explorers import attention_viewer, rope_explorer, schedule_explorer
from .playground import playground

__all__ = ["attention_viewer", "playground", "rope_explorer", "schedule_explorer"]
