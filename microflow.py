"""A text-to-image model that trains on one page, on NumPy alone: `python microflow.py "a red circle" "a blue star"`.

It learns for a minute or two, then draws microflow.png. This is chapter 0 of the book without a framework."""

import struct
import sys
import zlib

import numpy as np

# ---- 1. A world: one shape in one color on paper, 24 × 24 pixels, and a sentence that says which
# Points are complex numbers. A shape is an outline: how far it reaches from its middle, in each direction.
COLORS = {"red": (214, 48, 49), "yellow": (250, 211, 60), "green": (60, 160, 82), "blue": (58, 96, 214)}


def ring(radii):  # corners around the middle, from the top on, each at its own distance
    return -1j * radii * np.exp(2j * np.pi * np.arange(len(radii)) / len(radii))


SQUARE = [-0.86 - 0.86j, 0.86 - 0.86j, 0.86 + 0.86j, -0.86 + 0.86j]
STAR = ring(np.tile([1.1, 0.46], 5))
SHAPES = {"circle": ring(np.ones(40)), "square": SQUARE, "triangle": [-1j, 1 + 0.8j, -1 + 0.8j], "star": STAR}
SENTENCES = [f"a {color} {kind}" for color in COLORS for kind in SHAPES]


def draw(sentence, rng):  # four times too fine, then shrunk, so that edges are smooth
    _, color, kind = sentence.split()
    corners = 0.3 * rng.uniform(0.94, 1.06) * np.array(SHAPES[kind])
    edge = np.concatenate([corners + s * (np.roll(corners, -1) - corners) for s in np.linspace(0, 1, 20)])
    rows, columns = (np.mgrid[0:96, 0:96] + 0.5) / 96 - 0.5 - rng.uniform(-0.025, 0.025, (2, 1, 1))
    points = columns + 1j * rows
    inside = abs(points) < np.interp(np.angle(points), np.angle(edge), abs(edge), period=2 * np.pi)
    fine = np.where(inside[..., None], COLORS[color], (243, 242, 238)) / 127.5 - 1  # numbers from -1 to 1
    return fine.reshape(24, 4, 24, 4, 3).mean(axis=(1, 3))


def to_patches(pictures):  # (b, 24, 24, 3) → (b, 36, 48): squares of 4 × 4 pixels, row by row
    return pictures.reshape(-1, 6, 4, 6, 4, 3).transpose(0, 1, 3, 2, 4, 5).reshape(-1, 36, 48)


def to_pictures(patches):
    return patches.reshape(-1, 6, 6, 4, 4, 3).transpose(0, 1, 3, 2, 4, 5).reshape(-1, 24, 24, 3)


# ---- 2. Derivatives: an array that remembers what it was made of
# Each result keeps its parents and, for each, how the loss's gradient passes from the result to it.
tape = []  # all results, in the order in which they were made


class Array:
    gradient = first = second = 0.0  # the last two are Adam's

    def __init__(self, value, parents=()):
        self.value = np.asarray(value, np.float32)
        self.parents = parents
        tape.append(self)

    def __add__(self, other):
        return Array(self.value + other.value, [(self, lambda g: g), (other, lambda g: g)])

    def __mul__(self, other):
        return Array(self.value * other.value, [(self, lambda g: g * other.value), (other, lambda g: g * self.value)])

    def __matmul__(self, other):
        a, b = self.value, other.value
        return Array(a @ b, [(self, lambda g: g @ b.swapaxes(-1, -2)), (other, lambda g: a.swapaxes(-1, -2) @ g)])

    def reshape(self, *shape):
        return Array(self.value.reshape(shape), [(self, lambda g: g.reshape(self.value.shape))])

    def swap(self, i, j):
        return Array(self.value.swapaxes(i, j), [(self, lambda g: g.swapaxes(i, j))])

    def __getitem__(self, rows):
        def back(g):
            spread = np.zeros_like(self.value)
            np.add.at(spread, rows, g)  # a row that was taken twice gets both
            return spread

        return Array(self.value[rows], [(self, back)])

    def softmax(self):
        e = np.exp(self.value - self.value.max(axis=-1, keepdims=True))
        y = e / e.sum(axis=-1, keepdims=True)
        return Array(y, [(self, lambda g: y * (g - (g * y).sum(axis=-1, keepdims=True)))])

    def norm(self):  # mean 0 and variance 1 over the last axis
        centered = self.value - self.value.mean(axis=-1, keepdims=True)
        scale = 1 / np.sqrt((centered**2).mean(axis=-1, keepdims=True) + 1e-5)
        y = centered * scale

        def back(g):
            return scale * (g - g.mean(axis=-1, keepdims=True) - y * (g * y).mean(axis=-1, keepdims=True))

        return Array(y, [(self, back)])

    def silu(self):
        s = (1 + np.tanh(self.value / 2)) / 2  # the sigmoid
        return Array(self.value * s, [(self, lambda g: g * s * (1 + self.value * (1 - s)))])

    def mean(self):
        return Array(self.value.mean(), [(self, lambda g: np.full_like(self.value, g / self.value.size))])


def join(a, b):  # along the axis of tokens
    n = a.value.shape[1]
    return Array(np.concatenate([a.value, b.value], axis=1), [(a, lambda g: g[:, :n]), (b, lambda g: g[:, n:])])


def backward(loss):  # the tape, backwards: each array after all that was made of it
    loss.gradient = np.ones_like(loss.value)
    while tape:
        array = tape.pop()
        for parent, back in array.parents:
            g = back(array.gradient)
            g = g.sum(axis=tuple(range(g.ndim - parent.value.ndim)))
            repeated = tuple(i for i, n in enumerate(parent.value.shape) if n == 1 < g.shape[i])
            parent.gradient = parent.gradient + g.sum(axis=repeated, keepdims=True)  # NumPy's copies add up


# ---- 3. The network: noisy patches, a label and a time in, its guess of the picture out
WIDTH, HEADS, BLOCKS = 96, 3, 3


def new_weights(rng):
    sizes = {"words": (16, WIDTH), "time": (32, WIDTH), "into": (48, WIDTH), "places": (36, WIDTH), "out": (WIDTH, 48)}
    for i in range(BLOCKS):
        sizes |= {f"{name}{i}": (WIDTH, WIDTH) for name in ("query", "key", "value", "mix")}
        sizes |= {f"up{i}": (WIDTH, 4 * WIDTH), f"down{i}": (4 * WIDTH, WIDTH)}
    gains = {"places": 0, "out": 0, "mix": 0.3, "down": 0.3}  # what adds to the tokens begins small
    drawn = {name: rng.standard_normal(size) / np.sqrt(size[0]) for name, size in sizes.items()}
    return {name: Array(gains.get(name.rstrip("012"), 1) * numbers) for name, numbers in drawn.items()}


def attention(x, w, i):
    def heads(name):
        return (x @ w[f"{name}{i}"]).reshape(-1, 37, HEADS, WIDTH // HEADS).swap(1, 2)

    scores = heads("query") @ heads("key").swap(2, 3) * Array((WIDTH / HEADS) ** -0.5)
    return (scores.softmax() @ heads("value")).swap(1, 2).reshape(-1, 37, WIDTH) @ w[f"mix{i}"]


def guess(w, x, labels, t):  # (b, 36, 48), (b,), (b,) → (b, 36, 48)
    waves = t[:, None] * np.exp(np.linspace(0, np.log(100), 16))
    when = Array(np.concatenate([np.cos(waves), np.sin(waves)], axis=1)) @ w["time"]
    patches = Array(x) @ w["into"] + w["places"] + when.reshape(-1, 1, WIDTH)
    tokens = join(w["words"][labels].reshape(-1, 1, WIDTH), patches)
    for i in range(BLOCKS):
        tokens = tokens + attention(tokens.norm(), w, i)
        tokens = tokens + (tokens.norm() @ w[f"up{i}"]).silu() @ w[f"down{i}"]
    return tokens[:, 1:].norm() @ w["out"]


# ---- 4. Learning: guess the picture in a mixture of picture and noise
def loss_of(w, clean, labels, noise, t):
    mixed = (1 - t[:, None, None]) * clean + t[:, None, None] * noise
    miss = guess(w, mixed, labels, t) + Array(-clean)
    return (miss * miss).mean()


def train(w, rng, steps=800, rate=2e-3):
    said = np.arange(512) % len(SENTENCES)
    seen = to_patches(np.stack([draw(SENTENCES[label], rng) for label in said]))
    for step in range(1, steps + 1):
        rows = rng.integers(len(seen), size=32)
        loss = loss_of(w, seen[rows], said[rows], rng.standard_normal((32, 36, 48)), rng.uniform(size=32))
        backward(loss)
        now = rate * min(1, step / 50) * (1 + np.cos(np.pi * step / steps)) / 2
        for a in w.values():  # Adam: each number by its mean gradient, over the size that it usually has
            a.first = a.first + 0.1 * (a.gradient - a.first)
            a.second = a.second + 0.001 * (a.gradient**2 - a.second)
            a.value -= now * a.first / (1 - 0.9**step) / (np.sqrt(a.second / (1 - 0.999**step)) + 1e-8)
            a.gradient = 0.0
        if step % 50 == 0:
            print(f"step {step} of {steps}: loss {loss.value:.3f}", flush=True)


# ---- 5. Drawing: a walk from noise to the guess, a part of the way at a time; then the pixels as a PNG
def walk(w, sentences, rng, steps=10):
    labels = np.array([SENTENCES.index(sentence) for sentence in sentences])
    x = rng.standard_normal((len(labels), 36, 48))
    for i in range(steps, 0, -1):
        x = x + (guess(w, x, labels, np.full(len(labels), i / steps)).value - x) / i  # at last all of it
        tape.clear()  # nothing is to be learned here
    return np.clip((to_pictures(x) + 1) * 127.5, 0, 255).round().astype(np.uint8)


def save(path, pixels):  # (H, W, 3)
    header = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 8, 2, 0, 0, 0)
    rows = zlib.compress(b"".join(b"\0" + row.tobytes() for row in pixels))
    with open(path, "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        for name, data in ((b"IHDR", header), (b"IDAT", rows), (b"IEND", b"")):
            file.write(struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)))


def main(sentences):
    if unknown := [sentence for sentence in sentences if sentence not in SENTENCES]:
        sys.exit(f"It knows {', '.join(SENTENCES)}; not {unknown[0]!r}.")
    rng = np.random.default_rng(0)
    train(weights := new_weights(rng), rng)
    pictures = walk(weights, sentences or SENTENCES, rng)
    save("microflow.png", np.concatenate(pictures, axis=1).repeat(4, axis=0).repeat(4, axis=1))


if __name__ == "__main__":
    main(sys.argv[1:])
