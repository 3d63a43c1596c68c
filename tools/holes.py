"""The workbook's holes: the functions of each chapter that a reader writes, and what each is tried on.

A row here is all that a hole needs: `make workbook` finds the body in the notebook, and takes it out; `try_out` calls
the promoted function, which `workbook.check` does with the reader's body as well. Arguments are small, seeded, and
made anew for each call, because a reader's body may change them.
"""

import random
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from PIL import Image

from kleinlite.autoencoder import (
    AttnBlock,
    Autoencoder,
    AutoencoderConfig,
    Downsample,
    GroupNorm,
    LatentBatchNorm,
    ResBlock,
)
from kleinlite.book.ladder import Block, PlainKlein
from kleinlite.checkpoints import Rule, swap_halves
from kleinlite.klein import Klein
from kleinlite.kv_cache import KVCache
from kleinlite.lora import LoRA, attach
from kleinlite.memory import Work
from kleinlite.models.adapters import bundled_adapters
from kleinlite.nano.shapes import pixels as levels
from kleinlite.position_ids import Rope, image_ids, reference_ids, rope_table, text_ids
from kleinlite.quantization import (
    QUANT_SPECS,
    UNQUANTIZED,
    QuantizedLinear,
    QuantizedMatrix,
    QuantSpec,
    quantize_matrix,
)
from kleinlite.text_encoder import MLP, Attention, Layer, TextEncoder, TextEncoderConfig, attention_mask
from kleinlite.training import Batch, flow_ids, optim
from kleinlite.transformer import DoubleBlock, Mod, SingleBlock, SwiGLU, Transformer, TransformerConfig, roped_attention
from kleinlite.z_image import SandwichBlock, ZImageConfig, ZImageTransformer

__all__ = ["HOLES", "find_function", "try_out"]

KLEIN = TransformerConfig.tiny()
QWEN = TextEncoderConfig.tiny()
AUTOENCODER = AutoencoderConfig.tiny()
Z_IMAGE = ZImageConfig(layers=1, refiners=1, heads=2, axes=(4, 6, 6), d_text=24)
NVFP4 = QUANT_SPECS["nvfp4"]


def normal(*shape: int, seed: int = 0) -> mx.array:
    """Standard normal numbers."""
    return mx.random.normal(shape, key=mx.random.key(seed))


def filled(module: Any, seed: int = 0) -> Any:
    """The module with seeded weights: matrices normal with variance 1/inputs, vectors around 1."""
    weights = []
    parameters: dict[str, mx.array] = dict(tree_flatten(module.parameters()))
    for i, (name, w) in enumerate(sorted(parameters.items())):
        values = normal(*w.shape, seed=seed + i)
        weights.append((name, values * (w.size // len(w)) ** -0.5 if w.ndim > 1 else 1 + 0.2 * values))
    module.update(tree_unflatten(weights))
    return module


def times() -> mx.array:
    """Noise levels of two pictures."""
    return mx.array([0.2, 0.9])


def latents(seed: int = 0) -> mx.array:
    """Of two pictures of 2 × 2 tokens."""
    return normal(2, 4, 128, seed=seed)


def features(seed: int = 1) -> mx.array:
    """Of two prompts of five words."""
    return normal(2, 5, 72, seed=seed)


def qkv() -> list[mx.array]:
    """Queries, keys and values of two heads."""
    return [normal(2, 2, 6, 16, seed=seed) for seed in range(3)]


def rope(s: int = 6) -> Rope:
    """Rotations of s tokens, the first half text, for heads of 16."""
    return rope_table(image_ids(2, s // 2), (4, 4, 4, 4))


def mods(count: int) -> list[Mod]:
    """How the time steers this many parts of a block, by vectors (2, 1, 32)."""
    return [Mod(*(normal(2, 1, 32, seed=40 + 3 * i + k) for k in range(3))) for i in range(count)]


def words() -> tuple[mx.array, mx.array]:
    """Ids and mask of two prompts, (2, 6); the second one has two tokens of padding."""
    mask = mx.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]], dtype=mx.bool_)
    return mx.array([[5, 17, 3, 88, 41, 9], [7, 60, 2, 31, 0, 0]]), mask


def picture(width: int, height: int) -> Image.Image:
    """Random dots."""
    return Image.frombytes("RGB", (width, height), random.Random(0).randbytes(3 * width * height))


def field(x: mx.array, t: float, t_next: float) -> mx.array:
    """A field that depends on all that it is given."""
    return mx.cos(3 * x) * t + t_next


def plain_klein() -> Any:
    """Chapter 0's network for tokens of six numbers and five labels."""
    return filled(PlainKlein(6, nn.Embedding(5, 12), [Block(12, 3)], 12, places=4))


def klein(seed: int = 0) -> Any:
    """A small transformer."""
    return filled(Transformer(KLEIN), seed)


def batch() -> Batch:
    """Two pictures with their prompts, no references."""
    return Batch(latents(), features(), klein().rope(image_ids(2, 2), text_ids(5)))


def packed(seed: int = 0) -> QuantizedMatrix:
    """A matrix (4, 64) of 4-bit numbers."""
    return quantize_matrix(normal(4, 64, seed=seed), NVFP4)


def stored() -> QuantizedMatrix:
    """A matrix (4, 64) that is not quantized."""
    return QuantizedMatrix({"weight": normal(4, 64)}, UNQUANTIZED)


def fp8() -> QuantizedMatrix:
    """A matrix (4, 64) in FP8, with a scale for each row."""
    return QuantizedMatrix({"weight": mx.to_fp8(normal(4, 64)), "scales": normal(4, 1)}, QuantSpec("fp8", 8))


def low_rank(d_out: int, d_in: int, seed: int = 0) -> LoRA:
    """An adapter of rank 2."""
    return LoRA(normal(2, d_in, seed=seed + 1), normal(d_out, 2, seed=seed + 2), 0.5)


def adapted(*names: str) -> nn.Sequential:
    """A network of two layers, the first one with adapters of these names."""
    net: nn.Sequential = filled(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)))
    for i, name in enumerate(names):
        attach(net, name, {"layers.0": low_rank(8, 6, seed=10 * i)}, 0.5 + i)
    return net


def kept() -> KVCache:
    """Keys and values of four reference tokens, for three blocks."""
    return [(normal(1, 2, 4, 16, seed=2 * i), normal(1, 2, 4, 16, seed=2 * i + 1)) for i in range(3)]


# What each hole is called with, a method's own object first; or a list of such calls. In the order of the chapters.
HOLES: dict[str, dict[str, Callable[[], Any]]] = {
    "book.ladder": {
        "to_patches": lambda: (normal(2, 8, 12, 3),),
        "to_pictures": lambda: (normal(2, 6, 48), 4, 3),
        "noised": lambda: (normal(2, 3, 4), normal(2, 3, 4, seed=1), times()),
        "Block.__call__": lambda: (filled(Block(12, 3)), normal(2, 5, 12)),
        "PlainKlein.__call__": lambda: (plain_klein(), normal(2, 4, 6), mx.array([1, 4]), times()),
        "flow_loss": lambda: (plain_klein(), normal(2, 4, 6), mx.array([1, 4]), times(), normal(2, 4, 6, seed=1)),
        "walk": lambda: (plain_klein(), mx.array([1, 4]), (2, 4, 6), [1.0, 0.6, 0.0]),
        "even_times": lambda: (5,),
    },
    "autoencoder": {
        "GroupNorm.group_mean": lambda: (GroupNorm(8, 4), normal(2, 3, 5, 8)),
        "GroupNorm.__call__": lambda: (filled(GroupNorm(8, 4)), 0.01 * normal(2, 3, 5, 8) + 1),
        "ResBlock.__call__": lambda: (filled(ResBlock(4, 8, 4)), normal(1, 4, 6, 4)),
        "AttnBlock.__call__": lambda: (filled(AttnBlock(8, 4)), normal(2, 3, 4, 8)),
        "Downsample.__call__": lambda: (filled(Downsample(4)), normal(1, 4, 6, 4)),
        "patchify": lambda: (normal(2, 6, 10, 3),),
        "LatentBatchNorm.normalize": lambda: (filled(LatentBatchNorm(8, 0.1)), normal(1, 2, 3, 8)),
        "Autoencoder.encode": lambda: (filled(Autoencoder(AUTOENCODER)), normal(1, 32, 48, 3)),
    },
    "position_ids": {
        "text_ids": lambda: (5,),
        "image_ids": lambda: [(2, 3), (3, 2, 10)],
        "reference_ids": lambda: ([(2, 3), (1, 2)],),
        "rope_table": lambda: (image_ids(3, 4, t=511), (4, 8, 4, 4), 100.0),
        "apply_rope": lambda: (normal(2, 2, 6, 16), rope()),
    },
    "text_encoder": {
        "tokenize": lambda: (Klein.from_pretrained().tokenizer, ["a red circle", ""], 24),
        "attention_mask": lambda: (words()[1],),
        "Attention.__call__": lambda: (filled(Attention(QWEN)), normal(2, 6, 24), attention_mask(words()[1])),
        "MLP.__call__": lambda: (filled(MLP(8, 12)), normal(2, 3, 8)),
        "Layer.__call__": lambda: (filled(Layer(QWEN)), normal(2, 6, 24), attention_mask(words()[1])),
        "TextEncoder.hidden_states": lambda: (filled(TextEncoder(QWEN)), *words(), 2),
        "TextEncoder.__call__": lambda: (filled(TextEncoder(QWEN)), *words()),
        "next_token_logits": lambda: (filled(TextEncoder(QWEN)), *words()),
    },
    "sampling": {
        "shift_time": lambda: [(t, shift) for t in (0.0, 0.3, 1.0) for shift in (1.0, 3.0)],
        "noised": lambda: [(normal(2, 3, 4), normal(2, 3, 4, seed=1), t) for t in (times(), 0.3)],
        "schedule": lambda: [(4, 36), (20, 4096)],
        "euler": lambda: (field, normal(1, 3, 4), [1.0, 0.7, 0.2, 0.0]),
        "classifier_free_guidance": lambda: (normal(2, 3), normal(2, 3, seed=1), 4.0),
        "noise": lambda: (7, 3, 4),
    },
    "transformer": {
        "time_features": lambda: (mx.array([0.0, 0.25, 1.0]), 16),
        "modulate": lambda: [(rms * normal(2, 6, 32), *mods(1)[0][:2]) for rms in (1, 0.01)],
        "split_heads": lambda: (normal(2, 5, 3 * 2 * 4), 3, 2),
        "roped_attention": lambda: (*qkv(), rope()),
        "SwiGLU.__call__": lambda: (SwiGLU(), normal(2, 3, 8)),
        "DoubleBlock.__call__": lambda: (
            filled(DoubleBlock(KLEIN)), normal(2, 4, 32), normal(2, 2, 32, seed=1), mods(2), mods(4)[2:], rope()
        ),
        "SingleBlock.__call__": lambda: (filled(SingleBlock(KLEIN)), normal(2, 6, 32), mods(1)[0], rope()),
        "Transformer.__call__": lambda: [
            (klein(), latents(), features(), t, image_ids(2, 2), text_ids(5)) for t in (times(), 0.7)
        ],
    },
    "pipeline": {
        "to_pixels": lambda: (picture(3, 2),),
        "to_images": lambda: (1.2 * normal(2, 3, 4, 3),),
        "prepare_reference": lambda: [(picture(101, 70),), (Image.new("RGB", (1500, 1001)),)],
        "encode_references": lambda: (filled(Autoencoder(AUTOENCODER)), [picture(32, 16), picture(16, 16)], 2),
        "velocity_field": lambda: (klein(), features(), (2, 2), [normal(2, 2, 3, 128, seed=1)]),
        "guided_field": lambda: [([field], 3.0), ([field, lambda x, t, t_next: x], 3.0)],
        "generate": lambda: (Klein.from_pretrained("nano-base"), "a star", 3, [], 32, 2, 3.0),
        "masked_field": lambda: (field, latents(), latents(1), mx.array([[[1.0], [0.0], [0.5], [0.5]]])),
    },
    "quantization": {
        "QuantSpec.bits_per_weight": lambda: [(spec,) for spec in (UNQUANTIZED, *QUANT_SPECS.values())],
        "QuantizedMatrix.shape": lambda: [(packed(),), (stored(),)],
        "QuantizedMatrix.decode": lambda: [
            (packed(),), (stored(),), (fp8(),), (quantize_matrix(normal(4, 128), QUANT_SPECS[4]),)
        ],
        "quantize_matrix": lambda: [(normal(4, 64), spec) for spec in (NVFP4, QUANT_SPECS[4])],
        "quantized_product": lambda: [(normal(2, 64), matrix) for matrix in (packed(1), stored(), fp8())],
        "QuantizedLinear.__call__": lambda: [(QuantizedLinear(packed(), b), normal(2, 64)) for b in (normal(4), None)],
    },
    "checkpoints": {
        "read_header": lambda: (bundled_adapters()["cross"],),
        "rename": lambda: (
            "blocks.3.qkv.weight",
            [Rule(r"^blocks\.", ["transformer_blocks."]), Rule("qkv", ["to_q", "to_k", "to_v"]), Rule("unused", ["x"])],
        ),
        "swap_halves": lambda: (normal(6, 2),),
        "find_conversion": lambda: [
            (name, [Rule("a", ["b"]), Rule("final", ["x"], swap_halves)]) for name in ("a", "final.weight")
        ],
        "to_mlx": lambda: [([normal(2, 3), normal(2, 3, seed=1)], swap_halves), ([normal(2, 3, 4, 5)],)],
        "convert_present": lambda: (
            {"qkv": ["q", "k"], "lost": ["q", "gone"]}, {"q": normal(2, 3), "k": normal(2, 3, seed=1)}, []
        ),
        "find_problems": lambda: (
            {"a": ["x", "y"], "b": ["z"]}, {"x": 0, "z": 0, "more": 0}, {"b": normal(2, 3)}, {"a": (4,), "b": (3, 2)}
        ),
    },
    "memory": {
        "Work.total": lambda: (Work(3, 4),),
        "count_step": lambda: (TransformerConfig(), 512, 4096),
        "count_prompt": lambda: (TextEncoderConfig(),),
        "stage_bytes": lambda: ((KLEIN, QWEN, AUTOENCODER), 256, 4.5),
        "peak_bytes": lambda: [((KLEIN, QWEN, AUTOENCODER), side) for side in (16, 512)],
    },
    "kv_cache": {
        "image_stream": lambda: (filled(DoubleBlock(KLEIN)), normal(2, 6, 32), mods(2), rope(), roped_attention),
        "recording_attention": lambda: ([],),
        "extract_kv": lambda: (klein(), normal(1, 6, 128), reference_ids([(2, 3)])),
        "cached_attention": lambda: kept()[0],
        "cached_velocity": lambda: (klein(), latents(), normal(2, 4, 72, seed=1), 0.7, rope(8), kept()),
        "cached_velocity_field": lambda: (klein(), features(), (2, 2), [normal(2, 2, 3, 128, seed=1)]),
    },
    "training": {
        "shifted_times": lambda: (mx.random.key(3), 4, 6.0),
        "velocity_loss": lambda: (
            klein(), latents(), features(), times(), latents(3), klein().rope(flow_ids((2, 2), latents()), text_ids(5)),
            latents(4),
        ),
        "flow_loss": lambda: (klein(), batch(), mx.random.key(0)),
        "initialize": lambda: (adapted(), mx.random.key(0), ("layers.1",)),
        "learning_rate": lambda: [(1.0, 50, 10), (1.0, 5, 10)],
        "training_step": lambda: (adapted(), optim.SGD(0.1), lambda net, x: 100 * (net(x) ** 2).mean()),
    },
    "distillation": {
        "guided_velocity": lambda: (klein(), latents(7), batch(), features(8)[:1], 0.9, 3.0),
        "guided_mean_velocity": lambda: (klein(), latents(7), batch(), features(8)[:1], 0.9, 0.5, 3.0),
        "distill_loss": lambda: (klein(), klein(90), batch(), features(8)[:1], 3 * times(), 1, mx.random.key(0)),
        "own_path": lambda: (klein(), latents(7), batch()),
    },
    "measuring": {
        "wilson_interval": lambda: [(right, 40) for right in (0, 10, 40)],
        "bootstrap_error": lambda: (max, [1.0, 2.0, 5.0, 9.0], 20),
        "mean_and_error": lambda: ([1.0, 2.0, 4.0],),
        "paired_difference": lambda: ([1.0, 2.0, 4.0], [2.0, 2.0, 7.0]),
        "sign_test": lambda: [(0, 5), (5, 5), (7, 2)],
        "frechet_distance": lambda: (normal(9, 3), 2 * normal(8, 3, seed=1) + 1),
    },
    "lora": {
        "LoRA.__call__": lambda: (low_rank(4, 6), normal(3, 6), normal(3, 4, seed=1), nn.Linear(6, 4)),
        "LoRA.delta": lambda: (low_rank(4, 6), None),
        "AdaptedLinear.__call__": lambda: (adapted("one", "two").layers[0], normal(3, 6)),
        "attach": lambda: (adapted("one", "two"), "three", {"layers.0": low_rank(8, 6, seed=20)}, 2.5),
        "detach": lambda: [(adapted("one", "two"), "one"), (adapted("one"), "one")],
        "new_deltas": lambda: (klein(), 2, mx.random.key(0)),
    },
    "z_image": {
        "patches": lambda: (normal(2, 4, 6, 3),),
        "caption_ids": lambda: (4,),
        "picture_ids": lambda: (3, 4, 32),
        "pad_to_multiple": lambda: (normal(2, 5, 3), normal(1, 3, seed=1)),
        "SandwichBlock.modulation": lambda: [(filled(SandwichBlock(Z_IMAGE)), vec) for vec in (normal(2, 32), None)],
        "SandwichBlock.__call__": lambda: (filled(SandwichBlock(Z_IMAGE)), normal(2, 6, 32), rope(), normal(2, 32)),
        "ZImageTransformer.__call__": lambda: (
            net := filled(ZImageTransformer(Z_IMAGE)), normal(2, 6, 64), normal(2, 32, 32, seed=1), times(),
            net.rope((2, 3), 32),
        ),
        "static_schedule": lambda: (8,),
    },
    "reward": {
        "optimality": lambda: [(mx.array([[1.0, 1, 1, 0], row]),) for row in ([0, 1, 0, 0], [1, 1, 1, 1])],
        "mirrored": lambda: (latents(), latents(1)),
        "clean_error": lambda: (latents(), latents(1), times(), latents(2)),
        "nft_loss": lambda: (klein(), latents(), features(), times(), latents(2), times(), latents(3), batch().rope),
    },
    "sharding": {
        "find_cuts": lambda: (klein(),),
        "head_counts": lambda: [(module,) for module in klein().modules()],
        "common_divisor": lambda: (klein(),),
        "held_share": lambda: [(klein(), size) for size in (1, 2, 4)],
        "divide": lambda: [
            (cut, path, mx.zeros((12, 6)))
            for cut in ((0, [8, 16]), (1, [6]), (1, [4, 8]))
            for path in ("weight", "bias", "deltas.one.a", "pieces.0.weight")
        ],
    },
}  # fmt: skip

ROUNDED_ONCE = ("apply_rope", "euler")  # in float32 until the end; elsewhere bfloat16 may be added in another order
FIELDS = ("velocity_field", "guided_field", "masked_field", "cached_velocity_field")
# Where the answer cannot be compared as it is: what to look at in its place, given the arguments too.
LOOKS: dict[str, Callable[[Any, Any], Any]] = {
    "euler": lambda steps, _: [*steps],
    "to_images": lambda images, _: [levels(image) for image in images],
    "prepare_reference": lambda image, _: levels(image),
    "generate": lambda image, _: levels(image),
    **dict.fromkeys(FIELDS, lambda field, _: field(latents(2), 0.7, 0.4)),
    "quantize_matrix": lambda matrix, _: matrix.tensors,
    "recording_attention": lambda attend, given: [attend(*qkv(), rope()), *given],
    "cached_attention": lambda attend, _: attend(*qkv(), rope()),
    "initialize": lambda _, given: given[0].parameters(),
    "learning_rate": lambda rate, _: [rate(mx.array(step)) for step in (0, 5, 10, 30, 50)],
    "training_step": lambda step, given: [step(normal(8, 6)), step(normal(8, 6, seed=1)), given[0].parameters()],
    "attach": lambda _, given: [given[0](normal(3, 6)), *given[0].layers[0].deltas],
    "detach": lambda _, given: [given[0](normal(3, 6)), type(given[0].layers[0]).__name__],
}


def find_function(names: Mapping[str, Any], hole: str) -> Any:
    """The function, method or property getter that a hole's name stands for; None if there is none."""
    owner, _, method = hole.rpartition(".")
    holder = names if not owner else vars(names[owner]) if owner in names else {}
    found = holder.get(method)
    return found.fget if isinstance(found, property) else found


def narrowed(value: Any) -> Any:
    """The same in bfloat16, as models compute on a GPU; times and rotations stay as they are."""
    if isinstance(value, nn.Module):
        value.set_dtype(mx.bfloat16)
    elif isinstance(value, mx.array) and value.ndim > 1 and mx.issubdtype(value.dtype, mx.floating):
        return value.astype(mx.bfloat16)
    elif isinstance(value, Mod):
        return Mod(*map(narrowed, value))
    elif isinstance(value, list):
        return [tuple(map(narrowed, one)) if type(one) is tuple else narrowed(one) for one in value]
    return value


def try_out(module: str, hole: str, half: bool = False) -> Any:
    """What the promoted function answers to its arguments, as numbers and arrays that can be compared."""
    function = find_function(vars(import_module(f"kleinlite.{module}")), hole)
    look = LOOKS.get(hole, lambda answer, given: answer)
    mx.disable_compile()  # which takes seconds
    try:
        given = HOLES[module][hole]()
        calls = given if isinstance(given, list) else [given]
        calls = [tuple(map(narrowed, one)) for one in calls] if half else calls
        answers = [look(function(*one), one) for one in calls]
        return answers if isinstance(given, list) else answers[0]
    finally:
        mx.enable_compile()
