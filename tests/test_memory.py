"""Memory: the plan beside what is measured, what is refused, and the page "Which machine runs what"."""

import os
import subprocess
import sys
from pathlib import Path

import machines
import mlx.core as mx
import pytest
from test_names import TEXT_ENCODERS, TRANSFORMERS
from waiting import HANGS

from benchmarks import picture
from kleinlite.autoencoder import Autoencoder, AutoencoderConfig
from kleinlite.inference import machine_memory
from kleinlite.inference.machine_memory import check_memory
from kleinlite.inference.picture_memory import BESIDE_STRIPS, MemoryPlan, plan_memory
from kleinlite.klein import Klein
from kleinlite.memory import count_parameters
from kleinlite.models.checkpoint import open_checkpoint
from kleinlite.models.configs import RELEASED_CONFIGS
from kleinlite.text_encoder import TextEncoder, TextEncoderConfig
from kleinlite.transformer import Transformer


def test_parameters_are_those_of_the_released_models():
    for name, text, expected in (("4b", "4b", 3_875_544_576), ("9b", "8b", 9_078_581_248)):
        cfg, text_cfg, _ = RELEASED_CONFIGS[name]
        assert count_parameters(Transformer, cfg) == expected
        assert cfg.d_text == TRANSFORMERS[name]["joint_attention_dim"] == 3 * text_cfg.d
        assert text_cfg.d_mlp == TEXT_ENCODERS[text]["intermediate_size"]
    assert count_parameters(TextEncoder, TextEncoderConfig()) == 3_114_088_192  # 27 layers, embedding
    assert count_parameters(TextEncoder, RELEASED_CONFIGS["9b"][1]) == 5_831_883_520
    assert count_parameters(Autoencoder, AutoencoderConfig()) == 84_046_371


def test_the_plan_is_arithmetic():
    configs = RELEASED_CONFIGS["4b"]
    small, large = (plan_memory(configs, width=side, height=side, cpu=False) for side in (512, 1024))
    assert small[:3] == large[:3] and large.decode == 4 * 4 * 1024 * 1024 * 128 + BESIDE_STRIPS
    half = plan_memory(configs, width=512, height=512, bits=(4.5, 8.5), cpu=False)
    assert abs(half.transformer * 16 / 4.5 - small.transformer) < 4 and half.autoencoder == small.autoencoder
    assert abs(half.text_encoder * 16 / 8.5 - small.text_encoder) < 4
    two = plan_memory(configs, width=512, height=512, reference_tokens=2048, b=2, cpu=False)
    assert two.step > 2 * small.step and two.decode - BESIDE_STRIPS == 2 * (small.decode - BESIDE_STRIPS)
    assert plan_memory(configs, width=512, height=512, cpu=True).step == 2 * small.step  # float32


def test_the_plan_counts_that_references_are_read():
    """One of 1024 × 1024 takes more than a picture of 512 × 512 does; several are read one by one."""
    configs = RELEASED_CONFIGS["4b"]
    plain, edit, four = (plan_memory(configs, width=512, height=512, reference_tokens=n) for n in (0, 4096, 4 * 4096))
    large = plan_memory(configs, width=1024, height=1024)
    assert plain.decode < edit.decode == four.decode < large.decode
    assert plan_memory(configs, width=512, height=512, reference_tokens=1024).decode == plain.decode


def test_the_plan_counts_a_cache_of_the_references():
    """Four references of 1024 × 1024, in 9B's 32 blocks: 8.6 GB that stay, made in a pass over references alone."""
    edit = {"width": 1024, "height": 1024, "reference_tokens": 4 * 4096, "cpu": False}
    configs = RELEASED_CONFIGS["9b"]
    plain, cached = (plan_memory(configs, **edit, cached=c) for c in (False, True))
    kept = 2 * 2 * 32 * 4096 * 16_384
    others = 2 * 72 * 4096 * (4096 + 512)  # the tokens of picture and prompt, which wait until the cache is there
    assert cached.step == plain.step - others + kept and cached[:4] == plain[:4]
    small = {"width": 1024, "height": 1024, "reference_tokens": 256, "cpu": False}
    plain, cached = (plan_memory(configs, **small, cached=c) for c in (False, True))
    assert cached.step == plain.step - 2 * 72 * 4096 * 256 + 2 * 2 * 32 * 4096 * 256  # here the steps take the most


def test_the_peak_with_parts_released_and_with_all_loaded():
    plan = MemoryPlan(text_encoder=6, transformer=8, autoencoder=1, encode=1, step=2, decode=5)
    assert plan.peak_bytes == 10 and plan.peak_bytes_all_loaded == 20
    assert plan._replace(decode=50).peak_bytes == 51 and plan._replace(encode=10).peak_bytes == 16


@pytest.mark.parametrize(
    "bits, word", [((16, 8, 4), "quantize=8"), ((32, 16, 4), "quantize=4"), ((32, 32, 32), "smaller")]
)
def test_what_cannot_fit_is_refused_with_the_way_out(monkeypatch, bits, word):
    monkeypatch.setattr(machine_memory, "machine_memory", lambda held=0: (10 * 10**9, 7 * 10**9))
    whole, eight, four = (MemoryPlan(0, n * 10**9, 0, 0, 0, 0) for n in bits)
    with pytest.raises(MemoryError, match=rf"takes {bits[0]}\.0 GB .* has 10\.0 GB: .*{word}"):
        check_memory({None: whole, 8.5: eight, 4.5: four}.get, (8, 4))
    check_memory(lambda bits: four._replace(transformer=9 * 10**9), ())


def test_the_machine_has_memory():
    whole, usable = machine_memory.machine_memory()
    assert 2**30 < usable <= whole < 2**50


def test_bits_of_a_large_part_are_those_of_its_files(monkeypatch):
    monkeypatch.setattr("kleinlite.models.files.SMALL_PART_BYTES", 0)
    checkpoint = open_checkpoint("nano", dtype=mx.float32)
    assert all(abs(bits - 16) < 0.1 for bits in checkpoint.bits)  # float16


def test_the_plan_counts_attention_scores_where_they_are_written_out():
    """A step of nano at 1024 × 1024 took 415 MB on a CPU, 273 of them scores; no fused kernel writes those."""
    configs = open_checkpoint("nano", dtype=mx.float32).configs
    cpu, gpu = (plan_memory(configs, width=1024, height=1024, bits=32, cpu=c).step for c in (True, False))
    assert 415e6 < cpu < 1.15 * 415e6 and gpu == 2 * 72 * 256 * (configs.text_encoder.max_length + 4096)


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="the sums were fitted on a CPU")
def test_the_plan_is_near_what_is_measured():
    """Within a third, for the network that takes most: the decoder, and for nano's step at 256 × 256."""
    klein = Klein.from_pretrained("nano")
    plan = machine_memory.plan_model(klein._model.checkpoint, width=256, height=256, bits=32)
    others = mx.get_active_memory()  # what other tests keep
    measured = picture.measure(klein, 256, 1)
    step, decode = plan.transformer + plan.step, plan.transformer + plan.autoencoder + plan.decode
    for stage, predicted in {"step 1": step, "decode": decode}.items():
        assert 2 / 3 < (measured[stage].arrays - others) / predicted < 4 / 3, stage


# ---------------------------------------------------------------- the page "Which machine runs what"

PAGE = (Path(__file__).parent.parent / "notebooks" / "machines.md").read_text("utf-8")


def test_the_page_says_what_the_plan_says():
    missing = [line for line in (*machines.table(), *machines.seconds_table()) if line not in PAGE]
    assert not missing, "python site/machines.py writes the page's table again"


MEASURED = r"""
import re, sys
from pathlib import Path
from kleinlite import Klein
from kleinlite.inference.machine_memory import BESIDE_ARRAYS, WORK_SPACE
klein = Klein.from_pretrained()
size = int(sys.argv[1])
plan = klein.plan_memory(width=size, height=size).peak_bytes
before = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
klein("a red circle", seed=1, steps=1, width=size, height=size, progress=False)
# not getrusage's ru_maxrss: a process inherits the peak of the one that started it, and that is a whole pytest
peak = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
took = peak - before
print(plan, took, plan * (1 + BESIDE_ARRAYS) + WORK_SPACE)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="the system does not say what a process holds")
@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="the sums were fitted on a CPU")
def test_a_process_takes_no_more_than_a_limit_leaves_for_it():
    """What a limit must leave for a plan is what the whole process takes, libraries and all."""
    end = subprocess.run([sys.executable, "-c", MEASURED, "512"], capture_output=True, text=True, timeout=HANGS)
    plan, took, allowed = map(float, end.stdout.split())
    assert plan < took < allowed < 3 * took, end.stderr


@pytest.mark.skipif(mx.device_info().get("memory_size") is not None, reason="a GPU says what it has")
@pytest.mark.parametrize(
    "own, files",
    [
        ("0::/", {"memory.max": 8}),  # a container
        ("0::/system.slice/job_7/step_0/user/task_0", {"system.slice/job_7/memory.max": 8}),  # Slurm
        (
            "0::/user.slice/run-u5.scope",
            {"user.slice/run-u5.scope/memory.max": 8, "user.slice/memory.max": 9},
        ),  # systemd
        ("0::/user.slice/run-u5.scope", {"user.slice/run-u5.scope/memory.max": 9, "user.slice/memory.high": 8}),
        ("0::/../../job", {"job/memory.max": 8}),  # below another than the own namespace's top
        ("4:memory:/docker/0a1b\n0::/", {"memory/memory.limit_in_bytes": 8}),  # version 1 seen from a container
        ("3:cpu:/a\n4:memory:/slurm/job_7/step_0", {"memory/slurm/job_7/memory.limit_in_bytes": 8}),
        ("4:cpu,memory:/job:7", {"memory/job:7/memory.limit_in_bytes": 8, "memory/memory.limit_in_bytes": 2**63 / 1e9}),
        ("3:cpu:/a\n0::/b", {"memory/a/memory.limit_in_bytes": 1, "a/memory.max": 1, "b/memory.max": 8}),
    ],
)
def test_the_limit_of_a_job_or_container_counts(monkeypatch, tmp_path, own, files):
    """The least of the groups that the process is in, and of those above them."""
    monkeypatch.setattr(machine_memory, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(machine_memory, "CONTROL_GROUPS", tmp_path)
    whole, _ = machine_memory.machine_memory()
    (tmp_path / "own").write_text(f"{own}\n")
    for name, gigabytes in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{int(gigabytes * 1e9)}\n")
    assert machine_memory.machine_memory()[0] == pytest.approx((8e9 - machine_memory.WORK_SPACE) / 1.3, rel=1e-6)
    for name in files:
        (tmp_path / name).write_text("max\n")
    assert machine_memory.machine_memory()[0] == whole


LIMITED = """
import resource, sys
from kleinlite.inference.machine_memory import machine_memory
resource.setrlimit(getattr(resource, sys.argv[1]), (8 * 10**9, -1))
print(machine_memory()[0])
"""


@pytest.mark.skipif(mx.device_info().get("memory_size") is not None, reason="a GPU says what it has")
@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_the_limit_of_a_shell_counts(kind):
    """`ulimit -v` and `-d`: beyond them MLX ends the process."""
    end = subprocess.run([sys.executable, "-c", LIMITED, kind], capture_output=True, text=True, timeout=HANGS)
    assert int(end.stdout) == pytest.approx((8 * 10**9 - machine_memory.WORK_SPACE) / 1.3, rel=0.01), end.stderr


WINDOWS = """
import os, sys
sys.modules["resource"] = None
del os.sysconf
from kleinlite.__main__ import main
sys.exit(main())
"""


def test_what_windows_lacks_is_not_needed(tmp_path):
    """Nobody of us has run it there; what its Python has not, no line may ask for."""
    command = ["generate", "a red circle", "--seed", "1", "--steps", "1", "-o", str(tmp_path / "x.png")]
    environment = os.environ | {"KLEINLITE_CPU": "off"}  # what sets up a Linux CPU
    end = subprocess.run(
        [sys.executable, "-c", WINDOWS, *command], capture_output=True, text=True, timeout=HANGS, env=environment
    )
    assert end.returncode == 0 and (tmp_path / "x.png").exists(), end.stderr
