"""What diffusers computes with the tiny FLUX 3 Image Klein in `tests/pipelines/flux3/`: its `expected` and `blocks`.

It needs diffusers 0.42.1 or later, PyTorch and transformers, and nothing of kleinlite or MLX. The weights are random
(standard deviations that keep activations near 1) and lie there as diffusers saved them; references and noise are read
from there, too. Computed again are the runs and the parts of the transformer in one step; the encoder of prompts and of
pictures alone, prepared references, and `small.*` stay as they were made with 0.42.1. To compute again:

    pip install "diffusers>=0.42.1" torch transformers pillow safetensors accelerate
    python -m tools.goldens.make_flux3_golden            # seconds
    python -m tools.goldens.make_flux3_golden --check    # compute again and compare, write nothing

`tests/pipelines/README.md` says what the tensors are called.
"""

import json
import sys
from functools import partial

import numpy as np
import torch
from diffusers import AutoencoderKLFlux2, Flux3Transformer2DModel
from diffusers.modular_pipelines.flux3 import Flux3AutoBlocks, Flux3DistilledAutoBlocks
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer, Qwen3VLForConditionalGeneration

from tools.goldens import PIPELINES

FOLDER = PIPELINES / "flux3"
TOLERANCE = 2e-5  # of the largest value; other machines round otherwise
MODES = ("txt", "image", "image_cond")


class Processor:
    """The half for text of the processor that the pipeline expects; the one for pictures it never asks."""

    def __init__(self, folder):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def apply_chat_template(self, messages, **options):
        for message in messages:
            if isinstance(message["content"], list):
                message["content"] = "".join(part["text"] for part in message["content"])
        return self.tokenizer.apply_chat_template(messages, **options)


def load_pipelines():
    """The distilled and the base pipeline, in float32; they share all but the transformer."""
    text_encoder = Qwen3VLForConditionalGeneration.from_pretrained(FOLDER / "text_encoder", dtype=torch.float32)
    shared = {
        "text_encoder": text_encoder.eval(),
        "tokenizer": Processor(FOLDER / "text_encoder"),
        "vae": AutoencoderKLFlux2.from_pretrained(FOLDER / "vae"),
    }
    assert AutoConfig.from_pretrained(FOLDER / "text_encoder").model_type == "qwen3_vl"
    pipelines = {}
    for name, kind, folder in (
        ("pipeline", Flux3DistilledAutoBlocks, FOLDER),
        ("pipeline-base", Flux3AutoBlocks, FOLDER / "base"),
    ):
        blocks = kind()
        blocks.sub_blocks.pop("prompt_upsampler")  # prompts are encoded as given
        pipelines[name] = blocks.init_pipeline()
        transformer = Flux3Transformer2DModel.from_pretrained(folder / "transformer").eval()
        pipelines[name].update_components(**shared, transformer=transformer)
        pipelines[name].set_progress_bar_config(disable=True)
    return pipelines


def run(pipeline, wish, noise):
    """One run: sigmas, the first velocity after guidance, tokens after each step, the picture."""
    calls = []
    hook = pipeline.transformer.register_forward_hook(
        lambda module, args, kwargs, out: calls.append((kwargs, out[0])), with_kwargs=True
    )
    latents = noise.reshape(1, wish["latent_size"][1], wish["latent_size"][0], 128).permute(0, 3, 1, 2)
    given = {name: wish[name] for name in ("prompt", "width", "height") if wish[name] is not None}
    given |= {"num_inference_steps": wish["steps"], "latents": latents}
    if wish["refs"]:
        given["image"] = [Image.open(FOLDER / f"ref_{i}.png").convert("RGB") for i in wish["refs"]]
    if wish["guidance"] is not None:
        given["negative_prompt"] = wish["negative"] or ""
        pipeline.update_components(guider=pipeline.guider.new(guidance_scale=wish["guidance"]))
    picture = pipeline(**given, output="images")[0]
    hook.remove()
    sigmas = pipeline.scheduler.sigmas.float()
    branches = len(calls) // wish["steps"]
    tensors = {"noise": noise, "sigmas": sigmas, "image": torch.from_numpy(np.asarray(picture).copy())}
    x, path = noise, []
    for i in range(wish["steps"]):
        answers = [out for _, out in calls[i * branches : (i + 1) * branches]]
        v = answers[0] if branches == 1 else answers[1] + wish["guidance"] * (answers[0] - answers[1])
        if i == 0:
            tensors["velocity"] = v
            if branches == 2 and wish["refs"]:
                tensors |= {"conditional0": answers[0], "unconditional0": answers[1]}
        x = x + (sigmas[i + 1] - sigmas[i]) * v
        path.append(x)
    tensors["trajectory"] = torch.cat(path)
    references = calls[0][0].get("image_cond_hidden_states")
    if references is not None:
        tensors["references"] = references
    return tensors, calls[0][0]


def parts(transformer, kwargs):
    """What every part of the transformer answers in one call, by the names of the stored tensors."""
    places = {"time": transformer.timestep_embedder, "target_time": transformer.target_timestep_embedder}
    places |= {"txt_in": transformer.context_embedder, "norm_out": transformer.norm_out}
    for mode in MODES:
        places[f"early_mod.{mode}"] = transformer.early_stream_modulations[mode]
        places[f"single_mod.{mode}"] = transformer.single_stream_modulations[mode]
        if mode != "txt":
            places[f"emb_in.{mode}"] = transformer.x_embedders[mode]
        own = transformer.txt_mode_blocks if mode == "txt" else transformer.mode_blocks[mode]
        places |= {f"{mode}_block{i}": block for i, block in enumerate(own)}
    places |= {f"joint_block{i}": block for i, block in enumerate(transformer.single_transformer_blocks)}
    found = {}

    def keep(name, module, args, out):
        out = torch.cat(out, dim=1) if isinstance(out, tuple) else out
        if "_mod." in name:  # the same for all tokens of a mode
            out = out.reshape(1, -1, out.shape[-1])[:, :1]
        found.setdefault(f"edit.{name}.out", out)  # the first of two times is the picture's

    hooks = [module.register_forward_hook(partial(keep, name)) for name, module in places.items()]
    transformer(**kwargs)
    for hook in hooks:
        hook.remove()
    return found


@torch.no_grad()
def compute():
    """All stored tensors that a change of diffusers could move."""
    meta = json.loads((FOLDER / "meta.json").read_text(encoding="utf-8"))
    stored = load_file(FOLDER / "expected.safetensors")
    pipelines, expected, inside = load_pipelines(), {}, {}
    for name, wish in meta["runs"].items():
        tensors, kwargs = run(pipelines[wish["model"]], wish, stored[f"{name}.noise"])
        expected |= {f"{name}.{key}": w for key, w in tensors.items()}
        if name == "edit":
            inside |= parts(pipelines["pipeline"].transformer, kwargs)
        if name == "t2i":
            first, transformer = kwargs, pipelines["pipeline"].transformer
            expected["prompt0.embeds"] = kwargs["encoder_hidden_states"]
    times = load_file(FOLDER / "blocks.safetensors")["map.times"]
    answers = []
    for t, s in times:
        kwargs = first | {"hidden_states": stored["t2i.noise"], "timestep": t[None], "target_timestep": s[None]}
        answers.append(transformer(**kwargs)[0][0])
    inside |= {"map.times": times, "map.velocity": torch.stack(answers)}
    return {"expected": expected, "blocks": inside}


def main():
    only_check = "--check" in sys.argv
    bad = []
    for file, tensors in compute().items():
        path = FOLDER / f"{file}.safetensors"
        stored = load_file(path)
        for name, w in tensors.items():
            if name not in stored:
                continue
            old = stored[name]
            w = w.reshape(old.shape).to(old.dtype)
            off = (w.double() - old.double()).abs().max() / old.double().abs().max().clamp(min=1e-12)
            limit = 1.01 / 255 if name.endswith("image") else TOLERANCE
            if off > limit:
                bad.append(f"{file}: {name} is {off:.0e} off")
            stored[name] = w.contiguous()
        if not only_check:
            save_file(stored, path)
        print(f"{file}: {len(tensors.keys() & stored.keys())} of {len(stored)} tensors computed again")
    raise SystemExit("\n".join(bad) or 0)


if __name__ == "__main__":
    main()
