"""Adapters in use: added, weighed and removed in Python and on the command line, remembered by pictures."""

import shutil

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from PIL import Image

from kleinlite import Klein, picture_info, save_picture
from kleinlite.cli import main
from kleinlite.inference.loras import Loras, record_loras
from kleinlite.inference.picture_file import is_lora, read_metadata, remember
from kleinlite.lora import LoRA, new_deltas
from kleinlite.models.adapters import find_adapter, write_adapter
from kleinlite.models.configs import RELEASED_CONFIGS
from kleinlite.transformer import Transformer

PROMPT = "a red circle above a blue square"


def strong_changes(net: Transformer, seed: int) -> dict[str, LoRA]:
    changes = new_deltas(net, 2, mx.random.key(seed))
    for i, change in enumerate(changes.values()):
        change.b = 0.3 * mx.random.normal(change.b.shape, key=mx.random.key(seed + i))
    return changes


@pytest.fixture(scope="module")
def klein() -> Klein:
    return Klein.from_pretrained("nano")


@pytest.fixture(scope="module")
def folder(klein, tmp_path_factory):
    """Two adapters for nano that change a lot."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two")):
        changes = strong_changes(klein._model.checkpoint.load_transformer(), seed)
        write_adapter(folder / f"{name}.safetensors", changes, trained={"model": "nano-base"})
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def draw(klein: Klein) -> mx.array:
    *_, last = klein.stream(PROMPT, seed=3, steps=1, progress=False)
    return last.latents


def test_added_weighed_and_removed(klein, folder, tmp_path):
    before = draw(klein)
    weights = dict(tree_flatten(klein.transformer.parameters()))
    assert klein.loras.add(folder / "one.safetensors", 0.5) == "one"
    other = shutil.copytree(folder, tmp_path / "other") / "one.safetensors"
    assert klein.loras.add(other, 0.5) == "one-2"
    half_twice = draw(klein)
    del klein.loras["one-2"]
    klein.loras["one"] = 1
    once = draw(klein)
    assert mx.abs(half_twice - once).max() < 1e-3 < 0.05 < mx.abs(once - before).max()
    assert dict(klein.loras) == {"one": 1.0} and repr(klein.loras) == "{'one': 1.0}"
    klein.loras["one"] = 0
    assert mx.array_equal(draw(klein), before)
    klein.loras.clear()
    after = dict(tree_flatten(klein.transformer.parameters()))
    assert after.keys() == weights.keys() and all(mx.array_equal(w, after[name]) for name, w in weights.items())
    assert mx.array_equal(draw(klein), before)


def test_a_file_that_is_added_again_takes_its_own_place(klein, folder, here):
    """As where a cell is run again, with another scale or after a longer training."""
    shutil.copy(folder / "one.safetensors", "one.safetensors")
    assert [klein.loras.add(file, scale) for file, scale in (("one.safetensors", 0.5), (here / "one.safetensors", 1))]
    once = draw(klein)
    assert dict(klein.loras) == {"one": 1.0}
    shutil.copy(folder / "two.safetensors", "one.safetensors")
    assert klein.loras.add("one.safetensors") == "one" and len(klein.loras) == 1
    assert not mx.array_equal(draw(klein), once)
    klein.loras.clear()


def test_given_at_once_and_loaded_again(klein, folder):
    files = [folder / "one.safetensors", (folder / "two.safetensors", 0.4)]
    fresh = Klein.from_pretrained("nano", loras=files)
    assert dict(fresh.loras) == {"one": 1.0, "two": 0.4} and not fresh.parts.loaded
    first = draw(fresh)
    fresh.parts.release("transformer")  # as for want of memory
    assert "transformer" not in fresh.parts.loaded
    fresh.loras["two"] = 0.9
    second = draw(fresh)
    fresh.loras["two"] = 0.4
    assert mx.array_equal(draw(fresh), first)
    assert mx.abs(second - first).max() > 0.01
    assert fresh.plan_memory(PROMPT).transformer > klein.plan_memory(PROMPT).transformer


def test_beside_packed_weights(folder):
    plain = Klein.from_pretrained("nano", quantize=8)
    with_it = Klein.from_pretrained("nano", quantize=8, loras=[folder / "one.safetensors"])
    exact = Klein.from_pretrained("nano", loras=[folder / "one.safetensors"])
    near = mx.abs(draw(with_it) - draw(exact)).mean()
    assert near < 0.2 * mx.abs(draw(with_it) - draw(plain)).mean()  # 8 bits err a little, the adapter acts in full


@pytest.mark.parametrize("scale", [float("nan"), "much", None, True])
def test_a_scale_is_a_number(klein, folder, scale):
    with pytest.raises(ValueError, match="The scale of .* is a number") as error:
        klein.loras.add(folder / "one.safetensors", scale)
    assert not klein.loras and len(str(error.value)) < 300


@pytest.mark.parametrize("file", [None, 5, b"one.safetensors", [], {}])
def test_a_file_is_a_name_or_a_path(klein, file):
    with pytest.raises(ValueError, match="An adapter is a file's name"):
        klein.loras.add(file)


@pytest.mark.parametrize("number, scale", [(3e38, 1), (1.0, 1e308)])
def test_an_adapter_that_overflows_makes_no_picture(klein, folder, here, number, scale, capsys):
    """Its numbers are finite, and what is computed with them is not."""
    arrays = mx.load(str(folder / "one.safetensors"))
    arrays = {name: mx.full(w.shape, number) if "lora_B" in name else w for name, w in arrays.items()}
    mx.save_safetensors("large.safetensors", arrays)
    name = klein.loras.add("large.safetensors", scale)
    with pytest.raises(ValueError, match="not finite, of which no picture can be made: give its adapters smaller"):
        klein(PROMPT, seed=3, steps=1, progress=False)
    del klein.loras[name]
    assert mx.isfinite(draw(klein)).all()
    assert main(["generate", PROMPT, "--steps", "1", "--lora", f"large.safetensors:{scale}", "-o", "a.png"]) == 2
    assert "no picture can be made" in capsys.readouterr().err
    assert [path.name for path in here.iterdir()] == ["large.safetensors"]


def test_a_name_that_is_not_there(klein):
    with pytest.raises(KeyError, match="loras.add"):
        klein.loras["none"] = 0.3


def test_a_released_model_refuses_before_its_weights_are_here(folder):
    with pytest.raises(ValueError, match="the matrix here is 3072"):
        Loras(RELEASED_CONFIGS["4b"][0]).add(folder / "one.safetensors")


# ---------------------------------------------------------------- the command line


def test_generate_remembers_and_draws_again(folder, here, capsys):
    (here / "one.safetensors").write_bytes((folder / "one.safetensors").read_bytes())
    options = ["generate", PROMPT, "--seed", "3", "--steps", "1"]
    assert main([*options, "--lora", "one.safetensors:0.5", str(folder / "two.safetensors"), "-o", "a.png"]) == 0
    assert "one × 0.5 + two × 1" in capsys.readouterr().out
    made = picture_info("a.png")["loras"]
    assert [(lora["file"], lora["scale"]) for lora in made] == [("one.safetensors", 0.5), ("two.safetensors", 1.0)]
    assert main(["generate", "--like", "a.png", "-o", "b.png"]) == 2  # two.safetensors is not here
    assert "two.safetensors, which is not here: name the file with --lora" in capsys.readouterr().err
    (here / "two.safetensors").write_bytes((folder / "two.safetensors").read_bytes())
    assert main(["generate", "--like", "a.png", "-o", "b.png"]) == 0
    assert Image.open("a.png").tobytes() == Image.open("b.png").tobytes()
    (here / "two.safetensors").write_bytes((folder / "one.safetensors").read_bytes())
    assert main(["generate", "--like", "a.png", "-o", "c.png"]) == 2
    assert "only another file of that name is here" in capsys.readouterr().err
    assert main(["generate", "--like", "a.png", "--lora", "one.safetensors:0", "-o", "c.png"]) == 0
    assert main([*options, "-o", "d.png"]) == 0
    assert Image.open("c.png").tobytes() == Image.open("d.png").tobytes()
    drawn = {f"{letter}.png" for letter in "abcd"}
    assert {path.name for path in here.iterdir()} == {*drawn, "one.safetensors", "two.safetensors"}


@pytest.mark.parametrize("name", ["../one.safetensors", "/etc/one.safetensors", "sub/one.safetensors", "."])
def test_a_strangers_picture_leads_to_no_other_folder(here, name):
    """What it says of its adapters names files here or beside it."""
    made = {"file": name, "scale": 1.0, "sha256": "0" * 16}
    (here / "one.safetensors").touch()
    assert is_lora(made | {"file": "one.safetensors"})
    assert not is_lora(made)
    picture = Klein.from_pretrained("nano")(PROMPT, seed=3, steps=1, progress=False)
    remember(picture, picture_info(picture) | {"loras": [made]})
    save_picture(picture, "a.png")
    with pytest.raises(ValueError, match="what it says about itself is damaged"):
        read_metadata("a.png")


def test_a_picture_remembers_the_file_that_was_read(folder, tmp_path):
    """A training writes its adapter anew while others draw with it."""
    file = tmp_path / "one.safetensors"
    file.write_bytes((folder / "one.safetensors").read_bytes())
    loras = Loras(Klein.from_pretrained("nano").parts.configs.transformer)
    loras.add(file)
    was = record_loras(loras)
    file.write_bytes((folder / "two.safetensors").read_bytes())
    assert record_loras(loras) == was
    file.unlink()
    assert record_loras(loras) == was


def test_a_folder_hides_no_bundled_adapter(tmp_path, monkeypatch):
    (tmp_path / "cross").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_adapter("cross").is_file()


def test_what_is_typed_wrongly(folder, here, capsys):
    with pytest.raises(SystemExit):
        main(["generate", PROMPT, "--lora", "one.safetensors:strong"])
    assert "'strong'" in capsys.readouterr().err
    assert main(["generate", PROMPT, "--lora", "none.safetensors"]) == 2
    assert "There is no file none.safetensors" in capsys.readouterr().err
    assert main(["generate", PROMPT, "--model", "4b", "--offline", "--lora", str(folder / "one.safetensors")]) == 2
    assert "the matrix here is 3072" in capsys.readouterr().err
    assert not list(here.iterdir())


def test_info_tells_what_an_adapter_is(folder, capsys):
    assert main(["info", str(folder / "one.safetensors")]) == 0
    told = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if " blocks" not in line[:16])
    assert told["kind"] == "LoRA" and told["rank"] == "2" and told["for"] == "klein-nano"
    assert "nano-base" in told["trained"] and "matrices" in told["changes"]


def test_a_scale_may_be_numpys(klein, folder):
    import numpy as np

    name = klein.loras.add("outlined", np.float32(0.5))
    assert klein.loras[name] == 0.5 and type(klein.loras[name]) is float
    del klein.loras[name]
    with pytest.raises(ValueError, match="is a number"):
        klein.loras.add("outlined", "0.5")


def test_a_name_that_is_not_there_is_told():
    klein = Klein.from_pretrained("nano", loras=["cross"])
    for use in (klein.loras.__getitem__, klein.loras.__delitem__, lambda name: klein.loras.__setitem__(name, 1)):
        with pytest.raises(KeyError, match="'zz' is not among the adapters, .*cross.*: use loras.add"):
            use("zz")
