"""The world of klein-nano, paper-cut shapes and little landscapes, as its recipe asks for it."""

import random
from typing import Any

from PIL import Image

from kleinlite.nano.evaluate import DEVELOPMENT, TEST, detected, held_out_captions, judge, requested
from kleinlite.nano.synonyms import SYNONYMS
from kleinlite.scenes import Scene, captions, draw, sample, scene_held_out

from . import edits, redraw, repair
from .config import RecipeConfig
from .scene_lessons import make_lessons
from .shape_reports import report_lone, report_shapes, sweep
from .world import Edit, Lessons, Rounds, World

LAYOUT = 2  # the first steps, in which a landscape is not guided: there guidance turns skies to night


def redraw_round(number: int, *parts: Any, progress: Any) -> redraw.Redrawn:
    """The pictures of a round of redraw: see `draw_again`."""
    first = redraw.FIRST + redraw.APART * number
    return redraw.draw_again(*parts, wider=redraw.WIDER[number], first=first, progress=progress)


def repair_round(number: int, *parts: Any, progress: Any) -> repair.Own:
    """The pictures of a round of repair: see `draw_lone_things`."""
    return repair.draw_lone_things(*parts, first=repair.FIRST + repair.APART * number, progress=progress)


class Shapes(World):
    """Shapes on a background, houses, trees and boats under a sky. Three rounds of redraw, two of repair."""

    name = "nano"
    samples = (
        "a red circle above a blue square", "a yellow star", "a green triangle left of a pink heart",
        "a yellow sun over a blue sea", "a red house under a yellow sun", "a green tree on white snow at night",
        "a white boat on a blue sea at sunset", "a black diamond on a pink background",
    )  # fmt: skip
    synonyms = SYNONYMS
    config = RecipeConfig()
    turns = (
        "pictures", "add_edits", "edit_pairs", "edits", "pictures", "no_op_edits", "pictures", "edits", "pictures",
        "edit_pairs", "pictures", "no_op_edits", "pictures", "edits", "pictures", "edit_pairs", "pictures", "edits",
        "no_op_edits", "pictures", "add_edits", "edit_pairs", "pictures", "two_reference_edits", "edits",
    )  # fmt: skip
    rounds = {
        "redraw": Rounds(redraw.Redrawn, len(redraw.WIDER), redraw_round),
        "repair": Rounds(repair.Own, repair.ROUNDS, repair_round),
    }

    reports = {"lone": report_lone, "shapes": report_shapes, "sweep": sweep}

    def sample(self, seed: int) -> Scene:
        return sample(seed)

    def draw(self, scene: Scene) -> Image.Image:
        return draw(scene, self.size)

    def captions(self, scene: Scene) -> list[str]:
        return captions(scene)

    def held_out(self, scene: Scene) -> bool:
        return scene_held_out(scene)

    def sample_edit(self, seed: int) -> Edit:
        return Edit(*edits.sample_edit(seed))

    def edit_held_out(self, before: Scene, text: str) -> bool:
        return edits.edit_held_out(before, text)

    def no_op_instruction(self, rng: random.Random, scene: Scene) -> str:
        return edits.no_op_instruction(rng, scene)

    def lessons(self, cfg: RecipeConfig) -> Lessons:
        return make_lessons(cfg.pictures, cfg.edits, cfg.families)

    def guidance(self, scene: Scene, kind: str, segment: int) -> float:
        unguided = kind == "pictures" and scene.is_landscape and segment < LAYOUT
        return 1.0 if unguided else super().guidance(scene, kind, segment)

    def examine(self, picture: Image.Image, scene: Scene, caption: str) -> dict[str, bool]:
        return detected(judge(picture), scene, requested(scene, caption))

    def examine_edit(
        self, picture: Image.Image, before: Scene, after: Scene
    ) -> tuple[dict[str, bool], dict[str, bool]]:  # fmt: skip
        return edits.score_edit(judge(picture), before, after)

    def cases(self, number: int, test: bool = False, apart: bool = False) -> list[tuple[Scene, str]]:
        """Of held-out contents, and so always apart."""
        return held_out_captions(number, TEST if test else DEVELOPMENT)

    def edit_cases(self, number: int, test: bool = False) -> list[Edit]:
        return [Edit(*edit) for edit in edits.held_out_edits(number, TEST if test else DEVELOPMENT)]


WORLD = Shapes()
