"""The bundled models: their size, what nano draws, and that diffusers draws the same with their files."""

from pathlib import Path

import mlx.core as mx
import pytest

from kleinlite import Klein
from kleinlite.models.checkpoint import resolve_model
from kleinlite.nano.data import draw_samples
from kleinlite.nano.evaluate import examine, held_out_captions, judge, tally
from kleinlite.pipeline import to_images, to_pixels
from kleinlite.sampling import noise
from kleinlite.scenes import draw
from recipe.data import psnr
from recipe.edits import held_out_edits, score_edit

GOLDENS = Path(__file__).parents[1] / "goldens"
THEIRS = mx.load(str(GOLDENS / "nano.safetensors")) | mx.load(str(GOLDENS / "critters.safetensors"))


@pytest.fixture(scope="module")
def nano():
    return Klein.from_pretrained()


@pytest.fixture(scope="module")
def base():
    return Klein.from_pretrained("nano-base")


def picture_of(name):
    return to_images(THEIRS[name][None].astype(mx.float32) / 127.5 - 1)[0]


def levels_apart(image, name):
    ours = (to_pixels(image)[0] + 1) * 127.5
    return mx.abs(ours - THEIRS[name].astype(mx.float32)).max().item()


def test_it_is_small():
    for model, most in (("nano", 34.5e6), ("critters", 18e6)):
        assert sum(f.stat().st_size for f in resolve_model(model).rglob("*") if f.is_file()) <= most


def test_diffusers_draws_the_same(nano, base):
    """From the same noise and files: diffusers' Flux2KleinPipeline, stored by make_nano_golden.py, and ours."""
    start = noise(7, 36)
    pair = nano("a red circle above a blue square", noise=start, progress=False)
    assert levels_apart(pair, "pair") <= 2
    sea = nano("a yellow sun over a blue sea", width=128, height=96, noise=noise(7, 48), progress=False)
    assert levels_apart(sea, "sea") <= 2
    edit = nano("make the circle yellow", images=[picture_of("pair")], noise=start, progress=False)
    assert levels_apart(edit, "edit") <= 2
    two = nano("put both together", images=[picture_of("pair"), picture_of("edit")], noise=start, progress=False)
    assert levels_apart(two, "two") <= 2
    house = base("a red house under a yellow sun", noise=start, steps=6, guidance=3.0, progress=False)
    assert levels_apart(house, "base") <= 2


def test_diffusers_draws_the_same_critters():
    klein = Klein.from_pretrained("critters")
    prompt = "a yellow critter with horns and one eye that laughs on a purple background"
    assert levels_apart(klein(prompt, noise=noise(7, 36), progress=False), "laughs") <= 2
    edit = klein("make it frown", images=[picture_of("laughs")], noise=noise(7, 36), progress=False)
    assert levels_apart(edit, "frowns") <= 2


def test_diffusers_live(nano, tmp_path):
    pytest.importorskip("diffusers", reason='pip install -e ".[dev]" for torch and diffusers')
    torch = pytest.importorskip("torch")
    from make_nano_golden import whole

    from tools.goldens.run_diffusers import draw as theirs, load

    start = noise(3, 36)
    picture = theirs(
        *load(whole("nano", tmp_path)), "a yellow star", size=(96, 96), noise=torch.tensor(start.tolist())
    )  # fmt: skip
    ours = to_pixels(nano("a yellow star", noise=start, progress=False))
    assert mx.abs(ours - to_pixels(picture)).max().item() * 127.5 <= 2


def test_the_autoencoder_keeps_pictures(nano):
    x = draw_samples(range(20_000_000, 20_000_032), 96)
    assert psnr(nano.autoencoder.decode(nano.autoencoder.encode(x)), x) > 35


def test_it_draws_what_it_is_told(nano):
    """Held-out captions, fixed seeds, the judge of kleinlite.nano.evaluate; the README's table has more of them."""
    cases = held_out_captions(60)
    drawn = nano([caption for _, caption in cases], seed=list(range(60)), progress=False)
    by_kind, attributes, _ = tally(examine(drawn, cases))
    assert attributes > 0.92, by_kind
    assert min(by_kind[what] for what in ("color", "place")) > 0.95 and by_kind["kind"] > 0.75, by_kind


@pytest.mark.slow
def test_it_edits(nano):
    """What the instruction names changes, and the rest stays, most of the time; the README has the whole table."""
    made, kept = [], []
    for seed, (before, text, after) in enumerate(held_out_edits(40)):
        seen = judge(nano(text, images=[draw(scene) for scene in before], seed=seed, progress=False))
        for rows, row in zip((made, kept), score_edit(seen, before[0], after)):
            rows.append(row)
    assert tally(made)[1] > 0.8 and tally(kept)[1] > 0.85
