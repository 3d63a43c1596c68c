"""Memory: what is read when, what is let go, what is refused; the plan beside what is measured; the bench's ledger."""

import json
import math
import re
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from test_keys import TEXT_ENCODERS, TRANSFORMERS, text_encoder_shapes, transformer_shapes

from kleinlite import pipeline
from kleinlite.autoencoder import Autoencoder, AutoencoderConfig
from kleinlite.bench import picture
from kleinlite.checkpoints import open_checkpoint
from kleinlite.models.configs import RELEASED
from kleinlite.models.download import MODELS
from kleinlite.pipeline import Klein, Plan, check_memory, decode_in_tiles, memory_plan, parameters
from kleinlite.quantisation import PACKINGS
from kleinlite.text_encoder import TextEncoder, TextEncoderConfig
from kleinlite.transformer import Transformer, TransformerConfig

TINY = Path(__file__).parent / "pipelines" / "tiny"
WISH = {"width": 48, "height": 32, "steps": 2, "seed": 5, "progress": False}


def tiny(**how) -> Klein:
    return Klein.from_pretrained(TINY, dtype=mx.float32, **how)


class Watched:
    """A checkpoint that writes down what is loaded, and what was in memory at that moment."""

    def __init__(self, klein: Klein):
        self.klein, self.inner, self.log = klein, klein.checkpoint, []
        klein.checkpoint = self

    def __getattr__(self, name: str):
        if name.startswith("load_"):
            self.log.append((name.removeprefix("load_"), sorted(self.klein._parts)))
        return getattr(self.inner, name)

    def loaded(self) -> list[str]:
        return [name for name, _ in self.log if name != "tokenizer"]


def levels(picture) -> bytes:
    return picture.tobytes()


# ---------------------------------------------------------------- use and let go


def test_nothing_is_loaded_before_it_is_needed():
    klein = tiny()
    watched = Watched(klein)
    assert watched.log == [] and klein.info.distilled
    klein._repr_html_()
    assert watched.log == []


def test_the_text_encoder_is_gone_before_the_transformer_comes():
    klein = tiny()
    watched = Watched(klein)
    klein("a red circle", **WISH)
    assert watched.loaded() == ["text_encoder", "transformer", "autoencoder"]
    assert "text_encoder" not in dict(watched.log)["transformer"]
    assert sorted(klein._parts) == ["autoencoder", "tokenizer", "transformer"]


def test_a_prompt_that_is_known_needs_no_text_encoder():
    klein = tiny()
    watched = Watched(klein)
    first = klein("a red circle", **WISH)
    assert levels(klein("a red circle", **WISH)) == levels(first)
    assert watched.loaded().count("text_encoder") == 1
    klein(["a red circle", "a blue square"], **WISH)  # another batch
    assert watched.loaded().count("text_encoder") == 2
    for i in range(9):
        klein.encode_prompt(f"a heart {i}")
    assert len(klein._features) <= 4  # they are 8 MB each in the 4B


def test_guidance_reads_the_text_encoder_once():
    klein = Klein.from_pretrained(TINY / "base", dtype=mx.float32)
    watched = Watched(klein)
    klein("a red circle", guidance=2.0, negative_prompt="a square", **WISH)
    assert watched.loaded().count("text_encoder") == 1


def test_features_do_not_hold_on_to_the_encoder():
    """They are computed before the encoder goes. If not, its weights would come back for them, and stay."""
    features = tiny().encode_prompt("a")
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(features)
    assert mx.get_peak_memory() <= before, "there was something left to compute"


def test_keep_loaded():
    klein = tiny(keep_loaded=True)
    watched = Watched(klein)
    for prompt in ("a", "b"):
        klein(prompt, **WISH)
    assert sorted(watched.loaded()) == ["autoencoder", "text_encoder", "transformer"]


def test_what_you_ask_for_stays_and_may_be_changed():
    klein = tiny()
    plain = klein.encode_prompt("a red circle")
    klein.text_encoder.embed_tokens.weight *= 2
    changed = klein.encode_prompt("a red circle")
    assert mx.abs(changed - plain).max().item() > 1e-3 and "text_encoder" in klein._parts
    klein.transformer.img_in.weight *= 2
    picture = klein("a red circle", **WISH)
    assert levels(picture) == levels(klein("a red circle", **WISH)) != levels(tiny()("a red circle", **WISH))


@pytest.mark.parametrize("stop", [False, True])
def test_where_memory_is_short_the_transformer_goes_too(monkeypatch, stop):
    monkeypatch.setattr(pipeline, "machine_memory", lambda: (10**12, 1))
    klein = tiny()
    watched, stays = Watched(klein), []
    decode = Autoencoder.decode
    monkeypatch.setattr(Autoencoder, "decode", lambda *x: stays.append("transformer" in klein._parts) or decode(*x))
    if stop:
        stream = klein.stream("a red circle", **WISH)
        next(stream)
        assert "transformer" in klein._parts
        stream.close()  # as when a loop over it is left
    else:
        assert levels(klein("a red circle", **WISH)) == levels(tiny()("a red circle", **WISH))
        assert stays[0] is False
    assert "transformer" not in klein._parts
    klein("another", **WISH)
    assert ("text_encoder", ["autoencoder", "tokenizer"]) in watched.log or stop


def test_where_memory_is_short_what_is_yours_stays(monkeypatch):
    monkeypatch.setattr(pipeline, "machine_memory", lambda: (10**12, 1))
    klein = tiny()
    mine = klein.transformer
    klein("a", **WISH)
    assert klein.transformer is mine


def test_the_table_escapes_the_name(tmp_path):
    folder = shutil.copytree(TINY, tmp_path / "<b>&x")
    html = Klein.from_pretrained(folder)._repr_html_()
    assert "<b>&x" not in html and "&lt;b&gt;&amp;x" in html
    klein = tiny()
    assert klein._repr_html_().count("<td>no</td>") == 3
    klein("a", **WISH)
    assert re.findall(r"<td>(yes|no)</td>", klein._repr_html_()) == ["no", "yes", "yes"]


# ---------------------------------------------------------------- the plan


def test_parameters_are_those_of_the_released_models():
    for name, text, expected in (("4b", "4b", 3_875_544_576), ("9b", "8b", 9_078_581_248)):
        cfg, text_cfg = RELEASED[name]
        assert parameters(Transformer, cfg) == expected
        assert cfg.d_text == TRANSFORMERS[name]["joint_attention_dim"] == 3 * text_cfg.d
        assert text_cfg.d_mlp == TEXT_ENCODERS[text]["intermediate_size"]
    assert parameters(TextEncoder, TextEncoderConfig()) == 3_114_088_192 + 2560  # 27 layers, embedding, last norm


def test_the_plan_is_arithmetic():
    configs = *RELEASED["4b"], AutoencoderConfig()
    small, large = (memory_plan(*configs, width=side, height=side, cpu=False) for side in (512, 1024))
    assert small[:3] == large[:3] and large.decode == 4 * small.decode == 6 * 4 * 1024 * 1024 * 256
    half = memory_plan(*configs, width=512, height=512, bits=(4.5, 8.5), cpu=False)
    assert abs(half.transformer * 16 / 4.5 - small.transformer) < 4 and half.autoencoder == small.autoencoder
    assert abs(half.text_encoder * 16 / 8.5 - small.text_encoder) < 4
    two = memory_plan(*configs, width=512, height=512, references=2048, b=2, cpu=False)
    assert two.step > 2 * small.step and two.decode == 2 * small.decode
    assert memory_plan(*configs, width=512, height=512, cpu=True).step == 2 * small.step  # float32


def test_least_and_most():
    plan = Plan(text_encoder=6, transformer=8, autoencoder=1, encode=1, step=2, decode=5)
    assert plan.least == 10 and plan.most == 20
    assert plan._replace(decode=50).least == 51 and plan._replace(encode=10).least == 16


@pytest.mark.parametrize(
    "bits, word", [((16, 8, 4), "quantize=8"), ((32, 16, 4), "quantize=4"), ((32, 32, 32), "smaller")]
)
def test_what_cannot_fit_is_refused_with_the_way_out(monkeypatch, bits, word):
    monkeypatch.setattr(pipeline, "machine_memory", lambda: (10 * 10**9, 7 * 10**9))
    whole, eight, four = (Plan(0, n * 10**9, 0, 0, 0, 0) for n in bits)
    with pytest.raises(MemoryError, match=rf"takes {bits[0]}\.0 GB .* has 10\.0 GB: .*{word}"):
        check_memory(whole, {8: eight, 4: four})
    check_memory(four._replace(transformer=9 * 10**9), {})


def test_a_picture_too_large_is_refused_before_anything_is_read(monkeypatch):
    monkeypatch.setattr(pipeline, "machine_memory", lambda: (10**6, 10**6))
    klein = tiny()
    watched = Watched(klein)
    with pytest.raises(MemoryError, match="smaller picture"):
        klein("a red circle", **WISH | {"width": 1024, "height": 1024})
    assert watched.log == []


def test_the_machine_has_memory():
    whole, usable = pipeline.machine_memory()
    assert 2**30 < usable <= whole < 2**50


def test_bits_are_counted_in_the_files():
    checkpoint = open_checkpoint(TINY, dtype=mx.float32)
    assert pipeline.bits_per_weight(checkpoint) == (32, 32)  # small parts are cast
    checkpoint = open_checkpoint("nano", dtype=mx.float32, quantize=4)
    assert pipeline.bits_per_weight(checkpoint) == (4.5, 4.5)


def test_bits_of_a_large_part_are_those_of_its_files(monkeypatch):
    monkeypatch.setattr(pipeline, "SMALL", 0)
    checkpoint = open_checkpoint("nano", dtype=mx.float32)
    assert all(abs(bits - 16) < 0.1 for bits in pipeline.bits_per_weight(checkpoint))  # float16


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="the sums were fitted on a CPU")
def test_the_plan_is_near_what_is_measured():
    """Within a third, for the network that takes most: the decoder, and for nano's step at 256 × 256."""
    klein = Klein.from_pretrained("nano")
    request = pipeline.check_request(klein.info, "a", (), 256, 256, 1, None, "", 7)
    plan = pipeline.plan_request(klein.checkpoint, request, 32)
    others = mx.get_active_memory()  # what other tests keep
    measured = picture.measure(klein, 256, 1)
    step, decode = plan.transformer + plan.step, plan.transformer + plan.autoencoder + plan.decode
    for stage, predicted in {"step 1": step, "decode": decode}.items():
        assert 2 / 3 < (measured[stage].arrays - others) / predicted < 4 / 3, stage


# ---------------------------------------------------------------- the page "Which machine runs what"

PAGE = (Path(__file__).parent.parent / "notebooks" / "machines.md").read_text("utf-8")
MACS = (8, 16, 24, 32, 36, 48, 64, 96, 128, 192)


def precisions(size: str) -> dict[str, tuple[float, float]]:
    """Bits per weight of the transformer and of the text encoder in each row of the page."""
    file = lambda kind: (8 * MODELS[f"{size}-{kind}"].weights / MODELS[size].size.transformer, 16)
    packed = {f"{q} bits": (PACKINGS[q].bits_per_weight,) * 2 for q in (8, 6, 5, 4, 3)}
    return {"bfloat16": (16, 16), "FP8 file": file("fp8"), **packed, "NVFP4 file": file("nvfp4")}


def fits(needed: float) -> str:
    """The smallest Mac whose GPU may use that much."""
    return f"{next(mac for mac in MACS if needed <= mac * 2**30 * (2 / 3 if mac <= 36 else 3 / 4))} GB"


def expected_table() -> list[str]:
    lines = []
    for size, names in (("4b", "`4b`, `base-4b`"), ("9b", "`9b`, `base-9b`, `9b-kv`")):
        configs = *RELEASED[size], AutoencoderConfig()
        for precision, bits in precisions(size).items():
            plans = [memory_plan(*configs, width=side, height=side, bits=bits, cpu=False) for side in (512, 1024)]
            on_cpu = memory_plan(*configs, width=512, height=512, bits=bits, cpu=True)
            cells = [cell for plan in plans for cell in (f"{plan.least / 1e9:.1f}", fits(plan.least))]
            weights = " + ".join(f"{n / 1e9:.2f}" for n in plans[0][:3])
            lines.append(f"| {names} | {precision} | {weights} | {' | '.join(cells)} | {on_cpu.least / 1e9:.1f} |")
            names = ""
    return lines


def test_the_page_says_what_the_plan_says():
    table = expected_table()
    missing = [line for line in table if line not in PAGE]
    assert not missing, "the page should have:\n" + "\n".join(table)


def test_weights_on_the_page_are_counted_right():
    (small, text), (large, text8) = RELEASED["4b"], RELEASED["9b"]
    whole = lambda cfg: sum(w.size for _, w in tree_flatten(TextEncoder(cfg).parameters()))
    used = lambda cfg: parameters(TextEncoder, cfg) - cfg.d  # the last norm is not read either
    autoencoder = parameters(Autoencoder, AutoencoderConfig())
    counts = [parameters(Transformer, small), parameters(Transformer, large)]
    counts += [f(cfg) for cfg in (text, text8) for f in (whole, used)]
    expected = [(f"{n:,}", f"{2 * n / 1e9:.2f} GB") for n in counts] + [
        (f"{autoencoder:,}", f"{4 * autoencoder / 1e9:.2f} GB")
    ]
    rows = re.search(r"^\| part .*\n\|-.*\n((?:\|.*\n)+)", PAGE, re.M)[1].splitlines()
    assert [tuple(cell.strip() for cell in row.strip("|").split("|"))[1:] for row in rows] == expected


# ---------------------------------------------------------------- tiles


def test_tiles():
    mx.random.seed(3)
    autoencoder, latents = Autoencoder(AutoencoderConfig.tiny()).eval(), mx.random.normal((2, 7, 11, 128))
    whole = autoencoder.decode(latents)
    assert mx.allclose(decode_in_tiles(autoencoder, latents, tile=11), whole, atol=1e-5)
    tiled = decode_in_tiles(autoencoder, latents, tile=4, overlap=2)
    assert tiled.shape == whole.shape == (2, 112, 176, 3)
    assert 1e-4 < mx.abs(tiled - whole).mean().item() / mx.abs(whole).mean().item() < 1


def test_tiles_fade_without_a_seam():
    """With a decoder that has no norms, every tile says the same of a pixel: nothing may change."""

    class Repeat:
        def decode(self, latents):
            return mx.repeat(mx.repeat(latents[..., :3], 16, axis=1), 16, axis=2)

    latents = mx.random.normal((1, 9, 6, 128), key=mx.random.key(1))
    assert mx.allclose(decode_in_tiles(Repeat(), latents, tile=4, overlap=1), Repeat().decode(latents), atol=1e-5)


# ---------------------------------------------------------------- the bench

SMALL = TransformerConfig(double_blocks=1, single_blocks=2, heads=2, axes=(16,) * 4, d_text=3 * 64)
SMALL_TEXT = TextEncoderConfig(
    vocab=2000, d=64, d_mlp=96, layers=4, heads=4, kv_heads=2, hd=16, taps=(1, 2, 3), tokens=32
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "random"
    picture.write_model(folder, SMALL, SMALL_TEXT, AutoencoderConfig(channels=(32, 32, 64, 64)))
    return folder


@pytest.mark.parametrize("size, text", [("4b", "4b"), ("9b", "8b")])
def test_a_random_model_has_the_released_names_shapes_and_type(size, text):
    cfg, text_cfg = RELEASED[size]
    for module, sources, expected in (
        (Transformer(cfg), picture.transformer_sources, transformer_shapes(size, "folder")),
        (TextEncoder(text_cfg), picture.text_encoder_sources, text_encoder_shapes(text)),
    ):
        found = picture.random_weights(picture.for_folder(module, sources, mx.bfloat16))
        assert {name: w.shape for name, w in found.items()} == expected
        assert {w.dtype for w in found.values()} == {mx.bfloat16}


def test_shards_and_their_index(tmp_path):
    picture.write_part(tmp_path / "t", TextEncoder(SMALL_TEXT), picture.text_encoder_sources, "model", {}, 200_000)
    index = json.loads((tmp_path / "t" / "model.safetensors.index.json").read_text())["weight_map"]
    files = sorted(p.name for p in (tmp_path / "t").glob("*.safetensors"))
    assert len(files) > 1 and sorted(set(index.values())) == files
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert len(index) == len(tree_flatten(TextEncoder(SMALL_TEXT).parameters()))
    for file in files:
        assert set(mx.load(str(tmp_path / "t" / file))) == {name for name, place in index.items() if place == file}


def test_random_weights_keep_sizes():
    given = {"a.weight": mx.zeros((300, 200)), "a.bias": mx.zeros((300,)), "n.weight": mx.zeros((7,))}
    found = picture.random_weights(given)
    assert {k: w.shape for k, w in found.items()} == {k: w.shape for k, w in given.items()}
    assert abs(math.sqrt(200) * mx.sqrt((found["a.weight"].astype(mx.float32) ** 2).mean()).item() - 1) < 0.05
    assert found["a.bias"].tolist() == [0] * 300 and found["n.weight"].tolist() == [1] * 7


@pytest.mark.parametrize("more", [[], ["--quantize", "8"]])
def test_the_ledger(model, capsys, more):
    picture.main([str(model), "--size", "64", "--steps", "2", *more])
    out = capsys.readouterr().out
    assert ("quantize=8" if more else "as stored") in out and "64 × 64" in out
    stages = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("| ")]
    assert stages == ["stage", "prompt", "load", "step 1", "step 2", "decode", "whole run"]
    numbers = re.findall(r"(\d+\.\d+) \((\d+\.\d+|–)\)", out)
    assert len(numbers) == 5 * 4 + 1


def test_the_whole_bench(tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(RELEASED, "4b", (SMALL, SMALL_TEXT))
    monkeypatch.setattr(picture, "AutoencoderConfig", AutoencoderConfig.tiny)
    picture.main(["--full", "--keep", str(tmp_path / "kept"), "--size", "32", "--steps", "1"])
    out = capfd.readouterr().out
    assert out.count("whole run") == 3 and (tmp_path / "kept" / "model_index.json").exists()
    assert re.findall(r"kept, (.*?), 32", out) == ["as stored", "quantize=8", "quantize=4"]
