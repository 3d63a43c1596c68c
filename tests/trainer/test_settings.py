"""The numbers of a training."""

import pytest

from kleinlite.lora import MATRIX_KINDS
from kleinlite.trainer.settings import Settings, default_rate


def test_narrow_models_learn_faster():
    assert default_rate(3072) == 1e-4 and default_rate(256) == pytest.approx(1.2e-3)
    assert Settings().rate is None


@pytest.mark.parametrize(
    "rank, sentence",
    [
        ({"qkv": 2, "mpl": 3}, "not for 'mpl'"),
        ({"qkv": 2, "proj": 0}, "rank counts from 1, not from 0"),
    ],
)
def test_ranks_by_kind_that_cannot_be(rank, sentence):
    with pytest.raises(ValueError, match=sentence):
        Settings(rank=rank)
    Settings(rank=dict.fromkeys(MATRIX_KINDS, 10_000))


def test_a_seed_that_is_none():
    with pytest.raises(ValueError, match=r"A seed is a whole number from 0 to 2\*\*64 - 1, -1 is not"):
        Settings(seed=-1)
