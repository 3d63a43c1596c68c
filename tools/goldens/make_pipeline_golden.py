"""What diffusers' whole pipeline computes, for a tiny random model: writes `tests/pipelines/`.

Nothing here depends on MLX or on kleinlite; the tests only read what this writes. To make it again:

    pip install -e ".[dev]"
    python -m tools.goldens.make_pipeline_golden            # seconds
    python -m tools.goldens.make_pipeline_golden --check    # compute again and compare, write nothing here

`tests/pipelines/README.md` says what the files hold.
"""

import json
import shutil
import tempfile
from pathlib import Path

import torch
import transformers
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
)
from diffusers.utils import logging
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import Qwen2TokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tools.goldens import PIPELINES
from tools.goldens.make_goldens import SCHEDULER, File, asked_to_check, normalize, randomise
from tools.goldens.run_diffusers import as_latents, load

TAPS, TOKENS = (1, 3, 4), 40
QWEN = {
    "hidden_size": 16,
    "intermediate_size": 28,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
VAE = {
    "block_out_channels": (4, 6, 8, 8),
    "decoder_block_out_channels": (2, 4, 8, 8),
    "layers_per_block": 1,
    "latent_channels": 32,
    "norm_num_groups": 2,
    "sample_size": 48,
}
DIT = {"in_channels": 128, "joint_attention_dim": 48, "mlp_ratio": 3.0, "rope_theta": 2000, "guidance_embeds": False}
TRANSFORMERS = {
    "tiny": DIT | {"num_layers": 2, "num_single_layers": 2, "num_attention_heads": 3, "attention_head_dim": 8,
                   "axes_dims_rope": (2, 2, 2, 2)},
    "base": DIT | {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2, "attention_head_dim": 12,
                   "axes_dims_rope": (2, 4, 4, 2)},
}  # fmt: skip
PROMPTS = ["a red circle above a blue square", "Un e\u0301te\u0301, 海 🏠 <|im_end|>", ""]
REFERENCES = [(80, 64), (75, 90)]  # width, height; 75 × 90 is cut to 64 × 80
# fmt: off
RUNS = {
    "tiny": {
        "t2i": {"prompt": PROMPTS[0], "width": 48, "height": 32, "steps": 4, "guidance": 1.0, "refs": 0},
        "t2i_unicode": {"prompt": PROMPTS[1], "width": 32, "height": 64, "steps": 3, "guidance": 1.0, "refs": 0},
        "edit1": {"prompt": "make it blue", "width": None, "height": None, "steps": 2, "guidance": 1.0, "refs": 1},
        "edit2": {"prompt": "put both together", "width": 32, "height": 48, "steps": 2, "guidance": 1.0, "refs": 2},
    },
    "base": {
        "cfg": {"prompt": PROMPTS[0], "width": 32, "height": 48, "steps": 5, "guidance": 4.0, "refs": 0},
        "cfg_edit": {"prompt": PROMPTS[1], "width": 32, "height": 32, "steps": 2, "guidance": 2.5, "refs": 1},
    },
}
# fmt: on
PREPARED = [
    (64, 64),
    (75, 90),
    (64, 512),
    (131, 97),
    (1024, 1024),
    (1025, 1024),
    (1100, 1000),
    (900, 1333),
    (3000, 400),
]  # fmt: skip
REFUSED = [(63, 100), (200, 20), (64, 513), (1000, 120)]

# Qwen's way to cut a text into words
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{{ '<|im_start|>assistant
<think>

</think>

' }}"""


def make_tokenizer():
    """All bytes, a few merges, and Qwen's special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    text = ["user assistant \n\n", "a red circle above a blue square", "make it blue, put both together"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(text * 3, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>")])
    names = {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>", "unk_token": None}
    return Qwen2TokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT, **names)


def rounded(module, seed):
    """Random weights that bfloat16 can hold."""
    return randomise(module, seed).to(torch.bfloat16).float()


def make_model(folder):
    """The model's folder in the released layout, and in it `base`, which has only a transformer of its own."""
    tokenizer = make_tokenizer()
    rope = {"rope_type": "default", "rope_theta": 1e6}
    text = Qwen3ForCausalLM(Qwen3Config(**QWEN, rope_parameters=rope, vocab_size=len(tokenizer)))
    text = rounded(text, 71)
    text.tie_weights()
    text.model.embed_tokens.weight.data.mul_(4)
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    parts = {
        "scheduler": FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        "vae": rounded(AutoencoderKLFlux2(**VAE, **kinds), 72),
        "text_encoder": text,
        "tokenizer": tokenizer,
        "transformer": rounded(Flux2Transformer2DModel(**TRANSFORMERS["tiny"]), 73),
    }
    pipeline = Flux2KleinPipeline(**parts, is_distilled=True).to(torch.bfloat16)
    pipeline.save_pretrained(folder)
    pipeline.transformer = rounded(Flux2Transformer2DModel(**TRANSFORMERS["base"]), 74).to(torch.bfloat16)
    pipeline.transformer.save_pretrained(folder / "base" / "transformer")
    index = json.loads((folder / "model_index.json").read_text())
    index |= {"text_encoder_out_layers": TAPS, "max_sequence_length": TOKENS}
    (folder / "model_index.json").write_text(json.dumps(index, indent=1) + "\n")
    del index["is_distilled"]  # as in the released base models
    index["shares"] = ".."  # the other parts are in the folder above
    (folder / "base" / "model_index.json").write_text(json.dumps(index, indent=1) + "\n")
    for path in folder.rglob("generation_config.json"):
        path.unlink()
    for path in folder.rglob("*.safetensors"):
        path.chmod(0o644)


def gradients(width, height):
    """A picture in which every place has its own color: red grows to the right, green downwards."""
    red = bytes(x * 255 // (width - 1) for x in range(width)) * height
    green = b"".join(bytes([y * 255 // (height - 1)]) * width for y in range(height))
    blue = bytes((x * x) % 251 for x in range(width)) * height
    channels = [Image.frombytes("L", (width, height), x) for x in (red, green, blue)]
    return Image.merge("RGB", channels)


def prepare(processor, size):
    """What the pipeline's call does to a reference (it stands inline there)."""
    image = gradients(*size)
    processor.check_image_input(image)
    if size[0] * size[1] > 1024 * 1024:
        image = processor._resize_to_target_area(image, 1024 * 1024)
    width, height = (side // 16 * 16 for side in image.size)
    values = processor.preprocess(image, height=height, width=width, resize_mode="crop")[0]  # (3, h, w)
    return torch.round((values + 1) * 127.5).int().permute(1, 2, 0)


def compute(folder, name):
    """All reference values of one of the two models: tensors, and what else the tests need to know."""
    pipeline, settings = load(folder)
    if name == "base":
        path = folder / "base" / "transformer"
        pipeline.transformer = Flux2Transformer2DModel.from_pretrained(path, torch_dtype=torch.float32)
        pipeline.register_to_config(is_distilled=False)
    file, meta = File(name), {"runs": {}}
    references = [gradients(*size) for size in REFERENCES]

    if name == "tiny":
        meta |= {"prompts": PROMPTS, "reference_sizes": REFERENCES}
        for i, prompt in enumerate(PROMPTS):
            text = pipeline.tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
            row = pipeline.tokenizer(text, padding="max_length", max_length=TOKENS, return_tensors="pt")
            assert row["input_ids"].shape == (1, TOKENS), "a prompt is too long"
            features, _ = pipeline.encode_prompt(prompt, **settings)
            outputs = {"input_ids": row["input_ids"], "mask": row["attention_mask"], "embeds": features}
            file.put(f"prompt{i}", outputs)

        pixels = prepare(pipeline.image_processor, REFERENCES[1]).permute(2, 0, 1)[None, :, :32, :16] / 127.5 - 1
        packed = normalize(pipeline.vae, pixels)
        file.put("vae", {"input": pixels, "latent_mean": pipeline.vae.encode(pixels).latent_dist.mode()})
        latents = Flux2KleinPipeline._patchify_latents(file["vae.latent_mean"])
        assert not torch.allclose(latents, packed)
        file.put("vae", {"packed": packed, "decoded": pipeline.vae.decode(file["vae.latent_mean"]).sample})

        meta["prepared"] = []
        for size in PREPARED:
            pixels = prepare(pipeline.image_processor, size)
            corners = [pixels[y, x].tolist() for y in (0, -1) for x in (0, -1)]
            meta["prepared"].append({"size": size, "result": pixels.shape[1::-1], "corners": corners})
        meta["refused"] = REFUSED
        for size in REFUSED:
            try:
                prepare(pipeline.image_processor, size)
            except ValueError:
                continue
            raise AssertionError(f"diffusers takes {size}")

    for k, (run, wish) in enumerate(RUNS[name].items()):
        images = references[: wish["refs"]]
        width, height = wish["width"], wish["height"]
        if width is None:  # the pipeline takes the first reference's
            height, width = prepare(pipeline.image_processor, REFERENCES[0]).shape[:2]
        gh, gw = height // 16, width // 16
        noise = torch.randn(1, gh * gw, 128, generator=torch.Generator().manual_seed(80 + k))
        noise = (noise * 64).round() / 64  # bits that any machine agrees on
        path, velocities = [noise], []
        hook = pipeline.transformer.register_forward_hook(lambda *x, v=velocities: v.append(x[-1][0]))
        picture = pipeline(
            prompt=wish["prompt"],
            image=images or None,
            width=wish["width"],
            height=wish["height"],
            num_inference_steps=wish["steps"],
            guidance_scale=wish["guidance"],
            latents=as_latents(noise, gh, gw),
            callback_on_step_end=lambda pipe, i, t, x, p=path: p.append(x["latents"]) or x,
            **settings,
        ).images[0]
        hook.remove()
        assert len(velocities) == wish["steps"] * (1 + (wish["guidance"] > 1))
        levels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        first = velocities[0][:, : gh * gw]  # with guidance: the one with the prompt
        outputs = {"sigmas": pipeline.scheduler.sigmas, "velocity0": first, "trajectory": torch.cat(path)}
        file.put(run, outputs)
        file[f"{run}.image"] = levels.reshape(height, width, 3)
        meta["runs"][run] = wish
    return file, meta


def write(folder):
    """The model, `expected.safetensors` beside each transformer's index, and `meta.json`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    make_model(folder)
    for name, place in (("tiny", folder), ("base", folder / "base")):
        file, meta = compute(folder, name)
        meta["with"] = json.loads(file.metadata()["made"])["with"]
        save_file(dict(file), place / "expected.safetensors")
        (place / "expected.safetensors").chmod(0o644)
        (place / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")


def check(folder, fresh):
    """Files that differ between two folders, tensors by value."""
    bad = []
    for path in sorted(p.relative_to(fresh) for p in fresh.rglob("*") if p.is_file()):
        a, b = folder / path, fresh / path
        if not a.exists():
            bad.append(f"{path} is missing")
        elif path.suffix == ".safetensors":
            old, new = load_file(a), load_file(b)

            def close(a, b):
                return torch.allclose(a.float(), b.float(), 1e-4, 1 if a.dtype == torch.uint8 else 1e-4)

            same = old.keys() == new.keys() and all(
                old[k].shape == new[k].shape and close(old[k], new[k]) for k in new
            )  # a picture may be rounded to the next level on another machine
            bad += [] if same else [f"{path} has other tensors"]
        elif path.suffix == ".json" and json.loads(a.read_text()) != json.loads(b.read_text()):
            bad.append(f"{path} says something else")
    return bad


def main():
    only_check = asked_to_check(__doc__)
    logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if only_check:
        with tempfile.TemporaryDirectory() as fresh:
            write(Path(fresh) / "tiny")
            bad = check(PIPELINES / "tiny", Path(fresh) / "tiny")
        raise SystemExit("\n".join(bad) or 0)
    write(PIPELINES / "tiny")
    files = [path for path in sorted((PIPELINES / "tiny").rglob("*")) if path.is_file()]
    for path in files:
        print(f"{path.stat().st_size / 1000:8.1f} kB  {path.relative_to(PIPELINES)}")
    print(f"{sum(path.stat().st_size for path in files) / 1000:8.1f} kB")


if __name__ == "__main__":
    main()
