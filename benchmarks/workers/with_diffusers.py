"""The stages in diffusers and transformers, for an environment with torch. Started by `benchmarks.peers`.

python with_diffusers.py --draw FOLDER FILE     a picture from a model folder into a file: start to PNG
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from loop import BATCH, COPY, HEAD_SIZE, HEADS, PRODUCT, PROMPT, SMALL, TEXT_TOKENS, TOKENS, WIDTH, peak_bytes, serve

DEVICE = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
DTYPE = torch.float32 if DEVICE == "cpu" else torch.bfloat16


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, DTYPE)


def timed(function: Callable[..., object], *inputs: torch.Tensor) -> Callable[[], None]:
    @torch.no_grad()
    def run() -> None:
        function(*inputs)
        if DEVICE != "cpu":
            getattr(torch, DEVICE).synchronize()

    return run


def product() -> Callable[[], None]:
    rows, inputs, outputs = PRODUCT
    return timed(torch.nn.functional.linear, normal(rows, inputs), normal(outputs, inputs))


def copy() -> Callable[[], None]:
    return timed(lambda x: x + 1, normal(COPY))


def attention_fn() -> Callable[[], None]:
    heads = normal(3, 1, TOKENS + TEXT_TOKENS, HEADS, HEAD_SIZE).transpose(2, 3)
    return timed(torch.nn.functional.scaled_dot_product_attention, *heads)


def swiglu() -> Callable[[], None]:
    both = normal(1, TOKENS + TEXT_TOKENS, 6 * WIDTH)
    return timed(lambda x: torch.nn.functional.silu(x[..., : 3 * WIDTH]) * x[..., 3 * WIDTH :], both)


def modulation() -> Callable[[], None]:
    def norm(x, shift, scale):
        return (1 + scale) * torch.nn.functional.layer_norm(x, (WIDTH,), eps=1e-6) + shift

    return timed(norm, normal(1, TOKENS + TEXT_TOKENS, WIDTH), normal(1, 1, WIDTH), normal(1, 1, WIDTH))


def position_ids(rows: int, columns: int, texts: int) -> tuple[torch.Tensor, torch.Tensor]:
    img = torch.cartesian_prod(torch.arange(1), torch.arange(rows), torch.arange(columns), torch.arange(1))
    txt = torch.cartesian_prod(torch.arange(1), torch.arange(1), torch.arange(1), torch.arange(texts))
    return img.to(DEVICE), txt.to(DEVICE)


def step(dtype: torch.dtype = DTYPE) -> Callable[[], None]:
    from diffusers import Flux2Transformer2DModel

    net = Flux2Transformer2DModel(
        num_layers=1, num_single_layers=2, num_attention_heads=HEADS, joint_attention_dim=7680, guidance_embeds=False
    ).to(DEVICE, dtype)
    img_ids, txt_ids = position_ids(32, 32, TEXT_TOKENS)
    inputs = [x.to(DEVICE, dtype) for x in (normal(1, TOKENS, 128), normal(1, TEXT_TOKENS, 7680), torch.tensor([0.5]))]
    return timed(lambda img, txt, t: net(img, txt, t, img_ids, txt_ids), *inputs)


def training_step() -> Callable[[], None]:
    from diffusers import Flux2Transformer2DModel

    net = Flux2Transformer2DModel(
        num_layers=SMALL["double_blocks"], num_single_layers=SMALL["single_blocks"], num_attention_heads=SMALL["heads"],
        attention_head_dim=sum(SMALL["axes"]), axes_dims_rope=SMALL["axes"], joint_attention_dim=SMALL["d_text"],
        guidance_embeds=False,
    ).to(DEVICE, DTYPE)  # fmt: skip
    ids = position_ids(6, 6, 32)
    inputs = normal(BATCH, 36, 128), normal(BATCH, 32, SMALL["d_text"]), torch.full((BATCH,), 0.5).to(DEVICE, DTYPE)

    def run() -> None:
        net.zero_grad()
        net(*inputs, *ids).sample.square().mean().backward()
        if DEVICE != "cpu":
            getattr(torch, DEVICE).synchronize()

    return run


def pipeline(folder: str) -> tuple[Callable[..., object], dict]:
    from diffusers import Flux2KleinPipeline

    pipe = Flux2KleinPipeline.from_pretrained(folder, torch_dtype=DTYPE).to(DEVICE)
    pipe.set_progress_bar_config(disable=True)
    index = json.loads((Path(folder) / "model_index.json").read_text(encoding="utf-8"))
    settings = {
        "text_encoder_out_layers": tuple(index["text_encoder_out_layers"]),
        "max_sequence_length": index["max_sequence_length"],
    }
    return pipe, {"width": 96, "height": 96, "num_inference_steps": 4, "guidance_scale": 1.0, **settings}


def picture() -> Callable[[], object]:
    pipe, settings = pipeline(sys.argv[3])
    return lambda: pipe(prompt=PROMPT, generator=torch.Generator().manual_seed(7), **settings).images[0]


def decode(side: int) -> Callable[[], Callable[[], None]]:
    def prepare() -> Callable[[], None]:
        from diffusers import AutoencoderKLFlux2

        net = AutoencoderKLFlux2().to(DEVICE).eval()
        latents = torch.randn((1, 32, side // 8, side // 8), generator=torch.Generator().manual_seed(0)).to(DEVICE)
        return timed(net.decode, latents)

    return prepare


def text_encoder() -> Callable[[], None]:
    from transformers import Qwen3Config, Qwen3Model

    layers = int(sys.argv[2])
    config = Qwen3Config(
        vocab_size=1000, hidden_size=2560, intermediate_size=9728, num_hidden_layers=1,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    )  # fmt: skip
    net = Qwen3Model(config).to(DEVICE, DTYPE).eval()
    net.layers = torch.nn.ModuleList([*net.layers] * layers)  # one layer's weights, again and again, as in ours.py
    net.config.num_hidden_layers, net.config.layer_types = layers, net.config.layer_types * layers
    ids = torch.randint(0, 1000, (1, TEXT_TOKENS), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    return timed(lambda ids: net(ids, attention_mask=torch.ones_like(ids), use_cache=False), ids)


STAGES = {
    "product": product, "copy": copy, "attention": attention_fn, "silu · up": swiglu, "modulated norm": modulation,
    "step": step, "step, bfloat16": lambda: step(torch.bfloat16), "training": training_step, "picture": picture,
    "decode 256²": decode(256), "decode 512²": decode(512), "text encoder": text_encoder,
}  # fmt: skip

if __name__ == "__main__":
    if sys.argv[1] == "--draw":
        pipe, settings = pipeline(sys.argv[2])
        pipe(prompt=PROMPT, generator=torch.Generator().manual_seed(7), **settings).images[0].save(sys.argv[3])
    else:
        from importlib.metadata import version

        versions = f"diffusers {version('diffusers')}, transformers {version('transformers')}"
        versions = f"{versions}, torch {torch.__version__}, {DEVICE}, {torch.get_num_threads()} threads"
        serve(STAGES, versions, torch.cuda.max_memory_allocated if DEVICE == "cuda" else peak_bytes)
