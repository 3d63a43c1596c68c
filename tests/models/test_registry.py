"""The models that have a name: their numbers against the networks, and against each other."""

import pytest
from mlx.utils import tree_flatten

from kleinlite import Klein
from kleinlite.flux3 import Flux3Config, Flux3Transformer
from kleinlite.models.configs import RELEASED_CONFIGS
from kleinlite.models.download import required_repositories
from kleinlite.models.facts import find_facts
from kleinlite.models.families import network_of
from kleinlite.models.registry import BUNDLED, MODELS, find_bundled, find_released
from kleinlite.text_encoder import TextEncoder, TextEncoderConfig
from kleinlite.transformer import Transformer, TransformerConfig
from kleinlite.z_image import ZImageConfig, ZImageTransformer


def test_the_parameters_are_those_of_our_modules():
    def size(module):  # nothing is computed, so 34 GB stay imaginary
        return sum(w.size for _, w in tree_flatten(module.parameters()))

    small = size(Transformer(TransformerConfig())), size(TextEncoder(TextEncoderConfig()))
    cfg = TransformerConfig(double_blocks=8, single_blocks=24, heads=32, d_text=12288)
    large = size(Transformer(cfg)), size(TextEncoder(TextEncoderConfig(d=4096, d_mlp=12288, tied=False)))
    sizes = {"z-image-turbo": (size(ZImageTransformer(ZImageConfig())), small[1])}
    reader = small[1] + 415_347_712  # and its half for pictures
    sizes |= {"flux3": (size(Flux3Transformer(Flux3Config())), reader)}
    sizes |= {"flux3-base": (size(Flux3Transformer(Flux3Config(flow_map=False))), reader)}
    for name, model in MODELS.items():
        expected = sizes.get(name, small if "4b" in name else large)
        assert (model.size.transformer_parameters, model.size.text_encoder_parameters) == expected, name


@pytest.mark.parametrize("name", MODELS)
def test_bytes_fit_the_parameters(name):
    model = MODELS[name]
    bits = 8 * model.transformer_bytes / model.size.transformer_parameters
    assert (
        bits == pytest.approx(32 if name == "z-image-turbo" else 16, abs=1e-3)
        or ("fp8" in name and 8 < bits < 8.7)
        or ("nvfp4" in name and 4.5 < bits < 5.2)
    )
    assert ("fp" in name) == (bits < 10) == bool(model.parts_from)
    others = model.size.other_bytes - 2 * model.size.text_encoder_parameters
    low, high = (340e6, 345e6) if "flux3" in name else (180e6, 190e6)  # FLUX 3's autoencoder is in float32
    assert low < others < high  # the autoencoder, the tokenizer, and headers


def test_names_and_licences():
    assert set(BUNDLED).isdisjoint(MODELS) and len({model.repo for model in MODELS.values()}) == len(MODELS) == 17
    sister = MODELS["z-image-turbo"]
    assert (sister.repo, sister.size.license) == ("Tongyi-MAI/Z-Image-Turbo", "Apache-2.0") and not sister.size.gated
    for name, model in MODELS.items():
        if name in ("flux3", "flux3-base"):
            assert model.repo == f"black-forest-labs/flux-3-image-klein{name.removeprefix('flux3')}"
            assert model.size.license == "FLUX Kommunity License" and model.size.gated
            assert model.distilled == (name == "flux3") and not model.parts_from
            continue
        if model is sister:
            continue
        small, base = "4b" in name, name.startswith("base-")
        assert model.repo.lower() == f"black-forest-labs/flux.2-klein-{name}"
        assert model.distilled != base and model.size.gated != small
        assert model.size.license == ("Apache-2.0" if small else "FLUX Non-Commercial")
        if model.parts_from:
            assert name.startswith(f"{model.parts_from}-") and not MODELS[model.parts_from].parts_from
            assert model.file == f"flux-2-klein-{name}.safetensors"
        else:
            assert model.file == ""


def test_every_size_has_its_configs():
    assert {model.size.name for model in MODELS.values()} == set(RELEASED_CONFIGS)
    for model in MODELS.values():
        configs = RELEASED_CONFIGS[model.size.name]
        assert network_of(configs.transformer) in (Transformer, ZImageTransformer, Flux3Transformer)


def test_names_in_any_case():
    assert find_bundled("Nano-Base") == BUNDLED["nano-base"] and find_bundled("nanobase") is None
    assert find_released("4B") is MODELS["4b"] and find_released("nano") is None


def test_the_bytes_of_a_download():
    """Of 4b: transformer, text encoder, autoencoder and tokenizer, as the hub lists them."""
    assert MODELS["4b"].download_bytes == 7_751_109_744 + 8_044_981_992 + 168_120_878 + 15_882_232


@pytest.mark.parametrize("name", MODELS)
def test_a_repositorys_own_id_is_the_same_model(name):
    """What a model card says, in its case or another."""
    repo = MODELS[name].repo
    assert find_released(repo) is find_released(repo.lower()) is MODELS[name] is find_released(name)
    assert required_repositories(repo) == required_repositories(name)
    by_id = find_facts(repo)
    by_name = find_facts(name)
    assert by_id.released is by_name.released and by_id.bits == by_name.bits


def test_a_strangers_repository_is_no_released_model():
    assert find_released("some/body") is None is find_released("black-forest-labs/FLUX.2-klein-5B")


def test_klein_opens_a_repositorys_own_id(hub, caplog):
    """With the plan and the license of the short name; and the same picture."""
    wish = {"seed": 1, "width": 64, "height": 64, "progress": False}
    by_id = Klein.from_pretrained("black-forest-labs/FLUX.2-klein-4B")("a circle", **wish)
    assert "Apache-2.0" in caplog.text
    assert by_id.tobytes() == Klein.from_pretrained("4b")("a circle", **wish).tobytes()
