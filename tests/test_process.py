"""A program among others: an output that is full, and Ctrl-C at any time."""

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from stand_in_hub import TINY
from waiting import HANGS, wait_until

from kleinlite.cli import main
from kleinlite.cli.shared import ctrl_c

GENERATE = f"{sys.executable} -m kleinlite generate 'a red circle' --model {TINY} --size 32x32 --seed 1"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shell(command: str) -> subprocess.CompletedProcess:
    return subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, timeout=HANGS)


def test_a_full_output_is_a_sentence(here):
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    done = shell(f"{GENERATE} -o x.png >/dev/full")
    assert (done.returncode, done.stderr) == (2, "kleinlite: No space left on device.\n")
    assert (here / "x.png").exists()


# It presses Ctrl-C when the module is asked for whose name it is given: at a place that does not depend on the clock.
PRESS = """
import os, signal, sys

where = sys.argv.pop(1)

class Press:
    def find_spec(self, name, path=None, target=None):
        if name == where:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

from kleinlite import __main__

sys.meta_path.insert(0, Press())
sys.exit(__main__.main())
"""


@pytest.mark.parametrize("module", ["mlx", "kleinlite.transformer", "PIL.PngImagePlugin"])
def test_ctrl_c_while_modules_are_read(module, here):
    command = [sys.executable, "-c", PRESS, module, "generate", "a red circle", "--model", str(TINY), "-o", "x.png"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
    assert (done.returncode, done.stderr, done.stdout) == (130, "kleinlite: stopped.\n", "")
    assert os.listdir(here) == []


def test_ctrl_c_while_it_draws(here):
    command = [sys.executable, "-m", "kleinlite", "generate", "a red circle", "--steps", "900", "--watch", "w.png"]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until((here / "w.png").exists, "the first preview")
    program.send_signal(signal.SIGINT)
    out, err = program.communicate(timeout=HANGS)
    ends = (
        (-signal.SIGINT, "(nano .*\n)?"),
        (130, "(nano .*\n)?kleinlite: stopped.\n"),
    )  # while it draws, while it saves
    assert out == "" and any(program.returncode == code and re.fullmatch(words, err) for code, words in ends), err
    assert os.listdir(here) == ["w.png"]


# A step that takes a minute stands for one in MLX, during which Python hears of nothing.
DEAF = """
import sys, time
from kleinlite import __main__, klein

def deaf(*_):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            print("begun", flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            pass
    raise SystemExit("It went on.")

klein.euler = deaf
sys.exit(__main__.main())
"""


def test_ctrl_c_waits_for_no_step(here):
    command = [sys.executable, "-c", DEAF, "generate", "a red circle", "--model", str(TINY), "-o", "x.png"]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert program.stdout.readline() == "begun\n"
    program.send_signal(signal.SIGINT)
    _, err = program.communicate(timeout=HANGS)
    assert (program.returncode, err) == (-signal.SIGINT, "") and os.listdir(here) == []


def test_a_command_in_a_thread_draws(here, capsys):
    """As a server calls it: only the main thread can catch signals."""
    with ThreadPoolExecutor(1) as pool:
        words = ["generate", "a red circle", "--model", str(TINY), "--size", "32x32", "-o", "x.png"]
        assert pool.submit(main, words).result() == 0
    assert (here / "x.png").exists()


def test_ctrl_c_is_given_back():
    """One that calls the command line, and goes on, hears of it as before."""
    with pytest.raises(KeyboardInterrupt):
        with ctrl_c(at_once=True):
            assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()


BARE = """
import sys
from types import SimpleNamespace

sys.modules["ipywidgets"] = None  # as after a plain install
kernel = SimpleNamespace(config={"IPKernelApp": {}})  # by which tqdm knows a notebook, in one version or another
sys.modules["IPython"] = SimpleNamespace(get_ipython=lambda: kernel)
sys.modules["ipykernel.zmqshell"] = kernel
"""


def in_a_bare_notebook(code: str, **environment: str) -> str:
    """What a notebook without widgets shows in red."""
    command = [sys.executable, "-c", BARE + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANGS, env=os.environ | environment).stderr


def test_tqdms_warning_is_not_shown(tmp_path):
    """Neither above the first picture nor above a download."""
    assert "IProgress not found" in in_a_bare_notebook("import tqdm.auto"), "which it would be"
    red = in_a_bare_notebook("from kleinlite import Klein; Klein.from_pretrained()('a', steps=1)")
    assert "loading" in red and "IProgress" not in red
    code = "from kleinlite import Klein; Klein.from_pretrained('no/such')"
    red = in_a_bare_notebook(code, HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path))
    assert "HubError" in red and "IProgress" not in red


def test_the_book_says_what_it_needs():
    code = f"{BARE}import kleinlite.book.plots"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS)
    assert done.stderr.splitlines()[-1].startswith('ImportError: kleinlite.book needs ipywidgets: pip install "klein')


def test_help_loads_no_mlx():
    code = "import sys\nfrom kleinlite.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "print('loaded:', [m for m in ('mlx', 'numpy', 'PIL', 'filelock', 'tqdm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS)
    assert done.stdout.endswith("loaded: []\n")
