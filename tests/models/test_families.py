"""A family is a record: no other room asks which family a model is of."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from mlx.utils import tree_flatten

import kleinlite.models
from kleinlite.models.configs import check_config, parse_config
from kleinlite.models.families import FAMILIES, family_of, family_of_config, family_of_tensors, network_of

MODELS = Path(kleinlite.models.__file__).parent


def test_only_its_own_file_names_a_family():
    """Klein's own names stand elsewhere only as what is taken where nothing else is said, and in its trainers."""
    for path in [*MODELS.glob("*.py"), MODELS.parent / "inference" / "memory_check.py"]:
        if path.name not in ("names.py", "registry.py"):
            named = re.findall(
                r"Z_IMAGE\b|ZImage\w*|FLUX3\b|Flux3\w*|(?:is|==) KLEIN\b|isinstance\([^)]*Config",
                path.read_text("utf-8"),
            )
            assert not named, (path, named)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.title)
def test_a_family_is_whole(family):
    for configs in family.released.values():
        assert family_of(configs.transformer) is family
        for name, cfg in configs._asdict().items():
            form = family.parts[name]
            assert type(cfg) is form.config and network_of(cfg) is form.network
            values = form.format(cfg)
            index = {"text_encoder_out_layers": list(configs.text_encoder.out_layers)}
            assert parse_config(name, values, index, family=family) == cfg, name
            check_config(Path("x"), cfg, family, name)
    assert set(family.defaults) == {True, False} and family.example
    assert family.schedule(4, 256)[0] == 1 and family.schedule(4, 256)[-1] == 0


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.title)
def test_a_family_is_known_by_its_files(family):
    for name in family.classes:
        assert family_of_config({"_class_name": f"{name}2DModel"}) is family
    assert family_of_tensors([family.signature, "x"]) is family
    cfg = next(iter(family.released.values())).transformer
    network = family.transformer.network(cfg)
    assert family.signature in dict(tree_flatten(network.parameters()))


def test_heads_of_an_odd_size_cannot_be_turned():
    text_encoder = FAMILIES[0].parts["text_encoder"]
    cfg = text_encoder.config.tiny()
    assert text_encoder.contradictions(cfg) == []
    assert text_encoder.contradictions(replace(cfg, hd=cfg.hd - 1)) == ["head_dim is odd"]
