"""Chapter 8: every tensor in its place, or a sentence that says what does not fit. More: `models/test_names`."""

import json
import struct

import mlx.core as mx
import mlx.nn as nn
import pytest

from kleinlite.checkpoints import Rule, find_conversion, match, read_header, rename, swap_halves, to_mlx
from kleinlite.errors import UserError

RULES = [Rule(r"^first", ["theirs.a", "theirs.b"]), Rule(r"^last", ["ends"], swap_halves), Rule(r"^conv", ["filter"])]


class Small(nn.Module):
    """Two matrices and a 3 × 3 convolution."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4, bias=False)
        self.last = nn.Linear(3, 4, bias=False)
        self.conv = nn.Conv2d(2, 5, 3, bias=False)


def released() -> dict[str, mx.array]:
    """What a file has for `Small`: one matrix in two pieces, one with its halves swapped, a filter channels first."""
    return {
        "theirs.a.weight": mx.arange(6).reshape(2, 3),
        "theirs.b.weight": mx.arange(6, 12).reshape(2, 3),
        "ends.weight": mx.arange(12).reshape(4, 3),
        "filter.weight": mx.arange(90).reshape(5, 2, 3, 3),
    }


def test_names_and_conversions_come_from_the_rules():
    assert rename("first.weight", RULES) == ["theirs.a.weight", "theirs.b.weight"]
    assert rename("last.weight", RULES) == ["ends.weight"] and rename("norm.weight", RULES) == ["norm.weight"]
    assert rename("a.b", [Rule("^a", ["x", "y"]), Rule(r"b$", ["c", "d"])]) == ["x.c", "y.c", "x.d", "y.d"]
    assert find_conversion("last.weight", RULES) is swap_halves
    assert find_conversion("first.weight", RULES) is None and find_conversion("last.weight", []) is None


def test_one_tensor_is_stacked_converted_and_turned():
    pieces = [mx.array([[1], [2]]), mx.array([[3], [4]])]
    assert to_mlx(pieces).flatten().tolist() == [1, 2, 3, 4]
    assert to_mlx(pieces, swap_halves).flatten().tolist() == [3, 4, 1, 2]
    assert to_mlx([mx.zeros((5, 2, 3, 4))]).shape == (5, 3, 4, 2)


def test_every_parameter_gets_its_tensor():
    weights = match(Small(), released(), RULES)
    assert weights["first.weight"].flatten().tolist() == list(range(12))
    assert weights["last.weight"][:, 0].tolist() == [6, 9, 0, 3]
    assert mx.array_equal(weights["conv.weight"], released()["filter.weight"].transpose(0, 2, 3, 1))
    assert set(weights) == {"first.weight", "last.weight", "conv.weight"}


def test_what_does_not_fit_is_said_by_name_and_all_at_once():
    arrays = released() | {"ends.weight": mx.zeros((4, 7)), "surprise": mx.zeros(1)}
    del arrays["theirs.b.weight"]
    with pytest.raises(UserError) as refusal:
        match(Small(), arrays, RULES)
    assert str(refusal.value) == (
        "The small's weights do not fit (1 missing: theirs.b.weight; 1 not expected: surprise; 1 of the wrong shape: "
        "ends.weight is (4, 7), expected (4, 3)). Is this another model's file?"
    )
    many = released() | {f"extra.{i}": mx.zeros(1) for i in range(6)}
    with pytest.raises(UserError, match=r"6 not expected: extra\.0, extra\.1, extra\.2, extra\.3 …\)"):
        match(Small(), many, RULES)


def test_of_stacked_tensors_each_is_said_with_its_shape():
    for wrong in ((2, 7), (5, 3)):  # one that cannot be stacked, and one that can
        with pytest.raises(
            UserError, match=r"theirs\.a\.weight is \(2, 3\) \+ theirs\.b\.weight is .*, expected \(4, 3\)"
        ) as no:
            match(Small(), released() | {"theirs.b.weight": mx.zeros(wrong)}, RULES)
        assert f"theirs.b.weight is {wrong}" in str(no.value)


def test_no_tensor_serves_two_parameters():
    twice = [RULES[0], Rule(r"^last", ["theirs.a"]), RULES[2]]
    with pytest.raises(UserError, match=r"1 not expected: ends\.weight; 1 used twice: theirs\.a\.weight"):
        match(Small(), released(), twice)


def test_a_header_is_read_without_a_number(tmp_path):
    path = tmp_path / "x.safetensors"
    mx.save_safetensors(str(path), {"a": mx.zeros((2, 3)), "b": mx.zeros((4,), dtype=mx.float16)}, {"format": "pt"})
    header = read_header(path)
    assert header.keys() == {"a", "b"} and header["a"]["shape"] == [2, 3] and header["b"]["dtype"] == "F16"
    length = struct.unpack("<Q", path.read_bytes()[:8])[0]
    path.write_bytes(path.read_bytes()[: 8 + length])  # the header alone
    assert read_header(path) == header and "__metadata__" in json.loads(path.read_bytes()[8:])
