"""Other words for the same scene, and what is held out."""

import random
import re

from kleinlite.nano.synonyms import OPENINGS, SYNONYMS
from kleinlite.scenes import captions, sample
from recipe.edits import no_op_instruction
from recipe.scene_lessons import sample_one, sample_row
from recipe.shapes import WORLD

SCENES = [sample(seed) for seed in range(300)]


def bare(text: str) -> str:
    return re.sub(r"\b(an?|the) ", "", text.lower().rstrip("."))


WORD_OF = {bare(synonym): word for word, others in SYNONYMS.items() for synonym in others if word != "under"}


def plain(text: str) -> str:
    """Without opening, articles and capitals, and every synonym put back."""
    text = bare(text)
    for opening in OPENINGS:
        text = text.removeprefix(bare(opening))
    text = f" {text} "
    for synonym in sorted(WORD_OF, key=len, reverse=True):
        text = text.replace(f" {synonym} ", f" {WORD_OF[synonym]} ")
    return text


def test_rewording_keeps_what_is_said():
    """Synonyms put back, no article, no capital: what is left is the sentence."""
    rng, changed = random.Random(0), 0
    for scene in SCENES[:150]:
        for caption in captions(scene):
            said = WORLD.reword(rng, caption)
            changed += said != caption
            assert len(said.split()) <= WORLD.most_words
            assert plain(said) == plain(caption)
    assert changed > 200


def test_articles_suit_the_word_that_follows():
    rng = random.Random(1)
    for _ in range(400):
        said = f" {WORLD.reword(rng, 'an orange circle above a red square')} ".lower()
        assert " a orange" not in said and " a amber" not in said and " an crimson" not in said


def test_a_no_op_instruction_names_what_is_not_there():
    rng = random.Random(2)
    for scene in SCENES:
        words = no_op_instruction(rng, scene).split()
        assert words[0] in ("remove", "make", "turn") and words[2] not in {thing.kind for thing in scene.things}


def test_rows_and_single_shapes_say_what_they_hold():
    for seed in range(60):
        row, one = sample_row(seed), sample_one(seed)
        assert len(row.things) in (2, 3) and len(one.things) == 1
        same = len({(t.kind, t.color) for t in row.things}) == 1
        assert same == captions(row)[1].startswith(("two", "three"))
        assert all(t.kind in captions(row)[-1] for t in row.things)
