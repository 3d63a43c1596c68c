"""What is known of a model without a download."""

import shutil

import pytest
from stand_in_hub import TINY, Repository, hub, released  # noqa: F401

from kleinlite.models.describe import check_base, describe
from kleinlite.models.download import fetch_model
from kleinlite.models.registry import MODELS


@pytest.mark.parametrize("name", MODELS)
def test_a_released_model_is_known_without_its_files(hub, name):  # noqa: F811
    facts = describe(name)
    model = MODELS[name]
    assert (facts.here, facts.released, facts.info.distilled, facts.info.kv) == (
        False, model, "base" not in name, "kv" in name,
    )  # fmt: skip
    tokens = 4096 if "flux3" in name else 512
    assert (facts.info.size, facts.info.max_length, facts.is_quantized) == (1024, tokens, "nvfp4" in name)
    assert facts.info.d_latent == facts.configs.transformer.d_latent
    low, high = (4.5, 5.2) if "nvfp4" in name else (8, 8.7) if "fp8" in name else (15.99, 16)
    assert low < facts.bits[0] <= high and facts.bits[1] == 16
    assert hub.requests == []


def test_it_is_said_whether_it_is_here(hub):  # noqa: F811
    fetch_model("4b")
    assert describe("4b").here and not describe("9b").here


def test_bits_that_are_asked_for():
    assert describe("4b", 4).bits == describe("nano", 4).bits == (4.5, 4.5)
    with pytest.raises(ValueError, match="quantize is one of"):
        describe("4b", 7)


@pytest.mark.parametrize("name", ["nano", "nano-base", str(TINY)])
def test_a_model_that_is_here_is_known_from_its_files(name):
    facts = describe(name)
    assert facts.here and facts.released is None and facts.bits == (32, 32)  # float32: small parts are cast
    assert facts.info.distilled == (name != "nano-base") and len(facts.configs) == 3


def test_a_repository_that_is_not_here_is_not_asked_for(hub):  # noqa: F811
    hub.repositories["some/body"] = Repository(released())
    facts = describe("some/body")
    assert facts.configs is None and not facts.here and hub.requests == []
    fetch_model("some/body")
    assert describe("some/body").configs is not None and describe("some/body").info.distilled
    with pytest.raises(ValueError, match="There is no model, folder or file called 'flux'"):
        describe("flux")


def test_training_needs_a_base_model(tmp_path):
    shutil.copytree(TINY, tmp_path / "mine", ignore=shutil.ignore_patterns("base"))
    for name, way_out in (
        ("nano", "train on nano-base, and use the adapter on nano"),
        ("4B", "train on base-4b, and use the adapter on 4B"),
        ("9b-kv-fp8", "train on base-9b, "),
        (str(tmp_path / "mine"), "train on its base model"),
    ):
        with pytest.raises(ValueError, match=f"^{name} is distilled: {way_out}"):
            check_base(describe(name).info)
    for name, title in (
        ("flux3", r"FLUX 3 Image Klein"),
        ("flux3-base", r"FLUX 3 Image Klein"),
        ("z-image-turbo", "Z-Image"),
    ):
        with pytest.raises(ValueError, match=f"no adapters for {title}: take base-4b or base-9b"):
            check_base(describe(name).info)
    for name in ("nano-base", "base-4b", "base-9b-fp8"):
        check_base(describe(name).info)
