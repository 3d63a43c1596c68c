"""Memory: the plan beside what is measured, what is refused, and the page "Which machine runs what"."""

import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from stand_in_hub import TINY
from test_keys import TEXT_ENCODERS, TRANSFORMERS

from kleinlite.autoencoder import Autoencoder, AutoencoderConfig
from kleinlite.bench import picture
from kleinlite.drawing import memory_check
from kleinlite.drawing.memory_check import check_memory, plan_networks
from kleinlite.memory import MemoryPlan, count_parameters, plan_memory
from kleinlite.models.configs import RELEASED_AUTOENCODERS, RELEASED_CONFIGS
from kleinlite.models.families import network_of
from kleinlite.models.opening import open_checkpoint
from kleinlite.models.registry import MODELS
from kleinlite.pipeline import Klein
from kleinlite.quantisation import PACKINGS
from kleinlite.text_encoder import TextEncoder, TextEncoderConfig
from kleinlite.transformer import Transformer


def test_parameters_are_those_of_the_released_models():
    for name, text, expected in (("4b", "4b", 3_875_544_576), ("9b", "8b", 9_078_581_248)):
        cfg, text_cfg = RELEASED_CONFIGS[name]
        assert count_parameters(Transformer, cfg) == expected
        assert cfg.d_text == TRANSFORMERS[name]["joint_attention_dim"] == 3 * text_cfg.d
        assert text_cfg.d_mlp == TEXT_ENCODERS[text]["intermediate_size"]
    assert count_parameters(TextEncoder, TextEncoderConfig()) == 3_114_088_192 + 2560  # 27 layers, embedding, last norm


def test_the_plan_is_arithmetic():
    configs = *RELEASED_CONFIGS["4b"], AutoencoderConfig()
    small, large = (plan_memory(*configs, width=side, height=side, cpu=False) for side in (512, 1024))
    assert small[:3] == large[:3] and large.decode == 4 * small.decode == 6 * 4 * 1024 * 1024 * 256
    half = plan_memory(*configs, width=512, height=512, bits=(4.5, 8.5), cpu=False)
    assert abs(half.transformer * 16 / 4.5 - small.transformer) < 4 and half.autoencoder == small.autoencoder
    assert abs(half.text_encoder * 16 / 8.5 - small.text_encoder) < 4
    two = plan_memory(*configs, width=512, height=512, references=2048, b=2, cpu=False)
    assert two.step > 2 * small.step and two.decode == 2 * small.decode
    assert plan_memory(*configs, width=512, height=512, cpu=True).step == 2 * small.step  # float32


def test_the_plan_counts_a_cache_of_the_references():
    """Four references of 1024 × 1024, in 9B's 32 blocks: 8.6 GB that stay between the steps."""
    edit = {"width": 1024, "height": 1024, "references": 4 * 4096, "cpu": False}
    plain, cached = (plan_memory(*RELEASED_CONFIGS["9b"], AutoencoderConfig(), **edit, cached=c) for c in (False, True))
    assert cached.step - plain.step == 2 * 2 * 32 * 4096 * 16_384 and cached[:4] == plain[:4]


def test_the_peak_with_parts_released_and_with_all_loaded():
    plan = MemoryPlan(text_encoder=6, transformer=8, autoencoder=1, encode=1, step=2, decode=5)
    assert plan.peak_bytes == 10 and plan.peak_bytes_all_loaded == 20
    assert plan._replace(decode=50).peak_bytes == 51 and plan._replace(encode=10).peak_bytes == 16


@pytest.mark.parametrize(
    "bits, word", [((16, 8, 4), "quantize=8"), ((32, 16, 4), "quantize=4"), ((32, 32, 32), "smaller")]
)
def test_what_cannot_fit_is_refused_with_the_way_out(monkeypatch, bits, word):
    monkeypatch.setattr(memory_check, "machine_memory", lambda: (10 * 10**9, 7 * 10**9))
    whole, eight, four = (MemoryPlan(0, n * 10**9, 0, 0, 0, 0) for n in bits)
    with pytest.raises(MemoryError, match=rf"takes {bits[0]}\.0 GB .* has 10\.0 GB: .*{word}"):
        check_memory(whole, {8: eight, 4: four})
    check_memory(four._replace(transformer=9 * 10**9), {})


def test_the_machine_has_memory():
    whole, usable = memory_check.machine_memory()
    assert 2**30 < usable <= whole < 2**50


def test_bits_are_counted_in_the_files():
    checkpoint = open_checkpoint(TINY, dtype=mx.float32)
    assert memory_check.bits_per_weight(checkpoint) == (32, 32)  # small parts are cast
    checkpoint = open_checkpoint("nano", dtype=mx.float32, quantize=4)
    assert memory_check.bits_per_weight(checkpoint) == (4.5, 4.5)


def test_bits_of_a_large_part_are_those_of_its_files(monkeypatch):
    monkeypatch.setattr(memory_check, "SMALL_PART_BYTES", 0)
    checkpoint = open_checkpoint("nano", dtype=mx.float32)
    assert all(abs(bits - 16) < 0.1 for bits in memory_check.bits_per_weight(checkpoint))  # float16


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="the sums were fitted on a CPU")
def test_the_plan_is_near_what_is_measured():
    """Within a third, for the network that takes most: the decoder, and for nano's step at 256 × 256."""
    klein = Klein.from_pretrained("nano")
    plan = memory_check.plan_checkpoint(klein.checkpoint, width=256, height=256, bits=32)
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
    file = lambda kind: (8 * MODELS[f"{size}-{kind}"].transformer_bytes / MODELS[size].size.transformer_parameters, 16)
    packed = {f"{q} bits": (PACKINGS[q].bits_per_weight,) * 2 for q in (8, 6, 5, 4, 3)}
    if size == "z-image":  # its makers publish no smaller files
        return {"bfloat16": (16, 16), **packed}
    return {"bfloat16": (16, 16), "FP8 file": file("fp8"), **packed, "NVFP4 file": file("nvfp4")}


def fits(needed: float) -> str:
    """The smallest Mac whose GPU may use that much."""
    return f"{next(mac for mac in MACS if needed <= mac * 2**30 * (2 / 3 if mac <= 36 else 3 / 4))} GB"


def expected_table() -> list[str]:
    lines = []
    known = {"4b": "`4b`, `base-4b`", "9b": "`9b`, `base-9b`, `9b-kv`", "z-image": "`z-image-turbo`"}
    for size, names in known.items():
        configs = *RELEASED_CONFIGS[size], RELEASED_AUTOENCODERS[size]
        for precision, bits in precisions(size).items():
            plans = [plan_networks(*configs, width=side, height=side, bits=bits, cpu=False) for side in (512, 1024)]
            on_cpu = plan_networks(*configs, width=512, height=512, bits=bits, cpu=True)
            cells = [cell for plan in plans for cell in (f"{plan.peak_bytes / 1e9:.1f}", fits(plan.peak_bytes))]
            weights = " + ".join(f"{n / 1e9:.2f}" for n in plans[0][:3])
            lines.append(f"| {names} | {precision} | {weights} | {' | '.join(cells)} | {on_cpu.peak_bytes / 1e9:.1f} |")
            names = ""
    return lines


def test_the_page_says_what_the_plan_says():
    table = expected_table()
    missing = [line for line in table if line not in PAGE]
    assert not missing, "the page should have:\n" + "\n".join(table)


def test_weights_on_the_page_are_counted_right():
    (small, text), (large, text8), (sister, text35) = (RELEASED_CONFIGS[name] for name in ("4b", "9b", "z-image"))
    whole = lambda cfg: sum(w.size for _, w in tree_flatten(TextEncoder(cfg).parameters()))
    used = lambda cfg: count_parameters(TextEncoder, cfg) - cfg.d  # the last norm is not read either
    autoencoder = count_parameters(Autoencoder, AutoencoderConfig())
    counts = [count_parameters(network_of(cfg), cfg) for cfg in (small, large, sister)]
    counts += [whole(text), used(text), used(text35), whole(text8), used(text8)]
    expected = [(f"{n:,}", f"{2 * n / 1e9:.2f} GB") for n in counts] + [
        (f"{autoencoder:,}", f"{4 * autoencoder / 1e9:.2f} GB")
    ]
    rows = re.search(r"^\| part .*\n\|-.*\n((?:\|.*\n)+)", PAGE, re.M)[1].splitlines()
    assert [tuple(cell.strip() for cell in row.strip("|").split("|"))[1:] for row in rows] == expected


@pytest.mark.skipif(mx.device_info().get("memory_size") is not None, reason="a GPU says what it has")
def test_limits_of_the_process_count_as_the_machines():
    """As `ulimit -v` and containers set them: beyond them MLX ends the process."""
    code = "import resource; from kleinlite.drawing.memory_check import machine_memory; "
    code += "resource.setrlimit(resource.RLIMIT_AS, (8 * 10**9, -1)); print(machine_memory()[0])"
    end = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert int(end.stdout) == min(8 * 10**9, memory_check.machine_memory()[0]), end.stderr


def test_the_limit_of_a_container_counts(monkeypatch, tmp_path):
    file = tmp_path / "memory.max"
    monkeypatch.setattr(memory_check, "Path", lambda path: file if path == "/sys/fs/cgroup/memory.max" else Path(path))
    without = memory_check.process_limits()
    file.write_text("3000000000\n")
    assert memory_check.process_limits() == [*without, 3 * 10**9]
    file.write_text("max\n")
    assert memory_check.process_limits() == without
