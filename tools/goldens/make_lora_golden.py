"""Write adapters for `pipelines/tiny`, what diffusers and PEFT compute with them, and files that must be refused.

    pip install -e ".[dev]"
    python -m tools.goldens.make_lora_golden

One adapter, `a`, in nine spellings; `b` of mixed rank, with every matrix outside the blocks; a DoRA, a LoKr, a LoHa.
The spellings are made here from what PEFT saved, without kleinlite. What must come out is in `expected.safetensors`,
`<run>.velocity0` and `<run>.final` for the runs of `meta.json`, and the loss and gradients of a training step.
"""

import json
import shutil
import tempfile
from pathlib import Path

import torch
from diffusers import Flux2KleinPipeline
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from tools.goldens import GOLDENS, PIPELINES
from tools.goldens.run_diffusers import load

OUT, TINY = GOLDENS / "lora", PIPELINES / "tiny"
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
FEED = ("ff.linear_in", "ff.linear_out", "ff_context.linear_in", "ff_context.linear_out")
OUTSIDE = (
    "x_embedder", "context_embedder", "time_guidance_embed.timestep_embedder.linear_1",
    "time_guidance_embed.timestep_embedder.linear_2", "double_stream_modulation_img.linear",
    "double_stream_modulation_txt.linear", "single_stream_modulation.linear", "norm_out.linear", "proj_out",
)  # fmt: skip
A = [f"transformer_blocks.0.attn.{m}" for m in ATTENTION] + [f"transformer_blocks.0.{m}" for m in FEED]
A += [f"single_transformer_blocks.1.attn.{m}" for m in ("to_qkv_mlp_proj", "to_out")]
B = [*OUTSIDE, *(f"transformer_blocks.0.attn.{m}" for m in ("to_q", "to_k", "to_v"))]
B += ["transformer_blocks.1.attn.to_add_out", "single_transformer_blocks.0.attn.to_out"]
DORA = ["transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_k", "single_transformer_blocks.1.attn.to_out"]
BFL = {  # diffusers' name of a module → the single file's, for whatever is not a third of something
    "attn.to_out.0": "img_attn.proj", "attn.to_add_out": "txt_attn.proj", "ff.linear_in": "img_mlp.0",
    "ff.linear_out": "img_mlp.2", "ff_context.linear_in": "txt_mlp.0", "ff_context.linear_out": "txt_mlp.2",
    "attn.to_qkv_mlp_proj": "linear1", "attn.to_out": "linear2", "x_embedder": "img_in", "context_embedder": "txt_in",
    "time_guidance_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_guidance_embed.timestep_embedder.linear_2": "time_in.out_layer", "proj_out": "final_layer.linear",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
    **{f"{m}_modulation{s}.linear": f"{m}_modulation{s}.lin"
       for m, s in (("double_stream", "_img"), ("double_stream", "_txt"), ("single_stream", ""))},
}  # fmt: skip
RUNS = {
    "none": [], "a@1.0": [["a", 1.0]], "a@0.5": [["a", 0.5]], "a@-0.7": [["a", -0.7]], "b@1.0": [["b", 1.0]],
    "a@0.7+b@0.4": [["a", 0.7], ["b", 0.4]], "dora@1.0": [["dora", 1.0]],
}  # fmt: skip
random = torch.Generator().manual_seed(41)


def normal(*shape, scale=1.0):
    return scale * torch.randn(*shape, generator=random)


class Reference:
    """The tiny pipeline's transformer on the first of its runs."""

    def __init__(self):
        self.pipeline, _ = load(TINY)
        self.net = self.pipeline.transformer
        given = load_file(TINY / "expected.safetensors")
        self.given, self.txt, self.sigmas = given, given["prompt0.embeds"], given["t2i.sigmas"].tolist()
        self.noise = given["t2i.trajectory"][:1]
        height, width, _ = given["t2i.image"].shape
        rows, columns, tokens = height // 16, width // 16, self.txt.shape[1]
        self.img_ids = torch.tensor([[0.0, y, x, 0] for y in range(rows) for x in range(columns)])[None]
        self.txt_ids = torch.tensor([[0.0, 0, 0, i] for i in range(tokens)])[None]

    def velocity(self, x, sigma):
        return self.net(
            hidden_states=x, encoder_hidden_states=self.txt, timestep=torch.full((1,), float(sigma)), guidance=None,
            img_ids=self.img_ids, txt_ids=self.txt_ids, return_dict=False,
        )[0][:, : x.shape[1]]  # fmt: skip

    @torch.no_grad()
    def run(self, name):
        x, first = self.noise, None
        for now, then in zip(self.sigmas, self.sigmas[1:]):
            v = self.velocity(x, now)
            first = v if first is None else first
            x = x + (then - now) * v
        return {f"{name}.velocity0": first.contiguous(), f"{name}.final": x.contiguous()}

    def add(self, name, modules, ranks=None, **config):
        """A new adapter with random numbers, off; its tensors."""
        config = {"r": 4, "lora_alpha": 8} | config
        self.net.add_adapter(LoraConfig(target_modules=modules, rank_pattern=ranks or {}, **config), adapter_name=name)
        for path, module in self.net.named_modules():
            if path in modules:
                down, up = module.lora_A[name].weight, module.lora_B[name].weight
                down.data = normal(*down.shape, scale=down.shape[1] ** -0.5)
                up.data = normal(*up.shape, scale=0.4)
                if name == "dora":
                    m = module.lora_magnitude_vector[name].weight
                    m.data = m.data * (1 + normal(*m.shape, scale=0.2))
        tensors = get_peft_model_state_dict(self.net, adapter_name=name)
        return {k: v.detach().clone().contiguous() for k, v in tensors.items()}


def pairs(tensors):
    """module → (A, B)"""
    names = sorted(k.removesuffix(".lora_A.weight") for k in tensors if k.endswith(".lora_A.weight"))
    return {n: (tensors[f"{n}.lora_A.weight"], tensors[f"{n}.lora_B.weight"]) for n in names}


def single_file_name(module):
    if not module.startswith(("transformer_blocks", "single_transformer_blocks")):
        return BFL[module]
    kind, number, rest = module.split(".", 2)
    return f"{'double' if kind == 'transformer_blocks' else 'single'}_blocks.{number}.{BFL[rest]}"


def fused(tensors):
    """The same changes for the single file's matrices: thirds joined block by block, halves of the last one swapped."""
    found, left = {}, pairs(tensors)
    for stream, names in (("img", ("to_q", "to_k", "to_v")), ("txt", ("add_q_proj", "add_k_proj", "add_v_proj"))):
        for i in range(2):
            thirds = [left.pop(f"transformer_blocks.{i}.attn.{n}", None) for n in names]
            if all(thirds):
                a, b = torch.cat([a for a, _ in thirds]), torch.block_diag(*[b for _, b in thirds])
                found[f"double_blocks.{i}.{stream}_attn.qkv"] = (a, b)
    for module, (a, b) in left.items():
        b = torch.cat(b.chunk(2)[::-1]) if module == "norm_out.linear" else b
        found[single_file_name(module)] = (a, b.contiguous())
    return found


def write(name, tensors, metadata=None):
    path = OUT / f"{name}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous().clone() for k, v in tensors.items()}, path, metadata)


def spell(modules, prefix="", down="lora_A.weight", up="lora_B.weight", alpha=None, kohya=False):
    """{module: (A, B)} in a file's words; alpha as a function of the rank, None for no tensor."""
    tensors = {}
    for module, (a, b) in modules.items():
        name = prefix + (module.replace(".", "_") if kohya else module)
        tensors |= {f"{name}.{down}": a, f"{name}.{up}": b}
        if alpha is not None:
            tensors[f"{name}.alpha"] = torch.tensor(float(alpha(len(a))))
    return tensors


def write_spellings(reference, a):
    """`a` as PEFT and diffusers save it, and in the words of the others."""
    with tempfile.TemporaryDirectory() as folder:
        config = reference.net.peft_config["a"].to_dict()
        Flux2KleinPipeline.save_lora_weights(folder, a, transformer_lora_adapter_metadata=config)
        shutil.copyfile(next(Path(folder).glob("*.safetensors")), OUT / "a-diffusers.safetensors")
    apart, joined, double = pairs(a), fused(a), lambda r: 2 * r
    write("a-diffusers-no-metadata", spell(apart, "transformer."))
    write("a-diffusers-alpha-keys", spell(apart, "transformer.", alpha=double))
    write("a-peft", spell({k: (x, 2 * y) for k, (x, y) in apart.items()}, "base_model.model."))
    bare = {k: (x, 2 * y) for k, (x, y) in apart.items()}
    write("a-bare", spell(bare, down="lora_A.default.weight", up="lora_B.default.weight"))
    write("a-comfy", spell({k: (x, 2 * y) for k, (x, y) in joined.items()}, "diffusion_model."))
    words = {"down": "lora_down.weight", "up": "lora_up.weight", "alpha": double}
    write("a-comfy-alpha", spell(joined, "diffusion_model.", **words))
    write("a-kohya", spell(joined, "lora_unet_", kohya=True, **words), {"ss_network_alpha": "8.0"})
    said = {"lora_adapter_metadata": json.dumps({"transformer.r": 4, "transformer.lora_alpha": 8})}
    write("a-bf16", {k: v.to(torch.bfloat16) for k, v in spell(apart, "transformer.").items()}, said)


def write_refused(a):
    """Files that have something wrong with them, each with one thing."""
    some = spell({m: pairs(a)[m] for m in (*A[:3], A[-1])}, "transformer.")
    first = "transformer.transformer_blocks.0.attn.to_k"
    wider = {k: torch.zeros([n + 8 if n > 4 else n for n in v.shape]) for k, v in some.items()}

    def pair(name, rows, columns, down="lora_A", up="lora_B"):
        return {
            f"{name}.{down}.weight": normal(4, columns), f"{name}.{up}.weight": normal(rows, 4)
        }  # fmt: skip

    files = {
        "other-width": wider,
        "too-many-blocks": {k.replace("blocks.1.", "blocks.23."): v for k, v in some.items()},
        "b-without-a": {k: v for k, v in some.items() if k != f"{first}.lora_A.weight"},
        "ranks-differ": some | {f"{first}.lora_B.weight": some[f"{first}.lora_B.weight"][:, :3]},
        "flux1-diffusers": pair("transformer.transformer_blocks.0.ff.net.0.proj", 96, 24)
        | pair("transformer.single_transformer_blocks.0.proj_mlp", 96, 24)
        | pair("transformer.single_transformer_blocks.0.attn.to_q", 24, 24),
        "flux1-kohya": pair("lora_unet_double_blocks_0_img_attn_qkv", 72, 24, "lora_down", "lora_up")
        | pair("lora_unet_double_blocks_0_img_mod_lin", 144, 24, "lora_down", "lora_up"),
        "text-encoder-only": pair("text_encoder.model.layers.0.self_attn.q_proj", 32, 16),
        "a-checkpoint": {"double_blocks.0.img_attn.qkv.weight": normal(72, 24)},
        "not-a-number": some | {f"{first}.lora_B.weight": some[f"{first}.lora_B.weight"] * torch.nan},
        "empty": {"nothing": torch.zeros(1)},
    }  # fmt: skip
    for name, tensors in files.items():
        write(f"refuse/{name}", tensors)
    return list(files)


def merged(reference, module, change):
    """A run with a dense change of one matrix."""
    weight = reference.net.get_submodule(module).base_layer.weight
    before = weight.data.clone()
    weight.data += change
    return before


def write_relatives(reference, expected):
    """A LoKr and a LoHa, which diffusers does not or not wholly read: computed by merging them into the weights."""
    d = 24
    w1, w2a, w2b = normal(6, 4, scale=0.3), normal(36, 2, scale=0.3), normal(2, 6, scale=0.3)
    linear1 = "single_transformer_blocks.1.attn.to_qkv_mlp_proj"
    before = merged(reference, linear1, torch.kron(w1, w2a @ w2b) * 3.0 / 2)
    name = "diffusion_model.single_blocks.1.linear1"
    lokr = {
        f"{name}.lokr_w1": w1,
        f"{name}.lokr_w2_a": w2a,
        f"{name}.lokr_w2_b": w2b,
        f"{name}.alpha": torch.tensor(3.0),
    }
    expected |= reference.run("lokr@1.0")
    reference.net.get_submodule(linear1).base_layer.weight.data = before
    write("lokr-comfy", lokr)
    out = "single_transformer_blocks.1.attn.to_out"
    a1, b1, a2, b2 = normal(d, 2), normal(2, 4 * d, scale=0.2), normal(d, 2), normal(2, 4 * d, scale=0.2)
    before = merged(reference, out, (a1 @ b1) * (a2 @ b2) * 1.0 / 2)
    name = "diffusion_model.single_blocks.1.linear2"
    loha = {f"{name}.hada_w{i}_{x}": w for (i, x), w in zip(("1a", "1b", "2a", "2b"), (a1, b1, a2, b2))}
    expected |= reference.run("loha@1.0")
    reference.net.get_submodule(out).base_layer.weight.data = before
    write("loha-comfy", loha | {f"{name}.alpha": torch.tensor(1.0)})


def training_step(reference, case, expected):
    """Loss and gradients of one step of rectified flow with `a`."""
    x0, eps, sigma = expected["train.x0"], expected["train.noise"], expected["train.sigma"]
    reference.net.set_adapters(["a"], [1.0])
    x = (1 - sigma) * x0 + sigma * eps
    loss = ((reference.velocity(x, sigma) - (eps - x0)) ** 2).mean()
    trained = {n: p for n, p in reference.net.named_parameters() if ".a.weight" in n}
    grads = torch.autograd.grad(loss, list(trained.values()))
    expected[f"{case}.loss"] = loss.detach()
    for name, grad in zip(trained, grads):
        if case == "train" or "lora_B" in name and ("to_q." in name or "ff." in name):
            expected[f"{case}.grad.transformer.{name.replace('.a.weight', '.weight')}"] = grad.contiguous()


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    reference, expected = Reference(), {}
    check = reference.run("none")["none.velocity0"] - reference.given["t2i.velocity0"]
    assert check.abs().max() < 1e-5, check.abs().max()
    a = reference.add("a", A)
    write_spellings(reference, a)
    ranks = dict(zip(B, (3, 2, 5, 2, 3, 2, 2, 3, 2, 4, 4, 4, 5, 3)))
    b = reference.add("b", B, ranks, r=2, lora_alpha=2, alpha_pattern=ranks)
    write("b-diffusers", spell(pairs(b), "transformer."))
    write("b-comfy", spell(fused(b), "diffusion_model."))
    dora = reference.add("dora", DORA, r=2, lora_alpha=4, use_dora=True)
    said = {"lora_adapter_metadata": json.dumps({"transformer.r": 2, "transformer.lora_alpha": 4})}
    write("dora-diffusers", {f"transformer.{k}": v for k, v in dora.items()}, said)
    for name, adapters in RUNS.items():
        if adapters:
            reference.net.enable_adapters()
            reference.net.set_adapters([n for n, _ in adapters], [s for _, s in adapters])
        else:
            reference.net.disable_adapters()
        expected |= reference.run(name)
    reference.net.disable_adapters()
    write_relatives(reference, expected)
    reference.net.enable_adapters()
    n = reference.noise.shape
    expected |= {"train.x0": normal(*n), "train.noise": normal(*n), "train.sigma": torch.tensor([0.6])}
    training_step(reference, "train", expected)
    for module in reference.net.modules():
        if hasattr(module, "lora_B") and "a" in module.lora_B:
            module.lora_B["a"].weight.data.zero_()
    training_step(reference, "train_zero_b", expected)
    write("expected", expected)
    spellings = {
        f"a-{s}": "a@1.0"
        for s in ("diffusers", "diffusers-alpha-keys", "peft", "bare", "comfy", "comfy-alpha", "kohya")
    }
    meta = {
        "runs": {name: {"loras": [[f"{n}-diffusers", s] for n, s in adapters]} for name, adapters in RUNS.items()}
        | {f"{n}@1.0": {"loras": [[f"{n}-comfy", 1.0]]} for n in ("lokr", "loha")},
        "must_give": spellings
        | {"a-diffusers-no-metadata": "a@0.5", "a-bf16": "a@1.0 within 2e-2", "b-comfy": "b@1.0"},
        "must_refuse": write_refused(a),
    }
    for path in OUT.rglob("*.safetensors"):
        path.chmod(0o644)
    (OUT / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
