"""Two judges of a try, which know nothing of each other. No try may edit them.

The first is the book's: it draws, compares and counts what is right (kleinlite/nano/evaluate.py). The second is
nano-base, as a classifier: it is shown the picture under noise, and told the caption or the caption with one word
changed. The word counts as right if the velocity is predicted better with it (Li et al. 2023, arXiv 2303.16203).
"""

import json
import random
import secrets
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from PIL import Image

from kleinlite.klein import Klein
from kleinlite.measuring import mean_and_error
from kleinlite.nano.evaluate import draw_all, examine, held_out_captions
from kleinlite.pipeline import to_pixels
from kleinlite.sampling import noised
from kleinlite.scenes import COLORS, SHAPES
from kleinlite.text_encoder import tokenize
from kleinlite.training import encode_batch

from ..evaluate import contact_sheet
from ..scene_lessons import GRID
from ..speedrun import SHOWN

CAPTIONS = 200
NOISE = (0.6, 0.75, 0.9)  # levels at which the second judge looks


@dataclass(frozen=True)
class Verdict:
    """Shares in percent. steps: of training; captions: the first seed of those that were judged."""

    steps: int
    score: float
    error: float
    second: float
    captions: int


def judge(folder: Path, count: int = CAPTIONS) -> Verdict:
    """Draw captions that nobody has seen before, look at each picture in both ways, and keep the first pictures."""
    first = 1_000_000_000 + secrets.randbelow(1_000_000_000)
    cases = held_out_captions(count, first)
    how = json.loads((folder / "drawing.json").read_text("utf-8"))
    model = Klein.from_pretrained(folder / "model")
    pictures = draw_all(model, [said for _, said in cases], steps=how["draw_steps"], guidance=how["guidance"])
    contact_sheet(pictures[:SHOWN]).save(folder / "pictures.png")
    results = examine(pictures, cases)
    score, error = mean_and_error([sum(result.values()) / len(result) for result in results])
    nano = Klein.from_pretrained("nano-base", keep_loaded=True)
    believed = [believes(nano, picture, said) for picture, (_, said) in zip(pictures, cases)]
    second = mean_and_error([sum(words) / len(words) for words in believed if words])[0]
    return Verdict(how["steps"], round(100 * score, 1), round(100 * error, 1), round(100 * second, 1), first)


def one_word_changed(caption: str) -> list[str]:
    """The caption with another color, or another shape, in place of each: "a red circle" → "a pink circle", …"""
    rng = random.Random(caption)
    words = caption.split()
    changed = []
    for i, word in enumerate(words):
        for names in (list(COLORS), list(SHAPES), [f"{shape}s" for shape in SHAPES]):
            others = [name for name in names if name not in words]
            if word in names and others:
                changed.append(" ".join([*words[:i], rng.choice(others), *words[i + 1 :]]))
    return changed


def believes(nano: Klein, picture: Image.Image, caption: str) -> list[bool]:
    """For each word that can be changed, whether nano rather sees the caption as it is."""
    said = [caption, *one_word_changed(caption)]
    latents = nano.autoencoder.encode(to_pixels(picture))
    clean = mx.repeat(latents.reshape(1, -1, latents.shape[-1]), len(said), axis=0)
    ids, mask = tokenize(nano.tokenizer, said, nano.text_encoder.cfg.max_length)
    batch = encode_batch(nano.transformer, nano.text_encoder, GRID, clean, clean[:, :0], ids, mask)
    eps = mx.repeat(mx.random.normal(clean[:1].shape, key=mx.random.key(0)), len(said), axis=0)
    errors = mx.zeros((len(said),))
    for level in NOISE:
        t = mx.full((len(said),), level)
        velocity = nano.transformer(noised(clean, eps, t), batch.txt, t, rope=batch.rope)
        errors = errors + ((velocity - (eps - clean)) ** 2).mean(axis=(1, 2))
    return [bool(flag) for flag in (errors[1:] > errors[0]).tolist()]
