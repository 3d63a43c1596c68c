"""Pages of the site that are made by a program: the API reference, parity. (machines.md: test_memory.py.)"""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import api
import griffe
import mlx.core as mx
import pytest

LINES = griffe.LinesCollection()
ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"

# ---------------------------------------------------------------- the API reference


@pytest.fixture(scope="module")
def reference() -> str:
    return api.render_reference(ROOT / "kleinlite")


def test_klein_comes_first_and_is_complete(reference):
    first = re.findall(r"^## .*", reference, re.M)
    assert first[:2] == ["## `Klein` {#klein}", "## All modules"]
    klein = reference.split("## All modules")[0]
    for piece in (
        "Klein.from_pretrained(",
        "klein.stream(",
        "klein(prompt: str",
        "- <code>negative_prompt: str</code>",
        "- <code>seed",
    ):
        assert piece in klein
    assert reference.count("# `Klein`") == 1, "once is enough"


def test_every_public_name_has_a_heading(reference):
    """What a promoted module says is public, and nothing twice."""
    for chapter in sorted(NOTEBOOKS.glob("[0-9]*.ipynb")):
        module = ROOT / "kleinlite" / f"{chapter.stem.split('_', 1)[1]}.py"
        if not module.exists():
            continue
        names = importlib.import_module(f"kleinlite.{module.stem}").__all__
        assert f"Built in [chapter {int(chapter.name[:2])}]({chapter.name})" in reference
        for name in names:
            anchor = "klein" if name == "Klein" else f"{module.stem}-{name}"
            assert reference.count(f"# `{name}` {{#{anchor}}}\n") == 1, name
    headings = re.findall(r"^#+ .*\{#(\S+)\}$", reference, re.M)
    assert len(set(headings)) == len(headings)


def test_rooms_are_told_about(reference):
    """A module of a room is found by its whole path, and so are its names."""
    assert "\n## cpu.operations {#cpu-operations}\n\nIn [`kleinlite/cpu/operations.py`]" in reference
    assert "\n### `softmax` {#cpu-operations-softmax}\n" in reference
    assert "[softmax](#cpu-operations-softmax)" in reference.split("## transformer")[0]


def test_links_within_the_reference_lead_somewhere(reference):
    known = set(re.findall(r"\{#(\S+)\}$", reference, re.M)) | set(re.findall(r'\bid="(\S+?)"', reference))
    assert set(re.findall(r"\]\(#(.+?)\)", reference)) <= known


def test_programs_are_told_about_but_not_taken_apart(reference):
    command = reference.split("\n## cli {#cli}")[1].split("\n## ")[0]
    assert "`kleinlite generate`" in command and "###" not in command


def signature(code: str) -> str:
    """What the page shows of the one definition in this code."""
    module = griffe.visit("module", filepath=Path("module.py"), code=code, lines_collection=LINES)
    LINES[Path("module.py")] = code.splitlines()
    ((name, definition),) = module.members.items()
    return api.format_definition(definition, name)


@pytest.mark.parametrize(
    "code, expected",
    [
        ("def f(a, b: int = 1, *, c='x', **d) -> 'mx.array': ...", 'f(a, b: int = 1, *, c="x", **d) -> mx.array'),
        ("def f(a, /, *b: int): ...", "f(a, /, *b: int)"),
        ("def f(a, /, b=1, *, c): ...", "f(a, /, b=1, *, c)"),
        ("def f(*a, b): ...", "f(*a, b)"),
        ("class C(nn.Module):\n  def __init__(self, c: int): ...", "class C(c: int)"),
        ("@dataclass\nclass C:\n  x: int = 1  # one\n  _y: int = 2", "@dataclass\nclass C:\n  x: int = 1  # one"),
        ("class C(Exception):\n  pass", "class C(Exception)"),
    ],
)
def test_signatures(code, expected):
    assert signature(code) == expected


def test_long_signatures_are_broken_into_lines():
    text = signature(f"def f({', '.join(f'argument_{i}: int = {i}' for i in range(9))}) -> int: ...")
    assert text.startswith("f(\n    argument_0: int = 0,\n") and text.endswith("= 8,\n) -> int")
    assert max(map(len, text.splitlines())) <= api.WIDTH


def test_docstrings_become_markdown():
    doc = """Turns x_0*2 into <b>; see `other` and `that`.

    steps, seed: whole numbers
    that count.
    Raises ValueError otherwise.

    >>> f(1)

        indented
    """
    text = api.to_markdown(doc, {"other": "m-other"}, {"steps": ": int", "seed": ""})
    assert text.split("\n\n") == [
        r"Turns x\_0\*2 into \<b\>; see [`other`](#m-other) and `that`.",
        "- <code>steps, seed: int</code>: whole numbers\n  that count.\n- Raises ValueError otherwise.",
        "```python\n>>> f(1)\n```",
        "```text\nindented\n```",
    ]


# ---------------------------------------------------------------- parity


@pytest.mark.slow
@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="the page's numbers are those of a CPU")
def test_parity_page_does_not_promise_too_much():
    """Runs the comparisons again. More than three times the stated difference, or another list of them, fails."""
    command = [sys.executable, "-m", "tools.write_parity", "--check"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, f"python -m tools.write_parity writes the page again.\n{result.stdout[-2000:]}"


def test_parity_check_notices():
    from tools.write_parity import number, promises_too_much

    assert [number(x) for x in ([], [0.0], [1e-6], [1.2e-6, 2e-9], [9.5e-7])] == [
        "equal",
        "equal",
        "1e-6",
        "2e-6",
        "1e-6",
    ]
    page = "| compared | ordinary | small |\n|---|--:|--:|\n| norm | 2e-7 | equal |\n"
    assert promises_too_much(page, page.replace("2e-7", "9e-7")) == []
    assert promises_too_much(page, page.replace("2e-7", "2e-6")) == ["norm: the page says 2e-7, now it is 2e-6"]
    assert promises_too_much(page, page.replace("equal", "2e-6")) == ["norm: the page says equal, now it is 2e-6"]
    rough = page.replace("2e-7", "1e-5")
    assert promises_too_much(rough, page.replace("2e-7", "3e-5")) == []
    assert promises_too_much(rough, page.replace("2e-7", "4e-5")) == ["norm: the page says 1e-5, now it is 4e-5"]
    assert promises_too_much(page, page.replace("norm", "scale")) != []
