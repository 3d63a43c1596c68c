"""The key/value cache against diffusers' KV code: every block's keys and values, velocities, whole edits.

`goldens/kv.safetensors` has the blocks, `pipelines/kv` what Flux2KleinKVPipeline draws with the tiny model (made by
make_kv_golden.py).
"""

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import mlx.core as mx
import pytest
from golden_tools import LOOSE, TIGHT, Golden, check, fill
from PIL import Image
from test_pipeline_golden import gradients, levels

from kleinlite import kv_cache
from kleinlite.inference.loaded_model import LoadedModel
from kleinlite.klein import Klein
from kleinlite.kv_cache import cached_velocity, cached_velocity_field, extract_kv
from kleinlite.models.configs import parse_config
from kleinlite.pipeline import encode_references, prepare_reference, velocity_field
from kleinlite.position_ids import image_ids, reference_ids, text_ids
from kleinlite.transformer import Transformer, TransformerConfig

PIPELINES = Path(__file__).parent / "pipelines"
RUNS = json.loads((PIPELINES / "kv" / "meta.json").read_text(encoding="utf-8"))["runs"]
SIZES = json.loads((PIPELINES / "tiny" / "meta.json").read_text(encoding="utf-8"))["reference_sizes"]
NAMES = [f"double_blocks.{i}" for i in range(2)] + [f"single_blocks.{i}" for i in range(3)]
cases = pytest.mark.parametrize("case", ["one_reference", "two_references"])  # the second is a batch with two times
golden = cache(Golden)


@cache
def transformer() -> Transformer:
    g = golden("transformer")
    config = g.config["model"] | {"timestep_guidance_channels": 256}
    return fill(Transformer(parse_config("transformer", config)), g.under("model.weight"))


@cache
def extracted(case: str):
    shared = golden("kv").under(f"kv.{case}")
    return shared, extract_kv(transformer(), shared["in.ref"], shared["in.ref_ids"])


# ---------------------------------------------------------------- block by block


@cases
@pytest.mark.parametrize("i", range(5))
def test_kv_cache_block(case, i):
    """Keys (b, nh, r, hd), normed and turned, and values of the references, as diffusers keeps them."""
    want, (_, cache) = golden("kv").under(f"kv_extract.{case}.out"), extracted(case)
    assert len(cache) == len(NAMES)
    for got, what in zip(cache[i], "kv"):
        check(got.swapaxes(1, 2), want[f"{NAMES[i]}.{what}"])


@cases
@pytest.mark.parametrize("step", ["extract", "cached"])
def test_kv_cache_velocity(case, step):
    values, (shared, cache) = golden("kv").under(f"kv_{step}.{case}"), extracted(case)
    rope = transformer().rope(shared["in.img_ids"], shared["in.txt_ids"])
    v = cached_velocity(transformer(), values["in.img"], shared["in.txt"], values["in.sigma"], rope, cache)
    check(v, values["out.velocity"], LOOSE)


def test_with_an_empty_cache_it_is_the_transformer():
    """The forward pass stands in two chapters: they must not drift apart."""
    shared, cache = extracted("one_reference")
    net, x = transformer(), golden("kv").under("kv_extract.one_reference")["in.img"]
    rope = net.rope(shared["in.img_ids"], shared["in.txt_ids"])
    empty = [(k[:, :, :0], v[:, :, :0]) for k, v in cache]
    check(cached_velocity(net, x, shared["in.txt"], 0.5, rope, empty), net(x, shared["in.txt"], 0.5, rope=rope), TIGHT)


def test_the_plain_pattern_differs():
    """If it did not, the values above would prove nothing."""
    shared, cache = extracted("one_reference")
    values, net = golden("kv").under("kv_extract.one_reference"), transformer()
    img = mx.concatenate([values["in.img"], shared["in.ref"]], axis=1)
    ids = mx.concatenate([shared["in.img_ids"], shared["in.ref_ids"]])
    plain = net(img, shared["in.txt"], values["in.sigma"], ids, shared["in.txt_ids"])[:, : values["in.img"].shape[1]]
    want = values["out.velocity"]
    assert (mx.abs(plain - want).max() / mx.abs(want).max()).item() > 0.01


# ---------------------------------------------------------------- whole edits


@cache
def tiny(dtype: mx.Dtype = mx.float32) -> Klein:
    """The tiny model, as if its files said that it was trained for the cache."""
    plain = Klein.from_pretrained(PIPELINES / "tiny", dtype=dtype)
    return Klein(LoadedModel(replace(plain._model.checkpoint, info=replace(plain.info, kv=True))))


@cache
def references(count: int) -> list[Image.Image]:
    return [gradients(*size) for size in SIZES[:count]]


@cache
def expected() -> dict[str, mx.array]:
    return mx.load(str(PIPELINES / "kv" / "expected.safetensors"))


def wish(run: str) -> dict:
    w = RUNS[run]
    wish = {"prompt": w["prompts"], "images": references(w["refs"]), "noise": expected()[f"{run}.trajectory"][0]}
    return wish | {name: w[name] for name in ("width", "height", "steps")} | {"progress": False}


@cache
def steps(run: str) -> list:
    return list(tiny().stream(**wish(run)))


@pytest.mark.parametrize("run", RUNS)
def test_kv_cache_trajectory(run):
    want = expected()[f"{run}.trajectory"]
    assert len(steps(run)) == len(want) - 1
    for step, latents in zip(steps(run), want[1:]):
        check(step.latents, latents, LOOSE)


@pytest.mark.parametrize("run", RUNS)
def test_edited_picture(run):
    pictures = steps(run)[-1].preview()
    for picture, want in zip(pictures, expected()[f"{run}.image"], strict=True):
        check(levels(picture), want.astype(mx.float32), 1.0, absolute=True)


def test_without_references_it_is_the_plain_model():
    plain, asked = Klein.from_pretrained(PIPELINES / "tiny", dtype=mx.float32), wish("none")
    assert tiny().info.kv and not plain.info.kv
    for a, b in zip(plain(**asked), tiny()(**asked)):
        assert a.tobytes() == b.tobytes()


def test_batch_is_single_runs():
    asked = wish("batch") | {"noise": None, "steps": 2}
    del asked["noise"]
    prompts = ["make it blue", "", "a star"]
    together = list(tiny().stream(**asked | {"prompt": prompts}, seed=[3, 1, 4]))
    for i, (prompt, seed) in enumerate(zip(prompts, (3, 1, 4))):
        for step, alone in zip(together, tiny().stream(**asked | {"prompt": prompt}, seed=seed)):
            check(step.latents[i : i + 1], alone.latents)


def test_references_are_computed_once(monkeypatch):
    """Once for all steps and all pictures of a batch, and not at all without references."""
    seen = []
    honest = kv_cache.extract_kv
    monkeypatch.setattr(
        kv_cache, "extract_kv", lambda net, refs, ids: seen.append(refs.shape) or honest(net, refs, ids)
    )
    tiny()(["a", "b", "c"], seed=1, width=32, height=32, steps=4, images=references(2), progress=False)
    assert seen == [(1, 5 * 4 + 4 * 5, 128)]
    tiny()("a", seed=1, width=32, height=32, steps=4, progress=False)
    assert len(seen) == 1


@pytest.mark.parametrize("count", [1, 2])
def test_the_cache_depends_on_the_references_alone(count):
    """Two prompts, two noises, two times: one cache gives what a new one gives, and the plain field does not."""
    net, klein = tiny().transformer, tiny()
    images = [prepare_reference(image) for image in references(count)]
    shown = encode_references(klein.autoencoder, images, 1)
    tokens = mx.concatenate([z.flatten(1, 2) for z in shown], axis=1)
    grids = [(image.height // 16, image.width // 16) for image in images]
    cache = extract_kv(net, tokens, reference_ids(grids))
    for prompt, t in (("make it blue", 0.9), ("", 0.2)):
        txt, x = klein.encode_prompt(prompt), mx.random.normal((1, 6, 128), key=mx.random.key(3))
        rope = net.rope(image_ids(2, 3), text_ids(txt.shape[1]))
        ours = cached_velocity(net, x, txt, t, rope, cache)
        check(ours, cached_velocity_field(net, txt, (2, 3), shown)(x, t), TIGHT)
        plain = velocity_field(net, txt, (2, 3), shown)(x, t)
        assert mx.abs(ours - plain).max().item() > 1e-3


def test_bfloat16(monkeypatch):
    """The cache is as wide as the computation, and half precision changes nothing but the rounding."""
    net = tiny(mx.bfloat16).transformer
    cache = extract_kv(net, mx.random.normal((1, 4, 128)).astype(mx.bfloat16), reference_ids([(2, 2)]))
    assert {x.dtype for pair in cache for x in pair} == {mx.bfloat16}
    honest, given = kv_cache.extract_kv, []
    monkeypatch.setattr(kv_cache, "extract_kv", lambda net, refs, ids: given.append(refs) or honest(net, refs, ids))
    for step, exact in zip(tiny(mx.bfloat16).stream(**wish("one")), steps("one")):
        error = (step.latents - exact.latents).astype(mx.float32)
        assert mx.sqrt((error**2).mean()).item() < 0.02
    assert [refs.dtype for refs in given] == [mx.bfloat16]  # the autoencoder's tokens are float32


def test_memory():
    """A cache holds layers · 2 · tokens · width numbers: no views that keep whole fused products alive."""
    cfg = TransformerConfig(double_blocks=1, single_blocks=3, heads=4, axes=(16, 16, 16, 16), d_text=8)
    net, tokens = Transformer(cfg), mx.random.normal((1, 512, 128))
    mx.eval(net.parameters(), tokens)
    before = mx.get_active_memory()
    cache = extract_kv(net, tokens, reference_ids([(16, 32)]))
    mx.eval(cache)
    size = 4 * 2 * 512 * cfg.d * 4
    assert sum(x.nbytes for pair in cache for x in pair) == size
    assert mx.get_active_memory() - before < 1.05 * size


def test_from_pretrained_knows_it(tmp_path):
    """For a folder whose index says so."""
    folder = shutil.copytree(PIPELINES / "tiny", tmp_path / "tiny", ignore=shutil.ignore_patterns("base", "expected*"))
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    (folder / "model_index.json").write_text(
        json.dumps(index | {"_class_name": "Flux2KleinKVPipeline"}), encoding="utf-8"
    )
    klein = Klein.from_pretrained(folder, dtype=mx.float32)
    assert klein.info.kv
    check(list(klein.stream(**wish("two")))[-1].latents, steps("two")[-1].latents)
