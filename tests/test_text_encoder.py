"""Properties of the text encoder; numbers against transformers stand in test_parity_blocks."""

from pathlib import Path

import mlx.core as mx
import pytest
from golden_tools import check
from mlx.utils import tree_map
from tokenizers import Tokenizer

from kleinlite.text_encoder import PAD, TEMPLATE, TextEncoder, TextEncoderConfig, attention_mask, tokenize

CONFIG = TextEncoderConfig.tiny()
M = 12


@pytest.fixture(scope="module")
def model() -> TextEncoder:
    mx.random.seed(0)
    model = TextEncoder(CONFIG)  # larger weights than usual, so that tokens have something to say to each other
    model.update(tree_map(lambda w: w * 3 if w.ndim == 2 else w, model.parameters()))
    return model.eval()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(Path(__file__).parent / "pipelines" / "tiny" / "tokenizer" / "tokenizer.json"))


def ids_of(seed: int, b: int = 1) -> mx.array:
    return mx.random.randint(0, CONFIG.vocab, (b, M), key=mx.random.key(seed))


def first(n: int) -> mx.array:
    """A mask with n real tokens."""
    return (mx.arange(M) < n)[None]


def test_mask():
    mask = attention_mask(mx.array([[True, True, False]]))
    assert mask.shape == (1, 1, 3, 3)
    assert mask[0, 0].tolist() == [[True, False, False], [True, True, False], [True, True, False]]


def test_later_tokens_do_not_change_earlier_features(model):
    ids, other = ids_of(1), ids_of(2)
    for k in (1, 5, M - 1):
        mixed = mx.concatenate([ids[:, :k], other[:, k:]], axis=1)
        check(model(mixed, first(M))[:, :k], model(ids, first(M))[:, :k])
        assert mx.abs(model(mixed, first(M)) - model(ids, first(M)))[:, k:].max().item() > 0.01


def test_earlier_tokens_change_later_features(model):
    ids = ids_of(1)
    changed = mx.concatenate([(ids[:, :1] + 1) % CONFIG.vocab, ids[:, 1:]], axis=1)
    moved = mx.abs(model(changed, first(M)) - model(ids, first(M))).max(axis=-1)
    assert moved.min().item() > 1e-3


def test_real_tokens_do_not_see_the_padding(model):
    n, ids, other = 5, ids_of(1), ids_of(2)
    padded = model(mx.concatenate([ids[:, :n], other[:, n:]], axis=1), first(n))
    check(padded[:, :n], model(ids, first(n))[:, :n])
    check(padded[:, :n], model(ids[:, :n], mx.ones((1, n), dtype=mx.bool_)))  # nor does its length matter


def test_padding_rows_are_computed(model):
    """The transformer reads them: they look at the real tokens, and not at each other."""
    n, ids = 5, ids_of(1)
    features = model(ids, first(n))
    assert mx.abs(features[:, n:]).min(axis=(0, 2)).max().item() > 0
    prompt = mx.concatenate([(ids[:, :1] + 1) % CONFIG.vocab, ids[:, 1:]], axis=1)
    assert mx.abs(model(prompt, first(n)) - features)[:, n:].max(axis=-1).min().item() > 1e-3
    padding = mx.concatenate([ids[:, :n], (ids[:, n : n + 1] + 1) % CONFIG.vocab, ids[:, n + 1 :]], axis=1)
    check(model(padding, first(n))[:, n + 1 :], features[:, n + 1 :])


def test_batch_is_single_runs(model):
    ids, mask = ids_of(3, b=3), mx.concatenate([first(n) for n in (3, M, 7)])
    alone = [model(ids[i : i + 1], mask[i : i + 1]) for i in range(3)]
    check(model(ids, mask), mx.concatenate(alone))


def test_features_are_the_tapped_states(model):
    ids, mask = ids_of(4), first(8)
    states = model.hidden_states(ids, mask, CONFIG.layers)
    assert len(states) == CONFIG.layers + 1
    check(states[0], model.embed_tokens(ids), 0)
    check(model(ids, mask), mx.concatenate([states[k] for k in CONFIG.out_layers], axis=-1), 0)


def test_nothing_above_the_highest_tap_is_computed():
    model = TextEncoder(CONFIG)
    last = model.layers[max(CONFIG.out_layers)]
    last.update(tree_map(lambda w: w * mx.nan, last.parameters()))
    model.norm.weight = model.norm.weight * mx.nan
    assert mx.isfinite(model(ids_of(5), first(9))).all().item()


# ---------------------------------------------------------------- tokens


def test_template_and_padding(tokenizer):
    ids, mask = tokenize(tokenizer, ["a red circle", ""], 40)
    assert ids.shape == mask.shape == (2, 40) and mask.dtype == mx.bool_
    pad = tokenizer.token_to_id(PAD)
    for prompt, row, real in zip(["a red circle", ""], ids.tolist(), mask.sum(axis=1).tolist()):
        assert mask[0].tolist() == sorted(mask[0].tolist(), reverse=True)  # on the right
        assert tokenizer.decode(row[:real], skip_special_tokens=False) == TEMPLATE.format(prompt)
        assert set(row[real:]) == {pad} and pad not in row[:real]


def test_a_prompt_is_taken_word_for_word(tokenizer):
    for prompt in ("  spaces  ", "{}", "{0} {name}", "100% %s", "line\nbreak", "<b>é</b>"):
        ids, mask = tokenize(tokenizer, [prompt], 80)
        text = tokenizer.decode(ids[0].tolist()[: mask.sum().item()], skip_special_tokens=False)
        assert text == TEMPLATE.format("X").replace("X", prompt)


def test_length(tokenizer):
    empty = len(tokenizer.encode(TEMPLATE.format("")).ids)
    ids, mask = tokenize(tokenizer, ["!" * 3], empty + 3)
    assert mask.all().item()
    with pytest.raises(ValueError, match=f"has {empty + 4} tokens and this model reads {empty + 3}.*by about 1 token"):
        tokenize(tokenizer, ["!" * 4], empty + 3)
