"""The numbers of a training."""

import pytest

from kleinlite.trainer.settings import Settings, default_rate


def test_narrow_models_learn_faster():
    assert default_rate(3072) == 1e-4 and default_rate(256) == pytest.approx(1.2e-3)
    assert Settings().rate is None


def test_a_seed_that_is_none():
    with pytest.raises(ValueError, match=r"A seed is a number from 0 to 2\^64 - 1, not -1"):
        Settings(seed=-1)
