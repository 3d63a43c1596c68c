"""Looking inside while a model draws: the recorded attention, and that recording changes nothing."""

from dataclasses import replace
from itertools import pairwise

import mlx.core as mx
import pytest

from kleinlite import transformer
from kleinlite.errors import UserError
from kleinlite.inference.loaded_model import LoadedModel
from kleinlite.inside import record_attention
from kleinlite.klein import Klein

PROMPT = "a red circle above a blue square"


@pytest.fixture(scope="module")
def klein() -> Klein:
    return Klein.from_pretrained("nano")


def test_the_picture_is_that_of_a_call(klein):
    steps, maps = record_attention(klein, PROMPT, seed=7)
    assert steps[-1].preview().tobytes() == klein(PROMPT, seed=7, progress=False).tobytes()
    assert [m.shape for m in maps] == [(7, 36, 32)] * 4


def test_shares_are_shares(klein):
    """What picture tokens give to the text is positive, at most all they have, and not the same in every block."""
    _, maps = record_attention(klein, PROMPT, seed=7)
    given = mx.stack(maps).sum(axis=-1)
    assert given.min().item() > 0 and given.max().item() <= 1 + 1e-5
    assert mx.abs(given[:, 0] - given[:, 1]).max().item() > 0.01
    assert not any(mx.allclose(a, b) for a, b in pairwise(maps)), "each step has its own"


def test_a_guided_model_records_the_pass_with_the_prompt():
    base = Klein.from_pretrained("nano-base")
    steps, maps = record_attention(base, PROMPT, seed=7, steps=2)
    assert len(steps) == 2 and maps[0].shape == (7, 36, 32)


def test_a_call_with_references_kept_in_a_cache_takes_no_attention(klein):
    model = klein._model
    cached = Klein(LoadedModel(replace(model.checkpoint, info=replace(klein.info, kv=True))))
    picture = klein("a red star", seed=1, progress=False)
    with pytest.raises(UserError, match="has an attention of its own here"):
        next(cached.stream("make the star blue", images=[picture], attention_fn=transformer.roped_attention, seed=1))


def test_the_chapters_own_attention_is_not_touched(klein):
    original = transformer.roped_attention
    record_attention(klein, PROMPT, seed=7, steps=1)
    assert transformer.roped_attention is original
