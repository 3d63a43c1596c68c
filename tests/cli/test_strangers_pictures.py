"""A picture may come from anybody: what it says is checked, and never runs."""

import json

import pytest
from command import MADE, PROMPT, remember
from peak_memory import peak_memory

# ---------------------------------------------------------------- what comes from strangers


def test_a_picture_cannot_have_a_model_downloaded(hub, refused):
    """Whoever gives away a picture must not choose what is fetched for it."""
    for model in ("4b", "some/body"):
        remember("x.png", json.dumps(MADE | {"model": model}))
        refused(f"x.png was drawn with {model!r} not on this machine --model {model}", "generate", "--like", "x.png")
    assert hub.requests == []


@pytest.mark.parametrize("change", [{"width": 10**30}, {"height": 6_400_000}, {"width": 2**20, "height": 2**20}])
def test_a_picture_that_wants_to_be_large(change, tiny, refused):
    remember("x.png", json.dumps(MADE | {"model": str(tiny)} | change))
    for more in ([], ["--model", "nano"]):
        with peak_memory() as peak:
            refused("takes GB of memory", "generate", "--like", "x.png", *more)
        assert peak.bytes < 10**6, "refused before anything is computed"


@pytest.mark.parametrize(
    "change",
    [
        {"seed": -1}, {"seed": 2**70}, {"steps": 10**9}, {"guidance": float("nan")},
        {"guidance": float("inf")}, {"prompt": "\ud800"}, {"negative_prompt": "\udcff"}, {"width": -16},
    ],
    ids=str,
)  # fmt: skip
def test_a_picture_with_numbers_out_of_range(change, tiny, refused):
    remember("x.png", json.dumps(MADE | {"model": str(tiny)} | change))
    refused("", "generate", "--like", "x.png")


def test_nested_metadata(tiny, refused):
    remember("x.png", "[" * 5000 + "]" * 5000)
    refused("x.png damaged", "info", "x.png")
    refused("x.png damaged", "generate", "--like", "x.png")


def test_a_strangers_text_stays_out_of_the_terminal(refused):
    """A sentence is one line, and what it quotes cannot do anything."""
    evil = "\x1b]0;owned\x07\x1b[2J\nkleinlite: all is well."
    remember("x.png", json.dumps(MADE | {"model": evil, "guidance": 3.0}))
    refused("", "generate", "--like", "x.png")
    refused("", "generate", PROMPT, "--model", evil)
