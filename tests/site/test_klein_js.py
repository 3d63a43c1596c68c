"""klein.js, the model in JavaScript, against the package, in a browser: the bundled weights as they are now.

Everything is computed here, twice; nothing is stored. The last tests break a line of the script and see it found out.
"""

import base64
import json
import random
import re
from contextlib import AbstractContextManager
from pathlib import Path
from unittest.mock import patch

import live
import mlx.core as mx
import numpy as np
import pytest
from PIL import Image
from site_model import write_site_model
from tiers import slow
from tokenizers import Tokenizer

from kleinlite import Klein, transformer
from kleinlite.autoencoder import Autoencoder, AutoencoderConfig, GroupNorm, LatentBatchNorm, unpatchify
from kleinlite.book import mistakes
from kleinlite.inference.fast_preview import fit_preview, preview_pixels
from kleinlite.nano.limits import describe_limits
from kleinlite.pipeline import to_images
from kleinlite.position_ids import apply_rope, image_ids
from kleinlite.sampling import noise, schedule
from kleinlite.text_encoder import TEMPLATE, TextEncoder, TextEncoderConfig
from kleinlite.training import initialize
from kleinlite.transformer import Transformer, TransformerConfig, modulate
from recipe.saving import save_encoders, save_transformer
from tools.chromium import serving

OPEN = """async ([scripts, model, script, kernel]) => {
    window.code = await import(`${scripts}/${script}`);
    window.masks = await import(`${scripts}/masks.js`);
    window.adapter = await import(`${scripts}/adapter.js`);
    const get = async (url) => (await fetch(url)).arrayBuffer();
    window.wasm = await get(`${scripts}/gemm.wasm`);
    window.klein = await code.Klein.open((path) => get(`${model}/${path}`), kernel ? wasm : null);
    window.base64 = (values) => {
        const bytes = new Uint8Array(values.buffer, values.byteOffset, values.byteLength), parts = [];
        for (let i = 0; i < bytes.length; i += 8192) parts.push(String.fromCharCode(...bytes.subarray(i, i + 8192)));
        return btoa(parts.join(""));
    };
    window.from64 = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    return klein.wasm;
}"""
DRAW = """async (wish) => {
    if (wish.model === "nano-base") await klein.loadBase();
    if (wish.lora) await adapter.loadAdapter(klein, wish.lora);
    if (wish.reference) { await klein.loadEncoder(); wish.reference.rgba = from64(wish.reference.rgba); }
    const white = wish.mask && from64(wish.mask), { width, height } = wish;
    const mask = white && masks.tokenMask(white, width, height);
    const ids = klein.tokenize(wish.prompt), features = base64(klein.encodeText(ids)), steps = [];
    for (const { latents, velocity, clean, gh, gw } of klein.draw({ ...wish, mask, seed: BigInt(wish.seed) })) {
        const { rgba } = klein.decode(clean, gh, gw);
        const picture = white ? masks.paste(rgba, wish.reference.rgba, white) : rgba;
        steps.push([latents, velocity, picture].map(base64));
    }
    return { ids, features, steps };
}"""
QUICK = ("plain", "an edit")
CASES = {
    "plain": {"prompt": "a red circle above a blue square", "seed": 7},
    "a large seed, other letters": {"prompt": "It's a BLUE sun, é!", "seed": 2**32 + 5, "steps": 2},
    "wide, three steps": {"prompt": "a green circle below a red triangle", "seed": 5, "width": 128, "steps": 3},
    "tall, one step, the largest seed": {"prompt": "a", "seed": 2**64 - 1, "width": 64, "height": 112, "steps": 1},
    "an edit": {"prompt": "make the circle green", "seed": 7, "steps": 2, "reference": (96, 96)},
    "an edit of another size": {"prompt": "x", "seed": 3, "steps": 1, "width": 64, "height": 64, "reference": (96, 80)},
    "a mask": {"prompt": "make the square green", "seed": 11, "reference": (96, 96), "mask": (0, 48, 96, 96)},
    "a mask that cuts tokens in four": {
        "prompt": "a yellow star", "seed": 2, "steps": 2, "reference": (96, 80), "mask": (40, 24, 72, 56),
    },
    "guidance": {"prompt": "a yellow star", "seed": 1, "guidance": 4.0, "model": "nano-base"},
    "guidance and an edit": {
        "prompt": "", "seed": 1, "steps": 1, "guidance": 2.0, "model": "nano-base", "reference": (80, 64),
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Scripts and model, as the site has them, and the model with its own numbers."""
    source = tmp_path_factory.mktemp("pages")
    scripts, problems = live.prepare(source)
    assert not problems
    live.write_folder((source / scripts).parent, "plain", live.read_model())  # float16, as the package has it
    live.write_folder((source / scripts).parent, "second", live.read_model(live.CRITTERS))
    return source / scripts


@pytest.fixture(scope="module")
def server(folder):
    with serving(folder.parent) as address:
        yield address


@pytest.fixture(scope="module")
def opened(chromium, folder, server):
    """opened(script, kernel, model): a page in which `klein` is a model, by this script, with the kernel or without."""

    def opened(script: str = "klein.js", kernel: bool = True, model: str = "plain"):
        (there,) = folder.parent.glob(f"{model}-*")
        page = chromium.new_page()
        page.goto(server)
        wasm = page.evaluate(OPEN, [f"{server}/{folder.name}", f"{server}/{there.name}", script, kernel])
        assert wasm == kernel
        return page

    return opened


@pytest.fixture(scope="module")
def page(opened):
    return opened()


@pytest.fixture(scope="module")
def models() -> dict[str, Klein]:
    return {name: Klein.from_pretrained(name, keep_loaded=True) for name in ("nano", "nano-base")}


def floats(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), np.float32)


def compare(page, klein: Klein, case: dict) -> dict[str, float]:
    """How far the script's features, latents, velocities and pictures are from the package's, at worst."""
    wish, images = {"model": "nano", "steps": 4} | case, []
    if size := wish.pop("reference", None):
        picture = klein(
            "a red circle above a blue square", seed=7, width=size[0], height=size[1], steps=2, progress=False
        )
        images, wish["reference"] = [picture], {"width": size[0], "height": size[1]}
        wish["reference"]["rgba"] = base64.b64encode(picture.convert("RGBA").tobytes()).decode()
    options = {}
    if box := wish.pop("mask", None):
        options["mask"] = Image.new("L", size)
        options["mask"].paste(255, box)
        wish["mask"] = base64.b64encode(options["mask"].tobytes()).decode()
    if size:
        wish = {"width": size[0], "height": size[1]} | wish
    wish = {"width": klein.info.size, "height": klein.info.size} | wish
    told = ("width", "height") if options else ()  # by the picture to be changed
    known = {k: v for k, v in wish.items() if k not in ("model", "lora", "reference", "mask", *told)}
    expected = list(klein.stream(**known | options, images=images, progress=False))
    drawn = page.evaluate(DRAW, wish | {"seed": str(wish["seed"])})
    assert drawn["ids"] == klein.tokenizer.encode(TEMPLATE.format(wish["prompt"])).ids
    assert len(drawn["steps"]) == len(expected) == wish["steps"]
    features = np.array(klein.encode_prompt(wish["prompt"])).ravel()
    far = {"features": np.abs(floats(drawn["features"]) - features).max() / np.abs(features).max()}
    for step, (latents, velocity, rgba) in zip(expected, drawn["steps"]):
        for name, ours, theirs in (("latents", step.latents, latents), ("velocity", step.velocity, velocity)):
            ours = np.array(ours).ravel()
            far[name] = max(far.get(name, 0), np.abs(floats(theirs) - ours).max() / np.abs(ours).max())
        preview = step.preview()
        levels = np.frombuffer(base64.b64decode(rgba), np.uint8).reshape(*preview.size[::-1], 4)[..., :3]
        apart = np.abs(levels.astype(int) - np.array(preview))
        far["levels"] = max(far.get("levels", 0), apart.max())
        far["values"] = max(far.get("values", 0), (apart > 0).mean())
    return far


def check(far: dict[str, float]) -> None:
    bounds = {"features": 1e-5, "latents": 5e-5, "velocity": 5e-5, "levels": 1, "values": 1e-3}
    assert {name: value for name, value in far.items() if value > bounds[name]} == {}


# ---------------------------------------------------------------- pictures


@pytest.mark.parametrize("name", [*QUICK, *slow(*(name for name in CASES if name not in QUICK))])
def test_the_same_pictures(page, models, name):
    case = CASES[name]
    """Token ids, features, and at every step velocity, latents and the picture expected."""
    check(compare(page, models[case.get("model", "nano")], case))


def test_the_same_critter(opened):
    klein = Klein.from_pretrained("critters", keep_loaded=True)
    case = {"prompt": "a yellow critter with one eye that laughs", "seed": 7, "steps": 2, "model": "critters"}
    check(compare(opened(model="second"), klein, case))


@pytest.mark.slow
def test_the_same_without_webassembly(opened, models):
    check(compare(opened(kernel=False), models["nano"], {"prompt": "a red house", "seed": 4, "steps": 2}))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [True, False])
def test_an_adapter_beside_the_matrices(opened, models, kernel):
    """Velocities, latents and pictures are the package's with it, and after it those without."""
    page, case = opened(kernel=kernel), {"prompt": "a red house", "seed": 4, "steps": 1}
    adapted = Klein.from_pretrained("nano", loras=[live.ADAPTER], keep_loaded=True)
    with pytest.raises(AssertionError):  # it does something
        check(compare(page, adapted, case))
    check(compare(page, adapted, case | {"lora": live.ADAPTER}))
    check(compare(page, models["nano"], case))
    check(compare(page, adapted, case | {"lora": live.ADAPTER, "prompt": "make it night", "reference": (96, 96)}))


def write_other_model(folder: Path, tokenizer: Tokenizer) -> None:
    """A random model and its base, with another number wherever a config has one."""
    mx.random.seed(7)
    vocab = tokenizer.get_vocab_size()
    text_cfg = TextEncoderConfig(
        vocab=vocab,
        d=24,
        d_mlp=44,
        layers=5,
        heads=6,
        kv_heads=2,
        head_dim=12,
        theta=1e4,
        eps=1e-5,
        out_layers=(1, 3, 4),
        max_length=40,
    )
    cfg = TransformerConfig(
        double_blocks=1, single_blocks=3, heads=3, axes=(4, 8, 6, 6), d_text=72, mlp_ratio=2.0, theta=500, d_time=128
    )
    vae_cfg = AutoencoderConfig(
        channels=(4, 8, 16, 12), decoder_channels=(8, 12, 16, 20), layers=2, groups=4, bn_eps=1e-3
    )
    text_encoder, autoencoder = TextEncoder(text_cfg), Autoencoder(vae_cfg)
    autoencoder.bn.running_mean, autoencoder.bn.running_var = mx.random.normal((128,)), mx.random.uniform(shape=(128,))
    save_encoders(folder, autoencoder, vae_cfg, 64, text_encoder, tokenizer)
    nets = Transformer(cfg), Transformer(cfg)
    for i, net in enumerate(nets):
        initialize(net, mx.random.key(i))
    save_transformer(folder, nets[0], text_cfg, distilled=True)
    save_transformer(folder / "base", nets[1], text_cfg, distilled=False, shares=True)


def test_all_numbers_are_read_from_the_configs(opened, folder, models, tmp_path):
    write_other_model(tmp_path, models["nano"].tokenizer)
    live.write_folder(folder.parent, "other", live.read_model(tmp_path))
    page, case = opened(model="other"), {"prompt": "a fox", "seed": 5, "steps": 2}
    check(compare(page, Klein.from_pretrained(tmp_path), case | {"reference": (80, 64)}))
    check(compare(page, Klein.from_pretrained(tmp_path / "base"), case | {"guidance": 3.0, "model": "nano-base"}))


def test_the_site_has_a_whole_model(folder, models):
    """Cut into shards it is still a folder that the package loads."""
    (model,) = folder.parent.glob("plain-*")
    there = Klein.from_pretrained(model)("a boat", seed=1, progress=False)
    assert there.tobytes() == models["nano"]("a boat", seed=1, progress=False).tobytes()


def test_what_is_loaded_when(folder):
    """What the page says of bytes is what the browser asks for."""
    said = live.count_bytes(live.pack_model(live.read_model()))
    assert said["first"] <= live.FIRST == 8_000_000

    def part(name):
        return (live.NANO / name).stat().st_size

    everything = part("transformer/diffusion_pytorch_model.safetensors") + part(
        "vae/diffusion_pytorch_model.safetensors"
    )
    assert said["encoder"] > 0 and 0.4 * everything < said["first"] + said["encoder"] < 0.55 * everything
    assert said["base"] >= 0.4 * part("base/transformer/diffusion_pytorch_model.safetensors")
    assert 0.4 * part("loras/one-look.safetensors") < said[live.ADAPTER] < 0.6 * part("loras/one-look.safetensors")


UNPACK = """async ([scripts, url]) => {
    const { unpack } = await import(`${scripts}/packed.js`), content = await (await fetch(url)).arrayBuffer();
    const tensors = code.readSafetensors(await unpack(content)), sums = {};
    for (const [name, { shape, values }] of tensors) sums[name] = [shape, base64(values)];
    return sums;
}"""


@pytest.mark.slow
@pytest.mark.parametrize("part", ["vae/diffusion_pytorch_model", "text_encoder/model"])
def test_packed_weights_are_unpacked(page, folder, tmp_path, part):
    """packed.js gives the numbers that the format says, each within half a step of the package's own."""
    (served,) = folder.parent.glob("nano-*")
    found = page.evaluate(UNPACK, [f"./{folder.name}", f"./{served.name}/{part}-00001-of-00002.safetensors.gz"])
    ours = mx.load(str(write_site_model(tmp_path) / f"{part}-00001-of-00002.safetensors"))
    (plain,) = folder.parent.glob("plain-*")
    exact = mx.load(str(plain / f"{part}-00001-of-00002.safetensors"))
    assert found.keys() <= ours.keys() == exact.keys() and len(found) >= len(ours) - 1  # whole numbers are not read
    for name, (shape, values) in found.items():
        assert tuple(shape) == ours[name].shape == exact[name].shape
        theirs = floats(values).reshape(shape)
        np.testing.assert_array_equal(theirs, np.array(ours[name].astype(mx.float32)))
        own = np.array(exact[name].astype(mx.float32)).reshape(shape[0], -1)
        step = np.abs(own).max(axis=1, keepdims=True) / 127
        assert (np.abs(theirs.reshape(own.shape) - own) <= 0.501 * step).all()


PROMPTS = [
    "a red house under a yellow sun", "a yellow star on a blue background", "a red circle above a blue square",
    "a white boat on a blue sea at sunset", "a green tree on white snow at night",
    "a purple heart left of a green diamond", "a blue triangle", "an orange square below a pink star",
    "a red boat on a blue sea by day", "a white house on green hills at night", "a pink tree left of a blue house",
    "a black circle on a yellow background",
]  # fmt: skip


@pytest.mark.slow
def test_eight_bits_change_no_picture_visibly(models, tmp_path):
    """Twelve prompts with the site's weights and with the package's own: levels of 255, on average and at worst."""
    site = Klein.from_pretrained(write_site_model(tmp_path), keep_loaded=True)
    for prompt in PROMPTS:
        pictures = [np.asarray(klein(prompt, seed=7, progress=False)).astype(int) for klein in (site, models["nano"])]
        apart = np.abs(pictures[0] - pictures[1])
        assert apart.mean() < 0.6 and apart.max() <= 20 and (apart > 4).mean() < 0.03, prompt


@pytest.mark.slow
def test_a_prompt_too_long(page):
    told = page.evaluate("() => { try { klein.tokenize('red '.repeat(40)); } catch (error) { return error.message; } }")
    assert "this model reads" in told and "are the chat template): shorten it by about" in told


# ---------------------------------------------------------------- piece by piece


FILL = """(side) => {
    const grow = klein.memory.grow.bind(klein.memory), most = klein.M.length / 16384 * 2.5;
    klein.memory.grow = (more) => {
        if (klein.memory.buffer.byteLength / 65536 + more > most) throw new RangeError("no more");
        return grow(more);
    };
    const decode = (side) => klein.decode(new Float32Array(side * side / 2), side / 16, side / 16);
    try { decode(side); } catch (error) {
        const fits = Number(/(\\d+) would fit/.exec(error.message)[1]);
        const drawn = (side) => { try { return decode(side).width; } catch { return 0; } };
        const small = drawn(fits), large = drawn(2 * fits);
        return { message: error.message, fits, small, large };
    }
}"""


@pytest.mark.slow
def test_too_little_memory_says_which_size_fits(opened):
    """And that size does fit. While weights are read no size helps."""
    found = opened().evaluate(FILL, 640)
    fits = found["fits"]
    assert found["message"] == f"Too little memory: {fits} × {fits} would fit."
    assert fits >= 96 and found["small"] == fits and found["large"] == 0
    page = opened()
    page.evaluate("() => { klein.memory.grow = () => { throw new RangeError('no more'); }; }")
    loading = page.evaluate("klein.loadBase().then(() => klein.loadEncoder()).catch((error) => error.message)")
    assert loading == "Too little memory: close other pages."


def test_token_ids(page, models):
    """Words, contractions, whitespace, other scripts, special tokens: strings that the tokenizers library splits."""
    r, strings = random.Random(1), []
    words = [
        "a",
        "red",
        "circle",
        "blue",
        "It's",
        "we'll",
        "I'M",
        "don't",
        "12",
        "345",
        "naïve",
        "ſ",
        "'ſ",
        "東京",
        "🙂",
    ]
    words += ["e\u0301", "\u00a0", "\u0085", "\ufeff", "\u200b", "½", "Ⅷ", "٣", "ǅ", "\n", "\r\n", "\t", ".,!?", "--"]
    words += ["<|im_end|>", "<think>", "</think>"]
    for _ in range(200):
        strings.append("".join(r.choice(words) + r.choice(["", " ", "  ", "\n"]) for _ in range(r.randrange(9))))
        letters = [
            r.choice([r.randrange(32, 127), r.randrange(0x3000), r.randrange(0xE000, 0x1F9FF)]) for _ in range(12)
        ]
        strings.append("".join(map(chr, letters)))
    ids = page.evaluate("strings => strings.map(text => klein.tokenizer.encode(text))", strings)
    assert ids == [models["nano"].tokenizer.encode(text).ids for text in strings]
    sun = models["nano"].tokenizer.encode("a red sun é").ids
    spelt = page.evaluate(
        "ids => new TextDecoder().decode(Uint8Array.from(ids.flatMap(id => [...klein.tokenizer.bytes(id)])))", sun
    )
    assert spelt == "a red sun é"


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1, 2**32 + 5, 2**53 + 1, 2**64 - 1])
def test_noise(page, seed):
    """Not bit for bit: the browser's logarithm may differ from the C library's in the last place."""
    ours = np.array(noise(seed, 36)).ravel()
    assert np.abs(floats(page.evaluate(f"base64(code.noise({seed}n, 36 * 128))")) - ours).max() < 1e-6


def test_schedule(page):
    asked = [(1, 36), (4, 36), (4, 4096), (50, 4300), (50, 4301), (1000, 48)]
    found = page.evaluate("asked => asked.map(([steps, n]) => code.schedule(steps, n))", asked)
    for (steps, n), sigmas in zip(asked, found):
        np.testing.assert_allclose(sigmas, schedule(steps, n), atol=1e-12)


SMALL = [1.0, 1e-2, 1e-3, 1e-4]  # a wrong epsilon hides behind large inputs
NORM = """([x, rows, d, weights, kind]) => {
    const it = new code.Klein(window.wasm), at = it.put(Float32Array.from(x)), zeros = new Float32Array(2 * d);
    for (const [name, values] of Object.entries(weights))
        it.place(`it.${name}`, { shape: [d], values: Float32Array.from(values) });
    const y = kind === "layer" ? it.modulate(at, rows, d, zeros, 0, 1)
        : kind === "rms" ? it.rmsNorm(at, rows, d, 1e-6, "it")
        : it.groupNorm(at, rows / 4, 4, d, 4, "it", { frame: 0, act: false });
    return Array.from(it.M.subarray(y, y + rows * d));
}"""


@pytest.mark.slow
@pytest.mark.parametrize("scale", SMALL)
@pytest.mark.parametrize("kind", ["layer", "rms", "group"])
def test_norms_of_small_numbers(page, kind, scale):
    x = scale * mx.random.normal((1, 8, 16), key=mx.random.key(3))
    weight, bias = (mx.random.normal((16,), key=mx.random.key(k)) for k in (4, 5))
    if kind == "layer":
        ours = modulate(x, mx.array(0.0), mx.array(0.0))
    elif kind == "rms":
        ours = mx.fast.rms_norm(x, weight, 1e-6)
    else:
        norm = GroupNorm(16, 4)
        norm.weight, norm.bias = weight, bias
        ours = norm(x.reshape(1, 2, 4, 16))
    weights = {"weight": weight.tolist(), "bias": bias.tolist()}
    theirs = np.array(page.evaluate(NORM, [x.flatten().tolist(), 8, 16, weights, kind]))
    assert np.abs(theirs - np.array(ours).ravel()).max() < 2e-6 * max(1, np.abs(np.array(ours)).max())


PREVIEW = """async ([scripts, model, latents, gh, gw]) => {
    const { preview } = await import(`${scripts}/fast_preview.js`);
    const matrix = new Float32Array(await (await fetch(`${scripts}/fast_preview/${model}.bin`)).arrayBuffer());
    return [base64(matrix), base64(preview(matrix, new Float32Array(from64(latents).buffer), gh, gw).rgba)];
}"""


@pytest.mark.slow
@pytest.mark.parametrize("model", ["nano", "critters"])
def test_the_fast_preview_is_the_packages(page, model, folder):
    """Its matrix as fitted today, and the small picture that it makes of latents."""
    latents = mx.random.normal((1, 4, 6, 128), key=mx.random.key(2))
    text = base64.b64encode(np.array(latents).tobytes()).decode()
    matrix, rgba = page.evaluate(PREVIEW, [f"./{folder.name}", model, text, 4, 6])
    fitted = fit_preview(Klein.from_pretrained(model).autoencoder)
    np.testing.assert_allclose(floats(matrix).reshape(fitted.shape), np.array(fitted), atol=2e-3)
    ours = np.array(to_images(preview_pixels(fitted, latents))[0]).astype(int)
    theirs = np.frombuffer(base64.b64decode(rgba), np.uint8).reshape(16, 24, 4)
    assert np.abs(theirs[..., :3] - ours).max() <= 1 and (theirs[..., 3] == 255).all()


GEMM = """([m, k, n, kernel]) => {
    const it = new code.Klein(kernel ? window.wasm : null), sizes = [m * n, m * k, k * n];
    const [y, x, w] = sizes.map((size, i) => code.noise(i, size + size % 2));
    const [ty, tx, tw] = [y, x, w].map((values) => it.put(values));
    it.gemm(ty, n, tx, k, tw, n, m, k, n);
    return [y, x, w, it.M.slice(ty, ty + m * n)].map(base64);
}"""


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("m, k, n", [(1, 5, 4), (2, 3, 8), (36, 128, 384), (7, 33, 12), (67, 32, 68)])
def test_the_kernel_multiplies(page, m, k, n, kernel):
    """Every path of gemm.c: rows by fours and what is left, columns by eights and fours."""
    y, x, w, got = (floats(text) for text in page.evaluate(GEMM, [m, k, n, kernel]))
    x, w = x[: m * k].reshape(m, k).astype(float), w[: k * n].reshape(k, n)
    np.testing.assert_allclose(got.reshape(m, n), y[: m * n].reshape(m, n) + x @ w, atol=1e-4)


def test_the_kernel_computes_silu(page):
    xs = np.concatenate([np.linspace(-80, 80, 4093), [0.0, -0.0, 1e-30]]).astype(np.float32)
    script = """xs => {
        const it = new code.Klein(window.wasm), at = it.put(Float32Array.from(xs));
        it.silu(at, xs.length);
        return base64(it.M.slice(at, at + xs.length));
    }"""
    want = xs / (1 + np.exp(-xs.astype(float)))
    np.testing.assert_allclose(floats(page.evaluate(script, xs.tolist())), want, rtol=2e-6, atol=1e-37)


# ---------------------------------------------------------------- would these tests notice?

BROKEN = {
    "RoPE turns the other way": ("si = sin[i * half + c]", "si = -sin[i * half + c]"),
    "padding is looked at": ("Math.min(i + 1, ids.length)", "m"),
    "scale and shift swapped": ("of.mod, 0, 1)", "of.mod, 1, 0)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("line", BROKEN.values(), ids=BROKEN)
def test_a_broken_line_is_noticed_in_pictures(opened, folder, models, line):
    source = (folder / "klein.js").read_text("utf-8")
    assert source.count(line[0]) == 1
    (folder / "broken.js").write_text(source.replace(*line), "utf-8")
    page = opened(f"broken.js?{random.random()}")
    with pytest.raises(AssertionError):
        check(compare(page, models["nano"], {"prompt": "a red house", "seed": 4, "steps": 1}))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["layer", "group"])
def test_a_wrong_epsilon_is_noticed_in_small_numbers(opened, folder, kind):
    source = (folder / "klein.js").read_text("utf-8")
    assert source.count("1e-6)") >= 2
    (folder / "broken.js").write_text(source.replace("1e-6)", "1e-5)"), "utf-8")
    with pytest.raises(AssertionError):
        test_norms_of_small_numbers(opened(f"broken.js?{random.random()}"), kind, 1e-3)


def other_groups(self, x):  # chapter 1's: the next channel belongs to the next group
    channels = x.mean(axis=2).mean(axis=1).reshape(len(x), -1, self.groups)
    return mx.tile(channels.mean(axis=1), (1, x.shape[-1] // self.groups))[:, None, None]


def atlas_mistakes() -> dict[str, AbstractContextManager]:
    """The package with each mistake, as chapters 1, 2 and 5 make them."""
    line = mistakes.line
    by_halves = "mx.split(x, 2, axis=-1)[0]\n    odd = mx.split(x, 2, axis=-1)[1]"
    ids = "zero + t, h, w, zero"
    blocks = transformer.DoubleBlock.__call__
    read = transformer.Transformer.__call__
    return {
        "statistics left out": patch.object(LatentBatchNorm, "denormalize", lambda self, z: z),
        "row, column swapped": line(unpatchify, "0, 1, 4, 2, 5, 3", "0, 1, 5, 2, 4, 3"),
        "MLX's group order": patch.object(GroupNorm, "group_mean", other_groups),
        "pairs by halves": line(apply_rope, "pairs[..., 0]\n    odd = pairs[..., 1]", by_halves),
        "ids without h and w": line(image_ids, ids, "zero + t, zero, zero, zero"),
        "h and w swapped": line(image_ids, ids, "zero + t, w, h, zero"),
        "SwiGLU halves swapped": line(transformer.SwiGLU.__call__, "nn.silu(gate) * up", "nn.silu(up) * gate"),
        "shift and scale swapped": line(transformer.FinalLayer.__call__, "shift, scale = ", "scale, shift = "),
        "positions: picture first": line(transformer.Transformer.rope, "txt_ids, img_ids]", "img_ids, txt_ids]"),
        "blocks: picture first": line(blocks, "(txt_qkv, img_qkv)", "(img_qkv, txt_qkv)"),
        "read from the front": line(read, "x[:, txt.shape[1] :]", "x[:, : img.shape[1]]"),
        "epsilon 1e-5": line(transformer.modulate, "None, 1e-6", "None, 1e-5"),
    }


SPOILED = """async ([scripts, name]) => {
    const { spoil } = await import(`${scripts}/mistakes.js`);
    const source = spoil(await (await fetch(`${scripts}/klein.js`)).text(), name);
    const { Klein } = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
    Object.setPrototypeOf(klein, Klein.prototype);
    const pictures = [];
    for (const { clean, gh, gw } of klein.draw({ prompt: "a red circle above a blue square", seed: 7n, steps: 4,
        width: 96, height: 96 })) pictures.push(base64(klein.decode(clean, gh, gw).rgba));
    Object.setPrototypeOf(klein, code.Klein.prototype);
    return pictures.at(-1);
}"""


@pytest.mark.slow
@pytest.mark.parametrize("name", atlas_mistakes())
def test_mistakes_of_the_atlas(page, folder, name):
    """klein.js with a wrong line draws what the package draws with its wrong line."""
    klein = Klein.from_pretrained()
    with atlas_mistakes()[name]:
        ours = klein("a red circle above a blue square", seed=7, progress=False)
    levels = page.evaluate(SPOILED, [f"./{folder.name}", name])
    theirs = np.frombuffer(base64.b64decode(levels), np.uint8).reshape(96, 96, 4)[..., :3]
    apart = np.abs(theirs.astype(int) - np.array(ours))
    assert apart.max() <= 1 and (apart > 0).mean() < 1e-3


def test_the_player_makes_only_mistakes_of_the_atlas(page, folder):
    script = "async url => (await import(url)).MISTAKES.map(([chapter, name]) => [chapter, name])"
    told = page.evaluate(script, f"./{folder.name}/mistakes.js")
    atlas = (live.NANO.parents[2] / "notebooks/atlas.md").read_text("utf-8")
    known = {(int(chapter), name) for chapter, name in re.findall(r"\{\{#mistake (\d+)_\w+: (.+)\}\}", atlas)}
    assert {tuple(each) for each in told} <= known and [name for _, name in told] == list(atlas_mistakes())


def test_blanks_are_folded_as_the_package_folds_them(folder, page):
    cases = json.loads((live.NANO.parents[2] / "tests/blanks.json").read_text("utf-8"))
    folds = "async ([url, texts]) => { const { foldBlanks } = await import(url); return texts.map(foldBlanks); }"
    told = page.evaluate(folds, [f"./{folder.name}/limits.js", [case["prompt"] for case in cases]])
    assert told == [case["read"] for case in cases]


SAYS = "async ([url, ...asked]) => (await import(url)).describeLimits(...asked)"


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [
    "a red star", "A cat!", "ein roter Stern auf blauem Grund", "a pink heart on a black background", "",
    "a red star and a blue star, a green star and a house", "“hearts”… on a pale backdrop",
])  # fmt: skip
def test_the_script_says_what_nano_never_learned(prompt, folder, page):
    """As the command line does, of this prompt in two sizes."""
    for size in ((96, 96), (96, 128)):
        told = page.evaluate(SAYS, [f"./{folder.name}/limits.js", "nano", prompt, *size])
        assert told == describe_limits("nano", 96, prompt, *size)


def test_the_script_says_what_critters_never_learned(chromium, folder, server):
    page = chromium.new_page()
    page.goto(f"{server}?world=critters")
    for prompt in ("a black critter with cat ears", "a cat in a pot on a white backdrop", "a pot and a monster", ""):
        told = page.evaluate(SAYS, [f"./{folder.name}/limits.js", "critters", prompt, 96, 96])
        assert told == describe_limits("critters", 96, prompt, 96, 96)
