"""A widened network answers as the narrow one did, and its copies of a channel are free to differ."""

from dataclasses import replace

import mlx.core as mx
from mlx.utils import tree_flatten
from small_nano import GRID, small_world  # noqa: F401, a fixture

from kleinlite.autoencoder import Autoencoder, AutoencoderConfig
from kleinlite.nano.widen import wide_config, widen, widen_decoder
from kleinlite.position_ids import image_ids, text_ids
from kleinlite.training import initialize


def test_a_transformer_twice_as_wide_answers_the_same(world):
    *_, transformer, _ = world
    c = transformer._cfg
    wide = widen(transformer, mx.random.key(1))
    assert wide._cfg == wide_config(c) and wide._cfg.d == 2 * c.d
    img = mx.random.normal((2, GRID[0] * GRID[1], 128), key=mx.random.key(2))
    txt = mx.random.normal((2, 9, c.d_text), key=mx.random.key(3))
    rest = mx.array([0.3, 0.9]), image_ids(*GRID), text_ids(9)
    want, got = transformer(img, txt, *rest), wide(img, txt, *rest)
    error = mx.abs(got - want).max().item()  # the epsilon of a norm weighs a little more beside silent channels
    assert error < 2e-3 * mx.abs(want).max().item()


def test_a_wider_decoder_answers_the_same_and_reads_the_same_latents():
    cfg = AutoencoderConfig(channels=(4, 8, 16, 12), layers=1, groups=4)
    old = Autoencoder(cfg)
    initialize(old, mx.random.key(0))
    wide = widen_decoder(old, replace(cfg, decoder_channels=(16, 8, 32, 12)), mx.random.key(1))
    x = mx.random.uniform(-1, 1, (1, 32, 32, 3), key=mx.random.key(2))
    z = old.encode(x)
    assert mx.array_equal(wide.encode(x), z), "the encoder is not touched"
    want = old.decode(z)
    assert mx.abs(want).max().item() > 0.1 and mx.allclose(wide.decode(z), want, rtol=1e-4, atol=1e-5)
    weights = dict(tree_flatten(wide.decoder.parameters()))
    out = weights["conv_out.weight"]  # (3, 3, 3, 16): four copies of each of four channels
    assert out.shape[-1] == 16 and not mx.allclose(out[..., 0], out[..., 1]), "copies that are read alike stay alike"
