"""A world: what the recipe asks about the pictures that a model is to learn.

The recipe knows no picture. A world of your own is a file with a class that inherits from `World` and says how a scene
is drawn and described; `python -m recipe train RUNS --world yours.py` trains a model of it. Who wants it judged says
`examine` as well; who wants edits, `sample_edit`.
"""

import importlib.util
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from kleinlite.errors import UserError
from kleinlite.nano.evaluate import DEVELOPMENT, TEST
from kleinlite.scenes import held_out

from .config import STEPS, RecipeConfig
from .rewordings import reword

Scene = Any  # whatever a world draws: hashable, and equal when the picture is the same
SEEDS = 100_000  # among so many a set looks for its scenes: a small world has no more
GUIDANCE = 3.0  # of pictures from words alone
EDIT_GUIDANCE = 1.5  # the reference leaves little to choose
KINDS = {"pictures": 1, "edits": 2, "add_edits": 2, "no_op_edits": 2, "edit_pairs": 2, "two_reference_edits": 3}


@dataclass(frozen=True)
class Lesson:
    """Sentences, one of which is said; the row of the picture that should come out; rows of its references."""

    texts: tuple[str, ...]
    target: int
    references: tuple[int, ...] = ()


@dataclass
class Lessons:
    """All scenes, and the lessons of each kind. An edit pair: edits of one scene, in a list for each of two things."""

    scenes: list[Scene] = field(default_factory=list)
    pictures: list[Lesson] = field(default_factory=list)
    edits: list[Lesson] = field(default_factory=list)
    two_reference_edits: list[Lesson] = field(default_factory=list)
    add_edits: list[Lesson] = field(default_factory=list)
    edit_pairs: list[tuple[list[Lesson], list[Lesson]]] = field(default_factory=list)

    def add_scene(self, scene: Scene) -> int:
        """Its row."""
        self.scenes.append(scene)
        return len(self.scenes) - 1


class Edit(NamedTuple):
    """Reference scenes, an instruction, and the scene that should come out."""

    references: tuple[Scene, ...]
    text: str
    target: Scene


@dataclass(frozen=True)
class Rounds:
    """A stage in which the student learns from pictures of its own, drawn anew before each round."""

    kind: Callable[..., Any]  # of what `draw` has drawn: a NamedTuple of arrays with `batch(step, pictures)`
    number: int
    draw: Callable[..., Any]  # (round, pictures, student, text encoder, autoencoder, tokenizer, grid, progress)


class World:
    """Pictures and their words. The first three methods and `name` make a world; the rest may stay as it is here."""

    name: str
    size = 96
    samples: tuple[str, ...] = ()  # prompts that are drawn at each look
    synonyms: Mapping[str, tuple[str, ...]] = {}  # in rewordings, which have at most so many words:
    most_words = 17  # with the chat template they must fit into the text encoder
    config = RecipeConfig(steps={name: STEPS[name] for name in list(STEPS)[:4]})  # all but redraw and repair
    turns: Sequence[str] = ("pictures",)  # the kinds of lessons, by turns: see KINDS
    rounds: Mapping[str, Rounds] = {}
    reports: Mapping[str, Callable[..., Any]] = {}  # what `recipe.evaluate` asks of this world alone, by its options

    def sample(self, seed: int) -> Scene:
        """A random scene, the same for the same seed."""
        raise NotImplementedError

    def draw(self, scene: Scene) -> Image.Image:
        """An RGB picture of `size` × `size` pixels."""
        raise NotImplementedError

    def captions(self, scene: Scene) -> Sequence[str]:
        """Sentences that describe a scene, the same for the same scene; a sentence may leave things out."""
        raise NotImplementedError

    def held_out(self, scene: Scene) -> bool:
        """Whether no training sees the scene: one in ten."""
        return held_out(repr(scene))

    def sample_edit(self, seed: int) -> Edit | None:
        """An edit, the same for the same seed; None where nothing is edited."""
        return None

    def no_op_instruction(self, rng: random.Random, scene: Scene) -> str:
        """An instruction about something that is not there."""
        raise NotImplementedError

    def examine(self, picture: Image.Image, scene: Scene, caption: str) -> dict[str, bool]:
        """For each thing that a caption of the scene asks for, whether the picture shows it."""
        raise NotImplementedError

    def examine_edit(
        self, picture: Image.Image, before: Scene, after: Scene
    ) -> tuple[dict[str, bool], dict[str, bool]]:  # fmt: skip
        """Of an edit from `before` to `after`: which changes the picture shows, and what it kept."""
        raise NotImplementedError

    def guidance(self, scene: Scene, kind: str, segment: int) -> float:
        """Of the student's teacher, for a lesson of this kind, in one of the four steps."""
        return GUIDANCE if kind == "pictures" else EDIT_GUIDANCE

    def names_what_is_held_out(self, scene: Scene, caption: str) -> bool:
        """Whether a caption says what makes a held-out scene one."""
        return True

    def cases(self, number: int, test: bool = False, apart: bool = False) -> list[tuple[Scene, str]]:
        """Scenes and captions that no training has seen, the same every time; no two have the same caption.

        test: of the test set, which shares no caption with the development set. apart: of scenes that are held out.
        """
        found: dict[str, Scene] = {}
        for scene in map(self.sample, seeds(test)):
            if self.held_out(scene) != apart:
                continue
            texts = [text for text in self.captions(scene) if held_out(text) and in_test_set(text) == test]
            texts = [text for text in texts if not apart or self.names_what_is_held_out(scene, text)]
            if texts:
                found.setdefault(random.Random(repr(scene)).choice(texts), scene)
            if len(found) == number:
                break
        if len(found) < number:
            raise UserError(f"{self.name} has {len(found)} such captions: ask for no more (--count).")
        return [(scene, text) for text, scene in found.items()]

    def edit_cases(self, number: int, test: bool = False) -> list[Edit]:
        """Edits that no training has seen, the same every time."""
        edits = filter(None, map(self.sample_edit, seeds(test)))
        fresh = (edit for edit in edits if self.edit_held_out(edit.references[0], edit.text)
                 and in_test_set(f"{edit.references[0]!r}: {edit.text}") == test)  # fmt: skip
        return list(islice(fresh, number))

    # ------------------------------------------------------------ what follows from these

    def allowed_scenes(self, first: int = 0) -> Iterator[Scene]:
        """The scenes of the seeds from `first` on that may be trained on."""
        return (scene for scene in map(self.sample, count(first)) if not self.held_out(scene))

    def held_out_scenes(self, first: int, number: int) -> list[Scene]:
        """The first scenes of the seeds from `first` on that are never trained on."""
        found = list(islice(filter(self.held_out, map(self.sample, range(first, first + SEEDS))), number))
        if len(found) < number:
            raise UserError(f"Of {SEEDS:,} scenes of {self.name}, {len(found)} are held out: draw more kinds of them.")
        return found

    def edit_held_out(self, before: Scene, text: str) -> bool:
        """One edit in ten is never trained on. It depends on the scene and on the instruction."""
        return held_out(f"{before!r}: {text}")

    def edit_allowed(self, edit: Edit) -> bool:
        """Whether an edit may be trained on: neither its scenes nor its instruction are held out."""
        return not any(map(self.held_out, (*edit.references, edit.target))) and not self.edit_held_out(
            edit.references[0], edit.text
        )

    def reword(self, rng: random.Random, text: str) -> str:
        """The same in other words, one time in two."""
        return reword(rng, text, self.synonyms, self.most_words)

    def allowed_captions(self, scene: Scene) -> tuple[str, ...]:
        """The scene's captions that may be trained on; if there is none, no words."""
        return tuple(text for text in self.captions(scene) if not held_out(text)) or ("",)

    def lessons(self, cfg: RecipeConfig) -> Lessons:
        """What the transformer learns from."""
        lessons = Lessons()
        for scene in islice(self.allowed_scenes(), cfg.pictures):
            lessons.pictures.append(Lesson(self.allowed_captions(scene), lessons.add_scene(scene)))
        edits = (edit for edit in map(self.sample_edit, count()) if edit is not None and self.edit_allowed(edit))
        for edit in islice(edits, cfg.edits if self.sample_edit(0) else 0):
            before = tuple(map(lessons.add_scene, edit.references))
            lessons.edits.append(Lesson((edit.text,), lessons.add_scene(edit.target), before))
        return lessons

    def sentences(self, seed: int) -> list[str]:
        """All captions of a scene and an instruction: words that the tokenizer learns."""
        edit = self.sample_edit(seed)
        return [*self.captions(self.sample(seed)), *([edit.text] if edit else [])]

    def sentence(self, rng: random.Random, seed: int) -> str:
        """A caption or, one time in four, an instruction that the text encoder may learn from."""
        if rng.random() < 0.25 and (edit := self.sample_edit(seed)):
            return "" if self.edit_held_out(edit.references[0], edit.text) else edit.text
        scene = self.sample(seed)
        return "" if self.held_out(scene) else rng.choice(self.allowed_captions(scene))


def seeds(test: bool) -> range:
    """Of the scenes among which a set looks for its own."""
    first = TEST if test else DEVELOPMENT
    return range(first, first + SEEDS)


def in_test_set(text: str) -> bool:
    """Half of what is held out judges a recipe, the other half develops it. By the digit that `held_out` leaves."""
    return zlib.crc32(text.encode()) // 10 % 2 == 1


WORLDS = {"shapes": "recipe.shapes", "critters": "recipe.critters"}


def find_world(name: str) -> World:
    """The world of a name, or the one of a Python file.

    Raises UserError if there is none.
    """
    if name in WORLDS:
        try:
            return import_module(WORLDS[name]).WORLD
        except ModuleNotFoundError as missing:
            raise UserError(f'{name} is drawn with {missing.name}: pip install -e ".[recipe]"') from None
    path = Path(name)
    spec = importlib.util.spec_from_file_location(path.stem, path) if path.suffix == ".py" else None
    if spec is None or not path.is_file():
        raise UserError(f"There is no world {name!r}: say {' or '.join(WORLDS)}, or a file such as yours.py.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, World)]
    if found[-1:] in ([], [World]):
        raise UserError(f"{path} has no class that inherits from recipe.world.World.")
    return found[-1]()
