"""What is no mistake of the reader's keeps its traceback."""

from pathlib import Path

import mlx.core as mx
import pytest
from command import PROMPT, run
from mlx.utils import tree_flatten

from kleinlite import klein as klein_module

# ---------------------------------------------------------------- what is no mistake of the reader's


@pytest.mark.parametrize(
    "bug",
    [
        lambda: [].gone,
        lambda: len(3),
        lambda: {}["x"],
        lambda: int("x"),  # a ValueError, but nobody's sentence
        lambda: mx.zeros(2) @ mx.zeros(3),
        lambda: mx.eval(tree_flatten(None)[0][1]),
    ],
)
def test_a_bug_keeps_its_traceback(bug, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(klein_module, "euler", lambda *_: bug())
    with pytest.raises((AttributeError, TypeError, LookupError, ValueError)):
        run("generate", PROMPT, "--model", tiny)
    assert not list(tmp_path.glob("*.png"))


def test_a_call_that_fails_in_the_package_is_a_bug(tiny, tmp_path, monkeypatch):
    scope = {}  # no sentence of ours: nobody wrote a `raise`
    exec(compile("def euler(*_): int('x')", Path(klein_module.__file__).with_name("x.py"), "exec"), scope)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(klein_module, "euler", scope["euler"])
    with pytest.raises(ValueError, match="invalid literal"):
        run("generate", PROMPT, "--model", tiny)
