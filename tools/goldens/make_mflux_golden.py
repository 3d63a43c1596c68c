"""What mflux saves of a tiny FLUX.2 [klein], and what it computes with it: writes `tests/pipelines/mflux/`.

mflux's own classes with small numbers, its own quantization and its own saver, all run on a CPU; the tokenizer is that
of `tests/pipelines/tiny`. To make the folder again, in an environment of its own:

    pip install "mflux==0.24.0" "mlx[cpu]"
    python -m tools.goldens.make_mflux_golden

`klein-mflux-q4` is the folder as mflux writes it: 4 bits, but one matrix in 8 bits, one in bfloat16, and an autoencoder
whose matrices are too small to be quantized. `expected.safetensors`, computed in float32: `features` of PROMPT's own
tokens, `velocity` at TIME from `latents` and all features, `decoded` from `latents`, `encoded` from `pixels`.
"""

import json
import shutil
from importlib.metadata import version

import mlx.core as mx
import mlx.nn as nn
from mflux.models.common.config.model_config import ModelConfig
from mflux.models.common.tokenizer import LanguageTokenizer
from mflux.models.common.weights.saving.model_saver import ModelSaver
from mflux.models.flux2.latent_creator import Flux2LatentCreator
from mflux.models.flux2.model.flux2_text_encoder.prompt_encoder import Flux2PromptEncoder
from mflux.models.flux2.model.flux2_text_encoder.qwen3_text_encoder import Qwen3TextEncoder
from mflux.models.flux2.model.flux2_transformer.transformer import Flux2Transformer
from mflux.models.flux2.model.flux2_vae.decoder.decoder import Flux2Decoder
from mflux.models.flux2.model.flux2_vae.encoder.encoder import Flux2Encoder
from mflux.models.flux2.model.flux2_vae.vae import Flux2VAE
from mflux.models.flux2.weights.flux2_weight_definition import Flux2KleinWeightDefinition
from mlx.utils import tree_map_with_path
from transformers import AutoTokenizer

from tools.goldens import PIPELINES

FOLDER = PIPELINES / "mflux"
TOKENIZER = FOLDER.parent / "tiny" / "tokenizer"
PROMPT = "a red circle"
OUT_LAYERS = (1, 2)
MAX_LENGTH = 64
TIME = 0.7
OTHER_BITS = {"transformer_blocks.0.attn.to_k": 8, "proj_out": None}


class Tiny:
    """What mflux's saver asks of a model."""

    def __init__(self):
        vocab = len(AutoTokenizer.from_pretrained(TOKENIZER))
        self.transformer = Flux2Transformer(
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=32,
            num_attention_heads=2,
            joint_attention_dim=128,
            timestep_guidance_channels=64,
            mlp_ratio=1.0,
            axes_dims_rope=(8, 8, 8, 8),
        )
        self.text_encoder = Qwen3TextEncoder(
            vocab_size=vocab,
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=1,
            intermediate_size=64,
            head_dim=16,
        )
        self.vae = Flux2VAE()
        numbers = {"block_out_channels": (4, 4, 4, 4), "layers_per_block": 1, "norm_num_groups": 4}
        self.vae.encoder = Flux2Encoder(**numbers)
        self.vae.decoder = Flux2Decoder(**numbers)
        settings = {"use_chat_template": True, "chat_template_kwargs": {"enable_thinking": False}}
        self.tokenizers = {"qwen3": LanguageTokenizer(AutoTokenizer.from_pretrained(TOKENIZER), 512, **settings)}


def fill(module, seed):
    """Every parameter drawn anew, in the type that mflux has it in: bfloat16."""
    keys = iter(mx.random.split(mx.random.key(seed), 1000))

    def draw(path, w):
        noise = mx.random.normal(w.shape, key=next(keys))
        if path == "rotary_emb.inv_freq":  # it is saved, and no weight
            return w
        if path.endswith("running_var"):
            w = 0.5 + mx.abs(noise)
        elif "norm" in path and path.endswith("weight") and w.ndim == 1:
            w = 1 + 0.1 * noise
        else:
            fan_in = w.size // len(w) if w.ndim > 1 else 100
            w = noise / fan_in**0.5
        return w.astype(mx.bfloat16)

    module.update(tree_map_with_path(draw, module.parameters()))


def quantize(module):
    """As mflux's loader does, where every layer may have bits of its own."""

    def choose(path, layer):
        if not hasattr(layer, "to_quantized") or layer.weight.shape[-1] % 64:
            return False
        bits = OTHER_BITS.get(path, 4)
        return bits and {"group_size": 64, "bits": bits}

    nn.quantize(module, 64, 4, class_predicate=choose)


def main():
    shutil.rmtree(FOLDER, ignore_errors=True)
    model = Tiny()
    for seed, module in enumerate((model.transformer, model.text_encoder, model.vae)):
        fill(module, seed)
        quantize(module)
    folder = FOLDER / "klein-mflux-q4"
    ModelSaver.save_model(model, 4, str(folder), Flux2KleinWeightDefinition)

    ModelConfig.precision = mx.float32  # it computes in bfloat16, which would hide what differs
    for module in (model.transformer, model.text_encoder, model.vae):
        module.set_dtype(mx.float32)
    tokens = model.tokenizers["qwen3"].tokenize(PROMPT, max_length=MAX_LENGTH)
    _, states = model.text_encoder(tokens.input_ids, tokens.attention_mask, True, dtype=mx.float32)
    text = mx.concatenate([states[layer] for layer in OUT_LAYERS], axis=-1)
    latents, ids, height, width = Flux2LatentCreator.prepare_packed_latents(seed=7, height=16, width=32, batch_size=1)
    text_ids = Flux2PromptEncoder.prepare_text_ids(text)
    velocity = model.transformer(latents, text, TIME, ids, text_ids)
    packed = latents.reshape(1, height, width, 128).transpose(0, 3, 1, 2)
    pixels = mx.random.uniform(-1, 1, (1, 3, 16, 32), key=mx.random.key(8))
    tensors = {
        "features": text[:, : tokens.attention_mask.sum().item()],
        "latents": latents,
        "velocity": velocity,
        "decoded": model.vae.decode_packed_latents(packed),
        "pixels": pixels,
        "encoded": Flux2LatentCreator.patchify_latents(model.vae.normalize_latents(model.vae.encode(pixels))),
    }
    mx.save_safetensors(str(FOLDER / "expected.safetensors"), tensors)
    about = {
        "prompt": PROMPT,
        "out_layers": OUT_LAYERS,
        "max_length": MAX_LENGTH,
        "time": TIME,
        "mflux": version("mflux"),
    }
    (FOLDER / "meta.json").write_text(json.dumps(about, indent=1) + "\n")
    files = [path for path in sorted(FOLDER.rglob("*")) if path.is_file()]
    for path in files:
        print(f"{path.stat().st_size / 1000:8.1f} kB  {path.relative_to(FOLDER)}")
    print(f"{sum(path.stat().st_size for path in files) / 1000:8.1f} kB")


if __name__ == "__main__":
    main()
