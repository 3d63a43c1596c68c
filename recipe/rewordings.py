"""Other words for the same scene: synonyms, capitals, missing articles.

A world's captions say each thing in one way. People do not, so a model also learns from sentences that went through
`reword`.
"""

import random
import re
from collections.abc import Mapping

from kleinlite.nano.synonyms import OPENINGS

COMMANDS = ("make", "turn", "remove", "change", "add", "put", "give", "take", "close", "delete", "erase", "place")


def with_article(words: str) -> str:
    """The words behind "a" or "an"."""
    return f"{'an' if words[0] in 'aeiou' and not words.startswith('one') else 'a'} {words}"


def reword(rng: random.Random, text: str, synonyms: Mapping[str, tuple[str, ...]], most: int) -> str:
    """One time in two the same in other words, if these are at most so many; else the sentence itself."""
    if not text or rng.random() < 0.5:
        return text
    said = f" {text} "
    for word in rng.sample(sorted(synonyms), len(synonyms)):
        if f" {word} " in said and rng.random() < 0.4:
            said = said.replace(f" {word} ", f" {rng.choice(synonyms[word])} ")
    said = re.sub(r" an? (?=[aeiou])(?!one)", " an ", re.sub(r" an (?![aeiou]|one)", " a ", said)).strip()
    if rng.random() < 0.3:
        said = re.sub(r"\b(an?|the) ", "", said)
    elif rng.random() < 0.12 and not said.startswith(COMMANDS):
        said = rng.choice(OPENINGS) + said
    how = rng.random()
    if how < 0.3:
        said = said[:1].upper() + said[1:]
    elif how < 0.42:
        said = said.upper() if how < 0.36 else said.title()
    said += "." if rng.random() < 0.15 else ""
    return said if len(said.split()) <= most else text
