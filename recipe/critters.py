"""Critters and pots: a second world. Little monsters and potted plants with faces, built of parts that have names.

The drawings are DiceBear's *critters* and *sprouts*, which are in the public domain (CC0 1.0).
`pip install -e ".[recipe]"` in a clone brings what draws them.

A tenth of all scenes is held out by its *combinations*: two parts, say a crown and a wink, that never meet in training.
So it can be asked whether a model draws together what it has only seen apart.
"""

import importlib.util
import io
import itertools
import json
import random
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import resvg_py
from dicebear import Avatar, Style
from PIL import Image

from kleinlite.nano.limits import split_words, with_synonyms
from kleinlite.nano.synonyms import OPENINGS
from kleinlite.text_encoder import TextEncoderConfig

from .config import RecipeConfig
from .rewordings import with_article
from .world import Edit, Lesson, Lessons, World

# What captions say, and what DiceBear calls it.
COLORS = {
    "blue": "#7dd3fc", "purple": "#c4b5fd", "pink": "#f0abfc", "red": "#fca5a5", "orange": "#fdba74",
    "yellow": "#fcd34d", "green": "#bef264", "white": "#e2e8f0",
}  # fmt: skip
BACKGROUNDS = {
    "blue": "#1d4ed8", "purple": "#6d28d9", "pink": "#be185d", "red": "#be123c", "orange": "#c2410c",
    "green": "#047857", "black": "#1e293b",
}  # fmt: skip
BARE = "nothing on its head"
TOPS = {
    "horns": "horns", "small horns": "hornsSmall", "a spike": "spike", "an antenna": "antenna",
    "two antennae": "antennae", "round ears": "earsRound", "pointy ears": "earsPointy", "long ears": "earsDroop",
    "a fin": "fin", "a crown": "crown", "a leaf": "sprout", BARE: None,
}  # fmt: skip
BODIES = {
    "round": "round", "square": "block", "tall": "tower", "wide": "squat", "pointed": "peak", "bell-shaped": "bell"
}  # fmt: skip
EYES = {
    "one eye": "mono", "two eyes": "round", "three eyes": "trio", "four eyes": "four", "closed eyes": "closedLine",
    "a wink": "wink", "angry eyes": "angry", "sleepy eyes": "sleepy",
}  # fmt: skip
MOUTHS = {
    "smiles": "smile", "laughs": "laugh", "frowns": "frown", "says oh": "ooh", "shows its teeth": "teeth",
    "shows its tongue": "tongue", "says nothing": "line",
}  # fmt: skip
PLANTS = {
    name: name for name in ("cactus", "flower", "tulip", "palm", "bush", "sprout", "succulent")
}  # fmt: skip
POTS = {"round": "round", "square": "cylinder", "wide": "bowl"}
PARTS = {  # what a critter or a pot can have
    "critter": {"color": COLORS, "back": BACKGROUNDS, "body": BODIES, "top": TOPS, "eyes": EYES, "mouth": MOUTHS},
    "pot": {
        "color": COLORS, "back": BACKGROUNDS, "body": POTS, "top": PLANTS,
        "eyes": {k: EYES[k] for k in ("two eyes", "closed eyes", "a wink", "angry eyes", "sleepy eyes")},
        "mouth": {k: MOUTHS[k] for k in ("smiles", "frowns", "says oh", "shows its tongue", "says nothing")},
    },
}  # fmt: skip
MOODS = {  # parts that an adjective says as well
    "smiles": "happy", "frowns": "sad", "laughs": "laughing", "says oh": "surprised", "says nothing": "quiet",
    "one eye": "one-eyed", "three eyes": "three-eyed", "four eyes": "four-eyed", "angry eyes": "angry",
    "sleepy eyes": "sleepy", "a wink": "winking",
}  # fmt: skip
SYNONYMS = {
    "critter": ("monster", "creature"), "pot": ("flowerpot", "planter"), "round": ("dome-shaped",),
    "square": ("boxy", "block-shaped"), "wide": ("broad", "chubby"), "pointed": ("cone-shaped",),
    "blue": ("azure",), "purple": ("violet", "lilac"), "pink": ("rose", "magenta"), "red": ("crimson", "scarlet"),
    "orange": ("amber",), "yellow": ("golden", "gold"), "green": ("lime", "emerald"), "white": ("pale",),
    "black": ("dark",), "background": ("backdrop",), "on a": ("in front of a",), "on an": ("in front of an",),
    "small horns": ("little horns", "tiny horns"),
    "a spike": ("a thorn",), "an antenna": ("one antenna", "a feeler"), "two antennae": ("antennae", "feelers"),
    "pointy ears": ("pointed ears", "cat ears"), "long ears": ("droopy ears", "bunny ears"), "a leaf": ("leaves",),
    "nothing on its head": ("a bare head", "a bald head"), "one eye": ("a single eye",),
    "closed eyes": ("shut eyes",), "a wink": ("a winking eye",), "angry eyes": ("mean eyes", "grumpy eyes"),
    "sleepy eyes": ("tired eyes", "drowsy eyes"), "smiles": ("is happy", "is smiling"),
    "laughs": ("is laughing", "has a big laugh"), "frowns": ("is sad", "is frowning"),
    "says oh": ("is surprised", "says ooh"), "shows its teeth": ("bares its teeth",),
    "shows its tongue": ("sticks out its tongue",), "says nothing": ("is silent", "is quiet"),
    "happy": ("smiling", "cheerful"), "sad": ("unhappy", "frowning"), "surprised": ("astonished",),
    "quiet": ("silent",),
    "angry": ("grumpy", "mean"), "sleepy": ("tired",), "flower": ("blossom", "daisy"), "palm": ("palm tree",),
    "bush": ("shrub",), "sprout": ("seedling",),
    "give it": ("let it have",), "take off": ("remove", "take away"),
}  # fmt: skip
SAYS = {  # how an instruction asks for a mouth, or for eyes that are something to do
    "smiles": "make it smile", "laughs": "make it laugh", "frowns": "make it frown", "says oh": "make it say oh",
    "shows its teeth": "make it show its teeth", "shows its tongue": "make it show its tongue",
    "says nothing": "make it say nothing", "closed eyes": "close its eyes", "a wink": "make it wink",
}  # fmt: skip
APART = 113  # of so many pairs of parts, one never meets in training: together they hold out a tenth of all critters
SIZE = 96


@dataclass(frozen=True)
class Being:
    """A critter or a pot, by the words that captions use; the `top` of a pot is its plant."""

    kind: str
    color: str
    back: str
    body: str
    top: str
    eyes: str
    mouth: str

    @property
    def parts(self) -> dict[str, dict]:
        """All that each of its parts could be."""
        return PARTS[self.kind]


@cache
def style(name: str) -> Style:
    """One of DiceBear's sets of drawings."""
    (folder,) = importlib.util.find_spec("dicebear_styles").submodule_search_locations
    return Style(json.loads(Path(folder, f"{name}.json").read_text("utf-8")))


@lru_cache(100_000)
def draw(being: Being, size: int = SIZE) -> Image.Image:
    """An RGB picture of size × size pixels."""
    name = {"critter": "critters", "pot": "sprouts"}[being.kind]
    chosen = {key: parts[getattr(being, key)] for key, parts in being.parts.items()}
    options = {
        "seed": "", "size": size, "cheeksProbability": 0, "patternProbability": 0, "animationVariant": ["none"],
        "backgroundColor": [chosen["back"]], "eyesVariant": [chosen["eyes"]], "mouthVariant": [chosen["mouth"]],
    }  # fmt: skip
    if being.kind == "critter":
        options |= {"bodyColor": [chosen["color"]], "bodyVariant": [chosen["body"]], "accentColor": ["#e2e8f0"]}
        options |= {"topProbability": 100, "topVariant": [chosen["top"]]} if chosen["top"] else {"topProbability": 0}
    else:
        options |= {"potColor": [chosen["color"]], "potVariant": [chosen["body"]], "plantVariant": [chosen["top"]]}
        options |= {"plantColor": ["#34d399"], "bloomColor": ["#fda4af"]}
    svg = Avatar(style(name), options).to_string()
    png = resvg_py.svg_to_bytes(svg_string=svg, width=size, height=size)
    return Image.open(io.BytesIO(bytes(png))).convert("RGB")


def describe(being: Being, named: Iterable[str], moods: bool = False) -> str:
    """A caption that names these of its parts. moods: what an adjective says is said by one."""
    said = {key: getattr(being, key) for key in named}
    adjectives = [MOODS[said.pop(key)] for key in ("mouth", "eyes") if moods and said.get(key) in MOODS]
    adjectives += [said[key] for key in ("body", "color") if key in said]
    text = with_article(" ".join([*adjectives, being.kind]))
    have = [said[key] if key == "eyes" or being.kind == "critter" else with_article(said[key])
            for key in ("top", "eyes") if key in said]  # fmt: skip
    text += f" with {' and '.join(have)}" if have else ""
    text += f" that {said['mouth']}" if "mouth" in said else ""
    return text + (f" on {with_article(said['back'])} background" if "back" in said else "")


def requested(being: Being, caption: str) -> list[str]:
    """Which parts of a being a caption of `describe` names."""
    head, kind, rest = re.split(rf"\b({being.kind})\b", caption, maxsplit=1)
    words = head.split()

    def says(key: str) -> bool:
        value = getattr(being, key)
        if key in ("body", "color"):
            return value in words
        if key == "back":
            return f"{value} background" in rest
        with_it = re.search(rf" (with|and|that) (an? )?{re.escape(value)}\b", rest)
        return bool(with_it) or MOODS.get(value) in words

    return [key for key in being.parts if says(key)]


def instruction(being: Being, key: str, value: str) -> str:
    """The sentence that gives a being another value of one of its parts."""
    if value in SAYS:
        return SAYS[value]
    if key == "back":
        return f"make the background {value}"
    if key in ("color", "body"):
        return f"make it {value}"
    if key == "top" and being.kind == "pot":
        return f"turn the {being.top} into {with_article(value)}"
    if value == BARE:
        return take_off(being.top)
    return f"give it {value}"


def take_off(top: str) -> str:
    return f"take off its {re.sub(r'^(an?|two) ', '', top)}"


def apart(kind: str, one: tuple[str, str], other: tuple[str, str]) -> bool:
    """Whether two parts, as (name, value) each, never meet in training."""
    first, second = sorted((one, other))
    return zlib.crc32(f"{kind}: {' '.join(first)}, {' '.join(second)}".encode()) % APART == 0


@lru_cache(500_000)
def pairs_apart(being: Being) -> tuple[tuple[str, str], ...]:
    """The parts of a being that never meet in training, two by two, by their names."""
    parts = [(key, getattr(being, key)) for key in being.parts]
    return tuple((a[0], b[0]) for a, b in itertools.combinations(parts, 2) if apart(being.kind, a, b))


def sample(seed: int) -> Being:
    """A random being, the same for the same seed; seven in ten are critters."""
    rng = random.Random(seed ^ 0xC417E5)
    kind = "critter" if rng.random() < 0.7 else "pot"
    return Being(kind, **{key: rng.choice(list(values)) for key, values in PARTS[kind].items()})


def all_captions(being: Being, count: int = 8) -> list[str]:
    """Everything named, and some captions that name less; the same for the same being."""
    rng = random.Random(repr(being))
    texts = [describe(being, being.parts), describe(being, being.parts, moods=True)]
    likely = {"color": 0.8, "top": 0.7, "eyes": 0.6, "mouth": 0.6, "body": 0.5, "back": 0.5}
    while len(texts) < count:
        named = [key for key, p in likely.items() if rng.random() < p]
        texts.append(describe(being, named, moods=rng.random() < 0.3))
    return list(dict.fromkeys(texts))


def sample_edit(seed: int) -> Edit:
    """An edit that changes one part."""
    rng = random.Random(seed ^ 0x5EED)
    before = sample(rng.randrange(1 << 30))
    key = rng.choice(list(before.parts))
    value = rng.choice([v for v in before.parts[key] if v != getattr(before, key)])
    return Edit((before,), instruction(before, key, value), replace(before, **{key: value}))


def one_change(before: Being, after: Being) -> str | None:
    """The instruction that turns one being into another; None if they differ in more than one part, or in none."""
    changed = [key for key in before.parts if getattr(before, key) != getattr(after, key)]
    return instruction(before, changed[0], getattr(after, changed[0])) if len(changed) == 1 else None


def relatives(seed: int) -> list[Being]:
    """A being, and all that come of it when three of its parts are as they were or another one: eight."""
    rng = random.Random(seed ^ 0xFA311)
    being = sample(rng.randrange(1 << 30))
    forms = []
    for key in rng.sample(list(being.parts), 3):
        value = rng.choice([value for value in being.parts[key] if value != getattr(being, key)])
        forms.append([{}, {key: value}])
    return [replace(being, **a, **b, **c) for a, b, c in itertools.product(*forms)]


def idle_instruction(rng: random.Random, being: Being) -> str:
    """An instruction about what is not there, or that is followed already: the picture should stay as it is."""
    how = rng.random()
    if how < 0.4:
        key = rng.choice([k for k in being.parts if (being.kind, k) != ("pot", "top")])
        if getattr(being, key) != BARE:
            return instruction(being, key, getattr(being, key))
    if how < 0.8:
        return take_off(rng.choice([top for top in TOPS if top not in (being.top, BARE)]))
    plants = [plant for plant in PLANTS if plant != being.top]
    plant = rng.choice(plants)
    return f"turn the {plant} into {with_article(rng.choice([p for p in PLANTS if p != plant]))}"


# The judge draws, too: of each part that is asked for, the picture has to be nearer to the drawing with it than to
# every drawing with another value of that part. Parts that nobody asked for are what fits best.


def far(picture: np.ndarray, being: Being) -> float:
    """Mean squared difference between a picture, (96, 96, 3) in levels, and a drawing."""
    return float(((np.asarray(draw(being), np.float32) - picture) ** 2).mean())


def nearest(picture: np.ndarray, being: Being, key: str) -> Being:
    """The being with that value of one part with which the picture agrees best."""
    return min((replace(being, **{key: value}) for value in being.parts[key]), key=lambda other: far(picture, other))


def fit(picture: np.ndarray, being: Being, keys: Iterable[str], rounds: int = 2) -> Being:
    """These parts of a being, one after the other, as they agree best with the picture."""
    for key in [*keys] * rounds:
        being = nearest(picture, being, key)
    return being


def levels(picture: Image.Image) -> np.ndarray:
    return np.asarray(picture.convert("RGB").resize((SIZE, SIZE)), np.float32)


def same_parts(picture: Image.Image, being: Being, keys: Iterable[str]) -> dict[str, bool]:
    """For each of these parts, whether the picture shows it as the being has it."""
    pixels = levels(picture)
    return {key: nearest(pixels, being, key) == being for key in keys}


def examine(picture: Image.Image, being: Being, caption: str) -> dict[str, bool]:
    """For all that a caption of the being asks for, whether the picture shows it."""
    pixels = levels(picture)
    named = requested(being, caption)
    best = fit(pixels, being, [key for key in being.parts if key not in named])
    kind = "pot" if being.kind == "critter" else "critter"
    known = {key: getattr(being, key) for key, values in PARTS[kind].items() if getattr(being, key) in values}
    other = Being(kind, **{key: known.get(key, next(iter(values))) for key, values in PARTS[kind].items()})
    is_kind = far(pixels, best) < far(pixels, fit(pixels, other, other.parts))
    return {"kind": is_kind} | {key: nearest(pixels, best, key) == best for key in named}


def examine_edit(picture: Image.Image, before: Being, after: Being) -> tuple[dict[str, bool], dict[str, bool]]:
    """Of an edit: whether the picture shows what was to change, and whether it shows each part that was to stay."""
    seen = same_parts(picture, after, after.parts)
    changed = {key for key in after.parts if getattr(before, key) != getattr(after, key)}
    return {key: seen[key] for key in changed}, {key: ok for key, ok in seen.items() if key not in changed}


BETWEEN = "a an with and that on background make the it give its take off turn into"  # of no table
TOGETHER = ("cat ears", "bunny ears", "palm tree")  # it draws no cat, no bunny, and no other tree


def say_limits() -> dict[str, Any]:
    """What kleinlite/critters/words.json holds: all words that the model learned, so that others can be named."""
    names = {name for parts in PARTS.values() for values in parts.values() for name in values}
    said = with_synonyms((BETWEEN, *PARTS, *names, *MOODS.values(), *SAYS.values(), *SYNONYMS), SYNONYMS)
    words = {word for text in (*said, *OPENINGS) for word in split_words(text)} - {"cat", "bunny", "tree"}
    kinds, behind = with_synonyms(PARTS, SYNONYMS), with_synonyms(["background"], SYNONYMS)
    no_critters = with_synonyms(BACKGROUNDS.keys() - COLORS.keys(), SYNONYMS)
    no_background = with_synonyms(COLORS.keys() - BACKGROUNDS.keys(), SYNONYMS)
    never = [*itertools.product(no_critters, kinds), *itertools.product(no_background, behind)]
    shapes = kinds.union(COLORS, BACKGROUNDS, BODIES, POTS, TOPS, PLANTS)
    return {
        "draws": "critters with ears, horns or crowns, and potted plants with faces",
        "words": sorted(words) + [*TOGETHER], "never": sorted(map(" ".join, never)),
        "things": sorted(kinds), "most": 1, "crowd": "two in one picture",
        "meant": sorted({word for text in shapes for word in split_words(text) if len(word) > 3}),
    }  # fmt: skip


class Critters(World):
    """About 226,000 critters and 29,000 pots; edits of one part."""

    name = "critters"
    samples = (
        "a yellow critter with horns and one eye that laughs on a purple background",
        "a tall green critter with two antennae and three eyes on a red background",
        "a round orange critter with pointy ears and a wink on a blue background",
        "a white critter with a fin that shows its teeth on a black background",
        "a purple critter with four eyes that frowns on an orange background",
        "a wide blue critter with horns and angry eyes on a red background",
        "a pink pot with a cactus that smiles on a green background", "a yellow pot with a flower and closed eyes",
        "a red pot with a tulip and angry eyes on a black background", "a white pot with a succulent and a wink",
        "a happy green monster with one eye", "a critter",
    )  # fmt: skip
    synonyms = SYNONYMS
    most_words = 24
    config = RecipeConfig(
        text_encoder=TextEncoderConfig(
            800, d=96, d_mlp=256, layers=4, heads=4, kv_heads=2, head_dim=32, out_layers=(1, 2, 3), max_length=48
        ),
        begins_with="nano-base", pictures=12_000, edits=2_000, families=600,
        steps={"autoencoder": 700, "text_encoder": 400, "transformer": 6850, "distill": 240},
    )  # fmt: skip
    turns = (
        "pictures", "edits", "pictures", "pictures", "edit_pairs", "pictures", "pictures", "no_op_edits", "pictures",
    )  # fmt: skip

    def sample(self, seed: int) -> Being:
        return sample(seed)

    def draw(self, scene: Being) -> Image.Image:
        return draw(scene, self.size)

    def captions(self, scene: Being) -> list[str]:
        return all_captions(scene)

    def held_out(self, scene: Being) -> bool:
        return bool(pairs_apart(scene))

    def allowed_captions(self, scene: Being) -> tuple[str, ...]:
        """Those that name every part are there about as often as all others together."""
        complete = self.captions(scene)[:2]
        texts = super().allowed_captions(scene)
        full = [text for text in texts if text in complete]
        others = [text for text in texts if text not in complete]
        return (*full * max(1, len(others) // max(1, len(full))), *others)

    def sample_edit(self, seed: int) -> Edit:
        return sample_edit(seed)

    def no_op_instruction(self, rng: random.Random, scene: Being) -> str:
        return idle_instruction(rng, scene)

    def lessons(self, cfg: RecipeConfig) -> Lessons:
        """As in every world, and moods and families.

        A caption with an adjective for a mouth comes once more. Between many two of a family's pictures lies one
        instruction.
        """
        lessons = super().lessons(cfg)
        said = {MOODS[mouth] for mouth in MOUTHS if mouth in MOODS}
        moods = [
            replace(lesson, texts=texts) for lesson in lessons.pictures
            if (texts := tuple(text for text in lesson.texts if said & set(text.split())))
        ]  # fmt: skip
        lessons.pictures += moods
        for seed in range(cfg.families):
            scenes = [being for being in relatives(seed) if not self.held_out(being)]
            row = {being: lessons.add_scene(being) for being in scenes}
            for before in scenes:
                edits = [
                    Lesson((text,), row[after], (row[before],)) for after in scenes
                    if (text := one_change(before, after)) and not self.edit_held_out(before, text)
                ]  # fmt: skip
                lessons.edits += edits
                lessons.edit_pairs += [([one], [other]) for one, other in itertools.combinations(edits, 2)]
        return lessons

    def names_what_is_held_out(self, scene: Being, caption: str) -> bool:
        named = requested(scene, caption)
        return any(one in named and other in named for one, other in pairs_apart(scene))

    def examine(self, picture: Image.Image, scene: Being, caption: str) -> dict[str, bool]:
        return examine(picture, scene, caption)

    def examine_edit(
        self, picture: Image.Image, before: Being, after: Being
    ) -> tuple[dict[str, bool], dict[str, bool]]:  # fmt: skip
        return examine_edit(picture, before, after)


WORLD = Critters()
