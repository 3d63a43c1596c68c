"""Products in bfloat16 by oneDNN: right, in their places, and only where nothing is traced."""

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from agreement import close, linux, normal
from mlx.utils import tree_flatten
from packings import WISH, difference
from peak_memory import peak_memory

from kleinlite import Klein, cpu
from kleinlite.cpu import bfloat16, layers
from kleinlite.errors import FileError
from kleinlite.models.formats import load_weights
from kleinlite.position_ids import image_ids, text_ids
from kleinlite.quantization import QUANT_SPECS, UNQUANTIZED, QuantizedLinear, QuantizedMatrix, quantize_matrix
from kleinlite.training import initialize
from kleinlite.transformer import Transformer, TransformerConfig


@pytest.fixture
def library():
    """Where the processor multiplies bfloat16, by Linux's own list, oneDNN has to be here: `make setup` installs it."""
    kinds = "avx512_bf16", "amx_bf16"
    if not cpu.FAST or not any(kind in Path("/proc/cpuinfo").read_text() for kind in kinds):
        pytest.skip("this processor does not multiply bfloat16")
    found = bfloat16.find_library()
    assert found, 'no oneDNN: pip install -e ".[test]"'
    return found


def rounded(x: mx.array) -> mx.array:
    return x.astype(mx.bfloat16).astype(mx.float32)


def exact(x: mx.array, w: mx.array) -> mx.array:
    """x @ w.T of the rounded factors, in float64; as float32."""
    with mx.stream(mx.cpu):
        return (rounded(x).astype(mx.float64) @ rounded(w).astype(mx.float64).T).astype(mx.float32)


# ---------------------------------------------------------------- products


@pytest.mark.parametrize("d_in, d_out", [(3, 5), (1, 1), (300, 7), (64, 128), (129, 333)])
@pytest.mark.parametrize("before", [(), (1,), (7,), (2, 33), (3, 1, 65)])
def test_a_product_is_that_of_the_rounded_factors(before, d_in, d_out, library):
    x = normal(*before, d_in, seed=1)
    w = normal(d_out, d_in, seed=2)
    assert close(library.product(x, w.astype(mx.bfloat16)), exact(x, w))


def test_factors_may_be_parts_of_others_or_turned(library):
    x = normal(40, 96, seed=1)
    w = normal(96, 80, seed=2).astype(mx.bfloat16)
    mx.eval(x, w)
    assert close(library.product(x, w.T), exact(x, w.T))
    assert close(library.product(x[3:30:3, 16:80], w[:, 8:72]), exact(x[3:30:3, 16:80], w[:, 8:72]))
    assert close(
        library.product(mx.broadcast_to(x[:1, :80], (9, 80)), w), exact(mx.broadcast_to(x[:1, :80], (9, 80)), w)
    )


def test_the_same_shapes_again_give_other_products(library):
    """What was prepared for a shape is used again, for other memory."""
    for seed in range(3):
        x = normal(8, 64, seed=seed)
        w = normal(16, 64, seed=seed + 9).astype(mx.bfloat16)
        assert close(library.product(x, w), exact(x, w))


@pytest.mark.parametrize("b, s", [(1, 20), (2, 37)])
@pytest.mark.parametrize("rows", [1, 8, 1000])
def test_attention_strip_by_strip(b, s, rows, library, monkeypatch):
    """Against float32: scores and weights are rounded to 8 bits, so that weights differ by 1 in 100 or so."""
    monkeypatch.setattr(bfloat16, "SCORES", rows * 4 * s)
    q, k, v = (normal(b, 3, s, 16, seed=seed) for seed in range(3))
    theirs = mx.fast.scaled_dot_product_attention(rounded(q), rounded(k), rounded(v), scale=0.25)
    mine = library.attention(q, k, v)
    assert mine.shape == (b, s, 48)
    assert close(mine, theirs.swapaxes(1, 2).flatten(2), tolerance=0.012)
    turned = (x.swapaxes(1, 2).swapaxes(1, 2) for x in (q, k, mx.contiguous(v.swapaxes(2, 3)).swapaxes(2, 3)))
    assert close(library.attention(*turned), mine)


def test_attention_holds_a_few_rows_of_scores(library, monkeypatch):
    monkeypatch.setattr(bfloat16, "SCORES", 4 * 8 * 512)
    q = normal(1, 2, 512, 8)
    mx.eval(q)
    mx.clear_cache()
    with peak_memory() as peak:
        mx.eval(library.attention(q, q, q))
    assert peak.bytes < 512 * 512


# ---------------------------------------------------------------- layers


def bfloat16_layer(d_in: int, d_out: int, bias: bool = False) -> QuantizedLinear:
    w = normal(d_out, d_in, seed=5).astype(mx.bfloat16)
    return QuantizedLinear(QuantizedMatrix({"weight": w}, UNQUANTIZED), normal(d_out, seed=6) if bias else None)


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_rounds_what_comes_in_and_nothing_else(bias, library):
    layer = bfloat16_layer(96, 40, bias)
    x = normal(2, 5, 96)
    plain = layer(rounded(x))
    cpu.speed_up(layer)
    assert type(layer) is layers.Bfloat16Linear and layer.weight.dtype == mx.bfloat16
    assert close(layer(x), plain)
    assert not close(layer(x), bfloat16_layer(96, 40, bias)(x), tolerance=1e-4)  # it does round
    cpu.speed_up(layer, bfloat16=False)
    assert type(layer) is layers.Bfloat16Linear  # a second call changes nothing
    assert layer.product(x.astype(mx.float16)).dtype == mx.float16


def test_only_matrices_in_bfloat16(library):
    half = QuantizedLinear(QuantizedMatrix({"weight": normal(8, 64).astype(mx.float16)}, UNQUANTIZED))
    packed = QuantizedLinear(quantize_matrix(normal(8, 64).astype(mx.bfloat16), QUANT_SPECS[4]))
    for layer in (half, packed):
        cpu.speed_up(layer)
        assert type(layer) is layers.FastQuantizedLinear


@linux
@pytest.mark.parametrize("reason", ["asked for float32", "no library"])
def test_otherwise_everything_stays_as_it_is(reason, monkeypatch):
    if reason == "no library":
        monkeypatch.setattr(layers, "find_library", lambda: None)
    net = tiny_transformer()
    cpu.speed_up(net, bfloat16=reason == "no library")
    assert type(net.img_in) is layers.FastQuantizedLinear and net.attention is layers.roped_attention
    x = normal(3, 128)
    assert close(net.img_in(x), x @ net.img_in.weight.astype(mx.float32).T)


def test_no_copy_of_the_weights(library):
    d = 1024
    layer = bfloat16_layer(d, d)
    cpu.speed_up(layer)
    x = normal(4, d)
    mx.eval(layer.parameters(), x)
    mx.clear_cache()
    with peak_memory() as peak:
        mx.eval(layer(x))
    assert peak.bytes < d * d


def test_a_function_that_is_traced_gets_the_layer_as_it_was(library):
    layer = bfloat16_layer(96, 40)
    cpu.speed_up(layer)
    plain = bfloat16_layer(96, 40)
    x = normal(7, 96)

    def loss(layer):
        return lambda x: layer(x).square().sum()

    for _ in range(2):  # and what is traced does not spoil what follows, nor the other way round
        assert close(mx.compile(layer)(x), plain(x))
        assert close(mx.compile(mx.grad(loss(layer)))(x), mx.grad(loss(plain))(x))
        value, gradient = mx.value_and_grad(loss(layer))(x)
        assert close(value, loss(plain)(x)) and close(gradient, mx.grad(loss(plain))(x))
        assert close(mx.vmap(layer)(x), plain(x))
        assert close(layer(x), plain(rounded(x)))


def tiny_transformer() -> Transformer:
    net = Transformer(TransformerConfig.tiny())
    initialize(net, mx.random.key(1))
    weights = {name: w.astype(mx.bfloat16) for name, w in tree_flatten(net.parameters())}
    load_weights(net, weights, mx.float32, keep_narrow=True)
    mx.eval(net.parameters())
    return net


def test_a_transformer(library):
    net = tiny_transformer()
    inputs = normal(2, 12, 128), normal(2, 5, 72), 0.5, image_ids(3, 4), text_ids(5)
    plain = net(*inputs)
    cpu.speed_up(net, bfloat16=False)
    assert close(net(*inputs), plain, tolerance=1e-5)
    cpu.speed_up(net)
    assert net.attention is layers.rounded_attention and type(net.img_in) is layers.Bfloat16Linear
    fast = net(*inputs)
    assert close(fast, plain, tolerance=0.02) and not close(fast, plain, tolerance=1e-4)
    arrays = [mx.array(x) for x in inputs[:3]]
    assert close(mx.compile(lambda *arrays: net(*arrays, *inputs[3:]))(*arrays), plain, tolerance=1e-5)
    calls = []

    def own(q, k, v, rope):
        calls.append(q.shape)
        return layers.roped_attention(q, k, v, rope)

    net(*inputs, attention_fn=own)
    assert len(calls) == 3


def test_pictures_of_nano(library):
    """In diffusers float32 and bfloat16 differ by 0.48 levels of 255 (means over six pictures), here by 0.34."""
    klein = Klein.from_pretrained()
    plain = klein(**WISH)
    for network in (klein.transformer, klein.text_encoder):
        weights = {name: w.astype(mx.bfloat16) for name, w in tree_flatten(network.parameters())}
        load_weights(network, weights, mx.float32, keep_narrow=True)
        cpu.speed_up(network)
        assert any(type(layer) is layers.Bfloat16Linear for layer in network.modules())
    assert 0 < difference(klein(**WISH), plain) < 0.48


# ---------------------------------------------------------------- found, and tried


def test_its_name(library):
    assert cpu.bfloat16_name() == "oneDNN"


def test_a_refusal_is_a_sentence(library):
    with pytest.raises(FileError, match="oneDNN refuses engine_create"):
        library.make("engine", "engine_create", 99, 0)


def test_what_is_made_is_destroyed(library, monkeypatch):
    """After a refusal, too, and the next product is right."""
    called = []
    call = bfloat16.Library.call
    monkeypatch.setattr(
        bfloat16.Library, "call", lambda self, name, *args: (called.append(name), call(self, name, *args))
    )
    x = normal(3, 8)
    a = bfloat16.rounded(x)
    with pytest.raises(FileError, match="oneDNN refuses matmul"):
        library.run("matmul", a, a, mx.zeros((3, 3)))  # 8 columns and 3 rows
    assert close(library.product(x, x), exact(x, x))
    made = [name for name in called if "_create" in name]
    assert len(made) == 15 and len([name for name in called if name.endswith("_destroy")]) == 14  # but what was refused


def test_without_the_library(monkeypatch):
    monkeypatch.setattr(bfloat16.ctypes, "CDLL", lambda path: (_ for _ in ()).throw(OSError(path)))
    assert bfloat16.find_library.__wrapped__() is None


@pytest.mark.parametrize("setting", ["KLEINLITE_CPU=off", "ONEDNN_MAX_CPU_ISA=AVX512_CORE"])
def test_switched_off_or_on_another_processor(setting, library):
    """oneDNN can be told to do as if the processor were an older one."""
    name, _, value = setting.partition("=")
    code = "from kleinlite import cpu; print(cpu.bfloat16_name())"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, name: value}, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("None\n", "")


# ---------------------------------------------------------------- in a loaded model


def make_large(monkeypatch) -> None:
    """nano's parts count as large: their weights stay as they are in the files."""
    monkeypatch.setattr("kleinlite.models.files.SMALL_PART_BYTES", 0)


def test_a_large_model_names_its_product(monkeypatch):
    """Unless float32 was asked for, or its weights are packed."""
    monkeypatch.setattr("kleinlite.inference.loaded_model.bfloat16_name", lambda: "oneDNN, x")
    assert Klein.from_pretrained().info.product is None  # small
    make_large(monkeypatch)
    assert Klein.from_pretrained().info.product == "oneDNN, x"
    for how in ({"dtype": "float32"}, {"dtype": mx.float32}, {"quantize": 8}):
        assert Klein.from_pretrained(**how).info.product is None
    assert Klein.from_pretrained().info == Klein.from_pretrained(dtype="float32").info


@pytest.mark.parametrize("dtype, asked", [(None, True), ("float32", False), (mx.float32, False)])
def test_float32_is_what_was_asked_for(monkeypatch, dtype, asked):
    make_large(monkeypatch)
    heard = []
    monkeypatch.setattr("kleinlite.inference.parts.speed_up", lambda part, bfloat16: heard.append(bfloat16))
    Klein.from_pretrained(dtype=dtype).parts.load("transformer")
    assert heard == [asked]


def test_a_dtype_may_be_a_word():
    assert Klein.from_pretrained(dtype="bfloat16")._model.checkpoint.dtype == mx.bfloat16
    for word in ("bf16", "exp"):
        with pytest.raises(ValueError, match=r"dtype must be mx\.float32, mx\.bfloat16 or mx\.float16, not"):
            Klein.from_pretrained(dtype=word)
