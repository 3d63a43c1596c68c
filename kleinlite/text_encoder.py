"""Text encoder.

We rebuild Qwen3, a language model, and stack the outputs of three of its middle layers for every word of the
prompt.

Promoted from notebooks/03_text_encoder.ipynb: edit there, then run `make promote`. (seal eda5ac24)
"""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from tokenizers import Tokenizer

from .cpu import attention, silu

__all__ = [
    "PAD",
    "TEMPLATE",
    "tokenize",
    "TextEncoderConfig",
    "RMSNorm",
    "attention_mask",
    "Attention",
    "MLP",
    "Layer",
    "TextEncoder",
    "next_token_logits",
]

PAD = "<|endoftext|>"
TEMPLATE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def tokenize(tokenizer: Tokenizer, prompts: list[str], length: int) -> tuple[mx.array, mx.array]:
    """Prompts in the chat template, padded on the right: ids (b, length) and mask (b, length), True for real tokens."""
    pad, rows = tokenizer.token_to_id(PAD), []
    for prompt in prompts:
        ids = tokenizer.encode(TEMPLATE.format(prompt)).ids
        if len(ids) > length:
            raise ValueError(
                f"The prompt has {len(ids)} tokens and this model reads {length} (12 of them are the chat template): "
                f"shorten {prompt[:40]!r}… by about {len(ids) - length} tokens."
            )
        rows.append(ids)
    ids = mx.array([row + [pad] * (length - len(row)) for row in rows])
    mask = mx.array([[True] * len(row) + [False] * (length - len(row)) for row in rows])
    return ids, mask


@dataclass(frozen=True)
class TextEncoderConfig:
    """Qwen3 in numbers. The defaults are Qwen3-4B's, which the 4B models use."""

    vocab: int = 151936
    d: int = 2560
    d_mlp: int = 9728
    layers: int = 36
    heads: int = 32
    kv_heads: int = 8
    hd: int = 128
    theta: float = 1e6
    eps: float = 1e-6
    tied: bool = True  # the language-model head is the embedding table; False for Qwen3-8B
    taps: tuple[int, ...] = (9, 18, 27)  # layers whose outputs become features
    tokens: int = 512  # every prompt is padded to this

    @classmethod
    def tiny(cls) -> "TextEncoderConfig":
        return cls(vocab=97, d=24, d_mlp=40, layers=4, heads=4, kv_heads=2, hd=8, taps=(1, 2, 3), tokens=32)


class RMSNorm(nn.Module):
    """Divide by the root mean square over the last axis, computed in float32, then scale. (…, d) → (…, d)"""

    def __init__(self, d: int, eps: float):
        super().__init__()
        self.weight, self._eps = mx.ones((d,)), eps

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.weight, self._eps)


def attention_mask(mask: mx.array) -> mx.array:
    """True where token i may attend to token j: j ≤ i and j is not padding. (b, m) → (b, 1, m, m)"""
    m = mask.shape[1]
    return mx.tri(m, dtype=mx.bool_) & mask[:, None, None, :]


class Attention(nn.Module):
    """Causal self-attention with grouped queries and normed queries and keys. (b, m, d) → (b, m, d)"""

    def __init__(self, cfg: TextEncoderConfig):
        super().__init__()
        self._heads, self._kv_heads, self._hd, self._theta = cfg.heads, cfg.kv_heads, cfg.hd, cfg.theta
        self.q_proj = nn.Linear(cfg.d, cfg.heads * cfg.hd, bias=False)
        self.k_proj = nn.Linear(cfg.d, cfg.kv_heads * cfg.hd, bias=False)
        self.v_proj = nn.Linear(cfg.d, cfg.kv_heads * cfg.hd, bias=False)
        self.o_proj = nn.Linear(cfg.heads * cfg.hd, cfg.d, bias=False)
        self.q_norm, self.k_norm = RMSNorm(cfg.hd, cfg.eps), RMSNorm(cfg.hd, cfg.eps)

    def __call__(self, x: mx.array, mask: mx.array) -> mx.array:
        b, m, _ = x.shape
        split = lambda y, nh: y.reshape(b, m, nh, self._hd).transpose(0, 2, 1, 3)  # (b, nh, m, hd)
        rope = lambda y: mx.fast.rope(y, self._hd, traditional=False, base=self._theta, scale=1.0, offset=0)
        q = rope(self.q_norm(split(self.q_proj(x), self._heads)))
        k = rope(self.k_norm(split(self.k_proj(x), self._kv_heads)))
        v = split(self.v_proj(x), self._kv_heads)
        y = attention(q, k, v, scale=self._hd**-0.5, mask=mask)  # (b, nh, m, hd)
        return self.o_proj(y.transpose(0, 2, 1, 3).reshape(b, m, -1))


class MLP(nn.Module):
    """SwiGLU: silu(gate)·up, and down again. (b, m, d) → (b, m, d)"""

    def __init__(self, d: int, d_mlp: int):
        super().__init__()
        self.gate_proj = nn.Linear(d, d_mlp, bias=False)
        self.up_proj = nn.Linear(d, d_mlp, bias=False)
        self.down_proj = nn.Linear(d_mlp, d, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer: attention and MLP, each on a normed copy and added back. (b, m, d) → (b, m, d)"""

    def __init__(self, cfg: TextEncoderConfig):
        super().__init__()
        self.self_attn, self.mlp = Attention(cfg), MLP(cfg.d, cfg.d_mlp)
        self.input_layernorm = RMSNorm(cfg.d, cfg.eps)
        self.post_attention_layernorm = RMSNorm(cfg.d, cfg.eps)

    def __call__(self, x: mx.array, mask: mx.array) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class TextEncoder(nn.Module):
    """Qwen3, used for what its middle layers know rather than for the next word."""

    def __init__(self, cfg: TextEncoderConfig):
        super().__init__()
        self._cfg = cfg
        self.embed_tokens = nn.Embedding(cfg.vocab, cfg.d)
        self.layers = [Layer(cfg) for _ in range(cfg.layers)]
        self.norm = RMSNorm(cfg.d, cfg.eps)
        if not cfg.tied:
            self.lm_head = nn.Linear(cfg.d, cfg.vocab, bias=False)

    def hidden_states(self, ids: mx.array, mask: mx.array, last: int) -> list[mx.array]:
        """The residual stream after 0 (the embedding), 1, …, `last` layers: last + 1 arrays (b, m, d)."""
        look, states = attention_mask(mask), [self.embed_tokens(ids)]
        for layer in self.layers[:last]:
            states.append(layer(states[-1], look))
        return states

    def __call__(self, ids: mx.array, mask: mx.array) -> mx.array:
        """Features (b, m, 3·d): the three tapped states side by side. Nothing above the highest tap is computed."""
        states = self.hidden_states(ids, mask, max(self._cfg.taps))
        return mx.concatenate([states[k] for k in self._cfg.taps], axis=-1)


def next_token_logits(encoder: TextEncoder, ids: mx.array, mask: mx.array) -> mx.array:
    """Scores for the next token, (b, m, vocab): how Qwen3 was trained, not how klein uses it."""
    x = encoder.norm(encoder.hidden_states(ids, mask, len(encoder.layers))[-1])
    return encoder.embed_tokens.as_linear(x) if encoder._cfg.tied else encoder.lm_head(x)
