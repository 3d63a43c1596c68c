"""The autoencoder in strips gives the numbers of the whole, in little memory."""

import mlx.core as mx
import pytest
from golden_tools import check
from peak_memory import peak_memory

from kleinlite.autoencoder import Autoencoder, AutoencoderConfig
from kleinlite.inference import strips
from kleinlite.inference.strips import use_strips


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def pair(cfg: AutoencoderConfig) -> tuple[Autoencoder, Autoencoder]:
    """The same weights twice: as the chapter has it, and in strips."""
    whole = Autoencoder(cfg)
    in_strips = Autoencoder(cfg)
    in_strips.update(whole.parameters())
    use_strips(in_strips)
    return whole, in_strips


def close(a: mx.array, b: mx.array) -> bool:
    assert a.shape == b.shape
    return mx.abs(a - b).max().item() <= 1e-5 * max(1.0, mx.abs(b).max().item())


@pytest.mark.parametrize("strip_bytes", [1, 6000, 60_000, 2**30])
@pytest.mark.parametrize("b, h, w", [(1, 10, 6), (2, 7, 5), (1, 1, 3)])
def test_decoder(b, h, w, strip_bytes, monkeypatch):
    monkeypatch.setattr(strips, "SMALL_BYTES", 0)
    monkeypatch.setattr(strips, "STRIP_BYTES", strip_bytes)
    monkeypatch.setattr(strips, "SCORES_BYTES", strip_bytes)
    whole, in_strips = pair(AutoencoderConfig.tiny())
    z = normal(b, h, w, 32)
    assert close(in_strips.decoder(z), whole.decoder(z))


@pytest.mark.parametrize("strip_bytes", [1, 6000, 60_000, 2**30])
@pytest.mark.parametrize("b, h, w", [(1, 80, 48), (2, 57, 43), (1, 9, 24)])
def test_encoder(b, h, w, strip_bytes, monkeypatch):
    monkeypatch.setattr(strips, "SMALL_BYTES", 0)
    monkeypatch.setattr(strips, "STRIP_BYTES", strip_bytes)
    monkeypatch.setattr(strips, "SCORES_BYTES", strip_bytes)
    whole, in_strips = pair(AutoencoderConfig.tiny())
    x = normal(b, h, w, 3)
    assert close(in_strips.encoder(x), whole.encoder(x))


def test_with_the_small_decoder():
    whole, in_strips = pair(AutoencoderConfig((16, 32, 64, 64), (24, 48, 96, 96), groups=8))
    latents = normal(1, 4, 3, 128)
    check(in_strips.decode(latents), whole.decode(latents))


def test_a_row_too_few_is_seen(monkeypatch):
    """The checks above notice strips without their neighbors' rows."""
    monkeypatch.setattr(strips, "SMALL_BYTES", 0)
    monkeypatch.setattr(strips, "STRIP_BYTES", 6000)
    monkeypatch.setattr(strips, "windows", lambda x, c: ((x[:, i : i + 2], 0, 0) for i in range(0, x.shape[1], 2)))
    whole, in_strips = pair(AutoencoderConfig.tiny())
    z = normal(1, 10, 6, 32)
    assert not close(in_strips.decoder(z), whole.decoder(z))


def test_twice_changes_nothing():
    _, net = pair(AutoencoderConfig.tiny())
    kinds = type(net.encoder), type(net.decoder)
    use_strips(net)
    assert (type(net.encoder), type(net.decoder)) == kinds


@pytest.mark.parametrize("decode", [True, False])
def test_four_pictures_in_memory(decode, monkeypatch):
    """The widest block reads one of twice the finest channels, and makes two; the rest are strips."""
    monkeypatch.setattr(strips, "SMALL_BYTES", 0)
    monkeypatch.setattr(strips, "STRIP_BYTES", 2**18)
    _, net = pair(AutoencoderConfig((16, 32, 32, 32), groups=8))
    latents = normal(1, 32, 32, 128)
    pixels = normal(1, 512, 512, 3)
    mx.eval(net.parameters(), latents, pixels)
    with peak_memory() as peak:
        mx.eval(net.decode(latents) if decode else net.encode(pixels))
    assert peak.bytes < 4 * (4 * 512 * 512 * 16) + 12 * 2**20
