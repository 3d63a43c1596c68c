"""What tests of training share: nano's parts, small and untrained, the recipe made short, and two processes."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace

import mlx.core as mx
import pytest
from waiting import HANGS

from kleinlite.autoencoder import Autoencoder, AutoencoderConfig
from kleinlite.nano.data import encode_scenes
from kleinlite.text_encoder import TextEncoder, TextEncoderConfig
from kleinlite.training import initialize
from kleinlite.transformer import Transformer, TransformerConfig
from recipe.config import STEPS, RecipeConfig
from recipe.curriculum import Curriculum
from recipe.data import train_tokenizer
from recipe.scene_lessons import make_lessons
from recipe.shapes import WORLD

GRID = (6, 6)
CONFIG = AutoencoderConfig(channels=(8, 8, 16, 16), layers=1, groups=4)


@pytest.fixture(name="world", scope="module")
def small_world():
    """Tokenizer, autoencoder, text encoder, transformer and data, small and untrained."""
    tokenizer = train_tokenizer(WORLD)
    text = TextEncoderConfig(tokenizer.get_vocab_size(), 24, 40, 4, 4, 2, 8, out_layers=(1, 2, 3), max_length=32)
    parts = Autoencoder(CONFIG), TextEncoder(text), Transformer(TransformerConfig(1, 1, 2, (4, 4, 4, 4), d_text=72))
    for i, part in enumerate(parts):
        initialize(part, mx.random.key(i))
    lessons = make_lessons(16, 100, 6)
    data = Curriculum(WORLD, lessons, encode_scenes(parts[0], lessons.scenes, 96), tokenizer, 32, batch=8)
    return tokenizer, *parts, data


SMALL = RecipeConfig(
    autoencoder=replace(CONFIG, decoder_channels=(16, 16, 32, 32)),
    text_encoder=TextEncoderConfig(2097, 24, 40, 4, 4, 2, 8, out_layers=(1, 2, 3), max_length=32),
    transformer=TransformerConfig(1, 1, 2, (4, 4, 4, 4), d_text=72), pictures=40, edits=200, families=4, batch=8,
    every=2, statistics=16, own_pictures=6, steps=dict.fromkeys(STEPS, 2),
)  # fmt: skip


@pytest.fixture
def uncompiled():
    """Compiling takes longer than all that is trained here."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def launch(folder, *command, processes=2):
    """The command in so many processes of this machine that share MLX's ring, as `mlx.launch` would start them."""
    if not mx.distributed.is_available("ring"):
        pytest.skip("MLX has no ring of processes here: it comes with its macOS and Linux wheels.")
    hosts = []
    for _ in range(processes):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            hosts.append([f"127.0.0.1:{free.getsockname()[1]}"])
    (folder / "hosts.json").write_text(json.dumps(hosts))
    ring = os.environ | {"MLX_HOSTFILE": str(folder / "hosts.json"), "OPENBLAS_NUM_THREADS": "1"}
    started = [
        subprocess.Popen([sys.executable, *map(str, command)], env=ring | {"MLX_RANK": str(rank)},
                         stderr=subprocess.PIPE, text=True)
        for rank in range(processes)
    ]  # fmt: skip
    try:
        errors = [process.communicate(timeout=HANGS)[1] for process in started]
    except subprocess.TimeoutExpired:  # one that lost its neighbor waits for ever
        for process in started:
            process.kill()
        errors = [process.communicate()[1] for process in started]
    assert [process.returncode for process in started] == [0] * processes, errors
