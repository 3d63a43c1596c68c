"""The workbook's holes: the functions of each chapter that a reader writes, each with a trial.

A trial calls the promoted function on small seeded inputs; `workbook.check` runs it on the reader's body as well. A row
here is all that a hole needs: `make workbook` finds the body in the notebook, and takes it out.
"""

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from PIL import Image

from .. import (
    autoencoder,
    checkpoints,
    distillation,
    flux3,
    kv_cache,
    lora,
    measuring,
    memory,
    pipeline,
    position_ids,
    quantization,
    reward,
    sampling,
    sharding,
    text_encoder,
    training,
    transformer,
    z_image,
)
from ..klein import Klein
from ..models.checkpoint import load_tokenizer
from . import ladder

__all__ = ["HOLES"]

# ---------------------------------------------------------------- inputs


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


def three(*shape: int) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values, say."""
    return normal(*shape), normal(*shape, seed=1), normal(*shape, seed=2)


def pixels(width: int, height: int) -> Image.Image:
    """A picture of random dots."""
    return Image.frombytes("RGB", (width, height), random.Random(0).randbytes(3 * width * height))


def levels(image: Image.Image) -> mx.array:
    """A picture's numbers from 0 to 255, (H, W, 3)."""
    values: Any = memoryview(image.tobytes())
    return mx.array(values).reshape(image.height, image.width, 3)


def rope(s: int) -> position_ids.Rope:
    """Rotations of s tokens, the first half text, for heads of 16."""
    return position_ids.rope_table(position_ids.image_ids(2, s // 2), (4, 4, 4, 4))


def mods(count: int) -> list[transformer.Mod]:
    """How the time steers so many parts of a block, by vectors (2, 1, 32)."""
    return [transformer.Mod(*(normal(2, 1, 32, seed=40 + 3 * i + k) for k in range(3))) for i in range(count)]


def small_transformer(seed: int = 0) -> transformer.Transformer:
    """Of width 32, with 72 features of a text token."""
    net: transformer.Transformer = filled(transformer.Transformer(transformer.TransformerConfig.tiny()), seed)
    return net


def small_batch() -> training.Batch:
    """Two pictures of 2 × 2 tokens with five words each, no references."""
    table = small_transformer().rope(position_ids.image_ids(2, 2), position_ids.text_ids(5))
    return training.Batch(normal(2, 4, 128), normal(2, 5, 72, seed=1), table)


def small_text_encoder() -> Any:
    """Qwen3 with 97 words."""
    return filled(text_encoder.TextEncoder(text_encoder.TextEncoderConfig.tiny()))


def words() -> tuple[mx.array, mx.array]:
    """Ids and mask of two prompts, (2, 6); the second one has two tokens of padding."""
    mask = mx.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]], dtype=mx.bool_)
    return mx.array([[5, 17, 3, 88, 41, 9], [7, 60, 2, 31, 0, 0]]), mask


def nano_tokenizer() -> Any:
    """The one that comes with the package."""
    return load_tokenizer(Path(__file__).parents[1] / "nano" / "weights")


def nano_base() -> Klein:
    """nano before distillation."""
    return Klein.from_pretrained("nano-base")


def bent_field(x: mx.array, t: float, t_next: float) -> mx.array:
    """A field that depends on all that it is given."""
    return mx.cos(3 * x) * t + t_next


def plain_field(x: mx.array, t: float, t_next: float) -> mx.array:
    """A field that points away from 0."""
    return x


def written_header() -> dict[str, Any]:
    """What `read_header` says of a file with two tensors."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "two.safetensors"
        mx.save_safetensors(str(path), {"a": normal(2, 3), "b": mx.zeros((4,), dtype=mx.int32)}, {"made": "here"})
        return checkpoints.read_header(path)


def taught(loss: Callable[..., mx.array]) -> tuple[mx.array, dict[str, Any]]:
    """A loss, and the weights after two steps of training with it."""
    net = filled(nn.Linear(4, 4))
    mx.disable_compile()  # which takes seconds
    try:
        update = training.training_step(net, training.optim.SGD(0.1), loss)
        values = [update(normal(8, 4, seed=i)) for i in range(2)]
    finally:
        mx.enable_compile()
    return mx.stack(values), net.parameters()


def initialized() -> dict[str, Any]:
    """The weights of a network of two layers, the last one damped."""
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    training.initialize(net, mx.random.key(0), ("layers.1",))
    return net.parameters()


def adapted(*names: str) -> tuple[nn.Module, mx.array]:
    """A small network with adapters of these names, and its answer."""
    net = filled(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)))
    for i, name in enumerate(names):
        lora.attach(net, name, {"layers.0": low_rank(8, 6, seed=10 * i)}, 0.5 + i)
    return net, net(normal(3, 6))


def detached() -> list[Any]:
    """A network's answer after one of its two adapters was taken away, and the layers that still have that one."""
    net, _ = adapted("one", "two")
    lora.detach(net, "one")
    return [net(normal(3, 6)), len(lora.adapted_layers(net, "one"))]


def plain_klein() -> Any:
    """Chapter 0's network for tokens of six numbers and five labels."""
    return filled(ladder.PlainKlein(6, nn.Embedding(5, 12), [ladder.Block(12, 3)], 12, places=4))


def low_rank(d_out: int, d_in: int, seed: int = 0) -> lora.LoRA:
    """An adapter of rank 2."""
    return lora.LoRA(normal(2, d_in, seed=seed + 1), normal(d_out, 2, seed=seed + 2), 0.5)


def recorded() -> tuple[mx.array, kv_cache.KVCache]:
    """The answer of an attention that also keeps keys and values, and what it kept."""
    cache: kv_cache.KVCache = []
    return kv_cache.recording_attention(cache)(*three(2, 2, 6, 16), rope(6)), cache


def kept(tokens: int) -> kv_cache.KVCache:
    """A cache with keys and values of so many reference tokens, for three blocks."""
    return [(normal(1, 2, tokens, 16, seed=2 * i), normal(1, 2, tokens, 16, seed=2 * i + 1)) for i in range(3)]


Z_IMAGE = z_image.ZImageConfig(layers=1, refiners=1, heads=2, axes=(4, 6, 6), d_text=24)
FLUX3 = flux3.Flux3Config(mode_blocks=1, single_blocks=1, heads=2, axes=(4, 4, 4, 4), d_text=24)
FIELDS: list[sampling.Field] = [bent_field, plain_field]
NVFP4 = quantization.QUANT_SPECS["nvfp4"]
SMALL_CONFIGS = (
    transformer.TransformerConfig.tiny(), text_encoder.TextEncoderConfig.tiny(), autoencoder.AutoencoderConfig.tiny(),
)  # fmt: skip

# ---------------------------------------------------------------- the holes, by module and in the chapter's order

Trial = Callable[[], Any]

HOLES: dict[str, dict[str, Trial]] = {
    "book.ladder": {
        "to_patches": lambda: ladder.to_patches(normal(2, 8, 12, 3)),
        "to_pictures": lambda: ladder.to_pictures(normal(2, 6, 48), columns=3),
        "noised": lambda: ladder.noised(normal(2, 3, 4), normal(2, 3, 4, seed=1), mx.array([0.2, 0.9])),
        "Block.__call__": lambda: filled(ladder.Block(12, 3))(normal(2, 5, 12)),
        "PlainKlein.__call__": lambda: plain_klein()(normal(2, 4, 6), mx.array([1, 4]), mx.array([0.2, 0.9])),
        "flow_loss": lambda: ladder.flow_loss(
            plain_klein(), normal(2, 4, 6), mx.array([1, 4]), mx.array([0.2, 0.9]), normal(2, 4, 6, seed=1)
        ),
        "walk": lambda: ladder.walk(plain_klein(), mx.array([1, 4]), (2, 4, 6), [1.0, 0.6, 0.0]),
        "even_times": lambda: ladder.even_times(5),
    },
    "autoencoder": {
        "GroupNorm.group_mean": lambda: autoencoder.GroupNorm(8, 4).group_mean(normal(2, 3, 5, 8)),
        "GroupNorm.__call__": lambda: filled(autoencoder.GroupNorm(8, 4))(0.01 * normal(2, 3, 5, 8) + 1),
        "ResBlock.__call__": lambda: filled(autoencoder.ResBlock(4, 8, 4))(normal(1, 4, 6, 4)),
        "AttnBlock.__call__": lambda: filled(autoencoder.AttnBlock(8, 4))(normal(2, 3, 4, 8)),
        "Downsample.__call__": lambda: filled(autoencoder.Downsample(4))(normal(1, 4, 6, 4)),
        "patchify": lambda: autoencoder.patchify(normal(2, 4, 6, 3)),
        "LatentBatchNorm.normalize": lambda: filled(autoencoder.LatentBatchNorm(8, 0.1)).normalize(normal(1, 2, 3, 8)),
        "Autoencoder.encode": lambda: filled(autoencoder.Autoencoder(SMALL_CONFIGS[2])).encode(normal(1, 32, 48, 3)),
    },
    "position_ids": {
        "text_ids": lambda: position_ids.text_ids(5),
        "image_ids": lambda: [position_ids.image_ids(2, 3), position_ids.image_ids(3, 2, t=10)],
        "reference_ids": lambda: position_ids.reference_ids([(2, 3), (1, 2)]),
        "rope_table": lambda: position_ids.rope_table(position_ids.image_ids(3, 4, t=10), (4, 8, 4, 4), 100.0),
        "apply_rope": lambda: position_ids.apply_rope(normal(2, 2, 6, 16), rope(6)),
    },
    "text_encoder": {
        "tokenize": lambda: text_encoder.tokenize(nano_tokenizer(), ["a red circle", ""], 24),
        "attention_mask": lambda: text_encoder.attention_mask(words()[1]),
        "Attention.__call__": lambda: filled(text_encoder.Attention(SMALL_CONFIGS[1]))(
            normal(2, 6, 24), text_encoder.attention_mask(words()[1])
        ),
        "MLP.__call__": lambda: filled(text_encoder.MLP(8, 12))(normal(2, 3, 8)),
        "Layer.__call__": lambda: filled(text_encoder.Layer(SMALL_CONFIGS[1]))(
            normal(2, 6, 24), text_encoder.attention_mask(words()[1])
        ),
        "TextEncoder.hidden_states": lambda: small_text_encoder().hidden_states(*words(), 2),
        "TextEncoder.__call__": lambda: small_text_encoder()(*words()),
        "next_token_logits": lambda: text_encoder.next_token_logits(small_text_encoder(), *words()),
    },
    "sampling": {
        "shift_time": lambda: [sampling.shift_time(t, s) for t in (0.0, 0.3, 1.0) for s in (1.0, 3.0)],
        "noised": lambda: sampling.noised(normal(2, 3, 4), normal(2, 3, 4, seed=1), mx.array([0.2, 0.9])),
        "schedule": lambda: [sampling.schedule(4, 36), sampling.schedule(20, 4096)],
        "euler": lambda: list(sampling.euler(bent_field, normal(1, 3, 4), [1.0, 0.7, 0.2, 0.0])),
        "classifier_free_guidance": lambda: sampling.classifier_free_guidance(normal(2, 3), normal(2, 3, seed=1), 4.0),
        "noise": lambda: sampling.noise(7, 3, 4),
    },
    "transformer": {
        "time_features": lambda: transformer.time_features(mx.array([0.0, 0.25, 1.0]), 16),
        "modulate": lambda: transformer.modulate(normal(2, 6, 32), *mods(1)[0][:2]),
        "split_heads": lambda: transformer.split_heads(normal(2, 5, 3 * 2 * 4), 3, 2),
        "roped_attention": lambda: transformer.roped_attention(*three(2, 2, 6, 16), rope(6)),
        "SwiGLU.__call__": lambda: transformer.SwiGLU()(normal(2, 3, 8)),
        "DoubleBlock.__call__": lambda: filled(transformer.DoubleBlock(SMALL_CONFIGS[0]))(
            normal(2, 4, 32), normal(2, 2, 32, seed=1), mods(2), mods(4)[2:], rope(6)
        ),
        "SingleBlock.__call__": lambda: filled(transformer.SingleBlock(SMALL_CONFIGS[0]))(
            normal(2, 6, 32), mods(1)[0], rope(6)
        ),
        "Transformer.__call__": lambda: small_transformer()(
            normal(2, 4, 128),
            normal(2, 5, 72),
            mx.array([0.3, 0.8]),
            position_ids.image_ids(2, 2),
            position_ids.text_ids(5),
        ),
    },  # fmt: skip
    "pipeline": {
        "to_pixels": lambda: pipeline.to_pixels(pixels(3, 2)),
        "to_images": lambda: [levels(image) for image in pipeline.to_images(1.2 * normal(2, 3, 4, 3))],
        "prepare_reference": lambda: [
            levels(pipeline.prepare_reference(pixels(101, 70))),
            pipeline.prepare_reference(Image.new("RGB", (1500, 1001))).size,
        ],
        "encode_references": lambda: pipeline.encode_references(
            filled(autoencoder.Autoencoder(SMALL_CONFIGS[2])), [pixels(32, 16), pixels(16, 16)], 2
        ),
        "velocity_field": lambda: pipeline.velocity_field(
            small_transformer(), normal(2, 5, 72), (2, 2), [normal(2, 2, 3, 128, seed=1)]
        )(normal(2, 4, 128, seed=2), 0.7, 0.4),
        "guided_field": lambda: [
            pipeline.guided_field(FIELDS[:count], 3.0)(normal(1, 3, 4), 0.7, 0.4) for count in (1, 2)
        ],
        "generate": lambda: levels(pipeline.generate(nano_base(), "a star", 3, size=32, steps=2, guidance=3.0)),
        "masked_field": lambda: pipeline.masked_field(
            bent_field, normal(1, 3, 4), normal(1, 3, 4, seed=1), mx.array([[[1.0], [0.0], [0.5]]])
        )(normal(1, 3, 4, seed=2), 0.7, 0.4),
    },  # fmt: skip
    "quantization": {
        "QuantSpec.bits_per_weight": lambda: [s.bits_per_weight for s in quantization.QUANT_SPECS.values()],
        "QuantizedMatrix.shape": lambda: [quantization.quantize_matrix(normal(4, 128), NVFP4).shape],
        "QuantizedMatrix.decode": lambda: [
            quantization.quantize_matrix(normal(4, 128), spec).decode() for spec in (quantization.QUANT_SPECS[4], NVFP4)
        ],
        "quantize_matrix": lambda: quantization.quantize_matrix(normal(4, 64), NVFP4).tensors,
        "quantized_product": lambda: quantization.quantized_product(
            normal(2, 64), quantization.quantize_matrix(normal(4, 64, seed=1), NVFP4)
        ),
        "QuantizedLinear.__call__": lambda: quantization.QuantizedLinear(
            quantization.quantize_matrix(normal(4, 64), NVFP4), normal(4, seed=1)
        )(normal(2, 64, seed=2)),
    },
    "checkpoints": {
        "read_header": written_header,
        "rename": lambda: checkpoints.rename(
            "blocks.3.qkv.weight",
            [
                checkpoints.Rule(r"^blocks\.", ["transformer_blocks."]),
                checkpoints.Rule(r"qkv", ["to_q", "to_k", "to_v"]),
                checkpoints.Rule("unused", ["x"]),
            ],
        ),
        "swap_halves": lambda: checkpoints.swap_halves(normal(6, 2)),
        "find_conversion": lambda: [
            checkpoints.find_conversion(
                name, [checkpoints.Rule("a", ["b"]), checkpoints.Rule("final", ["x"], checkpoints.swap_halves)]
            )
            for name in ("a", "final.weight")
        ],
        "to_mlx": lambda: [
            checkpoints.to_mlx([normal(2, 3), normal(2, 3, seed=1)], checkpoints.swap_halves),
            checkpoints.to_mlx([normal(2, 3, 4, 5)]),
        ],
        "convert_present": lambda: checkpoints.convert_present(
            {"qkv": ["q", "k"], "lost": ["q", "gone"]}, {"q": normal(2, 3), "k": normal(2, 3, seed=1)}, []
        ),
        "find_problems": lambda: checkpoints.find_problems(
            {"a": ["x", "y"], "b": ["z"]}, {"x": 0, "z": 0, "more": 0}, {"b": normal(2, 3)}, {"a": (4,), "b": (3, 2)}
        ),
    },  # fmt: skip
    "memory": {
        "Work.total": lambda: [memory.Work(3, 4).total],
        "count_step": lambda: memory.count_step(transformer.TransformerConfig(), 512, 4096),
        "count_prompt": lambda: memory.count_prompt(text_encoder.TextEncoderConfig()),
        "stage_bytes": lambda: list(memory.stage_bytes(SMALL_CONFIGS, 256, 4.5).values()),
        "peak_bytes": lambda: [memory.peak_bytes(SMALL_CONFIGS, side) for side in (16, 512)],
    },
    "kv_cache": {
        "image_stream": lambda: kv_cache.image_stream(
            filled(transformer.DoubleBlock(SMALL_CONFIGS[0])),
            normal(2, 6, 32),
            mods(2),
            rope(6),
            transformer.roped_attention,
        ),
        "recording_attention": recorded,
        "extract_kv": lambda: kv_cache.extract_kv(
            small_transformer(), normal(1, 6, 128), position_ids.reference_ids([(2, 3)])
        ),
        "cached_attention": lambda: kv_cache.cached_attention(*kept(4)[0])(*three(2, 2, 6, 16), rope(6)),
        "cached_velocity": lambda: kv_cache.cached_velocity(
            small_transformer(), normal(2, 4, 128), normal(2, 4, 72, seed=1), 0.7, rope(8), kept(4)
        ),
        "cached_velocity_field": lambda: kv_cache.cached_velocity_field(
            small_transformer(), normal(2, 5, 72), (2, 2), [normal(2, 2, 3, 128, seed=1)]
        )(normal(2, 4, 128, seed=2), 0.7, 0.4),
    },  # fmt: skip
    "training": {
        "shifted_times": lambda: training.shifted_times(mx.random.key(3), 4, 6.0),
        "velocity_loss": lambda: training.velocity_loss(
            small_transformer(),
            *small_batch()[:2],
            mx.array([0.2, 0.9]),
            normal(2, 4, 128, seed=3),
            small_transformer().rope(training.flow_ids((2, 2), normal(2, 4, 128)), position_ids.text_ids(5)),
            normal(2, 4, 128, seed=4),
        ),
        "flow_loss": lambda: training.flow_loss(small_transformer(), small_batch(), mx.random.key(0)),
        "initialize": initialized,
        "learning_rate": lambda: [training.learning_rate(1.0, 50, 10)(mx.array(step)) for step in (0, 5, 10, 30, 50)],
        "training_step": lambda: taught(lambda net, x: 100 * (net(x) ** 2).mean()),
    },  # fmt: skip
    "distillation": {
        "guided_velocity": lambda: distillation.guided_velocity(
            small_transformer(), normal(2, 4, 128, seed=7), small_batch(), normal(1, 5, 72, seed=8), 0.9, 3.0
        ),
        "guided_mean_velocity": lambda: distillation.guided_mean_velocity(
            small_transformer(), normal(2, 4, 128, seed=7), small_batch(), normal(1, 5, 72, seed=8), 0.9, 0.5, 3.0
        ),
        "distill_loss": lambda: distillation.distill_loss(
            small_transformer(),
            small_transformer(90),
            small_batch(),
            normal(1, 5, 72, seed=8),
            mx.array([3.0, 1.5]),
            1,
            mx.random.key(0),
        ),
        "own_path": lambda: distillation.own_path(small_transformer(), normal(2, 4, 128, seed=7), small_batch()),
    },  # fmt: skip
    "measuring": {
        "wilson_interval": lambda: mx.array([measuring.wilson_interval(k, 40) for k in (0, 10, 40)]),
        "bootstrap_error": lambda: mx.array(measuring.bootstrap_error(max, [1.0, 2.0, 5.0, 9.0], draws=20)),
        "mean_and_error": lambda: mx.array(measuring.mean_and_error([1.0, 2.0, 4.0])),
        "paired_difference": lambda: mx.array(measuring.paired_difference([1.0, 2.0, 4.0], [2.0, 2.0, 7.0])),
        "sign_test": lambda: mx.array([measuring.sign_test(a, b) for a, b in ((0, 5), (5, 5), (7, 2))]),
        "frechet_distance": lambda: mx.array(measuring.frechet_distance(normal(9, 3), 2 * normal(8, 3, seed=1) + 1)),
    },
    "lora": {
        "LoRA.__call__": lambda: low_rank(4, 6)(normal(3, 6), normal(3, 4, seed=1), nn.Linear(6, 4)),
        "LoRA.delta": lambda: low_rank(4, 6).delta(None),
        "AdaptedLinear.__call__": lambda: adapted("one", "two")[1],
        "attach": lambda: adapted("one", "two", "three")[1],
        "detach": detached,
        "new_deltas": lambda: {
            path: delta.parameters()
            for path, delta in lora.new_deltas(small_transformer(), 2, mx.random.key(0)).items()
        },
    },
    "z_image": {
        "patches": lambda: z_image.patches(normal(2, 4, 6, 3)),
        "caption_ids": lambda: z_image.caption_ids(4),
        "picture_ids": lambda: z_image.picture_ids(3, 4, 32),
        "pad_to_multiple": lambda: z_image.pad_to_multiple(normal(2, 5, 3), normal(1, 3, seed=1)),
        "SandwichBlock.modulation": lambda: [
            filled(z_image.SandwichBlock(Z_IMAGE)).modulation(vec) for vec in (normal(2, 32), None)
        ],
        "SandwichBlock.__call__": lambda: filled(z_image.SandwichBlock(Z_IMAGE))(
            normal(2, 6, 32), rope(6), normal(2, 32)
        ),
        "ZImageTransformer.__call__": lambda: filled(net := z_image.ZImageTransformer(Z_IMAGE))(
            normal(2, 6, 64), normal(2, 32, 32, seed=1), mx.array([0.2, 0.9]), net.rope((2, 3), 32)
        ),
        "static_schedule": lambda: z_image.static_schedule(8),
    },
    "flux3": {
        "ParallelBlock.__call__": lambda: filled(flux3.ParallelBlock(FLUX3))(normal(2, 6, 32), mods(1)[0], rope(6)),
        "mode_ids": lambda: flux3.mode_ids(3, (2, 3), [(2, 2), (1, 2)]),
        "Flux3Transformer.waves": lambda: filled(flux3.Flux3Transformer(FLUX3)).waves(0.3, mx.bfloat16),
        "Flux3Transformer.__call__": lambda: filled(flux3.Flux3Transformer(FLUX3))(
            normal(2, 6, 128),
            normal(2, 5, 24),
            normal(2, 4, 128, seed=1),
            0.7,
            0.4,
            flux3.mode_ids(5, (2, 3), [(2, 2)]),
        ),
        "padding_row": lambda: flux3.padding_row(
            filled(text_encoder.Layer(SMALL_CONFIGS[1])), normal(1, 1, 24), normal(1, 6, 24, seed=1)
        ),
        "flux3_velocity_field": lambda: flux3.flux3_velocity_field(
            filled(flux3.Flux3Transformer(FLUX3)), [normal(1, 5, 24), normal(1, 7, 24)], (2, 3)
        )(normal(2, 6, 128), 0.7, 0.4),
        "canvas_size": lambda: [flux3.canvas_size(*size) for size in ((50, 39), (5000, 3001), (10, 4000))],
    },
    "reward": {
        "optimality": lambda: reward.optimality(mx.array([[1.0, 1, 1, 0], [0, 1, 0, 0]])),
        "mirrored": lambda: reward.mirrored(normal(2, 4, 128), normal(2, 4, 128, seed=1)),
        "clean_error": lambda: reward.clean_error(
            normal(2, 4, 128), normal(2, 4, 128, seed=1), mx.array([0.9, 0.5]), normal(2, 4, 128, seed=2)
        ),
        "nft_loss": lambda: reward.nft_loss(
            small_transformer(),
            normal(2, 4, 128),
            small_batch().txt,
            mx.array([0.9, 0.5]),
            normal(2, 4, 128, seed=2),
            mx.array([0.2, 0.9]),
            normal(2, 4, 128, seed=3),
            small_batch().rope,
        ),
    },  # fmt: skip
    "sharding": {
        "find_cuts": lambda: sharding.find_cuts(small_transformer()),
        "head_counts": lambda: [sharding.head_counts(module) for module in small_transformer().modules()],
        "common_divisor": lambda: sharding.common_divisor(small_transformer()),
        "held_share": lambda: mx.array([sharding.held_share(small_transformer(), size) for size in (1, 2, 4)]),
        "divide": lambda: [
            sharding.divide(cut, path, mx.zeros((12, 6)))
            for cut in ((0, [8, 16]), (1, [6]), (1, [4, 8]))
            for path in ("weight", "bias", "deltas.one.a", "pieces.0.weight")
        ],
    },
}
