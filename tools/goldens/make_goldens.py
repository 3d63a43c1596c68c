"""What the reference implementation computes, block by block: writes `tests/goldens/`.

The reference is diffusers + transformers on torch, so nothing here depends on MLX or on kleinlite. The tests
only read the files; run this program to make them again, or to make more of them:

    python -m venv .venv && . .venv/bin/activate
    pip install -e ".[dev]"                 # torch, diffusers, transformers among them; a CPU is enough
    python -m tools.goldens.make_goldens            # write the files: seconds, once torch is imported
    python -m tools.goldens.make_goldens --check    # write nothing: compute again, compare with the files

Every module is tiny and random, with a different size for everything that could be swapped by mistake. Each
block runs on an ordinary input (rms 1) and on a small one (rms 0.01), because a wrong epsilon only shows when
activations are small. Modules run in float64 where the reference allows it; results are stored as float32.
`tests/goldens/README.md` says how the tensors are named.
"""

import argparse
import copy
import json
import math
import re
import time
from importlib.metadata import version
from types import SimpleNamespace

import numpy as np
import torch
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
)
from diffusers.models.downsampling import Downsample2D
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.normalization import AdaLayerNormContinuous
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_flux2 import (
    Flux2FeedForward,
    Flux2KVAttnProcessor,
    Flux2KVParallelSelfAttnProcessor,
    Flux2Modulation,
    Flux2PosEmbed,
    Flux2SingleTransformerBlock,
    Flux2SwiGLU,
    Flux2TimestepGuidanceEmbeddings,
    Flux2TransformerBlock,
)
from diffusers.models.unets.unet_2d_blocks import UNetMidBlock2D
from diffusers.models.upsampling import Upsample2D
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu, retrieve_timesteps
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from tools.goldens import GOLDENS

CASES = {"ordinary": 1.0, "small": 0.01}


# ---------------------------------------------------------------- random numbers, names, files


class Draw:
    """Numbers from a seed. Uniform, not normal: those bits are the same on every machine."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape, rms=1.0):
        flat = torch.rand(shape, generator=self.generator) * 2 - 1
        return (flat * (rms * math.sqrt(3))).double()

    def ids(self, high, *shape):
        return torch.randint(0, high, shape, generator=self.generator)


def fan_in(parameter):
    return parameter[0].numel()


def randomise(module, seed, quiet=()):
    """Random weights that keep activations near 1, norm weights that are not 1.

    `quiet` names weights to make small: queries and keys, and what else stands before a second norm, must be
    small for the epsilon of that norm to show.
    """
    draw = Draw(seed)
    for name, parameter in sorted(module.named_parameters()):
        if parameter.ndim > 1:
            value = draw(*parameter.shape, rms=1 / math.sqrt(fan_in(parameter)))
        elif name.endswith("weight"):
            value = 1 + draw(*parameter.shape, rms=0.25)
        else:
            value = draw(*parameter.shape, rms=0.2)
        for pattern, factor in quiet:
            if re.search(pattern, name):
                value = value * factor
        if name.endswith("to_qkv_mlp_proj.weight"):  # fused: q and k are the first rows
            width = parameter.shape[1]
            value[: 2 * width] *= 0.05
        parameter.data = value.float().double()
    for name, buffer in sorted(module.named_buffers()):
        if name.endswith("running_mean"):
            buffer.copy_(draw(*buffer.shape, rms=0.5))
        if name.endswith("running_var"):
            buffer.copy_(0.001 + draw(*buffer.shape) ** 2)
    return module.double().eval()


QUIET_DIT = [(r"\.(to_q|to_k|add_q_proj|add_k_proj)\.weight", 0.05)]
QUIET_QWEN = [(r"(q_proj|k_proj|o_proj)\.weight", 0.05)]
QUIET_VAE = [
    (r"conv1\.(weight|bias)", 0.05),
    # a last stage with a small stream, for the epsilon of the last norm
    (r"encoder\.down_blocks\.2\.downsamplers", 0.02),
    (r"encoder\.(down_blocks\.3|mid_block)\..*(conv2|to_out)", 0.02),
    (r"decoder\.up_blocks\.2\.upsamplers", 0.02),
    (r"decoder\.up_blocks\.3\..*conv2", 0.02),
]


def pairs(table):
    """diffusers repeats every cos and sin for both channels of a pair; one is enough."""
    assert torch.equal(table[..., 0::2], table[..., 1::2])
    return table[..., 0::2]


class File(dict):
    """Tensors by name, and the configs of the blocks in them."""

    def __init__(self, name):
        super().__init__()
        self.name, self.config = name, {}

    def put(self, prefix, tensors):
        for key, value in tensors.items():
            value = torch.as_tensor(value)
            dtype = torch.float32 if value.is_floating_point() else torch.int32
            assert f"{prefix}.{key}" not in self
            self[f"{prefix}.{key}"] = value.detach().to(dtype).contiguous().clone()

    def metadata(self):
        made = {name: version(name).split("+")[0] for name in ("diffusers", "torch", "transformers")}
        # one field only: safetensors writes several in a different order every time
        return {"made": json.dumps({"with": made, "config": self.config}, sort_keys=True)}


# ---------------------------------------------------------------- diffusers' names -> original names


def double_block_names(state):
    names = {
        "attn.norm_q.weight": "img_attn.norm.query_norm.scale",
        "attn.norm_k.weight": "img_attn.norm.key_norm.scale",
        "attn.to_out.0.weight": "img_attn.proj.weight",
        "ff.linear_in.weight": "img_mlp.0.weight",
        "ff.linear_out.weight": "img_mlp.2.weight",
        "attn.norm_added_q.weight": "txt_attn.norm.query_norm.scale",
        "attn.norm_added_k.weight": "txt_attn.norm.key_norm.scale",
        "attn.to_add_out.weight": "txt_attn.proj.weight",
        "ff_context.linear_in.weight": "txt_mlp.0.weight",
        "ff_context.linear_out.weight": "txt_mlp.2.weight",
    }
    state = dict(state)
    out = {new: state.pop(old) for old, new in names.items()}
    out["img_attn.qkv.weight"] = torch.cat([state.pop(f"attn.to_{x}.weight") for x in "qkv"])
    out["txt_attn.qkv.weight"] = torch.cat([state.pop(f"attn.add_{x}_proj.weight") for x in "qkv"])
    assert not state
    return out


def single_block_names(state):
    names = {
        "attn.to_qkv_mlp_proj.weight": "linear1.weight",
        "attn.to_out.weight": "linear2.weight",
        "attn.norm_q.weight": "norm.query_norm.scale",
        "attn.norm_k.weight": "norm.key_norm.scale",
    }
    assert set(state) == set(names)
    return {new: state[old] for old, new in names.items()}


def final_layer_names(norm_out, proj_out):
    scale, shift = norm_out.chunk(2)  # diffusers' order; the original has shift first
    return {"adaLN_modulation.1.weight": torch.cat([shift, scale]), "linear.weight": proj_out}


def transformer_names(state):
    names = {
        "x_embedder.weight": "img_in.weight",
        "context_embedder.weight": "txt_in.weight",
        "time_guidance_embed.timestep_embedder.linear_1.weight": "time_in.in_layer.weight",
        "time_guidance_embed.timestep_embedder.linear_2.weight": "time_in.out_layer.weight",
        "double_stream_modulation_img.linear.weight": "double_stream_modulation_img.lin.weight",
        "double_stream_modulation_txt.linear.weight": "double_stream_modulation_txt.lin.weight",
        "single_stream_modulation.linear.weight": "single_stream_modulation.lin.weight",
    }
    state = dict(state)
    out = {new: state.pop(old) for old, new in names.items()}
    final = final_layer_names(state.pop("norm_out.linear.weight"), state.pop("proj_out.weight"))
    out |= {f"final_layer.{key}": value for key, value in final.items()}
    blocks = {}
    for name, value in state.items():
        kind, i, rest = name.split(".", 2)
        blocks.setdefault((kind, i), {})[rest] = value
    for (kind, i), block in blocks.items():
        new, convert = {
            "transformer_blocks": ("double_blocks", double_block_names),
            "single_transformer_blocks": ("single_blocks", single_block_names),
        }[kind]
        out |= {f"{new}.{i}.{key}": value for key, value in convert(block).items()}
    return out


def autoencoder_names(state):
    stages = len({name.split(".")[2] for name in state if name.startswith("decoder.up_blocks")})
    rules = [
        (r"^quant_conv", "encoder.quant_conv"),
        (r"^post_quant_conv", "decoder.post_quant_conv"),
        (r"down_blocks\.(\d)\.resnets\.(\d)", r"down.\1.block.\2"),
        (r"down_blocks\.(\d)\.downsamplers\.0", r"down.\1.downsample"),
        (r"up_blocks\.(\d)\.resnets\.(\d)", lambda m: f"up.{stages - 1 - int(m[1])}.block.{m[2]}"),
        (r"up_blocks\.(\d)\.upsamplers\.0", lambda m: f"up.{stages - 1 - int(m[1])}.upsample"),
        (r"mid_block\.resnets\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}"),
        (r"mid_block\.attentions\.0", "mid.attn_1"),
        (r"group_norm", "norm"),
        (r"to_out\.0", "proj_out"),
        (r"attn_1\.to_([qkv])", r"attn_1.\1"),
        (r"^to_([qkv])", r"\1"),  # an attention block on its own
        (r"conv_shortcut", "nin_shortcut"),
        (r"conv_norm_out", "norm_out"),
    ]
    out = {}
    for name, value in state.items():
        if name.endswith("num_batches_tracked"):
            continue
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        out[name] = value
    return out


# ---------------------------------------------------------------- autoencoder


VAE = {
    "block_out_channels": (6, 8, 12, 12),
    "layers_per_block": 2,
    "latent_channels": 4,
    "norm_num_groups": 2,
    "sample_size": 64,
}
SMALL_DECODER = (4, 6, 8, 8)


def tiny_vae(**changes):
    kinds = {
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
    }
    return AutoencoderKLFlux2(**VAE, **kinds, **changes)


def pipeline_with(vae):
    """The parts of the pipeline that handle latents, without a pipeline."""
    return SimpleNamespace(vae=vae, _patchify_latents=Flux2KleinPipeline._patchify_latents)


def normalize(vae, image):
    """Image -> packed normalised latent, by the pipeline's own method."""
    return Flux2KleinPipeline._encode_vae_image(pipeline_with(vae), image, generator=None)


def denormalize(vae, normalised):
    """What the pipeline does between the last step and `vae.decode` (it stands inline there)."""
    mean = vae.bn.running_mean.view(1, -1, 1, 1)
    std = torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps)
    return Flux2KleinPipeline._unpatchify_latents(normalised * std + mean)


def autoencoder():
    file, draw = File("autoencoder"), Draw(1)

    shape = {"temb_channels": None, "groups": 4, "eps": 1e-6}
    for name, seed, cin, cout in (("res_block", 11, 8, 8), ("res_block_shortcut", 12, 8, 12)):
        block = randomise(ResnetBlock2D(in_channels=cin, out_channels=cout, **shape), seed, QUIET_VAE)
        file.config[name] = {"in_channels": cin, "out_channels": cout, "groups": 4}
        file.put(f"{name}.weight", autoencoder_names(block.state_dict()))
        x = draw(2, cin, 5, 6)
        for case, size in CASES.items():
            file.put(f"{name}.{case}", {"in.x": x * size, "out.x": block((x * size).float().double(), None)})

    middle = UNetMidBlock2D(12, temb_channels=None, attention_head_dim=12, resnet_groups=4, resnet_eps=1e-6)
    attention = randomise(middle.attentions[0], 13)
    file.config["mid_attention"] = {"channels": 12, "groups": 4}
    file.put("mid_attention.weight", autoencoder_names(attention.state_dict()))
    x = draw(2, 12, 5, 6)
    for case, size in CASES.items():
        file.put(f"mid_attention.{case}", {"in.x": x * size, "out.x": attention((x * size).float().double())})

    down = randomise(Downsample2D(6, use_conv=True, padding=0, name="op"), 14)
    up = randomise(Upsample2D(6, use_conv=True), 15)
    for name, block, x in (("downsample", down, draw(2, 6, 8, 10)), ("upsample", up, draw(2, 6, 4, 5))):
        file.put(f"{name}.weight", block.state_dict())
        for case, size in CASES.items():
            file.put(f"{name}.{case}", {"in.x": x * size, "out.x": block((x * size).float().double())})

    vae = randomise(tiny_vae(), 16, QUIET_VAE)
    file.config["autoencoder"] = VAE | {"batch_norm_eps": vae.config.batch_norm_eps}
    file.put("autoencoder.weight", autoencoder_names(vae.state_dict()))
    image, latent, packed = draw(1, 3, 32, 48, rms=0.5), draw(1, 4, 6, 10), draw(1, 16, 2, 3)
    for case, size in CASES.items():
        x = (image * size).float().double()
        mean = vae.encode(x).latent_dist.mode()
        z = normalize(vae, x)
        file.put(f"encode.{case}", {"in.image": x, "out.mean": mean, "out.normalised": z})

        x = (latent * size).float().double()
        patches = Flux2KleinPipeline._patchify_latents(x)
        z = vae.bn(patches)
        assert torch.allclose(denormalize(vae, z), x)
        tokens = Flux2KleinPipeline._pack_latents(z)
        out = {"out.packed": patches, "out.normalised": z, "out.tokens": tokens}
        file.put(f"patchify.{case}", {"in.latent": x} | out)

        z = (packed * size).float().double()
        x = denormalize(vae, z)
        file.put(f"decode.{case}", {"in.normalised": z, "out.latent": x, "out.image": vae.decode(x).sample})

    # the same with a narrower decoder; encoder and statistics are those above
    slim = File("small_decoder")
    other = randomise(tiny_vae(decoder_block_out_channels=SMALL_DECODER), 17, QUIET_VAE)
    slim.config["autoencoder"] = file.config["autoencoder"] | {"decoder_block_out_channels": SMALL_DECODER}
    other.encoder, other.quant_conv, other.bn = vae.encoder, vae.quant_conv, vae.bn
    weights = autoencoder_names(other.state_dict())
    slim.put("autoencoder.weight", {k: v for k, v in weights.items() if k.startswith("decoder.")})
    for case, size in CASES.items():
        z = (packed * size).float().double()
        image = other.decode(denormalize(other, z)).sample
        slim.put(f"decode.{case}", {"in.normalised": z, "out.image": image})
    return [file, slim]


# ---------------------------------------------------------------- positions


GRID = (3, 5)
REFERENCES = [(2, 4), (3, 2)]
TEXT = 7


def grid_ids(references=0):
    """Position ids (t, h, w, l) of text, image and references, from the pipeline's own methods."""
    text = Flux2KleinPipeline._prepare_text_ids(torch.zeros(1, TEXT, 1))[0]
    image = Flux2KleinPipeline._prepare_latent_ids(torch.zeros(1, 1, *GRID))[0]
    latents = [torch.zeros(1, 1, *size) for size in REFERENCES[:references]]
    others = Flux2KleinPipeline._prepare_image_ids(latents)[0] if references else image[:0]
    return text, image, others


def position_ids():
    file, draw = File("position_ids"), Draw(2)
    text, image, others = grid_ids(references=2)
    file.config["ids"] = {"text": TEXT, "grid": GRID, "references": REFERENCES}
    file.put("ids.ordinary", {"out.text": text, "out.image": image, "out.reference": others})

    far = torch.tensor([[10, 37, 63, 511], [40, 63, 127, 0]])
    few = torch.stack([text[6], image[13], others[6], others[11]])
    for name, axes, heads, ids in (
        ("axes4", (4, 4, 4, 4), 3, torch.cat([text, image, others, far])),
        ("axes32", (32, 32, 32, 32), 2, torch.cat([few, far])),
    ):
        file.config[f"rope.{name}"] = {"axes": axes, "theta": 2000}
        tables = Flux2PosEmbed(2000, axes)(ids)
        file.put(f"rope.{name}", {"in.ids": ids, "out.cos": pairs(tables[0]), "out.sin": pairs(tables[1])})
        for x in "qk":
            before = draw(1, len(ids), heads, sum(axes))
            after = apply_rotary_emb(before, tables, sequence_dim=1)
            file.put(f"rope.{name}", {f"in.{x}": before, f"out.{x}": after})
    return [file]


# ---------------------------------------------------------------- text encoder


QWEN = {
    "vocab_size": 29,
    "hidden_size": 20,
    "intermediate_size": 36,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
FEATURE_LAYERS = (1, 3, 4)


def qwen_config(**values):
    rope = {"rope_type": "default", "rope_theta": 1e6}
    config = Qwen3Config(**values, rope_parameters=rope, max_position_embeddings=64, attention_bias=False)
    config._attn_implementation = "eager"
    return config


class FixedTokens:
    """Stands in for the tokenizer, so that the pipeline's own stacking of features can run on given ids."""

    def __init__(self, ids, mask):
        self.rows = [{"input_ids": i[None], "attention_mask": m[None]} for i, m in zip(ids, mask)]

    def apply_chat_template(self, messages, **_):
        return messages[0]["content"]

    def __call__(self, text, **_):
        return self.rows[int(text)]


def text_encoder():
    file, draw = File("text_encoder"), Draw(3)
    config = qwen_config(**QWEN)
    file.config["qwen3"] = QWEN | {"rope_theta": 1e6, "feature_layers": FEATURE_LAYERS}

    norm = randomise(Qwen3RMSNorm(20, eps=1e-6), 31)
    file.put("rms_norm.weight", norm.state_dict())
    x = draw(2, 3, 20)
    for case, size in CASES.items():
        file.put(f"rms_norm.{case}", {"in.x": x * size, "out.x": norm((x * size).float().double())})

    layer = randomise(Qwen3DecoderLayer(config, 0), 32, QUIET_QWEN)
    file.put("decoder_layer.weight", layer.state_dict())
    x = draw(2, 9, 20)
    mask = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
    # query i may see key j if j <= i and j is a real token
    allowed = torch.ones(9, 9).tril().bool() & mask[:, None, None, :].bool()
    additive = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -1e30)
    rope = Qwen3RotaryEmbedding(config)(x, torch.arange(9)[None])
    for case, size in CASES.items():
        h = (x * size).float().double()
        out = layer(h, attention_mask=additive, position_embeddings=rope)
        file.put(f"decoder_layer.{case}", {"in.x": h, "in.mask": mask, "out.x": out})

    model = randomise(Qwen3ForCausalLM(config), 33, QUIET_QWEN)
    model.tie_weights()
    model.model.embed_tokens.weight.mul_(4)  # about rms 1
    weights = model.state_dict()
    assert torch.equal(weights.pop("lm_head.weight"), weights["model.embed_tokens.weight"])
    file.put("qwen3.weight", weights)
    ids = draw.ids(29, 2, 9)
    ids[1, 5:] = 0
    out = model(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
    assert torch.equal(out.hidden_states[0], model.model.embed_tokens(ids))
    alone = model(input_ids=ids[1:, :5], output_hidden_states=True, use_cache=False)
    assert torch.allclose(alone.hidden_states[4], out.hidden_states[4][1:, :5], atol=1e-5)
    features = Flux2KleinPipeline._get_qwen3_prompt_embeds(
        model, FixedTokens(ids, mask), ["0", "1"], hidden_states_layers=FEATURE_LAYERS
    )
    states = torch.stack(out.hidden_states)
    outputs = {"out.hidden_states": states, "out.features": features, "out.logits": out.logits}
    file.put("qwen3.ordinary", {"in.ids": ids, "in.mask": mask} | outputs)
    return [file]


# ---------------------------------------------------------------- sampling


SCHEDULER = {
    "num_train_timesteps": 1000,
    "shift": 3.0,
    "use_dynamic_shifting": True,
    "time_shift_type": "exponential",
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}
SCHEDULES = [
    (16, 4), (24, 4), (64, 1), (256, 2), (256, 4), (1024, 4), (1024, 50), (3072, 4), (4080, 4), (4096, 4),
    (4096, 8), (4096, 50), (4300, 4), (4301, 4), (4400, 4), (4400, 8), (6144, 4), (16384, 4),
]  # fmt: skip


def schedule(tokens, steps):
    """The scheduler as the pipeline sets it up."""
    scheduler = FlowMatchEulerDiscreteScheduler(**SCHEDULER)
    mu = compute_empirical_mu(image_seq_len=tokens, num_steps=steps)
    retrieve_timesteps(scheduler, steps, "cpu", sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    scheduler.set_begin_index(0)
    return scheduler, mu


def sampling():
    file, draw = File("sampling"), Draw(4)
    table = torch.tensor(SCHEDULES)
    mus = torch.tensor([schedule(*row)[1] for row in SCHEDULES])
    file.put("schedule.table", {"in.tokens": table[:, 0], "in.steps": table[:, 1], "out.mu": mus})
    for tokens, steps in SCHEDULES:
        file.put(f"schedule.{tokens}x{steps}", {"out.sigmas": schedule(tokens, steps)[0].sigmas})

    noise, other = draw(1, 6, 8).float(), draw(1, 6, 8).float()
    for case, velocity in (
        ("straight", lambda x, sigma: (x - other) / sigma),  # `other` is the data: the path ends there
        ("curved", lambda x, sigma: sigma * x + other),
    ):
        scheduler, _ = schedule(24, 5)
        x, path, velocities = noise, [noise], []
        for t, sigma in zip(scheduler.timesteps, scheduler.sigmas):
            velocities.append(velocity(x, sigma))
            x = scheduler.step(velocities[-1], t, x, return_dict=False)[0]
            path.append(x)
        assert case == "curved" or torch.allclose(x, other, atol=1e-5)
        file.put(f"euler.{case}", {"in.noise": noise, "in.other": other, "in.sigmas": scheduler.sigmas})
        file.put(f"euler.{case}", {"in.velocity": torch.stack(velocities)})
        file.put(f"euler.{case}", {"out.trajectory": torch.stack(path)})
    return [file]


# ---------------------------------------------------------------- transformer


BLOCK = {"dim": 36, "num_attention_heads": 3, "attention_head_dim": 12, "mlp_ratio": 3.0, "eps": 1e-6}
BLOCK_AXES = (4, 4, 2, 2)
DIT = {
    "in_channels": 10,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 12,
    "num_attention_heads": 2,
    "joint_attention_dim": 14,
    "mlp_ratio": 3.0,
    "axes_dims_rope": (2, 4, 4, 2),
    "rope_theta": 2000,
    "guidance_embeds": False,
}


def modulation(draw, size, *shape, sets):
    """Shift, scale, gate, ... as a modulation layer gives them. Small gates keep a small stream small."""
    parts = list(draw(*shape).chunk(3 * sets, dim=-1))
    parts[2::3] = [gate * size for gate in parts[2::3]]
    return torch.cat(parts, dim=-1).float().double()


def transformer_blocks(file):
    draw = Draw(5)

    time_in = randomise(Flux2TimestepGuidanceEmbeddings(256, 20, bias=False, guidance_embeds=False), 51)
    mlp = time_in.timestep_embedder
    weights = {"in_layer.weight": mlp.linear_1.weight, "out_layer.weight": mlp.linear_2.weight}
    sigma = torch.tensor([0, 1e-3, 0.25, 0.75, 1]).double()
    out = {"out.features": time_in.time_proj(sigma * 1000), "out.temb": time_in(sigma * 1000, None)}
    file.config["time_embedding"] = {"channels": 256, "dim": 20}
    file.put("time_embedding.weight", weights)
    file.put("time_embedding.ordinary", {"in.sigma": sigma} | out)

    two, one = randomise(Flux2Modulation(20, 2), 52), randomise(Flux2Modulation(20, 1), 53)
    file.put("modulation_double.weight", {"lin.weight": two.linear.weight})
    file.put("modulation_single.weight", {"lin.weight": one.linear.weight})
    temb = draw(2, 20)
    for case, size in CASES.items():
        x = (temb * size).float().double()
        file.put(f"modulation_double.{case}", {"in.temb": x, "out.mod": two(x)})
        file.put(f"modulation_single.{case}", {"in.temb": x, "out.mod": one(x)})

    ff = randomise(Flux2FeedForward(20, mult=3.0), 54)
    file.put("feed_forward.weight", {"0.weight": ff.linear_in.weight, "2.weight": ff.linear_out.weight})
    x, u = draw(2, 4, 20), draw(2, 4, 26)
    for case, size in CASES.items():
        file.put(f"feed_forward.{case}", {"in.x": x * size, "out.x": ff((x * size).float().double())})
        file.put(f"swiglu.{case}", {"in.x": u * size, "out.x": Flux2SwiGLU()((u * size).float().double())})

    norm = randomise(torch.nn.RMSNorm(16, eps=1e-6), 55)
    file.put("qk_norm.weight", {"query_norm.scale": norm.weight})
    x = draw(2, 4, 3, 16)
    for case, size in CASES.items():
        file.put(f"qk_norm.{case}", {"in.x": x * size, "out.x": norm((x * size).float().double())})

    final = AdaLayerNormContinuous(20, 20, elementwise_affine=False, eps=1e-6, bias=False)
    final = torch.nn.ModuleDict({"norm_out": final, "proj_out": torch.nn.Linear(20, 9, bias=False)})
    final = randomise(final, 56)
    weights = final_layer_names(final["norm_out"].linear.weight, final["proj_out"].weight)
    file.put("final_layer.weight", weights)
    x, temb = draw(2, 4, 20), draw(2, 20)
    for case, size in CASES.items():
        h = (x * size).float().double()
        out = final["proj_out"](final["norm_out"](h, temb))
        file.put(f"final_layer.{case}", {"in.x": h, "in.temb": temb, "out.x": out})

    double = randomise(Flux2TransformerBlock(**BLOCK), 57, QUIET_DIT)
    single = randomise(Flux2SingleTransformerBlock(**BLOCK), 58, QUIET_DIT)
    for name in ("double_block", "single_block"):
        file.config[name] = BLOCK | {"axes": BLOCK_AXES, "theta": 2000}
    file.put("double_block.weight", double_block_names(double.state_dict()))
    file.put("single_block.weight", single_block_names(single.state_dict()))
    text, image, _ = grid_ids()
    ids = torch.cat([text, image])
    rope = Flux2PosEmbed(2000, BLOCK_AXES)(ids)
    img, txt = draw(2, len(image), 36), draw(2, len(text), 36)
    for case, size in CASES.items():
        x, c = (img * size).float().double(), (txt * size).float().double()
        mod_img = modulation(draw, size, 2, 6 * 36, sets=2)
        mod_txt = modulation(draw, size, 2, 6 * 36, sets=2)
        out_txt, out_img = double(x, c, mod_img, mod_txt, rope)
        inputs = {"in.img": x, "in.txt": c, "in.mod_img": mod_img, "in.mod_txt": mod_txt, "in.ids": ids}
        file.put(f"double_block.{case}", inputs | {"out.img": out_img, "out.txt": out_txt})

        mod = modulation(draw, size, 2, 3 * 36, sets=1)
        h = torch.cat([c, x], dim=1)
        out = single(h, None, mod, rope)
        file.put(f"single_block.{case}", {"in.x": h, "in.mod": mod, "in.ids": ids, "out.x": out})


def watch(model, seen):
    """Note what every block of the transformer gives."""

    def note(name):
        def hook(module, args, output):
            if isinstance(output, tuple):
                seen[f"mid.{name}.txt"], seen[f"mid.{name}.img"] = output
            else:
                seen[f"mid.{name}"] = output

        return hook

    hooks = [model.time_guidance_embed.register_forward_hook(note("temb"))]
    for new, blocks in (
        ("double_blocks", model.transformer_blocks),
        ("single_blocks", model.single_transformer_blocks),
    ):
        hooks += [block.register_forward_hook(note(f"{new}.{i}")) for i, block in enumerate(blocks)]
    return hooks


def whole_transformer(file):
    draw = Draw(6)
    model = randomise(Flux2Transformer2DModel(**DIT), 61, QUIET_DIT)
    file.config["model"] = DIT
    file.put("model.weight", transformer_names(model.state_dict()))
    text, image, _ = grid_ids()
    channels, width = DIT["in_channels"], DIT["joint_attention_dim"]
    for case, batch, references, size, sigma in (
        ("ordinary", 1, 0, 1.0, [0.75]),
        ("small", 1, 0, 0.01, [0.25]),
        ("reference", 1, 1, 1.0, [0.6]),
        ("two_references", 1, 2, 1.0, [0.35]),
        ("batch", 2, 0, 1.0, [0.9, 0.2]),
    ):
        others = grid_ids(references)[2]
        img = draw(batch, len(image), channels, rms=size).float().double()
        txt = draw(batch, len(text), width, rms=size).float().double()
        ref = draw(batch, len(others), channels, rms=size).float().double()
        sigma = torch.tensor(sigma).double()
        inputs = {"in.img": img, "in.txt": txt, "in.sigma": sigma, "in.img_ids": image, "in.txt_ids": text}
        if references:
            inputs |= {"in.ref": ref, "in.ref_ids": others}
        seen = {}
        hooks = watch(model, seen) if case == "ordinary" else []
        velocity = model(
            hidden_states=torch.cat([img, ref], dim=1),
            encoder_hidden_states=txt,
            timestep=sigma,
            img_ids=torch.cat([image, others]),
            txt_ids=text,
        ).sample[:, : len(image)]
        for hook in hooks:
            hook.remove()
        file.put(f"model.{case}", inputs | seen | {"out.velocity": velocity})
    return model


def with_kv(model):
    """A copy with the attention that knows the cache; the usual one drops the cache with a mere warning."""
    model = copy.deepcopy(model)
    for block in model.transformer_blocks:
        block.attn.set_processor(Flux2KVAttnProcessor())
    for block in model.single_transformer_blocks:
        block.attn.set_processor(Flux2KVParallelSelfAttnProcessor())
    return model


def kv_cache(model):
    """Step one takes keys and values of the references out, later steps put them in. Weights: transformer."""
    file, draw = File("kv"), Draw(7)
    file.config["model"] = DIT
    model = with_kv(model)
    text, image, _ = grid_ids()
    channels, width = DIT["in_channels"], DIT["joint_attention_dim"]
    for case, batch, references in (("one_reference", 1, 1), ("two_references", 2, 2)):
        others = grid_ids(references)[2]
        txt = draw(batch, len(text), width).float().double()
        ref = draw(batch, len(others), channels).float().double()
        first, second = (draw(batch, len(image), channels).float().double() for _ in range(2))
        early, late = torch.tensor([[0.8, 0.6], [0.3, 0.15]]).double()[:, :batch]
        extract = model(
            hidden_states=torch.cat([ref, first], dim=1),
            encoder_hidden_states=txt,
            timestep=early,
            img_ids=torch.cat([others, image]),
            txt_ids=text,
            kv_cache_mode="extract",
            num_ref_tokens=len(others),
        )
        cached = model(
            hidden_states=second,
            encoder_hidden_states=txt,
            timestep=late,
            img_ids=image,
            txt_ids=text,
            kv_cache_mode="cached",
            kv_cache=extract.kv_cache,
        )
        common = {"in.txt": txt, "in.ref": ref, "in.txt_ids": text, "in.img_ids": image, "in.ref_ids": others}
        file.put(f"kv.{case}", common)
        file.put(f"kv_extract.{case}", {"in.img": first, "in.sigma": early, "out.velocity": extract.sample})
        file.put(f"kv_cached.{case}", {"in.img": second, "in.sigma": late, "out.velocity": cached.sample})
        for kind in ("double", "single"):
            for i, layer in enumerate(getattr(extract.kv_cache, f"{kind}_block_caches")):
                entry = {f"{kind}_blocks.{i}.k": layer.k_ref, f"{kind}_blocks.{i}.v": layer.v_ref}
                file.put(f"kv_extract.{case}.out", entry)
    return file


def transformer():
    file = File("transformer")
    transformer_blocks(file)
    model = whole_transformer(file)
    return [file, kv_cache(model)]


# ---------------------------------------------------------------- the program


def compute():
    return autoencoder() + position_ids() + text_encoder() + sampling() + transformer()


def write():
    GOLDENS.mkdir(exist_ok=True)
    for file in compute():
        path = GOLDENS / f"{file.name}.safetensors"
        save_file(dict(file), path, metadata=file.metadata())
        print(f"{path.stat().st_size / 1000:7.0f} kB  {len(file):4d} tensors  {path.name}")


def check():
    """Stored files against a new computation. Returns the number of differences.

    On the machine that wrote the files the difference is zero. Elsewhere it need not be: the time features
    are cosines of up to 1000 radians taken in float32, so the last bit of `exp` moves them by 5e-5, and with
    them all that follows in the transformer.
    """
    bad = 0
    for file in compute():
        stored = load_file(GOLDENS / f"{file.name}.safetensors")
        other = sorted(set(stored) ^ set(file))
        worst = 0.0
        for key in set(stored) & set(file):
            a, b = stored[key].double(), file[key].double()
            if a.shape != b.shape:
                other.append(key)
            elif a.numel():
                worst = max(worst, ((a - b).abs().max() / b.abs().max().clamp(min=1e-6)).item())
        good = worst < 1e-4 and not other
        bad += not good
        print(f"{'ok ' if good else 'BAD'}  {worst:.1e}  {file.name}.safetensors", *other)
    return bad


def asked_to_check(about: str) -> bool:
    """Read the command line of a script that writes goldens, and set torch up for it."""
    parser = argparse.ArgumentParser(description=about.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare with the files")
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    return parser.parse_args().check


def main():
    start = time.time()
    bad = check() if asked_to_check(__doc__) else write()
    print(f"{time.time() - start:.1f} s")
    raise SystemExit(f"{bad} differ" if bad else 0)


if __name__ == "__main__":
    main()
