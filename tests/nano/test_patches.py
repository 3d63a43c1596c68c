"""Patches of a color are counted as the drawings have them."""

from dataclasses import replace

from kleinlite.nano.patches import count_patches
from kleinlite.scenes import draw, sample


def test_patches_are_counted_as_the_drawings_have_them():
    lone = [scene for scene in map(sample, range(95_000_000, 95_000_400)) if scene.is_landscape]
    lone = [scene for scene in lone if len(scene.things) == 1 and scene.things[0].color != "white"][:40]
    assert [count_patches(draw(scene), scene.things[0]) for scene in lone] == [1] * len(lone)
    left, right = (replace(lone[0].things[0], place=place) for place in ("left", "right"))
    assert count_patches(draw(replace(lone[0], things=(left, right))), left) == 2
    assert count_patches(draw(replace(lone[0], things=())), left) == 0
