"""The rules of the house that no linter knows: what is public, what an import may do, how a line is written."""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from waiting import HANGS

from kleinlite import Klein
from kleinlite.pipeline import to_images, to_pixels
from kleinlite.sampling import euler

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "kleinlite"
NOTEBOOKS = [*sorted(ROOT.glob("notebooks/*.ipynb")), *sorted(ROOT.glob("notebooks/solutions/*.ipynb"))]
MODULES = sorted(PACKAGE.rglob("*.py"))
CONTRACT = {
    "from_pretrained", "stream", "encode_prompt", "autoencoder", "transformer", "text_encoder", "tokenizer", "info",
    "loras", "plan_memory", "release", "parts",
}  # fmt: skip


def test_the_public_names_of_klein_are_the_contract():
    assert {name for name in dir(Klein) if not name.startswith("_")} == CONTRACT
    assert Klein.__mro__ == (Klein, object), "the call is read in one class"
    assert Path(inspect.getsourcefile(Klein)).name == "klein.py"


ALONE = """
import importlib, os, sys
import mlx.core, mlx.nn, numpy, PIL.Image  # what all of them need, once

for name in sys.argv[1:]:
    child = os.fork()  # each begins where nothing of the package is loaded
    if child == 0:
        try:
            importlib.import_module(name)
        except BaseException as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            os._exit(1)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a fresh start for each module is a fork")
def test_each_module_imports_alone():
    """No circle that only another order of imports hides."""
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in MODULES if path.name != "__main__.py"]
    names = [name.removesuffix(".__init__") for name in names]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *names], capture_output=True, text=True, cwd=ROOT, timeout=HANGS
    )
    assert (done.stdout, done.returncode) == ("", 0), done.stderr


def test_an_import_changes_nothing_of_its_process():
    """No variable, no library of matrix products, no seed: what a host had set is as it was."""
    code = """
import os, sys
import mlx.core as mx
mx.random.seed(3); first = mx.random.normal((2,)).tolist(); mx.random.seed(3)
before = dict(os.environ)
import kleinlite, kleinlite.klein, kleinlite.scenes
maps = open("/proc/self/maps").read() if os.path.exists("/proc/self/maps") else ""
print(dict(os.environ) == before, mx.random.normal((2,)).tolist() == first, "scipy_openblas" in maps)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=HANGS)
    assert done.stdout.split() == ["True", "True", "False"], done.stderr


def hidden_assignments(code: str) -> list[str]:
    """Lines such as `a, b = x, y`. A tuple on the left is for one that comes from the right; an exchange may stand."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        left = node.targets[0]
        if isinstance(left, ast.Tuple) and not any(isinstance(part, ast.Starred) for part in node.value.elts):
            targets = {ast.unparse(part) for part in left.elts}
            read = {
                ast.unparse(part) for value in node.value.elts for part in ast.walk(value) if isinstance(part, ast.expr)
            }
            found += [] if targets & read else [ast.unparse(node)]
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_one_assignment_a_line(path):
    assert not hidden_assignments(path.read_text("utf-8"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_one_assignment_a_line_of_a_notebook(path):
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        code = re.sub(r"^[%!].*", "pass", "".join(cell["source"]), flags=re.M)
        assert cell["cell_type"] != "code" or not hidden_assignments(code)


@pytest.mark.slow
def test_the_field_may_be_one_graph(monkeypatch):
    """On a GPU the field is compiled: the same picture, and one trace for all steps. Tried here on the CPU."""
    klein = Klein.from_pretrained()
    plain = klein("a red star", seed=3, progress=False)
    traces = []
    original = mx.compile

    def compile_and_count(function):
        def counted(*arguments):
            traces.append(1)
            return function(*arguments)

        return original(counted)

    class Gpu:
        def __eq__(self, other):
            return False

    from kleinlite import klein as module

    monkeypatch.setattr(module.mx, "compile", compile_and_count)
    request = module.check_request(klein.info, "a red star", {"seed": 3})
    with monkeypatch.context() as patch:
        patch.setattr(module.mx, "default_device", lambda: Gpu())
        velocity = klein._velocity_field(request)
    x = module.noise(3, 36)
    *_, last = euler(velocity, x, klein.info.family.schedule(4, 36))
    compiled = to_images(klein.autoencoder.decode(last.latents.reshape(1, 6, 6, 128)))[0]
    assert len(traces) == 1
    difference = mx.abs(to_pixels(plain) - to_pixels(compiled)).max().item()
    assert difference * 127.5 <= 1


PROMOTED = sorted(path.name for path in PACKAGE.glob("*.py") if "\nPromoted from " in path.read_text())


@pytest.mark.parametrize("name", PROMOTED)
def test_promoted_modules_open_with_their_letters_and_sources(name):
    """So that a formula can be read, and looked up."""
    opening = (PACKAGE / name).read_text().split('"""')[1]
    assert "\nLetters: " in opening and "\nSources: " in opening


def test_no_chapter_imports_a_later_one():
    """In the order of the notebooks that write them; so each can be read after those before it."""
    order = {}
    for path in PACKAGE.glob("*.py"):
        found = re.search(r"^Promoted from notebooks/(\w+)\.ipynb", path.read_text("utf-8"), re.M)
        if found:
            order[path.stem] = found[1]
    assert len(order) >= 16
    for name, chapter in order.items():
        imported = re.findall(r"^from \.(\w+)", (PACKAGE / f"{name}.py").read_text("utf-8"), re.M)
        later = [other for other in imported if order.get(other, "00") > chapter]
        assert not later, f"chapter {chapter}, {name}, imports {later}"
