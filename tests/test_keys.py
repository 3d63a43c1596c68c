"""Every tensor of the released files has its place, and no place stays empty. Names and shapes only, no weights."""

import math
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from kleinlite import checkpoints
from kleinlite.autoencoder import Autoencoder
from kleinlite.text_encoder import TextEncoder
from kleinlite.transformer import Transformer

KEYS = Path(__file__).parent / "keys"


def rows(name: str) -> list[list[str]]:
    lines = (KEYS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [line.split() for line in lines if not line.startswith("#")]


def shape_of(text: str, sizes: dict[str, int]) -> tuple[int, ...]:
    """ "3D,D" with D = 4 → (12, 4)"""
    number = lambda x: int(x[:-1] or 1) * sizes[x[-1]] if x[-1] in sizes else int(x)
    return () if text == "-" else tuple(number(x) for x in text.split(","))


def numbered(name: str, counts: dict[str, int]) -> list[str]:
    """ "layers.{layer}.weight" with layer = 2 → ["layers.0.weight", "layers.1.weight"]"""
    for word, count in counts.items():
        if f"{{{word}}}" in name:
            return [name.replace(f"{{{word}}}", str(i)) for i in range(count)]
    return [name]


# ---------------------------------------------------------------- the released configurations (the fields that matter)

TRANSFORMERS = {
    "4b": {"num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680},
    "9b": {"num_layers": 8, "num_single_layers": 24, "num_attention_heads": 32, "joint_attention_dim": 12288},
}
for config in TRANSFORMERS.values():
    config |= {"attention_head_dim": 128, "axes_dims_rope": [32] * 4, "rope_theta": 2000, "mlp_ratio": 3.0}
    config |= {"in_channels": 128, "out_channels": None, "timestep_guidance_channels": 256}
QWEN = {"vocab_size": 151936, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
QWEN |= {"head_dim": 128, "rope_theta": 1000000, "rms_norm_eps": 1e-6}
TEXT_ENCODERS = {
    "4b": QWEN | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "8b": QWEN | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
}
VAE = {"block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "latent_channels": 32}
VAE |= {"norm_num_groups": 32, "batch_norm_eps": 0.0001}
AUTOENCODERS = {"full": VAE, "small decoder": VAE | {"decoder_block_out_channels": [96, 192, 384, 384]}}


def transformer_shapes(size: str, layout: str) -> dict[str, tuple[int, ...]]:
    c, shapes = TRANSFORMERS[size], {}
    sizes = {"D": 128 * c["num_attention_heads"], "X": c["joint_attention_dim"]}
    counts = {"double": c["num_layers"], "single": c["num_single_layers"]}
    for ours, shape, *theirs in rows("transformer"):
        first, *rest = shape_of(shape, sizes)
        names = [ours] if layout == "single file" else theirs
        for name in names:
            shapes |= dict.fromkeys(numbered(name, counts), (first // len(names), *rest))
    return shapes


def text_encoder_shapes(size: str) -> dict[str, tuple[int, ...]]:
    c, shapes = TEXT_ENCODERS[size], {}
    for name, shape in rows("text_encoder"):
        shape = shape_of(shape, {"H": c["hidden_size"], "I": c["intermediate_size"]})
        shapes |= dict.fromkeys(numbered(name, {"layer": c["num_hidden_layers"]}), shape)
    if c["tie_word_embeddings"]:
        del shapes["lm_head.weight"]
    return shapes


def autoencoder_shapes(size: str, layout: str) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for ours, theirs, shape, *small in rows("autoencoder"):
        shape = shape_of(small[0] if small and size == "small decoder" else shape, {})
        if layout == "single file" and "attn_1" in ours and len(shape) == 2:
            shape = (*shape, 1, 1)
        shapes[ours if layout == "single file" else theirs] = shape
    return shapes


# ---------------------------------------------------------------- the check


def place(module, shapes: dict[str, tuple[int, ...]], sources, tensors: int, values: int, prefix: str = "") -> None:
    """Match lazy zeros of these names and shapes with the module, and check the count of tensors and of values."""
    assert len(shapes) == tensors
    assert sum(math.prod(shape) for shape in shapes.values()) == values
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    # bool for the counter, so that it would be noticed among the weights
    arrays = {prefix + name: mx.zeros(shape, mx.bfloat16 if shape else mx.bool_) for name, shape in shapes.items()}
    weights = checkpoints.match(module, arrays, sources)
    ours = dict(tree_flatten(module.parameters()))
    assert {name: w.shape for name, w in weights.items()} == {name: w.shape for name, w in ours.items()}
    assert {w.dtype for w in weights.values()} == {mx.bfloat16}
    assert sum(w.size for w in weights.values()) == values - (() in shapes.values())
    assert mx.get_peak_memory() - before < 2**20, "something was computed: a real model would not fit"


LAYOUTS = ["folder", "single file"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", ["4b", "9b"])
def test_transformer(size, layout):
    tensors = {"4b": (169, 149), "9b": (233, 201)}[size][LAYOUTS.index(layout)]
    values = {"4b": 3_875_544_576, "9b": 9_078_581_248}[size]
    module = Transformer(checkpoints.transformer_config(TRANSFORMERS[size]))
    shapes = transformer_shapes(size, layout)
    place(module, shapes, checkpoints.transformer_sources, tensors, values)
    if layout == "single file":  # repackaged files put this before every name
        place(module, shapes, checkpoints.transformer_sources, tensors, values, prefix="model.diffusion_model.")


@pytest.mark.parametrize("size, tensors, values", [("4b", 398, 4_022_468_096), ("8b", 399, 8_190_735_360)])
def test_text_encoder(size, tensors, values):
    module = TextEncoder(checkpoints.text_encoder_config(TEXT_ENCODERS[size], {}))
    shapes = text_encoder_shapes(size)
    place(module, shapes, checkpoints.text_encoder_sources, tensors, values)
    bare = {name.removeprefix("model."): shape for name, shape in shapes.items()}  # some files leave this away
    place(module, bare, checkpoints.text_encoder_sources, tensors, values)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size, values", [("full", 84_046_115), ("small decoder", 62_373_091)])
def test_autoencoder(size, values, layout):
    module = Autoencoder(checkpoints.autoencoder_config(AUTOENCODERS[size]))
    measured = 128 + 128 + 1  # the statistics are not parameters
    place(module, autoencoder_shapes(size, layout), checkpoints.autoencoder_sources, 251, values + measured)


def test_names_pair_up():
    """Not only do the shapes fit: each tensor goes to its namesake, and no source is used twice."""
    for ours, _, *theirs in rows("transformer"):
        counts = {"double": 8, "single": 24}
        pairs = zip(numbered(ours, counts), *(numbered(name, counts) for name in theirs))
        for name, *sources in pairs:
            assert checkpoints.transformer_sources(name) == sources
    for ours, theirs, *_ in rows("autoencoder"):
        assert checkpoints.autoencoder_sources(ours) == [theirs]


def test_reports_what_does_not_fit():
    module = Transformer(checkpoints.transformer_config(TRANSFORMERS["4b"]))
    for layout in LAYOUTS:
        arrays = {k: mx.zeros(shape, mx.bfloat16) for k, shape in transformer_shapes("4b", layout).items()}
        name = (
            "double_blocks.0.img_mlp.0.weight" if layout == "single file" else "transformer_blocks.0.attn.to_k.weight"
        )
        match = lambda arrays: checkpoints.match(module, arrays, checkpoints.transformer_sources)
        with pytest.raises(ValueError, match=f"1 missing: {name}"):
            match({k: w for k, w in arrays.items() if k != name})
        with pytest.raises(ValueError, match="1 not expected: guidance_in.in_layer.weight"):
            match(arrays | {"guidance_in.in_layer.weight": mx.zeros((3072, 256))})
        with pytest.raises(ValueError, match="1 of the wrong shape: .*expected"):
            match(arrays | {name: mx.zeros((7, 3072))})
        other = {k: mx.zeros(shape, mx.bfloat16) for k, shape in transformer_shapes("9b", layout).items()}
        with pytest.raises(ValueError, match="of the wrong shape"):
            match(other)
