"""The numbers of a training, and the models that can be trained."""

import shutil

import pytest
from stand_in_hub import TINY

from kleinlite.lora import MATRIX_KINDS
from kleinlite.models.facts import find_facts
from kleinlite.models.places import tell
from kleinlite.trainer.settings import Settings, check_base, default_rate


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


def test_training_needs_a_base_model(tmp_path):
    shutil.copytree(TINY, tmp_path / "mine", ignore=shutil.ignore_patterns("base"))
    for name, way_out in (
        ("nano", "train on nano-base, and use the adapter on nano"),
        ("4B", "train on base-4b, and use the adapter on 4B"),
        ("9b-kv-fp8", "train on base-9b, "),
        (str(tmp_path / "mine"), "train on its base model"),
    ):
        with pytest.raises(ValueError, match=f"^{tell(name)} is distilled: {way_out}"):
            check_base(find_facts(name).info)
    for name, title in (
        ("flux3", r"FLUX 3 Image Klein"),
        ("flux3-base", r"FLUX 3 Image Klein"),
        ("z-image-turbo", "Z-Image"),
    ):
        with pytest.raises(ValueError, match=f"no adapters for {title}: take base-4b or base-9b"):
            check_base(find_facts(name).info)
    for name in ("nano-base", "base-4b", "base-9b-fp8"):
        check_base(find_facts(name).info)
