"""From prompt to picture against diffusers, on a tiny random model: tokens, features, every step, every pixel.

The README in `pipelines` says what is stored.
"""

import json
from functools import cache
from pathlib import Path

import mlx.core as mx
import pytest
from golden_tools import LOOSE, check, nchw, nhwc
from mlx.utils import tree_flatten
from PIL import Image

from kleinlite.autoencoder import patchify
from kleinlite.klein import Klein, as_reference
from kleinlite.pipeline import prepare_reference, to_images, to_pixels
from kleinlite.position_ids import image_ids, reference_ids, text_ids
from kleinlite.sampling import noise, schedule
from kleinlite.text_encoder import tokenize

HERE = Path(__file__).parent
TINY = HERE / "pipelines" / "tiny"
META = json.loads((TINY / "meta.json").read_text(encoding="utf-8"))


def gradients(width: int, height: int) -> Image.Image:
    """A picture in which every place has its own color, the same as in make_pipeline_golden.py."""
    red = bytes(x * 255 // (width - 1) for x in range(width)) * height
    green = b"".join(bytes([y * 255 // (height - 1)]) * width for y in range(height))
    blue = bytes((x * x) % 251 for x in range(width)) * height
    return Image.merge("RGB", [Image.frombytes("L", (width, height), x) for x in (red, green, blue)])


def levels(picture: Image.Image) -> mx.array:
    """(h, w, 3), from 0 to 255"""
    values = mx.array(memoryview(picture.tobytes())).reshape(picture.height, picture.width, 3)
    return values.astype(mx.float32)


class Reference:
    """One model, what diffusers made of it, and what we make of it."""

    def __init__(self, name: str):
        self.folder = TINY / "base" if name == "base" else TINY
        self.meta = json.loads((self.folder / "meta.json").read_text(encoding="utf-8"))
        self.expected = mx.load(str(self.folder / "expected.safetensors"))
        self.klein = Klein.from_pretrained(self.folder, dtype=mx.float32)

    def references(self, count: int) -> list[Image.Image]:
        stored = [Image.open(path) for path in sorted(self.folder.glob("ref_*.png"))]
        return (stored or [gradients(*size) for size in META["reference_sizes"]])[:count]

    def wish(self, run: str) -> dict:
        """Arguments for a call. A distilled model must not be told a guidance."""
        w, start = self.meta["runs"][run], self.expected[f"{run}.trajectory"][:1]
        wish = {name: w[name] for name in ("prompt", "width", "height", "steps")} | {"noise": start, "progress": False}
        wish |= {"images": self.references(w["refs"])}
        return wish | ({} if self.klein.info.distilled else {"guidance": w["guidance"]})

    def grid(self, run: str) -> tuple[int, int]:
        height, width, _ = self.expected[f"{run}.image"].shape
        return height // 16, width // 16


reference = cache(Reference)


@cache
def steps(name: str, run: str) -> list:
    return list(reference(name).klein.stream(**reference(name).wish(run)))


@cache
def features(name: str, prompt: str) -> mx.array:
    return reference(name).klein.encode_prompt(prompt)


RUNS = [
    *(("tiny", run) for run in ("t2i", "t2i_unicode", "edit1", "edit2")),
    *(("base", run) for run in ("cfg", "cfg_edit")),
]
each_run = pytest.mark.parametrize("name, run", RUNS)
each_prompt = pytest.mark.parametrize("i", range(3))
each_encoder = pytest.mark.parametrize("name", ["tiny"])


def test_all_runs_are_listed():
    for name in ("tiny", "base"):
        assert {run for n, run in RUNS if n == name} == set(reference(name).meta["runs"])


# ---------------------------------------------------------------- part by part


@each_encoder
@each_prompt
def test_tokens(name, i):
    r = reference(name)
    ids, mask = tokenize(r.klein.tokenizer, [r.meta["prompts"][i]], r.klein.info.max_length)
    assert ids.tolist() == r.expected[f"prompt{i}.input_ids"].tolist()
    assert mask.tolist() == r.expected[f"prompt{i}.mask"].astype(mx.bool_).tolist()


@each_encoder
@each_prompt
def test_features(name, i):
    r = reference(name)
    check(features(name, r.meta["prompts"][i]), r.expected[f"prompt{i}.embeds"])


@each_encoder
def test_encode(name):
    r = reference(name)
    pixels, vae = nhwc(r.expected["vae.input"]), r.klein.autoencoder
    mean, _ = mx.split(vae.encoder(pixels), 2, axis=-1)
    check(nchw(mean), r.expected["vae.latent_mean"])
    check(nchw(vae.encode(pixels)), r.expected["vae.packed"])


@each_encoder
def test_decode(name):
    r = reference(name)
    latents = r.klein.autoencoder.bn.normalize(patchify(nhwc(r.expected["vae.latent_mean"])))
    check(nchw(r.klein.autoencoder.decode(latents)), r.expected["vae.decoded"])


@each_run
def test_sigmas(name, run):
    r, (gh, gw), taken = reference(name), reference(name).grid(run), steps(name, run)
    want = r.expected[f"{run}.sigmas"]
    check(mx.array(schedule(r.meta["runs"][run]["steps"], gh * gw)), want, 1e-6, absolute=True)
    check(mx.array([s.t for s in taken] + [taken[-1].t_next]), want, 1e-6, absolute=True)


@each_run
def test_first_velocity(name, run):
    """The transformer by itself, from the reference's own noise and the references as we encode them."""
    r, (gh, gw), want = reference(name), reference(name).grid(run), reference(name).expected[f"{run}.velocity0"]
    img, ids, w = r.expected[f"{run}.trajectory"][:1], image_ids(gh, gw), r.meta["runs"][run]
    if w["refs"]:
        pixels = [to_pixels(prepare_reference(image)) for image in r.references(w["refs"])]
        latents = [r.klein.autoencoder.encode(x) for x in pixels]
        img = mx.concatenate([img, *(x.reshape(1, -1, 128) for x in latents)], axis=1)
        ids = mx.concatenate([ids, reference_ids([x.shape[1:3] for x in latents])])
    txt = features(name, w["prompt"])
    velocity = r.klein.transformer(img, txt, 1.0, ids, text_ids(txt.shape[1]))
    check(velocity[:, : want.shape[1]], want, LOOSE)  # some files hold the references' velocities, too
    if w["guidance"] == 1:
        check(steps(name, run)[0].velocity, want[:, : gh * gw], LOOSE)


@each_run
def test_trajectory(name, run):
    want, taken = reference(name).expected[f"{run}.trajectory"], steps(name, run)
    assert [s.index for s in taken] == list(range(len(want) - 1))
    for i, step in enumerate(taken):
        check(step.latents, want[i + 1 : i + 2], LOOSE)


@each_run
def test_picture(name, run):
    want = reference(name).expected[f"{run}.image"]
    want = want.astype(mx.float32) * (1 if want.dtype == mx.uint8 else 255)
    check(levels(steps(name, run)[-1].preview()), want, 1.0, absolute=True)


# ---------------------------------------------------------------- references


@pytest.mark.parametrize("row", META["prepared"], ids=lambda row: "{}x{}".format(*row["size"]))
def test_prepare_reference(row):
    picture = prepare_reference(gradients(*row["size"]))
    assert list(picture.size) == row["result"]
    w, h = picture.size
    corners = [list(picture.getpixel((x, y))) for y in (0, h - 1) for x in (0, w - 1)]
    check(mx.array(corners), mx.array(row["corners"]), 1.0, absolute=True)


@pytest.mark.parametrize("size", META["refused"], ids=lambda size: "{}x{}".format(*size))
def test_refused_reference(size):
    with pytest.raises(ValueError, match="64 pixels"):
        as_reference(gradients(*size))


def test_pixels_there_and_back():
    picture = gradients(70, 66)
    pixels = to_pixels(picture)
    assert pixels.shape == (1, 66, 70, 3) and pixels.min().item() == -1 and pixels.max().item() == 1
    assert to_images(pixels)[0].tobytes() == picture.tobytes()
    odd = mx.array([-9.0, -1, 0, 1 / 255, 0.999, 1, 9]).reshape(1, 1, 7, 1) * mx.ones((1, 1, 7, 3))
    assert list(to_images(odd)[0].tobytes()[::3]) == [0, 0, 128, 128, 255, 255, 255]  # round, not cut off


# ---------------------------------------------------------------- batches, stream, seeds


@pytest.mark.parametrize("name", ["tiny", "base"])
@pytest.mark.parametrize("count", [0, 2])
def test_batch_is_single_runs(name, count):
    r = reference(name)
    wish = {"width": 48, "height": 32, "steps": 2, "images": r.references(count), "progress": False}
    prompts, seeds = ["a red circle", "", "make it blue, please"], [3, 1, 4]
    if name == "base":
        wish |= {"guidance": 3.0, "negative_prompt": "a square"}
    together = list(r.klein.stream(prompts, seed=seeds, **wish))
    alone = [list(r.klein.stream(p, seed=s, **wish)) for p, s in zip(prompts, seeds)]
    for i, step in enumerate(together):
        check(step.latents, mx.concatenate([run[i].latents for run in alone]))
        check(step.velocity, mx.concatenate([run[i].velocity for run in alone]))
    pictures = r.klein(prompts, seed=seeds, **wish)
    assert isinstance(pictures, list) and [p.size for p in pictures] == [(48, 32)] * 3
    for picture, run in zip(pictures, alone):
        check(levels(picture), levels(run[-1].preview()), 1.0, absolute=True)
    [only] = r.klein(prompts[:1], seed=seeds[:1], **wish)  # a list in, a list out
    assert only.tobytes() == alone[0][-1].preview().tobytes()


def test_guidance_uses_the_negative_prompt():
    """v = without + g · (with - without), and the empty prompt is what is taken if none is given."""
    klein = reference("base").klein
    wish = {"prompt": "a red circle", "width": 32, "height": 32, "steps": 1, "seed": 1, "progress": False}

    def v(**more):
        return next(klein.stream(**(wish | more))).velocity

    plain, empty, square = (v(guidance=1, prompt=p) for p in ("a red circle", "", "a blue square"))
    check(v(guidance=3), empty + 3 * (plain - empty))
    check(v(guidance=3, negative_prompt="a blue square"), square + 3 * (plain - square))
    check(v(), empty + 4 * (plain - empty))  # 4 is a base model's own


def test_stream_and_call_agree():
    klein = reference("tiny").klein
    wish = {"prompt": "a red circle", "width": 48, "height": 32, "seed": 5, "progress": False}
    taken = list(klein.stream(**wish))
    assert len(taken) == klein.info.steps == 4
    for step, after in zip(taken, taken[1:]):
        assert step.t_next == after.t
        moved = step.latents + (after.t_next - after.t) * after.velocity
        check(after.latents, moved)
    assert klein(**wish).tobytes() == klein(**wish).tobytes() == taken[-1].preview().tobytes()
    for step in taken:  # where a straight line from here would end
        clean = (step.latents - step.t_next * step.velocity).reshape(1, 2, 3, 128)
        assert step.preview().tobytes() == to_images(klein.autoencoder.decode(clean))[0].tobytes()


def test_seeds():
    klein = reference("tiny").klein
    wish = {"width": 32, "height": 32, "steps": 1, "progress": False}

    def draw(prompt, **more):
        return klein(prompt, **wish, **more)

    seven, eight = draw("a", seed=7), draw("a", seed=8)
    assert seven.tobytes() == draw("a", seed=7).tobytes() == draw("a", noise=noise(7, 4)).tobytes()
    assert mx.abs(levels(seven) - levels(eight)).max().item() > 10
    for picture, alone in zip(draw(["a", "a"], seed=7), (seven, eight)):  # a batch counts up from its seed
        check(levels(picture), levels(alone), 1.0, absolute=True)


# ---------------------------------------------------------------- the same model in other files


def write_variant(kind: str, folder: Path) -> None:
    """Copy `pipelines/tiny` with its weights stored in another way."""
    for path in (p for p in TINY.rglob("*.json") if "base" not in p.parts):
        target = folder / path.relative_to(TINY)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    klein = reference("tiny").klein
    modules = {"transformer": klein.transformer, "vae": klein.autoencoder, "text_encoder": klein.text_encoder}
    for part, module in modules.items():
        [path] = (TINY / part).glob("*.safetensors")
        arrays, stem = mx.load(str(path)), path.stem
        if kind == "float32":
            arrays = {k: w.astype(mx.float32) if w.dtype == mx.bfloat16 else w for k, w in arrays.items()}
        if kind == "single file":  # the original names: fused matrices, shift before scale, 1 × 1 convolutions
            arrays = {k: w.transpose(0, 3, 1, 2) if w.ndim == 4 else w for k, w in tree_flatten(module.parameters())}
            if part == "vae":
                squares = {k: w[..., None, None] for k, w in arrays.items() if "attn_1" in k and w.ndim == 2}
                assert len(squares) == 8
                arrays |= squares | {"bn.num_batches_tracked": mx.array(0)}
            if part == "transformer":
                arrays = {f"model.diffusion_model.{k}": w for k, w in arrays.items()}
            arrays = {k: mx.contiguous(w.astype(mx.bfloat16)) for k, w in arrays.items()}
        files = {f"{stem}.safetensors": sorted(arrays)}
        if kind == "sharded":
            names = sorted(arrays)
            files = {f"{stem}-{i + 1:05}-of-00003.safetensors": names[i::3] for i in range(3)}
            index = {"metadata": {}, "weight_map": {k: file for file, keys in files.items() for k in keys}}
            (folder / part / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
        for file, keys in files.items():
            mx.save_safetensors(str(folder / part / file), {k: arrays[k] for k in keys}, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", ["as it is", "sharded", "float32", "single file"])
def test_other_files(kind, tmp_path):
    write_variant(kind, tmp_path)
    r, other = reference("tiny"), Klein.from_pretrained(tmp_path, dtype=mx.float32)
    for ours, theirs in zip(
        (r.klein.transformer, r.klein.autoencoder, r.klein.text_encoder),
        (other.transformer, other.autoencoder, other.text_encoder),
    ):
        a, b = dict(tree_flatten(ours.parameters())), dict(tree_flatten(theirs.parameters()))
        assert a.keys() == b.keys() and all(mx.array_equal(a[k], b[k]).item() for k in a)
    assert other(**r.wish("edit2")).tobytes() == r.klein(**r.wish("edit2")).tobytes()
    assert (
        other.info.max_length == r.klein.info.max_length
        and other.info.distilled
        and not reference("base").klein.info.distilled
    )


def test_bfloat16():
    """Half precision gives the same picture, but for its rounding; the autoencoder stays in float32."""
    r = reference("tiny")
    half = Klein.from_pretrained(r.folder, dtype=mx.bfloat16)
    assert half.encode_prompt("a").dtype == mx.bfloat16
    assert {w.dtype for _, w in tree_flatten(half.transformer.parameters())} == {mx.bfloat16}
    assert {w.dtype for _, w in tree_flatten(half.autoencoder.parameters())} == {mx.float32}
    for step, exact in zip(half.stream(**r.wish("edit1")), steps("tiny", "edit1")):
        error = (step.latents - exact.latents).astype(mx.float32)
        assert mx.sqrt((error**2).mean()).item() < 0.02
