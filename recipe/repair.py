"""nano learns from its own successes to draw a lone thing once.

A house, tree or boat whose side nobody says came twice, or not at all, in one picture of ten. The fault is made in the
second of the four steps: the network leans to neither side, and the later steps mend nothing. So nano draws fresh
captions, the judge says which pictures are right, and every failure gets a *mate*: a success that shows what the
failure's caption asks for, on the side that the failure leans to, and the nearest of these. From the failure's own
latents the velocity should lead straight to its mate. What was right stays as it is.

Hindsight relabeling: Andrychowicz et al. 2017, arXiv 1707.01495. Couplings that decide: Pooladian et al. 2023, arXiv
2304.14772.

n image tokens · m text tokens
"""

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from PIL import Image
from tokenizers import Tokenizer

from kleinlite.autoencoder import Autoencoder
from kleinlite.distillation import own_path
from kleinlite.errors import UserError
from kleinlite.nano.evaluate import SIZE, SKYLINE, detected, judge, requested
from kleinlite.pipeline import to_images
from kleinlite.scenes import Scene, captions, draw, held_out, sample
from kleinlite.text_encoder import TextEncoder, tokenize
from kleinlite.training import encode_batch
from kleinlite.transformer import Transformer

from .redraw import expected
from .scene_lessons import allowed_scenes

FIRST = 80_000_000  # scenes from this seed on, in the first round
APART = 1_000_000  # seeds between the first scenes of two rounds
ROUNDS = 2
TURNS = (2, 1, 3, 2, 1, 0)  # which of the four steps is taught, by turns
LEANS = 2  # the step, at t = 0.88, whose expectation says which side a picture leans to
BATCH = 32


class Own(NamedTuple):
    """What a round learns from: the student's pictures, and where each should lead."""

    path: mx.array  # noise, then the latents after each of the student's steps, (pictures, 5, n, 128)
    target: mx.array  # latents of a failure's mate, and of a success itself, (pictures, n, 128)
    failed: mx.array  # (pictures,)
    ids: mx.array  # tokens of the captions, (pictures, m)
    mask: mx.array  # (pictures, m)

    def batch(self, step: int, pictures: int) -> tuple[mx.array, mx.array, mx.array, mx.array, int]:
        """Latents before one of the four steps, what it should lead to, tokens, masks, and which step.

        Half of the pictures are failures. A success should lead where it led.
        """
        segment = TURNS[step % len(TURNS)]
        rng = random.Random(step)
        failed = np.array(self.failed)
        halves = (np.flatnonzero(failed), np.flatnonzero(~failed))
        rows = mx.array([rng.choice(half.tolist()) for half in halves for _ in range(pictures // 2)])
        x = self.path[rows, segment]
        stays = expected(self.path[rows], segment)
        target = mx.where(self.failed[rows][:, None, None], self.target[rows], stays)
        return x, target, self.ids[rows], self.mask[rows], segment


def lone_captions(first: int = FIRST) -> Iterator[tuple[Scene, str]]:
    """Landscapes with one thing, of the seeds from `first` on, each with a caption; nothing held out."""
    rng = random.Random(first)
    for scene in allowed_scenes(sample, first):
        said = [text for text in captions(scene) if not held_out(text)]
        if scene.is_landscape and len(scene.things) == 1 and said:
            yield scene, rng.choice(said)


def shows(seen: Scene, scene: Scene, caption: str) -> bool:
    """Whether everything that the caption asks for is there."""
    return all(detected(seen, scene, requested(scene, caption)).values())


def leaning(picture: Image.Image, ground: Scene) -> str:
    """The side on which a picture differs more from its empty ground, below the skyline."""
    empty = draw(Scene((), sky=ground.sky, ground=ground.ground, sun_side=ground.sun_side), SIZE)
    apart = np.abs(np.asarray(picture, dtype=np.float32) - np.asarray(empty, dtype=np.float32))[SKYLINE:]
    return "left" if apart[:, : SIZE // 2].sum() > apart[:, SIZE // 2 :].sum() else "right"


def find_mates(
    path: mx.array, seen: list[Scene], cases: list[tuple[Scene, str]], previews: dict[int, Image.Image]
) -> dict[int, int]:
    """Failure → mate, by their rows; a failure without one is left out.

    path (pictures, 5, n, 128). seen: what the judge sees at the end. previews: of each failure what the student expects
    before step `LEANS`.
    """
    successes = [row for row in range(len(cases)) if row not in previews]
    mates = {}
    for row, preview in previews.items():
        if not seen[row].is_landscape:
            continue
        side = leaning(preview, seen[row])
        fit = [other for other in successes if seen[other].things[0].place == side and shows(seen[other], *cases[row])]
        if fit:
            apart = (path[mx.array(fit), -1] - expected(path[row][None], LEANS)) ** 2
            mates[row] = fit[int(apart.mean(axis=(1, 2)).argmin())]
    return mates


def judge_all(pictures: list[Image.Image]) -> list[Scene]:
    """What the judge sees in each."""
    return [judge(picture) for picture in pictures]


def draw_lone_things(
    pictures: int, student: Transformer, text_encoder: TextEncoder, autoencoder: Autoencoder, tokenizer: Tokenizer,
    grid: tuple[int, int], first: int = FIRST, progress: Callable[[Iterable], Iterable] = iter,
) -> Own:  # fmt: skip
    """Draw `pictures` captions of lone things of the seeds from `first` on, judge them, and find each failure a mate.

    Raises UserError if no failure has one.
    """
    cases = list(islice(lone_captions(first), pictures))
    ids, mask = tokenize(tokenizer, [caption for _, caption in cases], text_encoder.cfg.max_length)
    paths: list[mx.array] = []
    seen: list[Scene] = []

    def decode(latents: mx.array) -> list[Image.Image]:
        return to_images(autoencoder.decode(latents.reshape(-1, *grid, 128)))

    for i in progress(range(0, len(cases), BATCH)):
        some = slice(i, i + BATCH)
        noise = mx.random.normal((len(cases[some]), grid[0] * grid[1], 128), key=mx.random.key(first + i))
        batch = encode_batch(student, text_encoder, grid, noise, noise[:, :0], ids[some], mask[some])
        paths.append(mx.stack(own_path(student, noise, batch), axis=1))
        mx.eval(paths)
        seen += judge_all(decode(paths[-1][:, -1]))
    path = mx.concatenate(paths)
    failed = [row for row, case in enumerate(cases) if not shows(seen[row], *case)]
    previews = {row: decode(expected(path[row][None], LEANS))[0] for row in failed}
    mates = find_mates(path, seen, cases, previews)
    if not mates:
        raise UserError(f"No failure among {pictures} pictures has a mate: draw more of them.")
    kept = [row for row in range(len(cases)) if row in mates or row not in previews]
    rows = mx.array(kept)
    target = path[mx.array([mates.get(row, row) for row in kept]), -1]
    return Own(path[rows], target, mx.array([row in mates for row in kept]), ids[rows], mask[rows])
