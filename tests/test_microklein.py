"""microklein.py against the package and against diffusers, on MLX and on NumPy; and that it stays one page.

The README in `pipelines` says what is stored there.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy
import pytest
from golden_tools import LOOSE, check
from PIL import Image
from waiting import HANGS

import microklein
from kleinlite import Klein

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "microklein.py"
NANO = ROOT / "kleinlite" / "nano" / "weights"
CRITTERS = ROOT / "kleinlite" / "critters" / "weights"
TINY = Path(__file__).parent / "pipelines" / "tiny"
META = json.loads((TINY / "meta.json").read_text(encoding="utf-8"))
PROMPT = "a red house"

# What a machine without MLX and without this package would do.
ALONE = """
import runpy, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("mlx", "kleinlite"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse())
page = runpy.run_path("microklein.py", run_name="__main__")
assert page["xp"].__name__ == "numpy"
assert not {"mlx", "kleinlite"} & set(sys.modules)
"""


@pytest.fixture(params=[mx, numpy], ids=["mlx", "numpy"])
def library(request, monkeypatch):
    monkeypatch.setattr(microklein, "xp", request.param)
    return request.param


@cache
def klein(folder: Path) -> Klein:
    return Klein.from_pretrained(folder, dtype=mx.float32)


@cache
def expected() -> dict[str, mx.array]:
    return mx.load(str(TINY / "expected.safetensors"))


def noise(n: int, seed: int = 5) -> numpy.ndarray:
    """What microklein begins with: `Klein` draws other noise for the same seed, and is given this."""
    return numpy.random.default_rng(seed).standard_normal((n, 128), dtype=numpy.float32)


def assert_same_picture(a, b) -> None:
    """At most one level apart, and that where two programs round to different sides: seldom."""
    a, b = numpy.array(a), numpy.array(b)
    assert a.shape == b.shape and a.dtype == b.dtype == numpy.uint8
    apart = numpy.abs(a.astype(int) - b.astype(int))
    assert apart.max() <= 1 and (apart > 0).mean() < 0.01


def copy_of_tiny(folder: Path) -> Path:
    return shutil.copytree(TINY, folder / "model", ignore=shutil.ignore_patterns("base", "expected*", "meta*"))


def edit_weights(folder: Path, factors: dict[str, float]) -> None:
    [file] = folder.glob("*.safetensors")
    arrays = {name: w * factors.get(name, 1) for name, w in mx.load(str(file)).items()}
    assert factors.keys() <= arrays.keys()
    mx.save_safetensors(str(file), arrays)


def edit_json(path: Path, **changes) -> None:
    values = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}), encoding="utf-8")


def run(*command, cwd: Path) -> str:
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=HANGS
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---------------------------------------------------------------- the same pictures


@pytest.mark.parametrize(
    "folder, steps, size",
    [(NANO, 4, None), (NANO, 2, 64), (CRITTERS, 2, None), (TINY, 4, None)],
    ids=["nano", "nano-64", "critters", "tiny"],
)
def test_draws_what_klein_draws(library, folder, steps, size):
    side = size or klein(folder).info.size
    start = mx.array(noise((side // 16) ** 2)[None])
    wish = {"width": side, "height": side, "steps": steps, "noise": start, "progress": False}
    ours = microklein.draw(folder, PROMPT, seed=5, steps=steps, size=size)
    assert_same_picture(ours, klein(folder)(PROMPT, **wish))


def test_small_numbers(library, tmp_path):
    """Where a wrong eps shows: ahead of each kind of norm, and in the latents' variance."""
    folder = copy_of_tiny(tmp_path)
    edit_weights(folder / "vae", {"bn.running_var": 1e-5, "decoder.conv_in.weight": 1e-2, "decoder.conv_in.bias": 0})
    edit_weights(folder / "transformer", {"x_embedder.weight": 1e-4, "context_embedder.weight": 1e-4})
    theirs = Klein.from_pretrained(folder, dtype=mx.float32)(PROMPT, noise=mx.array(noise(9)[None]), progress=False)
    assert_same_picture(microklein.draw(folder, PROMPT, seed=5), theirs)


def test_seed(library):
    three, four = (microklein.draw(TINY, PROMPT, seed=seed, steps=1, size=32) for seed in (3, 4))
    assert numpy.array_equal(three, microklein.draw(str(TINY), PROMPT, steps=1, size=32, noise=noise(4, seed=3)))
    assert not numpy.array_equal(three, four)


@pytest.mark.parametrize("name", ["t2i", "t2i_unicode"])
def test_agrees_with_diffusers(library, name):
    """Part by part, on pictures that are not square."""
    wish, want = META["runs"][name], expected()
    trajectory, image = want[f"{name}.trajectory"], want[f"{name}.image"]
    gh, gw = wish["height"] // 16, wish["width"] // 16
    txt = microklein.encode(TINY, wish["prompt"])
    check(mx.array(txt)[None], want[f"prompt{META['prompts'].index(wish['prompt'])}.embeds"])
    x = microklein.denoise(TINY, numpy.array(trajectory[0]), txt, gh, gw, wish["steps"])
    check(mx.array(x), trajectory[-1], LOOSE)
    pixels = microklein.decode(TINY, x, gh, gw)
    check(mx.array(255 * (pixels / 2 + 0.5).clip(0, 1)), image.astype(mx.float32), 1.0, absolute=True)
    assert {y.dtype for y in (txt, x, pixels)} == {numpy.dtype("float32")}  # NumPy would slip into float64


def test_released_defaults(library, tmp_path):
    """Where an index names no taps and no length: layers 9, 18 and 27, and 512 tokens."""
    folder = copy_of_tiny(tmp_path)
    edit_json(folder / "model_index.json", text_encoder_out_layers=None, max_sequence_length=None)
    edit_json(folder / "text_encoder" / "config.json", num_hidden_layers=28, layer_types=None)
    [file] = (folder / "text_encoder").glob("*.safetensors")
    few = mx.load(str(file))
    many = {name: w for name, w in few.items() if ".layers." not in name}
    for i in range(28):
        many |= {f"model.layers.{i}.{k}": 0.5 * w for k, w in microklein.under(few, f"model.layers.{i % 5}.").items()}
    mx.save_safetensors(str(file), many)
    txt = microklein.encode(folder, PROMPT)
    assert txt.shape == (512, 48)
    check(mx.array(txt)[None], Klein.from_pretrained(folder, dtype=mx.float32).encode_prompt(PROMPT))


@pytest.mark.parametrize(
    "n, want",
    [
        (1024, [1, 0.9580853, 0.8839819, 0.7174966, 0]),
        (4096, [1, 0.9673840, 0.9081439, 0.7671999, 0]),
        (4400, [1, 0.9088826, 0.7687834, 0.5256879, 0]),  # large pictures have a formula of their own
    ],
)
def test_schedule(n, want):
    assert microklein.schedule(4, n) == pytest.approx(want, abs=2e-7)


# ---------------------------------------------------------------- the same weights


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32], ids=["bfloat16", "float16", "float32"])
def test_shards(dtype, tmp_path, monkeypatch):
    """One file or several, in any type: the same numbers by MLX and by our own reader."""
    [file] = (TINY / "transformer").glob("*.safetensors")
    arrays = {name: w.astype(dtype) for name, w in mx.load(str(file)).items()}
    for i in range(2):
        shard = {name: arrays[name] for name in sorted(arrays)[i::2]}
        mx.save_safetensors(str(tmp_path / f"m-{i + 1:05}-of-00002.safetensors"), shard, metadata={"format": "pt"})
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    read = []
    for library in (mx, numpy):
        monkeypatch.setattr(microklein, "xp", library)
        weights, _ = microklein.load(tmp_path)
        read.append({name: numpy.array(microklein.float32(w)) for name, w in weights.items()})
    assert read[0].keys() == read[1].keys() == arrays.keys()
    for name, w in arrays.items():
        want = numpy.array(w.astype(mx.float32))
        assert read[1][name].dtype == numpy.float32
        assert numpy.array_equal(read[0][name], want) and numpy.array_equal(read[1][name], want)


def test_too_long_a_prompt():
    with pytest.raises(AssertionError, match="tokens, and this model reads 32"):
        microklein.encode(NANO, "red " * 40)


# ---------------------------------------------------------------- by itself


def test_without_mlx_and_kleinlite(tmp_path):
    shutil.copy(PAGE, tmp_path)
    run("-I", "-c", ALONE, PROMPT, "--folder", NANO, "--seed", 7, cwd=tmp_path)
    assert_same_picture(Image.open(tmp_path / "microklein.png"), microklein.draw(NANO, PROMPT, seed=7))


def test_command_line(tmp_path):
    assert run(PAGE, PROMPT, cwd=tmp_path) == "Wrote microklein.png\n"
    assert Image.open(tmp_path / "microklein.png").size == (96, 96)
    run(PAGE, PROMPT, "--folder", TINY, "--seed", 1, "--steps", 2, "--size", 64, cwd=tmp_path)
    picture = Image.open(tmp_path / "microklein.png")
    assert_same_picture(picture, microklein.draw(TINY, PROMPT, seed=1, steps=2, size=64))


# ---------------------------------------------------------------- one page


def test_one_page():
    text = PAGE.read_text(encoding="utf-8")
    lines, nodes = text.splitlines(), list(ast.walk(ast.parse(text)))
    assert sum(bool(line.strip()) for line in lines) <= 200
    assert max(map(len, lines)) <= 110
    assert not [node.lineno for node in nodes if isinstance(node, ast.Lambda)]
    starts = [node.lineno for node in nodes if isinstance(node, ast.stmt)]
    assert len(starts) == len(set(starts)), "two statements in a line"
    roots = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    roots |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {r.partition(".")[0] for r in roots} <= sys.stdlib_module_names | {"numpy", "mlx", "tokenizers", "PIL"}


def test_the_walk_shows_every_part():
    headers = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("# ---- ")]
    assert [int(line[7:].partition(".")[0]) for line in headers] == list(range(1, len(headers) + 1))
    walk = (ROOT / "notebooks" / "microklein.md").read_text(encoding="utf-8").splitlines()
    shown = [line for line in walk if line.startswith("{{#part")]
    assert shown == [f"{{{{#part microklein.py {i + 1}}}}}" for i in range(len(headers))]
