"""Adapter files: every spelling means the same, as diffusers has it, and what is not whole is refused."""

import hashlib
import json
import math
import re
from functools import cache
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from damage import one_sentence
from golden_tools import LOOSE, check
from mlx.utils import tree_flatten
from test_lora import answer, apart, deltas_of, small_net  # noqa: F401, a fixture

from kleinlite.errors import UserError
from kleinlite.lora import (
    AdaptedLinear,
    LoRA,
    attach,
    detach,
    freeze_except,
    linear_layers,
)
from kleinlite.models.adapters import describe_adapter, open_adapter, write_adapter
from kleinlite.models.adapters.names import find_target, list_targets
from kleinlite.models.checkpoint import load_part
from kleinlite.models.configs import parse_config
from kleinlite.models.families import KLEIN, Z_IMAGE
from kleinlite.models.families.klein import TRANSFORMER_NAMES
from kleinlite.models.files import looks_like_weights
from kleinlite.position_ids import image_ids, text_ids
from kleinlite.sampling import euler
from kleinlite.training import velocity_loss
from kleinlite.transformer import Transformer, TransformerConfig

TESTS = Path(__file__).parents[2]
OWN = TESTS / "goldens" / "lora"  # made by tools/goldens/make_lora_golden.py, for tests/pipelines/tiny


META = json.loads((OWN / "meta.json").read_text(encoding="utf-8"))


class Golden:
    """A tiny model, what diffusers draws with it, and what we draw with what is attached."""

    def __init__(self):
        tiny = TESTS / "pipelines" / "tiny"
        weights = tiny / "transformer"
        config = parse_config("transformer", json.loads((weights / "config.json").read_text(encoding="utf-8")))
        self.net = load_part(Transformer(config), weights, TRANSFORMER_NAMES, mx.float32)
        given = mx.load(str(tiny / "expected.safetensors"))
        self.txt, self.noise = given["prompt0.embeds"], given["t2i.trajectory"][:1]
        self.sigmas = given["t2i.sigmas"].tolist()
        height, width, _ = given["t2i.image"].shape
        self.rope = self.net.rope(image_ids(height // 16, width // 16), text_ids(self.txt.shape[1]))
        self.expected = mx.load(str(OWN / "expected.safetensors"))

    def open(self, file: str):
        return open_adapter(OWN / f"{file}.safetensors")

    def steps(self) -> list:
        return list(euler(lambda x, t, *_: self.net(x, self.txt, t, rope=self.rope), self.noise, self.sigmas))

    def check(self, run: str, tolerance: float = LOOSE) -> None:
        steps = self.steps()
        for what, got in (("velocity0", steps[0].velocity), ("final", steps[-1].latents)):
            check(got, self.expected[f"{run}.{what}"], tolerance)


golden = cache(Golden)


# ---------------------------------------------------------------- what diffusers computes


@pytest.mark.parametrize("run", META["runs"])
def test_a_run_of_diffusers(run):
    g = golden()
    loras = META["runs"][run]["loras"]
    for i, (file, scale) in enumerate(loras):
        attach(g.net, str(i), g.open(file).deltas(g.net), scale)
    try:
        g.check(run)
    finally:
        for i in range(len(loras)):
            detach(g.net, str(i))


@pytest.mark.parametrize("file", META["must_give"])
def test_a_spelling(file):
    g = golden()
    run, *rounded = META["must_give"][file].split(" within ")
    attach(g.net, "x", g.open(file).deltas(g.net))
    try:
        g.check(run, float(rounded[0]) if rounded else LOOSE)
    finally:
        detach(g.net, "x")


@pytest.mark.parametrize("file", META["must_refuse"])
def test_a_refusal(file):
    g = golden()
    path = OWN / "refuse" / f"{file}.safetensors"
    with pytest.raises(ValueError) as error:
        open_adapter(path).deltas(g.net)
    said = str(error.value)
    assert str(path) in said and said.endswith(".") and said.count(". ") == 0, said  # one sentence
    assert not any(isinstance(layer, AdaptedLinear) for layer in linear_layers(g.net).values())


def training_step(g: Golden, changes: dict) -> tuple[float, dict]:
    e = g.expected
    freeze_except(g.net, changes)
    rows = (e["train.x0"], g.txt, e["train.sigma"], e["train.noise"], g.rope)
    loss, grads = nn.value_and_grad(g.net, velocity_loss)(g.net, *rows)
    return loss.item(), dict(tree_flatten(grads))


def test_loss_and_gradients_of_a_training_step():
    g = golden()
    changes = g.open("a-diffusers").deltas(g.net)
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
        got, want = grads[f"{place.path}.deltas.x.{third}{part.lower()}"], g.expected[name]
        assert apart(got, want) < 1e-4 * mx.abs(want).max().item(), name


def test_where_training_begins_only_b_has_a_gradient():
    g = golden()
    changes = g.open("a-diffusers").deltas(g.net)
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
    ours = {(place.path, place.third) for place in list_targets(KLEIN).values()}
    assert (
        len({name for name in list_targets(KLEIN) if name.startswith(("double_blocks_", "single_blocks_"))}) == 100 * 10
    )
    assert ("double_blocks.7.img_attn.qkv", 2) in ours
    assert find_target("lora_unet_double_blocks_1_img_attn_qkv").path == "double_blocks.1.img_attn.qkv"
    assert find_target("diffusion_model.sformer_blocks.3.attn.to_q").third == 0
    assert find_target("diffusion_model.double_blocks.0.img_attn_qkv").path == "double_blocks.0.img_attn.qkv"
    assert find_target("transformer.norm_out.linear").swapped
    assert not find_target("diffusion_model.final_layer.adaLN_modulation.1").swapped


@pytest.mark.parametrize("layout", ["diffusers", "comfy"])
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_written_and_read_again(net, tmp_path, layout, factor):
    changes = deltas_of(net, scaling=factor)
    attach(net, "x", changes, 0.5)
    want = answer(net)
    detach(net, "x")
    write_adapter(tmp_path / "x.safetensors", changes, layout=layout, dtype=mx.float32)
    attach(net, "x", open_adapter(tmp_path / "x.safetensors").deltas(net), 0.5)
    assert apart(answer(net), want) < 1e-5
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


# ---------------------------------------------------------------- mutations of a file that is right


def write(path: Path, arrays: dict, metadata: dict | None = None) -> Path:
    mx.save_safetensors(str(path), arrays, metadata or {})
    return path


@pytest.fixture
def right(net, tmp_path) -> dict[str, mx.array]:
    write_adapter(tmp_path / "right.safetensors", deltas_of(net), dtype=mx.float32)
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
        (lambda f: f | {f"{Q}.lora_A.weight": mx.to_fp8(f[f"{Q}.lora_A.weight"])}, "the type U8"),
        (lambda f: {k: mx.zeros((*v.shape[:-1], 3072)) if "lora_A" in k else v for k, v in f.items()}, "klein 4B"),
        (lambda f: {k: mx.zeros((*v.shape[:-1], 4096)) if "lora_A" in k else v for k, v in f.items()}, "klein 9B"),
        (lambda f: {k.replace("lora_A.weight", "weight"): v for k, v in f.items() if "lora_A" in k}, "whole weights"),
    ],
)  # fmt: skip
def test_a_mutation_is_refused_by_name(net, right, tmp_path, mutate, named):
    path = write(tmp_path / "wrong.safetensors", mutate(right))
    with pytest.raises(ValueError) as error:
        open_adapter(path).deltas(net)
    said = str(error.value)
    assert named in said and str(path) in said and said.endswith("."), said


def test_the_page_on_adapter_files():
    """Its sentences are those of today, and its numbers are no better than today's."""
    from tools.write_adapters import PAGE, page

    def without_numbers(text):
        return re.sub(r"\d+e-\d+", "", text)

    stored, fresh = PAGE.read_text(encoding="utf-8"), page()
    assert without_numbers(stored) == without_numbers(fresh), "run: python -m tools.write_adapters"
    pairs = zip(*(re.findall(r"(\d+e-\d+)", text) for text in (fresh, stored)))
    assert all(float(now) < 4 * float(then) for now, then in pairs)


def test_files_that_are_no_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no file"):
        open_adapter(tmp_path / "none.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(ValueError, match="not a whole safetensors file"):
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
    assert open_adapter(path).scaling(L2) == pytest.approx(factor)


@pytest.mark.parametrize(
    "said",
    ["{", "[]", '{"lora_alpha": "8"}', '{"alpha_pattern": {"(": 1}}', '{"alpha_pattern": 3}', '{"lora_alpha": NaN}'],
)
def test_a_damaged_header(net, right, tmp_path, said):
    path = write(tmp_path / "x.safetensors", right, {"lora_adapter_metadata": said})
    with pytest.raises(ValueError, match="lora_adapter_metadata"):
        open_adapter(path).deltas(net)


def test_lokr_alpha_means_nothing_when_both_factors_are_whole(tmp_path, net):
    name = "lycoris_double_blocks_0_img_attn_qkv"
    whole = {f"{name}.lokr_w1": mx.ones((4, 4)), f"{name}.lokr_w2": mx.ones((48, 16)), f"{name}.alpha": mx.array(1e10)}
    adapter = open_adapter(write(tmp_path / "lokr.safetensors", whole))
    assert adapter.scaling(name) == 1.0 and adapter.kind == "LoKr"
    assert adapter.deltas(net)["double_blocks.0.img_attn.qkv"].delta(mx.zeros((192, 64))).shape == (192, 64)


@pytest.mark.parametrize(
    "alpha, dtype, header, scaling",
    [
        (1e10, mx.float16, {}, 1.0),  # infinite: ai-toolkit's, which means nothing
        (1e5, mx.bfloat16, {"ss_network_dim": "100000"}, 1.0),  # LyCORIS writes its rank, here rounded to 99840
        (1e5, mx.float16, {"ss_network_dim": "100000"}, 1.0),
        (1.0, mx.float32, {"ss_network_dim": "32"}, 1 / 32),  # ComfyUI, issue 15114
        (1.0, mx.float32, {"ss_network_dim": "many"}, 1.0),
    ],
)
def test_the_alpha_of_whole_factors(tmp_path, net, alpha, dtype, header, scaling):
    whole = {"lokr_w1": mx.ones((4, 4)), "lokr_w2": mx.ones((48, 16)), "alpha": mx.array(alpha, dtype)}
    module = "diffusion_model.double_blocks.0.img_attn.qkv"
    path = write(tmp_path / "lokr.safetensors", {f"{module}.{name}": w for name, w in whole.items()}, header)
    assert open_adapter(path).scaling(module) == pytest.approx(scaling)


def test_an_alpha_that_counts_is_finite(right, tmp_path):
    path = write(tmp_path / "x.safetensors", right | {f"{L2}.alpha": mx.array(1e10).astype(mx.float16)})
    refused(path, "not finite")


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("kind", ["LoKr with magnitudes", "LoHa with magnitudes", "DoRA"])
def test_magnitudes_of_every_kind(net, tmp_path, kind, by_rows):
    """As LyCORIS' `apply_weight_decompose` and ai-toolkit's `DoRAModule` compute it: m (W + D) / |W + D|."""
    layer = "single_blocks.1.linear2"
    w = dict(tree_flatten(net.parameters()))[f"{layer}.weight"]
    rows, columns = w.shape
    shapes = {
        "LoKr with magnitudes": {"lokr_w1": (4, 4), "lokr_w2": (rows // 4, columns // 4)},
        "LoHa with magnitudes": {
            "hada_w1_a": (rows, 2), "hada_w1_b": (2, columns), "hada_w2_a": (rows, 2), "hada_w2_b": (2, columns),
        },
        "DoRA": {"lora_A.weight": (2, columns), "lora_B.weight": (rows, 2)},
    }[kind]  # fmt: skip
    t = {name: mx.random.normal(shape, key=mx.random.key(i)) for i, (name, shape) in enumerate(shapes.items())}
    if kind == "DoRA":
        change = t["lora_B.weight"] @ t["lora_A.weight"]
    elif kind.startswith("LoHa"):
        change = (t["hada_w1_a"] @ t["hada_w1_b"]) * (t["hada_w2_a"] @ t["hada_w2_b"])
    else:
        change = mx.kron(t["lokr_w1"], t["lokr_w2"])
    v = w + change
    magnitude = 1.1 * mx.sqrt((v * v).sum(axis=int(by_rows), keepdims=True))
    if by_rows and kind == "DoRA":
        t["magnitude"] = magnitude.flatten()
    else:
        t["dora_scale"] = magnitude
    path = write(tmp_path / "x.safetensors", {f"diffusion_model.{layer}.{name}": x for name, x in t.items()})
    adapter = open_adapter(path)
    assert adapter.kind == kind
    got = adapter.deltas(net)[layer].delta(w)
    assert mx.allclose(got, 1.1 * v - w, atol=1e-4 * mx.abs(v).max().item())


@pytest.mark.parametrize(
    "names, kind",
    [
        (["diff"], "whole changes of weights"),
        (["diff", "diff_b"], "whole changes of weights"),
        (["oft_R.weight"], "OFT"),
        (["oft_blocks", "rescale", "alpha"], "OFT"),
        (["boft_R", "boft_s"], "BOFT"),
        (["a1.weight", "a2.weight", "b1.weight", "b2.weight", "alpha"], "GLoRA"),
        (["vera_lambda_b", "vera_lambda_d"], "VERA"),
        (["hira_A.default.weight", "hira_B.default.weight"], "HIRA"),
        (["fourierft_spectrum.default"], "FOURIERFT"),
        (["weight", "on_input"], "(IA)³"),
        (["ia3_l"], "IA3"),
        (["lora_A.weight", "lora_B.weight", "lora_E"], "AdaLoRA"),
        (["lora_up.weight", "lora_down.weight", "lora_mid.weight"], "an adapter of convolutions"),
        (["lora_A.weight", "lora_B.weight", "lora_B.bias"], "a LoRA with biases"),
        (["lokr_w1", "lokr_t2"], "an adapter of convolutions"),
        (["lora_A.weight", "lora_B.weight", "diff"], "whole changes of weights"),
    ],
)
def test_other_kinds_are_refused_by_their_name(tmp_path, names, kind):
    for place in ("diffusion_model.single_blocks.1.linear2", "base_model.model.transformer_blocks.0.attn.to_q"):
        path = write(tmp_path / "x.safetensors", {f"{place}.{name}": mx.ones((4, 4)) for name in names})
        refused(path, f"is {kind}, which kleinlite does not read")


@pytest.mark.parametrize(
    "before", ["", "_orig_mod.", "module.", "dit.", "pipe.dit.", "unet.", "base_model.model._orig_mod."]
)
def test_what_stands_before_the_names(tmp_path, before):
    arrays = {f"{before}single_blocks.1.linear2.lora_{x}.weight": mx.ones((2, 2)) for x in "AB"}
    [module] = open_adapter(write(tmp_path / "x.safetensors", arrays)).modules.values()
    assert module.target.path == "single_blocks.1.linear2"


def test_only_rows_are_swapped_in_the_last_modulation(net, tmp_path):
    a, b = mx.random.normal((2, 64), key=mx.random.key(1)), mx.random.normal((128, 2), key=mx.random.key(2))
    path = write(tmp_path / "x.safetensors", {"norm_out.linear.lora_A.weight": a, "norm_out.linear.lora_B.weight": b})
    [change] = open_adapter(path).deltas(net).values()
    assert mx.array_equal(change.a, a) and mx.array_equal(change.b, mx.concatenate([b[64:], b[:64]]))


# ---------------------------------------------------------------- once


def test_a_file_is_read_once_and_hashed_as_it_was_read(net, right, tmp_path):
    """What the adapter is afterwards does not depend on the file, which may be replaced."""
    path = write(tmp_path / "x.safetensors", right)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    adapter = open_adapter(path)
    path.write_bytes(b"gone")
    assert adapter.sha256 == digest and adapter.nbytes == sum(a.nbytes for a in right.values())
    assert set(adapter.deltas(net)) == {p for p in linear_layers(net) if "_blocks." in p}


def test_a_whole_model_is_refused_before_it_is_read(net, right, tmp_path, monkeypatch):
    """It may have 16 GB; its header says what it is."""
    path = write(tmp_path / "model.safetensors", {"double_blocks.0.img_attn.qkv.weight": mx.ones((2, 2))})
    monkeypatch.setattr(mx, "load", None)
    refused(path, "whole weights, not an adapter")


def test_checked_by_shapes_alone(net, right, tmp_path, monkeypatch):
    """A DoRA's lengths need the weights; whether it fits does not, and nothing is built for it."""
    path = write(tmp_path / "x.safetensors", right | {f"{L2}.dora_scale": mx.ones((64,))})
    adapter = open_adapter(path)
    for kind in ("LoRA", "DoRA"):
        monkeypatch.setattr(f"kleinlite.models.adapters.file.{kind}", None)
    adapter.check(net.cfg)
    assert adapter.kind == "DoRA and LoRA"
    with pytest.raises(ValueError, match="and the matrix here is 3072 × 12288"):
        adapter.check(TransformerConfig())


@pytest.mark.parametrize(
    "tensors, kind, shape, rank",
    [
        ({"lora_A.weight": (3, 8), "lora_B.weight": (6, 3)}, "LoRA", (6, 8), 3),
        ({"lora_A.weight": (3, 8), "lora_B.weight": (6, 3), "dora_scale": (1, 8)}, "DoRA", (6, 8), 3),
        ({"hada_w1_a": (6, 2), "hada_w1_b": (2, 8), "hada_w2_a": (6, 3), "hada_w2_b": (3, 8)}, "LoHa", (6, 8), 3),
        ({"lokr_w1": (2, 2), "lokr_w2_a": (3, 5), "lokr_w2_b": (5, 4)}, "LoKr", (6, 8), 5),
        ({"lokr_w1": (2, 2), "lokr_w2": (3, 4)}, "LoKr", (6, 8), None),
    ],
)
def test_the_four_kinds(tmp_path, tensors, kind, shape, rank):
    arrays = {f"single_blocks.0.linear2.{name}": mx.ones(size) for name, size in tensors.items()}
    [module] = open_adapter(write(tmp_path / "x.safetensors", arrays)).modules.values()
    assert (module.kind, module.shape, module.rank) == (kind, shape, rank)


@pytest.mark.parametrize(
    "tensors",
    [
        {"lora_A.weight": (3, 8), "lora_B.weight": (6, 3), "dora_scale": (5,)},
        {"hada_w1_a": (6, 2), "hada_w1_b": (2, 8), "hada_w2_a": (6, 3), "hada_w2_b": (3, 7)},
        {"lora_A.weight": (), "lora_B.weight": (6, 3)},
        {"lora_A.weight": (1, 3, 8), "lora_B.weight": (6, 3)},
        {"lokr_w1": (2,), "lokr_w2": (3, 4)},
        {"lokr_w1": (1,) * 1000, "lokr_w2": (3, 4)},
    ],
)
def test_tensors_that_do_not_fit_each_other_are_refused_when_the_file_is_opened(tmp_path, tensors):
    """So that `kleinlite info`, which knows no model, refuses them as well."""
    arrays = {f"single_blocks.0.linear2.{name}": mx.ones(size) for name, size in tensors.items()}
    refused(write(tmp_path / "x.safetensors", arrays), "single_blocks.0.linear2 is tensors that do not go together")


# ---------------------------------------------------------------- every tensor has one place


@pytest.mark.parametrize(
    "more, told",
    [
        ({f"{L2}.lora_B.bias": (64,)}, "lora_B.bias"),
        ({f"{L2}.lora_A.alpha": ()}, "lora_A"),
        ({f"{L2}.lora_B.scale": ()}, "lora_B.scale"),
        ({f"{L2}.lora_A.dog.weight": (2, 256), f"{L2}.lora_B.dog.weight": (64, 2)}, "two tensors for one place"),
        ({f"{L2}.lora_down.weight": (2, 256), f"{L2}.lora_up.weight": (64, 2)}, "two tensors for one place"),
        ({f"{L2}.lora_A": (2, 256)}, "two tensors for one place"),
        ({f"{L2}.dora_scale": (64, 1), f"{L2}.lora_magnitude_vector": (64,)}, "two tensors for one place"),
    ],
)
def test_two_tensors_for_one_place(right, tmp_path, more, told):
    refused(write(tmp_path / "x.safetensors", right | {name: mx.ones(shape) for name, shape in more.items()}), told)


def test_two_adapters_in_one_file(right, tmp_path):
    """Of different matrices, too: they would act together."""
    words = ["cat" if name.startswith(Q) else "dog" for name in right]
    both = {name.replace(".weight", f".{word}.weight"): w for (name, w), word in zip(right.items(), words)}
    refused(write(tmp_path / "x.safetensors", both), "holds several adapters (cat, dog): save one of them alone.")
    alone = {name.replace(".weight", ".default.weight"): w for name, w in right.items()}
    assert open_adapter(write(tmp_path / "x.safetensors", alone)).modules.keys() == {n[:-14] for n in right}


# ---------------------------------------------------------------- what is said of the strength


def peft_folder(folder: Path, arrays: dict, **words: object) -> Path:
    """As PEFT's save_pretrained leaves it."""
    folder.mkdir()
    write(
        folder / "adapter_model.safetensors",
        {n.replace("transformer.", "base_model.model.", 1): w for n, w in arrays.items()},
    )
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "use_rslora": False, "alpha_pattern": {}, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(said | {"init_lora_weights": True} | words))
    return folder


@pytest.mark.parametrize(
    "words, factor",
    [
        ({}, 4.0),
        ({"use_rslora": True}, 8 / 2**0.5),
        ({"lora_alpha": 1}, 0.5),
        ({"alpha_pattern": {"to_out": 2}}, 1.0),
        ({"peft_type": "LOHA", "lora_alpha": None, "alpha": 6}, 3.0),
        ({"r": 16, "rank_pattern": {"attn.to_out": 4}}, 2.0),
    ],
)
def test_a_folder_of_peft(net, right, tmp_path, words, factor):
    folder = peft_folder(tmp_path / "style", right, **words)
    for place in (folder, folder / "adapter_model.safetensors"):
        assert open_adapter(place).scaling(L2.replace("transformer.", "base_model.model.", 1)) == pytest.approx(factor)
    assert open_adapter(folder).name == "style" and open_adapter(folder).deltas(net)
    path = write(folder / "other.safetensors", right)
    assert open_adapter(path).scaling(L2) == 1, "the words are of the one file"


@pytest.mark.parametrize(
    "words, factor",
    [
        ({}, 8 / 64),
        ({"rank_pattern": {"attn.to_out": 4}}, 2.0),
        ({"alpha_pattern": {"^single_transformer_blocks.1.attn.to_out": 1}}, 1 / 64),
    ],
)
def test_pefts_rank_is_what_its_config_says(net, tmp_path, words, factor):
    """Of a LoKr with whole factors too, whose shapes do not tell it: `get_delta_weight` of PEFT 0.21.2."""
    whole = {f"{L2}.lokr_w1": mx.ones((4, 4)), f"{L2}.lokr_w2": mx.ones((16, 48))}
    config = {"peft_type": "LOKR", "r": 64, "lora_alpha": None, "alpha": 8}
    folder = peft_folder(tmp_path / "style", whole, **config | words)
    module = L2.replace("transformer.", "base_model.model.", 1)
    assert open_adapter(folder).scaling(module) == pytest.approx(factor)
    said = {"lora_adapter_metadata": json.dumps(config | words)}
    assert open_adapter(write(tmp_path / "x.safetensors", whole, said)).scaling(L2) == pytest.approx(factor)


@pytest.mark.parametrize(
    "word", [{"r": 0}, {"r": "16"}, {"r": 1.5}, {"rank_pattern": {"(": 1}}, {"rank_pattern": {"x": -1}}]
)
def test_a_rank_that_is_none(right, tmp_path, word):
    refused(peft_folder(tmp_path / "style", right, **word), "adapter_config.json says is damaged")


def test_a_word_of_pefts_that_nobody_knows_is_said(right, tmp_path, caplog):
    folder = peft_folder(tmp_path / "style", right, use_dora=False, target_modules=["to_out"], peft_version="0.21.2")
    open_adapter(folder)
    assert caplog.messages == []
    config = folder / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"new_in_2027": 3}))
    open_adapter(folder)
    [message] = caplog.messages
    assert "new_in_2027" in message
    open_adapter(write(tmp_path / "x.safetensors", right, {"of_a_trainer": '{"lora_alpha": 8, "its_own": 3}'}))
    assert caplog.messages == [message], "another program's words are its own"


@pytest.mark.parametrize(
    "words",
    [
        {"init_lora_weights": "pissa"}, {"use_qalora": True}, {"peft_type": "VERA"}, {"bias": "all"},
        {"fan_in_fan_out": True}, {"target_parameters": ["x"]},
    ],
)  # fmt: skip
def test_words_of_peft_that_are_not_computed(right, tmp_path, words):
    [(word, value)] = words.items()
    refused(peft_folder(tmp_path / "style", right, **words), f"{word} is {value!r}")


def test_a_folder_without_an_adapter(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no adapter_model.safetensors in the folder"):
        open_adapter(tmp_path)


@pytest.mark.parametrize(
    "said, factor",
    [
        ({"lora_alpha": "8"}, 4.0),
        ({"network_alpha": "8.0"}, 4.0),
        ({"alpha": "8"}, 4.0),
        ({"networkAlpha": "8"}, 4.0),
        ({"lora.alpha": "8"}, 4.0),
        ({"ss_network_alpha": "8.0", "ss_network_dim": "2"}, 4.0),
        ({"alpha": "8", "lora_alpha": "8.0"}, 4.0),
        ({"ss_network_alpha": "None"}, 1.0),
        ({"conv_alpha": "8"}, 1.0),
        ({"adapter_config": '{"lora_alpha": 8, "use_rslora": true}'}, 8 / 2**0.5),
    ],
)
def test_alpha_in_plain_words_of_the_header(right, tmp_path, said, factor):
    assert open_adapter(write(tmp_path / "x.safetensors", right, said)).scaling(L2) == pytest.approx(factor)


@pytest.mark.parametrize("said", [{"alpha": "much"}, {"alpha": "8", "network_alpha": "4"}, {"lora_alpha": "nan"}])
def test_an_alpha_that_is_no_number_or_two(right, tmp_path, said):
    refused(write(tmp_path / "x.safetensors", right, said), "what its header says of alpha is damaged")


def test_what_musubis_converter_has_counted_already(right, tmp_path):
    """It keeps the header of the file that it reads, and puts √(alpha / r) into both matrices."""
    arrays = {name.replace("transformer.", "diffusion_model.", 1): w for name, w in right.items()}
    adapter = open_adapter(write(tmp_path / "x.safetensors", arrays, {"ss_network_alpha": "1", "ss_network_dim": "2"}))
    assert adapter.scaling(L2.replace("transformer.", "diffusion_model.", 1)) == 1


def test_pefts_own_words_come_before_others(right, tmp_path):
    """A trainer's settings may name an alpha, too, and headers have no order."""
    said = {"lora_adapter_metadata": json.dumps({"transformer.r": 2, "transformer.lora_alpha": 8})}
    for other in ("config", "training_config", "zz"):
        path = write(tmp_path / "x.safetensors", right, said | {other: json.dumps({"network": {"lora_alpha": 2}})})
        assert open_adapter(path).scaling(L2) == 4


def test_an_adapter_in_gguf(net, right, tmp_path):
    words = {"general.architecture": "lora", "adapter.lora.alpha": mx.array(8.0)}
    mx.save_gguf(str(tmp_path / "x.gguf"), right, words)
    adapter = open_adapter(tmp_path / "x.gguf")
    assert adapter.scaling(L2) == 4 and looks_like_weights(tmp_path / "x.gguf")
    plain = open_adapter(write(tmp_path / "x.safetensors", right))
    for module, tensors in plain.modules.items():
        assert all(mx.array_equal(adapter.modules[module].arrays[kind], w) for kind, w in tensors.arrays.items())


# ---------------------------------------------------------------- files from strangers


def refused(path: Path, *words: str) -> None:
    """The file is refused in a short sentence that has these words."""
    with pytest.raises(UserError) as error:
        adapter = open_adapter(path)
        describe_adapter(adapter)
    said = str(error.value)
    assert one_sentence(error.value) and len(said) < 300 + len(str(path)), said
    assert all(word in said for word in words), said


def write_raw(path: Path, arrays: dict, raw: dict[str, tuple[str, list[int], int]]) -> Path:
    """A file with these arrays, and tensors of zeros as (type, shape, bytes), in types that MLX may not know."""
    content = {name: ("F32", list(w.shape), bytes(memoryview(w.astype(mx.float32)))) for name, w in arrays.items()}
    content |= {name: (kind, shape, bytes(size)) for name, (kind, shape, size) in raw.items()}
    header = {}
    end = 0
    for name, (kind, shape, data) in content.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for *_, data in content.values()))
    return path


@pytest.mark.parametrize("kind, size", [("F64", 8), ("F8_E5M2", 1), ("C64", 8), ("BOOL", 1), ("U8", 1), ("F8_E4M3", 1)])
def test_types_that_are_no_real_numbers(right, tmp_path, kind, size):
    name = f"{Q}.lora_A.weight"
    shape = list(right[name].shape)
    path = write_raw(tmp_path / "x.safetensors", right, {name: (kind, shape, size * math.prod(shape))})
    refused(path, f"the type {kind}", "save it in bfloat16 or float16")


@pytest.mark.parametrize("kind, size", [("I64", 8), ("I32", 4), ("F32", 4)])
def test_alpha_may_be_a_whole_number(right, tmp_path, kind, size):
    path = write_raw(tmp_path / "x.safetensors", right, {f"{Q}.alpha": (kind, [], size)})
    assert open_adapter(path).scaling(Q) == 0


@pytest.mark.parametrize("name", ["style.lora", "style", "style.bin", "style.safetensors.part"])
def test_a_file_is_read_by_its_content(net, right, tmp_path, name):
    path = write(tmp_path / "style.safetensors", right).rename(tmp_path / name)
    assert open_adapter(path).deltas(net)
    path.write_bytes(b"GGUF\3" + bytes(19))
    refused(path, "holds nothing of an adapter")


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "said",
    [
        DEEP,
        '{"lora_alpha": 1' + 400 * "0" + "}",
        '{"lora_alpha": true}',
        '{"lora_alpha": ""}',
        '{"lora_alpha": []}',
        '{"alpha_pattern": {"(([a-z_.0-9])+)+!": 4}}',  # it would not end
        '{"alpha_pattern": {"to_[qkv]": 4}}',
        json.dumps({"alpha_pattern": {"(" * 3000: 4}}),
    ],
)
def test_words_of_a_header_that_could_do_harm(right, tmp_path, said):
    path = write(tmp_path / "x.safetensors", right, {"lora_adapter_metadata": said})
    refused(path, "what its header says (lora_adapter_metadata) is damaged")


@pytest.mark.parametrize("said", [DEEP, "{", "[]", '{"model": ["x"]}', '{"model": 3}', '{"model": ""}'])
def test_where_it_was_trained_is_not_needed(right, tmp_path, said):
    path = write(tmp_path / "x.safetensors", right, {"kleinlite": said})
    assert describe_adapter(open_adapter(path))["trained on"] == "not said"


def test_what_is_told_of_a_file_is_short(right, tmp_path):
    path = write(tmp_path / "x.safetensors", right, {"kleinlite": json.dumps({"model": "a\x1b[2J" * 10_000})})
    told = describe_adapter(open_adapter(path))
    assert len(told["trained on"]) < 300 and told["trained on"].isprintable()


@pytest.mark.parametrize(
    "patterns, alpha",
    [
        ({"attn.to_out": 2}, 2),
        ({"to_out": 2}, 2),
        ({"o_out": 2}, 8),  # the end of a word is no name
        ({"attn_to_out": 2}, 8),
        ({"^attn.to_out": 2}, 8),  # the whole name
        ({"^single_transformer_blocks.1.attn.to_out": 2}, 2),
        ({"to_out": 2, "attn.to_out": 3}, 2),  # the first
        ({"attn.to_out": 3, "to_out": 2}, 3),
    ],
)
def test_names_in_a_pattern_mean_what_peft_means(right, tmp_path, patterns, alpha):
    said = {"lora_adapter_metadata": json.dumps({"lora_alpha": 8, "alpha_pattern": patterns})}
    adapter = open_adapter(write(tmp_path / "x.safetensors", right, said))
    assert adapter.scaling(L2) * 2 == alpha


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "none/" * 1000, "."])
def test_names_that_no_file_has(name):
    with pytest.raises(FileNotFoundError, match="There is no file") as error:
        open_adapter(name)
    assert len(str(error.value)) < 300


# ---------------------------------------------------------------- the last modulation, whose halves change places


@pytest.mark.parametrize("layout", ["diffusers", "comfy"])
def test_the_last_modulation_is_written_and_read_again(net, tmp_path, layout):
    """diffusers has its halves the other way round; ComfyUI's names have ours."""
    b = mx.random.normal((128, 2), key=mx.random.key(2))
    change = LoRA(mx.random.normal((2, 64), key=mx.random.key(1)), b)
    path = tmp_path / "x.safetensors"
    write_adapter(path, {"final_layer.adaLN_modulation.1": change}, layout=layout, dtype=mx.float32)
    [written] = [w for name, w in mx.load(str(path)).items() if "lora_B" in name]
    assert mx.array_equal(written, mx.concatenate([b[64:], b[:64]]) if layout == "diffusers" else b)
    [again] = open_adapter(path).deltas(net).values()
    assert mx.array_equal(again.b, b) and mx.array_equal(again.a, change.a)


@pytest.mark.parametrize(
    "shapes",
    [
        {"lokr_w1": (4, 8), "lokr_w2": (32, 8)},
        {"lokr_w1_a": (4, 3), "lokr_w1_b": (3, 8), "lokr_w2": (32, 8)},
        {"lokr_w1": (4, 8), "lokr_w2_a": (32, 3), "lokr_w2_b": (3, 8)},
        {"lokr_w1": (1, 8), "lokr_w2": (128, 8)},  # an odd number of blocks has no halves
        {"lokr_w1": (1, 8), "lokr_w2_a": (128, 3), "lokr_w2_b": (3, 8)},
        {"hada_w1_a": (128, 2), "hada_w1_b": (2, 64), "hada_w2_a": (128, 2), "hada_w2_b": (2, 64)},
    ],
)
def test_the_halves_of_other_kinds(net, tmp_path, shapes):
    """LoKr's rows are blocks of its first factor; the same file for ours, whose halves stay, tells what is right."""
    keys = mx.random.split(mx.random.key(5), len(shapes))
    arrays = {name: mx.random.normal(shape, key=key) for (name, shape), key in zip(shapes.items(), keys)}
    deltas = []
    for module in ("norm_out.linear", "final_layer.adaLN_modulation.1"):
        path = write(tmp_path / "x.safetensors", {f"{module}.{name}": w for name, w in arrays.items()})
        [delta] = open_adapter(path).deltas(net).values()
        deltas.append(delta.delta(mx.zeros((128, 64))))
    swapped, plain = deltas
    assert mx.allclose(swapped, mx.concatenate([plain[64:], plain[:64]]), atol=1e-5)
    assert not mx.allclose(swapped, plain, atol=0.1)


def test_the_models_own_family_is_asked_first(monkeypatch):
    """Or adding an adapter to nano would build the skeletons of all families."""
    asked = []

    def note(module, family):
        asked.append(family)
        return find_target(module, family)

    monkeypatch.setattr("kleinlite.models.adapters.names.find_target", note)
    assert open_adapter("cross").family is KLEIN and set(asked) == {KLEIN}
    asked.clear()
    assert open_adapter("cross", Z_IMAGE).family is KLEIN and asked[0] is Z_IMAGE
