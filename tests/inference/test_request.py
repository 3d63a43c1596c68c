"""The gate for arguments: what is refused, and with which sentence; nothing is loaded for it, and nothing passes it."""

import copy
import json
import math
import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given, settings, strategies as st
from peak_memory import peak_memory
from PIL import Image
from stand_in_hub import TINY

from kleinlite import picture_info, save_picture
from kleinlite.inference.request import Request, check_request
from kleinlite.klein import Klein
from kleinlite.models.adapters import find_adapter
from kleinlite.models.checkpoint import ModelInfo

DISTILLED = ModelInfo("nano", True, size=96, max_length=32)
BASE = ModelInfo("nano-base", False, size=96, max_length=32)
PICTURE = Image.new("RGB", (64, 64))
BLANKS = json.loads((Path(__file__).parents[1] / "blanks.json").read_text(encoding="utf-8"))  # the page Draw's as well


@pytest.fixture(scope="module")
def klein() -> Klein:
    return Klein.from_pretrained(TINY)


WRONG = {
    "prompt": [None, 5, b"a", [], (), ["a", 5], [["a"]], {"a": 1}, {"a"}, "\udcff", ["a", "\ud800"]],
    "images": [5, "a.png", ["a.png"], [None], {"a": PICTURE}, [[PICTURE]], mx.zeros((64, 64, 3))],
    "width": ["32", 32.0, math.nan, [32], -16, 0, 8, 100],
    "steps": ["4", 2.5, [4], 0, -1, 1001],
    "guidance": ["4", [4], 4.0, math.nan, math.inf, -1, 1e39, 2 + 1j],
    "negative_prompt": [5, ["a"], "\udcff", "blue"],
    "seed": ["7", 1.5, math.nan, ["1"], [1.5], [], [1, 2], -1, 2**64, {1: 2}, {1}, range(10**12)],
    "noise": ["x", 5, [[1]], PICTURE, {"a": 1}, mx.zeros((1, 4, 127)), mx.zeros((2, 4, 128)), mx.zeros((4, 128))],
}
CASES = [(name, value) for name, values in WRONG.items() for value in values]


@pytest.mark.parametrize("name, value", CASES, ids=lambda x: x if isinstance(x, str) else type(x).__name__)
def test_wrong_arguments(klein, name, value):
    arguments = {"prompt": "a", "width": 32, "height": 32, "progress": False} | {name: value}
    for ask in (klein, klein.stream):
        with pytest.raises(ValueError) as told:
            ask(**arguments)
        sentence = str(told.value)
        assert sentence[-1] in ".?" and 20 < len(sentence) < 300 and "\n" not in sentence
    assert klein.parts.loaded == {}, "nothing is read for it"


@pytest.mark.parametrize(
    "wrong",
    [
        {"quantize": "lots"}, {"quantize": 7},
        {"quantize": True}, {"dtype": "float33"}, {"dtype": mx.int8}, {"dtype": 5}, {"parts": 5},
        {"parts": ["4b"]}, {"parts": {"autoencoder": 5}}, {"parts": {"autoencoder": None}},
        {"loras": "cross"}, {"loras": [5]},
        {"loras": [("cross", "1")]}, {"loras": [("cross", math.nan)]},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_arguments_of_from_pretrained(wrong):
    with pytest.raises(ValueError) as told:
        Klein.from_pretrained(**{"name": TINY} | wrong)
    assert str(told.value).endswith(".") and "\n" not in str(told.value)


@pytest.mark.parametrize("model", ["4b", 4, {}])
def test_a_name_is_no_model(model):
    with pytest.raises(ValueError, match=r"has no model: say Klein.from_pretrained\("):
        Klein(model)
    with pytest.raises(ValueError, match=re.escape("Klein('4b') has no model: say Klein.from_pretrained('4b').")):
        Klein("4b")
    with pytest.raises(ValueError, match=re.escape("Klein() has no model: say Klein.from_pretrained().")):
        Klein()


def test_options_of_other_libraries_where_a_model_is_opened():
    for name, way_out in {"torch_dtype": "say dtype", "device": "say nothing, since", "vae": "say parts="}.items():
        with pytest.raises(TypeError, match=f"from_pretrained has no option {name!r}: {way_out}"):
            Klein.from_pretrained(TINY, **{name: "x"})
    with pytest.raises(TypeError, match="no option 'quantise'. There are name, quantize, dtype, .*local_files_only.$"):
        Klein.from_pretrained(TINY, quantise=4)


def test_a_klein_is_not_copied(klein):
    for copy_of in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(ValueError, match="is not copied or pickled: where you want another, say Klein.from_pre"):
            copy_of(klein)


def test_home(monkeypatch, tmp_path):
    """A shell writes the home folder out for `~`; Python does not."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    shutil.copytree(TINY, tmp_path / "model")
    shutil.copy(find_adapter("cross"), tmp_path / "x.safetensors")
    Klein.from_pretrained("nano", loras=["~/x.safetensors"])
    klein = Klein.from_pretrained("~/model", parts={"autoencoder": "~/model"})
    save_picture(klein("a", seed=1, steps=1, width=32, height=32, progress=False), "~/x.png")
    assert picture_info("~/x.png")["seed"] == 1 and (tmp_path / "x.png").is_file()


def test_no_parts_are_none():
    assert Klein.from_pretrained(TINY, parts={}).info.distilled


def test_encode_prompt_has_the_same_gate(klein):
    for prompt in WRONG["prompt"]:
        with pytest.raises(ValueError, match="prompt"):
            klein.encode_prompt(prompt)


@pytest.mark.parametrize("case", BLANKS, ids=lambda case: case["what"])
def test_blanks_of_a_bundled_models_prompt_are_folded(case):
    request = check_request(BASE, case["prompt"], {"negative_prompt": case["prompt"], "guidance": 2})
    assert (request.prompts, request.negative_prompt) == ([case["read"]], case["read"])
    assert request.metadata(0)["prompt"] == case["read"]
    other = check_request(replace(BASE, name="owner/name"), case["prompt"])
    assert other.prompts == [case["prompt"]], "other models have seen such texts"


def test_the_sentence_names_the_way_out():
    for wrong, words in {
        ("width", 100): "multiple of 16 pixels, 100 is not: try 96",
        ("width", "32"): "whole number of pixels, not '32'",
        ("guidance", 1e39): r"from 1 \(none\) to 1000, not 1e\+39: try 4",
        ("guidance", 0): "not 0: try 4",
        ("guidance", math.nan): "not nan: try 4",
        ("seed", 1.5): "whole number or a list of them, not 1.5",
        ("seed", (1, 2, 3)): r"3 seeds given, 1 needed: say \[prompt\] \* 3, or a single seed",
        ("noise", mx.zeros((1, 4, 127))): r"\(1, 36, 128\) \(pictures, tokens, channels\), not \(1, 4, 127\)",
    }.items():
        with pytest.raises(ValueError, match=words):
            check_request(BASE, "a", dict([wrong]))


def test_numbers_of_other_libraries_are_welcome():
    numpy = pytest.importorskip("numpy")
    options = {
        "width": numpy.int64(32), "steps": numpy.uint8(3), "guidance": numpy.float32(2.5), "seed": numpy.int32(7),
        "noise": numpy.zeros((2, 12, 128), dtype=numpy.float32), "height": 96,
    }  # fmt: skip
    request = check_request(BASE, ("a", "b"), options)
    assert (request.width, request.steps, request.guidance, request.seeds) == (32, 3, 2.5, [7, 8])
    assert {type(x) for x in (request.width, request.steps, *request.seeds)} == {int}


@pytest.mark.parametrize(
    ("size", "shrunk"),
    [
        ((1600, 1200), (112, 80)),
        ((1000, 1000), (96, 96)),
        ((200, 1600), (32, 272)),
        ((128, 80), (128, 80)),  # the nearest
        ((96, 96), (96, 96)),
        ((64, 112), (64, 112)),  # no more pixels
        ((80, 64), (80, 64)),
    ],
)
def test_a_bundled_model_reads_pictures_of_the_size_that_it_knows(size, shrunk):
    """As the others read none of more than 1024² pixels: nano takes minutes for a photograph, and draws none."""
    picture = Image.new("RGB", size)
    request = check_request(DISTILLED, "make it night", {"images": [picture]})
    assert [(request.width, request.height), *(image.size for image in request.references)] == [shrunk, shrunk]
    request = check_request(DISTILLED, "make it night", {"images": [PICTURE, picture], "width": 128})
    assert [image.size for image in request.references] == [(64, 64), shrunk]
    assert (request.width, request.height) == (128, 64)
    changed = check_request(DISTILLED, "make it night", {"images": [picture, picture], "strength": 0.5})
    other = check_request(replace(DISTILLED, name="/home/me/my-nano"), "make it night", {"images": picture})
    assert changed.references[1].size == shrunk
    for request in (changed, other):  # what is changed keeps its pixels, and another model its references
        w, h = request.references[0].size
        assert (w * h > 96 * 96) == (size[0] * size[1] > 96 * 96)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2) | st.tuples(inner),
    max_leaves=5,
)
ARGUMENTS = {
    "width": st.integers(0, 2**40).map(lambda n: 16 * n) | anything,
    "height": st.none() | anything,
    "steps": st.none() | st.integers(-5, 2000) | anything,
    "guidance": st.none() | st.floats() | anything,
    "negative_prompt": st.text() | anything,
    "seed": st.none() | st.integers() | st.lists(st.integers(), max_size=3) | anything,
}


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    st.fixed_dictionaries({"prompt": st.text() | st.lists(st.text(), max_size=3) | anything}, optional=ARGUMENTS),
    st.sampled_from([DISTILLED, BASE]),
)
def test_any_arguments_give_a_request_or_a_sentence(arguments, info):
    try:
        request = check_request(info, arguments.pop("prompt"), arguments)
    except ValueError as error:
        assert str(error)[-1] in ".?" and len(str(error)) < 400
        return
    assert isinstance(request, Request) and len(request.prompts) == len(request.seeds) > 0
    assert request.width % 16 == request.height % 16 == 0 < min(request.grid)
    assert 1 <= request.steps <= 1000 and 1 <= request.guidance <= 1000
    assert all(0 <= seed < 2**64 for seed in request.seeds)
    for text in (*request.prompts, request.negative_prompt):
        text.encode()


@pytest.mark.parametrize(
    "how",
    [
        {"width": 32_768, "height": 32_768},
        {"width": 100_000, "height": 100_000},
        {"width": 1_600_000_000, "height": 16},
        {"width": 1_600_000, "height": 1_600_000},
        {"width": 2**31 - 16, "height": 2**31 - 16},
        {"prompt": ["a"] * 10**6},
        {"prompt": ["a"] * 10**6, "images": [PICTURE] * 10},
    ],
    ids=lambda how: ", ".join(f"{k}={str(v)[:12]}" for k, v in how.items()),
)
def test_what_cannot_fit_is_refused_at_once(klein, how):
    """Before noise, references or anything else of that size is made."""
    with peak_memory() as peak, pytest.raises(MemoryError, match=r"takes [\d.]+ GB of memory, and the machine has"):
        klein(**{"prompt": "a", "width": 1024, "height": 1024, "progress": False} | how)
    assert peak.bytes < 10**6 and klein.parts.loaded == {}


def test_an_option_that_there_is_not_is_named(klein):
    with pytest.raises(TypeError, match="no option 'num_inference_steps': say steps. There are images"):
        klein("a", num_inference_steps=4)
    with pytest.raises(TypeError, match=r"no option 'callback_on_step_end': say for step in klein.stream\(…\)"):
        klein("a", callback_on_step_end=print)
