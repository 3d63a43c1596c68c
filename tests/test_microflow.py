"""microflow: its derivatives are MLX's, its pictures can be named, and a first minute of it is enough for shapes."""

import re
import struct
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

import microflow
from kleinlite.book import world
from microflow import SENTENCES, Array

ROOT = Path(__file__).parents[1]
RNG = np.random.default_rng(7)


def numbers(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


OPERATIONS = {
    "add": (lambda a, b: a + b, lambda a, b: a + b, [(2, 3, 4), (3, 4)]),
    "add, repeated": (lambda a, b: a + b, lambda a, b: a + b, [(2, 3, 4), (2, 1, 4)]),
    "multiply": (lambda a, b: a * b, lambda a, b: a * b, [(2, 3, 4), (4,)]),
    "matmul": (lambda a, b: a @ b, lambda a, b: a @ b, [(2, 3, 4), (4, 5)]),
    "matmul of stacks": (lambda a, b: a @ b, lambda a, b: a @ b, [(2, 2, 3, 4), (2, 2, 4, 5)]),
    "reshape": (lambda a: a.reshape(6, 4), lambda a: a.reshape(6, 4), [(2, 3, 4)]),
    "swap": (lambda a: a.swap(0, 2), lambda a: a.swapaxes(0, 2), [(2, 3, 4)]),
    "rows taken twice": (lambda a: a[np.array([1, 1, 0])], lambda a: a[mx.array([1, 1, 0])], [(2, 3)]),
    "all but the first": (lambda a: a[:, 1:], lambda a: a[:, 1:], [(2, 3, 4)]),
    "softmax": (lambda a: a.softmax(), lambda a: mx.softmax(a, axis=-1), [(2, 3, 4)]),
    "norm": (lambda a: a.norm(), lambda a: mx.fast.layer_norm(a, None, None, 1e-5), [(2, 3, 4)]),
    "silu": (lambda a: a.silu(), lambda a: a * mx.sigmoid(a), [(2, 3, 4)]),
    "join": (microflow.join, lambda a, b: mx.concatenate([a, b], axis=1), [(2, 1, 4), (2, 3, 4)]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_derivative_is_mlxs(name):
    ours, theirs, shapes = OPERATIONS[name]
    values = [numbers(*shape) for shape in shapes]
    arrays = [Array(value) for value in values]
    result = ours(*arrays)
    weights = numbers(*result.value.shape)
    microflow.backward((result * Array(weights)).mean())
    gradient = mx.grad(lambda a: (theirs(*a) * mx.array(weights)).mean())
    expected = gradient([mx.array(value) for value in values])
    assert np.abs(np.array(theirs(*map(mx.array, values))) - result.value).max() < 1e-5
    for array, g in zip(arrays, expected):
        assert np.abs(np.array(g) - array.gradient).max() < 1e-5 * max(1, np.abs(np.array(g)).max())


def guess_in_mlx(w, x, labels, t):
    """The same network once more, by MLX's own layers."""

    def norm(y):
        return mx.fast.layer_norm(y, None, None, 1e-5)

    waves = t[:, None] * mx.exp(mx.linspace(0, np.log(100), 16))
    when = mx.concatenate([mx.cos(waves), mx.sin(waves)], axis=1) @ w["time"]
    patches = x @ w["into"] + w["places"] + when[:, None]
    tokens = mx.concatenate([w["words"][labels][:, None], patches], axis=1)
    for i in range(microflow.BLOCKS):
        q, k, v = (
            (norm(tokens) @ w[f"{name}{i}"]).reshape(len(x), 37, microflow.HEADS, -1).transpose(0, 2, 1, 3)
            for name in ("query", "key", "value")
        )
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5)
        tokens = tokens + y.transpose(0, 2, 1, 3).reshape(len(x), 37, -1) @ w[f"mix{i}"]
        up = norm(tokens) @ w[f"up{i}"]
        tokens = tokens + (up * mx.sigmoid(up)) @ w[f"down{i}"]
    return norm(tokens[:, 1:]) @ w["out"]


def test_the_gradient_of_the_whole_network_is_mlxs():
    rng = np.random.default_rng(1)
    w = microflow.new_weights(rng)
    for name in ("places", "out"):  # zero at first, and with them most gradients
        w[name].value = 0.1 * numbers(*w[name].value.shape)
    clean, noise = numbers(2, 36, 48), numbers(2, 36, 48)
    labels = np.array([3, 3])
    t = np.array([0.2, 0.9], np.float32)
    loss = microflow.loss_of(w, clean, labels, noise, t)
    microflow.backward(loss)

    def loss_in_mlx(weights):
        mixed = (1 - t[:, None, None]) * clean + t[:, None, None] * noise
        guess = guess_in_mlx(weights, mx.array(mixed), mx.array(labels), mx.array(t))
        return ((guess - mx.array(clean)) ** 2).mean()

    expected, gradients = mx.value_and_grad(loss_in_mlx)({name: mx.array(a.value) for name, a in w.items()})
    assert abs(expected.item() - loss.value) < 1e-5 * expected.item()
    for name, g in gradients.items():
        g = np.array(g)
        assert np.abs(g - w[name].gradient).max() < 1e-5 * max(1, np.abs(g).max() * 10), name


def test_its_drawings_are_what_their_sentences_say():
    rng = np.random.default_rng(2)
    exam = world.make_exam(size=24)
    single = exam.sentences[:16]
    assert sorted(single) == sorted(SENTENCES)
    drawn = [mx.array(microflow.draw(sentence, rng)) for sentence in single]
    assert world.count_right(drawn, exam.scenes[:16]) == (16, 16)
    patches = microflow.to_patches(np.stack(drawn))
    assert np.array_equal(microflow.to_pictures(patches), np.stack(drawn))


def test_what_it_saves_is_a_png(tmp_path):
    pixels = RNG.integers(0, 256, (5, 7, 3)).astype(np.uint8)
    microflow.save(tmp_path / "a.png", pixels)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "a.png")), pixels)
    assert struct.unpack(">II", (tmp_path / "a.png").read_bytes()[16:24]) == (7, 5)


def test_an_unknown_sentence_is_told_what_it_knows(tmp_path):
    command = [sys.executable, str(ROOT / "microflow.py"), "a red house"]
    end = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert end.returncode and "a red circle" in end.stderr and "not 'a red house'" in end.stderr
    assert not any(tmp_path.iterdir())


def test_it_stays_one_page_on_numpy_alone():
    text = (ROOT / "microflow.py").read_text("utf-8")
    assert sum(bool(line.strip()) for line in text.splitlines()) <= 150
    assert set(re.findall(r"^(?:import|from) (\w+)", text, re.M)) == {"struct", "sys", "zlib", "numpy"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_after_its_training_it_draws_what_is_asked(seed):
    """Chapter 0's exam: at least 15 of the 16 single shapes, in kind and in color."""
    rng = np.random.default_rng(seed)
    weights = microflow.new_weights(rng)
    microflow.train(weights, rng)
    exam = world.make_exam(size=24)
    pictures = microflow.walk(weights, exam.sentences[:16], rng)
    kinds, colors = world.count_right(list(mx.array(pictures) / 127.5 - 1), exam.scenes[:16])
    assert kinds >= 15 and colors >= 15
