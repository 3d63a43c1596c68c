"""What tests of training share: nano's parts, small and untrained, the recipe made short, and two processes."""

import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from kleinlite.autoencoder import Autoencoder, AutoencoderConfig
from kleinlite.nano import recipe
from kleinlite.nano.data import FlowData, encode_training_set, measure_latents, train_tokenizer
from kleinlite.text_encoder import TextEncoder, TextEncoderConfig
from kleinlite.training import initialize, training_step
from kleinlite.transformer import Transformer, TransformerConfig

GRID = (6, 6)
CONFIG = AutoencoderConfig(channels=(8, 8, 16, 16), layers=1, groups=4)
FINISHED = replace(CONFIG, decoder_channels=(16, 16, 32, 32))


@pytest.fixture(name="world", scope="module")
def small_world():
    """Tokenizer, autoencoder, text encoder, transformer and data, small and untrained."""
    tokenizer = train_tokenizer()
    text = TextEncoderConfig(tokenizer.get_vocab_size(), 24, 40, 4, 4, 2, 8, taps=(1, 2, 3), tokens=32)
    parts = Autoencoder(CONFIG), TextEncoder(text), Transformer(TransformerConfig(1, 1, 2, (4, 4, 4, 4), d_text=72))
    for i, part in enumerate(parts):
        initialize(part, mx.random.key(i))
    data = FlowData(encode_training_set(parts[0], 96, 16, 300, 6), tokenizer, 32, batch=8)
    return tokenizer, *parts, data


@pytest.fixture(name="small")
def small_recipe(monkeypatch):
    """The recipe with few scenes and narrow networks; saves and reports every second step."""
    monkeypatch.setattr(recipe, "AUTOENCODER", CONFIG)
    monkeypatch.setattr(recipe, "FINISHED", FINISHED)
    monkeypatch.setattr(recipe, "TRANSFORMER", TransformerConfig(1, 1, 2, (4, 4, 4, 4), d_text=72))
    text = lambda tokenizer: TextEncoderConfig(
        tokenizer.get_vocab_size(), 24, 40, 4, 4, 2, 8, taps=(1, 2, 3), tokens=32
    )
    monkeypatch.setattr(recipe, "text_config", text)
    monkeypatch.setattr(recipe, "SCENES", 40)
    monkeypatch.setattr(recipe, "EDITS", 200)
    monkeypatch.setattr(recipe, "FAMILIES", 4)
    monkeypatch.setattr(recipe, "ROWS", 6)
    monkeypatch.setattr(recipe, "ONES", 6)
    monkeypatch.setattr(recipe, "STEPS", dict.fromkeys(recipe.STEPS, 2))
    monkeypatch.setattr(recipe, "measure_latents", lambda model, size: measure_latents(model, size, 16))
    monkeypatch.setattr(recipe.train_with_progress, "__defaults__", (2, training_step))


def launch(*command, processes=2):
    """The command under MLX's launcher, on this machine."""
    launcher = Path(sys.executable).with_name("mlx.launch")
    if not mx.distributed.is_available("ring") or not launcher.exists():
        pytest.skip("MLX has no ring of processes here: `mlx.launch` comes with its macOS and Linux wheels.")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ring = [str(launcher), "--backend", "ring", "-n", str(processes), "-p", str(port), "--python", sys.executable]
    ring += ["--env", "OPENBLAS_NUM_THREADS=1", "--"]
    return subprocess.run([*ring, *map(str, command)], capture_output=True, text=True, timeout=300)
