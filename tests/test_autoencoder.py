"""Properties of the autoencoder; numbers against diffusers stand in test_parity_blocks."""

import mlx.core as mx
import pytest
from golden_tools import check
from mlx.utils import tree_flatten

from kleinlite.autoencoder import Autoencoder, AutoencoderConfig, Downsample, GroupNorm, Upsample, patchify, unpatchify


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


@pytest.fixture(scope="module")
def model() -> Autoencoder:
    mx.random.seed(0)
    return Autoencoder(AutoencoderConfig.tiny()).eval()


@pytest.mark.parametrize("shape", [(1, 2, 2, 3), (2, 6, 4, 5), (1, 4, 10, 32)])
def test_pack_and_unpack(shape):
    z = normal(*shape)
    b, h, w, c = shape
    packed = patchify(z)
    assert packed.shape == (b, h // 2, w // 2, 4 * c)
    check(unpatchify(packed), z, 0)
    i, j, ch, row, column = h // 2 - 1, 0, c - 1, 1, 0
    assert packed[0, i, j, ch * 4 + row * 2 + column].item() == z[0, 2 * i + row, 2 * j + column, ch].item()


@pytest.mark.parametrize("h, w", [(16, 16), (32, 48), (64, 16)])
def test_shapes(model, h, w):
    latents = model.encode(normal(2, h, w, 3))
    assert latents.shape == (2, h // 16, w // 16, 128)
    assert model.decode(latents).shape == (2, h, w, 3)


def test_each_picture_of_a_batch_is_its_own(model):
    pixels = normal(3, 32, 16, 3)
    latents = model.encode(pixels)
    check(latents, mx.concatenate([model.encode(p[None]) for p in pixels]))
    check(model.decode(latents), mx.concatenate([model.decode(z[None]) for z in latents]))


def test_latent_norm(model):
    bn = Autoencoder(AutoencoderConfig.tiny()).bn
    bn.running_mean, bn.running_var = normal(128), normal(128, seed=1) ** 2
    z = bn.running_mean + mx.sqrt(bn.running_var) * normal(1, 100, 100, 128, seed=2)
    check(bn.denormalize(bn.normalize(z)), z)
    wide = bn.running_var > 0.1  # where the epsilon of 1e-4 is nothing
    spread = mx.sqrt(bn.normalize(z).reshape(-1, 128).var(axis=0))
    assert mx.where(wide, mx.abs(spread - 1), 0).max().item() < 0.05
    assert not tree_flatten(bn.trainable_parameters())  # measured, not learned


def test_down_and_up():
    """Zeros come in on the right and at the bottom only; each pixel is repeated before the convolution."""
    down, up = Downsample(1), Upsample(1)
    down.conv.weight, down.conv.bias = mx.zeros((1, 3, 3, 1)), mx.zeros((1,))
    down.conv.weight[0, 2, 2, 0] = 1  # looks at the lower right corner of its window
    x = mx.arange(1, 17).astype(mx.float32).reshape(1, 4, 4, 1)
    assert down(x)[0, :, :, 0].tolist() == [[11, 0], [0, 0]]
    up.conv.weight, up.conv.bias = mx.zeros((1, 3, 3, 1)), mx.zeros((1,))
    up.conv.weight[0, 1, 1, 0] = 1
    assert up(x[:, :1, :2])[0, :, :, 0].tolist() == [[1, 1, 2, 2], [1, 1, 2, 2]]


def test_group_norm_of_a_large_picture():
    """A group of a real picture has millions of values: their mean and variance must not lose digits."""
    x = normal(1, 256, 256, 8) + 0.5
    with mx.stream(mx.cpu):
        z = x.astype(mx.float64).reshape(-1, 2, 4)
        mean, var = z.mean(axis=(0, 2), keepdims=True), z.var(axis=(0, 2), keepdims=True)
        exact = ((z - mean) / mx.sqrt(var + 1e-6)).reshape(x.shape).astype(mx.float32)
    check(GroupNorm(8, 2)(x), exact)
