"""The command line at its work: what each command writes and prints. Mistakes are in test_refused_*.py."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import PIL
import pytest
from command import PROMPT, run, save_tiny
from mlx.utils import tree_flatten
from PIL import Image, PngImagePlugin
from stand_in_hub import TINY, Repository
from tiers import slow
from waiting import HANGS

from kleinlite import __version__, klein as klein_module, picture_info, save_picture
from kleinlite.cli import parse_size
from kleinlite.cli.generate import list_notes
from kleinlite.inference.picture_file import remember
from kleinlite.inference.prompts import PromptEncoder
from kleinlite.models.adapters import find_adapter
from kleinlite.models.download import Access, fetch_model
from kleinlite.models.facts import find_facts
from kleinlite.models.places import tell
from kleinlite.models.registry import BUNDLED, MODELS

OFFLINE = Access(local_files_only=True)


def in_a_process(code: str, *argv, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, argv)],
        capture_output=True,
        text=True,
        env=os.environ | {"KLEINLITE_CPU": "off"} | environment,  # where it is slow, it would say so on stderr
        timeout=HANGS,
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def draw(tiny):
    """draw("-o", "x.png", …): the picture of x.png, from the tiny model."""

    def call(*argv, path="x.png") -> Image.Image:
        assert run("generate", PROMPT, "--model", tiny, "-o", path, *argv) == 0
        return Image.open(path)

    return call


def pixels(picture: Image.Image | str) -> bytes:
    return (picture if isinstance(picture, Image.Image) else Image.open(picture)).convert("RGB").tobytes()


# ---------------------------------------------------------------- generate


def test_generate_writes_a_picture_and_one_line(tiny, here, capsys):
    assert run("generate", PROMPT, "--model", tiny, "--seed", 7) == 0
    out, err = capsys.readouterr()
    assert re.fullmatch(rf"a-red-circle-7\.png: 64x64, {re.escape(str(tiny))}, seed 7, \d+\.\d s\n", out)
    assert err == ""  # no bar where nobody watches
    assert os.listdir(here) == ["a-red-circle-7.png"]
    with Image.open("a-red-circle-7.png") as picture:
        assert picture.format == "PNG" and picture.mode == "RGB" and picture.size == (64, 64)
        said = {"model": tell(tiny), "prompt": PROMPT, "seed": 7, "steps": 4, "guidance": 1.0}
        said |= {"negative_prompt": "", "width": 64, "height": 64, "references": 0}
        assert picture_info(picture) == said


def test_the_defaults_are_the_models_own(tiny, draw):
    made = picture_info(draw("--model", tiny / "base", "--seed", 1))
    assert (made["steps"], made["guidance"]) == (50, 4.0)


def test_options_reach_the_model(tiny, draw, capsys):
    options = ["--size", "48x32", "--steps", "3", "--guidance", "2.5", "--negative", "blue", "--seed", "11"]
    picture = draw("--model", tiny / "base", *options)
    assert picture.size == (48, 32)
    made = picture_info(picture)
    assert (made["steps"], made["guidance"], made["negative_prompt"], made["seed"]) == (3, 2.5, "blue", 11)
    klein = klein_module.Klein.from_pretrained(tiny / "base")
    wishes = {"width": 48, "height": 32, "steps": 3, "guidance": 2.5, "negative_prompt": "blue", "seed": 11}
    assert pixels(klein(PROMPT, **wishes, progress=False)) == pixels(picture)
    for option, value in (("--negative", "green"), ("--guidance", 2), ("--steps", 2), ("--seed", 12)):
        other = draw("--model", tiny / "base", *options, option, value, path="other.png")
        assert pixels(other) != pixels(picture), option


@pytest.mark.parametrize("text", ["96x64", "96 x 64", "96X64", " 96×64"])
def test_sizes_in_every_spelling(text):
    assert parse_size(text) == (96, 64)


def test_one_number_is_both_sides():
    assert parse_size("96") == (96, 96)


def test_nano_says_what_it_never_learned(here, capsys):
    assert run("generate", "a cat", "--steps", 1, "--seed", 1) == 0
    assert capsys.readouterr().err.startswith('nano never learned "cat": it draws circles')
    Path("list.txt").write_text("a cat\na red star\na cat\n")
    assert run("generate", "--prompts", "list.txt", "--steps", 1, "--seed", 5, "--size", 64) == 0
    told = capsys.readouterr().err.splitlines()
    assert ["cat" in line for line in told] == [True, False] and all("another size" in line for line in told)
    assert run("generate", "a cirle", "--steps", 1, "--seed", 1) == 0
    assert capsys.readouterr().err == 'nano never learned "cirle": did you mean "circle"?\n'
    assert run("generate", "a red star", "--steps", 1, "--seed", 1, "--size", "64x96") == 0
    assert "another size than 96×96" in capsys.readouterr().err
    assert run("generate", "a cat", "--steps", 1, "--seed", 1, "--lora", "cross") == 0  # which may know cats
    assert run("generate", "a cat", "--steps", 1, "--seed", 1, "--lora", "one-look") == 0
    assert capsys.readouterr().err == ""
    assert run("generate", "a cat", "--seed", 1, "--lora", "one-look") == 0
    assert capsys.readouterr().err == "one-look draws in a single step: add --steps 1.\n"


def test_what_nano_never_learned_is_said_before_it_draws(here, capsys, monkeypatch):
    def deaf(*_):
        assert "another size than 96×96" in capsys.readouterr().err
        raise KeyboardInterrupt

    monkeypatch.setattr(klein_module, "euler", deaf)
    assert run("generate", "a red star", "--size", 512) == 130


def test_a_photograph_is_read_in_nanos_size(here, capsys):
    Image.linear_gradient("L").resize((1600, 1200)).save("photo.jpg")
    assert run("generate", "make it night", "--image", "photo.jpg", "--seed", 1, "--steps", 1, "-o", "x.png") == 0
    assert Image.open("x.png").size == (112, 80)


def test_a_transformer_alone_takes_its_other_parts(hub, here, capsys):
    """From a bundled model; or from a released one, of which all but the transformer is fetched."""
    for name, file in (("nano", "mine.safetensors"), (TINY, "tiny.safetensors")):
        mx.save_safetensors(file, dict(tree_flatten(klein_module.Klein.from_pretrained(name).transformer.parameters())))
    options = ["--seed", 7, "--steps", 1]
    assert run("generate", PROMPT, "--model", "mine.safetensors", "--parts", "nano", *options, "-o", "a.png") == 0
    assert run("generate", PROMPT, *options, "-o", "b.png") == 0
    assert pixels("a.png") == pixels("b.png") and picture_info("a.png")["parts"] == "nano"
    assert run("generate", "--like", "a.png", "-o", "c.png") == 0 and pixels("c.png") == pixels("a.png")
    assert run("quantize", "mine.safetensors", "small", "--bits", "8", "--parts", "nano") == 0
    options = ["--model", "tiny.safetensors", "--parts", "4b", "--size", "64x64", *options]
    assert run("generate", PROMPT, *options, "--offline") == 2 and hub.requests == []
    assert run("generate", PROMPT, *options, "-o", "d.png") == 0 and not hub.asked("transformer/diffusion")
    assert run("generate", "--like", "d.png", "-o", "e.png", "--offline") == 0 and pixels("d.png") == pixels("e.png")


def test_a_seed_is_chosen_and_printed(draw, capsys):
    first = draw()
    seed = re.search(r"seed (\d+)", capsys.readouterr().out)[1]
    assert pixels(draw("--seed", seed, path="again.png")) == pixels(first)
    assert pixels(draw(path="other.png")) != pixels(first)


def test_a_new_picture_gets_a_new_name(tiny, here, capsys):
    names = ["a-red-circle-7.png", "a-red-circle-7-2.png", "a-red-circle-7-3.png"]
    for name in names:
        assert run("generate", PROMPT, "--model", tiny, "--seed", 7, "--steps", 1) == 0
        assert capsys.readouterr().out.startswith(name)
    assert sorted(os.listdir(here)) == sorted(names)


@pytest.mark.parametrize("linked", [True, False])
def test_a_name_that_another_program_takes_in_between_is_not_replaced(tiny, here, capsys, monkeypatch, linked):
    """As if each had looked before the others wrote; on a disk with hard links, and on one without."""
    monkeypatch.setattr(os.path, "lexists", lambda path: False)
    if not linked:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(1, "no links here")))
    for name in ("a-red-circle-7.png", "a-red-circle-7-2.png", "a-red-circle-7-3.png"):
        assert run("generate", PROMPT, "--model", tiny, "--seed", 7, "--steps", 1) == 0
        assert capsys.readouterr().out.startswith(name)
    assert len(os.listdir(here)) == 3 and all(picture_info(name)["seed"] == 7 for name in os.listdir(here))


@pytest.mark.parametrize(
    "prompt, name",
    [
        ("Un Cœur! ../../É\t'x'", "un-cur-e-x-7.png"),
        ("红", "picture-7.png"),
        ("", "picture-7.png"),
        ("sun " * 4 + "x" * 80, "sun-sun-sun-sun-" + "x" * 44 + "-7.png"),
    ],
)
def test_names_are_safe_and_short(tiny, here, prompt, name, monkeypatch):
    monkeypatch.setattr(PromptEncoder, "encode_batches", lambda *_: [mx.zeros((1, 4, 72))])  # prompts of any length
    assert run("generate", prompt, "--model", tiny, "--seed", 7, "--steps", 1) == 0
    assert os.listdir(here) == [name]


def test_a_named_file_is_replaced(draw, here):
    old = pixels(draw("--seed", 1, path="X.PNG"))
    assert pixels(draw("--seed", 2, path="X.PNG")) != old
    assert os.listdir(here) == ["X.PNG"]


def test_a_prompt_may_look_like_an_option(tiny, here):
    assert run("generate", "--model", tiny, "--seed", 7, "--steps", 1, "--", "-o") == 0
    assert os.listdir(here) == ["o-7.png"]
    options = ["--model", tiny, "--seed", 8, "--steps", 1, "--image", "o-7.png"]  # as the Makefile passes them
    assert run("generate", *options, "--", "$HOME 'x' \"y\"") == 0
    assert picture_info("home-x-y-8.png")["prompt"] == "$HOME 'x' \"y\""


def test_a_bar_shows_progress(draw, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    draw("--steps", 2)
    err = capsys.readouterr().err
    assert re.search("loading, reading the prompt: +0%.* 0/2", err) and not re.search("drawing: .* 0/2", err)


# ---------------------------------------------------------------- references


def test_reference_pictures_are_edited(draw):
    Image.linear_gradient("L").resize((96, 80)).save("first.jpg")
    Image.radial_gradient("L").resize((64, 64)).save("second.webp")
    plain = draw("--seed", 1, "--size", "96x80", path="plain.png")
    one = draw("--seed", 1, "--image", "first.jpg", path="one.png")
    two = draw("--seed", 1, "--image", "first.jpg", "second.webp", path="two.png")
    same = draw("--seed", 1, "--image", "first.jpg", "--image", "second.webp", path="same.png")
    assert plain.size == one.size == two.size == (96, 80)  # the first one's
    assert len({pixels(plain), pixels(one), pixels(two)}) == 3 and pixels(two) == pixels(same)
    assert [picture_info(p)["references"] for p in (plain, one, two)] == [0, 1, 2]
    assert draw("--image", "first.jpg", "--size", "64x48").size == (64, 48)


def test_photographs_are_turned_upright(draw):
    upright = Image.linear_gradient("L").resize((80, 112)).convert("RGB")
    exif = Image.Exif()
    exif[274] = 6  # the camera was held on its side
    upright.transpose(Image.Transpose.ROTATE_90).save("photo.png", exif=exif)
    upright.save("upright.png")
    drawn = [draw("--seed", 1, "--image", path, path=f"of-{path}") for path in ("photo.png", "upright.png")]
    assert drawn[0].size == (80, 112) and pixels(drawn[0]) == pixels(drawn[1])


# ---------------------------------------------------------------- generate --like


def test_like_draws_it_again(tiny, draw):
    options = ["--size", "48x32", "--steps", "2", "--guidance", "2.5", "--negative", "blue", "--seed", "11"]
    draw("--model", tiny / "base", *options)
    assert run("generate", "--like", "x.png", "--model", tiny / "base", "-o", "again.png") == 0
    assert Path("x.png").read_bytes() == Path("again.png").read_bytes()


def test_like_finds_a_folder_of_which_a_picture_tells_no_more_than_its_name(tiny, draw, capsys):
    shutil.copytree(tiny, "far/lender")
    draw("--model", tiny, "--decoder", "far/lender", "--seed", 1)
    told = Path("x.png").read_bytes()
    assert str(tiny.parent).encode() not in told and picture_info("x.png")["model"] == tell(tiny)
    again = ["generate", "--like", "x.png", "-o", "again.png"]
    assert run(*again) == 2 and "name its folder or file with --model" in capsys.readouterr().err
    shutil.copytree(tiny, "near/" + tiny.name)
    os.rename("far/lender", "near/lender")
    assert run(*again) == 2
    shutil.copy("x.png", "near/x.png")  # beside the picture
    assert run("generate", "--like", "near/x.png", "-o", "again.png") == 0 and Path("again.png").read_bytes() == told
    os.rename("near/lender", "lender")  # in the working folder
    assert run("generate", "--like", "near/x.png", "-o", "again.png") == 0
    index = Path("lender", "vae", "config.json")
    index.write_text(index.read_text() + " ")
    assert run("generate", "--like", "near/x.png", "-o", "again.png") == 2, "another of that name"
    assert "put it beside the picture, or name it with --decoder" in capsys.readouterr().err


def test_what_is_typed_overrides_like(tiny, draw):
    draw("--seed", 11, "--steps", 2)
    options = ["--size", "48x32", "--steps", "3", "--seed", "12"]
    assert run("generate", "a blue square", "--like", "x.png", "-o", "new.png", "--model", tiny, *options) == 0
    made = picture_info("new.png")
    assert made == picture_info("x.png") | {
        "prompt": "a blue square", "seed": 12, "steps": 3, "width": 48, "height": 32
    }  # fmt: skip


def test_another_model_brings_its_own_steps_and_guidance(tiny, draw):
    draw("--seed", 11, "--steps", 2)
    assert run("generate", "--like", "x.png", "--model", tiny / "base", "--steps", 3, "-o", "base.png") == 0
    made = picture_info("base.png")
    assert (made["steps"], made["guidance"], made["seed"]) == (3, 4.0, 11)
    assert run("generate", "--like", "base.png", "--model", tiny, "-o", "back.png") == 0
    made = picture_info("back.png")
    assert (made["steps"], made["guidance"], made["seed"]) == (4, 1.0, 11)


def test_like_an_edit_takes_the_references_again(tiny, draw):
    Image.linear_gradient("L").resize((96, 80)).save("first.png")
    draw("--seed", 1, "--image", "first.png")
    assert run("generate", "--like", "x.png", "--model", tiny, "--image", "first.png", "-o", "again.png") == 0
    assert Path("x.png").read_bytes() == Path("again.png").read_bytes()


def test_like_takes_replaced_parts_again(tiny):
    other = shutil.copytree(tiny, "other")
    vae = Path(other, "vae", "diffusion_pytorch_model.safetensors")
    weights = {name: w * 2 if name == "decoder.conv_out.weight" else w for name, w in mx.load(str(vae)).items()}
    mx.eval(weights)
    mx.save_safetensors(str(vae), weights)
    klein = klein_module.Klein.from_pretrained(tiny, parts={"autoencoder": other})
    drawn = klein(PROMPT, seed=7, steps=1, progress=False)
    assert picture_info(drawn)["parts"] == {"autoencoder": tell("other")}
    save_picture(drawn, "x.png")
    remember(drawn, picture_info(drawn) | {"parts": {"vae": "other"}})  # as version 0.4 wrote it
    save_picture(drawn, "old.png")
    for picture in ("x.png", "old.png"):
        assert run("generate", "--like", picture, "--model", tiny, "-o", "again.png") == 0
        assert Path("x.png").read_bytes() == Path("again.png").read_bytes()
    assert run("generate", "--like", "x.png", "--model", tiny / "base", "--steps", 1, "-o", "plain.png") == 0
    assert "parts" not in picture_info("plain.png")  # another model has its own
    shutil.rmtree("other")
    again = ["generate", "--like", "x.png", "--model", tiny, "-o", "lost.png"]
    assert run(*again) == 2
    assert run(*again, "--decoder", tiny) == 0  # nobody misses the replaced


def test_like_takes_the_parts_of_a_single_file_again(tiny):
    transformer = klein_module.Klein.from_pretrained(tiny).transformer
    mx.save_safetensors("klein.safetensors", dict(tree_flatten(transformer.parameters())))
    klein = klein_module.Klein.from_pretrained("klein.safetensors", parts=tiny)
    save_picture(klein(PROMPT, seed=7, steps=1, progress=False), "x.png")
    assert picture_info("x.png")["parts"] == tell(tiny)
    assert run("generate", "--like", "x.png", "-o", "again.png") == 2
    assert run("generate", "--like", "x.png", "--parts", tiny, "-o", "again.png") == 0
    assert Path("x.png").read_bytes() == Path("again.png").read_bytes()


def test_like_a_picture_from_noise_wants_a_seed(tiny, capsys):
    noise = mx.random.normal((1, 16, 128), key=mx.random.key(1))
    save_picture(klein_module.Klein.from_pretrained(tiny)(PROMPT, noise=noise, seed=7, progress=False), "x.png")
    made = picture_info("x.png")
    assert made["noise"] is True and "seed" not in made
    assert run("info", "x.png") == 0 and "noise" in capsys.readouterr().out
    assert run("generate", "--like", "x.png", "--model", tiny, "-o", "again.png") == 2
    assert "with noise of its own, which it does not contain: name a --seed" in capsys.readouterr().err
    assert run("generate", "--like", "x.png", "--model", tiny, "--seed", 8, "-o", "again.png") == 0
    assert picture_info("again.png")["seed"] == 8 and "noise" not in picture_info("again.png")


# ---------------------------------------------------------------- info, models, help


def test_info_tells_what_made_a_picture(draw, capsys):
    draw("--seed", 11, "--steps", 2)
    capsys.readouterr()
    assert run("info", "x.png") == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert ["prompt", PROMPT] in lines and ["seed", "11"] in lines and ["steps", "2"] in lines


def test_info_knows_an_adapter_by_its_content(tmp_path, capsys):
    shutil.copy2(find_adapter("cross"), tmp_path / "cross.lora")
    assert run("info", tmp_path / "cross.lora") == 0
    assert "LoRA" in capsys.readouterr().out


def test_info_keeps_a_foreign_text_out_of_the_terminal(capsys):
    made = dict.fromkeys(("model", "prompt", "negative_prompt"), "\x1b[31mred\nein Gruß")
    made |= dict.fromkeys(("seed", "steps", "guidance", "width", "height", "references"), 1)
    chunk = PngImagePlugin.PngInfo()
    chunk.add_itxt("kleinlite", json.dumps(made))
    Image.new("RGB", (16, 16)).save("x.png", pnginfo=chunk)
    assert run("info", "x.png") == 0
    out = capsys.readouterr().out
    assert "\\x1b[31mred\\nein Gruß" in out and "\x1b" not in out and len(out.splitlines()) == len(made)


def test_info_without_a_file_tells_the_versions(capsys):
    assert run("info") == 0
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert said["kleinlite"] == __version__ and said["mlx"] == mx.__version__
    assert said["python"] == sys.version.split()[0] and str(mx.default_device()) in said["device"]
    assert {"platform", "BLAS"} < set(said)


def test_models_lists_every_name(capsys):
    assert run("models") == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line for line in lines[1:] if line and line.split()[0] in {*BUNDLED, *MODELS}}
    assert list(rows) == [*BUNDLED, *MODELS] and len(rows) == 20
    assert re.search(r"4, distilled +3\.9 B \+ 4\.0 B .* 16\.0 GB +Apache-2\.0", rows["4b"])
    assert re.search(r" 50 +9\.1 B \+ 8\.2 B .* 34\.7 GB +FLUX Non-Commercial", rows["base-9b"])
    assert re.search(r"4, distilled .* 10\.7 GB +Apache-2\.0", rows["4b-nvfp4"])  # the rest of it is not quantized
    number, memory = r"(\d+\.\d)", {}
    for name in MODELS:
        pattern = rf" B +{number}  " if "nvfp4" in name else rf" B +{number} / {number} / {number} "
        found = memory[name] = [float(n) for n in re.search(pattern, rows[name]).groups()]
        assert found == sorted(found, reverse=True) and 2 < found[-1] < found[0] + 0.1 < 21
    assert memory["4b"][0] > memory["4b-fp8"][0] >= memory["4b-nvfp4"][0]
    assert re.search(r"\d\.\d M \+ \d\.\d M +0\.\d\d +none +Apache-2\.0 +yes +bundled", rows["nano"])
    assert max(map(len, lines)) <= 120


def test_models_says_what_fits(capsys, monkeypatch):
    monkeypatch.setattr("kleinlite.inference.picture_memory.compute_dtype", lambda: mx.float32)
    monkeypatch.setattr("kleinlite.inference.machine_memory.machine_memory", lambda held=0: (6 * 10**9, 4 * 10**9))
    assert run("models") == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line for line in out.splitlines() if line}
    for name, fits in {"nano": "yes", "4b": "--quantize 8", "9b": "--quantize 3", "4b-nvfp4": "no"}.items():
        assert re.search(rf"  {fits} +(no|bundled)", rows[name]), rows[name]
    assert "Fits: into the 6.0 GB of this machine." in out


def test_readme_says_the_same_of_models(capsys, monkeypatch):
    """Memory, download and licence, to the rounding of the page, whose memory is that of a GPU."""
    monkeypatch.setattr("kleinlite.inference.picture_memory.compute_dtype", lambda: mx.bfloat16)
    run("models")
    rows = {
        line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line and line.split()[0] in MODELS
    }
    page = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    said = {found[1]: line for line in page.splitlines() if (found := re.match(r"\| `([\w-]+)` \|", line))}
    assert {"4b", "9b"} <= said.keys() & rows.keys()
    for name in said.keys() & rows.keys():
        memory, download, licence = re.search(r" B +([\d./ ]+?) +([\d.]+) GB +(\S+)", rows[name]).groups()
        cells = [cell.strip() for cell in said[name].split("|")[1:-1]]
        numbers = [float(n) for n in re.findall(r"[\d.]*\d(?= GB| in )", cells[1])]
        assert numbers == pytest.approx([float(number) for number in memory.split(" / ")], abs=0.05), name
        assert abs(float(cells[2].split(" GB")[0]) - float(download)) <= 0.5, name
        assert cells[3].startswith(licence), name


def test_models_knows_what_was_downloaded(tiny, here, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(here))
    repo = here / ("models--" + MODELS["9b"].repo.replace("/", "--"))
    folder = repo / "snapshots" / "0"
    shutil.copytree(tiny, folder)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0")

    def row():
        assert run("models") == 0
        return next(line for line in capsys.readouterr().out.splitlines() if line.startswith("9b "))

    assert row().endswith("yes")
    weights = folder / "text_encoder" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])  # a download that was cut short
    assert row().endswith("no, gated")


def test_help_is_quick_and_complete(capsys):
    assert run() == 0 and run("--help") == 0
    alone, asked = re.findall("usage:.*?(?=usage:|$)", capsys.readouterr().out, re.DOTALL)
    assert alone.strip() == asked.strip() and all(
        name in alone for name in ("generate", "models", "download", "quantize", "train-lora", "info")
    )
    assert run("generate", "--help") == 0
    options = ["model", "size", "steps", "guidance", "negative", "seed", "quantize", "image", "like", "output"]
    said = capsys.readouterr().out
    assert [option for option in options if f"--{option} " not in said] == []
    assert run("--version") == 0 and capsys.readouterr().out == f"kleinlite {__version__}\n"
    slow = ("PIL", "mlx.nn", "tokenizers", "tqdm", "huggingface_hub", "kleinlite.klein")
    code = "import sys\nfrom kleinlite.cli import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n"
    end = in_a_process(f"{code}print('slow:', [m for m in {slow} if m in sys.modules])", "generate", "--help")
    assert end.returncode == 0 and end.stdout.endswith("slow: []\n"), end.stdout + end.stderr


def test_a_picture_imports_no_more_than_it_needs(here):
    """From the shell to a PNG most of the time is imports; nobody sees a progress bar in a pipe."""
    not_needed = ("tqdm", "asyncio", "numpy", "huggingface_hub", "scipy_openblas32")
    if tuple(map(int, PIL.__version__.split(".")[:2])) >= (12, 2):  # older ones load all formats
        not_needed += ("PIL.JpegImagePlugin",)
    code = "import sys\nfrom kleinlite.cli import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n"
    code += f"print('loaded:', [m for m in {not_needed} if m in sys.modules])"
    end = in_a_process(code, "generate", PROMPT, "--size", "32x32", "--steps", 1, "--seed", 7, KLEINLITE_CPU="on")
    assert end.returncode == 0 and end.stdout.endswith("loaded: []\n"), end.stdout + end.stderr


# ---------------------------------------------------------------- the hub


def test_a_released_model_is_fetched_and_draws(hub, here, capsys):
    options = ["--model", "4b", "--size", "64x64", "--seed", 7]
    assert run("generate", PROMPT, *options) == 0
    out, err = capsys.readouterr()
    assert re.match(r"a-red-circle-7\.png: 64x64, 4b, seed 7, ", out) and "license Apache-2.0, not run" in err
    assert picture_info("a-red-circle-7.png")["model"] == "4b"
    hub.requests.clear()
    assert run("generate", PROMPT, *options, "--offline") == 0  # and what is here is enough
    assert capsys.readouterr().err == "" and hub.requests == []
    assert pixels("a-red-circle-7.png") == pixels("a-red-circle-7-2.png")


def test_a_model_in_one_file_is_fetched_and_draws(hub, here, capsys):
    transformer, model = klein_module.Klein.from_pretrained(TINY).transformer, MODELS["4b-fp8"]
    mx.save_safetensors("x.safetensors", dict(tree_flatten(transformer.parameters())))
    hub.repositories[model.repo] = Repository({model.file: Path("x.safetensors").read_bytes()})
    options = ["--size", "64x64", "--seed", 7]
    assert run("generate", PROMPT, "--model", "4b-fp8", *options, "-o", "a.png") == 0
    assert picture_info("a.png")["model"] == "4b-fp8"
    assert not hub.asked("transformer/") and fetch_model("4b-fp8", OFFLINE).name == model.file
    assert run("generate", PROMPT, "--model", "4b", *options, "-o", "b.png") == 0
    assert pixels("a.png") == pixels("b.png")


def test_what_quantize_writes_can_be_shared(hub, here, capsys):
    assert run("quantize", TINY, "small", "--bits", "8") == 0
    files = {p.relative_to("small").as_posix(): p.read_bytes() for p in Path("small").rglob("*") if p.is_file()}
    hub.repositories["some/body"] = Repository(files | {"README.md": b"x"})
    options = ["--size", "64x64", "--seed", 7]
    assert run("generate", PROMPT, "--model", "some/body", *options, "-o", "a.png") == 0
    assert run("generate", PROMPT, "--model", "small", *options, "-o", "b.png") == 0
    assert pixels("a.png") == pixels("b.png")


def test_download_tells_what_and_where(hub, here, capsys):
    assert run("download", "4b") == 0
    out, err = capsys.readouterr()
    assert Path(out.strip()) == fetch_model("4b", OFFLINE) and out.count("\n") == 1
    assert "license Apache-2.0" in err and str(hub.cache) in err
    hub.requests.clear()
    assert run("download", "4b", "--plan") == 0 and hub.requests == []
    assert capsys.readouterr().out.endswith("16.0 GB, all of it is here.\n")
    assert run("download", "9b", "--plan") == 0 and hub.requests == []
    told = capsys.readouterr().out
    assert "license FLUX Non-Commercial, gated, not run" in told and "34.7 GB, less what is here already" in told
    assert run("download", "4b") == 0 and not hub.asked("")
    assert capsys.readouterr().out == out
    assert run("download", "nano") == 0 and "nothing to download" in capsys.readouterr().out


def test_models_sees_a_download(hub, capsys):
    def row():
        assert run("models") == 0
        return next(line for line in capsys.readouterr().out.splitlines() if line.startswith("4b "))

    assert row().endswith(" no") and run("download", "4b") == 0 and capsys.readouterr()
    assert row().endswith(" yes")


# ---------------------------------------------------------------- quantize, train


@pytest.mark.parametrize(
    "options, name", [(["-o", "small", "--quantize", "8"], "8 bits"), *slow((["small", "--mode", "mxfp4"], "mxfp4"))]
)
def test_quantize_writes_a_model(options, name, here, capsys):
    assert run("quantize", "nano", *options) == 0
    assert re.fullmatch(rf"small: nano in {name}, \d+\.\d MB\n", capsys.readouterr().out)
    assert os.listdir(here) == ["small"]
    assert run("generate", PROMPT, "--model", "small", "--seed", 7, "-o", "a.png") == 0
    wish = options[-1]
    assert run("generate", PROMPT, "--model", "nano", "--quantize", wish, "--seed", 7, "-o", "b.png") == 0
    assert run("generate", PROMPT, "--model", "nano", "--seed", 7, "-o", "c.png") == 0
    assert pixels("a.png") == pixels("b.png") != pixels("c.png")


def test_a_picture_remembers_the_quantisation(here, capsys):
    assert run("generate", PROMPT, "--quantize", 4, "--seed", 7, "-o", "a.png") == 0
    assert "96x96, nano in 4 bits, seed 7" in capsys.readouterr().out
    assert picture_info("a.png")["quantize"] == 4
    assert run("generate", "--like", "a.png", "-o", "b.png") == 0
    assert Path("a.png").read_bytes() == Path("b.png").read_bytes()
    assert run("generate", "--like", "a.png", "--model", "nano-base", "--steps", 2, "-o", "c.png") == 0
    assert "quantize" not in picture_info("c.png")


# ---------------------------------------------------------------- the program as a whole


def test_ctrl_c_while_writing_leaves_nothing(tiny, here, monkeypatch, capsys):
    def interrupted(*_):
        assert os.listdir(here)  # the draft, which must go
        raise KeyboardInterrupt

    monkeypatch.setattr("kleinlite.files.os.replace", interrupted)
    assert run("generate", PROMPT, "--model", tiny, "-o", "x.png") == 130
    assert capsys.readouterr() == ("", "kleinlite: stopped.\n") and os.listdir(here) == []


@pytest.mark.parametrize("module", ["kleinlite", "kleinlite.__main__"])
def test_python_m_kleinlite(module, tiny, here):
    code = f"import runpy, sys\nsys.argv[0] = 'x'\nrunpy.run_module('{module}', run_name='__main__')"
    end = in_a_process(code, "generate", PROMPT, "--model", tiny, "--seed", 7, "--steps", 1)
    assert end.returncode == 0 and end.stdout.startswith("a-red-circle-7.png: 64x64") and not end.stderr
    assert in_a_process(code, "generate").returncode == 2


def test_the_bundled_model_draws(capsys):
    right = 0
    for seed in (1, 2, 3):
        assert run("generate", "a red circle above a blue square", "--seed", seed, "-o", "x.png") == 0
        assert f"x.png: 96x96, nano, seed {seed}" in capsys.readouterr().out
        assert picture_info("x.png")["steps"] == 4
        rgb = mx.array(memoryview(pixels("x.png"))).reshape(96, 96, 3).astype(mx.float32)
        r, g, b = (rgb[:, :, i] for i in range(3))
        rows = mx.arange(96)[:, None]
        red, blue = (r > 2 * mx.maximum(g, b)).astype(mx.float32), (b > 1.5 * mx.maximum(r, g)).astype(mx.float32)
        height = [(rows * where).sum().item() / max(where.sum().item(), 1) for where in (red, blue)]
        right += min(red.sum().item(), blue.sum().item()) > 300 and height[0] + 20 < height[1]
    assert right >= 2  # a circle has some 1000 pixels, a square too


# ---------------------------------------------------------------- changing pictures, lists of prompts, watching


def make_mask(path: Path, size: tuple[int, int] = (96, 96)) -> Path:
    mask = Image.new("L", size)
    mask.paste(255, (0, 0, size[0], size[1] // 2))
    mask.save(path)
    return path


def test_mask_strength_and_extend(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run("generate", PROMPT, "--seed", 1, "--steps", 1, "-o", "a.png") == 0
    mask = make_mask(tmp_path / "mask.png")
    told = ["generate", "make it blue", "--image", "a.png", "--mask", mask, "--strength", "0.6", "--extend", "0,0,16,0"]
    assert run(*told, "--seed", 2, "-o", "b.png") == 0
    before, after = Image.open("a.png").convert("RGB"), Image.open("b.png").convert("RGB")
    assert after.size == (112, 96)
    assert after.crop((0, 48, 96, 96)).tobytes() == before.crop((0, 48, 96, 96)).tobytes()
    made = picture_info("b.png")
    assert (made["mask"], made["strength"], made["extend"], made["width"]) == (True, 0.6, [0, 0, 16, 0], 112)
    assert run("generate", "--like", "b.png", "--image", "a.png", "-o", "c.png") == 2
    assert "name it with --mask" in capsys.readouterr().err
    assert run("generate", "--like", "b.png", "--image", "a.png", "--mask", mask, "-o", "c.png") == 0
    assert Image.open("c.png").tobytes() == Image.open("b.png").tobytes()
    assert run("generate", PROMPT, "--mask", mask) == 2 and "there is none" in capsys.readouterr().err
    assert run("generate", PROMPT, "--image", "a.png", "--extend", "1,2") == 2


def test_a_list_of_prompts_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("list.txt").write_text("a red circle\n\n  a blue star  \n", encoding="utf-8")
    names = ["0001-a-red-circle-7.png", "0002-a-blue-star-8.png"]
    told = ["generate", "--prompts", "list.txt", "--seed", 7, "--steps", 1, "-o", "out"]
    assert run(*told[:-1], "no/out") == 2 and "does not exist" in capsys.readouterr().err
    assert run(*told, "--size", "17x17") == 2 and not Path("out").exists()
    assert run(*told) == 0
    assert sorted(os.listdir("out")) == names
    made = picture_info(Path("out") / names[1])
    assert (made["prompt"], made["seed"]) == ("a blue star", 8)
    (Path("out") / names[1]).unlink()
    stamp = (Path("out") / names[0]).stat().st_mtime_ns
    capsys.readouterr()
    assert run(*told) == 0
    assert f"{names[0]} is there already" in capsys.readouterr().out
    assert sorted(os.listdir("out")) == names and (Path("out") / names[0]).stat().st_mtime_ns == stamp
    Path("empty.txt").write_text("\n")
    assert run("generate", "--prompts", "empty.txt") == 2 and "no prompt in it" in capsys.readouterr().err
    assert run("generate", PROMPT, "--prompts", "list.txt") == 2


def test_what_is_drawn_already_is_told_by_the_picture_and_not_by_its_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Image.new("RGB", (96, 96), (200, 60, 60 + ord(name))).save(f"{name}.png")
        Image.new("L", (96, 96), ord(name) + 100).save(f"{name}-mask.png")
    Path("out").mkdir()
    Path("out", "0001-picture-0.png").write_text("somebody's")

    def draw(prompt, *more):
        Path("list.txt").write_text(prompt, encoding="utf-8")
        assert run("generate", "--prompts", "list.txt", "--steps", 1, "-o", "out", *more) == 0
        return capsys.readouterr().out.split(": ")[0].split(" ")[0].removeprefix(f"out{os.sep}0001-")

    told = [
        ("红", "picture-0-2.png"), ("🔴", "picture-0-3.png"), ("a red circle", "a-red-circle-0.png"),
        ("A Red circle!", "a-red-circle-0-2.png"), ("a red circle", "a-red-circle-0-3.png", "--steps", 2),
        ("a red circle", "a-red-circle-0-4.png", "--lora", "outlined"),
        ("a red circle", "a-red-circle-0-5.png", "--lora", "outlined:0.5"),
        ("a red circle", "a-red-circle-0-6.png", "--size", "64x96"),
        ("a red circle", "a-red-circle-0-7.png", "--quantize", 8),
        ("a red circle", "a-red-circle-0-8.png", "--decoder", "nano-base"),
        ("a red circle", "a-red-circle-0-9.png", "--model", "nano-base"),
        ("a blue circle", "a-blue-circle-0.png", "--image", "a.png"),
        ("a blue circle", "a-blue-circle-0-2.png", "--image", "b.png"),
        ("a blue circle", "a-blue-circle-0-3.png", "--image", "b.png", "--mask", "a-mask.png"),
        ("a blue circle", "a-blue-circle-0-4.png", "--image", "b.png", "--mask", "b-mask.png"),
        ("a blue circle", "a-blue-circle-0-5.png", "--image", "b.png", "--strength", 0.5),
    ]  # fmt: skip
    for _ in range(2):
        assert [draw(prompt, *more) for prompt, _, *more in told] == [name for _, name, *_ in told]
    assert len(os.listdir("out")) == len(told) + 1 and Path("out", "0001-picture-0.png").read_text() == "somebody's"


def test_a_prompt_that_is_too_long_ends_no_list(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("list.txt").write_text(f"a red circle\n{'a red circle ' * 40}\na blue star\n")
    assert run("generate", "--prompts", "list.txt", "--steps", 1, "-o", "out") == 2
    assert [name[:4] for name in sorted(os.listdir("out"))] == ["0001", "0003"]
    told = capsys.readouterr().err
    assert (
        re.search("0002-.*png is left out: The prompt has .* tokens", told) and "1 of 3 prompts were left out" in told
    )


def test_watching_changes_no_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    told = ["generate", PROMPT, "--seed", 3, "--steps", 2]
    assert run(*told, "-o", "a.png") == 0
    assert run(*told, "-o", "b.png", "--watch", "now.png") == 0
    assert Path("a.png").read_bytes() == Path("b.png").read_bytes() == Path("now.png").read_bytes()
    assert run(*told, "-o", "c.png", "--watch", "now.jpg") == 2


def test_a_decoder_is_a_part(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run("generate", PROMPT, "--seed", 3, "--steps", 1, "--decoder", "nano-base", "-o", "a.png") == 0
    assert picture_info("a.png")["parts"] == {"autoencoder": "nano-base"}
    assert run("generate", "--like", "a.png", "--decoder", "nano", "-o", "b.png") == 0
    assert picture_info("b.png")["parts"] == {"autoencoder": "nano"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_names_all_commands_and_options(shell, capsys):
    assert run("completion", shell) == 0
    script = capsys.readouterr().out
    for word in ("generate", "train-lora", "quantize", "completion"):
        assert word in script
    assert ("-l strength" if shell == "fish" else "--strength") in script


def test_flux3_says_what_its_makers_say():
    info = find_facts("flux3").info
    request = SimpleNamespace(steps=4, width=1024, height=1024)
    wish = SimpleNamespace(quantize=4, adapters=[], prompts=["a cat"])
    grain, bits = list_notes(request, info, wish)
    assert "grainy in so few steps" in grain and "in 4 bits" in bits
    request.steps = 8
    assert list_notes(request, find_facts("4b").info, wish) == []
    wish.quantize = 8
    assert list_notes(request, info, wish) == []
