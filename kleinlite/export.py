"""Writes a model as a folder in the released layout, float16: `Klein.from_pretrained` and diffusers can both load it.

The counterpart of chapter 7, which reads such folders: the same names, the same layout, configs in diffusers' words.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from tokenizers import Tokenizer

from .autoencoder import Autoencoder, AutoencoderConfig
from .checkpoints import autoencoder_sources, for_folder, text_encoder_sources, transformer_sources
from .text_encoder import PAD, TextEncoder, TextEncoderConfig
from .transformer import Transformer, TransformerConfig


def transformer_json(cfg: TransformerConfig) -> dict:
    return {
        "_class_name": "Flux2Transformer2DModel", "attention_head_dim": cfg.hd, "axes_dims_rope": list(cfg.axes),
        "eps": 1e-6, "guidance_embeds": False, "in_channels": cfg.d_latent, "joint_attention_dim": cfg.d_text,
        "mlp_ratio": cfg.mlp_ratio, "num_attention_heads": cfg.heads, "num_layers": cfg.double_blocks,
        "num_single_layers": cfg.single_blocks, "out_channels": None, "patch_size": 1, "rope_theta": int(cfg.theta),
        "timestep_guidance_channels": cfg.d_time,
    }  # fmt: skip


def autoencoder_json(cfg: AutoencoderConfig, size: int) -> dict:
    levels = len(cfg.channels)
    return {
        "_class_name": "AutoencoderKLFlux2", "act_fn": "silu", "batch_norm_eps": cfg.bn_eps,
        "batch_norm_momentum": 0.1, "block_out_channels": list(cfg.channels),
        "down_block_types": ["DownEncoderBlock2D"] * levels, "up_block_types": ["UpDecoderBlock2D"] * levels,
        "in_channels": 3, "out_channels": 3, "latent_channels": cfg.latent_channels, "layers_per_block": cfg.layers,
        "mid_block_add_attention": True, "norm_num_groups": cfg.groups, "patch_size": [2, 2], "sample_size": size,
        "use_quant_conv": True, "use_post_quant_conv": True,
    }  # fmt: skip


def text_encoder_json(cfg: TextEncoderConfig) -> dict:
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": cfg.vocab, "hidden_size": cfg.d,
        "intermediate_size": cfg.d_mlp, "num_hidden_layers": cfg.layers, "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads, "head_dim": cfg.hd, "rope_theta": cfg.theta, "rms_norm_eps": cfg.eps,
        "tie_word_embeddings": cfg.tied, "attention_bias": False, "hidden_act": "silu",
        "max_position_embeddings": 40960, "use_sliding_window": False,
    }  # fmt: skip


def model_index(cfg: TextEncoderConfig, distilled: bool) -> dict:
    return {
        "_class_name": "Flux2KleinPipeline", "_diffusers_version": "0.37.0", "is_distilled": distilled,
        "max_sequence_length": cfg.tokens, "text_encoder_out_layers": list(cfg.taps),
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen3ForCausalLM"], "tokenizer": ["transformers", "Qwen2Tokenizer"],
        "transformer": ["diffusers", "Flux2Transformer2DModel"], "vae": ["diffusers", "AutoencoderKLFlux2"],
    }  # fmt: skip


SCHEDULER_JSON = {
    "_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0,
    "use_dynamic_shifting": True, "time_shift_type": "exponential", "base_shift": 0.5, "max_shift": 1.15,
    "base_image_seq_len": 256, "max_image_seq_len": 4096, "shift_terminal": None, "invert_sigmas": False,
    "stochastic_sampling": False, "use_karras_sigmas": False, "use_exponential_sigmas": False, "use_beta_sigmas": False,
}  # fmt: skip


TOKENIZER_JSON = {
    "tokenizer_class": "Qwen2Tokenizer", "pad_token": PAD, "eos_token": "<|im_end|>", "bos_token": None,
    "unk_token": None, "add_prefix_space": False, "model_max_length": 40960,
}  # fmt: skip


CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}"
)


def save_part(folder: Path, module: nn.Module, sources: Callable[[str], list[str]], stem: str, config: dict) -> None:
    """One part of a model: config.json and its weights, float16, under the released folder's names."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    arrays = for_folder(module, sources, mx.float16)
    if "bn.running_mean" in arrays:
        arrays["bn.num_batches_tracked"] = mx.array(0, dtype=mx.int64)  # diffusers expects it
    mx.save_safetensors(str(folder / f"{stem}.safetensors"), arrays, {"format": "pt"})


def save_transformer(folder: Path, transformer: Transformer, text_cfg: TextEncoderConfig, distilled: bool) -> None:
    """A transformer and the model_index.json that makes its folder a model; the other parts may be beside it."""
    config = transformer_json(transformer._cfg)
    save_part(folder / "transformer", transformer, transformer_sources, "diffusion_pytorch_model", config)
    (folder / "model_index.json").write_text(json.dumps(model_index(text_cfg, distilled), indent=1) + "\n")


def save_encoders(
    folder: Path, autoencoder: Autoencoder, cfg: AutoencoderConfig, size: int,
    text_encoder: TextEncoder, tokenizer: Tokenizer,
) -> None:  # fmt: skip
    """The parts around the transformer, in the released layout that diffusers reads as well."""
    save_part(
        folder / "vae",
        autoencoder,
        autoencoder_sources,
        "diffusion_pytorch_model",
        autoencoder_json(cfg, size),
    )
    save_part(
        folder / "text_encoder",
        text_encoder,
        text_encoder_sources,
        "model",
        text_encoder_json(text_encoder._cfg),
    )
    (folder / "tokenizer").mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_JSON, indent=1) + "\n")
    (folder / "tokenizer" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "scheduler").mkdir(exist_ok=True)
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(SCHEDULER_JSON, indent=1) + "\n")
