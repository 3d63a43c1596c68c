"""What an interactive Python shows of the package: by Tab, by Shift-Tab and by help()."""

import inspect
import pydoc
import re
import subprocess
import sys
from collections.abc import MutableMapping

import jedi
import pytest
from IPython.core.completer import IPCompleter, provisionalcompleter
from waiting import HANGS

import kleinlite
from kleinlite import Klein
from kleinlite.errors import USER_ERRORS
from kleinlite.inference.request import Options, check_request

OPTIONS = [*Options.__annotations__]


@pytest.fixture(scope="module")
def klein() -> Klein:
    return Klein.from_pretrained()


def press_tab(line: str, klein: Klein, use_jedi: bool) -> list[str]:
    """What IPython and so Jupyter offers at the end of a line."""
    completer = IPCompleter(namespace={"kleinlite": kleinlite, "klein": klein}, use_jedi=use_jedi)
    with provisionalcompleter():
        return [found.text.lstrip(".") for found in completer.completions(line, len(line))]


@pytest.mark.parametrize("use_jedi", [True, False], ids=["jedi", "without jedi"])
@pytest.mark.parametrize(
    "line, expected",
    [
        ("kleinlite.K", ["Klein"]),
        ("kleinlite.save", ["save_picture"]),
        ("kleinlite.Us", ["UserError"]),
        ('klein("a", st', ["steps=", "strength="]),
        ('klein.stream("a", wi', ["width="]),
        ('klein.stream("a", atten', ["attention_fn="]),
        ('klein.plan_memory("a", neg', ["negative_prompt="]),
        ('kleinlite.Klein.from_pretrained("4b", qu', ["quantize="]),
    ],
)
def test_tab(klein, line, expected, use_jedi):
    found = press_tab(line, klein, use_jedi)
    assert [name for name in found if "(" not in line or name.endswith("=")] == expected


def test_tab_on_what_belongs_to_a_model(klein):
    """These are properties, into which IPython looks by jedi alone."""
    loras, parts = (
        {name for name in press_tab(line, klein, use_jedi=True) if not name.startswith("_")}
        for line in ("klein.loras.", "klein.parts.")
    )
    assert loras == {"add", *(name for name in dir(MutableMapping) if not name.startswith("_"))}, "no internals"
    assert parts == {"configs", "loaded", "load", "release"}


def test_shift_tab(klein):
    """What an editor shows while the arguments are typed."""
    for call in ("klein(", "klein.stream("):
        [signature] = jedi.Interpreter(call, [{"klein": klein}]).get_signatures()
        names = [parameter.name for parameter in signature.params]
        assert [name for name in names if name not in ("prompt", "attention_fn")] == OPTIONS


def test_the_signature_is_what_a_call_takes(klein):
    for call in (klein, klein.stream, klein.plan_memory, Klein.__call__):
        parameters = inspect.signature(call).parameters
        assert [*parameters][-len(OPTIONS) :] == OPTIONS
        assert {parameters[name].kind for name in OPTIONS} == {inspect.Parameter.KEYWORD_ONLY}
        assert parameters["seed"].annotation == Options.__annotations__["seed"]
    defaults = {name: inspect.signature(klein).parameters[name].default for name in OPTIONS} | {"seed": 7}
    assert check_request(klein.info, "a", defaults) == check_request(klein.info, "a", {"seed": 7})


def test_help_says_each_option_in_words():
    told = [line.split(":")[0].split(", ") for line in inspect.getdoc(Klein.__call__).splitlines() if ": " in line]
    assert [name for names in told for name in names if name in OPTIONS] == OPTIONS


def test_help_of_the_package():
    assert {*dir(kleinlite)} == {*kleinlite.__all__, "__version__"}
    assert {error.__name__ for error in USER_ERRORS} | {"HubError"} < {*kleinlite.__all__}
    page = pydoc.plain(pydoc.render_doc(kleinlite))
    assert all(name in page for name in (*kleinlite.__all__, *OPTIONS)) and "__getattr__" not in page


def test_an_import_stays_quick():
    """All of it is looked up when it is asked for."""
    code = "import sys, kleinlite; dir(kleinlite); print('mlx' in sys.modules, 'argparse' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS)
    assert done.stdout.split() == ["False", "False"], done.stderr


TYPED = """
from kleinlite import Klein, UserError
klein = Klein.from_pretrained()
klein("a", steps=4, seed=[1])
reveal_type(klein("a"))
reveal_type(klein(["a"]))
klein("a", steps="four")
klein("a", stepz=4)
for step in klein.stream("a", mask=5):
    pass
klein.plan_memory("a", sede=4)
"""


@pytest.mark.slow
def test_a_type_checker_sees_the_options(tmp_path):
    (tmp_path / "mine.py").write_text(TYPED)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=", "--ignore-missing-imports", "mine.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=HANGS,
    )  # fmt: skip
    assert {int(line) for line in re.findall(r"mine.py:(\d+): error", done.stdout)} == {7, 8, 9, 11}, done.stdout
    assert re.findall(r'Revealed type is "(.*)"', done.stdout) == ["PIL.Image.Image", "list[PIL.Image.Image]"]
