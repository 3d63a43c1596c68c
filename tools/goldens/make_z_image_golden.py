"""What diffusers computes with a tiny random Z-Image-Turbo: writes `tests/pipelines/z_image/`.

Nothing here depends on MLX or on kleinlite; the tests only read what this writes. To make it again:

    pip install -e ".[dev]"
    python -m tools.goldens.make_z_image_golden            # seconds
    python -m tools.goldens.make_z_image_golden --check   # compute again and compare, write nothing else

The model is a folder in the released layout, its weights bfloat16 and its transformer in three shards.
`expected.safetensors` has what diffusers makes of it in float32:

- `prompt<i>.embeds`: features of `prompts[i]`, (tokens, 8), real tokens only;
- `vae.input` → `.latent_mean` → `.decoded`, channels first;
- `<run>.sigmas`; `.trajectory` (steps + 1, 16, h, w), which begins with the noise; `.model_output0`, what
  the transformer says first, (1, 16, h, w), with guidance (2, …): of the prompt, of the negative one; `.image`, 8 bits.

`blocks.safetensors` has one block at a time, each on inputs of rms 1 (`ordinary`) and of rms 0.01 (`small`):
`<block>.<case>.in.<what>` and `.out.<what>`. Rotations are cosines and sines, one per channel pair.
"""

import json
import shutil
import tempfile
from pathlib import Path

import torch
import transformers
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from diffusers.utils import logging
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3Model

from tools.goldens import PIPELINES
from tools.goldens.make_goldens import CASES, Draw, File, asked_to_check, randomise
from tools.goldens.make_pipeline_golden import check, make_tokenizer, rounded

FOLDER = PIPELINES / "z_image"
CHAT = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{{ '<|im_start|>assistant
' }}"""
QWEN = {
    "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 36, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip
VAE = {
    "block_out_channels": (4, 4, 8, 8), "layers_per_block": 1, "latent_channels": 16, "norm_num_groups": 2,
    "sample_size": 64, "scaling_factor": 0.3611, "shift_factor": 0.1159, "use_quant_conv": False,
    "use_post_quant_conv": False, "force_upcast": True,
}  # fmt: skip
DIT = {
    "in_channels": 16, "dim": 32, "n_layers": 2, "n_refiner_layers": 2, "n_heads": 2, "n_kv_heads": 2,
    "cap_feat_dim": 8, "axes_dims": [4, 6, 6], "axes_lens": [1536, 512, 512],
}  # fmt: skip
# What stands before a second norm must be small for the epsilon of that norm to show: in the blocks 1 of the refiners.
QUIET = [(r"refiner\.1\.(attention\.to_out\.0|feed_forward\.w2)\.weight", 0.02)]
PROMPTS = ["a red circle above a blue square", "Un été, 海 🏠 <|im_end|>", "", 9 * "a red circle, "]
RUNS = {
    "t2i": {"prompt": 0, "width": 96, "height": 64, "steps": 8, "guidance": 0.0, "negative": None},
    "unicode": {"prompt": 1, "width": 32, "height": 112, "steps": 3, "guidance": 0.0, "negative": None},
    "empty": {"prompt": 2, "width": 16, "height": 16, "steps": 2, "guidance": 0.0, "negative": None},
    "long": {"prompt": 3, "width": 128, "height": 64, "steps": 2, "guidance": 0.0, "negative": None},
    "guided": {"prompt": 0, "width": 48, "height": 64, "steps": 3, "guidance": 3.0, "negative": "blue"},
}


def make_model(folder):
    """The model's folder in the released layout."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT
    rope = {"rope_type": "default", "rope_theta": 1e6}
    text = rounded(Qwen3Model(Qwen3Config(**QWEN, rope_parameters=rope, vocab_size=len(tokenizer))), 81)
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    parts = {
        "scheduler": FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, use_dynamic_shifting=False, shift=3.0),
        "vae": rounded(AutoencoderKL(**VAE, **kinds), 82),
        "text_encoder": text,
        "tokenizer": tokenizer,
        "transformer": randomise(ZImageTransformer2DModel(**DIT), 83, QUIET).to(torch.bfloat16).float(),
    }
    pipeline = ZImagePipeline(**parts).to(torch.bfloat16)
    pipeline.save_pretrained(folder)
    shutil.rmtree(folder / "transformer")
    pipeline.transformer.save_pretrained(folder / "transformer", max_shard_size="400KB")
    for path in folder.rglob("*.safetensors"):
        path.chmod(0o644)


def blocks(transformer):
    """One block at a time, on ordinary and on small inputs."""
    file, d, draw = File("blocks"), DIT["dim"], Draw(84)
    ids = torch.tensor([[1 + k, 0, 0] for k in range(5)] + [[6, i, j] for i in range(2) for j in range(3)])
    freqs = transformer.rope_embedder(ids)[None]
    file.put("rope", {"in.ids": ids, "out.cos": freqs[0].real, "out.sin": freqs[0].imag})
    times = torch.tensor([0.0, 0.25, 0.9])
    vec = transformer.t_embedder(times * 1000)
    file.put("time", {"in.t": times, "out.vec": vec})
    for case, rms in CASES.items():
        x = draw(2, len(ids), d, rms=rms).float()
        text = draw(2, 7, DIT["cap_feat_dim"], rms=rms).float()
        layer, context = transformer.noise_refiner[1], transformer.context_refiner[1]
        file.put(f"block.{case}", {"in.x": x, "in.vec": vec[:2], "out.x": layer(x, None, freqs, vec[:2])})
        file.put(f"context_block.{case}", {"in.x": x, "out.x": context(x, None, freqs)})
        file.put(f"attention.{case}", {"in.x": x, "out.x": layer.attention(x, freqs_cis=freqs)})
        file.put(f"feed_forward.{case}", {"in.x": x, "out.x": layer.feed_forward(x)})
        file.put(f"caption.{case}", {"in.x": text, "out.x": transformer.cap_embedder(text)})
        out = transformer.all_final_layer["2-1"](x, vec[:2])
        file.put(f"final_layer.{case}", {"in.x": x, "in.vec": vec[:2], "out.x": out})
    return file


def encode(pipeline, prompt):
    return pipeline.encode_prompt(prompt, do_classifier_free_guidance=False)[0][0]


@torch.no_grad()
def compute(folder):
    """All reference values: tensors, and what else the tests need to know."""
    pipeline = ZImagePipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    file = File("z_image")
    for i, prompt in enumerate(PROMPTS):
        file.put(f"prompt{i}", {"embeds": encode(pipeline, prompt)})
    pixels = (Draw(85)(1, 3, 32, 48) / 2).clamp(-1, 1).float()
    mean = pipeline.vae.encode(pixels).latent_dist.mode()
    file.put("vae", {"input": pixels, "latent_mean": mean, "decoded": pipeline.vae.decode(mean).sample})
    for k, (run, wish) in enumerate(RUNS.items()):
        shape = (1, 16, wish["height"] // 8, wish["width"] // 8)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(90 + k))
        noise = (noise * 64).round() / 64  # bits that any machine agrees on
        path, outputs = [noise], []
        hook = pipeline.transformer.register_forward_hook(lambda *x, o=outputs: o.append(torch.stack(list(x[-1][0]))))
        picture = pipeline(
            prompt=PROMPTS[wish["prompt"]],
            negative_prompt=wish["negative"],
            width=wish["width"],
            height=wish["height"],
            num_inference_steps=wish["steps"],
            guidance_scale=wish["guidance"],
            latents=noise,
            callback_on_step_end=lambda pipe, i, t, x, p=path: p.append(x["latents"]) or x,
        ).images[0]
        hook.remove()
        assert len(outputs) == wish["steps"]
        levels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        first = outputs[0][:, :, 0]
        file.put(run, {"sigmas": pipeline.scheduler.sigmas, "model_output0": first, "trajectory": torch.cat(path)})
        file[f"{run}.image"] = levels.reshape(wish["height"], wish["width"], 3)
    return file, blocks(pipeline.transformer)


def write(folder):
    """The model, and beside it what diffusers makes of it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    make_model(folder)
    file, one_by_one = compute(folder)
    meta = {"prompts": PROMPTS, "runs": RUNS, "with": json.loads(file.metadata()["made"])["with"]}
    for name, tensors in (("expected", file), ("blocks", one_by_one)):
        save_file({k: w.contiguous() for k, w in tensors.items()}, folder / f"{name}.safetensors")
        (folder / f"{name}.safetensors").chmod(0o644)
    (folder / "meta.json").write_text(json.dumps(meta, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main():
    only_check = asked_to_check(__doc__)
    logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if only_check:
        with tempfile.TemporaryDirectory() as fresh:
            write(Path(fresh))
            bad = check(FOLDER, Path(fresh))
        raise SystemExit("\n".join(bad) or 0)
    write(FOLDER)
    files = [path for path in sorted(FOLDER.rglob("*")) if path.is_file()]
    for path in files:
        print(f"{path.stat().st_size / 1000:8.1f} kB  {path.relative_to(PIPELINES)}")
    print(f"{sum(path.stat().st_size for path in files) / 1000:8.1f} kB")


if __name__ == "__main__":
    main()
