"""The bench: random models in the released layout, and the ledger of a picture."""

import math
import re
from pathlib import Path

import mlx.core as mx
import pytest
from test_names import text_encoder_shapes, transformer_shapes

from benchmarks import picture
from kleinlite.autoencoder import AutoencoderConfig
from kleinlite.models.configs import RELEASED_CONFIGS
from kleinlite.text_encoder import TextEncoder, TextEncoderConfig
from kleinlite.transformer import Transformer, TransformerConfig

SMALL = TransformerConfig(double_blocks=1, single_blocks=2, heads=2, axes=(16,) * 4, d_text=3 * 64)
SMALL_TEXT = TextEncoderConfig(
    vocab=2100, d=64, d_mlp=96, layers=4, heads=4, kv_heads=2, head_dim=16, out_layers=(1, 2, 3), max_length=32
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "random"
    picture.write_model(folder, SMALL, SMALL_TEXT, AutoencoderConfig(channels=(32, 32, 64, 64)))
    return folder


@pytest.mark.parametrize("size, text", [("4b", "4b"), ("9b", "8b")])
def test_a_random_model_has_the_released_names_shapes_and_type(size, text):
    cfg, text_cfg, _ = RELEASED_CONFIGS[size]
    for module, rules, expected in (
        (Transformer(cfg), picture.TRANSFORMER_NAMES, transformer_shapes(size, "folder")),
        (TextEncoder(text_cfg), picture.TEXT_ENCODER_NAMES, text_encoder_shapes(text)),
    ):
        found = picture.make_random_weights(picture.to_released(module, rules, mx.bfloat16))
        assert {name: w.shape for name, w in found.items()} == expected
        assert {w.dtype for w in found.values()} == {mx.bfloat16}


def test_random_weights_keep_sizes():
    given = {"a.weight": mx.zeros((300, 200)), "a.bias": mx.zeros((300,)), "n.weight": mx.zeros((7,))}
    found = picture.make_random_weights(given)
    assert {k: w.shape for k, w in found.items()} == {k: w.shape for k, w in given.items()}
    assert abs(math.sqrt(200) * mx.sqrt((found["a.weight"].astype(mx.float32) ** 2).mean()).item() - 1) < 0.05
    assert found["a.bias"].tolist() == [0] * 300 and found["n.weight"].tolist() == [1] * 7


@pytest.mark.parametrize("more", [[], ["--quantize", "8"]])
def test_the_ledger(model, capsys, more):
    picture.main([str(model), "--size", "64", "--steps", "2", *more])
    out = capsys.readouterr().out
    assert ("quantize=8" if more else "as stored") in out and "64 × 64" in out
    stages = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("| ")]
    assert stages == ["stage", "prompt", "load", "step 1", "step 2", "decode", "whole run"]
    numbers = re.findall(r"(\d+\.\d+) \((\d+\.\d+|–)\)", out)
    assert len(numbers) == 5 * 4 + 1


@pytest.mark.slow
def test_the_whole_bench(tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(RELEASED_CONFIGS, "4b", (SMALL, SMALL_TEXT, AutoencoderConfig.tiny()))
    picture.main(["--full", "--keep", str(tmp_path / "kept"), "--size", "32", "--steps", "1"])
    out = capfd.readouterr().out
    assert out.count("whole run") == 3 and (tmp_path / "kept" / "model_index.json").exists()
    assert re.findall(r"kept, (.*?), 32", out) == ["as stored", "quantize=8", "quantize=4"]
