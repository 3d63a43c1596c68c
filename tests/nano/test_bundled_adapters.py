"""The adapters that come with nano: they do what they were trained for, and diffusers draws the same with them."""

import random
from dataclasses import replace

import mlx.core as mx
import pytest
from golden_tools import GOLDENS

from kleinlite import Klein
from kleinlite.inference.loaded_model import LoadedModel
from kleinlite.models.adapters import bundled_adapters, open_adapter
from kleinlite.nano.crosses import INKS, PAPERS, closest, cross, cross_accuracy, draw_cross, is_cross, lone
from kleinlite.nano.evaluate import SIZE, TEST, draw_all, examine, held_out_captions, to_array
from kleinlite.pipeline import to_pixels
from kleinlite.sampling import noise
from kleinlite.scenes import SHAPES, Scene, Thing, captions, draw
from recipe.edits import held_out_edits
from recipe.kv_edits import FILE
from recipe.outlines import outline, outlined

CASES = {  # of make_nano_lora_golden.py
    "cross": ("a green cross on a yellow background", {"cross": 1.0}),
    "half": ("a red cross above a blue circle", {"cross": 0.5}),
    "both": ("a purple cross on a white background", {"cross": 1.0, "outlined": 0.6}),
}


@pytest.mark.parametrize("case", CASES)
def test_diffusers_draws_the_same(case):
    """From the same noise and files: diffusers with PEFT, stored by make_nano_lora_golden.py, and ours."""
    theirs = mx.load(str(GOLDENS / "nano_lora.safetensors"))[case].astype(mx.float32)
    prompt, loras = CASES[case]
    klein = Klein.from_pretrained("nano", loras=list(loras.items()))
    ours = to_pixels(klein(prompt, noise=noise(7, 36), progress=False))[0]
    assert mx.abs((ours + 1) * 127.5 - theirs).max().item() <= 2


def test_diffusers_live(tmp_path):
    pytest.importorskip("peft", reason='pip install -e ".[dev]" for torch, diffusers and PEFT')
    torch = pytest.importorskip("torch")
    from make_nano_golden import whole

    from tools.goldens.run_diffusers import draw as theirs, load

    pipeline, settings = load(whole("nano", tmp_path))
    path, start = bundled_adapters()["cross"], noise(3, 36)
    pipeline.load_lora_weights(path.parent, weight_name=path.name)
    picture = theirs(pipeline, settings, "a red cross", size=(96, 96), noise=torch.tensor(start.tolist()))
    ours = to_pixels(Klein.from_pretrained("nano", loras=["cross"])("a red cross", noise=start, progress=False))
    assert mx.abs(ours - to_pixels(picture)).max().item() * 127.5 <= 2


def test_nano_draws_crosses_with_it_and_not_without():
    klein = Klein.from_pretrained("nano", loras=["cross"])
    with_it = cross_accuracy(klein, 8)
    klein.loras["cross"] = 0
    assert with_it >= 0.6 and cross_accuracy(klein, 8) <= 0.3


def outline_accuracy(klein: Klein, count: int) -> float:
    """Of `count` lone shapes, the share to which the outlined drawing of the asked shape is the closest of all.

    The others are the six shapes without an outline, and the five other ones with it.
    """
    inks = [ink for ink in INKS if ink != "black"]  # black has no outline that could be seen
    wishes = random.Random(0).sample([lone(k, c, b) for k in SHAPES for c in inks for b in PAPERS], count)
    right = 0
    for picture, scene in zip(klein([captions(scene)[-1] for scene in wishes], seed=0, progress=False), wishes):
        thing = scene.things[0]
        others = {kind: lone(kind, thing.color, scene.background) for kind in SHAPES}
        drawings = {kind: to_array(draw(other, SIZE)) for kind, other in others.items()}
        drawings |= {f"{kind}, outlined": to_array(outline(other)) for kind, other in others.items()}
        right += closest(picture, drawings) == f"{thing.kind}, outlined"
    return right / count


@pytest.mark.slow
def test_nano_draws_outlines_with_it_and_not_without():
    klein = Klein.from_pretrained("nano", loras=["outlined"])
    with_it = outline_accuracy(klein, 3)
    klein.loras["outlined"] = 0
    assert with_it >= 0.6 and outline_accuracy(klein, 3) == 0


def test_they_are_what_they_say():
    assert set(bundled_adapters()) == {"cross", "outlined", "one-look"}
    for name, path in bundled_adapters().items():
        adapter = open_adapter(name)
        taught = name in ("cross", "outlined")  # with pictures; the others learned from nano itself
        assert path.stat().st_size < (200_000 if taught else 2_000_000) and adapter.kind == "LoRA"
        assert adapter.trained_on == ("nano-base" if taught else "nano")


def test_one_look_is_enough_with_its_adapter():
    cases = held_out_captions(12, TEST)
    right = []
    for loras in ([], ["one-look"]):
        klein = Klein.from_pretrained("nano", loras=loras)
        pictures = draw_all(klein, [caption for _, caption in cases], steps=1)
        right.append(sum(all(result.values()) for result in examine(pictures, cases)))
    assert right[1] >= 9 and right[1] > right[0] + 2


@pytest.mark.slow
def test_edits_with_a_cache_come_nearer_to_the_plain_ones():
    klein = Klein.from_pretrained("nano")
    cached = [Klein(LoadedModel(replace(klein._model.checkpoint, info=replace(klein.info, kv=True)))) for _ in range(2)]
    cached[1].loras.add(FILE)
    edits = [edit for edit in held_out_edits(8) if len(edit[0]) == 1]
    apart = [0.0, 0.0]
    for (before, *_), text, _ in edits:
        plain, *others = (to_pixels(k(text, images=[draw(before)], seed=9, progress=False)) for k in (klein, *cached))
        apart = [total + mx.abs(plain - other).mean().item() for total, other in zip(apart, others)]
    assert apart[1] < 0.75 * apart[0]


def test_the_eye_for_crosses():
    def picture(kind):
        return draw(Scene((Thing(kind, "red", "center"),), background="blue", jitter=3), 96)

    assert is_cross(draw_cross("red", "blue", jitter=5), "red", "blue")
    assert not any(is_cross(picture(kind), "red", "blue") for kind in ("circle", "star", "diamond", "square"))


def test_pictures_follow_from_their_seed():
    for make in (cross, outlined):
        (a, text), (b, again) = make(4), make(4)
        assert a.tobytes() == b.tobytes() and text == again and a.size == (96, 96)
        assert make(5)[0].tobytes() != a.tobytes()
