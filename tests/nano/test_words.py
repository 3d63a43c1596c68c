"""Other words for the same scene, and what is held out."""

import math
import random
from collections import Counter

import mlx.core as mx

from kleinlite.nano.data import train_tokenizer
from kleinlite.nano.lessons import LESSONS, SEGMENTS, STUDENT, Lessons, StudentLessons
from kleinlite.nano.words import SYNONYMS, WORDS, idle_instruction, reword
from kleinlite.scenes import captions, content, sample, sample_one, sample_row, scene_held_out

SCENES = [sample(seed) for seed in range(300)]


def test_rewording_keeps_what_is_said():
    """Synonyms put back, no article, no capital: what is left is the sentence."""
    rng, changed = random.Random(0), 0
    for scene in SCENES[:150]:
        for caption in captions(scene):
            said = reword(rng, caption)
            changed += said != caption
            assert len(said.split()) <= WORDS
            colours = [thing.colour for thing in scene.things if f"{thing.colour} {thing.kind}" in caption]
            for colour in colours:
                assert any(word in said.lower() for word in (colour, *SYNONYMS.get(colour, ()))), (caption, said)
    assert changed > 200


def test_articles_suit_the_word_that_follows():
    rng = random.Random(1)
    for _ in range(400):
        said = f" {reword(rng, 'an orange circle above a red square')} ".lower()
        assert " a orange" not in said and " a amber" not in said and " an crimson" not in said


def test_an_idle_instruction_names_what_is_not_there():
    rng = random.Random(2)
    for scene in SCENES:
        words = idle_instruction(rng, scene).split()
        assert words[0] in ("remove", "make", "turn") and words[2] not in {thing.kind for thing in scene.things}


def made_up_lessons(kind=Lessons, turns=LESSONS):
    """Lessons of 2,000 scenes, 200 rows and 200 single shapes, whose latents are nothing."""
    sizes = {"pictures": 2000, "targets": 0, "first": 0, "second": 0, "relatives": 0, "rows": 200, "ones": 200}
    latents = {name: mx.zeros((count, 1, 1)) for name, count in sizes.items()}
    return kind(latents, train_tokenizer(), 32, 40, turns)


def test_what_is_hard_comes_more_often():
    lessons = made_up_lessons()
    turns = Counter(lessons.seeds)
    by_turns = {n: [lessons.scenes[seed] for seed in turns if turns[seed] == n] for n in (1, 2, 3, 4)}
    assert all(by_turns.values())
    assert not any(thing.kind in ("circle", "star", "triangle") for scene in by_turns[1] for thing in scene.things)
    assert all(thing.kind != "star" for scene in by_turns[2] for thing in scene.things)
    assert all(scene.is_landscape for scene in by_turns[4])
    green = [seed for seed in turns if lessons.scenes[seed].ground == "hills"
             and any(thing.colour == "green" for thing in lessons.scenes[seed].things)]  # fmt: skip
    assert green and all(turns[seed] == 4 for seed in green)
    stars = sum(any(thing.kind == "star" for thing in scene.things) for _, scene in lessons.more["ones"])
    assert stars > 0.25 * len(lessons.more["ones"])  # a sixth of the kinds


def test_every_kind_of_lesson_meets_every_step_of_the_student():
    assert set(STUDENT) < set(LESSONS) and math.gcd(len(STUDENT), len(SEGMENTS)) == 1
    assert set(SEGMENTS) == {0, 1, 2, 3}


def test_landscapes_are_guided_once_their_layout_stands():
    lessons = made_up_lessons(StudentLessons, ("pictures", "idle"))
    met = set()
    for step in range(2 * len(SEGMENTS)):
        clean, references, *_, guidance, segment = lessons(step)
        assert guidance.shape == (len(clean),)
        if references.shape[1]:
            assert set(guidance.tolist()) == {1.5}
        else:
            shown = [scene for *_, scene in lessons.choose(random.Random(step))]
            want = [1.0 if scene.is_landscape and segment.shape[0] < 2 else 3.0 for scene in shown]
            assert guidance.tolist() == want
            met |= {(segment.shape[0], value) for value in want}
    assert met == {(0, 1.0), (0, 3.0), (1, 1.0), (1, 3.0), (2, 3.0), (3, 3.0)}


def test_a_content_is_held_out_in_every_wording():
    share = sum(map(scene_held_out, SCENES)) / len(SCENES)
    assert 0.05 < share < 0.16
    for scene in SCENES:
        if len(scene.things) == 2:  # both ways round say the same
            assert content(scene).split()[:2] == [scene.things[0].colour, scene.things[0].kind]
    held = {caption for seed in range(2000) if scene_held_out(sample(seed)) for caption in captions(sample(seed))[-1:]}
    lessons = made_up_lessons()
    texts = [text for step in range(200) for text in lessons.pictures(random.Random(step))[0]]
    assert held and not held & set(texts)


def test_rows_and_single_shapes_say_what_they_hold():
    for seed in range(60):
        row, one = sample_row(seed), sample_one(seed)
        assert len(row.things) in (2, 3) and len(one.things) == 1
        same = len({(t.kind, t.colour) for t in row.things}) == 1
        assert same == captions(row)[1].startswith(("two", "three"))
        assert all(t.kind in captions(row)[-1] for t in row.things)
