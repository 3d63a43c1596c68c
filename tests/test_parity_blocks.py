"""Every block against what diffusers and transformers compute: the files in `goldens/`.

The name of a test begins with the module it tests, and so names the chapter."""

from functools import cache

import mlx.core as mx
import mlx.nn as nn
import pytest
from golden_tools import LOOSE, TIGHT, Golden, check, fill, nchw, nhwc

from kleinlite import (
    autoencoder as ae,
    position_ids as pos,
    sampling,
    text_encoder as te,
    transformer as dit,
)
from kleinlite.models import configs

cases = pytest.mark.parametrize("case", ["ordinary", "small"])  # inputs of size 1 and of 0.01
golden = cache(Golden)


# ---------------------------------------------------------------- 01 autoencoder


def run(block: nn.Module, g: Golden, name: str, case: str) -> None:
    """A block that takes a picture and gives one."""
    block = fill(block, g.under(f"{name}.weight"))
    values = g.under(f"{name}.{case}")
    check(nchw(block(nhwc(values["in.x"]))), values["out.x"])


@cases
@pytest.mark.parametrize("name", ["res_block", "res_block_shortcut"])
def test_autoencoder_res_block(name, case):
    g = golden("autoencoder")
    c = g.config[name]
    run(ae.ResBlock(c["in_channels"], c["out_channels"], c["groups"]), g, name, case)


@cases
def test_autoencoder_mid_attention(case):
    g = golden("autoencoder")
    c = g.config["mid_attention"]
    run(ae.AttnBlock(c["channels"], c["groups"]), g, "mid_attention", case)


@cases
def test_autoencoder_downsample(case):
    run(ae.Downsample(6), golden("autoencoder"), "downsample", case)


@cases
def test_autoencoder_upsample(case):
    run(ae.Upsample(6), golden("autoencoder"), "upsample", case)


@cache
def autoencoder(name: str) -> ae.Autoencoder:
    """The whole autoencoder; the file of the small decoder holds only the weights that differ."""
    weights = golden("autoencoder").under("autoencoder.weight") | golden(name).under("autoencoder.weight")
    return fill(ae.Autoencoder(configs.parse_config("autoencoder", golden(name).config["autoencoder"])), weights)


@cases
def test_autoencoder_encode(case):
    values = golden("autoencoder").under(f"encode.{case}")
    model, pixels = autoencoder("autoencoder"), nhwc(values["in.image"])
    mean, _ = mx.split(model.encoder(pixels), 2, axis=-1)
    check(nchw(mean), values["out.mean"])
    check(nchw(model.encode(pixels)), values["out.normalised"])


@cases
def test_autoencoder_pack_and_normalise(case):
    values = golden("autoencoder").under(f"patchify.{case}")
    latent = nhwc(values["in.latent"])
    packed = ae.patchify(latent)
    check(nchw(packed), values["out.packed"], tolerance=0)
    check(ae.unpatchify(packed), latent, tolerance=0)
    bn = autoencoder("autoencoder").bn
    normalised = bn.normalize(packed)
    check(nchw(normalised), values["out.normalised"])
    check(normalised.reshape(1, -1, packed.shape[-1]), values["out.tokens"])  # row by row
    check(bn.denormalize(normalised), packed)


@cases
def test_autoencoder_decode(case):
    values = golden("autoencoder").under(f"decode.{case}")
    model, latents = autoencoder("autoencoder"), nhwc(values["in.normalised"])
    check(nchw(ae.unpatchify(model.bn.denormalize(latents))), values["out.latent"])
    check(nchw(model.decode(latents)), values["out.image"])


@cases
def test_autoencoder_small_decoder(case):
    values = golden("small_decoder").under(f"decode.{case}")
    image = autoencoder("small_decoder").decode(nhwc(values["in.normalised"]))
    check(nchw(image), values["out.image"])


# ---------------------------------------------------------------- 02 position ids

ROPE = 4e-5  # angles of up to 511 radians in float32; the reference takes them in float64


def test_position_ids():
    values, c = golden("position_ids").under("ids.ordinary"), golden("position_ids").config["ids"]
    assert pos.text_ids(c["text"]).tolist() == values["out.text"].tolist()
    assert pos.image_ids(*c["grid"]).tolist() == values["out.image"].tolist()
    assert pos.reference_ids(c["references"]).tolist() == values["out.reference"].tolist()


@pytest.mark.parametrize("name", ["axes4", "axes32"])
def test_position_ids_rope(name):
    g = golden("position_ids")
    values, c = g.under(f"rope.{name}"), g.config[f"rope.{name}"]
    rope = pos.rope_table(values["in.ids"], tuple(c["axes"]), c["theta"])
    for got, want in zip(rope, ("cos", "sin")):
        check(got, values[f"out.{want}"], ROPE)
    for x in "qk":
        turned = pos.apply_rope(values[f"in.{x}"].swapaxes(1, 2), rope).swapaxes(1, 2)
        check(turned, values[f"out.{x}"], ROPE)


# ---------------------------------------------------------------- 03 text encoder


@cache
def text_config() -> te.TextEncoderConfig:
    c = golden("text_encoder").config["qwen3"]
    return configs.parse_config("text_encoder", c, {"text_encoder_out_layers": c["feature_layers"]})


@cache
def text_encoder() -> te.TextEncoder:
    return fill(te.TextEncoder(text_config()), golden("text_encoder").under("qwen3.weight.model"))


@cases
def test_text_encoder_rms_norm(case):
    g = golden("text_encoder")
    values, norm = g.under(f"rms_norm.{case}"), fill(te.RMSNorm(20, 1e-6), g.under("rms_norm.weight"))
    check(norm(values["in.x"]), values["out.x"])


@cases
def test_text_encoder_layer(case):
    g = golden("text_encoder")
    values, layer = g.under(f"decoder_layer.{case}"), fill(te.Layer(text_config()), g.under("decoder_layer.weight"))
    mask = te.attention_mask(values["in.mask"].astype(mx.bool_))
    check(layer(values["in.x"], mask), values["out.x"])


def text_run():
    values = golden("text_encoder").under("qwen3.ordinary")
    return values, values["in.ids"], values["in.mask"].astype(mx.bool_)


@pytest.mark.parametrize("k", range(6))
def test_text_encoder_hidden_state(k):
    values, ids, mask = text_run()
    states = text_encoder().hidden_states(ids, mask, k)
    assert len(states) == k + 1
    last = text_encoder().norm(states[k]) if k == 5 else states[k]  # the reference's last one is normed
    check(last, values["out.hidden_states"][k])


def test_text_encoder_features():
    values, ids, mask = text_run()
    check(text_encoder()(ids, mask), values["out.features"])


def test_text_encoder_logits():
    values, ids, mask = text_run()
    check(te.next_token_logits(text_encoder(), ids, mask), values["out.logits"])


# ---------------------------------------------------------------- 04 sampling

TABLE = golden("sampling").under("schedule.table")


@pytest.mark.parametrize("row", range(TABLE["out.mu"].size))
def test_sampling_schedule(row):
    n, steps, mu = (TABLE[name][row].item() for name in ("in.tokens", "in.steps", "out.mu"))
    assert abs(sampling.empirical_mu(n, steps) - mu) < 1e-6
    sigmas = golden("sampling")[f"schedule.{n}x{steps}.out.sigmas"]
    check(mx.array(sampling.schedule(steps, n)), sigmas, 1e-6, absolute=True)


@pytest.mark.parametrize("case", ["straight", "curved"])
def test_sampling_euler(case):
    values = golden("sampling").under(f"euler.{case}")
    other, x = values["in.other"], values["in.noise"]
    field = {"straight": lambda x, t, *_: (x - other) / t, "curved": lambda x, t, *_: t * x + other}[case]
    steps = list(sampling.euler(field, x, values["in.sigmas"].tolist()))
    check(mx.stack([x, *(step.latents for step in steps)]), values["out.trajectory"])
    check(mx.stack([step.velocity for step in steps]), values["in.velocity"])
    assert [step.index for step in steps] == list(range(5))
    assert [step.t for step in steps] == values["in.sigmas"].tolist()[:-1]
    assert [step.t_next for step in steps] == values["in.sigmas"].tolist()[1:]


# ---------------------------------------------------------------- 05 transformer


def test_transformer_time_features():
    values = golden("transformer").under("time_embedding.ordinary")
    check(dit.time_features(values["in.sigma"]), values["out.features"], LOOSE, absolute=True)


def test_transformer_time_embedding():
    g = golden("transformer")
    values, c = g.under("time_embedding.ordinary"), g.config["time_embedding"]
    embed = fill(dit.TimeEmbedding(c["channels"], c["dim"]), g.under("time_embedding.weight"))
    check(embed(values["out.features"]), values["out.temb"])
    check(embed(dit.time_features(values["in.sigma"])), values["out.temb"], LOOSE)


@cases
@pytest.mark.parametrize("name, count", [("modulation_double", 2), ("modulation_single", 1)])
def test_transformer_modulation(name, count, case):
    g = golden("transformer")
    values, layer = g.under(f"{name}.{case}"), fill(dit.Modulation(20, count), g.under(f"{name}.weight"))
    vectors = [vector for mod in layer(values["in.temb"]) for vector in mod]
    assert [v.shape for v in vectors] == [(2, 1, 20)] * 3 * count
    check(mx.concatenate(vectors, axis=-1)[:, 0], values["out.mod"])


@cases
def test_transformer_swiglu(case):
    values = golden("transformer").under(f"swiglu.{case}")
    check(dit.SwiGLU()(values["in.x"]), values["out.x"])


@cases
def test_transformer_feed_forward(case):
    g = golden("transformer")
    values, layers = g.under(f"feed_forward.{case}"), nn.Module()
    layers.all = dit.mlp(20, 60)
    fill(layers, {f"all.{name}": w for name, w in g.under("feed_forward.weight").items()})
    check(dit.sequential(layers.all, values["in.x"]), values["out.x"])


@cases
def test_transformer_qk_norm(case):
    g = golden("transformer")
    values, norm = g.under(f"qk_norm.{case}"), fill(dit.HeadRMSNorm(16), g.under("qk_norm.weight.query_norm"))
    check(norm(values["in.x"]), values["out.x"])
    both = dit.QKNorm(16)
    both.query_norm, both.key_norm = dit.HeadRMSNorm(16), norm
    q, k = both(values["in.x"], values["in.x"])
    check(k, values["out.x"])
    check(q, k / norm.scale)  # queries have weights of their own, here all 1


def block_inputs(g: Golden, name: str):
    c = g.config[name]
    cfg = dit.TransformerConfig(heads=c["num_attention_heads"], axes=tuple(c["axes"]), mlp_ratio=c["mlp_ratio"])
    assert cfg.d == c["dim"]

    def rope(ids):
        return pos.rope_table(ids, cfg.axes, c["theta"])

    return cfg, rope


@cases
def test_transformer_double_block(case):
    g = golden("transformer")
    values, (cfg, rope) = g.under(f"double_block.{case}"), block_inputs(g, "double_block")
    block = fill(dit.DoubleBlock(cfg), g.under("double_block.weight"))
    vectors = [mx.split(values[f"in.mod_{x}"][:, None], 6, axis=-1) for x in ("img", "txt")]
    mods = [[dit.Mod(*six[:3]), dit.Mod(*six[3:])] for six in vectors]
    img, txt = block(values["in.img"], values["in.txt"], *mods, rope(values["in.ids"]))
    check(img, values["out.img"])
    check(txt, values["out.txt"])


@cases
def test_transformer_single_block(case):
    g = golden("transformer")
    values, (cfg, rope) = g.under(f"single_block.{case}"), block_inputs(g, "single_block")
    block = fill(dit.SingleBlock(cfg), g.under("single_block.weight"))
    mod = dit.Mod(*mx.split(values["in.mod"][:, None], 3, axis=-1))
    check(block(values["in.x"], mod, rope(values["in.ids"])), values["out.x"])


@cases
def test_transformer_final_layer(case):
    g = golden("transformer")
    cfg = dit.TransformerConfig(heads=1, axes=(8, 4, 4, 4), d_latent=9)
    values, layer = g.under(f"final_layer.{case}"), fill(dit.FinalLayer(cfg), g.under("final_layer.weight"))
    check(layer(values["in.x"], values["in.temb"]), values["out.x"])


@cache
def transformer() -> dit.Transformer:
    g = golden("transformer")
    config = g.config["model"] | {"timestep_guidance_channels": 256}
    return fill(dit.Transformer(configs.parse_config("transformer", config)), g.under("model.weight"))


@pytest.mark.parametrize("i", range(5))
def test_transformer_block_by_block(i):
    """Block by block inside the model, each from the reference's own input: two double blocks, three single ones."""
    values, model = golden("transformer").under("model.ordinary"), transformer()
    rope, vec = model.rope(values["in.img_ids"], values["in.txt_ids"]), values["mid.temb"]
    if i < 2:
        img, txt = model.img_in(values["in.img"]), model.txt_in(values["in.txt"])
        if i:
            img, txt = values["mid.double_blocks.0.img"], values["mid.double_blocks.0.txt"]
        mods = model.double_stream_modulation_img(vec), model.double_stream_modulation_txt(vec)
        img, txt = model.double_blocks[i](img, txt, *mods, rope)
        check(img, values[f"mid.double_blocks.{i}.img"])
        check(txt, values[f"mid.double_blocks.{i}.txt"])
    else:
        before = [values[f"mid.double_blocks.1.{x}"] for x in ("txt", "img")]
        x = mx.concatenate(before, axis=1) if i == 2 else values[f"mid.single_blocks.{i - 3}"]
        out = model.single_blocks[i - 2](x, *model.single_stream_modulation(vec), rope)
        check(out, values[f"mid.single_blocks.{i - 2}"])


@pytest.mark.parametrize("case", ["ordinary", "small", "reference", "two_references", "batch"])
def test_transformer(case):
    values, model = golden("transformer").under(f"model.{case}"), transformer()
    img, ids = values["in.img"], values["in.img_ids"]
    if "in.ref" in values:
        img = mx.concatenate([img, values["in.ref"]], axis=1)
        ids = mx.concatenate([ids, values["in.ref_ids"]])
    t, n = values["in.sigma"], values["in.img"].shape[1]
    out = model(img, values["in.txt"], t, ids, values["in.txt_ids"])
    check(out[:, :n], values["out.velocity"], LOOSE)
    if t.size == 1:  # a number for the time, and the table in place of the ids, are the same thing
        again = model(img, values["in.txt"], t.item(), rope=model.rope(ids, values["in.txt_ids"]))
        check(again, out, TIGHT)
