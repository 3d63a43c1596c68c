"""Programs that write the tests' reference values: what diffusers, transformers, PEFT and mflux compute."""

from pathlib import Path

GOLDENS = Path(__file__).parents[2] / "tests" / "goldens"
PIPELINES = GOLDENS.parent / "pipelines"
