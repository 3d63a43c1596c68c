"""A family is a record: no other room asks which family a model is of."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from mlx.utils import tree_flatten
from stand_in_hub import TINY
from waiting import HANGS

import kleinlite.models
from kleinlite.models.configs import parse_config
from kleinlite.models.families import FAMILIES, family_of, family_of_config, family_of_tensors, network_of

MODELS = Path(kleinlite.models.__file__).parent


def test_only_its_own_file_names_a_family():
    """Klein's own names stand elsewhere only as what is taken where nothing else is said, and in its trainers."""
    for path in [*MODELS.glob("*.py"), MODELS.parent / "inference" / "machine_memory.py"]:
        if path.name not in ("names.py", "registry.py", "other_programs.py"):  # tables of what files say
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
    assert set(family.defaults) == {True, False} and family.example
    assert family.schedule(4, 256)[0] == 1 and family.schedule(4, 256)[-1] == 0


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.title)
def test_a_family_is_known_by_its_files(family):
    for name in family.classes:
        assert family_of_config({"_class_name": f"{name}2DModel"}) is family
    anchor = family.transformer.anchor
    assert family_of_tensors([anchor, "x"]) is family_of_tensors([f"net.{anchor}"]) is family
    cfg = next(iter(family.released.values())).transformer
    network = family.transformer.network(cfg)
    assert anchor in dict(tree_flatten(network.parameters()))


def test_heads_of_an_odd_size_cannot_be_turned():
    text_encoder = FAMILIES[0].parts["text_encoder"]
    cfg = text_encoder.config.tiny()
    assert text_encoder.contradictions(cfg) == []
    assert text_encoder.contradictions(replace(cfg, head_dim=cfg.head_dim - 1)) == ["head_dim is odd"]


MADE_UP = """
import json, shutil, sys
from dataclasses import dataclass, replace
from pathlib import Path
import mlx.core as mx
from kleinlite.checkpoints import Rule
from kleinlite.models import families
from kleinlite.models.families import KLEIN
from kleinlite.transformer import Transformer, TransformerConfig

# the chapter
@dataclass(frozen=True)
class MadeUpConfig(TransformerConfig):
    pass

class MadeUp(Transformer):
    pass

def even(steps, n):
    return [1 - i / steps for i in range(steps + 1)]

# the record
form = replace(
    KLEIN.transformer, config=MadeUpConfig, network=MadeUp, names=[*KLEIN.transformer.names, Rule(r"^", ["made_up."])],
)
families.FAMILIES += (replace(
    KLEIN, title="made up", pipelines=("MadeUp",), classes=("MadeUp",),
    transformer=form, released={}, schedule=even,
    read_variant=lambda *files: KLEIN.read_variant(*files)._replace(schedule=even),
),)

from kleinlite import Klein

tiny, folder = map(Path, sys.argv[1:])
shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("base", "expected*"))
for file in ("model_index.json", "transformer/config.json"):
    (folder / file).write_text((folder / file).read_text().replace("Flux2Klein", "MadeUp").replace("Flux2", "MadeUp"))
[weights] = (folder / "transformer").glob("*.safetensors")
arrays = {f"made_up.{name}": mx.array(w) for name, w in mx.load(str(weights)).items()}
mx.eval(arrays)
mx.save_safetensors(str(weights), arrays, {"format": "pt"})

how = {"width": 48, "height": 32, "seed": 5, "progress": False}
klein, made_up = (Klein.from_pretrained(path, dtype=mx.float32) for path in (tiny, folder))
times = [step.t for step in made_up.stream("a red circle", **how)]
print(type(made_up.transformer).__name__, times, made_up.plan_memory(width=48, height=32).peak_bytes > 0)
one_look = {**how, "steps": 1}  # from 1 to 0 with any schedule
print(klein("a red circle", **one_look).tobytes() == made_up("a red circle", **one_look).tobytes())
"""


def test_a_new_family_is_its_chapter_and_a_record(tmp_path):
    """A made-up one: other names in its files, its own schedule; nothing else of the package knows of it."""
    command = [sys.executable, "-c", MADE_UP, str(TINY), str(tmp_path / "made-up")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
    assert done.stdout.split("\n")[:2] == ["MadeUp [1.0, 0.75, 0.5, 0.25] True", "True"], done.stderr


def test_a_config_of_a_module_that_was_loaded_anew_is_known():
    """%autoreload makes the classes of a chapter anew, and a model in use has the old ones."""
    for family in FAMILIES:
        old = type(family.transformer.config.__name__, (), {})()
        assert family_of(old) is family and network_of(old) is family.transformer.network
        for form in (family.autoencoder, *family.autoencoder.others):
            assert family.autoencoder.of(type(form.config.__name__, (), {})()) is form
