"""FLUX 3 Image Klein against diffusers, block by block and whole.

The models in `pipelines/flux3` (distilled) and `pipelines/flux3/base` are always there; more runs are checked too where
they are: `KLEINLITE_GOLDEN=folder`, by default `../shared/golden` beside the repository.
"""

import json
import os
import shutil
from collections import Counter
from functools import cache
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from golden_tools import LOOSE, check, nchw, nhwc
from mlx.utils import tree_flatten, tree_unflatten
from PIL import Image
from tokenizers import Tokenizer

from kleinlite.autoencoder import Autoencoder, AutoencoderConfig
from kleinlite.checkpoints import match, rename, swap_halves
from kleinlite.cli import main
from kleinlite.errors import UserError
from kleinlite.flux3 import (
    Flux3Config,
    Flux3Transformer,
    ParallelBlock,
    canvas_size,
    encode_window,
    fill_canvas,
    flux3_velocity_field,
    mode_ids,
)
from kleinlite.inference.machine_memory import plan_model
from kleinlite.inference.picture_file import picture_info
from kleinlite.klein import Klein
from kleinlite.models.adapters import open_adapter
from kleinlite.models.adapters.names import list_targets, matrix_shapes
from kleinlite.models.export import quantize_model
from kleinlite.models.facts import find_facts
from kleinlite.models.families.flux3 import FLUX3, FLUX3_NAMES, count_window
from kleinlite.models.families.klein import AUTOENCODER_NAMES
from kleinlite.models.families.qwen3 import TEXT_ENCODER_NAMES
from kleinlite.pipeline import prepare_reference, to_pixels
from kleinlite.position_ids import apply_rope, rope_table
from kleinlite.text_encoder import TextEncoder, TextEncoderConfig
from kleinlite.transformer import Mod, SingleBlock, modulate
from kleinlite.z_image import static_schedule

HERE = Path(__file__).parent
MODEL = HERE / "pipelines" / "flux3"
ELSEWHERE = Path(os.environ.get("KLEINLITE_GOLDEN", HERE.parent.parent / "shared" / "golden")) / "tiny-flux3"
TINY = {"mode_blocks": 2, "single_blocks": 3, "heads": 2, "axes": (4, 4, 4, 4), "d_text": 128}
MODES = "txt", "image", "image_cond"


def filled(module: nn.Module, arrays: dict[str, mx.array], rules: list) -> nn.Module:
    """The module with these weights: none missing, none left over."""
    module.update(tree_unflatten(list(match(module, arrays, rules).items())))
    return module.eval()


@cache
def transformer(kind: str = "") -> Flux3Transformer:
    arrays = mx.load(str(MODEL / kind / "transformer" / "diffusion_pytorch_model.safetensors"))
    return filled(Flux3Transformer(Flux3Config(**TINY, flow_map=not kind)), arrays, FLUX3_NAMES)


@cache
def text_encoder() -> TextEncoder:
    cfg = TextEncoderConfig(
        vocab=359,
        d=16,
        d_mlp=48,
        layers=36,
        heads=4,
        kv_heads=2,
        head_dim=16,
        theta=5e6,
        out_layers=tuple(range(4, 33, 4)),
    )
    arrays = mx.load(str(MODEL / "text_encoder" / "model.safetensors"))
    language = {name.replace("language_model.", ""): w for name, w in arrays.items() if "visual" not in name}
    return filled(TextEncoder(cfg), language, TEXT_ENCODER_NAMES)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "text_encoder" / "tokenizer.json"))


@cache
def autoencoder() -> Autoencoder:
    arrays = mx.load(str(MODEL / "vae" / "diffusion_pytorch_model.safetensors"))
    arrays = {name: w for name, w in arrays.items() if not name.endswith("num_batches_tracked")}
    cfg = AutoencoderConfig(channels=(8, 16, 16, 16), groups=8)
    return filled(Autoencoder(cfg), arrays, AUTOENCODER_NAMES)


def encode(prompt: str) -> mx.array:
    return encode_window(text_encoder(), tokenizer(), prompt)


@cache
def blocks() -> dict[str, mx.array]:
    return mx.load(str(MODEL / "blocks.safetensors"))


class Reference:
    """Runs of diffusers, and what it made of them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        self.expected = mx.load(str(folder / "expected.safetensors"))

    def pictures(self, run: str) -> list[Image.Image]:
        return [Image.open(self.folder / f"ref_{i}.png").convert("RGB") for i in self.meta["runs"][run]["refs"]]


def levels(picture: Image.Image) -> mx.array:
    """(h, w, 3), from 0 to 255"""
    return mx.array(memoryview(picture.tobytes())).reshape(picture.height, picture.width, 3).astype(mx.float32)


@cache
def golden() -> Reference:
    return Reference(MODEL)


# ---------------------------------------------------------------- block by block, in the first step of the run `edit`


def ids() -> dict[str, mx.array]:
    return mode_ids(80, (5, 7), [(5, 7)])


def vec(mode: str) -> mx.array:
    net, (t, t_next) = transformer(), static_schedule(4, 6.93)[:2]
    return net.time_in(net.waves(t if mode == "image" else 0, mx.float32)) + net.ref_time_in(
        net.waves(t_next, mx.float32)
    )


def own_blocks(mode: str) -> list[ParallelBlock]:
    net = transformer()
    return net.txt_mode_blocks if mode == "txt" else net.content_mode_blocks[mode]


def test_positions_and_rope():
    joined = mx.concatenate(list(ids().values()))
    assert mx.array_equal(joined, blocks()["edit.ids"])
    for ours, name in zip(rope_table(joined, (4,) * 4, 10000.0), ("cos", "sin")):
        check(ours, blocks()[f"edit.{name}"], 1e-6)
    two = mode_ids(3, (1, 2), [(1, 1), (2, 1)])["image_cond"]
    assert two.tolist() == [[0, 0, 0, -1], [0, 0, 0, -2], [0, 0.5, 0, -2]]
    assert "image_cond" not in mode_ids(3, (1, 2))


def test_time():
    net, (t, t_next) = transformer(), static_schedule(4, 6.93)[:2]
    check(net.time_in(net.waves(t, mx.float32)), blocks()["edit.time.out"], LOOSE)
    check(net.ref_time_in(net.waves(t_next, mx.float32)), blocks()["edit.target_time.out"], LOOSE)
    assert net.waves(mx.array([0.1, 0.2]), mx.float32).shape == (2, 256)


@pytest.mark.parametrize("mode", MODES)
def test_modulations(mode):
    for ours, theirs in (("early", "early_mod"), ("single", "single_mod")):
        (mod,) = transformer()[f"{ours}_stream_modulations"][mode](vec(mode))
        check(mx.concatenate(mod, axis=-1), blocks()[f"edit.{theirs}.{mode}.out"], LOOSE)


def test_inputs():
    net, expected = transformer(), golden().expected
    check(net.txt_in(encode("make the circle blue")), blocks()["edit.txt_in.out"])
    check(net.emb_in["image"](expected["edit.noise"]), blocks()["edit.emb_in.image.out"])
    check(net.emb_in["image_cond"](expected["edit.references"]), blocks()["edit.emb_in.image_cond.out"])


@pytest.mark.parametrize("mode", MODES)
def test_blocks_of_a_mode(mode):
    x = blocks()["edit.txt_in.out" if mode == "txt" else f"edit.emb_in.{mode}.out"]
    mod = transformer().early_stream_modulations[mode](vec(mode))
    for i, block in enumerate(own_blocks(mode)):
        x = block(x, *mod, rope_table(ids()[mode], (4,) * 4, 10000.0))
        check(x, blocks()[f"edit.{mode}_block{i}.out"], LOOSE)


def test_joint_blocks_and_last_norm():
    net, sizes = transformer(), {"txt": 80, "image": 35, "image_cond": 35}
    x = mx.concatenate([blocks()[f"edit.{mode}_block1.out"] for mode in MODES], axis=1)
    mods = [[mx.repeat(part, sizes[mode], axis=1) for part in net.single_stream_modulations[mode](vec(mode))[0]]
            for mode in MODES]  # fmt: skip
    mod = Mod(*(mx.concatenate(parts, axis=1) for parts in zip(*mods)))
    for i, block in enumerate(net.single_blocks):
        x = block(x, mod, rope_table(mx.concatenate(list(ids().values())), (4,) * 4, 10000.0))
        check(x, blocks()[f"edit.joint_block{i}.out"], LOOSE)
    last = net.final_layer["image"]
    shift, scale = mx.split(last.adaLN_modulation[1](nn.silu(vec("image")))[:, None], 2, axis=-1)
    check(modulate(x[:, 80:115], shift, scale), blocks()["edit.norm_out.out"], LOOSE)
    check(last.linear(blocks()["edit.norm_out.out"]), golden().expected["edit.velocity"], LOOSE)


def test_small_activations():
    """The epsilons of the layer norm (rows 0 to 9) and of the norms on queries and keys (the others) show here."""
    net, v = transformer(), {name[6:]: w for name, w in blocks().items() if name.startswith("small.")}
    mod, rope = Mod(*mx.split(v["mod"], 3, axis=-1)), (v["cos"], v["sin"])
    for name, block in (("mode_block", net.content_mode_blocks["image"][0]), ("joint_block", net.single_blocks[0])):
        ours = block(v["x"], mod, rope)
        for rows in (slice(0, 10), slice(10, 20)):
            check(ours[:, rows], v[name][:, rows], LOOSE)
    last = net.final_layer["image"]
    shift, scale = mx.split(last.adaLN_modulation[1](nn.silu(v["temb"])), 2, axis=-1)
    check(modulate(v["x"][:, :10], shift, scale), v["norm_out"], LOOSE)


def test_the_block_is_the_single_block():
    """FLUX.2's block with the same weights, rows stacked in its first matrix and columns joined in its second."""
    block, single = transformer().single_blocks[0], SingleBlock(Flux3Config(**TINY))
    first = [block[name].weight for name in ("q_proj", "k_proj", "v_proj", "mlp_in")]
    single.linear1.weight = mx.concatenate(first)
    single.linear2.weight = mx.concatenate([block.attn_out.weight, block.mlp_out.weight], axis=1)
    single.norm = block.norm
    x, *vectors = mx.random.normal((4, 2, 6, 32), key=mx.random.key(0))
    mod = Mod(*vectors)
    rope = rope_table(mode_ids(0, (2, 3))["image"], (4,) * 4, 10000.0)
    check(block(x, mod, rope), single(x, mod, rope))


def test_bfloat16_rounds_queries_and_keys_once(monkeypatch):
    """Norm and rotation in float32, one cast at the end: most values differ in a bit where one is cast in between."""
    block, taken = ParallelBlock(Flux3Config(**TINY)), []
    block.set_dtype(mx.bfloat16)
    x, *vectors = mx.random.normal((4, 1, 60, 32), key=mx.random.key(1)).astype(mx.bfloat16)
    mod = Mod(*vectors)
    rope = rope_table(mode_ids(0, (6, 10))["image"], (4,) * 4, 10000.0)

    def attention(q, k, v, scale):
        taken.extend([q, k, v])
        return v

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", attention)
    assert block(x, mod, rope).dtype == mx.bfloat16 and all(y.dtype == mx.bfloat16 for y in taken)
    for matrix, given in ((block.q_proj, taken[0]), (block.k_proj, taken[1])):
        y = matrix(modulate(x, mod.shift, mod.scale)).reshape(1, 60, 2, 16).swapaxes(1, 2).astype(mx.float32)
        y = y * mx.rsqrt(mx.square(y).mean(axis=-1, keepdims=True) + 1e-6)
        assert (given == apply_rope(y, rope).astype(mx.bfloat16)).mean().item() > 0.995


def test_bfloat16_rounds_the_time_first():
    """As the makers carry it: 990.5 becomes 992.2 before it is made waves. In float32 nothing is rounded."""
    net, t = transformer(), static_schedule(16, 6.93)[1]
    for time in (t, mx.array([t])):
        assert mx.array_equal(net.waves(time, mx.bfloat16), net.waves(0.9921875, mx.bfloat16))
    assert not mx.allclose(net.waves(t, mx.float32), net.waves(0.9921875, mx.float32), atol=0.5)


# ---------------------------------------------------------------- the steps of a run


@pytest.mark.parametrize("i", [0, 3])
def test_features(i):
    check(encode(golden().meta["prompts"][i]), golden().expected[f"prompt{i}.embeds"])


def test_windows():
    assert [encode(n * "a ").shape[1] for n in (0, 61, 62, 63)] == [80, 80, 80, 160]
    assert encode(62 * "a ").shape == (1, 80, 128)
    with pytest.raises(ValueError, match="reads 20: shorten"):
        encode_window(text_encoder(), tokenizer(), 40 * "a ", most=20)


def test_the_last_window_ends_where_the_model_ends():
    """4,096 is no multiple of 80; here the model reads 100 tokens, and the prompt has 81."""
    wide = encode(63 * "a ")
    cut = encode_window(text_encoder(), tokenizer(), 63 * "a ", most=100)
    assert cut.shape[1] == 100 == count_window(93 * "a", 100) and mx.array_equal(cut, wide[:, :100])


def test_schedule():
    sigmas = static_schedule(16, 6.93)
    assert sigmas[1:4] == pytest.approx([0.9904717, 0.9797998, 0.9677731], abs=3e-5) and sigmas[-1] == 0
    assert sigmas[::2] == pytest.approx(static_schedule(8, 6.93))  # one schedule lies in the other


def test_the_flow_map_takes_any_pair_of_times():
    txt, x = encode(golden().meta["prompts"][0]), golden().expected["t2i.noise"]
    field = flux3_velocity_field(transformer(), [txt], (4, 6))
    for (t, t_next), v in zip(blocks()["map.times"].tolist(), blocks()["map.velocity"]):
        check(field(x, t, t_next)[0], v, LOOSE)


def test_canvases():
    for size, sizes in golden().meta["canvas"].items():
        width, height = map(int, size.split("x"))
        assert canvas_size(width, height) == (tuple(sizes["fit"]), tuple(sizes["canvas"]))


@pytest.mark.parametrize("i", range(3))
def test_references(i):
    picture, expected = Image.open(MODEL / f"ref_{i}.png"), golden().expected
    alone, box = fill_canvas(picture)
    assert (
        mx.array_equal(levels(alone), expected[f"ref{i}.fill"])
        and list(box) == golden().meta["prepared"][f"ref{i}.fill"]
    )
    if f"ref{i}.crop" in expected:
        assert mx.array_equal(levels(prepare_reference(picture)), expected[f"ref{i}.crop"])


@pytest.mark.parametrize("side", [1, 2, 15, 16, 17, 40])
def test_reflection(side):
    """As numpy pads: a side of at most 16 repeats its last pixel, and is mirrored as often as it takes."""
    np = pytest.importorskip("numpy")
    picture = Image.frombytes("RGB", (side, 50), bytes((7 * i) % 251 for i in range(side * 50 * 3)))
    filled_picture, (left, top, right, bottom) = fill_canvas(picture)
    w, h = filled_picture.size
    pads = [(top, h - bottom), (left, w - right), (0, 0)]
    wanted = np.pad(np.asarray(picture), pads, mode="symmetric" if side <= 16 else "reflect")
    assert (np.asarray(filled_picture) == wanted).all()
    assert filled_picture.crop((left, top, right, bottom)).tobytes() == picture.tobytes()


def test_autoencoder():
    expected = golden().expected
    pixels = to_pixels(Image.open(MODEL / "ref_0.png"))
    mean, _ = mx.split(autoencoder().encoder(pixels), 2, axis=-1)
    check(nchw(mean), expected["vae.latent_mean"])
    check(nchw(autoencoder().encode(pixels)), expected["vae.packed"])
    check(nchw(autoencoder().decode(nhwc(expected["vae.packed"]))), expected["vae.decoded"])


def test_a_batch_is_its_pictures():
    x, prompts = mx.random.normal((2, 24, 128), key=mx.random.key(0)), ["a star", 90 * "a "]  # 80 and 160 rows
    txt = [encode(prompt) for prompt in prompts]
    both = flux3_velocity_field(transformer(), txt, (4, 6))(x, 0.9, 0.5)
    for i in range(2):
        alone = flux3_velocity_field(transformer(), txt[i : i + 1], (4, 6))(x[i : i + 1], 0.9, 0.5)
        check(both[i : i + 1], alone)
    own = transformer()(x[:1], txt[0], None, mx.array([0.9]), mx.array([0.5]), mode_ids(80, (4, 6)))
    check(both[:1], own)  # times may be arrays, one for each picture


def test_bfloat16_stays_close():
    """To float32 at the same times, 1 and the next level as bfloat16 rounds it."""
    expected, net = golden().expected, Flux3Transformer(Flux3Config(**TINY))
    net.update(transformer().parameters())
    net.set_dtype(mx.bfloat16)
    txt = encode("make the circle blue").astype(mx.bfloat16)
    references = [expected["edit.references"].reshape(1, 5, 7, 128)]
    field = flux3_velocity_field(net, [txt], (5, 7), references)
    v = field(expected["edit.noise"], *static_schedule(4, 6.93)[:2])  # latents and references are cast
    assert v.dtype == mx.bfloat16
    exact = flux3_velocity_field(transformer(), [encode("make the circle blue")], (5, 7), references)
    check(v, exact(expected["edit.noise"], 1.0, 0.953125), 0.05)


# ---------------------------------------------------------------- files


def released_names(flow_map: bool) -> dict[str, tuple[int, ...]]:
    """The released folder's tensors, by the table of the reference, with their shapes."""
    d, shapes = 3072, {"context_embedder.weight": (3072, 20480), "proj_out.weight": (128, 3072)}
    shapes["norm_out.linear.weight"] = (2 * d, d)
    for mode in MODES:
        shapes |= {f"{kind}_stream_modulations.{mode}.linear.weight": (3 * d, d) for kind in ("early", "single")}
    shapes |= {f"x_embedders.{mode}.weight": (d, 128) for mode in MODES[1:]}
    for name in ("timestep_embedder", "target_timestep_embedder")[: 1 + flow_map]:
        shapes |= {f"{name}.linear_1.weight": (d, 256), f"{name}.linear_2.weight": (d, d)}
    kinds = {"mode_blocks.image": 5, "mode_blocks.image_cond": 5, "txt_mode_blocks": 5, "single_transformer_blocks": 28}
    for place in (f"{kind}.{i}." for kind, count in kinds.items() for i in range(count)):
        shapes |= {f"{place}attn.{name}.weight": (d, d) for name in ("to_q", "to_k", "to_v", "to_out.0")}
        shapes |= {f"{place}attn.norm_{x}.weight": (128,) for x in "qk"}
        shapes |= {f"{place}ff.linear_in.weight": (6 * d, d), f"{place}ff.linear_out.weight": (d, 3 * d)}
    return shapes


@pytest.mark.parametrize(("flow_map", "count", "size"), [(True, 359, 5_548_681_984), (False, 357, 5_538_458_368)])
def test_every_released_tensor_has_its_place(flow_map, count, size):
    names, module = (
        released_names(flow_map),
        Flux3Transformer(Flux3Config(flow_map=flow_map)),
    )  # lazy: nothing is computed
    placed = match(module, {name: mx.zeros(shape) for name, shape in names.items()}, FLUX3_NAMES)
    assert len(names) == len(placed) == count and sum(w.size for w in placed.values()) == size
    used = Counter(source for name in placed for source in rename(name, FLUX3_NAMES))
    assert used == Counter(list(names))


def test_the_authors_names_are_ours():
    if not ELSEWHERE.is_dir():
        pytest.skip("needs the larger golden pipelines: set KLEINLITE_GOLDEN to the folder that holds them")
    arrays, ours = mx.load(str(ELSEWHERE / "single.safetensors")), dict(tree_flatten(transformer().parameters()))
    assert arrays.keys() == ours.keys() and all(mx.array_equal(w, ours[name]) for name, w in arrays.items())


# ---------------------------------------------------------------- as a model


@cache
def klein(kind: str = "") -> Klein:
    return Klein.from_pretrained(MODEL / kind, dtype=mx.float32)


def arguments(reference: Reference, run: str, distilled: bool) -> dict:
    """A run of diffusers as a call of ours."""
    wish = reference.meta["runs"][run]
    call = {name: wish[name] for name in ("prompt", "steps")} | {"noise": reference.expected[f"{run}.noise"]}
    call |= {name: wish[name] for name in ("width", "height") if wish[name]} | {"progress": False}
    call |= {"images": reference.pictures(run)}
    return call if distilled else call | {"guidance": wish["guidance"], "negative_prompt": wish["negative"] or ""}


def check_run(model: Klein, reference: Reference, run: str, tolerance: float = LOOSE, levels_off: float = 1.01) -> None:
    """Every step, and the picture."""
    call = arguments(reference, run, model.info.distilled)
    steps = list(model.stream(**call))
    check(mx.concatenate([step.latents for step in steps]), reference.expected[f"{run}.trajectory"], tolerance)
    picture = model(**call)
    expected = reference.expected[f"{run}.image"].astype(mx.float32)
    assert mx.abs(levels(picture) - expected).max().item() <= levels_off
    assert steps[0].preview().size == picture.size


RUNS = ["t2i", "edit", "edit_padded", "edit_two_unsized"]
BASE_RUNS = ["base_negative", "base_edit"]
MORE_RUNS = ["t2i_default", "one_step", "long", "empty", "edit_small", "edit_sized", "edit_two", "base", "base_plain"]


@pytest.mark.parametrize("run", RUNS + BASE_RUNS)
def test_klein(run):
    check_run(klein("base" if run in BASE_RUNS else ""), golden(), run)


@cache
def elsewhere(name: str) -> Klein:
    return Klein.from_pretrained(ELSEWHERE / name, dtype=mx.float32)


@pytest.mark.parametrize("run", RUNS + BASE_RUNS + MORE_RUNS)
def test_klein_of_the_larger_golden(run):
    """Its tokenizers lie in two places and its configs are of transformers 4 and 5."""
    if not ELSEWHERE.is_dir():
        pytest.skip("needs the larger golden pipelines: set KLEINLITE_GOLDEN to the folder that holds them")
    reference = Reference(ELSEWHERE)
    check_run(elsewhere(reference.meta["runs"][run]["model"]), reference, run)


def test_what_the_files_say():
    info, base = klein().info, klein("base").info
    assert (info.distilled, info.steps, info.guidance) == (True, 16, 1.0)
    assert (base.distilled, base.steps, base.guidance) == (False, 50, 3.5)
    assert info.family.title == "FLUX 3 Image Klein" and info.max_length == 4096
    cfg = klein().parts.configs.text_encoder
    assert cfg.out_layers == tuple(range(4, 33, 4)) and cfg.theta == 5e6
    assert len(klein().text_encoder.layers) == 32  # of 36
    check(klein().encode_prompt(golden().meta["prompts"][0]), golden().expected["prompt0.embeds"])


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("kind", ["", "base"])
def test_a_single_file(kind, prefix, tmp_path):
    arrays = dict(tree_flatten(transformer(kind).parameters()))
    arrays = {f"{prefix}{name}": w for name, w in arrays.items()} | {
        f"{prefix}repa_projectors.0.weight": mx.ones((2, 2))
    }
    mx.save_safetensors(str(tmp_path / "x.safetensors"), arrays)
    model = Klein.from_pretrained(tmp_path / "x.safetensors", parts=MODEL, dtype=mx.float32)
    assert model.info.distilled == (not kind)
    run = "base_negative" if kind else "t2i"
    check_run(model, golden(), run)


def copy_model(
    out: Path, dtype: mx.Dtype = mx.float32, shards: int = 1, index: str = "modular_model_index.json"
) -> Path:
    shutil.copytree(MODEL, out, ignore=shutil.ignore_patterns("base", "*.png", "expected*", "blocks*"))
    (out / "modular_model_index.json").rename(out / index)
    for part in ("transformer", "text_encoder"):
        [path] = (out / part).glob("*.safetensors")
        arrays = {name: w.astype(dtype) for name, w in mx.load(str(path)).items()}
        mx.eval(arrays)
        path.unlink()
        places = {name: f"{path.stem}-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(arrays)}
        for file in set(places.values()):
            mx.save_safetensors(str(out / part / file), {n: w for n, w in arrays.items() if places[n] == file})
        (out / part / f"{path.name}.index.json").write_text(json.dumps({"weight_map": places}))
    return out


def test_shards_and_the_other_index(tmp_path):
    model = Klein.from_pretrained(copy_model(tmp_path / "m", shards=3, index="model_index.json"), dtype=mx.float32)
    check_run(model, golden(), "edit_padded")


@pytest.mark.parametrize("compute", [mx.float32, mx.bfloat16])
def test_bfloat16_files(compute, tmp_path):
    model = Klein.from_pretrained(copy_model(tmp_path / "m", mx.bfloat16), dtype=compute)
    check_run(model, golden(), "edit", 0.1, 60)  # of diffusers in float32, whose times are not rounded


def test_float16_is_refused():
    with pytest.raises(UserError, match="grow beyond float16's: take mx.bfloat16"):
        Klein.from_pretrained(MODEL, dtype=mx.float16)


def test_quantized(tmp_path):
    wish = {"prompt": "a star", "seed": 1, "steps": 2, "width": 64, "height": 64, "progress": False}
    packed = Klein.from_pretrained(MODEL, quantize=8)(**wish)
    assert mx.abs(levels(packed) - levels(klein()(**wish))).mean().item() < 12
    quantize_model(MODEL, tmp_path / "q8", 8, progress=False)
    again = Klein.from_pretrained(tmp_path / "q8")
    assert mx.abs(levels(again(**wish)) - levels(packed)).max().item() <= 1 and again.info.distilled
    assert not (tmp_path / "q8" / "tokenizer" / "config.json").exists()


def test_one_reference_is_cut_back_unless_a_size_is_given():
    picture = Image.open(MODEL / "ref_1.png").resize((75, 101))
    wish = {"prompt": "x", "images": [picture], "steps": 1, "seed": 3, "progress": False}
    cut = klein()(**wish)
    assert cut.size == picture.size and picture_info(cut)["box"] == [2, 5, 77, 106]
    whole = klein()(**wish, width=80)
    assert whole.size == (80, 112) and "box" not in picture_info(whole)
    assert whole.crop((2, 5, 77, 106)).tobytes() == cut.tobytes()
    two = klein()(**wish | {"images": [picture, picture.resize((101, 75))]})
    assert two.size == (64, 96) and "box" not in picture_info(two)
    batch = klein()(**wish | {"prompt": ["x", 90 * "a "]})
    assert [p.size for p in batch] == [picture.size] * 2
    assert mx.abs(levels(batch[0]) - levels(cut)).max().item() <= 1


def test_guidance():
    with pytest.raises(UserError, match="is distilled: guidance is built into its weights"):
        klein()("x", guidance=2.0)


@pytest.mark.slow
def test_the_step_can_be_compiled():
    """As on a GPU: times are arrays, and one graph serves all steps."""
    txt, x = encode("a star"), mx.random.normal((1, 24, 128), key=mx.random.key(0))
    field = flux3_velocity_field(transformer(), [txt], (4, 6))
    check(mx.compile(field)(x, mx.array(0.9), mx.array(0.5)), field(x, 0.9, 0.5))


def test_command_line(tmp_path, capsys):
    out, ref = tmp_path / "blue.png", tmp_path / "ref.png"
    Image.open(MODEL / "ref_1.png").resize((75, 101)).save(ref)
    asked = ["generate", "blue", "--model", str(MODEL), "--image", str(ref), "--steps", "2", "--seed", "1"]
    assert main([*asked, "-o", str(out)]) == 0 and Image.open(out).size == (75, 101)
    again = tmp_path / "again.png"
    asked_again = ["generate", "--like", str(out), "--model", str(MODEL), "--image", str(ref)]
    assert main([*asked_again, "-o", str(again)]) == 0
    assert picture_info(again) == picture_info(out)
    assert Image.open(again).tobytes() == Image.open(out).tobytes()
    capsys.readouterr()
    assert main([*asked, "--guidance", "2", "-o", str(out)]) == 2 and "is distilled" in capsys.readouterr().err
    asked = ["train-lora", str(tmp_path), "--model", "flux3-base", "-o", str(tmp_path / "a.safetensors")]
    assert main(asked) == 2 and "trains no adapters for FLUX 3 Image Klein" in capsys.readouterr().err


def test_listed(capsys):
    assert main(["models"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("flux3")}
    assert set(rows) == {"flux3", "flux3-base"}
    for told in (
        "16, distilled",
        "5.5 B + 4.4 B",
        "12.1 / 6.9 / 4.1",
        "20.3 GB",
        "FLUX Kommunity License",
        "no, gated",
    ):
        assert told in rows["flux3"]
    assert rows["flux3-base"].split()[1] == "50"


def test_memory_in_16_8_and_4_bits():
    plans = [plan_model(find_facts("flux3", q), width=512, height=512) for q in (None, 8, 4)]
    assert [round(p.transformer / 1e9, 2) for p in plans] == [11.10, 5.90, 3.12]
    assert [round(p.text_encoder / 1e9, 2) for p in plans] == [7.24, 3.84, 2.04]
    long = plan_model(find_facts("flux3"), width=512, height=512, prompts=["a" * 2000])
    assert long.step > plans[0].step and long.encode > plans[0].encode


def test_the_plan_has_room_for_every_prompt():
    for prompt in golden().meta["prompts"]:
        assert encode(prompt).shape[1] <= count_window(prompt, 4096)
    assert count_window("", 4096) == count_window(72 * "a", 4096) == 80 and count_window(73 * "a", 4096) == 160


# ---------------------------------------------------------------- what belongs to another model

TINY_KLEIN = HERE / "pipelines" / "tiny"


def test_parts_of_another_family(tmp_path):
    with pytest.raises(UserError, match=r"transformer of FLUX.2 \[klein\], and .* has the parts of FLUX 3 Image Klein"):
        shutil.copytree(MODEL, tmp_path / "a", ignore=shutil.ignore_patterns("base", "transformer"))
        shutil.copytree(TINY_KLEIN / "transformer", tmp_path / "a" / "transformer")
        Klein.from_pretrained(tmp_path / "a")
    with pytest.raises(UserError, match=r"no Qwen3-VL, with which FLUX 3 Image Klein reads"):
        Klein.from_pretrained(MODEL, parts={"text_encoder": str(TINY_KLEIN)})
    with pytest.raises(UserError, match=r"is Qwen3-VL, which belongs to FLUX 3 Image Klein"):
        Klein.from_pretrained(TINY_KLEIN, parts={"text_encoder": str(MODEL)})
    single = tmp_path / "x.safetensors"
    mx.save_safetensors(str(single), dict(tree_flatten(transformer().parameters())))
    with pytest.raises(UserError, match=r"transformer of FLUX 3 Image Klein, and .* has the parts of FLUX.2 \[klein\]"):
        Klein.from_pretrained(single, parts=TINY_KLEIN)


A, B = mx.random.normal((4, 32), key=mx.random.key(1)), mx.random.normal((32, 4), key=mx.random.key(2))
SPELLINGS = {  # of the first picture block's queries
    "released": "diffusion_model.content_mode_blocks.image.0.q_proj.{}.weight",
    "diffusers": "transformer.mode_blocks.image.0.attn.to_q.{}.weight",
    "kohya": "lora_unet_content_mode_blocks_image_0_q_proj.{}.weight",
    "bare": "content_mode_blocks.image.0.q_proj.{}.weight",
}


def save_adapter(path: Path, *modules: str) -> Path:
    """One change of each module."""
    low = [("lora_down", "lora_up") if name.startswith("lora_unet") else ("lora_A", "lora_B") for name in modules]
    arrays = {name.format(half): w for name, names in zip(modules, low) for half, w in zip(names, (A, B))}
    mx.save_safetensors(str(path), arrays)
    return path


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_adapters(spelling, tmp_path):
    path = save_adapter(tmp_path / "change.safetensors", SPELLINGS[spelling])
    model = Klein.from_pretrained(MODEL, dtype=mx.float32)
    wish = {"prompt": "a star", "seed": 1, "steps": 1, "width": 64, "height": 64, "progress": False}
    before, plain = model(**wish), transformer().content_mode_blocks["image"][0].q_proj
    name, x = model.loras.add(path, 0.5), mx.random.normal((1, 5, 32), key=mx.random.key(3))
    changed = model.transformer.content_mode_blocks["image"][0].q_proj
    check(changed(x), x @ (plain.weight + 0.5 * B @ A).T)
    assert model(**wish).tobytes() != before.tobytes()
    del model.loras[name]
    assert model(**wish).tobytes() == before.tobytes()


def test_halves_of_the_last_modulation(tmp_path):
    up = mx.random.normal((64, 4), key=mx.random.key(4))
    for name in ("transformer.norm_out.linear", "diffusion_model.final_layer.image.adaLN_modulation.1"):
        path = tmp_path / f"{name}.safetensors"
        arrays = {f"{name}.lora_A.weight": A, f"{name}.lora_B.weight": up}
        arrays |= {"emb_in.image.lora_A.weight": mx.zeros((1, 128)), "emb_in.image.lora_B.weight": mx.zeros((32, 1))}
        mx.save_safetensors(str(path), arrays)
        change = open_adapter(path).deltas(transformer())["final_layer.image.adaLN_modulation.1"]
        check(change.b, swap_halves(up) if "norm_out" in name else up)


def test_adapters_of_other_families(tmp_path):
    ours = save_adapter(tmp_path / "a.safetensors", SPELLINGS["released"])
    with pytest.raises(UserError, match=r"adapter for FLUX 3 Image Klein, and this model is FLUX.2 \[klein\]"):
        Klein.from_pretrained("nano", loras=[ours])
    with pytest.raises(UserError, match=r"adapter for FLUX.2 \[klein\], and this model is FLUX 3 Image Klein"):
        Klein.from_pretrained(MODEL, loras=["cross"])
    target = save_adapter(tmp_path / "t.safetensors", "ref_time_in.in_layer.{}.weight")
    with pytest.raises(UserError, match=r"does not have \(ref_time_in.in_layer\)"):
        Klein.from_pretrained(MODEL / "base", loras=[target])
    flux1 = "transformer.single_transformer_blocks.0.{}"
    shared = save_adapter(tmp_path / "s.safetensors", f"{flux1.format('attn.to_q')}.{{}}.weight")
    with pytest.raises(UserError, match=r"adapter for FLUX 3 Image Klein, and this model is FLUX.2"):
        Klein.from_pretrained("nano", loras=[shared])
    Klein.from_pretrained(MODEL, loras=[shared])
    names = [f"{flux1.format(name)}.{{}}.weight" for name in ("attn.to_q", "proj_mlp")]
    with pytest.raises(UserError, match="looks like an adapter for FLUX.1"):
        Klein.from_pretrained(MODEL, loras=[save_adapter(tmp_path / "f.safetensors", *names)])


def test_every_matrix_can_be_changed():
    """The adapters' names are those of the network's matrices, all of them."""
    shapes = matrix_shapes(Flux3Config())
    targets = {target.path for target in list_targets(FLUX3).values()}
    assert shapes.keys() <= targets and len(shapes) == 359 - 2 * 43  # less the norms of queries and keys


def test_other_autoencoders_are_refused(tmp_path):
    with pytest.raises(UserError):
        Klein.from_pretrained(MODEL, parts={"autoencoder": str(HERE / "pipelines" / "z_image")})
    taesd = {"decoder.layers.0.weight": mx.ones((2, 2)), "encoder.layers.0.weight": mx.ones((2, 2))}
    mx.save_safetensors(str(tmp_path / "taesd.safetensors"), taesd)
    with pytest.raises(UserError, match="has not the tensors of FLUX 3"):
        Klein.from_pretrained(MODEL, parts={"autoencoder": str(tmp_path / "taesd.safetensors")})
