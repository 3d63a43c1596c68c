"""Trainings that a chapter repeats with other seeds: the first seed's is run on the page, the others are stored.

    KLEINLITE_RUNS=all python -m tools.notebooks --timeout 3600 run notebooks/14_lora.ipynb

runs all of them and stores them, in up to half an hour.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kleinlite.files import write_json

__all__ = ["repeat"]


def repeat(
    store: str | Path, name: str, run: Callable[[Any], Any], seeds: Sequence[Any], *, live: bool = True
) -> list[Any]:
    """What run(seed) returns for each of the seeds, numbers in lists and dictionaries, under a name in a JSON file.

    The first seed is run if it is to be live, the others are read; with KLEINLITE_RUNS=all every one is run, and
    written. A seed may be a whole setting.
    """
    path = Path(store)
    stored = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if os.environ.get("KLEINLITE_RUNS") == "all":
        stored[name] = [run(seed) for seed in seeds]
        write_json(path, stored)
        return json.loads(json.dumps(stored[name]))
    if len(stored.get(name, ())) != len(seeds):
        raise ValueError(f"{path} has no runs of {name!r} for {len(seeds)} seeds: KLEINLITE_RUNS=all makes them.")
    return [json.loads(json.dumps(run(seeds[0]))), *stored[name][1:]] if live else stored[name]
