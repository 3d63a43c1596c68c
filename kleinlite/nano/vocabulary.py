"""More words for a trained text encoder, each begun as a copy of the word that it stands for.

Nano's tokenizer knows the words of the grammar and spells all others. Here every word of `words`, written small, with
a capital and in capitals, with and without a space before it, becomes one token: merges are added after the learned
ones, so that no sentence of the grammar is read in another way. A synonym's row of the embedding table is its word's,
a plural's its singular's and a vector that all plurals share, a new word's random; all with a little noise.
"""

from __future__ import annotations

import json

import mlx.core as mx
from tokenizers import Tokenizer

from ..scenes import captions, sample, sample_edit, sample_row
from .words import OPENINGS, SYNONYMS

MEANINGS = {
    "meadows": "hills", "grass": "hills", "sand": "dunes", "desert": "dunes", "water": "sea", "ocean": "sea",
    "evening": "sunset", "dusk": "sunset", "daylight": "day", "during": "at", "dark": "night", "beneath": "below",
    "underneath": "below", "over": "above", "delete": "remove", "erase": "remove", "take": "remove", "place": "add",
}  # fmt: skip


def all_words() -> list[str]:
    """Every word of the grammar, of its synonyms and of the openings."""
    scenes = [sample(seed) for seed in range(3000)] + [sample_row(seed) for seed in range(3000)]
    said = [caption for scene in scenes for caption in captions(scene)] + [sample_edit(s)[1] for s in range(3000)]
    said += [*OPENINGS, *(other for others in SYNONYMS.values() for other in others)]
    return sorted({word for text in said for word in text.replace(",", "").split()})


def meanings() -> dict[str, str]:
    """From a synonym of one word to the word."""
    single = {other: word for word, others in SYNONYMS.items() for other in others if " " not in word + other}
    return single | MEANINGS


def extend(tokenizer: Tokenizer, table: mx.array, key: mx.array) -> tuple[Tokenizer, mx.array]:
    """The tokenizer with a token for each of `all_words`, and its embedding table, (vocab, d) → (larger vocab, d)."""
    spec = json.loads(tokenizer.to_str())
    vocab, merges = spec["model"]["vocab"], spec["model"]["merges"]
    for added in spec["added_tokens"]:
        vocab[added["content"]] = added["id"]  # else they would be numbered anew, behind the new words
    known, means = dict(vocab), meanings()
    key, sub = mx.random.split(key)
    plural, rows = 0.25 * mx.random.normal((table.shape[1],), key=sub), []

    def row_of(word: str) -> mx.array | None:
        """What an old word's row says about a new one."""
        for form in (f"Ġ{word}", word):
            if form in known:
                return table[known[form]]
        if word in means:
            return row_of(means[word])
        single = row_of(word[:-1]) if word.endswith("s") else None
        return None if single is None else single + plural

    for word in all_words():
        forms = [space + form for form in (word, word.title(), word.upper()) for space in ("Ġ", "")]
        for form in forms:
            if form in vocab:
                continue
            reader = Tokenizer.from_str(json.dumps(spec))
            parts = reader.encode(form.replace("Ġ", " ")).tokens
            while len(parts) > 1:
                joined = parts[0] + parts[1]
                merges.append(parts[:2])
                if joined not in vocab:
                    vocab[joined] = len(vocab)
                    key, sub = mx.random.split(key)
                    meant = row_of(word) if joined == form else None
                    noise = mx.random.normal((table.shape[1],), key=sub)
                    rows.append(0.5 * noise if meant is None else meant + 0.03 * noise)
                parts = [joined, *parts[2:]]
    return Tokenizer.from_str(json.dumps(spec)), mx.concatenate([table, mx.stack(rows)])
