"""Text encoder.

A language model reads the prompt, though it has never seen a picture. What does it give?

Letters: b prompts, m tokens of a prompt, d width.

Sources: Qwen3: Yang et al. 2025, arXiv 2505.09388. The template and the three layers: diffusers'
Flux2KleinPipeline. Our tests compare with the values of diffusers and transformers.

Promoted from notebooks/03_text_encoder.ipynb: edit there, then run `make promote`. (seal 8283891d)
"""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from tokenizers import Tokenizer

from .errors import UserError

__all__ = [
    "PAD", "TEMPLATE", "tokenize", "TextEncoderConfig", "RMSNorm", "attention_mask", "Attention", "MLP", "Layer",
    "TextEncoder", "next_token_logits",
]  # fmt: skip

PAD = "<|endoftext|>"
TEMPLATE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def tokenize(tokenizer: Tokenizer, prompts: list[str], length: int) -> tuple[mx.array, mx.array]:
    """Prompts in the chat template, padded on the right: ids (b, length) and mask (b, length), True for real tokens.

    Raises UserError for a prompt that is too long.
    """
    pad = tokenizer.token_to_id(PAD)
    ids: list[list[int | None]] = []
    mask: list[list[bool]] = []
    for prompt in prompts:
        row = tokenizer.encode(TEMPLATE.format(prompt)).ids
        missing = length - len(row)
        if missing < 0:
            template = len(tokenizer.encode(TEMPLATE.format("")).ids)
            raise UserError(
                f"The prompt has {len(row)} tokens and this model reads {length} ({template} of them are the chat "
                f"template): shorten {prompt[:40]!r}… by about {-missing} tokens."
            )
        ids.append([*row, *[pad] * missing])
        mask.append([True] * len(row) + [False] * missing)
    return mx.array(ids), mx.array(mask)


@dataclass(frozen=True)
class TextEncoderConfig:
    """Qwen3 in numbers. The defaults are Qwen3-4B's, which the 4B models use."""

    vocab: int = 151936
    d: int = 2560
    d_mlp: int = 9728
    layers: int = 36
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    theta: float = 1e6
    eps: float = 1e-6
    tied: bool = True  # the language-model head is the embedding table; False for Qwen3-8B
    out_layers: tuple[int, ...] = (9, 18, 27)  # layers whose outputs become features
    max_length: int = 512  # tokens; every prompt is padded to this

    @classmethod
    def tiny(cls) -> "TextEncoderConfig":
        return cls(
            vocab=97, d=24, d_mlp=40, layers=4, heads=4, kv_heads=2, head_dim=8, out_layers=(1, 2, 3), max_length=32
        )


class RMSNorm(nn.Module):
    """Divide by the root mean square over the last axis, computed in float32, then scale. (…, d) → (…, d)"""

    def __init__(self, d: int, eps: float):
        super().__init__()
        self.weight = mx.ones((d,))
        self._eps = eps

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
        self.heads = cfg.heads
        self.kv_heads = cfg.kv_heads
        self.head_dim = cfg.head_dim
        self.theta = cfg.theta
        self.q_proj = nn.Linear(cfg.d, cfg.heads * cfg.head_dim, bias=False)
        self.k_proj = nn.Linear(cfg.d, cfg.kv_heads * cfg.head_dim, bias=False)
        self.v_proj = nn.Linear(cfg.d, cfg.kv_heads * cfg.head_dim, bias=False)
        self.o_proj = nn.Linear(cfg.heads * cfg.head_dim, cfg.d, bias=False)
        self.q_norm = RMSNorm(cfg.head_dim, cfg.eps)
        self.k_norm = RMSNorm(cfg.head_dim, cfg.eps)

    def __call__(self, x: mx.array, mask: mx.array) -> mx.array:
        b, m, _ = x.shape

        def split(y: mx.array, heads: int) -> mx.array:
            return y.reshape(b, m, heads, self.head_dim).transpose(0, 2, 1, 3)  # (b, heads, m, head_dim)

        def rope(y: mx.array) -> mx.array:
            return mx.fast.rope(y, self.head_dim, traditional=False, base=self.theta, scale=1.0, offset=0)

        q = rope(self.q_norm(split(self.q_proj(x), self.heads)))
        k = rope(self.k_norm(split(self.k_proj(x), self.kv_heads)))
        v = split(self.v_proj(x), self.kv_heads)
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=self.head_dim**-0.5, mask=mask)
        return self.o_proj(y.transpose(0, 2, 1, 3).reshape(b, m, -1))


class MLP(nn.Module):
    """SwiGLU: silu(gate)·up, and down again. (b, m, d) → (b, m, d)"""

    def __init__(self, d: int, d_mlp: int):
        super().__init__()
        self.gate_proj = nn.Linear(d, d_mlp, bias=False)
        self.up_proj = nn.Linear(d, d_mlp, bias=False)
        self.down_proj = nn.Linear(d_mlp, d, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer: attention and MLP, each on a normed copy and added back. (b, m, d) → (b, m, d)"""

    def __init__(self, cfg: TextEncoderConfig):
        super().__init__()
        self.self_attn = Attention(cfg)
        self.mlp = MLP(cfg.d, cfg.d_mlp)
        self.input_layernorm = RMSNorm(cfg.d, cfg.eps)
        self.post_attention_layernorm = RMSNorm(cfg.d, cfg.eps)

    def __call__(self, x: mx.array, mask: mx.array) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class TextEncoder(nn.Module):
    """Qwen3, used for what its middle layers know rather than for the next word."""

    def __init__(self, cfg: TextEncoderConfig):
        super().__init__()
        self.cfg = cfg
        self.embed_tokens = nn.Embedding(cfg.vocab, cfg.d)
        self.layers = [Layer(cfg) for _ in range(cfg.layers)]
        self.norm = RMSNorm(cfg.d, cfg.eps)
        if not cfg.tied:
            self.lm_head = nn.Linear(cfg.d, cfg.vocab, bias=False)

    def hidden_states(self, ids: mx.array, mask: mx.array, last: int) -> list[mx.array]:
        """The residual stream after 0 (the embedding), 1, …, `last` layers: last + 1 arrays (b, m, d)."""
        allowed = attention_mask(mask)
        states = [self.embed_tokens(ids)]
        for layer in self.layers[:last]:
            states.append(layer(states[-1], allowed))
        return states

    def __call__(self, ids: mx.array, mask: mx.array) -> mx.array:
        """Features (b, m, 3·d): the three tapped states side by side. Nothing above the highest tap is computed."""
        states = self.hidden_states(ids, mask, max(self.cfg.out_layers))
        return mx.concatenate([states[k] for k in self.cfg.out_layers], axis=-1)


def next_token_logits(encoder: TextEncoder, ids: mx.array, mask: mx.array) -> mx.array:
    """Scores for the next token, (b, m, vocab): how Qwen3 was trained, not how klein uses it."""
    x = encoder.norm(encoder.hidden_states(ids, mask, len(encoder.layers))[-1])
    return encoder.embed_tokens.as_linear(x) if encoder.cfg.tied else encoder.lm_head(x)
