"""Adapter files: every spelling means the same, as diffusers has it, and what is not whole is refused."""

import json
import os
import re
from functools import cache
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from golden_tools import LOOSE, check
from mlx.utils import tree_flatten, tree_map

from kleinlite.lora import (
    Adapted,
    LowRank,
    attach,
    detach,
    linear_layers,
    new_changes,
    rescale,
    train_only,
    velocity_loss,
)
from kleinlite.models.adapters import bundled_adapters, find_target, list_targets, open_adapter, write_adapter
from kleinlite.models.configs import parse_transformer_config
from kleinlite.models.names import TRANSFORMER_NAMES
from kleinlite.models.opening import load_part
from kleinlite.models.packing import quantize
from kleinlite.position_ids import image_ids, text_ids
from kleinlite.quantisation import PACKINGS
from kleinlite.sampling import euler
from kleinlite.transformer import Transformer, TransformerConfig

HERE = Path(__file__).parent
OWN = HERE.parent / "goldens" / "lora"  # made by tests/goldens/make_lora_golden.py, for tests/pipelines/tiny
ELSEWHERE = Path(os.environ.get("KLEINLITE_GOLDEN", HERE.parents[2] / "shared" / "golden"))
FOLDERS = {"own": OWN, "shared": ELSEWHERE / "tiny-lora"}


def cases(of: str) -> list:
    """Each entry of this list in a folder's meta.json, with the folder's name."""
    found = []
    for where, folder in FOLDERS.items():
        if folder.is_dir():
            found += [(where, case) for case in json.loads((folder / "meta.json").read_text(encoding="utf-8"))[of]]
    return found


class Golden:
    """A tiny model, what diffusers draws with it, and what we draw with what is attached."""

    def __init__(self, where: str):
        self.folder = FOLDERS[where]
        tiny = HERE.parent / "pipelines" / "tiny" if where == "own" else ELSEWHERE / "tiny"
        if not self.folder.is_dir():
            pytest.skip("needs the larger golden pipelines: set KLEINLITE_GOLDEN to the folder that holds them")
        weights = tiny / "transformer" if where == "own" else tiny / "pipeline" / "transformer"
        config = parse_transformer_config(json.loads((weights / "config.json").read_text(encoding="utf-8")))
        self.net = load_part(Transformer(config), weights, TRANSFORMER_NAMES, mx.float32)
        given = mx.load(str(tiny / "expected.safetensors"))
        self.txt, self.noise = given["prompt0.embeds"], given["t2i.trajectory"][:1]
        self.sigmas = given["t2i.sigmas"].tolist()
        height, width, _ = given["t2i.image"].shape
        self.rope = self.net.rope(image_ids(height // 16, width // 16), text_ids(self.txt.shape[1]))
        self.expected = mx.load(str(self.folder / "expected.safetensors"))
        self.meta = json.loads((self.folder / "meta.json").read_text(encoding="utf-8"))

    def open(self, file: str):
        return open_adapter(self.folder / f"{file}.safetensors")

    def steps(self) -> list:
        return list(euler(lambda x, t: self.net(x, self.txt, t, rope=self.rope), self.noise, self.sigmas))

    def check(self, run: str, tolerance: float = LOOSE) -> None:
        steps = self.steps()
        for what, got in (("velocity0", steps[0].velocity), ("final", steps[-1].latents)):
            check(got, self.expected[f"{run}.{what}"], tolerance)


golden = cache(Golden)


@pytest.fixture
def net() -> Transformer:
    """A small random network with the names of the real one."""
    mx.random.seed(0)
    net = Transformer(TransformerConfig(double_blocks=2, single_blocks=3, heads=2, axes=(8, 8, 8, 8), d_text=64))
    mx.eval(net.parameters())
    return net


def changes_of(net: Transformer, seed: int = 0, rank: int = 2, factor: float = 1.0) -> dict[str, LowRank]:
    """Changes of every matrix of the blocks, none of them zero."""
    changes = new_changes(net, rank, mx.random.key(seed), factor)
    for i, change in enumerate(changes.values()):
        change.b = 0.1 * mx.random.normal(change.b.shape, key=mx.random.key(seed + 100 + i))
    return changes


def answer(net: Transformer) -> mx.array:
    x, txt = (mx.random.normal((1, 12, c), key=mx.random.key(c)) for c in (128, 64))
    return net(x, txt, 0.7, image_ids(3, 4), text_ids(12))


def apart(a: mx.array, b: mx.array) -> float:
    return mx.abs(a - b).max().item()


# ---------------------------------------------------------------- what diffusers computes


@pytest.mark.parametrize("where, run", cases("runs"))
def test_a_run_of_diffusers(where, run):
    g = golden(where)
    loras = g.meta["runs"][run]["loras"]
    for i, (file, scale) in enumerate(loras):
        attach(g.net, str(i), g.open(file).changes(g.net), scale)
    try:
        g.check(run)
    finally:
        for i in range(len(loras)):
            detach(g.net, str(i))


@pytest.mark.parametrize("where, file", cases("must_give"))
def test_a_spelling(where, file):
    g = golden(where)
    run, *rounded = g.meta["must_give"][file].split(" within ")
    attach(g.net, "x", g.open(file).changes(g.net))
    try:
        g.check(run, float(rounded[0]) if rounded else LOOSE)
    finally:
        detach(g.net, "x")


@pytest.mark.parametrize("where, file", cases("must_refuse"))
def test_a_refusal(where, file):
    g = golden(where)
    path = g.folder / "refuse" / f"{file}.safetensors"
    with pytest.raises(ValueError) as error:
        open_adapter(path).changes(g.net)
    said = str(error.value)
    assert str(path) in said and said.endswith(".") and said.count(". ") == 0, said  # one sentence
    assert not any(isinstance(layer, Adapted) for layer in linear_layers(g.net).values())


def training_step(g: Golden, changes: dict) -> tuple[float, dict]:
    e = g.expected
    train_only(g.net, changes)
    rows = (e["train.x0"], e["train.x0"][:, :0], g.txt, e["train.sigma"], e["train.noise"], *g.rope)
    loss, grads = nn.value_and_grad(g.net, velocity_loss)(g.net, *rows)
    return loss.item(), dict(tree_flatten(grads))


@pytest.mark.parametrize("where", FOLDERS)
def test_loss_and_gradients_of_a_training_step(where):
    g = golden(where)
    changes = g.open("a-diffusers").changes(g.net)
    attach(g.net, "x", changes)
    try:
        loss, grads = training_step(g, changes)
        assert loss == pytest.approx(g.expected["train.loss"].item(), rel=1e-5)
        check_gradients(g, grads, "train")
    finally:
        detach(g.net, "x")


def check_gradients(g: Golden, grads: dict, case: str) -> None:
    """Those that the golden has, against ours, in our names and rows."""
    wanted = [name for name in g.expected if name.startswith(f"{case}.grad.")]
    assert wanted
    for name in wanted:
        module, _, part = name.removeprefix(f"{case}.grad.").removesuffix(".weight").rpartition(".lora_")
        place = find_target(module)
        third = "" if place.third is None else f"pieces.{place.third}."
        got, want = grads[f"{place.path}.changes.x.{third}{part.lower()}"], g.expected[name]
        assert apart(got, want) < 1e-4 * mx.abs(want).max().item(), name


@pytest.mark.parametrize("where", FOLDERS)
def test_where_training_begins_only_b_has_a_gradient(where):
    g = golden(where)
    changes = g.open("a-diffusers").changes(g.net)
    for change in changes.values():
        for low in getattr(change, "pieces", {"": change}).values():
            low.b = mx.zeros_like(low.b)
    attach(g.net, "x", changes)
    try:
        loss, grads = training_step(g, changes)
        assert loss == pytest.approx(g.expected["train_zero_b.loss"].item(), rel=1e-5)
        assert all(mx.abs(w).max().item() == 0 for name, w in grads.items() if name.endswith(".a"))
        check_gradients(g, grads, "train_zero_b")
    finally:
        detach(g.net, "x")


# ---------------------------------------------------------------- properties


def test_no_two_names_look_the_same():
    """Underscored, the names of different matrices must stay different: kohya's files have no others."""
    ours = {(place.path, place.third) for place in list_targets().values()}
    assert len({name for name in list_targets() if name.startswith(("double_blocks_", "single_blocks_"))}) == 100 * 10
    assert ("double_blocks.7.img_attn.qkv", 2) in ours
    assert find_target("lora_unet_double_blocks_1_img_attn_qkv").path == "double_blocks.1.img_attn.qkv"
    assert find_target("diffusion_model.sformer_blocks.3.attn.to_q").third == 0
    assert find_target("diffusion_model.double_blocks.0.img_attn_qkv").path == "double_blocks.0.img_attn.qkv"
    assert find_target("transformer.norm_out.linear").swapped
    assert not find_target("diffusion_model.final_layer.adaLN_modulation.1").swapped


@pytest.mark.parametrize("layout", ["diffusers", "comfy"])
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_written_and_read_again(net, tmp_path, layout, factor):
    changes = changes_of(net, factor=factor)
    attach(net, "x", changes, 0.5)
    want = answer(net)
    detach(net, "x")
    write_adapter(tmp_path / "x.safetensors", changes, layout=layout, dtype=mx.float32)
    attach(net, "x", open_adapter(tmp_path / "x.safetensors").changes(net), 0.5)
    assert apart(answer(net), want) < 1e-5
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


@pytest.mark.parametrize("bits", [8, 4, "mxfp4"])
def test_beside_packed_weights_as_merged_into_the_decoded_ones(net, bits):
    quantize(net, PACKINGS[bits], mx.float32)
    changes = changes_of(net)
    attach(net, "x", changes)
    got, packed = answer(net), linear_layers(net)
    plain = Transformer(net._cfg)
    detach(net, "x")
    for path, layer in linear_layers(plain).items():
        w = packed[path].layer if path in changes else packed[path]
        w = w.weight if isinstance(w, nn.Linear) else w.packed.decode()
        layer.weight = w + changes[path].matrix(w) if path in changes else w
    norms = {name: w for name, w in tree_flatten(net.parameters()) if name.endswith("_norm.scale")}
    plain.load_weights(list(norms.items()), strict=False)
    assert apart(got, answer(plain)) < 1e-4


def test_removed_is_removed(net):
    before, kept = answer(net), tree_map(lambda w: w, net.parameters())
    layers = linear_layers(net)
    for name in ("x", "y"):
        attach(net, name, changes_of(net, seed=ord(name)), 0.7)
    assert apart(answer(net), before) > 1e-3
    detach(net, "x")
    detach(net, "y")
    assert linear_layers(net) == layers  # the very objects
    for (name, w), (_, was) in zip(tree_flatten(net.parameters()), tree_flatten(kept)):
        assert mx.array_equal(w, was), name
    assert mx.array_equal(answer(net), before)


def test_scales_order_and_halves(net):
    before, changes = answer(net), changes_of(net)
    attach(net, "x", changes, 0.0)
    assert mx.array_equal(answer(net), before)
    rescale(net, "x", 1.0)
    once = answer(net)
    rescale(net, "x", 0.5)
    attach(net, "y", changes, 0.5)
    assert apart(answer(net), once) < 1e-5
    other = changes_of(net, seed=5)
    attach(net, "z", other)
    first = answer(net)
    detach(net, "x")
    attach(net, "x", changes, 0.5)
    assert apart(answer(net), first) < 1e-5


def test_a_compiled_network_follows_the_scale(net):
    attach(net, "x", changes_of(net))
    compiled = mx.compile(lambda: answer(net), inputs=net.state)
    for scale in (1.0, -0.5):
        rescale(net, "x", scale)
        assert apart(compiled(), answer(net)) < 1e-4
    full = answer(net)
    detach(net, "x")
    assert apart(full, answer(net)) > 1e-3


# ---------------------------------------------------------------- mutations of a file that is right


def write(path: Path, arrays: dict, metadata: dict | None = None) -> Path:
    mx.save_safetensors(str(path), arrays, metadata or {})
    return path


@pytest.fixture
def right(net, tmp_path) -> dict[str, mx.array]:
    write_adapter(tmp_path / "right.safetensors", changes_of(net), dtype=mx.float32)
    return mx.load(str(tmp_path / "right.safetensors"))


Q, L2 = "transformer.transformer_blocks.0.attn.to_q", "transformer.single_transformer_blocks.1.attn.to_out"


@pytest.mark.parametrize(
    "mutate, named",
    [
        (lambda f: f | {"transformer.transformer_blocks.0.attn.to_x.lora_A.weight": f[f"{Q}.lora_A.weight"]}, "to_x"),
        (lambda f: {k: v for k, v in f.items() if k != f"{Q}.lora_A.weight"}, "not complete"),
        (lambda f: f | {f"{Q}.lora_A.weight": f[f"{Q}.lora_A.weight"][:1]}, "do not go together"),
        (lambda f: f | {f"{L2}.lora_B.weight": f[f"{L2}.lora_B.weight"].T}, L2),
        (lambda f: f | {f"{L2}.lora_B.weight": f[f"{L2}.lora_B.weight"][0]}, L2),
        (lambda f: f | {f"{L2}.lora_A.weight": f[f"{L2}.lora_A.weight"] * mx.inf}, "not finite"),
        (lambda f: f | {f"{L2}.diff": f[f"{L2}.lora_A.weight"]}, ".diff"),
        (lambda f: f | {f"{L2}.dora_scale": mx.ones((3,))}, "do not go together"),
        (lambda f: f | {f"{L2}.hada_w1_a": mx.ones((3, 3))}, "not complete"),
        (lambda f: f | {f"{Q}.alpha": mx.ones((2,))}, "alpha"),
        (lambda f: f | {"text_encoder.layers.0.q_proj.lora_A.weight": mx.ones((2, 2))}, "text encoder"),
        (lambda f: f | {"lora_te1_text_model.lora_down.weight": mx.ones((2, 2))}, "text encoder"),
        (lambda f: f | {f"diffusion_model.layers.3.attention.to_q.lora_{x}.weight": mx.ones((2, 2)) for x in "AB"},
         "Z-Image"),
        (lambda f: f | {"transformer.transformer_blocks.0.img_mod.1.lora_A.weight": mx.ones((2, 2))}, "Qwen-Image"),
        (lambda f: f | {"lora_unet_down_blocks_0_attentions_0.lora_down.weight": mx.ones((2, 2))}, "Stable Diffusion"),
        (lambda f: f | {"diffusion_model.guidance_in.in_layer.lora_A.weight": mx.ones((2, 2))}, "FLUX.2 [dev]"),
        (lambda f: f | {k.replace("blocks.1", "blocks.9"): v for k, v in f.items()}, "blocks that this model does not"),
        (lambda f: f | {f"diffusion_model.double_blocks.0.img_attn.qkv.lora_{x}.weight": mx.ones(s)
                        for x, s in (("A", (1, 64)), ("B", (192, 1)))}, "twice"),
        (lambda f: f | {f"base_model.model.{Q.removeprefix('transformer.')}.lora_{x}.weight": f[f"{Q}.lora_{x}.weight"]
                        for x in "AB"}, "twice"),
        (lambda f: f | {f"{Q}.lora_A.weight": mx.to_fp8(f[f"{Q}.lora_A.weight"])}, "uint8"),
        (lambda f: {k: mx.zeros((*v.shape[:-1], 3072)) if "lora_A" in k else v for k, v in f.items()}, "klein 4B"),
        (lambda f: {k: mx.zeros((*v.shape[:-1], 4096)) if "lora_A" in k else v for k, v in f.items()}, "klein 9B"),
        (lambda f: {k.replace("lora_A.weight", "weight"): v for k, v in f.items() if "lora_A" in k}, "whole weights"),
    ],
)  # fmt: skip
def test_a_mutation_is_refused_by_name(net, right, tmp_path, mutate, named):
    path = write(tmp_path / "wrong.safetensors", mutate(right))
    with pytest.raises(ValueError) as error:
        open_adapter(path).changes(net)
    said = str(error.value)
    assert named in said and str(path) in said and said.endswith("."), said


def test_the_page_on_adapter_files():
    """Its sentences are those of today, and its numbers are no better than today's."""
    from write_adapters import PAGE, page

    without_numbers = lambda text: re.sub(r"\d+e-\d+", "", text)
    stored, fresh = PAGE.read_text(encoding="utf-8"), page()
    assert without_numbers(stored) == without_numbers(fresh), "run: python tests/write_adapters.py"
    pairs = zip(*(re.findall(r"(\d+e-\d+)", text) for text in (fresh, stored)))
    assert all(float(now) < 4 * float(then) for now, then in pairs)


def test_files_that_are_no_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no file"):
        open_adapter(tmp_path / "none.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(ValueError, match="not a safetensors file"):
        open_adapter(tmp_path / "cut.safetensors")


@pytest.mark.parametrize(
    "tensors, metadata, factor",
    [
        ({}, {}, 1.0),
        ({f"{L2}.alpha": mx.array(6.0)}, {}, 3.0),
        ({f"{L2}.alpha": mx.array([6.0])}, {"lora_alpha": 100}, 3.0),  # the tensor goes before the header
        ({}, {"lora_alpha": 8}, 4.0),
        ({}, {"transformer.lora_alpha": 8, "transformer.use_rslora": True}, 8 / 2**0.5),
        ({}, {"lora_alpha": 8, "alpha_pattern": {"attn.to_out": 2}}, 1.0),
        ({}, {"lora_alpha": 8, "alpha_pattern": {"attn.to_q": 2}}, 4.0),
    ],
)
def test_where_alpha_comes_from(net, right, tmp_path, tensors, metadata, factor):
    said = {"lora_adapter_metadata": json.dumps(metadata)} if metadata else {}
    path = write(tmp_path / "alpha.safetensors", right | tensors, said)
    assert open_adapter(path).factor(L2) == pytest.approx(factor)


@pytest.mark.parametrize(
    "said",
    ["{", "[]", '{"lora_alpha": "8"}', '{"alpha_pattern": {"(": 1}}', '{"alpha_pattern": 3}', '{"lora_alpha": NaN}'],
)
def test_a_damaged_header(net, right, tmp_path, said):
    path = write(tmp_path / "x.safetensors", right, {"lora_adapter_metadata": said})
    with pytest.raises(ValueError, match="lora_adapter_metadata"):
        open_adapter(path).changes(net)


def test_lokr_alpha_means_nothing_when_both_factors_are_whole(tmp_path, net):
    name = "lycoris_double_blocks_0_img_attn_qkv"
    whole = {f"{name}.lokr_w1": mx.ones((4, 4)), f"{name}.lokr_w2": mx.ones((48, 16)), f"{name}.alpha": mx.array(1e10)}
    adapter = open_adapter(write(tmp_path / "lokr.safetensors", whole))
    assert adapter.factor(name) == 1.0 and adapter.kind == "LoKr"
    assert adapter.changes(net)["double_blocks.0.img_attn.qkv"].matrix(None).shape == (192, 64)


def test_only_rows_are_swapped_in_the_last_modulation(net, tmp_path):
    a, b = mx.random.normal((2, 64), key=mx.random.key(1)), mx.random.normal((128, 2), key=mx.random.key(2))
    path = write(tmp_path / "x.safetensors", {"norm_out.linear.lora_A.weight": a, "norm_out.linear.lora_B.weight": b})
    [change] = open_adapter(path).changes(net).values()
    assert mx.array_equal(change.a, a) and mx.array_equal(change.b, mx.concatenate([b[64:], b[:64]]))


@pytest.mark.parametrize("name", list(bundled_adapters()) or [pytest.param(None, marks=pytest.mark.skip)])
def test_the_bundled_ones(name):
    adapter = open_adapter(name)
    assert adapter.path.stat().st_size < 200_000 and adapter.kind == "LoRA"
