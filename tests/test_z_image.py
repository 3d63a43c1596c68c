"""Z-Image (chapter 17) against diffusers, block by block and whole, and everything that is told from its files.

The model is in `pipelines/z_image`, see tools/goldens/make_z_image_golden.py.
"""

import json
import shutil
from functools import cache
from pathlib import Path

import mlx.core as mx
import pytest
from golden_tools import LOOSE, TIGHT, check, nchw, nhwc
from mlx.utils import tree_flatten
from peak_memory import peak_memory
from PIL import Image

from kleinlite.checkpoints import rename
from kleinlite.cli import main
from kleinlite.inference.machine_memory import plan_model
from kleinlite.inference.picture_file import picture_info
from kleinlite.klein import Klein
from kleinlite.models.checkpoint import open_checkpoint
from kleinlite.models.configs import infer_config
from kleinlite.models.export import quantize_model
from kleinlite.models.facts import find_facts
from kleinlite.models.families import Z_IMAGE
from kleinlite.models.families.klein import AUTOENCODER_NAMES
from kleinlite.models.families.z_image import Z_IMAGE_NAMES
from kleinlite.models.files import load_arrays, open_weights
from kleinlite.models.formats import match_weights
from kleinlite.models.places import tell
from kleinlite.models.registry import MODELS
from kleinlite.position_ids import rope_table
from kleinlite.transformer import sequential, time_features
from kleinlite.z_image import (
    Flux1Autoencoder,
    Flux1AutoencoderConfig,
    ZImageConfig,
    ZImageTransformer,
    caption_ids,
    encode_caption,
    patches,
    picture_ids,
    static_schedule,
)

HERE = Path(__file__).parent
MODEL = HERE / "pipelines" / "z_image"
cases = pytest.mark.parametrize("case", ["ordinary", "small"])
RUNS = ["t2i", "unicode", "empty", "long", "guided"]


def levels(picture: Image.Image) -> mx.array:
    """(h, w, 3), from 0 to 255"""
    return mx.array(memoryview(picture.tobytes())).reshape(picture.height, picture.width, 3).astype(mx.float32)


def tokens(z: mx.array) -> mx.array:
    """Latents (b, 16, h, w) as tokens (b, n, 64)."""
    return patches(nhwc(z)).reshape(len(z), -1, 64)


class Reference:
    """A model, and what diffusers makes of it."""

    def __init__(self, model: Path, folder: Path):
        self.meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        self.expected = mx.load(str(folder / "expected.safetensors"))
        self.klein = Klein.from_pretrained(model, dtype=mx.float32)

    def wish(self, run: str) -> dict:
        w = self.meta["runs"][run]
        prompt = w["prompt"] if isinstance(w["prompt"], str) else self.meta["prompts"][w["prompt"]]
        wish = {"prompt": prompt, "width": w["width"], "height": w["height"], "steps": w["steps"]}
        wish |= {"guidance": w["guidance"], "negative_prompt": w["negative"] or "", "progress": False}
        return wish | {"noise": tokens(self.expected[f"{run}.trajectory"][:1])}

    def check(self, run: str) -> None:
        """Sigmas, the first velocity, every step and the picture."""
        wish, expected = self.wish(run), self.expected
        steps = list(self.klein.stream(**wish))
        sigmas = [step.t for step in steps] + [steps[-1].t_next]
        assert max(abs(a - b) for a, b in zip(sigmas, expected[f"{run}.sigmas"].tolist(), strict=True)) < 1e-6
        first = expected[f"{run}.model_output0"]
        prompt, *negative = -tokens(first[:, :, 0] if first.ndim == 5 else first)
        wanted = prompt + wish["guidance"] * (prompt - negative[0]) if negative else prompt
        check(steps[0].velocity, wanted[None], LOOSE)
        check(mx.concatenate([step.latents for step in steps]), tokens(expected[f"{run}.trajectory"][1:]), LOOSE)
        picture, image = levels(self.klein(**wish)), expected[f"{run}.image"].astype(mx.float32)
        image = image if expected[f"{run}.image"].dtype == mx.uint8 else 255 * image
        assert mx.abs(picture - image).max().item() <= 1.01


@cache
def golden() -> Reference:
    return Reference(MODEL, MODEL)


@cache
def blocks() -> dict[str, mx.array]:
    return mx.load(str(MODEL / "blocks.safetensors"))


def values(name: str) -> dict[str, mx.array]:
    return {key.removeprefix(f"{name}."): w for key, w in blocks().items() if key.startswith(f"{name}.")}


# ---------------------------------------------------------------- block by block


def rope() -> tuple[mx.array, mx.array]:
    cfg = golden().klein.transformer.cfg
    return rope_table(values("rope")["in.ids"], cfg.axes, cfg.theta)


def test_rope():
    for ours, theirs in zip(rope(), (values("rope")["out.cos"], values("rope")["out.sin"])):
        check(ours, theirs, 1e-6)


def test_time():
    v, net = values("time"), golden().klein.transformer
    check(net.t_embedder(time_features(v["in.t"])), v["out.vec"], LOOSE)


@cases
def test_attention(case):
    v = values(f"attention.{case}")
    check(golden().klein.transformer.noise_refiner[1].attention(v["in.x"], rope()), v["out.x"])


@cases
def test_feed_forward(case):
    v = values(f"feed_forward.{case}")
    check(golden().klein.transformer.noise_refiner[1].feed_forward(v["in.x"]), v["out.x"])


@cases
def test_block(case):
    v = values(f"block.{case}")
    check(golden().klein.transformer.noise_refiner[1](v["in.x"], rope(), v["in.vec"]), v["out.x"])


@cases
def test_block_of_the_caption(case):
    v = values(f"context_block.{case}")
    check(golden().klein.transformer.context_refiner[1](v["in.x"], rope()), v["out.x"])


@cases
def test_caption(case):
    v = values(f"caption.{case}")
    check(sequential(golden().klein.transformer.cap_embedder, v["in.x"]), v["out.x"])


@cases
def test_final_layer(case):
    v = values(f"final_layer.{case}")
    check(golden().klein.transformer.final_layer(v["in.x"], v["in.vec"]), v["out.x"])


def test_autoencoder():
    vae, expected = golden().klein.autoencoder, golden().expected
    mean, _ = mx.split(vae.encoder(nhwc(expected["vae.input"])), 2, axis=-1)
    check(nchw(mean), expected["vae.latent_mean"])
    check(nchw(vae.decoder(nhwc(expected["vae.latent_mean"]))), expected["vae.decoded"])
    latents = vae.encode(nhwc(expected["vae.input"]))
    check(latents, patches((nhwc(expected["vae.latent_mean"]) - 0.1159) * 0.3611))
    check(nchw(vae.decode(latents)), expected["vae.decoded"])


def test_positions():
    ids = picture_ids(2, 3, 32)
    assert ids[:6].tolist() == [[33, i, j] for i in range(2) for j in range(3)] and not ids[6:].any()
    assert len(ids) == 32 and caption_ids(3).tolist() == [[1, 0, 0], [2, 0, 0], [3, 0, 0]]


def test_schedule():
    assert static_schedule(8)[:3] == pytest.approx([1, 21 / 22, 0.9]) and static_schedule(8)[-2:] == [0.3, 0.0]


# ---------------------------------------------------------------- whole


@pytest.mark.parametrize("i", range(4))
def test_features(i):
    klein, prompt = golden().klein, golden().meta["prompts"][i]
    check(klein.encode_prompt(prompt)[0], golden().expected[f"prompt{i}.embeds"], TIGHT)
    check(encode_caption(klein.text_encoder, klein.tokenizer, prompt)[0], golden().expected[f"prompt{i}.embeds"])


def test_the_longest_prompt():
    """As many tokens as the model reads, and not one more."""
    klein = golden().klein
    features = encode_caption(klein.text_encoder, klein.tokenizer, "a red circle")
    tokens = features.shape[1]

    def at_most(n):
        return encode_caption(klein.text_encoder, klein.tokenizer, "a red circle", n)

    assert mx.array_equal(at_most(tokens), features)
    with pytest.raises(ValueError, match=f"has {tokens} tokens and this model reads {tokens - 1}"):
        at_most(tokens - 1)


@pytest.mark.parametrize("run", RUNS)
def test_pictures(run):
    golden().check(run)


def test_a_batch_is_its_pictures():
    klein = Klein.from_pretrained(MODEL)
    prompts = ["a red circle", 5 * "a blue square "]  # of 32 and of 64 rows
    many = klein(prompts, seed=[3, 4], width=48, height=32, progress=False)
    alone = [klein(p, seed=s, width=48, height=32, progress=False) for p, s in zip(prompts, (3, 4))]
    assert [picture.tobytes() for picture in many] == [picture.tobytes() for picture in alone]
    assert [len(x[0]) for x in klein.encode_prompt(prompts)] == [len(klein.encode_prompt(p)[0]) for p in prompts]


def test_defaults_metadata_and_preview():
    klein = Klein.from_pretrained(MODEL)
    *_, last = klein.stream("a star", seed=1, progress=False)
    picture = klein("a star", seed=1, progress=False)
    assert last.preview().tobytes() == picture.tobytes() and picture.size == (64, 64)
    made = picture_info(picture)
    assert (made["steps"], made["guidance"], made["seed"]) == (8, 0.0, 1)
    assert last.latents.shape == last.velocity.shape == (1, 16, 64)


@pytest.mark.parametrize(
    ("wish", "told"),
    [
        ({"images": [Image.new("RGB", (64, 64))]}, "cannot edit"),
        ({"guidance": -1.0}, "from 0"),
        ({"negative_prompt": "blue"}, "above 0"),
        ({"noise": mx.zeros((1, 16, 128))}, r"\(1, 16, 64\)"),
        ({"width": 40}, "multiple of 16"),
    ],
)
def test_refused(wish, told):
    with pytest.raises(ValueError, match=told):
        golden().klein("a star", **wish)


def test_a_long_prompt_is_refused():
    with pytest.raises(ValueError, match="shorten"):
        golden().klein(600 * "star ", progress=False)


def test_another_shift_is_another_model(tmp_path):
    folder = tmp_path / "base"
    shutil.copytree(MODEL, folder)
    path = folder / "scheduler" / "scheduler_config.json"
    path.write_text(path.read_text().replace('"shift": 3.0', '"shift": 6.0'))
    info = open_checkpoint(folder, dtype=mx.float32).info
    assert (info.steps, info.guidance) == (50, 4.0)
    assert info.family.schedule(2, 16) == [1.0, pytest.approx(6 * 0.5 / 3.5), 0.0]


# ---------------------------------------------------------------- files


def single_file(path: Path, prefix: str = "model.diffusion_model.") -> Path:
    """The transformer as ComfyUI's file has it: our names, a prefix, and a norm that nobody applies."""
    weights = dict(tree_flatten(golden().klein.transformer.parameters()))
    arrays = {prefix + name: w for name, w in weights.items()}
    mx.save_safetensors(str(path), arrays | {f"{prefix}norm_final.weight": mx.ones((32,))})
    return path


@pytest.mark.parametrize("prefix", ["model.diffusion_model.", ""])
def test_a_single_file(tmp_path, prefix):
    klein = Klein.from_pretrained(single_file(tmp_path / "z.safetensors", prefix), parts=MODEL, dtype=mx.float32)
    wish = golden().wish("t2i") | {"steps": 2}
    assert klein(**wish).tobytes() == golden().klein(**wish).tobytes()


def test_a_single_file_among_another_family(tmp_path):
    path = single_file(tmp_path / "z.safetensors")
    with pytest.raises(ValueError, match="transformer of Z-Image.*FLUX.2"):
        Klein.from_pretrained(path, parts="nano")


def test_an_autoencoder_in_one_file(tmp_path):
    """FLUX.1's `ae.safetensors`: the authors' names, the attention as 1×1 convolutions."""
    arrays = {}
    for name, w in tree_flatten(golden().klein.autoencoder.parameters()):
        matrix = "mid.attn_1" in name and w.ndim == 2
        arrays[name] = w[:, :, None, None] if matrix else w.transpose(0, 3, 1, 2) if w.ndim == 4 else w
    mx.save_safetensors(str(tmp_path / "ae.safetensors"), arrays)
    cfg = infer_config("autoencoder", open_weights(tmp_path / "ae.safetensors"), Z_IMAGE)
    assert isinstance(cfg, Flux1AutoencoderConfig) and (cfg.channels, cfg.layers) == ((4, 4, 8, 8), 1)
    match_weights(Flux1Autoencoder(cfg), load_arrays(tmp_path / "ae.safetensors"), AUTOENCODER_NAMES)


def released_names() -> dict[str, tuple[int, ...]]:
    """The released folder's tensors, by the tables of its documentation, with their shapes."""
    d, found = 3840, {"x_pad_token": (1, 3840), "cap_pad_token": (1, 3840), "cap_embedder.0.weight": (2560,)}
    matrices = {
        "all_x_embedder.2-1": (d, 64), "all_final_layer.2-1.linear": (64, d), "cap_embedder.1": (d, 2560),
        "all_final_layer.2-1.adaLN_modulation.1": (d, 256), "t_embedder.mlp.0": (1024, 256),
        "t_embedder.mlp.2": (256, 1024),
    }  # fmt: skip
    for kind, count in (("noise_refiner", 2), ("context_refiner", 2), ("layers", 30)):
        for p in (f"{kind}.{i}." for i in range(count)):
            for name in ("to_q", "to_k", "to_v", "to_out.0"):
                found[f"{p}attention.{name}.weight"] = (d, d)
            found |= {f"{p}attention.norm_{x}.weight": (128,) for x in "qk"}
            found |= {f"{p}feed_forward.w{i}.weight": (d, 10240) if i == 2 else (10240, d) for i in (1, 2, 3)}
            norms = ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2")
            found |= {f"{p}{norm}.weight": (d,) for norm in norms}
            if kind != "context_refiner":
                matrices[f"{p}adaLN_modulation.0"] = (4 * d, 256)
    for name, shape in matrices.items():
        found |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return found


def test_every_released_tensor_has_its_place():
    names = released_names()
    assert len(names) == 521
    module = ZImageTransformer(ZImageConfig())  # lazy: nothing is computed
    placed = match_weights(module, {name: mx.zeros(shape) for name, shape in names.items()}, Z_IMAGE_NAMES)
    assert len(placed) == 453 and sum(w.size for w in placed.values()) == 6_154_908_736
    used = [source for name in placed for source in rename(name, Z_IMAGE_NAMES)]
    assert sorted(used) == sorted(names)


def test_the_released_autoencoder():
    weights = tree_flatten(Flux1Autoencoder(Flux1AutoencoderConfig()).parameters())
    assert len(weights) == 244 and sum(w.size for _, w in weights) == 83_819_683


def test_float32_files_are_cast_as_they_are_read(tmp_path, monkeypatch):
    """A large part that is stored in float32 is kept in bfloat16, and never there in both."""
    monkeypatch.setattr("kleinlite.models.files.SMALL_PART_BYTES", 0)
    folder = tmp_path / "wide"
    shutil.copytree(MODEL, folder)
    arrays = {name: w.astype(mx.float32) for name, w in load_arrays(MODEL / "transformer").items()}
    shutil.rmtree(folder / "transformer")
    (folder / "transformer").mkdir()
    shutil.copy(MODEL / "transformer" / "config.json", folder / "transformer")
    mx.save_safetensors(str(folder / "transformer" / "diffusion_pytorch_model.safetensors"), arrays)
    size = sum(w.nbytes for w in arrays.values())
    del arrays
    checkpoint = open_checkpoint(folder, dtype=mx.bfloat16)
    mx.clear_cache()
    with peak_memory() as peak:
        module = checkpoint.load_transformer()
        mx.eval(module.parameters())
        widest = max(w.size for _, w in tree_flatten(module.parameters()))
        assert sum(w.nbytes for _, w in tree_flatten(module.parameters())) == size / 2
    assert peak.bytes < size / 2 + 8 * widest
    assert Klein.from_pretrained(folder, dtype=mx.bfloat16)._model.bits[0] == pytest.approx(16, rel=0.01)


# ---------------------------------------------------------------- quantized, listed


def test_quantized(tmp_path):
    wish = {"prompt": "a star", "seed": 1, "steps": 2, "progress": False}
    klein = Klein.from_pretrained(MODEL, quantize=8)
    right, packed = levels(golden().klein(**wish)), klein(**wish)
    assert mx.abs(levels(packed) - right).mean().item() < 12 and picture_info(packed)["quantize"] == 8
    quantize_model(MODEL, tmp_path / "z8", 8, progress=False)
    again = Klein.from_pretrained(tmp_path / "z8")
    assert mx.abs(levels(again(**wish)) - levels(packed)).max().item() <= 1
    assert again.parts.configs.text_encoder.out_layers == (35,)


def test_listed(capsys):
    assert main(["models"]) == 0
    [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("z-image-turbo")]
    for told in ("8, distilled", "6.2 B + 4.0 B", "32.8 GB", "Apache-2.0"):
        assert told in row
    assert MODELS["z-image-turbo"].repo == "Tongyi-MAI/Z-Image-Turbo"


def test_memory_in_16_8_and_4_bits():
    plans = [plan_model(find_facts("z-image-turbo", q), width=512, height=512) for q in (None, 8, 4)]
    assert plans[0].transformer == 2 * 6_154_908_736
    assert [p.transformer for p in plans] == sorted((p.transformer for p in plans), reverse=True)
    assert plans[2].transformer == pytest.approx(4.5 / 16 * plans[0].transformer)


def test_command_line(tmp_path, capsys):
    out = tmp_path / "star.png"
    asked = ["generate", "a star", "--model", str(MODEL), "--steps", "2", "--seed", "1", "-o", str(out)]
    assert main(asked) == 0 and picture_info(out)["model"] == tell(MODEL)
    assert main([*asked, "--guidance", "0"]) == 0
    assert main(["generate", "--like", str(out), "--model", str(MODEL), "-o", str(tmp_path / "again.png")]) == 0
    assert (tmp_path / "again.png").read_bytes()[-200:] == out.read_bytes()[-200:]
    capsys.readouterr()
    assert main([*asked, "--image", str(out)]) == 2 and "cannot edit" in capsys.readouterr().err


# ---------------------------------------------------------------- adapters


def adapter(spelling: str) -> dict[str, mx.array]:
    """One change of queries, output and MLP of the first layer, in a spelling that is about."""
    a, b = mx.random.normal((4, 32), key=mx.random.key(1)), mx.random.normal((32, 4), key=mx.random.key(2))
    found = {}
    for module in ("attention.to_q", "attention.to_out.0"):
        dotted, flat = f"layers.0.{module}", f"layers.0.{module}".replace(".", "_")
        if spelling == "diffusers":
            found |= {f"transformer.{dotted}.lora_A.weight": a, f"transformer.{dotted}.lora_B.weight": b}
        elif spelling == "default":
            found |= {f"transformer.{dotted}.lora_A.default.weight": a}
            found |= {f"transformer.{dotted}.lora_B.default.weight": b}
        elif spelling == "alpha":
            name = f"diffusion_model.{dotted}"
            found |= {f"{name}.lora_down.weight": a, f"{name}.lora_up.weight": 2 * b, f"{name}.alpha": mx.array(2.0)}
        elif spelling == "kohya":
            found |= {f"lora_unet_{flat}.lora_down.weight": a, f"lora_unet_{flat}.lora_up.weight": b}
        elif spelling == "lora.down":
            found |= {f"{dotted}.lora.down.weight": a, f"{dotted}.lora.up.weight": b}
    if spelling == "lora.down":  # the same once more: fused, and under the short name
        for name in ("qkv", "out"):
            whole = mx.zeros((96, 4)) if name == "qkv" else b
            found |= {f"layers.0.attention.{name}.lora.down.weight": a}
            found |= {f"layers.0.attention.{name}.lora.up.weight": whole}
    if spelling == "comfy":
        q = mx.concatenate([b, mx.zeros((64, 4))])
        found = {"diffusion_model.layers.0.attention.qkv.lora_A.weight": a}
        found |= {"diffusion_model.layers.0.attention.qkv.lora_B.weight": q}
        found |= {"diffusion_model.layers.0.attention.out.lora_A.weight": a}
        found |= {"diffusion_model.layers.0.attention.out.lora_B.weight": b}
    return found


@pytest.mark.parametrize("spelling", ["diffusers", "default", "alpha", "kohya", "lora.down", "comfy"])
def test_adapters(spelling, tmp_path):
    path, klein = tmp_path / "change.safetensors", Klein.from_pretrained(MODEL, dtype=mx.float32)
    mx.save_safetensors(str(path), adapter(spelling))
    layer = golden().klein.transformer.layers[0].attention
    change = adapter("diffusers")

    def delta(m):
        return change[f"transformer.layers.0.{m}.lora_B.weight"] @ change[f"transformer.layers.0.{m}.lora_A.weight"]

    x = mx.random.normal((1, 5, 32), key=mx.random.key(3))
    name = klein.loras.add(path, 0.5)
    changed = klein.transformer.layers[0].attention
    check(changed.qkv(x)[..., :32], x @ (layer.qkv.weight[:32] + 0.5 * delta("attention.to_q")).T, TIGHT)
    check(changed.qkv(x)[..., 32:], layer.qkv(x)[..., 32:], TIGHT)
    check(changed.out(x), x @ (layer.out.weight + 0.5 * delta("attention.to_out.0")).T, TIGHT)
    del klein.loras[name]
    wish = {"prompt": "a star", "seed": 1, "steps": 2, "progress": False}
    assert klein(**wish).tobytes() == golden().klein(**wish).tobytes()


def test_an_adapter_of_the_other_family(tmp_path):
    mx.save_safetensors(str(tmp_path / "z.safetensors"), adapter("diffusers"))
    with pytest.raises(ValueError, match="an adapter for Z-Image"):
        Klein.from_pretrained("nano", loras=[tmp_path / "z.safetensors"])
    with pytest.raises(ValueError, match=r"is an adapter for FLUX.2 \[klein\], and this model is Z-Image"):
        Klein.from_pretrained(MODEL, loras=["cross"])


def test_adapters_are_not_trained_on_it():
    from kleinlite.trainer.training_memory import plan_training

    configs = golden().klein.parts.configs
    with pytest.raises(ValueError, match="trains no adapters for Z-Image"):
        plan_training(configs, (64, 64))
