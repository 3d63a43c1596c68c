"""A world of one's own: a file that says how a scene is drawn and described is all that the recipe needs."""

import json
import random
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from small_nano import SMALL, uncompiled  # noqa: F401, a fixture

from kleinlite.autoencoder import Autoencoder
from kleinlite.errors import UserError
from kleinlite.klein import Klein
from kleinlite.transformer import Transformer
from recipe import training
from recipe.config import RecipeConfig
from recipe.world import find_world

STRIPES = """
import random
from typing import NamedTuple

from PIL import Image

from recipe.world import World

COLORS = {"red": (214, 48, 49), "green": (60, 160, 82), "blue": (58, 96, 214),
          "yellow": (250, 211, 60), "white": (250, 250, 248), "black": (44, 44, 54)}


class Stripes(NamedTuple):
    left: str
    middle: str
    right: str


class Flags(World):
    name = "flags"
    samples = ("a flag in red, white and blue",)

    def sample(self, seed):
        return Stripes(*random.Random(seed).sample(list(COLORS), 3))

    def draw(self, scene):
        picture = Image.new("RGB", (self.size, self.size), COLORS[scene.left])
        picture.paste(COLORS[scene.middle], (self.size // 3, 0, self.size, self.size))
        picture.paste(COLORS[scene.right], (2 * self.size // 3, 0, self.size, self.size))
        return picture

    def captions(self, scene):
        return [f"a {scene.left} flag", f"a flag in {scene.left}, {scene.middle} and {scene.right}"]
"""


@pytest.fixture
def flags(tmp_path):
    file = tmp_path / "flags.py"
    file.write_text(STRIPES)
    return file


def test_thirty_lines_are_a_world(flags):
    world = find_world(str(flags))
    lessons = world.lessons(replace(SMALL, pictures=12))
    assert len(lessons.pictures) == 12 and not lessons.edits and not any(map(world.held_out, lessons.scenes))
    assert world.sentence(random.Random(0), 0)
    with pytest.raises(UserError, match=r"flags has \d+ such captions: ask for no more \(--count\)"):
        world.cases(400)


@pytest.mark.usefixtures("uncompiled")
def test_it_is_trained_from_its_first_stage_to_its_last(flags, tmp_path):
    steps = dict.fromkeys(("autoencoder", "text_encoder", "transformer", "distill"), 2)
    training.train(tmp_path / "runs", cfg=replace(SMALL, steps=steps), world=str(flags))
    klein = Klein.from_pretrained(tmp_path / "runs" / "flags")
    assert klein("a red flag", steps=1, progress=False).size == (96, 96)


def test_a_world_may_begin_where_a_model_has_arrived(tmp_path):
    recipe = training.Recipe(tmp_path, find_world("shapes"), RecipeConfig(begins_with="nano-base"))
    klein = Klein.from_pretrained("nano-base")
    for part, module in (
        ("autoencoder", Autoencoder(recipe.cfg.autoencoder)),
        ("transformer", Transformer(recipe.cfg.transformer)),
    ):
        drawn = dict(tree_flatten(module.parameters()))
        recipe.begin(part, module)
        known = dict(tree_flatten(klein.parts.load(part).parameters()))
        for name, w in tree_flatten(module.parameters()):
            assert mx.array_equal(w, (drawn if name.startswith("txt_in") else known)[name]), name


def test_a_file_without_a_world_is_named(tmp_path):
    (tmp_path / "empty.py").write_text("from recipe.world import World\n")
    with pytest.raises(UserError, match=r"empty.py has no class that inherits from recipe.world.World"):
        find_world(str(tmp_path / "empty.py"))


def test_the_dice_of_chapter_16_are_a_whole_file(tmp_path):
    notebook = json.loads(Path(__file__).parents[2].joinpath("notebooks/16_another_world.ipynb").read_text("utf-8"))
    (source,) = [text for cell in notebook["cells"] if "class Dice(World)" in (text := "".join(cell["source"]))]
    file = tmp_path / "dice.py"
    file.write_text(source, "utf-8")
    dice = find_world(str(file))
    scene = dice.sample(0)
    assert dice.draw(scene).size == (96, 96) and len(dice.captions(scene)) == 3
