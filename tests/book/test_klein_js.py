"""klein.js, the model in JavaScript, against the package, in a browser: the bundled weights as they are now.

Everything is computed here, twice; nothing is stored. The last tests break a line of the script and see it found out.
"""

import base64
import random
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from browser import serving
from tokenizers import Tokenizer

from kleinlite import Klein
from kleinlite.autoencoder import Autoencoder, AutoencoderConfig, GroupNorm
from kleinlite.book import live
from kleinlite.models.export import save_encoders, save_transformer
from kleinlite.sampling import noise, schedule
from kleinlite.text_encoder import TEMPLATE, TextEncoder, TextEncoderConfig
from kleinlite.transformer import Transformer, TransformerConfig, modulate

OPEN = """async ([scripts, model, script, kernel]) => {
    window.code = await import(`${scripts}/${script}`);
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
    if (wish.reference) { await klein.loadEncoder(); wish.reference.rgba = from64(wish.reference.rgba); }
    const ids = klein.tokenize(wish.prompt), features = base64(klein.encodeText(ids)), steps = [];
    for (const { latents, velocity, clean, gh, gw } of klein.draw({ ...wish, seed: BigInt(wish.seed) }))
        steps.push([latents, velocity, klein.decode(clean, gh, gw).rgba].map(base64));
    return { ids, features, steps };
}"""
CASES = {
    "plain": {"prompt": "a red circle above a blue square", "seed": 7},
    "a large seed, other letters": {"prompt": "It's a BLUE sun, é!", "seed": 2**32 + 5, "steps": 2},
    "wide, three steps": {"prompt": "a green circle below a red triangle", "seed": 5, "width": 128, "steps": 3},
    "tall, one step, the largest seed": {"prompt": "a", "seed": 2**64 - 1, "width": 64, "height": 112, "steps": 1},
    "an edit": {"prompt": "make the circle green", "seed": 7, "steps": 2, "reference": (96, 96)},
    "an edit of another size": {"prompt": "x", "seed": 3, "steps": 1, "width": 64, "height": 64, "reference": (96, 80)},
    "guidance": {"prompt": "a yellow star", "seed": 1, "guidance": 4.0, "model": "nano-base"},
    "guidance and an edit": {
        "prompt": "", "seed": 1, "steps": 1, "guidance": 2.0, "model": "nano-base", "reference": (80, 64),
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Scripts and model, as the site has them."""
    source = tmp_path_factory.mktemp("pages")
    scripts, problems = live.prepare(source)
    assert not problems
    return source / scripts


@pytest.fixture(scope="module")
def server(folder):
    with serving(folder.parent) as address:
        yield address


@pytest.fixture(scope="module")
def opened(chromium, folder, server):
    """opened(script, kernel, model): a page in which `klein` is a model, by this script, with the kernel or without."""

    def opened(script: str = "klein.js", kernel: bool = True, model: str = "nano"):
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
        wish = {"width": size[0], "height": size[1]} | wish
    wish = {"width": klein.info.size, "height": klein.info.size} | wish
    known = {k: v for k, v in wish.items() if k not in ("model", "reference")}
    expected = list(klein.stream(**known, images=images, progress=False))
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


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_same_pictures(page, models, case):
    """Token ids, features, and at every step velocity, latents and the picture expected."""
    check(compare(page, models[case.get("model", "nano")], case))


def test_the_same_without_webassembly(opened, models):
    check(compare(opened(kernel=False), models["nano"], {"prompt": "a red house", "seed": 4, "steps": 2}))


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
        hd=12,
        theta=1e4,
        eps=1e-5,
        taps=(1, 3, 4),
        tokens=40,
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
    save_transformer(folder, Transformer(cfg), text_cfg, distilled=True)
    save_transformer(folder / "base", Transformer(cfg), text_cfg, distilled=False)


def test_all_numbers_are_read_from_the_configs(opened, folder, models, tmp_path):
    write_other_model(tmp_path, models["nano"].tokenizer)
    live.write_folder(folder.parent, "other", live.read_model(tmp_path))
    page, case = opened(model="other"), {"prompt": "a fox", "seed": 5, "steps": 2}
    check(compare(page, Klein.from_pretrained(tmp_path), case | {"reference": (80, 64)}))
    check(compare(page, Klein.from_pretrained(tmp_path / "base"), case | {"guidance": 3.0, "model": "nano-base"}))


def test_the_site_has_a_whole_model(folder, models):
    """Cut into shards it is still a folder that the package loads."""
    (model,) = folder.parent.glob("nano-*")
    there = Klein.from_pretrained(model)("a boat", seed=1, progress=False)
    assert there.tobytes() == models["nano"]("a boat", seed=1, progress=False).tobytes()


def test_what_is_loaded_when(folder):
    """What the page says of bytes is what the browser asks for."""
    said = live.count_bytes(files := live.read_model())
    assert said["first"] <= live.FIRST and sum(map(len, files.values())) <= live.MODELS
    part = lambda name: (live.NANO / name).stat().st_size
    everything = part("transformer/diffusion_pytorch_model.safetensors") + part(
        "vae/diffusion_pytorch_model.safetensors"
    )
    assert said["encoder"] > 0 and said["first"] + said["encoder"] > everything
    assert said["base"] >= part("base/transformer/diffusion_pytorch_model.safetensors")


def test_a_prompt_too_long(page):
    told = page.evaluate("() => { try { klein.tokenize('red '.repeat(40)); } catch (error) { return error.message; } }")
    assert "this model reads" in told and "are the chat template): shorten it by about" in told


# ---------------------------------------------------------------- piece by piece


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


GEMM = """([m, k, n, kernel]) => {
    const it = new code.Klein(kernel ? window.wasm : null), sizes = [m * n, m * k, k * n];
    const [y, x, w] = sizes.map((size, i) => code.noise(i, size + size % 2));
    const [ty, tx, tw] = [y, x, w].map((values) => it.put(values));
    it.gemm(ty, n, tx, k, tw, n, m, k, n);
    return [y, x, w, it.M.slice(ty, ty + m * n)].map(base64);
}"""


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
    "RoPE turns the other way": (
        "M[at] = a * co - b * si; M[at + apart] = a * si",
        "M[at] = a * co + b * si; M[at + apart] = -a * si",
    ),
    "padding is looked at": ("Math.min(i + 1, ids.length)", "m"),
    "scale and shift swapped": ("of.mod, 0, 1)", "of.mod, 1, 0)"),
}


@pytest.mark.parametrize("line", BROKEN.values(), ids=BROKEN)
def test_a_broken_line_is_noticed_in_pictures(opened, folder, models, line):
    source = (folder / "klein.js").read_text("utf-8")
    assert source.count(line[0]) == 1
    (folder / "broken.js").write_text(source.replace(*line), "utf-8")
    page = opened(f"broken.js?{random.random()}")
    with pytest.raises(AssertionError):
        check(compare(page, models["nano"], {"prompt": "a red house", "seed": 4, "steps": 1}))


@pytest.mark.parametrize("kind", ["layer", "group"])
def test_a_wrong_epsilon_is_noticed_in_small_numbers(opened, folder, kind):
    source = (folder / "klein.js").read_text("utf-8")
    assert source.count("1e-6)") >= 2
    (folder / "broken.js").write_text(source.replace("1e-6)", "1e-5)"), "utf-8")
    with pytest.raises(AssertionError):
        test_norms_of_small_numbers(opened(f"broken.js?{random.random()}"), kind, 1e-3)
