"""Fewer bits per weight: the formulas, the layers, memory, and quantised copies of models."""

import json

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from kleinlite import Klein
from kleinlite.bench import quantization
from kleinlite.checkpoints import open_checkpoint
from kleinlite.models import export
from kleinlite.pipeline import to_pixels
from kleinlite.quantisation import (
    PACKINGS,
    STORED,
    Packed,
    PackedEmbedding,
    PackedLinear,
    Packing,
    fill,
    join,
    multiply,
    multiply_on_cpu,
    pack_matrix,
    packing,
    quantise,
    to_words,
)

WISH = {"prompt": "a red circle above a blue square", "seed": 7, "progress": False}
ALL = {**PACKINGS, 2: Packing("affine", 2, 64)}
# Relative error of a normal matrix: what a right implementation has, and a wrong code or scale at once exceeds.
ERROR = {2: 0.45, 3: 0.21, 4: 0.1, 5: 0.05, 6: 0.025, 8: 0.008, "mxfp4": 0.13, "mxfp8": 0.03, "nvfp4": 0.1}
CPU = pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="what is measured here is the CPU's way")


def matrix(*shape: int, seed: int = 0, scale: float = 0.02) -> mx.array:
    return scale * mx.random.normal(shape, key=mx.random.key(seed))


def error(a: mx.array, b: mx.array) -> float:
    return mx.sqrt(((a - b) ** 2).mean() / (b**2).mean()).item()


def difference(a, b) -> float:
    return mx.abs(to_pixels(a) - to_pixels(b)).mean().item() * 127.5


# ---------------------------------------------------------------- formulas


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("scale", [0.02, 3.0])
def test_how_much_is_lost(name, scale):
    w = matrix(96, 256, scale=scale)
    packed = pack_matrix(w, ALL[name])
    assert packed.shape == w.shape
    assert ERROR[name] / 2 < error(packed.decode(), w) < ERROR[name]
    assert packed.decode(mx.bfloat16).dtype == mx.bfloat16
    half = pack_matrix(w.astype(mx.bfloat16), ALL[name])
    stored = sum(t.nbytes for k, t in half.tensors.items() if k != "global_scale")
    assert stored * 8 == ALL[name].bits_per_weight * w.size


def test_affine_groups_by_their_formula():
    """Every weight is within half a step of its code's value, and zero is exact."""
    w = mx.concatenate([matrix(8, 64), mx.zeros((8, 64)), mx.full((8, 64), 0.5)], axis=1)
    for bits in (2, 3, 4, 5, 6, 8):
        groups = w.reshape(8, 3, 64)
        step = (groups.max(axis=-1) - groups.min(axis=-1)) / (2**bits - 1)
        off = mx.abs(pack_matrix(w, Packing("affine", bits, 64)).decode() - w).reshape(8, 3, 64)
        # One step may become up to 1/2 code wider so that zero is a mark.
        assert mx.all(off.max(axis=-1) <= 0.5 * step * (1 + 1 / (2**bits - 2)) + 1e-3 * (bits == 2) + 2e-3).item()
        assert off[:, 1].max().item() == 0


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_words_hold_whole_codes(bits):
    """Against `mx.dequantize` with scale 1 and bias 0, which gives the codes themselves."""
    codes = mx.random.randint(0, 2**32, (5, 64 * bits // 32), dtype=mx.uint32, key=mx.random.key(bits))
    words, n = to_words(codes, bits)
    mine = mx.stack([(words >> (bits * k)) & (2**bits - 1) for k in range(n)], axis=-1).reshape(5, 64)
    theirs = mx.dequantize(codes, mx.ones((5, 1)), mx.zeros((5, 1)), 64, bits)
    assert mx.array_equal(mine.astype(mx.float32), theirs)


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("name", ALL)
def test_products(name, rows):
    """Piece by piece, MLX's own quantised product, and the decoded matrix agree. (Its own knows no global scale.)"""
    x, p = matrix(rows, 256, seed=1, scale=1.0), ALL[name]
    packed = pack_matrix(matrix(96, 256), p)
    expected = x @ packed.decode().T
    limit = 1e-5 * mx.abs(expected).max().item()
    assert mx.abs(multiply_on_cpu(x, packed) - expected).max().item() < limit
    assert mx.abs(multiply(x[None, :, None], packed)[0, :, 0] - expected).max().item() < 10 * limit
    t = packed.tensors
    theirs = mx.quantized_matmul(x, t["weight"], t["scales"], t.get("biases"), True, p.group, p.bits, p.mode)
    theirs = theirs * t["global_scale"][:, 0] if "global_scale" in t else theirs
    assert mx.abs(theirs - expected).max().item() < 10 * limit
    half = multiply(x.astype(mx.bfloat16), packed)
    assert half.dtype == mx.bfloat16 and error(half.astype(mx.float32), expected) < 0.02


def test_products_without_codes():
    x, w = matrix(5, 96, seed=1, scale=1.0), matrix(64, 96)
    stored = Packed({"weight": w.astype(mx.bfloat16)}, STORED)
    assert mx.allclose(multiply(x, stored), x @ stored.decode().T, atol=1e-5)
    scales = mx.abs(matrix(64, 1, seed=2))
    fp8 = Packed({"weight": mx.to_fp8(w), "scales": scales}, Packing("fp8", 8))
    assert mx.allclose(multiply(x, fp8), x @ fp8.decode().T, atol=1e-5)


def test_joined_and_turned():
    a, b = (pack_matrix(matrix(64, 128, seed=i), PACKINGS["nvfp4"]) for i in (1, 2))
    both = join([a, b])
    assert both.shape == (128, 128)
    assert mx.array_equal(both.decode(), mx.concatenate([a.decode(), b.decode()]))  # each keeps its own scale
    swapped = both.map(lambda w: mx.concatenate(mx.split(w, 2)[::-1]))
    assert mx.array_equal(swapped.decode()[:64], b.decode())
    with pytest.raises(ValueError, match="cannot be joined"):
        join([a, pack_matrix(matrix(64, 128), PACKINGS[4])])


@pytest.mark.parametrize("wish", [2, 7, 16, "4", "fp8", 4.5])
def test_wishes_that_cannot_be(wish):
    with pytest.raises(ValueError, match=f"quantize is one of 3, 4, 5, 6, 8, mxfp4, mxfp8, nvfp4 .*not {wish!r}"):
        packing(wish)
    with pytest.raises(ValueError, match="quantize is one of"):
        open_checkpoint("nano", dtype=mx.float32, quantize=wish)


# ---------------------------------------------------------------- layers


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.odd = nn.Embedding(300, 128), nn.Linear(100, 128, bias=False)
        self.layers = [nn.Linear(128, 128, bias=False) for _ in range(3)]
        self.large, self.small = nn.Linear(128, 40_000, bias=False), nn.Linear(128, 8, bias=False)
        self.norm = nn.RMSNorm(128)


@pytest.mark.parametrize("name", PACKINGS)
def test_which_layers_are_packed(name):
    model, calls = Model(), []
    before = dict(tree_flatten(model.parameters()))
    quantise(model, PACKINGS[name], mx.float32, after=lambda: calls.append(1))
    packed = {path for path, m in model.named_modules() if isinstance(m, PackedLinear)}
    assert packed == {"table", "large", "layers.0", "layers.1", "layers.2"}  # too odd: 100 wide; too small: 8 × 128
    assert isinstance(model.table, PackedEmbedding) and len(calls) == 7
    ids = mx.array([[3, 299], [0, 3]])
    assert error(model.table(ids), before["table.weight"][ids]) < 2 * ERROR[name]
    assert model.table(ids).dtype == mx.float32
    x = matrix(2, 3, 128)
    assert error(model.layers[1](x), x @ before["layers.1.weight"].T) < 2 * ERROR[name]
    assert model.trainable_parameters().keys() >= {"odd", "norm"} and not model.trainable_parameters()["large"]


def test_the_largest_is_packed_first():
    """While it is there in both forms, nothing else should be in memory yet."""
    net = nn.Sequential(nn.Linear(64, 64), nn.Embedding(1000, 64), nn.Linear(64, 128))
    left, order = {0, 1, 2}, []

    def note():
        done = {i for i in left if isinstance(net.layers[i], (PackedLinear, PackedEmbedding))}
        order.extend(done)
        left.difference_update(done)

    quantise(net, PACKINGS[4], mx.float32, note)
    assert order == [1, 2, 0]


def test_stored():
    """A matrix in a narrower type than we compute in stays as it is; norms do not, and nothing is widened twice."""
    model, wide = Model(), Model()
    arrays = {k: w.astype(mx.bfloat16) for k, w in tree_flatten(model.parameters())}
    fill(model, arrays, mx.float32, keep=True)
    fill(wide, arrays, mx.float32)
    kinds = {k: w.dtype for k, w in tree_flatten(model.parameters())}
    assert {k for k, kind in kinds.items() if kind == mx.float32} == {"norm.weight"}
    x, ids = matrix(2, 3, 128), mx.array([1, 2])
    assert mx.allclose(model.large(x), wide.large(x), atol=1e-6) and mx.array_equal(model.table(ids), wide.table(ids))
    same = fill(Model(), arrays, mx.bfloat16, keep=True)
    assert not [m for m in same.modules() if isinstance(m, PackedLinear)]


@CPU
@pytest.mark.parametrize("kind", ["stored", "fp8", 8, 4, "nvfp4"])
def test_one_decoded_layer_at_a_time(kind):
    """Ten layers in a row: the most that is ever in memory beside them is about one of them in float32."""
    d, layers = 1024, []
    for i in range(10):
        w = matrix(d, d, seed=i, scale=d**-0.5)
        if kind == "stored":
            layers.append(PackedLinear(Packed({"weight": w.astype(mx.bfloat16)}, STORED)))
        elif kind == "fp8":
            layers.append(PackedLinear(Packed({"weight": mx.to_fp8(w), "scales": mx.ones((d, 1))}, Packing("fp8", 8))))
        else:
            layers.append(PackedLinear(pack_matrix(w.astype(mx.bfloat16), PACKINGS[kind])))
    x = matrix(4, d, scale=1.0)
    mx.eval(x, [m.parameters() for m in layers])
    del w
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for layer in layers:
        x = layer(x)
    mx.eval(x)
    assert mx.get_peak_memory() - before < 1.3 * 4 * d * d


@CPU
def test_one_whole_layer_at_a_time(tmp_path):
    """Quantising from a file never holds the file."""
    d = 1024
    mx.save_safetensors(
        str(tmp_path / "x.safetensors"), {f"m{i}.weight": matrix(d, d).astype(mx.bfloat16) for i in range(12)}
    )
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    model = nn.Module()
    for i in range(12):
        model[f"m{i}"] = nn.Linear(d, d, bias=False)
    arrays = mx.load(str(tmp_path / "x.safetensors"))
    fill(model, arrays, mx.float32, keep=True)
    del arrays
    quantise(model, PACKINGS[4], mx.float32)
    packed = 12 * d * d * 4.5 / 8
    assert 0.95 * packed < mx.get_active_memory() - before < 1.05 * packed  # all of it, and nothing else
    assert mx.get_peak_memory() - before < packed + 2 * d * d + 2 * d * d  # one layer, and what packing it takes


# ---------------------------------------------------------------- nano


@pytest.mark.parametrize("name", PACKINGS)
def test_nano(name):
    right, klein = Klein.from_pretrained("nano"), Klein.from_pretrained("nano", quantize=name)
    off = difference(klein(**WISH), right(**WISH))
    limit = {3: 30, 4: 15, 5: 8, 6: 5, 8: 2, "mxfp4": 25, "mxfp8": 6, "nvfp4": 15}[name]
    assert 0 < off < limit
    assert not [m for m in klein.autoencoder.modules() if isinstance(m, PackedLinear)]
    assert [m for m in klein.checkpoint.load_text_encoder().modules() if isinstance(m, PackedLinear)]


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize("name", [3, 4, "nvfp4", "mxfp8"])
def test_a_quantised_copy(name, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "SHARD", 300_000)
    monkeypatch.setattr(export.shards, "__defaults__", (300_000,))
    export.quantize_model("nano", tmp_path / "q", name, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["q"]
    copy = Klein.from_pretrained(tmp_path / "q")
    assert copy(**WISH).tobytes() == Klein.from_pretrained("nano", quantize=name)(**WISH).tobytes()
    config = json.loads((tmp_path / "q" / "transformer" / "config.json").read_text())
    p = PACKINGS[name]
    assert config["quantization"] == {"group_size": p.group, "bits": p.bits, "mode": p.mode}
    shards = sorted((tmp_path / "q" / "transformer").glob("*.safetensors"))
    assert len(shards) > 1 and all(path.stat().st_size < 400_000 for path in shards)
    names = [k for path in (tmp_path / "q" / "text_encoder").glob("*.safetensors") for k in mx.load(str(path))]
    assert not [k for k in names if "layers.3" in k or k.startswith("norm")]
    with pytest.raises(ValueError, match="quantised already"):
        open_checkpoint(tmp_path / "q", dtype=mx.float32, quantize=4)
    with pytest.raises(FileExistsError, match="is there already"):
        export.quantize_model("nano", tmp_path / "q", name)


def test_a_copy_of_the_base_model(tmp_path):
    """Its parts lie beside it; the copy is whole."""
    export.quantize_model("nano-base", tmp_path / "q", 8, progress=False)
    copy = open_checkpoint(tmp_path / "q", dtype=mx.float32)
    assert not copy.info.distilled and copy.parts["vae"][1].parent == tmp_path / "q"


def test_a_copy_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "write_weights", full)
    with pytest.raises(OSError, match="No space left"):
        export.quantize_model("nano", tmp_path / "q", 4, progress=False)
    assert not list(tmp_path.iterdir())


def test_a_copy_without_its_packing(tmp_path):
    export.quantize_model("nano", tmp_path / "q", 4, progress=False)
    path = tmp_path / "q" / "transformer" / "config.json"
    config = json.loads(path.read_text())
    del config["quantization"]
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="is quantised and config.json does not say how"):
        open_checkpoint(tmp_path / "q", dtype=mx.float32)


@CPU
def test_a_copy_needs_little_memory(tmp_path):
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    export.quantize_model("nano", tmp_path / "q", 4, progress=False)
    largest = max(w.nbytes for w in open_checkpoint("nano", dtype=mx.float32).weights("transformer").values())
    assert mx.get_peak_memory() - before < 3 * largest


# ---------------------------------------------------------------- the table


def test_the_table_of_costs(capsys):
    [cost] = quantization.costs("nano", (8,), prompts=quantization.PROMPTS[:1])
    assert cost.setting == 8 and cost.bits == 8.5 and 0 < cost.difference < 2
    assert max(cost.errors.values()) == cost.errors[cost.worst] < ERROR[8]
    assert len(cost.errors) == 34  # every matrix but txt_in, which is 288 wide
    packed = open_checkpoint("nano", dtype=mx.float16, quantize=8).load_transformer()
    assert cost.megabytes * 1e6 == sum(w.nbytes for _, w in tree_flatten(packed.parameters()))
    assert quantization.row(cost).startswith("| 8 | 8.50 | 2.5 | ") and quantization.HEADER.count("|") == 14
