"""Decoding in tiles."""

import mlx.core as mx

from kleinlite.autoencoder import Autoencoder, AutoencoderConfig
from kleinlite.drawing.tiles import decode_in_tiles


def test_tiles():
    mx.random.seed(3)
    autoencoder, latents = Autoencoder(AutoencoderConfig.tiny()).eval(), mx.random.normal((2, 7, 11, 128))
    whole = autoencoder.decode(latents)
    assert mx.allclose(decode_in_tiles(autoencoder, latents, tile=11), whole, atol=1e-5)
    tiled = decode_in_tiles(autoencoder, latents, tile=4, overlap=2)
    assert tiled.shape == whole.shape == (2, 112, 176, 3)
    assert 1e-4 < mx.abs(tiled - whole).mean().item() / mx.abs(whole).mean().item() < 1


def test_tiles_fade_without_a_seam():
    """With a decoder that has no norms, every tile says the same of a pixel: nothing may change."""

    class Repeat:
        def decode(self, latents):
            return mx.repeat(mx.repeat(latents[..., :3], 16, axis=1), 16, axis=2)

    latents = mx.random.normal((1, 9, 6, 128), key=mx.random.key(1))
    assert mx.allclose(decode_in_tiles(Repeat(), latents, tile=4, overlap=1), Repeat().decode(latents), atol=1e-5)
