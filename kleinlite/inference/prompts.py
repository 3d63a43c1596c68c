"""Prompts to features: by an encoder that is read once and released, so that the transformer finds its place free."""

from collections.abc import Iterable, Iterator

import mlx.core as mx

from ..models.checkpoint import ModelInfo
from ..models.families import Features
from .parts import Parts, PartStore
from .request import check_prompts
from .serialized import run_serialized

__all__ = ["PromptEncoder", "encode_each"]


class PromptEncoder:
    """Encodes prompts, and remembers the features of the last call's."""

    def __init__(self, store: PartStore, info: ModelInfo):
        self.store = store
        self.info = info
        self.remembered: dict[tuple[str, ...], Features] = {}

    def encode(self, prompt: str | list[str]) -> Features:
        """Text features (1, tokens, features), or a row per prompt of a list; of Z-Image a list: lengths differ."""
        [features] = run_serialized(self.encode_batches, check_prompts(self.info, prompt))
        return features[0] if isinstance(features, list) and isinstance(prompt, str) else features

    def encode_batches(self, *batches: list[str]) -> list[Features]:
        """The features of each batch of prompts; those of the last call are known and read no encoder."""
        known = {} if "text_encoder" in self.store.pinned else self.remembered  # a pinned one may have been changed
        missing = [batch for batch in batches if tuple(batch) not in known]
        if missing:
            known = known | {
                tuple(batch): features for features, batch in zip(encode_each(self.store, self.info, missing), missing)
            }
        self.remembered = {tuple(batch): known[tuple(batch)] for batch in batches}
        return [known[tuple(batch)] for batch in batches]


def encode_each(parts: PartStore | Parts, info: ModelInfo, batches: Iterable[list[str]]) -> Iterator[Features]:
    """The features of one batch of prompts after another, by an encoder that is read once and then released."""
    encoder = parts.load("text_encoder")
    tokenizer = parts.load("tokenizer")
    try:
        for batch in batches:
            encoded = info.family.encode(encoder, tokenizer, batch, info.max_length)
            mx.eval(encoded)  # or the features, not computed yet, would hold on to the encoder
            yield encoded
    finally:
        del encoder
        parts.release("text_encoder")
