"""The trials of chapters 3, 5 and 9: that the stored file is one of this program, and that the program trains."""

import json
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx
import pytest

from recipe import ablations as trials
from recipe.ablations import NETS, Net, held_out_loss, run_trials

STORED = json.loads((Path(__file__).parents[2] / "notebooks" / "trials.json").read_text(encoding="utf-8"))


def test_stored_is_what_the_code_describes():
    assert STORED["nets"].keys() == NETS.keys()
    for name, net in NETS.items():
        stored = STORED["nets"][name]
        assert stored["weights"] == net.count_weights()
        assert (stored["width"], *(stored[field] for field in asdict(net))) == (net.cfg.d, *json_like(net).values())
        assert [run["seed"] for run in stored["runs"]] == list(range(trials.SEEDS))
    settings = [STORED[name] for name in ("scenes", "unseen", "batch")]
    assert settings == [trials.SCENES, trials.UNSEEN, trials.BATCH]


def json_like(net: Net) -> dict:
    return json.loads(json.dumps(asdict(net)))


@pytest.mark.slow
def test_a_few_steps_make_what_is_stored():
    net = Net(heads=1, double_blocks=1, single_blocks=1, out_layers=(2,), steps=10)
    found = json.loads(json.dumps(run_trials({"small": net}, scenes=32, unseen=8, seeds=2)))
    assert found.keys() == STORED.keys()
    small, stored = found["nets"]["small"], STORED["nets"]["tap 2"]
    assert small.keys() == stored.keys() and small["out_layers"] == [2]
    assert all(run.keys() == stored["runs"][0].keys() for run in small["runs"])
    first, second = small["runs"]
    assert first["held_out"] != second["held_out"]  # other weights, other batches
    assert all(run["training"][-1] < run["training"][0] for run in small["runs"])
    assert all(len(run["training"]) == 10 for run in small["runs"])


def test_a_net_reads_its_own_taps():
    clean, features = mx.zeros((4, 36, 32)), mx.arange(288, dtype=mx.float32) + mx.zeros((4, 32, 288))
    pictures = trials.Pictures(clean, features)

    def heard(net):
        return pictures.batch(mx.array([0]), net, mx.random.key(0))[2][0, 0].tolist()

    assert heard(NETS["tap 2"]) == list(range(96, 192)) and heard(NETS["64 wide"]) == list(range(288))


def test_weights_in_use():
    """What the count calls idle changes nothing, and what it counts as used does."""
    net = Net(heads=1, double_blocks=0, single_blocks=2)
    clean = mx.random.normal((8, 36, 32), key=mx.random.key(1))
    features = mx.random.normal((8, 32, 288), key=mx.random.key(2))
    pictures, model = trials.Pictures(clean, features), net.build(0)
    before = held_out_loss(model, net, pictures)
    model.double_stream_modulation_img.lin.weight = mx.ones_like(model.double_stream_modulation_img.lin.weight)
    assert held_out_loss(model, net, pictures) == pytest.approx(before, abs=1e-6)
    model.single_stream_modulation.lin.weight = 10 * mx.ones_like(model.single_stream_modulation.lin.weight)
    assert held_out_loss(model, net, pictures) != pytest.approx(before, abs=1e-3)
