"""On a GPU the velocity field is compiled. No GPU is needed to see that it stays the same function."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from PIL import Image

from kleinlite import Klein, pipeline
from kleinlite.drawing import compiled
from kleinlite.transformer import Transformer

TINY = Path(__file__).parents[1] / "pipelines"
RED = Image.new("RGB", (64, 64), "red")
CASES = {
    "klein": ("tiny", {"width": 32, "height": 48}),
    "a reference": ("tiny", {"images": [RED]}),
    "a cache": ("tiny", {"images": [RED], "kv": True}),
    "Z-Image": ("z_image", {"width": 32, "height": 32}),
    "guidance": ("nano-base", {"width": 32, "height": 32, "guidance": 2.0}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_compiled_field_is_the_same_function(case, monkeypatch):
    name, options = CASES[case][0], dict(CASES[case][1])
    klein = Klein.from_pretrained(TINY / name if (TINY / name).exists() else name)
    if options.pop("kv", False):
        klein = Klein(replace(klein.checkpoint, info=replace(klein.info, kv=True)))
    draw = lambda: [step.latents for step in klein.stream("a tree", seed=7, steps=3, progress=False, **options)]
    plain = draw()
    monkeypatch.setattr(pipeline, "compile_on_gpu", compiled.compile_field)
    for ours, theirs in zip(draw(), plain, strict=True):
        assert mx.allclose(ours, theirs, rtol=1e-4, atol=1e-4).item() and not mx.all(ours == 0).item()


def test_all_steps_share_a_graph_and_the_weights_are_in_memory(monkeypatch):
    """A graph for each step would be built anew each time; weights not yet read would be read in each step."""
    klein, calls = Klein.from_pretrained(), []
    monkeypatch.setattr(pipeline, "compile_on_gpu", compiled.compile_field)
    whole = Transformer.__call__
    monkeypatch.setattr(Transformer, "__call__", lambda *args, **options: calls.append(1) or whole(*args, **options))
    klein("a tree", seed=7, steps=4, progress=False)
    assert len(calls) == 1


def test_on_a_cpu_nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    field = lambda x, t: x * t
    assert compiled.compile_on_gpu(field, None) is field
