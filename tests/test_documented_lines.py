"""Every line that the documents tell a reader to type is run as it stands there, or else is at least one that exists.

Tiny pipelines behind a stand-in for the hub are "4b" and "9b". What needs a Mac, the real hub, another program or hours
is in a list with the reason; the lists may name nothing that the documents no longer say.
"""

import ast
import importlib
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from documented_lines import ROOT, python_blocks, shell_lines
from stand_in_hub import Repository, released

from kleinlite import Klein, save_picture
from kleinlite.cli import main, make_parser
from kleinlite.models.checkpoint import resolve_model
from kleinlite.models.registry import MODELS
from kleinlite.nano.crosses import cross
from recipe.shapes import WORLD

LINES = sorted({line.text for line in shell_lines()})
PROJECT = (ROOT / "pyproject.toml").read_text("utf-8")
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")

# Lines that end with a plan of their training, since the training itself takes minutes to hours.
PLANNED = ("train-lora",)
# Lines of other programs, which nothing here can run or check.
FOREIGN = {
    "git clone --depth 1 https://github.com/kleinlite/kleinlite && cd kleinlite": "the network",
    "git checkout :/notebooks/00_idea.ipynb": "git's own",
    "git pull": "git's own",
    "pip install git+https://github.com/kleinlite/kleinlite": "the network",
    "pip install mlx": "the network",
    'pip install "mlx[cpu]"': "the network",
    "source .venv/bin/activate": "it is made by make",
    "hf upload YOU/klein-4bit klein-4bit": "the real hub",
    "mlx.distributed_config --backend ring --over ethernet --hosts mac-1,mac-2 --output-hostfile macs.json": "two Macs",
    "mlx.distributed_config --backend jaccl --over thunderbolt --hosts mac-1,mac-2 --auto-setup --output-hostfile "
    "macs.json": "two Macs",
    "python server.py 8000": "test_serving.py runs it",
}
# Python blocks that are not run, by a line of theirs.
NOT_RUN_BLOCKS = {
    "from huggingface_hub import parse_safetensors_file_metadata": "it asks the hub",
    "def split_heads(x: mx.array, count: int, heads: int) -> list[mx.array]:": "a hole of the workbook",
    "!git clone -q --depth 1 https://github.com/kleinlite/kleinlite /content/kleinlite": "Colab",
    "import gradio": "Gradio is not among ours",
    '"""Answers /?prompt=a+red+star&seed=7 with a PNG, or with a sentence."""': "test_serving.py runs it",
}


def inner(line: str) -> list[str]:
    """The words of a line, without what only says where it runs: variables and `mlx.launch … --`."""
    words = shlex.split(line.replace("…", " … "))
    while words and re.fullmatch(r"[A-Z_]+=\S+", words[0]):
        del words[0]
    if words[0] == "mlx.launch" and "--" in words:
        words = words[words.index("--") + 1 :]
    words[0] = words[0].rpartition("/")[2]
    if words[0] == "pytest":
        words[:1] = ["python", "-m", "pytest"]
    if words[:3] == ["python", "-m", "kleinlite"]:
        words[:3] = ["kleinlite"]
    return words


def is_mention(words: list[str]) -> bool:
    """Whether a line of `kleinlite` only names a command, or an option of it: `kleinlite quantize`."""
    if len(words) < 2 or words[1].startswith("-"):
        return True
    parser = make_parser()._subparsers._group_actions[0].choices.get(words[1])
    assert parser, f"there is no command {words[1]}"
    needs = any(action.required for action in parser._actions) or words[1] == "generate"
    return needs and all(word in parser._option_string_actions for word in words[2:])


KLEINLITE = [line for line in LINES if inner(line)[0] == "kleinlite"]
RUN = [line for line in KLEINLITE if "…" not in line and not is_mention(inner(line))]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """What the lines presuppose: pictures, adapters, prompts, pictures to learn from, a model trained by speedrun."""
    folder = tmp_path_factory.mktemp("documents")
    klein = Klein.from_pretrained()
    house = klein("a red house under a yellow sun", seed=7, progress=False)
    save_picture(house, folder / "house.png")
    for name in ("FILE", "a-red-circle-above-a-blue-square-7.png"):
        shutil.copyfile(folder / "house.png", folder / name)
    (folder / "wishes.txt").write_text("a red circle\na blue star\n")
    for name in ("arrows", "my-dog"):
        (folder / name).mkdir()
        for seed in range(2):
            picture, caption = cross(seed)
            picture.save(folder / name / f"{seed}.png")
            (folder / name / f"{seed}.txt").write_text(caption)
    bundled = ROOT / "kleinlite" / "nano" / "weights" / "loras"
    for name in ("arrow.safetensors", "dog.safetensors", "my-dog.safetensors"):
        shutil.copy(bundled / "cross.safetensors", folder / name)
    shutil.copytree(resolve_model("nano"), folder / "speedrun" / "model")
    return folder


@pytest.fixture
def typed(prepared, tmp_path, monkeypatch, hub) -> Path:
    """A folder with all of that, and a hub that has the models of the documents: all of them are tiny."""
    folder = Path(shutil.copytree(prepared, tmp_path / "here"))
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def models(hub, monkeypatch) -> None:
    """The stand-in hub has "9b", too; both read longer prompts than the tiny model does."""
    files = released()
    index = json.loads(files["model_index.json"]) | {"max_sequence_length": 128}
    files["model_index.json"] = json.dumps(index).encode()
    for name in ("4b", "9b"):
        hub.repositories[MODELS[name].repo] = Repository(files)


@pytest.mark.parametrize("line", RUN)
def test_it_runs(line, typed, models, capsys):
    words = inner(line)[1:]
    if "klein-4bit" in words and "--model" in words:  # which the line before it has written
        assert main(["quantize", "4b", "klein-4bit", "--bits", "4"]) == 0
    words = [{"NAME": "4b"}.get(word, word) for word in words]
    if "--model" in words and "--lora" in words:  # an adapter that was made for nano
        words[words.index("--model") + 1] = "nano"
    if words[0] in PLANNED:
        words.append("--plan")
    try:
        status = main(words)
    except SystemExit as end:  # of --help
        status = end.code
    assert not status, capsys.readouterr().err


# ---------------------------------------------------------------- make, Python's programs, others


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M))


@pytest.mark.parametrize("line", [line for line in LINES if inner(line)[0] == "make"])
def test_make_knows_it(line):
    said = re.search(r"^SAID := (.*)", MAKEFILE, re.M)[1].split()
    for word in inner(line)[1:]:
        variable, equals, _ = word.partition("=")
        assert variable in ([*said, "MLX", "SECONDS", "PYTHON"] if equals else make_targets()), word


@pytest.mark.parametrize("line", [line for line in LINES if inner(line)[0] == "python" and line not in FOREIGN])
def test_the_program_is_there(line):
    """A module or a file that can be started, its options in its text, and files that are there."""
    words = inner(line)[1:]
    if not words:
        return
    if words[0] == "-m":
        spec = importlib.util.find_spec(words[1])
        assert spec and spec.origin, f"there is no module {words[1]}"
        program = Path(spec.origin)
        if program.name == "__init__.py":
            program = program.with_name("__main__.py")
    else:
        program = ROOT / words[0]
    assert program.is_file()
    text = program.read_text("utf-8")
    if program.name == "evaluate.py":
        text += "".join(f'"--{name}"' for name in WORLD.reports)  # what a world asks for itself
    for word in words[2:] if words[0] == "-m" else words[1:]:
        if word.startswith("--"):
            assert f'"{word}"' in text, f"{program.name} has no option {word}"
        elif "/" in word:
            assert (ROOT / word).exists(), word


@cache
def launch_help() -> str:
    program = Path(sys.executable).with_name("mlx.launch")
    return subprocess.run([program, "--help"], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("mlx.launch ")])
def test_mlx_launch_has_the_options(line):
    before = shlex.split(line)[1 : shlex.split(line).index("--")]
    for option in [word for word in before if word.startswith("-")]:
        assert re.search(rf"(^|[ ,]){re.escape(option)}\b", launch_help(), re.M), option


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("pip install -e ")])
def test_the_extra_is_there(line):
    for extra in re.findall(r"\[(.*)\]", line)[0].split(","):
        assert re.search(rf"^{extra} = \[", PROJECT, re.M)


def test_every_line_is_tried_or_listed():
    ours = ("kleinlite", "make", "python", "mlx.launch")
    rest = {line for line in LINES if inner(line)[0] not in ours and not line.startswith("pip install -e ")}
    rest = {line for line in rest if len(shlex.split(line)) > 1 and "…" not in inner(line)}
    assert rest - set(FOREIGN) == set()
    assert set(FOREIGN) - set(LINES) == set(), "no longer in the documents"
    addresses = re.findall(r"(?:git\+|--depth 1 )(https://\S+)", "\n".join(FOREIGN))
    assert set(addresses) == set(re.findall(r'^Repository = "(.+)"', PROJECT, re.M))


# ---------------------------------------------------------------- Python

BLOCKS = python_blocks()


def reason(block: str) -> str | None:
    return next((why for line, why in NOT_RUN_BLOCKS.items() if line in block.splitlines()), None)


def test_blocks_that_are_not_run_are_still_there():
    said = {line for block in BLOCKS for line in block.text.splitlines()}
    assert set(NOT_RUN_BLOCKS) - said == set()


@pytest.mark.parametrize("where", sorted({block.where for block in BLOCKS if not reason(block.text)}))
def test_python_runs(where, models, tmp_path, monkeypatch, capsys):
    """A page's blocks one after the other, as a reader goes through it."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in BLOCKS:
        if block.where == where and not reason(block.text):
            exec(compile(block.text, where, "exec"), names)
    if "house.png" in "".join(block.text for block in BLOCKS if block.where == where):
        assert (tmp_path / "house.png").exists()


def test_readme_keeps_the_promise_of_its_comment(tmp_path, monkeypatch):
    """Its lines save a picture that the command in the comment draws again."""
    monkeypatch.chdir(tmp_path)
    [block] = [block.text for block in BLOCKS if block.where == "README.md"]
    [command] = re.findall(r"# `(kleinlite generate --like [^`]+)` draws it again", block)
    exec(compile(block, "README.md", "exec"), {})
    assert main([*shlex.split(command)[1:], "-o", "again.png"]) == 0
    assert Path("again.png").read_bytes() == Path("house.png").read_bytes()


@pytest.mark.parametrize("block", [b.text for b in BLOCKS if reason(b.text)], ids=lambda text: text.splitlines()[0])
def test_what_is_not_run_imports_what_there_is(block):
    """Of ours; its text is Python, if it is not Jupyter's."""
    if block.startswith("!"):
        return
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kleinlite"):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names)


def test_readme_lines_have_types(tmp_path):
    """Whoever types README's lines into a typed program meets no error, neither wrong nor true."""
    lines = tmp_path / "readme.py"
    lines.write_text("\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S)))
    assert "Klein.from_pretrained" in lines.read_text()
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--follow-imports=silent",
        f"--cache-dir={tmp_path}",
        str(lines),
    ]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
