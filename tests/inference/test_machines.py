"""Pictures that several processes draw: together the same as alone, a list divided, and what is left when one fails."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from PIL import Image
from small_nano import launch
from stand_in_hub import TINY
from waiting import HANGS

from kleinlite.errors import UserError
from kleinlite.inference.machine_memory import plan_model
from kleinlite.klein import Klein
from kleinlite.models.checkpoint import open_checkpoint
from kleinlite.models.facts import find_facts
from kleinlite.sharding import shard

PIPELINES = TINY.parent

START = """
import json, os, sys
from pathlib import Path
import mlx.core as mx
from kleinlite.errors import UserError
from kleinlite.inference import cluster, machines
from kleinlite.klein import Klein

group = mx.distributed.init()
folder = Path(sys.argv[1])
WISH = {"seed": 5, "progress": False}
facts = {}


def last(klein, prompt="a red circle", **options):
    *_, step = klein.stream(prompt, **{**WISH, **options})
    return step.latents


def apart(a, b):
    return (mx.abs(a - b).max() / mx.abs(b).max()).item()


def both(name, *how, model, **options):
    alone, together = (Klein.from_pretrained(model, dtype=mx.float32, **dict(how), group=g) for g in (None, group))
    facts[name] = apart(last(together, **options), last(alone, **options))
    return together
"""
END = """
(folder / f"{group.rank()}.json").write_text(json.dumps(facts))
"""


def run(folder: Path, program: str, *arguments, processes: int = 2) -> list[dict]:
    """What each process wrote down."""
    (folder / "program.py").write_text(START + program + END)
    launch(folder, folder / "program.py", folder, *arguments, processes=processes)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]


TOGETHER = """
from mlx.utils import tree_flatten
from PIL import Image

picture = Image.new("RGB", (96, 64), "red")
both("nano", model="nano")
both("nano, 4 bits", ("quantize", 4), model="nano")
both("nano, an adapter", ("loras", ["outlined"]), model="nano")
both("nano, an edit", model="nano", images=[picture])
both("flux3", model=sys.argv[2] + "/flux3", width=48, height=32)
both("flux3, an edit", model=sys.argv[2] + "/flux3", images=[picture], width=48, height=32)
base = both("base, its two answers", model="nano-base", steps=4)
facts["whole on both"] = base._model.cluster.machines
cluster.machine_memory = lambda held=0: (10**12, 1)  # neither can hold the whole
base = both("base, its heads", model="nano-base", steps=4)
facts["heads of both"] = base._model.cluster.machines

exact, alone, together = (
    last(Klein.from_pretrained("nano", dtype=dtype, group=g)).astype(mx.float32)
    for dtype, g in ((mx.float32, None), (mx.bfloat16, None), (mx.bfloat16, group))
)
facts["bfloat16"] = apart(alone, exact), apart(together, exact)

klein = Klein.from_pretrained("nano", group=group)
plan = klein.plan_memory("a")
facts["plan"] = plan.transformer / Klein.from_pretrained("nano").plan_memory("a").transformer
facts["held"] = sum(w.nbytes for _, w in tree_flatten(klein.transformer.parameters())) / plan.transformer
*_, step = klein.stream("a red star", progress=False)  # no seed given
facts["seed"] = step.preview().info["kleinlite"]["seed"]
try:
    klein.loras.add("cross")
except UserError as mistake:
    facts["too late"] = str(mistake)
klein.release()
klein.loras.add("cross")
with_adapter = last(klein)
klein.loras["cross"] = 0.5
facts["rescaled"] = apart(last(klein), with_adapter)
del klein.loras["cross"]
facts["taken away"] = apart(last(klein), last(Klein.from_pretrained("nano")))
cluster.machine_memory = lambda held=0: (10**12 if group.rank() else 10**3, 1)
try:
    klein("a", **WISH)
except MemoryError as refusal:
    facts["refused"] = str(refusal)
"""


@pytest.mark.slow
def test_two_draw_what_one_draws(tmp_path):
    first, second = run(tmp_path, TOGETHER, PIPELINES)
    print(json.dumps(first, indent=1))
    assert first == second, "both have the same picture, and say the same"
    for name in (
        "nano",
        "nano, 4 bits",
        "nano, an adapter",
        "nano, an edit",
        "flux3",
        "flux3, an edit",
        "base, its heads",
    ):
        assert 0 < first[name] < 1e-5, name
    alone, together = first["bfloat16"]
    assert together < 2 * alone, "no further from float32 than one machine is"
    assert first["base, its two answers"] == 0, "an answer is copied, not added up"
    assert (first["whole on both"], first["heads of both"]) == (1, 2)
    assert 0.5 < first["plan"] < 0.62 and first["held"] == pytest.approx(1, abs=0.01)
    assert "divided over several machines already: name adapters where the model is opened" in first["too late"]
    assert first["rescaled"] > 1e-3 and first["taken away"] < 1e-5
    assert "the machine has 0.0 GB" in first["refused"], "if the smallest cannot, nobody begins"


THREE = """
together = both("tiny", model=sys.argv[2] + "/tiny", width=48, height=32)
facts["text encoder"] = together.text_encoder.layers[0].self_attn.heads  # four heads, whole on all three
facts["transformer"] = together.transformer.double_blocks[0].img_attn.heads  # one of three
try:
    last(Klein.from_pretrained("nano", group=group))
except UserError as mistake:
    facts["uneven"] = str(mistake)
"""


def test_three_share_three_heads_and_refuse_four(tmp_path):
    for facts in run(tmp_path, THREE, PIPELINES, processes=3):
        assert 0 < facts["tiny"] < 1e-5
        assert (facts["text encoder"], facts["transformer"]) == (4, 1)
        assert facts["uneven"] == "3 machines cannot share this model's heads evenly: start one of 1, 2, 4."


def test_the_plan_says_what_each_machine_holds():
    facts = find_facts("9b")
    alone, of_two = (plan_model(facts, width=1024, height=1024, machines=n) for n in (1, 2))
    assert 0.5 < of_two.transformer / alone.transformer < 0.53 and 0.5 < of_two.text_encoder / alone.text_encoder < 0.56
    assert of_two.autoencoder == alone.autoencoder and of_two.step == alone.step
    with pytest.raises(ValueError, match="3 machines cannot share this model's heads evenly: start one of 1, 2, 4, 8"):
        plan_model(facts, width=1024, height=1024, machines=3)


def test_a_text_encoder_whose_heads_do_not_go_round_is_planned_whole():
    facts = find_facts(str(TINY))
    alone, of_three = (plan_model(facts, width=64, height=64, machines=n) for n in (1, 3))
    assert of_three.text_encoder == alone.text_encoder and of_three.transformer < alone.transformer


def test_a_network_that_cannot_be_divided_is_not_kept():
    def share(part):
        raise UserError("This cannot be divided.")

    parts = Klein.from_pretrained("nano")._model.parts
    parts.cluster = SimpleNamespace(machines=2, share=share)
    with pytest.raises(UserError, match="cannot be divided"):
        parts.load("transformer")
    assert "transformer" not in parts.loaded


@pytest.mark.parametrize("quantize", [None, 8])
def test_nothing_is_read_before_it_is_cut(quantize):
    """A machine has room for its own share, not for the whole model."""
    checkpoint = open_checkpoint("nano", dtype=mx.float32, quantize=quantize)
    before = mx.get_active_memory()
    network = checkpoint.load_transformer(lazy=True)
    assert mx.get_active_memory() - before < 1e5
    mx.reset_peak_memory()
    shard(network, SimpleNamespace(rank=lambda: 1, size=lambda: 2))
    mx.eval(network.parameters())
    held = sum(w.nbytes for _, w in tree_flatten(network.parameters()))
    largest = 4 * 1536 * 256
    assert mx.get_peak_memory() - before < held + 2.5 * largest


# ---------------------------------------------------------------- the command line

WISHES = ["a red star", "a blue heart", "a green circle", "a yellow sun", "a red house"]
COMMAND = """
import io
from contextlib import redirect_stderr, redirect_stdout
from kleinlite import cli
from kleinlite.cli import generate
from kleinlite.inference import picture_file

MISTAKE = sys.argv[2]
save_picture = picture_file.save_picture


def save_and_stop(picture, path, **options):
    if MISTAKE != "none" and path.name.startswith("0004"):
        if MISTAKE == "killed":
            os.kill(os.getpid(), 9)
        raise UserError("The disk is full: make room.")
    save_picture(picture, path, **options)


def refuse(*arguments):
    raise UserError("dog.png does not exist.")


picture_file.save_picture = save_and_stop
if MISTAKE == "refused" and group.rank() == 1:
    generate.check_before_loading = refuse
out = io.StringIO()
err = io.StringIO()
with redirect_stdout(out), redirect_stderr(err):
    facts["status"] = cli.main(["generate", *sys.argv[3:]])
facts["out"] = out.getvalue()
facts["err"] = err.getvalue()
"""


@pytest.fixture
def wishes(tmp_path):
    path = tmp_path / "wishes.txt"
    path.write_text("\n".join(WISHES))
    (tmp_path / "pictures").mkdir()
    return path


def pixels(folder: Path) -> dict[str, bytes]:
    return {path.name: Image.open(path).tobytes() for path in sorted(folder.glob("*.png"))}


def test_a_list_is_divided_and_goes_on_after_a_failure(tmp_path, wishes):
    pictures = tmp_path / "pictures"
    typed = "--prompts", wishes, "--seed", 3, "-o", pictures
    first, second = run(tmp_path, COMMAND, "disk", *typed)
    missing = pictures / "0004-a-yellow-sun-6.png"
    assert (first["status"], second["status"]) == (0, 2) and first["out"].count("96x96") == 3
    assert second["out"] == "" and "The disk is full" in second["err"]
    assert len(pixels(pictures)) == 4 and not missing.exists()
    first, second = run(tmp_path, COMMAND, "none", *typed)
    assert first["status"] == second["status"] == 0 and missing.exists()
    assert [facts["out"].count("is there already.") for facts in (first, second)] == [3, 1]
    klein = Klein.from_pretrained("nano")
    for (name, drawn), prompt, seed in zip(pixels(pictures).items(), WISHES, range(3, 8), strict=True):
        assert drawn == klein(prompt, seed=seed, progress=False).tobytes(), f"{name} is what one machine draws"


def test_a_killed_machine_takes_nothing_with_it(tmp_path, wishes):
    """Without a launcher, which would end the others."""
    pictures = tmp_path / "pictures"
    with pytest.raises(AssertionError):
        run(tmp_path, COMMAND, "killed", "--prompts", wishes, "-o", pictures)
    facts = json.loads((tmp_path / "0.json").read_text())
    assert facts["status"] == 0
    assert sorted(pixels(pictures)) == [
        f"000{i}-{w.replace(' ', '-')}-{i - 1}.png" for i, w in enumerate(WISHES, 1) if i != 4
    ]


def test_one_picture_by_all_is_saved_by_the_first(tmp_path):
    first, second = run(tmp_path, COMMAND, "none", "a red star", "-o", tmp_path / "star.png")
    assert first["status"] == second["status"] == 0 and second["out"] == second["err"] == ""
    seed = int(first["out"].split("seed ")[1].split(",")[0])
    alone = Klein.from_pretrained("nano")("a red star", seed=seed, progress=False)
    drawn = Image.open(tmp_path / "star.png")
    assert max(abs(a - b) for a, b in zip(drawn.tobytes(), alone.tobytes())) <= 1


def test_what_one_machine_refuses_is_not_buried(tmp_path):
    first, second = run(tmp_path, COMMAND, "refused", "a red star", "-o", tmp_path / "star.png")
    assert first["status"] == second["status"] == 2 and "dog.png does not exist." in second["err"]
    assert (
        first["err"].strip() == "kleinlite: Another machine has stopped: see what it said, and start the command again."
    )


@pytest.mark.slow
def test_the_documented_command_starts(tmp_path, wishes):
    """`mlx.launch -n 2 -- python -m kleinlite generate --prompts …`"""
    launcher = Path(sys.executable).with_name("mlx.launch")
    if not launcher.exists():
        pytest.skip("mlx.launch is not beside this Python.")
    command = [launcher, "-n", "2", "-p", str(40000 + os.getpid() % 20000), "--env", "OPENBLAS_NUM_THREADS=1", "--"]
    command += [
        sys.executable,
        "-m",
        "kleinlite",
        "generate",
        "--prompts",
        str(wishes),
        "-o",
        str(tmp_path / "pictures"),
    ]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=HANGS)
    assert len(pixels(tmp_path / "pictures")) == 5
