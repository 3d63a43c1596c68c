"""What is known of a model without a download."""

import pytest
from stand_in_hub import TINY, Repository, hub, released  # noqa: F401

from kleinlite.models.download import fetch_model
from kleinlite.models.facts import find_facts
from kleinlite.models.registry import MODELS


@pytest.mark.parametrize("name", MODELS)
def test_a_released_model_is_known_without_its_files(hub, name):  # noqa: F811
    facts = find_facts(name)
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
    assert find_facts("4b").here and not find_facts("9b").here


def test_bits_that_are_asked_for():
    assert find_facts("4b", 4).bits == find_facts("nano", 4).bits == (4.5, 4.5)
    with pytest.raises(ValueError, match="quantize is one of"):
        find_facts("4b", 7)


@pytest.mark.parametrize("name", ["nano", "nano-base", str(TINY)])
def test_a_model_that_is_here_is_known_from_its_files(name):
    facts = find_facts(name)
    assert facts.here and facts.released is None and facts.bits == (32, 32)  # float32: small parts are cast
    assert facts.info.distilled == (name != "nano-base") and len(facts.configs) == 3


def test_a_repository_that_is_not_here_is_not_asked_for(hub):  # noqa: F811
    hub.repositories["some/body"] = Repository(released())
    facts = find_facts("some/body")
    assert facts.configs is None and not facts.here and hub.requests == []
    fetch_model("some/body")
    assert find_facts("some/body").configs is not None and find_facts("some/body").info.distilled
    with pytest.raises(ValueError, match="There is no model, folder or file called 'flux'"):
        find_facts("flux")
