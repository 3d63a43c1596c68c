"""Draw with nano and the adapters that come with it in diffusers, and keep it for tests/nano/test_bundled_adapters.py.

    pip install -e ".[dev]"
    python -m tools.goldens.make_nano_lora_golden

The files are read by diffusers' loader, as they are bundled and in the layout for ComfyUI. Run it again whenever nano's
weights or its adapters change.
"""

import tempfile
from pathlib import Path

import mlx.core as mx
import torch

from kleinlite.klein import Klein
from kleinlite.lora import LoRA
from kleinlite.models.adapters import find_adapter, open_adapter, write_adapter
from kleinlite.sampling import noise
from tools.goldens import GOLDENS
from tools.goldens.make_nano_golden import whole
from tools.goldens.run_diffusers import draw, load

# name → prompt, adapters with their scales, layout
CASES = {
    "cross": ("a green cross on a yellow background", {"cross": 1.0}, "diffusers"),
    "half": ("a red cross above a blue circle", {"cross": 0.5}, "comfy"),
    "both": ("a purple cross on a white background", {"cross": 1.0, "outlined": 0.6}, "diffusers"),
}


def in_layout(name: str, layout: str, folder: Path) -> Path:
    """The bundled file, or the same adapter in another layout."""
    if layout == "diffusers":
        return find_adapter(name)
    net = Klein.from_pretrained("nano").transformer
    changes = {path: as_low_rank(change) for path, change in open_adapter(name).deltas(net).items()}
    write_adapter(folder / f"{name}.safetensors", changes, layout=layout)
    return folder / f"{name}.safetensors"


def as_low_rank(change):
    """Queries, keys and values share their A in what we have trained: one change again."""
    if isinstance(change, LoRA):
        return change
    thirds = [change.pieces[str(i)] for i in range(3)]
    return LoRA(thirds[0].a, mx.concatenate([third.b for third in thirds]))


def main() -> None:
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "nano"
        model.mkdir()
        pipeline, settings = load(whole("nano", model))
        for case, (prompt, adapters, layout) in CASES.items():
            for name in adapters:
                file = in_layout(name, layout, Path(folder))
                pipeline.load_lora_weights(file.parent, weight_name=file.name, adapter_name=name)
            pipeline.set_adapters(list(adapters), list(adapters.values()))
            start = torch.tensor(noise(7, 36).tolist())
            picture = draw(pipeline, settings, prompt, size=(96, 96), noise=start)
            pipeline.unload_lora_weights()
            rows[case] = mx.array(memoryview(picture.tobytes())).reshape(96, 96, 3)
    mx.save_safetensors(str(GOLDENS / "nano_lora.safetensors"), rows)
    print("wrote", ", ".join(rows))


if __name__ == "__main__":
    main()
