"""Whole modules whose weights follow a formula, so that only the answers are stored: `goldens/closed_form.json`."""

import json
import math
import os
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from golden_tools import GOLDENS, LOOSE, check, nchw, nhwc
from mlx.utils import tree_unflatten
from tokenizers import Tokenizer

from kleinlite.autoencoder import Autoencoder, AutoencoderConfig, patchify
from kleinlite.checkpoints import match
from kleinlite.models.configs import parse_config
from kleinlite.models.families.klein import AUTOENCODER_NAMES, TRANSFORMER_NAMES
from kleinlite.models.families.qwen3 import TEXT_ENCODER_NAMES
from kleinlite.position_ids import image_ids, reference_ids, rope_table, text_ids
from kleinlite.text_encoder import TextEncoder, tokenize
from kleinlite.transformer import Transformer, time_features
from recipe.saving import to_released

TABLE = json.loads((GOLDENS / "closed_form.json").read_text(encoding="utf-8"))


def fill(k: int, shape, scale: float = 1.0, off: float = 0.0) -> mx.array:
    """Value n of tensor k is off + scale · (2h/2³² - 1), h = (n·2654435761 + k·40503 + 12345) mod 2³²."""
    n = mx.arange(math.prod(shape), dtype=mx.uint32)
    factor, start = (mx.array(x % 2**32, dtype=mx.uint32) for x in (2654435761, k * 40503 + 12345))
    h = (n * factor + start).astype(mx.float32)  # uint32 wraps around, which is the mod
    return (off + scale * (h / 2**31 - 1)).reshape(shape)


def filled(module: nn.Module, rules, table: dict) -> nn.Module:
    """The module with these weights; k counts the released names in alphabetical order."""
    arrays = to_released(module, rules, mx.float32)
    assert len(arrays) == table["tensors"]
    for k, (name, w) in enumerate(sorted(arrays.items())):
        if name in ("bn.running_mean", "bn.running_var"):
            arrays[name] = fill(k, w.shape, **table["bn"][name.removeprefix("bn.")])
        elif w.ndim == 1 and "norm" in name and name.endswith("weight"):
            arrays[name] = fill(k, w.shape, 0.2, 1.0)
        else:
            arrays[name] = fill(k, w.shape, table["scale"])
    module.update(tree_unflatten(list(match(module, arrays, rules).items())))
    return module.eval()


def compare(table: dict, name: str, value: mx.array) -> None:
    """The first eight values, the sum of all, and the sum of their sizes."""
    want, tolerance = table["runs"][name], table["tolerance"]
    assert list(value.shape) == want.get("shape", list(value.shape))
    value = value.flatten()
    check(value[:8], want["first"], tolerance, absolute=True)
    check(value.sum(), want["sum"], tolerance * math.sqrt(value.size), absolute=True)
    check(mx.abs(value).sum(), want["sum_abs"], tolerance * math.sqrt(value.size), absolute=True)


# ---------------------------------------------------------------- single numbers


def test_fill():
    table = TABLE["fill"]
    check(fill(table["k"], table["shape"], table["scale"], table["off"]), table["values"], 1e-6)


def test_time_features():
    table = TABLE["time_features"]
    features = time_features(mx.array([table["time"] / 1000]), table["channels"])
    check(features[0, mx.array(table["index"])], table["values"], LOOSE, absolute=True)


def test_rope():
    table = TABLE["rope"]
    cos, sin = rope_table(mx.array([table["id"]]), tuple(table["axes"]), table["theta"])
    pairs = mx.array(table["pair"])
    check(cos[0, pairs], table["cos"], 2e-5, absolute=True)
    check(mx.abs(sin[0, pairs]), mx.sqrt(1 - cos[0, pairs] ** 2), 1e-5, absolute=True)


# ---------------------------------------------------------------- whole modules


@pytest.mark.parametrize("run", ["text_to_image", "reference"])
def test_dit(run):
    table = TABLE["dit"]
    config = table["config"] | {"timestep_guidance_channels": 256}
    model = filled(Transformer(parse_config("transformer", config)), TRANSFORMER_NAMES, table)
    img, txt, ref = (fill(x["k"], [1, *x["shape"]]) for x in map(table["inputs"].get, ("img", "txt", "ref")))
    n, ids = img.shape[1], image_ids(*table["inputs"]["img"]["grid"])
    if run == "reference":
        img = mx.concatenate([img, ref], axis=1)
        ids = mx.concatenate([ids, reference_ids([table["inputs"]["ref"]["grid"]])])
        assert ids[n:, 0].tolist() == [table["inputs"]["ref"]["t"]] * ref.shape[1]
    out = model(img, txt, table["runs"][run]["sigma"], ids, text_ids(txt.shape[1]))
    compare(table, run, out[:, :n])


def test_qwen3():
    table = TABLE["qwen3"]
    config = parse_config("text_encoder", table["config"] | {"tie_word_embeddings": True}, {})
    model = filled(TextEncoder(config), TEXT_ENCODER_NAMES, table)
    ids, mask = (mx.array([table["inputs"][x]]) for x in ("ids", "mask"))
    states = model.hidden_states(ids, mask.astype(mx.bool_), 2)
    compare(table, "hidden_states.1", states[1])
    compare(table, "hidden_states.2", states[2])
    compare(table, "hidden_states.2.row4", states[2][0, 4])  # padding: read by the transformer, so never zero


def test_vae():
    table, c = TABLE["vae"], TABLE["vae"]["config"]
    config = AutoencoderConfig(  # of two levels, which no released model has and no config.json may say
        channels=tuple(c["block_out_channels"]), layers=c["layers_per_block"], latent_channels=c["latent_channels"],
        groups=c["norm_num_groups"], bn_eps=c["batch_norm_eps"],
    )  # fmt: skip
    model = filled(Autoencoder(config), AUTOENCODER_NAMES, table)
    pixels = nhwc(fill(table["inputs"]["image"]["k"], table["inputs"]["image"]["shape"]))
    mean = model.encoder(pixels)[..., : c["latent_channels"]]
    compare(table, "mean", nchw(mean))
    normalised = model.bn.normalize(patchify(mean))
    compare(table, "normalised", nchw(normalised))
    check(model.encode(pixels), normalised)
    compare(table, "decoded", nchw(model.decode(normalised)))


# ---------------------------------------------------------------- the released tokenizer

TOKENIZER = Path(os.environ.get("KLEINLITE_QWEN_TOKENIZER", "not set"))
released = pytest.mark.skipif(
    not TOKENIZER.is_file(),
    reason="needs Qwen3's tokenizer: set KLEINLITE_QWEN_TOKENIZER to the tokenizer.json of a released model",
)


@released
@pytest.mark.parametrize("row", TABLE["tokens"]["prompts"], ids=lambda row: row["prompt"][:12])
def test_token_ids(row):
    length, pad, ids = TABLE["tokens"]["length"], TABLE["tokens"]["pad"], row["ids"]
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    if len(ids) == length:  # diffusers cuts the end off, chat template included; we would rather say so
        with pytest.raises(ValueError, match=f"this model reads {length}"):
            tokenize(tokenizer, [row["prompt"]], length)
        return
    got, mask = tokenize(tokenizer, [row["prompt"]], length)
    assert got.tolist() == [ids + [pad] * (length - len(ids))]
    assert mask.tolist() == [[i < row["n"] for i in range(length)]]
