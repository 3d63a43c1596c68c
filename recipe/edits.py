"""Edits of drawn scenes: a reference, an instruction, and the scene that should come out."""

import itertools
import random
from dataclasses import fields, replace

from kleinlite.nano.evaluate import CASES, DEVELOPMENT, TEST, Attributes
from kleinlite.scenes import (
    BACKGROUNDS,
    COLORS,
    GROUNDS,
    LAND_THINGS,
    SHAPES,
    SKIES,
    Scene,
    Thing,
    captions,
    held_out,
    opposite,
    pick_thing,
    sample,
    thing_colors,
    with_article,
)


def instruction(before: Scene, after: Scene) -> str | None:
    """The sentence that turns one scene into the other; None if they differ in more than one sentence can say."""
    apart = [f.name for f in fields(Scene) if getattr(before, f.name) != getattr(after, f.name)]
    if len(apart) != 1:
        return None
    whole = {"sky": f"make it {after.sky}", "background": f"make the background {after.background}"}
    if apart[0] in whole:
        return whole[apart[0]]
    if apart[0] == "ground":
        return f"change the ground to {GROUNDS[after.ground][0]}"
    old, new = ({thing.place: thing for thing in scene.things} for scene in (before, after))
    changed = [place for place in {**old, **new} if old.get(place) != new.get(place)]
    if len(changed) != 1:
        return None
    was = old.get(changed[0])
    now = new.get(changed[0])
    if now is None:
        return None if was is None else f"remove the {was.kind}"
    if was is None:
        return f"add {with_article(f'{now.color} {now.kind}')}"
    if was.kind == now.kind:
        return f"make the {was.kind} {now.color}"
    if was.color == now.color:
        return f"turn the {was.kind} into {with_article(now.kind)}"
    if was.color in thing_colors(before.ground)[now.kind]:
        return None  # two changes: of the kind, and of a color that it could have kept
    return f"turn the {was.kind} into {with_article(f'{now.color} {now.kind}')}"


def other_color(rng: random.Random, scene: Scene, thing: Thing) -> Thing:
    colors = thing_colors(scene.ground)[thing.kind]
    return replace(thing, color=rng.choice([c for c in colors if c not in (thing.color, scene.background)]))


def other_kind(rng: random.Random, scene: Scene, thing: Thing, kinds: set[str]) -> Thing:
    """One of these kinds in the thing's place, and in its color where there are such things."""
    kind = rng.choice(sorted(kinds))
    colors = thing_colors(scene.ground)[kind]
    return Thing(kind, thing.color if thing.color in colors else rng.choice(colors), thing.place)


def sample_edit(seed: int) -> tuple[tuple[Scene, ...], str, Scene]:
    """Reference scenes, an instruction, and the scene that should come out; the same for the same seed."""
    rng = random.Random(seed ^ 0x5EED)
    scene = sample(rng.randrange(1 << 30))
    options = ["sky"] if scene.is_landscape else ["background"]
    if scene.is_landscape and scene.ground != "sea":
        options.append("ground")
    if scene.things:
        options += ["recolor", "recolor", "remove", "swap"]
    if len(scene.things) == 1 and scene.things[0].place != "center" and scene.ground != "sea":
        options += ["add", "together"]
    how = rng.choice(options)
    if how == "sky":
        after = replace(scene, sky=rng.choice([s for s in SKIES if s != scene.sky]))
    elif how == "ground":
        after = replace(scene, ground=rng.choice([g for g in ("hills", "desert", "snow") if g != scene.ground]))
    elif how == "background":
        taken = {scene.background, *(t.color for t in scene.things if t.color == "white")}
        after = replace(scene, background=rng.choice([c for c in BACKGROUNDS if c not in taken]))
    else:
        i = rng.randrange(len(scene.things))
        thing = scene.things[i]
        if how in ("add", "together"):
            new = pick_thing(rng, scene.ground, opposite(thing.place), unlike=thing)
            if scene.background == new.color == "white":
                new = replace(new, color="blue")
            both = tuple(sorted((thing, new), key=lambda t: t.place not in ("top", "left")))
            after = replace(scene, things=both)
            if how == "together":
                return (scene, replace(scene, things=(new,))), "put both together", after
        else:
            others = set(thing_colors(scene.ground)) - {t.kind for t in scene.things}
            instead: tuple[Thing, ...] = ()
            if how == "swap" and others:
                instead = (other_kind(rng, scene, thing, others),)
            elif how != "remove":
                instead = (other_color(rng, scene, thing),)
            after = replace(scene, things=scene.things[:i] + instead + scene.things[i + 1 :])
    return (scene,), str(instruction(scene, after)), after  # always one change, which a sentence names


def edit_held_out(before: Scene, text: str) -> bool:
    """One edit in ten is never trained on. It depends on the scene, in its longest caption, and on the instruction."""
    return held_out(f"{captions(before)[-1]}: {text}")


def held_out_edits(count: int, first: int = DEVELOPMENT) -> list[tuple[tuple[Scene, ...], str, Scene]]:
    """`count` edits of held-out scenes with held-out instructions, the same every time.

    The test set has none of the development set's, wherever their things stand by a pixel or two.
    """
    known = set(map(question, held_out_edits(CASES))) if first == TEST else set()
    edits = (sample_edit(seed) for seed in itertools.count(first))
    fresh = (edit for edit in edits if edit_held_out(edit[0][0], edit[1]) and question(edit) not in known)
    return list(itertools.islice(fresh, count))


def question(edit: tuple[tuple[Scene, ...], str, Scene]) -> tuple[tuple[Scene, ...], str]:
    """What an edit asks, without the small shifts of its references."""
    return tuple(replace(scene, jitter=None) for scene in edit[0]), edit[1]


def relatives(seed: int) -> list[Scene]:
    """A scene of two things, and what comes of it when each is as it was, has another color or kind, or is gone.

    Between many two of these, 8 or 24 scenes, lies one instruction, so that a few pictures make many edits.
    """
    rng = random.Random(seed ^ 0xFA311)
    scene = next(s for s in iter(lambda: sample(rng.randrange(1 << 30)), None) if len(s.things) == 2)
    free = set(thing_colors(scene.ground)) - {thing.kind for thing in scene.things}
    forms = [[thing, other_color(rng, scene, thing)] for thing in scene.things]
    for row in (*forms, *forms):
        if free:
            row.append(other_kind(rng, scene, row[0], free))
            free.discard(row[-1].kind)  # the two never become the same kind
    return [
        replace(scene, things=tuple(thing for thing in pair if thing))
        for pair in itertools.product(*([*row, None] for row in forms)) if any(pair)
    ]  # fmt: skip


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


def attributes(scene: Scene) -> Attributes:
    """Everything that a scene shows, place by place."""
    known = {f"{what} {t.place}": getattr(t, what) for t in scene.things for what in ("kind", "color")}
    for what in ("background", "sky", "ground", "sun_side"):
        if getattr(scene, what) is not None:
            known[what.replace("_", " ")] = getattr(scene, what)
    return known


def score_edit(seen: Scene, before: Scene, after: Scene) -> tuple[dict[str, bool], dict[str, bool]]:
    """Of an edit from `before` to `after`, given what the result shows: which changes were made, what was kept."""
    old = attributes(before)
    new = attributes(after)
    now = attributes(seen)
    made = {k: now.get(k) == new.get(k) for k in old.keys() | new.keys() if old.get(k) != new.get(k)}
    kept = {k: now.get(k) == v for k, v in new.items() if old.get(k) == v}
    kept |= dict.fromkeys(now.keys() - old.keys() - new.keys(), False)  # what came along unasked
    return made, kept
