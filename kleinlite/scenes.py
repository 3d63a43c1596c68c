"""Drawn pictures with captions and edits: the world that klein-nano learns.

Two families, paper-cut shapes and little landscapes. A `Scene` is plain data, so that a picture, its captions, an edit
and the check whether a generated picture shows what was asked all come from the same few fields. Everything follows
from a seed: `sample(seed)` is the same scene everywhere.
"""

import math
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from PIL import Image, ImageDraw

Color = tuple[int, int, int]  # red, green, blue, 0 to 255
COLORS: dict[str, Color] = {
    "red": (214, 48, 49), "orange": (240, 138, 36), "yellow": (250, 211, 60), "green": (60, 160, 82),
    "blue": (58, 96, 214), "purple": (134, 78, 190), "pink": (242, 140, 186), "white": (250, 250, 248),
    "black": (44, 44, 54),
}  # fmt: skip
# A scene has a background or a sky and a ground; what it lacks is None, which is in none of these tables.
BACKGROUNDS: dict[str | None, Color] = {
    "white": (243, 242, 238), "yellow": (250, 238, 180), "pink": (250, 214, 226), "green": (200, 230, 200),
    "blue": (184, 212, 244), "purple": (214, 202, 238),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "star", "heart", "diamond")
RELATIONS = ("above", "below", "left of", "right of")
CENTERS = {"center": (0.5, 0.5), "top": (0.5, 0.27), "bottom": (0.5, 0.73), "left": (0.27, 0.5), "right": (0.73, 0.5)}
PLACES = ("top", "bottom", "left", "right")  # where the lone shape of a scene with room for another stands
SKIES: dict[str | None, tuple[Color, Color]] = {
    "day": ((92, 172, 240), (214, 238, 252)),
    "sunset": ((126, 84, 164), (250, 176, 110)),
    "night": ((20, 24, 62), (46, 56, 112)),
}
STARS = ((0.07, 0.1), (0.4, 0.07), (0.52, 0.24), (0.62, 0.1), (0.93, 0.32), (0.09, 0.38), (0.44, 0.42))
SUNS: dict[str | None, str] = {"day": "yellow sun", "sunset": "orange sun", "night": "white moon"}
WHEN: dict[str | None, str] = {"day": "by day", "sunset": "at sunset", "night": "at night"}
GROUNDS: dict[str | None, tuple[str, Color, Color]] = {
    "hills": ("green hills", (108, 190, 92), (84, 166, 78)),
    "desert": ("yellow dunes", (226, 190, 124), (208, 168, 100)),
    "snow": ("white snow", (244, 247, 252), (220, 230, 244)),
    "sea": ("a blue sea", (44, 116, 198), (32, 94, 172)),
}
LAND_THINGS: dict[str, tuple[str, ...]] = {
    "house": ("red", "blue", "purple", "yellow", "white"),
    "tree": ("green", "orange", "pink"),
}
SEA_THINGS: dict[str, tuple[str, ...]] = {"boat": ("red", "yellow", "white", "green", "purple")}
SIDES = ("left", "right")


@dataclass(frozen=True)
class Thing:
    """A shape, house, tree or boat: what, which color, where (top, bottom, left, right or center)."""

    kind: str
    color: str
    place: str


@dataclass(frozen=True)
class Scene:
    """What a picture shows. Shapes have a background; landscapes have a sky, a ground and a sun (the moon at night)."""

    things: tuple[Thing, ...]
    background: str | None = None
    sky: str | None = None
    ground: str | None = None
    sun_side: str | None = None
    jitter: int | None = 0  # seed of the small shifts that no caption mentions; None: everything in its middle place

    @property
    def is_landscape(self) -> bool:
        return self.sky is not None


def opposite(place: str) -> str:
    """Where the other of two things stands."""
    return {"left": "right", "right": "left", "top": "bottom", "bottom": "top"}[place]


def thing_colors(ground: str | None) -> dict[str, tuple[str, ...]]:
    """Which things can stand in a scene with this ground (None: paper shapes), in which colors."""
    if ground is None:
        return {kind: tuple(COLORS) for kind in SHAPES}
    return SEA_THINGS if ground == "sea" else LAND_THINGS


def pick_thing(rng: random.Random, ground: str | None, place: str, unlike: Thing | None = None) -> Thing:
    """A random thing; two things of a scene never share their kind, so that an edit can name one of them by it."""
    kinds = thing_colors(ground)
    if unlike is not None and len(kinds) > 1:
        kinds = {kind: colors for kind, colors in kinds.items() if kind != unlike.kind}
    kind = rng.choice(list(kinds))
    return Thing(kind, rng.choice(kinds[kind]), place)


def sample(seed: int) -> Scene:
    """A random scene, the same for the same seed."""
    rng = random.Random(seed)
    jitter = rng.randrange(1 << 30)
    if rng.random() < 0.55:
        count = rng.choice((1, 1, 2, 2, 2))
        first = rng.choice(("center", *PLACES)) if count == 1 else rng.choice(("top", "left"))
        things = [pick_thing(rng, None, first)]
        if count == 2:
            things.append(pick_thing(rng, None, opposite(first), unlike=things[0]))
        background = rng.choice(list(BACKGROUNDS))
        if background == "white" and any(t.color == "white" for t in things):
            background = "blue"  # white on white would be told apart by its shadow alone
        return Scene(tuple(things), background=background, jitter=jitter)
    ground = rng.choice(list(GROUNDS))
    count = rng.choice((0, 1, 1, 1) if ground == "sea" else (0, 1, 1, 1, 2, 2))
    things = []
    if count:
        things.append(pick_thing(rng, ground, "left" if count == 2 else rng.choice(SIDES)))
    if count == 2:
        things.append(pick_thing(rng, ground, "right", unlike=things[0]))
    return Scene(
        tuple(things), sky=rng.choice(list(SKIES)), ground=ground, sun_side=rng.choice(SIDES), jitter=jitter
    )  # fmt: skip


def with_article(words: str) -> str:
    """The words behind "a" or "an"."""
    return f"{'an' if words.startswith('orange') else 'a'} {words}"


def captions(scene: Scene) -> list[str]:
    """Every sentence of the grammar that describes the scene, from short to complete."""
    a = [with_article(f"{thing.color} {thing.kind}") for thing in scene.things]
    if not scene.is_landscape:
        on = f"on a {scene.background} background"
        if len({(thing.kind, thing.color) for thing in scene.things}) < len(a):
            many = f"{scene.things[0].color} {scene.things[0].kind}s"
            counted = f"{('two', 'three')[len(a) - 2]} {many}"
            return [many, counted, f"{counted} {on}"]
        if len(a) == 3:
            listed = f"{a[0]}, {a[1]} and {a[2]}"
            return [listed, f"{listed} in a row", f"{listed} {on}"]
        if len(a) == 1:
            place = scene.things[0].place
            at = {"center": ["", " in the middle"], "top": [" at the top"], "bottom": [" at the bottom"]}
            said = at.get(place, [f" on the {place}"])
            return [f"a {scene.things[0].kind}"] + [a[0] + s for s in said] + [f"{a[0]}{s} {on}" for s in said]
        there, back = ("above", "below") if scene.things[0].place == "top" else ("left of", "right of")
        pairs = [f"{a[0]} {there} {a[1]}", f"{a[1]} {back} {a[0]}"]
        return pairs + [f"{p} {on}" for p in pairs]
    ground = GROUNDS[scene.ground][0]
    when = WHEN[scene.sky]
    sun = with_article(SUNS[scene.sky])
    body = "moon" if scene.sky == "night" else "sun"
    side = f"with the {body} on the {scene.sun_side}"
    if not a:
        return [f"{sun} over {ground}", f"{ground} {when}", f"{ground} {when} {side}"]
    if len(a) == 1:
        on_side = f" on the {scene.things[0].place}"
        return [
            f"a {scene.things[0].kind}", a[0], f"{a[0]} under {sun}", f"{a[0]} on {ground}",
            f"{a[0]} on {ground} {when}", f"{a[0]}{on_side} under {sun}", f"{a[0]} on {ground} {when} {side}",
        ]  # fmt: skip
    pairs = [f"{a[0]} left of {a[1]}", f"{a[1]} right of {a[0]}"]
    return [f"{p}{tail}" for p in pairs for tail in (f" under {sun}", f" on {ground}", f" on {ground} {when}")]


def held_out(caption: str) -> bool:
    """One caption in ten is never trained on. It depends on the sentence alone, so both sets are disjoint."""
    return zlib.crc32(caption.encode()) % 10 == 0


def content(scene: Scene) -> str:
    """What a scene is about, whatever words name it: kinds, colors and how they stand to each other."""
    named = [f"{thing.color} {thing.kind}" for thing in scene.things]
    if len(named) == 2:
        return f" {'above' if scene.things[0].place == 'top' else 'left of'} ".join(named)
    if not named:
        return f"{scene.ground} {scene.sky} {scene.sun_side}"
    if len(named) == 3:
        return ", ".join(named)
    place = scene.ground or scene.things[0].place
    return f"{named[0]} {place.replace('center', 'centre')}"  # the split hangs on the spelling with which nano learned


def scene_held_out(scene: Scene) -> bool:
    """One content in ten is learned from no caption, in no wording and on no background. Edits have their own rule."""
    return held_out(content(scene))


# Drawing. All coordinates are fractions of the side; pictures are drawn at OVERSAMPLE times the size and shrunk.
OVERSAMPLE = 3


def shape_corners(kind: str, x: float, y: float, r: float) -> list[tuple[float, float]]:
    """Corners of a shape of radius r around (x, y)."""
    if kind == "square":
        return [(x + sx * r * 0.86, y + sy * r * 0.86) for sx, sy in ((-1, -1), (1, -1), (1, 1), (-1, 1))]
    if kind == "triangle":
        return [(x, y - r), (x + r, y + r * 0.8), (x - r, y + r * 0.8)]
    if kind == "diamond":
        return [(x, y - r * 1.1), (x + r * 0.75, y), (x, y + r * 1.1), (x - r * 0.75, y)]
    if kind == "star":

        def radius(i: int) -> float:
            return r * (1.1 if i % 2 == 0 else 0.46)

        def turn(i: int) -> float:
            return -math.pi / 2 + i * math.pi / 5

        return [(x + radius(i) * math.cos(turn(i)), y + radius(i) * math.sin(turn(i))) for i in range(10)]
    if kind == "heart":
        ts = [2 * math.pi * i / 60 for i in range(60)]

        def depth(t: float) -> float:
            return 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)

        return [(x + r * math.sin(t) ** 3, y - r * depth(t) / 16 + r * 0.05) for t in ts]
    return [(x + r * math.cos(2 * math.pi * i / 60), y + r * math.sin(2 * math.pi * i / 60)) for i in range(60)]


class Canvas:
    """ImageDraw with fractions of the side instead of pixels."""

    def __init__(self, size: int):
        self.side = size * OVERSAMPLE
        self.image = Image.new("RGB", (self.side, self.side))
        self.draw = ImageDraw.Draw(self.image)

    def polygon(self, points: list[tuple[float, float]], color: Color) -> None:
        self.draw.polygon([(px * self.side, py * self.side) for px, py in points], fill=color)

    def box(self, x0: float, y0: float, x1: float, y1: float, color: Color) -> None:
        self.polygon([(x0, y0), (x1, y0), (x1, y1), (x0, y1)], color)

    def disc(self, x: float, y: float, r: float, color: Color) -> None:
        self.polygon(shape_corners("circle", x, y, r), color)

    def shrunk(self, size: int) -> Image.Image:
        """The picture as it was asked for, without steps along its edges."""
        return self.image.resize((size, size), Image.Resampling.BOX)


def mix_colors(a: Color, b: Color, share: float) -> Color:
    """Red, green and blue of `a` with this share of `b` in it."""
    red, green, blue = (round(p + (q - p) * share) for p, q in zip(a, b))
    return red, green, blue


class Spot(NamedTuple):
    """Where a shape stands: its middle, to the right and down, and its radius, in fractions of the side."""

    x: float
    y: float
    r: float


def movement(jitter: int | None) -> Callable[[float, float], float]:
    """What moves the things of a scene: numbers between two bounds by a seed; without one, those in the middle."""
    return random.Random(jitter).uniform if jitter is not None else lambda low, high: (low + high) / 2


def shape_spots(scene: Scene) -> list[Spot]:
    """Where the shapes of a scene stand, a little moved by its jitter, and how large they are."""
    move = movement(scene.jitter)
    centers = CENTERS
    large = 0.19
    if len(scene.things) == 3:  # a row
        centers = CENTERS | {"left": (0.2, 0.5), "right": (0.8, 0.5)}
        large = 0.115
    found = []
    for thing in scene.things:
        x, y = (c + move(-0.025, 0.025) for c in centers[thing.place])
        r = (0.3 if scene.things == (thing,) and thing.place == "center" else large) * move(0.94, 1.06)
        found.append(Spot(x, y, r))
    return found


def draw_shapes(scene: Scene, spots: Sequence[Spot], size: int = 96, shadows: bool = True) -> Image.Image:
    """Shapes on a flat background, each where its spot says, as an RGB picture of size × size pixels."""
    canvas = Canvas(size)
    ground = BACKGROUNDS[scene.background]
    canvas.box(0, 0, 1, 1, ground)
    for thing, (x, y, r) in zip(scene.things, spots):
        if shadows:
            shadow = mix_colors(ground, (60, 60, 80), 0.3)
            canvas.polygon(shape_corners(thing.kind, x + 0.02, y + 0.025, r), shadow)
        canvas.polygon(shape_corners(thing.kind, x, y, r), COLORS[thing.color])
    return canvas.shrunk(size)


def _draw_house(canvas: Canvas, x: float, y: float, color: Color, dim: Callable[[Color], Color]) -> None:
    canvas.box(x - 0.13, y - 0.2, x + 0.13, y, dim(color))
    canvas.polygon([(x - 0.17, y - 0.2), (x, y - 0.36), (x + 0.17, y - 0.2)], dim((122, 74, 60)))
    canvas.box(x - 0.08, y - 0.13, x - 0.01, y, dim((92, 58, 48)))
    canvas.box(x + 0.03, y - 0.15, x + 0.09, y - 0.09, (255, 232, 140))  # the window stays lit at night


def _draw_tree(canvas: Canvas, x: float, y: float, color: Color, dim: Callable[[Color], Color]) -> None:
    canvas.box(x - 0.025, y - 0.16, x + 0.025, y, dim((112, 76, 54)))
    for dx, dy, r in ((-0.06, -0.2, 0.085), (0.06, -0.2, 0.085), (0, -0.29, 0.1)):
        canvas.disc(x + dx, y + dy, r, dim(color))


def _draw_boat(canvas: Canvas, x: float, y: float, color: Color, dim: Callable[[Color], Color]) -> None:
    canvas.polygon([(x - 0.18, y - 0.1), (x + 0.18, y - 0.1), (x + 0.11, y), (x - 0.11, y)], dim(color))
    canvas.box(x - 0.012, y - 0.4, x + 0.012, y - 0.1, dim((92, 66, 52)))
    canvas.polygon([(x + 0.025, y - 0.38), (x + 0.16, y - 0.14), (x + 0.025, y - 0.14)], dim((250, 250, 246)))


def _draw_landscape(canvas: Canvas, scene: Scene, move: Callable[[float, float], float]) -> None:
    top, bottom = SKIES[scene.sky]
    horizon = 0.62
    strips = 48
    for i in range(strips):
        canvas.box(
            0, horizon * i / strips, 1, horizon * (i + 1) / strips + 0.01, mix_colors(top, bottom, i / (strips - 1))
        )
    dim = (lambda c: mix_colors(c, (24, 28, 66), 0.55)) if scene.sky == "night" else (lambda c: c)
    x = (0.24 if scene.sun_side == "left" else 0.76) + move(-0.03, 0.03)
    y = 0.19 + move(-0.02, 0.02)
    if scene.sky == "night":
        for sx, sy in STARS:
            canvas.disc(sx, sy, 0.011, (236, 238, 250))
        canvas.disc(x, y, 0.1, (248, 246, 226))
        canvas.disc(x + 0.045, y - 0.02, 0.085, mix_colors(top, bottom, 0.25))
    else:
        disc = (255, 222, 74) if scene.sky == "day" else (255, 122, 60)
        canvas.disc(x, y, 0.13, mix_colors(disc, mix_colors(top, bottom, 0.3), 0.55))
        canvas.disc(x, y, 0.1, disc)
    _, near, far = GROUNDS[scene.ground]
    near = dim(near)
    far = dim(far)
    if scene.ground == "sea":
        canvas.box(0, horizon, 1, 1, far)
        canvas.box(0, horizon + 0.16, 1, 1, near)
    else:
        phase = move(0, 2 * math.pi)
        for k, (color, base, height) in enumerate(((far, horizon - 0.03, 0.045), (near, horizon + 0.1, 0.035))):
            edge = [(i / 40, base + height * math.sin(5 * i / 40 + phase + 2.2 * k)) for i in range(41)]
            canvas.polygon([*edge, (1, 1), (0, 1)], color)
    draw = {"house": _draw_house, "tree": _draw_tree, "boat": _draw_boat}
    for thing in scene.things:
        x = (0.27 if thing.place == "left" else 0.73) + move(-0.025, 0.025)
        y = 0.84 + move(-0.015, 0.015)
        draw[thing.kind](canvas, x, y, COLORS[thing.color], dim)


def draw(scene: Scene, size: int = 96) -> Image.Image:
    """The scene as an RGB picture of size × size pixels."""
    if not scene.is_landscape:
        return draw_shapes(scene, shape_spots(scene), size)
    canvas = Canvas(size)
    _draw_landscape(canvas, scene, movement(scene.jitter))
    return canvas.shrunk(size)
