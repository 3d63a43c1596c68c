"""How true is an attention map? The word of a caption against the place where the drawing has that thing.

Twenty drawn scenes of two different shapes are encoded and mixed with noise; nano reads them with their caption. The
map of a word is query·key, the patches' queries times the word's key, mean of the heads. The true mask follows from the
drawing: the patches that change when the thing is left out. The score is the AUC: how often a patch of the thing has a
larger number than a patch beside it (0.5 is chance, 1 is perfect), mean of the forty things. A map that finds whatever
is drawn finds the thing, too; so the word of the *other* thing is scored against the same mask.

    python -m recipe.attention_score    measures anew (a minute) and stores what the page Look inside shows
"""

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np

from kleinlite import Klein
from kleinlite.pipeline import to_pixels
from kleinlite.position_ids import Rope, apply_rope, image_ids, text_ids
from kleinlite.sampling import noise, noised
from kleinlite.scenes import Scene, captions, draw, sample
from kleinlite.text_encoder import TEMPLATE
from kleinlite.transformer import roped_attention

STORED = Path(__file__).parents[1] / "site" / "javascript" / "scores.json"
SCENES = 20
LEVELS = (0.2, 0.6, 0.9)  # of noise
PATCH = 16  # pixels on a side
COVERED = 0.25  # of a patch's pixels: more, and the thing is there
DIFFERENT = 8  # levels of 255, at which a pixel has changed


class ScoreRecorder:
    """Chapter 5's attention, which keeps query·key of picture and text tokens: (n, m), mean of the heads."""

    def __init__(self, text_tokens: int):
        self.text_tokens = text_tokens
        self.maps: list[np.ndarray] = []

    def __call__(self, q: mx.array, k: mx.array, v: mx.array, rope: Rope) -> mx.array:
        m = self.text_tokens
        scores = apply_rope(q, rope)[:, :, m:] @ apply_rope(k, rope)[:, :, :m].swapaxes(-1, -2)
        self.maps.append(np.array(scores[0].mean(axis=0)))
        return roped_attention(q, k, v, rope)


def choose_scenes(count: int = SCENES) -> list[Scene]:
    """The first scenes of the generator that show two different shapes, with nothing shifted."""
    found: list[Scene] = []
    seed = 0
    while len(found) < count:
        scene = sample(seed)
        kinds = {thing.kind for thing in scene.things}
        if not scene.is_landscape and len(scene.things) == len(kinds) == 2:
            found.append(replace(scene, jitter=None))
        seed += 1
    return found


def true_patches(scene: Scene, index: int) -> np.ndarray:
    """Which patches show a thing, (n,): those that change when it is left out."""
    others = tuple(thing for i, thing in enumerate(scene.things) if i != index)
    pictures = [np.asarray(draw(each)).astype(int) for each in (scene, replace(scene, things=others))]
    changed = np.abs(pictures[0] - pictures[1]).max(axis=-1) > DIFFERENT
    rows = len(changed) // PATCH
    share = changed.reshape(rows, PATCH, rows, PATCH).mean(axis=(1, 3))
    return share.ravel() > COVERED


def score_map(values: np.ndarray, true: np.ndarray) -> float:
    """The area under the ROC curve: the share of pairs (inside, outside) in the right order; ties count half."""
    apart = values[true][:, None] - values[~true][None]
    return float((apart > 0).mean() + (apart == 0).mean() / 2)


def word_tokens(klein: Klein, caption: str, word: str) -> list[int]:
    """Where a word of a caption stands among the tokens that the model reads."""
    text = TEMPLATE.format(caption)
    first = text.index(word, text.index(caption))
    spans = klein.tokenizer.encode(text).offsets
    return [i for i, (start, end) in enumerate(spans) if start < first + len(word) and end > first]


def measure() -> dict[str, list[list[float]]]:
    """The mean AUC of each block, for each of `LEVELS`: of the thing's own word, and of the other thing's."""
    klein = Klein.from_pretrained("nano", keep_loaded=True)
    n = (klein.info.size // PATCH) ** 2
    scores: list[list[list[list[float]]]] = []  # of a thing: of a noise level: of a block: own word and other
    for number, scene in enumerate(choose_scenes()):
        caption = captions(scene)[0]
        latents = klein.autoencoder.encode(to_pixels(draw(scene))).reshape(1, n, -1)
        txt = klein.encode_prompt(caption)
        assert isinstance(txt, mx.array)
        rope = klein.transformer.rope(image_ids(*2 * (klein.info.size // PATCH,)), text_ids(txt.shape[1]))
        maps = []
        for t in LEVELS:
            recorder = ScoreRecorder(txt.shape[1])
            x = noised(latents, noise(number, n), t)
            mx.eval(klein.transformer(x, txt, t, rope=rope, attention_fn=recorder))
            maps.append(recorder.maps)
        words = [word_tokens(klein, caption, thing.kind) for thing in scene.things]
        for index in range(2):
            true = true_patches(scene, index)
            pair = (words[index], words[1 - index])
            scores.append(
                [[[score_map(block[:, at].mean(axis=1), true) for at in pair] for block in level] for level in maps]
            )
    means = np.mean(scores, axis=0)  # (levels, blocks, 2)
    doubles = len(klein.transformer.double_blocks)
    names = [f"double {b + 1}" if b < doubles else f"single {b + 1 - doubles}" for b in range(means.shape[1])]
    return {name: means[:, b].round(2).tolist() for b, name in enumerate(names)}


def main() -> None:
    found = measure()
    STORED.write_text(json.dumps({"levels": LEVELS, "auc": found}) + "\n", "utf-8")
    for name, values in found.items():
        print(f"{name:10} {values}")


if __name__ == "__main__":
    main()
