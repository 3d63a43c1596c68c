"""What the bundled models draw, and what of a request they never learned: unknown words, other sizes, crowds.

The page Draw says the same, but for typos: `site/live.py` hands these words to its script.
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches

from ..inference.request import fold_blanks
from ..models.registry import find_bundled
from ..scenes import BACKGROUNDS, COLORS, GROUNDS, LAND_THINGS, RELATIONS, SEA_THINGS, SHAPES, SUNS, WHEN
from .synonyms import OPENINGS, SYNONYMS

DRAWS = "circles, squares, triangles, stars, hearts, diamonds, houses, trees and boats"
THINGS = (*SHAPES, *LAND_THINGS, *SEA_THINGS)
PLURALS = tuple(f"{shape}s" for shape in SHAPES)
MOST_THINGS = 3  # of a row
BETWEEN = (  # the words of captions and instructions that stand in no table
    "a an the and in middle at top bottom of on left right row two three with background sun moon to "
    "under over put both together change ground make it day night sunset turn into remove add"
)
HARMLESS = frozenset(("color", "colour", "it's", "it’s"))  # never learned; 16 of 16 pictures were right all the same
GAPS = re.compile(r"[\s.,!?;:…\"“”()]+")  # between two words


def split_words(text: str) -> list[str]:
    """A sentence's words in small letters."""
    return [word for word in GAPS.split(text.lower()) if word]


def with_synonyms(names: Iterable[str]) -> set[str]:
    """These names and all other words for them."""
    return {word for name in names for word in (name, *SYNONYMS.get(name, ()))}


def list_words() -> set[str]:
    """Every word of the captions and instructions that nano learned from, and of their rewordings."""
    grounds = [name for name, *_ in GROUNDS.values()]
    names = with_synonyms((*COLORS, *THINGS, *PLURALS, *RELATIONS, *WHEN.values(), *SYNONYMS))
    return {word for text in (BETWEEN, *names, *grounds, *SUNS.values(), *OPENINGS) for word in split_words(text)}


WORDS = list_words() | HARMLESS
THING_WORDS = with_synonyms(THINGS) | {*PLURALS}
MEANT = sorted(word for word in THING_WORDS | with_synonyms(COLORS) if len(word) > 3)  # by what may be a typo
# Colors of things, and of no background.
NOT_BEHIND = with_synonyms(COLORS) - with_synonyms(filter(None, BACKGROUNDS))


def describe_limits(model: str, size: int, prompt: str, width: int, height: int) -> str:
    """One sentence on what of a request a bundled model never learned; "" if nothing, or for another model.

    size: the side of the pictures that it was trained on, in pixels.
    """
    if not find_bundled(model):
        return ""
    words = split_words(fold_blanks(prompt))
    unknown = list(dict.fromkeys(word for word in words if word not in WORDS))
    learned = [f'"{word}"' for word in unknown[:3]]
    if len(unknown) > 3:
        learned.append(f"{len(unknown) - 3} more words")
    for color, what in zip(words, words[1:]):
        if what in ("background", "backdrop") and color in NOT_BEHIND:
            learned.append(f"a {color} {what}")
    if sum(word in THING_WORDS for word in words) > MOST_THINGS:
        learned.append(f"more than {MOST_THINGS} things")
    if (width, height) != (size, size):
        learned.append(f"another size than {size}×{size}")
    typos = [word for word in unknown if word[0].isalpha()]  # not $home
    meant = [word for typo in typos for word in get_close_matches(typo, MEANT, 1, cutoff=0.85)]
    way_out = f'did you mean "{meant[0]}"?' if meant else f"it draws {DRAWS}."
    return f"{model} never learned {', '.join(learned)}: {way_out}" if learned else ""


def describe_adapter_limits(adapter: str, steps: int) -> str:
    """The same of an adapter that comes with nano, by its name."""
    return "one-look draws in a single step: add --steps 1." if adapter == "one-look" and steps > 1 else ""
