"""A model's parts: what is read when, what is let go, what stays."""

import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from peak_memory import peak_memory
from stand_in_hub import TINY

from kleinlite.autoencoder import Autoencoder
from kleinlite.klein import Klein
from kleinlite.models.export import quantize_model

WISH = {"width": 48, "height": 32, "steps": 2, "seed": 5, "progress": False}


def tiny(**how) -> Klein:
    return Klein.from_pretrained(TINY, dtype=mx.float32, **how)


class Watched:
    """A checkpoint that writes down what is loaded, and what was in memory at that moment."""

    def __init__(self, klein: Klein):
        self.model, self.inner, self.log = klein.parts, klein._model.checkpoint, []
        klein._model.parts.checkpoint = self

    def __getattr__(self, name: str):
        if name.startswith("load_"):
            self.log.append((name.removeprefix("load_"), sorted(self.model.loaded)))
        return getattr(self.inner, name)

    def loaded(self) -> list[str]:
        return [name for name, _ in self.log if name != "tokenizer"]


def levels(picture) -> bytes:
    return picture.tobytes()


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
    assert sorted(klein.parts.loaded) == ["autoencoder", "tokenizer", "transformer"]


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
    assert len(klein._model.prompts.remembered) == 1  # of the last call: they are 8 MB each in the 4B


def test_guidance_reads_the_text_encoder_once():
    klein = Klein.from_pretrained(TINY / "base", dtype=mx.float32)
    watched = Watched(klein)
    klein("a red circle", guidance=2.0, negative_prompt="a square", **WISH)
    assert watched.loaded().count("text_encoder") == 1


def test_features_do_not_hold_on_to_the_encoder():
    """They are computed before the encoder goes. If not, its weights would come back for them, and stay."""
    features = tiny().encode_prompt("a")
    mx.clear_cache()
    with peak_memory() as peak:
        mx.eval(features)
    assert peak.bytes <= 0, "there was something left to compute"


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
    assert mx.abs(changed - plain).max().item() > 1e-3 and "text_encoder" in klein.parts.loaded
    klein.transformer.img_in.weight *= 2
    picture = klein("a red circle", **WISH)
    assert levels(picture) == levels(klein("a red circle", **WISH)) != levels(tiny()("a red circle", **WISH))


@pytest.mark.parametrize("stop", [False, True])
def test_where_memory_is_short_the_transformer_goes_too(monkeypatch, stop):
    monkeypatch.setattr("kleinlite.inference.machine_memory.machine_memory", lambda held=0: (10**12, 1))
    klein = tiny()
    watched, stays = Watched(klein), []
    decode = Autoencoder.decode
    monkeypatch.setattr(
        Autoencoder, "decode", lambda *x: stays.append("transformer" in klein.parts.loaded) or decode(*x)
    )
    if stop:
        stream = klein.stream("a red circle", **WISH)
        next(stream)
        assert "transformer" in klein.parts.loaded
        stream.close()  # as when a loop over it is left
    else:
        assert levels(klein("a red circle", **WISH)) == levels(tiny()("a red circle", **WISH))
        assert stays[0] is False
    assert "transformer" not in klein.parts.loaded
    klein("another", **WISH)
    assert ("text_encoder", ["autoencoder", "tokenizer"]) in watched.log or stop


def test_threads_that_ask_at_once_get_one_part():
    klein, barrier = Klein.from_pretrained("nano"), threading.Barrier(2)

    def ask(_):
        barrier.wait()
        return klein.text_encoder

    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(ask, range(2))
    assert one is other is klein.text_encoder


def test_where_memory_is_short_what_is_yours_stays(monkeypatch):
    monkeypatch.setattr("kleinlite.inference.machine_memory.machine_memory", lambda held=0: (10**12, 1))
    klein = tiny()
    mine = klein.transformer
    klein("a", **WISH)
    assert klein.transformer is mine


def test_a_picture_too_large_is_refused_before_anything_is_read(monkeypatch):
    monkeypatch.setattr("kleinlite.inference.machine_memory.machine_memory", lambda held=0: (10**6, 10**6))
    klein = tiny()
    watched = Watched(klein)
    with pytest.raises(MemoryError, match="smaller picture"):
        klein("a red circle", **WISH | {"width": 1024, "height": 1024})
    assert watched.log == []


def test_what_is_packed_already_is_not_told_to_be_packed(monkeypatch, tmp_path):
    advised = []
    monkeypatch.setattr("kleinlite.inference.loaded_model.check_memory", lambda _, fewer, __: advised.append([*fewer]))
    quantize_model(TINY, tmp_path / "packed", 8, progress=False)
    for name in (TINY, tmp_path / "packed"):
        Klein.from_pretrained(name)._check("a", {})
    assert advised == [[8, 6, 5, 4, 3], []]


def test_the_table_escapes_the_name(tmp_path):
    folder = shutil.copytree(TINY, tmp_path / "<b>&x")
    html = Klein.from_pretrained(folder)._repr_html_()
    assert "<b>&x" not in html and "&lt;b&gt;&amp;x" in html
    klein = tiny()
    assert klein._repr_html_().count("<td>no</td>") == 3
    klein("a", **WISH)
    assert re.findall(r"<td>(yes|no)</td>", klein._repr_html_()) == ["no", "yes", "yes"]


def test_numbers_that_are_not_finite_make_no_picture():
    klein = Klein.from_pretrained("nano")
    for noise in (
        mx.full((1, 36, 128), mx.nan),
        mx.full((1, 36, 128), 1e38),
        mx.concatenate([mx.zeros((1, 36, 128)), mx.full((1, 36, 128), 1e38)]),
    ):
        with pytest.raises(ValueError, match="not finite, of which no picture can be made: take dtype"):
            klein(["a"] * len(noise), noise=noise, steps=1, progress=False)


def test_what_others_may_build_on():
    """`klein.parts`: the numbers of the parts, those in memory, and how they come and go."""
    klein = tiny()
    assert {name for name in dir(klein.parts) if name[0] != "_"} == {"configs", "loaded", "load", "release"}
    assert klein.parts.configs.transformer.d_text == klein.encode_prompt("a red circle").shape[-1]
    klein.release()
    assert klein.parts.loaded == {}
    vae = klein.parts.load("autoencoder")
    assert klein.parts.loaded == {"autoencoder": vae} and klein.parts.load("autoencoder") is vae
    assert klein.parts.load("vae") is vae, "the released folders' word is taken too"
    klein.parts.release("vae")
    assert klein.parts.loaded == {}
    with pytest.raises(ValueError, match="no part 'unet': a model has tokenizer, transformer, text_encoder, autoenc"):
        klein.parts.load("unet")


@pytest.mark.parametrize("metal", [True, False])
def test_weights_are_wired_where_there_is_metal(monkeypatch, metal):
    """Of a large model, on a Mac; nobody of us has one."""
    wired = []
    monkeypatch.setattr("kleinlite.models.files.SMALL_PART_BYTES", 0)
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    monkeypatch.setattr(mx, "device_info", lambda *_: {"max_recommended_working_set_size": 9e9})
    monkeypatch.setattr(mx, "set_wired_limit", wired.append)
    tiny().parts.load("transformer")
    assert wired == [9 * 10**9] * metal
