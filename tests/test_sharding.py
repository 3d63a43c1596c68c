"""Networks that two or three processes share: the same answers as alone, and as much in memory as was counted.

Each process makes the same network, asks it alone, has it cut, and asks again; packed in every way, and with adapters.
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from small_nano import launch

from kleinlite.errors import UserError
from kleinlite.inference.cluster import Cluster
from kleinlite.lora import LoRA, attach
from kleinlite.models.adapters.variants import DoRA
from kleinlite.models.configs import RELEASED_CONFIGS
from kleinlite.models.families import network_of
from kleinlite.models.quantize_network import quantize
from kleinlite.quantization import QUANT_SPECS
from kleinlite.sharding import check_shares, common_divisor, find_cuts, held_share, shard
from kleinlite.text_encoder import TextEncoder
from kleinlite.transformer import SingleBlock, StreamAttention, Transformer, TransformerConfig

PROGRAM = """
import json, sys
from pathlib import Path
import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from kleinlite.cpu import setup
from kleinlite.flux3 import Flux3Config, Flux3Transformer, flux3_velocity_field
from kleinlite.lora import LoRA, attach, linear_layers, matrix_shape
from kleinlite.models.adapters.variants import Hadamard, SplitAdapter
from kleinlite.models.quantize_network import quantize, quantized_layer
from kleinlite.pipeline import velocity_field
from kleinlite.quantization import QUANT_SPECS, UNQUANTIZED, QuantizedMatrix, QuantSpec
from kleinlite.sharding import held_share, shard
from kleinlite.text_encoder import TextEncoder, TextEncoderConfig
from kleinlite.transformer import Transformer, TransformerConfig
from kleinlite.z_image import ZImageConfig, ZImageTransformer, z_image_velocity_field

setup()
group = mx.distributed.init()


def n(*shape, seed=1):
    return mx.random.normal(shape, key=mx.random.key(seed))


def filled(net):
    new = []
    for i, (path, w) in enumerate(sorted(tree_flatten(net.parameters()))):
        new.append((path, n(*w.shape, seed=i) * (0.5 if w.ndim == 1 else w.shape[-1] ** -0.5)))
    net.update(tree_unflatten(new))
    return net


def flux2():
    net = filled(Transformer(TransformerConfig(1, 1, 12, (8, 8, 8, 8), d_text=24)))
    return net, lambda: velocity_field(net, n(1, 5, 24), (3, 4))(n(1, 12, 128), 0.7)


def flux3():
    net = filled(Flux3Transformer(Flux3Config(mode_blocks=1, single_blocks=1, heads=12, axes=(8, 8, 8, 8), d_text=24)))
    return net, lambda: flux3_velocity_field(net, [n(1, 5, 24)], (3, 4))(n(1, 12, 128), 0.7, 0.3)


def z_image():
    heads = {2: 12, 3: 18}[group.size()]  # an MLP of 8/3 of the width: few sizes divide by two and by three
    net = filled(ZImageTransformer(ZImageConfig(layers=1, refiners=1, heads=heads, axes=(8, 12, 12), d_text=24)))
    return net, lambda: z_image_velocity_field(net, [n(1, 5, 24)], (3, 4))(n(1, 12, 64), 0.7)


def qwen3():
    net = filled(TextEncoder(TextEncoderConfig(97, 64, 1152, 3, 12, 6, 32, out_layers=(1, 2, 3), max_length=16)))
    return net, lambda: net(mx.arange(16)[None], mx.arange(16)[None] < 11)


def low_rank(layer, i, path):
    d_out, d_in = matrix_shape(layer)
    if not path.endswith("qkv"):
        return LoRA(n(4, d_in, seed=i), n(d_out, 4, seed=i + 1), 0.01)
    return SplitAdapter({third: LoRA(n(4, d_in, seed=third), n(d_out // 3, 4), 0.01) for third in (0, 2)}, 3)


def hadamard(layer, i, path):
    d_out, d_in = matrix_shape(layer)
    return Hadamard(n(d_out, 2), n(2, d_in, seed=i), n(d_out, 2, seed=3), n(2, d_in, seed=4), 0.01)


def in_bfloat16(w):
    return QuantizedMatrix({"weight": w.astype(mx.bfloat16)}, UNQUANTIZED)


def in_fp8(w):
    return QuantizedMatrix({"weight": mx.to_fp8(50 * w), "scales": 0.02 + mx.zeros((len(w), 1))}, QuantSpec("fp8", 8))


def pack(net, packing):
    spec = {"4 bits": 4, "8 bits": 8, "LoRA on 8 bits": 8}.get(packing, packing)
    if spec in QUANT_SPECS:
        quantize(net, QUANT_SPECS[spec], mx.float32)
    make = hadamard if "LoHa" in packing else low_rank if "LoRA" in packing else None
    for i, (path, layer) in enumerate(linear_layers(net).items()):
        if make:
            attach(net, "x", {path: make(layer, i, path)}, 0.5)
        if packing in ("fp8", "bfloat16"):
            packed = (in_fp8 if packing == "fp8" else in_bfloat16)(layer.weight)
            stands_in = quantized_layer(layer, packed, mx.float32)
            net.update_modules(tree_unflatten([(path, stands_in)]))


def nbytes(net):
    return sum(w.nbytes for _, w in tree_flatten(net.parameters()))


rows = {}
for make in (flux2, flux3, z_image, qwen3):
    for packing in sys.argv[2:]:
        if make == qwen3 and "Lo" in packing:
            continue  # adapters are for transformers
        net, ask = make()
        pack(net, packing)
        alone = ask()
        mx.eval(alone, net.parameters())
        share = held_share(net, group.size())
        before = nbytes(net)
        mx.clear_cache()
        in_memory = mx.get_active_memory()
        shard(net, group)
        together = ask()
        mx.eval(together, net.parameters())
        freed = in_memory - mx.get_active_memory()
        off = (mx.abs(together - alone).max() / mx.abs(alone).max()).item()
        rows[f"{make.__name__}, {packing}"] = off, share, nbytes(net) / before, freed / (before - nbytes(net))
(Path(sys.argv[1]) / f"{group.rank()}.json").write_text(json.dumps(rows))
"""


ALL = ("float32", "bfloat16", "fp8", "4 bits", "8 bits", "mxfp4", "mxfp8", "nvfp4", "LoRA", "LoHa", "LoRA on 8 bits")


@pytest.mark.slow
@pytest.mark.parametrize("processes, packings", [(2, ALL), (3, ("float32", "8 bits", "nvfp4", "LoRA"))])
def test_together_as_alone(tmp_path, processes, packings):
    (tmp_path / "program.py").write_text(PROGRAM)
    launch(tmp_path, tmp_path / "program.py", tmp_path, *packings, processes=processes)
    for rank in range(processes):
        rows = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(rows) >= 3 * len(packings)
        for name, (off, share, held, freed) in rows.items():
            print(f"{name}, {processes} processes: {off:.1e}")
            assert off < 1e-5, name
            if name.endswith("float32"):
                assert held == pytest.approx(share, abs=1e-4), "counted beforehand"
                assert freed > 0.95, "what belongs to others is not in memory"


# ---------------------------------------------------------------- in one process


def machine(rank: int, size: int):
    """What `shard` asks a group."""
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


CONFIG = TransformerConfig(1, 1, 4, (4, 4, 4, 4), d_text=24)  # 64 wide


def test_every_matrix_of_a_block_is_cut():
    """A matrix that no name finds would be held whole by everybody, and its answers would not fit."""
    cuts = find_cuts(Transformer(CONFIG))
    blocks = {
        path for path, _ in tree_flatten(Transformer(CONFIG).parameters()) if "_blocks." in path and "norm" not in path
    }
    assert {f"{path}.weight" for path in cuts} == blocks and len(cuts) == 10


def test_segments_are_cut_one_by_one():
    """Queries, keys and values of a machine are those of its heads."""
    whole = StreamAttention(64, 4)
    weight = whole.qkv.weight + 0
    proj = whole.proj.weight + 0
    shard(nn.Sequential(whole), machine(1, 2))
    q, k, v = mx.split(weight, 3)
    assert mx.array_equal(whole.qkv.weight, mx.concatenate([q[32:], k[32:], v[32:]])) and whole.heads == 2
    assert mx.array_equal(whole.proj.part.weight, proj[:, 32:])


def test_packed_columns_are_cut_where_the_numbers_are():
    block = nn.Sequential(SingleBlock(TransformerConfig(1, 1, 8, (8, 8, 8, 8))))
    whole = quantize(block, QUANT_SPECS[3], mx.float32).layers[0].linear2.matrix.decode()
    shard(block, machine(1, 2))
    attention, mlp = whole[:, :256], whole[:, 256:]
    assert mx.array_equal(
        block.layers[0].linear2.part.matrix.decode(), mx.concatenate([attention[:, 128:], mlp[:, 384:]], 1)
    )


def test_uneven_shares_are_refused_before_anything_is_cut():
    net = Transformer(CONFIG)
    before = dict(tree_flatten(net.parameters()))
    assert common_divisor(net) == 4
    with pytest.raises(UserError, match=r"^3 machines cannot share this model's heads evenly: start one of 1, 2, 4\.$"):
        shard(net, machine(0, 3))
    assert all(w is before[path] for path, w in tree_flatten(net.parameters()))
    packed = quantize(Transformer(CONFIG), QUANT_SPECS[8], mx.float32)  # columns of one group of 64
    with pytest.raises(UserError, match="start one of 1"):
        check_shares(packed, 2)


def test_adapters_that_cannot_be_cut_are_refused():
    net = Transformer(CONFIG)
    layer = net.single_blocks[0].linear1
    lora = LoRA(mx.ones((2, 64)), mx.ones((layer.weight.shape[0], 2)))
    attach(net, "x", {"single_blocks.0.linear1": DoRA(lora, mx.ones(layer.weight.shape[0]), layer.weight)})
    two = SimpleNamespace(group=machine(0, 2), machines=2)
    with pytest.raises(UserError, match="DoRA or LoKr adapter cannot be divided"):
        Cluster.share(two, net)


def test_the_share_falls_to_what_everybody_holds():
    net = Transformer(TransformerConfig())  # lazy: shapes only
    shares = [held_share(net, size) for size in (1, 2, 4, 24, 10**9)]
    assert shares[0] == 1 and shares == sorted(shares, reverse=True)
    assert shares[-1] == pytest.approx(2 * shares[1] - 1) and 0.04 < shares[-1] < 0.06


@pytest.mark.parametrize("name, machines", [("4b", 24), ("9b", 32), ("z-image", 10), ("flux3", 24)])
@pytest.mark.parametrize("packing", [None, 4, 8, "mxfp4", "nvfp4"])
def test_which_machines_can_share_the_released_models(name, machines, packing):
    """From shapes alone: packed columns are cut between groups, which costs no released model a divisor."""
    cfg, text, _ = RELEASED_CONFIGS[name]
    networks = network_of(cfg)(cfg), TextEncoder(replace(text, layers=max(text.out_layers), tied=True))
    if packing is not None:
        for network in networks:
            quantize(network, QUANT_SPECS[packing], mx.bfloat16, lazy=True)
    assert [common_divisor(network) for network in networks] == [machines, 8]
