"""The comparison of a GPU with the CPU; here the CPU stands for the GPU, as it is and with a wrong answer."""

import mlx.core as mx
import pytest

from kleinlite.inference import gpu_check

CPU = mx.Device(mx.cpu)


def test_the_same_numbers_are_no_sentence():
    assert gpu_check.compare_devices(CPU) == []


@pytest.mark.parametrize("name", ["quantized_product", "convolution"])
@pytest.mark.parametrize("wrong", [lambda x: 1.1 * x, lambda x: x * float("nan")])
def test_a_difference_is_a_sentence(name, wrong, monkeypatch):
    right = getattr(gpu_check, name)
    calls = []

    def compute(device: mx.Device) -> mx.array:
        calls.append(device)
        return right(device) if len(calls) == 1 else wrong(right(device))

    monkeypatch.setattr(gpu_check, name, compute)
    [sentence] = gpu_check.compare_devices(CPU)
    assert f"mlx {mx.__version__}" in sentence and "set_default_device" in sentence


@pytest.mark.skipif(mx.default_device() == CPU, reason="needs a GPU")
def test_this_gpu():
    assert gpu_check.compare_devices(mx.default_device()) == []
