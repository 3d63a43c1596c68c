"""Properties of the transformer; numbers against diffusers stand in test_parity_blocks."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from golden_tools import check

from kleinlite.position_ids import image_ids, reference_ids, text_ids
from kleinlite.training import initialize
from kleinlite.transformer import Modulation, Transformer, TransformerConfig, split_heads, time_features

CONFIG = TransformerConfig.tiny()
GH, GW, M = 2, 3, 5


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


@pytest.fixture(scope="module")
def model() -> Transformer:
    net = Transformer(CONFIG)
    initialize(net, mx.random.key(0))
    return net.eval()


def inputs(b: int = 1):
    return normal(b, GH * GW, 128), normal(b, M, CONFIG.d_text, seed=1), image_ids(GH, GW), text_ids(M)


def test_batch_is_single_runs(model):
    img, txt, img_ids, txt_ids = inputs(3)
    t = mx.array([0.9, 0.5, 0.1])  # each picture may have its own noise level
    alone = [model(img[i : i + 1], txt[i : i + 1], t[i : i + 1], img_ids, txt_ids) for i in range(3)]
    check(model(img, txt, t, img_ids, txt_ids), mx.concatenate(alone))
    same = model(img, txt, 0.5, img_ids, txt_ids)
    check(same, model(img, txt, mx.full((3,), 0.5), img_ids, txt_ids))


def test_only_ids_tell_where_a_token_is(model):
    """Tokens in another order give the same velocities in that order; the same ids for all would not."""
    img, txt, img_ids, txt_ids = inputs()
    out = model(img, txt, 0.7, img_ids, txt_ids)
    order, words = mx.array([3, 1, 5, 0, 2, 4]), mx.array([4, 2, 0, 3, 1])
    check(model(img[:, order], txt[:, words], 0.7, img_ids[order], txt_ids[words]), out[:, order])
    assert mx.abs(model(img[:, order], txt, 0.7, img_ids, txt_ids) - out[:, order]).max().item() > 1e-3


def test_every_input_matters(model):
    img, txt, img_ids, txt_ids = inputs()
    out = model(img, txt, 0.7, img_ids, txt_ids)
    last = mx.concatenate([txt[:, :-1], txt[:, -1:] + 1], axis=1)  # also the last text token: there is no mask
    ref, ref_ids = normal(1, 4, 128, seed=2), reference_ids([(2, 2)])

    def with_ref(ids):
        return model(mx.concatenate([img, ref], 1), txt, 0.7, mx.concatenate([img_ids, ids]), txt_ids)

    others = [
        model(img, last, 0.7, img_ids, txt_ids),
        model(img, txt, 0.6, img_ids, txt_ids),
        model(img, txt, 0.7, image_ids(GW, GH), txt_ids),
        with_ref(ref_ids)[:, : GH * GW],
    ]
    assert all(mx.abs(other - out).max().item() > 1e-4 for other in others)
    second = ref_ids + mx.array([10, 0, 0, 0])  # a first reference is not a second one
    assert mx.abs(with_ref(second) - with_ref(ref_ids)).max().item() > 1e-6


def test_time_features():
    """Cosines first; the slowest wave makes no full turn, the fastest about 160; nothing is rounded on the way."""
    f = time_features(mx.array([0.0, 0.5, 1.0]))
    assert f.shape == (3, 256)
    check(f[0], [1.0] * 128 + [0.0] * 128, 0)
    check(f[:, 0], [1, -0.88384927, 0.56237908], 1e-4)  # cos of 0, 500, 1000
    check(f[:, 128], [0, -0.46777181, 0.82687954], 1e-4)
    a, b = time_features(mx.array([0.96738])), time_features(mx.array([0.96800]))  # equal in bfloat16
    assert mx.abs(a - b).max().item() > 0.5


def test_a_fresh_network_begins_at_zero():
    """adaLN-Zero: all blocks are closed, so neither words nor places matter yet."""
    img, txt, img_ids, txt_ids = inputs(2)
    mods = Modulation(8, 2)(normal(3, 8))
    assert [v.shape for mod in mods for v in mod] == 6 * [(3, 1, 8)]
    assert all(mx.abs(v).max().item() == 0 for mod in mods for v in mod)
    net = Transformer(CONFIG)
    fresh = net(img, txt, 0.7, img_ids, txt_ids)
    check(fresh, net(img, -txt, 0.7, image_ids(GW, GH), txt_ids), 0)


def test_modulation_order():
    """Shift, scale, gate of the first part, then of the second."""
    modulation = Modulation(2, 2)
    modulation.lin.weight = mx.arange(24.0).reshape(12, 2)
    first, second = modulation(mx.array([[0.0, 1.0]]))
    rows = mx.arange(12).reshape(6, 2) * 2 + 1  # what the second input is multiplied by
    for vector, row in zip((*first, *second), rows):
        check(vector[0, 0], row * nn.silu(mx.array(1.0)))


def test_split_heads():
    """All queries come first, then all keys, then all values; each head's channels lie together."""
    heads, head_dim = 2, 3
    x = mx.arange(3 * heads * head_dim).reshape(1, 1, -1)
    q, k, v = split_heads(x, 3, heads)
    assert q[0, :, 0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert k[0, :, 0].tolist() == [[6, 7, 8], [9, 10, 11]] and v[0, 0, 0].tolist() == [12, 13, 14]


def test_bfloat16(model):
    img, txt, img_ids, txt_ids = inputs()
    half = Transformer(CONFIG)
    half.update(model.parameters())
    half.set_dtype(mx.bfloat16)
    out = half(img.astype(mx.bfloat16), txt.astype(mx.bfloat16), 0.7, img_ids, txt_ids)
    assert out.dtype == mx.bfloat16
    check(out, model(img, txt, 0.7, img_ids, txt_ids), 0.03)
