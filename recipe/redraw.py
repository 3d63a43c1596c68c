"""nano looks at its own pictures, draws them again, and learns to have meant that.

A distilled student has never seen where its own steps lead. This shows it: it draws fresh captions, a ruler (the
centroid and the area of each outline) says which scene every picture nearly is, that scene is drawn, and from its own
noisy latents the student's last step should lead to the drawing. Its other steps should lead where they led. What comes
out too far from any drawing teaches nothing.

Its noise decides where a thing stands, so no target is a blur of places. But a student that listens less to the
noise loses places along with dents. So drawings stand further from the mean than the pictures did (`WIDER`). Each
round draws fresh captions by what the round before has left.

Rejection sampling and expert iteration in the small: Anthony et al. 2017, arXiv 1705.08439; Zelikman et al. 2022,
arXiv 2203.14465. On its own path: Liu et al. 2022, arXiv 2209.03003 (reflow). How models that learn from themselves
narrow: Shumailov et al. 2024, doi 10.1038/s41586-024-07566-y.

b pictures · n image tokens · m text tokens
"""

import itertools
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from PIL import Image
from tokenizers import Tokenizer

from kleinlite.autoencoder import Autoencoder
from kleinlite.distillation import STUDENT_STEPS, own_path
from kleinlite.errors import UserError
from kleinlite.nano.evaluate import detected, listing_order, place_of, requested
from kleinlite.nano.shapes import UNCLEAR, background_of, cut_out, overlaps, pixels
from kleinlite.pipeline import to_images
from kleinlite.sampling import schedule
from kleinlite.scenes import (
    BACKGROUNDS,
    Scene,
    Spot,
    Thing,
    captions,
    draw_shapes,
    held_out,
    sample,
    shape_corners,
)
from kleinlite.text_encoder import TextEncoder, tokenize
from kleinlite.training import Batch, encode_batch
from kleinlite.transformer import Transformer

from .scene_lessons import allowed_scenes, sample_one

FIRST = 50_000_000  # scenes from this seed on, in the first round
APART = 10_000_000  # seeds between the first scenes of two rounds
TURNS = (3, 3, 0, 3, 3, 1, 3, 3, 2)  # by turns, of the four steps: the last one learns, the others stay as they are
FARTHEST = 16.0  # levels, root mean square, between a picture and its drawing
# How much further from the mean of its place a lone shape is drawn, and one of two; by rounds.
WIDER = ((2.0, 1.4), (1.6, 1.25), (1.8, 1.4))
BATCH = 32


class Redrawn(NamedTuple):
    """What the stage learns from."""

    path: mx.array  # noise, then the latents after each of the student's steps, (pictures, 5, n, 128)
    target: mx.array  # latents of the drawings, (pictures, n, 128)
    ids: mx.array  # tokens of the captions, (pictures, m)
    mask: mx.array  # (pictures, m)

    def batch(self, step: int, pictures: int) -> tuple[mx.array, mx.array, mx.array, mx.array, int]:
        """Some pictures' latents before one of the four steps, what it should lead to, tokens, masks, and which step.

        The last step leads to the drawing, each other one to the clean picture that the student expected there.
        """
        segment = TURNS[step % len(TURNS)]
        found = len(self.target)
        rows = mx.array(random.Random(step).sample(range(found), min(found, pictures)))
        x = self.path[rows, segment]
        target = self.target[rows] if segment == STUDENT_STEPS - 1 else expected(self.path[rows], segment)
        return x, target, self.ids[rows], self.mask[rows], segment


def expected(path: mx.array, segment: int) -> mx.array:
    """The clean latents (b, n, 128) that the student expects before step `segment`; path (b, 5, n, 128)."""
    t, t_next = schedule(STUDENT_STEPS, path.shape[2])[segment : segment + 2]
    x = path[:, segment]
    return x + t / (t - t_next) * (path[:, segment + 1] - x)


def redraw_loss(student: Transformer, x: mx.array, batch: Batch, segment: int) -> mx.array:
    """From its own latents x (b, n, 128) before step `segment`, the student's velocity against the straight way to
    batch.clean, the latents of the drawing."""
    t = schedule(STUDENT_STEPS, x.shape[1])[segment]
    velocity = student(x, batch.txt, t, rope=batch.rope)
    return ((velocity - (x - batch.clean) / t) ** 2).mean()


def fresh_captions(first: int = FIRST) -> Iterator[tuple[Scene, str]]:
    """Captions of one and two shapes by turns, of the seeds from `first` on; nothing held out."""
    ones = allowed_scenes(sample_one, first)
    pairs = filter(lambda scene: not scene.is_landscape, allowed_scenes(sample, first))
    rng = random.Random(first)
    for scene in itertools.chain.from_iterable(zip(ones, pairs)):
        said = [text for text in captions(scene) if not held_out(text) and names_colors(scene, text)]
        if said:
            yield scene, rng.choice(said)


def names_colors(scene: Scene, caption: str) -> bool:
    """Whether a caption says the color of everything: what it leaves open, nano sometimes leaves undecided."""
    return all(f" {thing.color} {thing.kind}" in f" {caption}" for thing in scene.things)


def measure_shape(kind: str, mask: Image.Image) -> Spot:
    """Middle and radius of the shape of this kind that has the mask's centroid and area. The shoelace formula."""
    corners = np.array(shape_corners(kind, 0.0, 0.0, 1.0))
    after = np.roll(corners, -1, axis=0)
    cross = corners[:, 0] * after[:, 1] - after[:, 0] * corners[:, 1]
    x, y = ((corners + after) * cross[:, None]).sum(axis=0) / (3 * cross.sum())
    rows, columns = np.nonzero(np.asarray(mask))
    r = math.sqrt(len(rows) / abs(cross.sum() / 2)) / mask.width
    return Spot((columns.mean() + 0.5) / mask.width - x * r, (rows.mean() + 0.5) / mask.height - y * r, r)


def nearest_scene(picture: Image.Image) -> tuple[Scene, list[Spot]] | None:
    """The shapes that a picture shows, and where they stand; None if one of them is no shape."""
    found = []
    for color, mask in cut_out(picture):
        by_kind = overlaps(mask)
        kind = max(by_kind, key=by_kind.__getitem__)
        if by_kind[kind] < UNCLEAR:
            return None
        spot = measure_shape(kind, mask)
        found.append((Thing(kind, color, place_of(spot[:2])), spot))
    found.sort(key=lambda pair: listing_order(pair[0]))
    ground = np.asarray(background_of(pixels(picture)))
    paper = min(BACKGROUNDS, key=lambda name: float(((np.array(BACKGROUNDS[name]) - ground) ** 2).sum()))
    return Scene(tuple(thing for thing, _ in found), background=paper), [spot for _, spot in found]


def difference(a: Image.Image, b: Image.Image) -> float:
    """Root mean square in levels of 255."""
    apart = np.asarray(a, dtype=np.float32) - np.asarray(b, dtype=np.float32)
    return float(np.sqrt((apart**2).mean()))


def accepted(picture: Image.Image, scene: Scene, caption: str) -> tuple[Scene, list[Spot]] | None:
    """What the picture shows, if it is what the caption asks for and looks like a drawing; else None."""
    seen = nearest_scene(picture)
    if seen is None or not all(detected(seen[0], scene, requested(scene, caption)).values()):
        return None
    return seen if difference(picture, draw_shapes(*seen, picture.width)) < FARTHEST else None


def widened(seen: Sequence[tuple[Scene, list[Spot]]], wider: Sequence[float] = WIDER[0]) -> list[list[Spot]]:
    """The spots, further from the mean of those of the same kind and place in as many shapes."""
    groups: defaultdict[tuple[str, str, int], list[Spot]] = defaultdict(list)

    def key(scene: Scene, thing: Thing) -> tuple[str, str, int]:
        return (thing.kind, thing.place, len(scene.things))

    for scene, spots in seen:
        for thing, spot in zip(scene.things, spots):
            groups[key(scene, thing)].append(spot)
    means = {name: [statistics.fmean(column) for column in zip(*spots)] for name, spots in groups.items()}
    moved = []
    for scene, spots in seen:
        factor = wider[len(scene.things) - 1]
        about = [means[key(scene, thing)] for thing in scene.things]
        moved.append(
            [Spot(*(m + factor * (own - m) for own, m in zip(spot, mean))) for spot, mean in zip(spots, about)]
        )
    return moved


def draw_again(
    pictures: int, student: Transformer, text_encoder: TextEncoder, autoencoder: Autoencoder, tokenizer: Tokenizer,
    grid: tuple[int, int], wider: Sequence[float] = WIDER[0], first: int = FIRST,
    progress: Callable[[Iterable], Iterable] = iter,
) -> Redrawn:  # fmt: skip
    """Draw `pictures` captions of the seeds from `first` on, draw what came out again, and keep what both agree on.

    wider: for pictures of one and of two shapes, see `WIDER`.
    """
    cases = list(itertools.islice(fresh_captions(first), pictures))
    kept: list[tuple[mx.array, mx.array, mx.array]] = []
    seen: list[tuple[Scene, list[Spot]]] = []
    for i in progress(range(0, len(cases), BATCH)):
        some = cases[i : i + BATCH]
        ids, mask = tokenize(tokenizer, [caption for _, caption in some], text_encoder.cfg.max_length)
        noise = mx.random.normal((len(some), grid[0] * grid[1], 128), key=mx.random.key(first + i))
        path = own_path(student, noise, encode_batch(student, text_encoder, grid, noise, noise[:, :0], ids, mask))
        whole = mx.stack(path, axis=1)
        drawn = to_images(autoencoder.decode(path[-1].reshape(-1, *grid, 128)))
        for j, (picture, case) in enumerate(zip(drawn, some)):
            if found := accepted(picture, *case):
                seen.append(found)
                kept.append((whole[j], ids[j], mask[j]))
        mx.eval(kept)
    if not kept:
        raise UserError(f"None of {pictures} pictures came near a drawing: train the stages before for longer.")
    whole, ids, mask = (mx.stack(list(column)) for column in zip(*kept))
    drawings = [draw_shapes(scene, spots, 16 * grid[0]) for (scene, _), spots in zip(seen, widened(seen, wider))]
    return Redrawn(whole, encode_drawings(autoencoder, drawings), ids, mask)


def encode_drawings(autoencoder: Autoencoder, drawings: list[Image.Image]) -> mx.array:
    """Their latents, (pictures, n, 128)."""
    rows = []
    for i in range(0, len(drawings), BATCH):
        x = mx.array(np.stack([np.asarray(drawing) for drawing in drawings[i : i + BATCH]])) / 127.5 - 1
        rows.append(autoencoder.encode(x).reshape(len(x), -1, 128))
        mx.eval(rows[-1])
    return mx.concatenate(rows)
