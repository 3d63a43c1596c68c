"""FLUX.2 [klein] on one page: words in, a picture out. Chapters 1 to 6 of the book build its parts."""

# ---- 1. Arrays: MLX or NumPy, and the weights of a folder
# Both libraries spell what we need alike, so we call whichever is there `xp`: MLX, or NumPy without it.
# Weights stay as the files store them, mostly in 16 bits, until a line needs one. So large models fit.
import argparse
import json
from pathlib import Path

import numpy
from PIL import Image
from tokenizers import Tokenizer

try:
    import mlx.core as xp
except ImportError:
    import numpy as xp

DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8"}  # NumPy has no bfloat16: we keep its bits


def read_safetensors(path):  # eight bytes with a length, that much JSON, then the numbers
    data = numpy.memmap(path, mode="r")
    start = 8 + int(data[:8].view("<u8")[0])
    for name, entry in json.loads(data[8:start].tobytes()).items():
        if name != "__metadata__":
            numbers = data[start:][slice(*entry["data_offsets"])]
            yield name, numbers.view(DTYPES[entry["dtype"]]).reshape(entry["shape"])


def load(folder):
    weights = {}
    for path in folder.glob("*.safetensors"):
        weights |= read_safetensors(path) if xp is numpy else xp.load(str(path))
    return weights, json.loads((folder / "config.json").read_bytes())


def under(weights, prefix):  # the weights of one block, by their short names
    return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}


def float32(x):
    bfloat16 = xp is numpy and x.dtype == numpy.uint16  # the upper half of a float32
    return (x.astype(numpy.uint32) << 16).view(numpy.float32) if bfloat16 else x.astype(xp.float32)


# ---- 2. Pieces that several networks share
# A function with weights takes x first, then the weights and the name of its own among them.
def linear(x, weights, name):
    y = x @ float32(weights[name + ".weight"]).T
    return y + float32(weights[name + ".bias"]) if name + ".bias" in weights else y


def rms_norm(x, weights, name):
    return x / xp.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6) * float32(weights[name + ".weight"])


def silu(x):
    return x * (1 + xp.tanh(x / 2)) / 2  # x · sigmoid(x), so written that no exp overflows


def heads(x, weights, norm):  # (s, nh·hd) → (s, nh, hd), each head normed
    return rms_norm(x.reshape(len(x), -1, len(weights[norm + ".weight"])), weights, norm)


def project_qkv(x, weights, matrix, norm):
    queries, keys, values = (linear(x, weights, matrix.format(letter)) for letter in "qkv")
    return heads(queries, weights, norm.format("q")), heads(keys, weights, norm.format("k")), values


def attention(queries, keys, values, mask=0.0):  # (s, nh, hd), (s, nk, hd), (s, nk·hd) → (s, nh·hd)
    share = queries.shape[1] // keys.shape[1]  # this many query heads read the same keys and values
    keys, values = (xp.repeat(y, share, axis=1) for y in (keys, values.reshape(keys.shape)))
    scores = queries.transpose(1, 0, 2) @ keys.transpose(1, 2, 0) * queries.shape[-1] ** -0.5 + mask
    weights = xp.exp(scores - scores.max(axis=-1, keepdims=True))  # (nh, s, s)
    y = weights / weights.sum(axis=-1, keepdims=True) @ values.transpose(1, 0, 2)
    return y.transpose(1, 0, 2).reshape(len(queries), -1)


# ---- 3. Positions: coordinates become rotations
# A token stands at (picture, row, column, word). Each coordinate turns its own share of a head's channels.
def token_ids(m, gh, gw):
    patches = [(0, h, w, 0) for h in range(gh) for w in range(gw)]
    return float32(xp.array([(0, 0, 0, l) for l in range(m)] + patches))  # (m + n, 4)


def rope_table(ids, axes, theta):
    speeds = [theta ** (-xp.arange(0, dim, 2, dtype=xp.float32) / dim) for dim in axes]
    angles = xp.concatenate([ids[:, i, None] * speed for i, speed in enumerate(speeds)], axis=-1)
    return xp.cos(angles), xp.sin(angles)  # (s, hd/2)


def rotate(x, rope, halves=False):  # reorders the channels of queries and keys alike, so no score changes
    a, b = xp.split(x, 2, axis=-1) if halves else (x[..., ::2], x[..., 1::2])
    cos, sin = rope[0][:, None], rope[1][:, None]
    return xp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)  # (s, nh, hd)


# ---- 4. Words to features: three layers of Qwen3
# A language model reads the prompt as a chat. We stop on the way up and keep the outputs of three layers.
TEMPLATE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def qwen_layer(x, layer, rope, mask):
    y = rms_norm(x, layer, "input_layernorm")
    queries, keys, values = project_qkv(y, layer, "self_attn.{}_proj", "self_attn.{}_norm")
    y = attention(rotate(queries, rope, halves=True), rotate(keys, rope, halves=True), values, mask)
    x = x + linear(y, layer, "self_attn.o_proj")
    y = rms_norm(x, layer, "post_attention_layernorm")
    y = silu(linear(y, layer, "mlp.gate_proj")) * linear(y, layer, "mlp.up_proj")
    return x + linear(y, layer, "mlp.down_proj")


def encode(folder, prompt):
    index = json.loads((folder / "model_index.json").read_bytes())
    m = index.get("max_sequence_length", 512)
    taps = index.get("text_encoder_out_layers", [9, 18, 27])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    tokenizer.enable_padding(length=m, pad_id=tokenizer.token_to_id("<|endoftext|>"))
    tokens = tokenizer.encode(TEMPLATE.format(prompt))
    assert len(tokens) == m, f"The prompt has {len(tokens)} tokens, and this model reads {m}."
    weights, config = load(folder / "text_encoder")
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    rope = rope_table(float32(xp.arange(m))[:, None], [config["head_dim"]], theta)
    allowed = float32(xp.tri(m) * xp.array(tokens.attention_mask))  # 1, or 0 for later tokens and padding
    states = [float32(weights["model.embed_tokens.weight"][xp.array(tokens.ids)])]  # (m, d)
    for i in range(max(taps)):
        states.append(qwen_layer(states[i], under(weights, f"model.layers.{i}."), rope, (allowed - 1) * 1e9))
    return numpy.array(xp.concatenate([states[k] for k in taps], axis=-1))  # (m, 3·d)


# ---- 5. The transformer: noisy patches, words and a time give a velocity
# Words and patches first have their own matrices, and share one attention. Then they are one sequence.
def modulation(vec, weights, name, count):  # the time alone decides how blocks shift, scale and gate
    return xp.split(linear(silu(vec), weights, name + ".linear"), count, axis=-1)


def modulate(x, shift, scale):
    x = x - x.mean(axis=-1, keepdims=True)
    return (1 + scale) * x / xp.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6) + shift


def add_mlp(x, shift, scale, gate, block, name):  # SwiGLU
    y, up = xp.split(linear(modulate(x, shift, scale), block, name + ".linear_in"), 2, axis=-1)
    return x + gate * linear(silu(y) * up, block, name + ".linear_out")


def double_block(img, txt, img_mod, txt_mod, block, rope):  # mod: shift, scale, gate, twice
    img_qkv = project_qkv(modulate(img, *img_mod[:2]), block, "attn.to_{}", "attn.norm_{}")
    txt_qkv = project_qkv(modulate(txt, *txt_mod[:2]), block, "attn.add_{}_proj", "attn.norm_added_{}")
    queries, keys, values = (xp.concatenate(both) for both in zip(txt_qkv, img_qkv))  # text first
    y = attention(rotate(queries, rope), rotate(keys, rope), values)
    img = img + img_mod[2] * linear(y[len(txt) :], block, "attn.to_out.0")
    txt = txt + txt_mod[2] * linear(y[: len(txt)], block, "attn.to_add_out")
    return add_mlp(img, *img_mod[3:], block, "ff"), add_mlp(txt, *txt_mod[3:], block, "ff_context")


def single_block(x, shift, scale, gate, block, rope):
    d = x.shape[-1]
    y = linear(modulate(x, shift, scale), block, "to_qkv_mlp_proj")
    queries, keys, values, y = xp.split(y, [d, 2 * d, 3 * d], axis=-1)
    y, up = xp.split(y, 2, axis=-1)
    queries, keys = rotate(heads(queries, block, "norm_q"), rope), rotate(heads(keys, block, "norm_k"), rope)
    y = xp.concatenate([attention(queries, keys, values), silu(y) * up], axis=-1)  # attention beside MLP
    return x + gate * linear(y, block, "to_out")


def velocity(img, txt, t, weights, config, rope):
    waves = xp.concatenate(rope_table(float32(xp.array([[1000 * t]])), [256], 10000.0), axis=-1)  # (1, 256)
    embedder = under(weights, "time_guidance_embed.timestep_embedder.")
    vec = linear(silu(linear(waves, embedder, "linear_1")), embedder, "linear_2")  # (1, d)
    img_mod = modulation(vec, weights, "double_stream_modulation_img", 6)
    txt_mod = modulation(vec, weights, "double_stream_modulation_txt", 6)
    mod = modulation(vec, weights, "single_stream_modulation", 3)
    img, txt = linear(img, weights, "x_embedder"), linear(txt, weights, "context_embedder")  # (n, d), (m, d)
    for i in range(config["num_layers"]):
        img, txt = double_block(img, txt, img_mod, txt_mod, under(weights, f"transformer_blocks.{i}."), rope)
    x = xp.concatenate([txt, img])
    for i in range(config["num_single_layers"]):
        x = single_block(x, *mod, under(weights, f"single_transformer_blocks.{i}.attn."), rope)
    scale, shift = modulation(vec, weights, "norm_out", 2)  # only here the files put the scale first
    return linear(modulate(x[len(txt) :], shift, scale), weights, "proj_out")  # (n, 128)


# ---- 6. From noise to latents: a few straight steps
# They are short near the noise, and the last one is long. `numpy.array` makes lazy MLX compute each.
def schedule(steps, n):
    long_run = 0.00016927 * n + 0.45666666
    slope = (long_run - 8.73809524e-05 * n - 1.89833333) / 190
    shift = float(numpy.exp(long_run if n > 4300 else long_run + (steps - 200) * slope))
    return [shift * t / (1 - t + shift * t) for t in numpy.linspace(1, 0, steps + 1).tolist()]


def denoise(folder, x, txt, gh, gw, steps):
    weights, config = load(folder / "transformer")
    rope = rope_table(token_ids(len(txt), gh, gw), config["axes_dims_rope"], config["rope_theta"])
    ts = schedule(steps, gh * gw)
    for t, t_next in zip(ts, ts[1:]):
        x = x + (t_next - t) * numpy.array(velocity(xp.array(x), xp.array(txt), t, weights, config, rope))
    return x  # (n, 128)


# ---- 7. The decoder: 128 numbers of a patch become 16 × 16 pixels
# A 3 × 3 convolution is nine matrices: each takes a shifted copy of the picture, and we sum the results.
def conv(x, weights, name):
    kernel = float32(weights[name + ".weight"])  # (c_out, c_in, k, k)
    h, w, k = *x.shape[:2], kernel.shape[-1]
    x = xp.pad(x, [(k // 2, k // 2), (k // 2, k // 2), (0, 0)])
    y = sum(x[i : i + h, j : j + w] @ kernel[:, :, i, j].T for i in range(k) for j in range(k))
    return y + float32(weights[name + ".bias"])


def group_norm(x, weights, name, groups):
    y = x.reshape(*x.shape[:2], groups, -1)  # (H, W, groups, channels of a group)
    y = y - y.mean(axis=(1, 3)).mean(axis=0)[:, None]
    y = y / xp.sqrt((y * y).mean(axis=(1, 3)).mean(axis=0)[:, None] + 1e-6)
    return y.reshape(x.shape) * float32(weights[name + ".weight"]) + float32(weights[name + ".bias"])


def res_block(x, block, groups):
    y = conv(silu(group_norm(x, block, "norm1", groups)), block, "conv1")
    y = conv(silu(group_norm(y, block, "norm2", groups)), block, "conv2")
    return y + (conv(x, block, "conv_shortcut") if "conv_shortcut.weight" in block else x)


def attn_block(x, block, groups):
    y = group_norm(x, block, "group_norm", groups).reshape(-1, 1, x.shape[-1])  # one head
    y = attention(linear(y, block, "to_q"), linear(y, block, "to_k"), linear(y, block, "to_v"))
    return x + linear(y, block, "to_out.0").reshape(x.shape)


def decode(folder, z, gh, gw):
    weights, config = load(folder / "vae")
    decoder, groups = under(weights, "decoder."), config["norm_num_groups"]
    z = xp.array(z) * xp.sqrt(float32(weights["bn.running_var"]) + config["batch_norm_eps"])
    z = (z + float32(weights["bn.running_mean"])).reshape(gh, gw, 32, 2, 2).transpose(0, 3, 1, 4, 2)
    x = conv(conv(z.reshape(2 * gh, 2 * gw, 32), weights, "post_quant_conv"), decoder, "conv_in")
    x = res_block(x, under(decoder, "mid_block.resnets.0."), groups)
    x = attn_block(x, under(decoder, "mid_block.attentions.0."), groups)
    x = res_block(x, under(decoder, "mid_block.resnets.1."), groups)
    for level in range(len(config["block_out_channels"])):
        if level > 0:
            x = conv(xp.repeat(xp.repeat(x, 2, 0), 2, 1), decoder, f"up_blocks.{level - 1}.upsamplers.0.conv")
        for i in range(config["layers_per_block"] + 1):
            x = res_block(x, under(decoder, f"up_blocks.{level}.resnets.{i}."), groups)
    return numpy.array(conv(silu(group_norm(x, decoder, "conv_norm_out", groups)), decoder, "conv_out"))


# ---- 8. All together
# Each part loads its weights, returns a NumPy array, and lets the weights go.
def draw(folder, prompt, seed=0, steps=4, size=None, noise=None):
    folder = Path(folder)
    g = (size or load(folder / "vae")[1]["sample_size"]) // 16
    noise = numpy.random.default_rng(seed).standard_normal((g * g, 128), "f4") if noise is None else noise
    x = denoise(folder, noise, encode(folder, prompt), g, g, steps)
    return numpy.round(255 * numpy.clip(decode(folder, x, g, g) / 2 + 0.5, 0, 1)).astype(numpy.uint8)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "kleinlite/nano/weights")
    for name, usual in {"seed": 0, "steps": 4, "size": None}.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    Image.fromarray(draw(**vars(parser.parse_args()))).save("microklein.png")
    print("Wrote microklein.png")
