"""What the bundled models draw, and what of a request they never learned: unknown words, other sizes, crowds.

The page Draw says the same, but for typos: `site/live.py` hands these words to its script.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

from ..inference.request import fold_blanks
from ..scenes import BACKGROUNDS, COLORS, GROUNDS, LAND_THINGS, RELATIONS, SEA_THINGS, SHAPES, SUNS, WHEN
from .synonyms import OPENINGS, SYNONYMS

DRAWS = "circles, squares, triangles, stars, hearts, diamonds, houses, trees and boats"
THINGS = (*SHAPES, *LAND_THINGS, *SEA_THINGS)
PLURALS = tuple(f"{shape}s" for shape in SHAPES)
BETWEEN = (  # the words of captions and instructions that stand in no table
    "a an the and in middle at top bottom of on left right row two three with background sun moon to "
    "under over put both together change ground make it day night sunset turn into remove add"
)
HARMLESS = frozenset(("color", "colour", "it's", "it’s"))  # never learned; 16 of 16 pictures were right all the same
GAPS = re.compile(r"[\s.,!?;:…\"“”()]+")  # between two words


class Limits(NamedTuple):
    """What a model learned from."""

    draws: str  # all of it, in a sentence
    words: Collection[str]  # or two, where one alone means something else: cat ears
    never: Collection[str]  # two that never stood side by side: things have colors that no background has
    things: Collection[str]  # of which a picture shows so many at most:
    most: int
    crowd: str  # more than that, in words
    meant: Collection[str]  # by what may be a typo


def split_words(text: str) -> list[str]:
    """A sentence's words in small letters."""
    return [word for word in GAPS.split(text.lower()) if word]


def with_synonyms(names: Iterable[str], synonyms: Mapping[str, tuple[str, ...]] = SYNONYMS) -> set[str]:
    """These names and all other words for them."""
    return {word for name in names for word in (name, *synonyms.get(name, ()))}


def list_words() -> set[str]:
    """Every word of the captions and instructions that nano learned from, and of their rewordings."""
    grounds = [name for name, *_ in GROUNDS.values()]
    names = with_synonyms((*COLORS, *THINGS, *PLURALS, *RELATIONS, *WHEN.values(), *SYNONYMS))
    return {word for text in (BETWEEN, *names, *grounds, *SUNS.values(), *OPENINGS) for word in split_words(text)}


def nano_limits() -> Limits:
    things = with_synonyms(THINGS) | {*PLURALS}
    colors = with_synonyms(COLORS)
    pairs = product(colors - with_synonyms(filter(None, BACKGROUNDS)), with_synonyms(["background"]))
    meant = sorted(word for word in things | colors if len(word) > 3)
    return Limits(DRAWS, list_words() | HARMLESS, [*map(" ".join, pairs)], things, 3, "more than 3 things", meant)


CRITTERS = Path(__file__).parents[1] / "critters" / "words.json"  # by `recipe.critters.say_limits`
LIMITS = dict.fromkeys(("nano", "nano-base"), nano_limits())
LIMITS["critters"] = Limits(**json.loads(CRITTERS.read_text("utf-8")))


def describe_limits(model: str, size: int, prompt: str, width: int, height: int) -> str:
    """One sentence on what of a request a bundled model never learned, whose pictures have this size; "" if nothing."""
    limits = LIMITS.get(model.lower())
    if not limits:
        return ""
    words = split_words(fold_blanks(prompt))
    pairs = [*map(" ".join, pairwise(words))]
    known = {word for pair in pairs if pair in limits.words for word in pair.split()}.union(limits.words)
    unknown = list(dict.fromkeys(word for word in words if word not in known))
    learned = [f'"{word}"' for word in unknown[:3]]
    if len(unknown) > 3:
        learned.append(f"{len(unknown) - 3} more words")
    learned += [f'"{pair}"' for pair in pairs if pair in limits.never]
    if sum(word in limits.things for word in words) > limits.most:
        learned.append(limits.crowd)
    if (width, height) != (size, size):
        learned.append(f"another size than {size}×{size}")
    typos = [word for word in unknown if word[0].isalpha()]  # not $home
    meant = [word for typo in typos for word in get_close_matches(typo, limits.meant, 1, cutoff=0.85)]
    way_out = f'did you mean "{meant[0]}"?' if meant else f"it draws {limits.draws}."
    return f"{model} never learned {', '.join(learned)}: {way_out}" if learned else ""
