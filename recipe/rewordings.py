"""Other words for the same scene: synonyms, capitals, missing articles; and instructions that ask for nothing.

`captions` says each thing in one way. People do not, so klein-nano also learns from sentences that went through
`reword`.
"""

import random
import re

from kleinlite.nano.synonyms import OPENINGS, SYNONYMS
from kleinlite.scenes import COLORS, LAND_THINGS, SHAPES, Scene, thing_colors, with_article

WORDS = 17  # a sentence that is longer stays as it was: with the chat template it must fit into 32 tokens


def reword(rng: random.Random, text: str) -> str:
    """The same in other words, one time in two; the other time the sentence itself."""
    if not text or rng.random() < 0.5:
        return text
    said = f" {text} "
    for word in rng.sample(sorted(SYNONYMS), len(SYNONYMS)):
        if f" {word} " in said and rng.random() < 0.4:
            said = said.replace(f" {word} ", f" {rng.choice(SYNONYMS[word])} ")
    said = re.sub(r" an? (?=[aeiou])", " an ", re.sub(r" an (?![aeiou])", " a ", said)).strip()
    if rng.random() < 0.3:
        said = re.sub(r"\b(an?|the) ", "", said)
    elif rng.random() < 0.12 and not said.startswith(("make", "turn", "remove", "change", "add", "put")):
        said = rng.choice(OPENINGS) + said
    how = rng.random()
    if how < 0.3:
        said = said[:1].upper() + said[1:]
    elif how < 0.42:
        said = said.upper() if how < 0.36 else said.title()
    said += "." if rng.random() < 0.15 else ""
    return said if len(said.split()) <= WORDS else text


def no_op_instruction(rng: random.Random, scene: Scene) -> str:
    """An instruction about a thing that is not in the scene: the picture should stay as it is."""
    there = {thing.kind for thing in scene.things}
    kinds = thing_colors(scene.ground) if rng.random() < 0.7 else (*SHAPES, *LAND_THINGS)
    kind = rng.choice([kind for kind in (*kinds, *SHAPES) if kind not in there])
    other = rng.choice([k for k in (*SHAPES, *LAND_THINGS) if k != kind])
    return rng.choice((
        f"remove the {kind}", f"remove the {kind}", f"make the {kind} {rng.choice(list(COLORS))}",
        f"turn the {kind} into {with_article(other)}",
    ))  # fmt: skip
