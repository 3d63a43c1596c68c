"""Every tensor of the released files has its place, and no place stays empty. Names and shapes only, no weights."""

import json
import math
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from peak_memory import peak_memory
from test_formats import NANO, header_only

from kleinlite.autoencoder import Autoencoder
from kleinlite.checkpoints import rename
from kleinlite.models import configs
from kleinlite.models.checkpoint import Checkpoint, open_checkpoint
from kleinlite.models.families import KLEIN, own_names
from kleinlite.models.families.klein import AUTOENCODER_NAMES, TRANSFORMER_NAMES
from kleinlite.models.families.qwen3 import TEXT_ENCODER_NAMES
from kleinlite.models.formats import match_weights
from kleinlite.quantization import QuantizedMatrix
from kleinlite.text_encoder import TextEncoder
from kleinlite.transformer import Transformer

KEYS = Path(__file__).parents[1] / "keys"


def rows(name: str) -> list[list[str]]:
    lines = (KEYS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [line.split() for line in lines if not line.startswith("#")]


def shape_of(text: str, sizes: dict[str, int]) -> tuple[int, ...]:
    """ "3D,D" with D = 4 → (12, 4)"""

    def number(x):
        return int(x[:-1] or 1) * sizes[x[-1]] if x[-1] in sizes else int(x)

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


def place(module, shapes: dict[str, tuple[int, ...]], rules, tensors: int, values: int, prefix: str = "") -> None:
    """Match lazy zeros of these names and shapes with the module, and check the count of tensors and of values."""
    assert len(shapes) == tensors
    assert sum(math.prod(shape) for shape in shapes.values()) == values
    with peak_memory() as peak:
        # bool for the counter, so that it would be noticed among the weights
        arrays = {prefix + name: mx.zeros(shape, mx.bfloat16 if shape else mx.bool_) for name, shape in shapes.items()}
        names = own_names("transformer", arrays) if prefix else {name: name for name in arrays}
        weights = match_weights(module, {own: arrays[name] for name, own in names.items()}, rules)
        ours = dict(tree_flatten(module.parameters()))
        assert {name: w.shape for name, w in weights.items()} == {name: w.shape for name, w in ours.items()}
        assert {w.dtype for w in weights.values()} == {mx.bfloat16}
        assert sum(w.size for w in weights.values()) == values - (() in shapes.values())
    assert peak.bytes < 2**20, "something was computed: a real model would not fit"


LAYOUTS = ["folder", "single file"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", ["4b", "9b"])
def test_transformer(size, layout):
    tensors = {"4b": (169, 149), "9b": (233, 201)}[size][LAYOUTS.index(layout)]
    values = {"4b": 3_875_544_576, "9b": 9_078_581_248}[size]
    module = Transformer(configs.parse_config("transformer", TRANSFORMERS[size]))
    shapes = transformer_shapes(size, layout)
    place(module, shapes, TRANSFORMER_NAMES, tensors, values)
    if layout == "single file":  # repackaged files put this before every name
        place(module, shapes, TRANSFORMER_NAMES, tensors, values, prefix="model.diffusion_model.")


@pytest.mark.parametrize("size, tensors, values", [("4b", 398, 4_022_468_096), ("8b", 399, 8_190_735_360)])
def test_text_encoder(size, tensors, values):
    module = TextEncoder(configs.parse_config("text_encoder", TEXT_ENCODERS[size], {}))
    shapes = text_encoder_shapes(size)
    place(module, shapes, TEXT_ENCODER_NAMES, tensors, values)
    bare = {name.removeprefix("model."): shape for name, shape in shapes.items()}  # some files leave this away
    place(module, bare, TEXT_ENCODER_NAMES, tensors, values)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size, values", [("full", 84_046_115), ("small decoder", 62_373_091)])
def test_autoencoder(size, values, layout):
    module = Autoencoder(configs.parse_config("autoencoder", AUTOENCODERS[size]))
    measured = 128 + 128 + 1  # the statistics are not parameters
    place(module, autoencoder_shapes(size, layout), AUTOENCODER_NAMES, 251, values + measured)


def test_names_pair_up():
    """Not only do the shapes fit: each tensor goes to its namesake, and no source is used twice."""
    for ours, _, *theirs in rows("transformer"):
        counts = {"double": 8, "single": 24}
        pairs = zip(numbered(ours, counts), *(numbered(name, counts) for name in theirs))
        for name, *sources in pairs:
            assert rename(name, TRANSFORMER_NAMES) == sources
    for ours, theirs, *_ in rows("autoencoder"):
        assert rename(ours, AUTOENCODER_NAMES) == [theirs]


def test_reports_what_does_not_fit():
    module = Transformer(configs.parse_config("transformer", TRANSFORMERS["4b"]))
    for layout in LAYOUTS:
        arrays = {k: mx.zeros(shape, mx.bfloat16) for k, shape in transformer_shapes("4b", layout).items()}
        name = (
            "double_blocks.0.img_mlp.0.weight" if layout == "single file" else "transformer_blocks.0.attn.to_k.weight"
        )

        def match(arrays):
            return match_weights(module, arrays, TRANSFORMER_NAMES)

        with pytest.raises(ValueError, match=f"1 missing: {name}"):
            match({k: w for k, w in arrays.items() if k != name})
        with pytest.raises(ValueError, match="1 not expected: guidance_in.in_layer.weight"):
            match(arrays | {"guidance_in.in_layer.weight": mx.zeros((3072, 256))})
        with pytest.raises(ValueError, match=rf"1 of the wrong shape: .*{name} is \(7, 3072\).*expected"):
            match(arrays | {name: mx.zeros((7, 3072))})
        other = {k: mx.zeros(shape, mx.bfloat16) for k, shape in transformer_shapes("9b", layout).items()}
        with pytest.raises(ValueError, match="of the wrong shape"):
            match(other)


# ---------------------------------------------------------------- whole models, as files without numbers

INDEX = {"_class_name": "Flux2KleinPipeline"}
MODELS = {  # → size, text encoder, what model_index.json adds
    "4b": ("4b", "4b", {"is_distilled": True}),
    "base-4b": ("4b", "4b", {}),
    "9b": ("9b", "8b", {"is_distilled": True}),
    "base-9b": ("9b", "8b", {}),
    "9b-kv": ("9b", "8b", {"is_distilled": True, "_class_name": "Flux2KleinKVPipeline"}),
}


def bf16(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: ("BF16" if shape else "I64", shape) for name, shape in shapes.items()}


def write_model(folder: Path, size: str, text_size: str, added: dict, transformer: bool = True) -> Path:
    """A released folder with every name, shape and shard, and no numbers."""
    for part, config, shapes, files in (
        ("transformer", TRANSFORMERS[size], transformer_shapes(size, "folder"), 2 if size == "9b" else 1),
        ("text_encoder", TEXT_ENCODERS[text_size], text_encoder_shapes(text_size), 4 if text_size == "8b" else 2),
        ("vae", AUTOENCODERS["full"] | {"sample_size": 1024}, autoencoder_shapes("full", "folder"), 1),
    ):
        (folder / part).mkdir(parents=True)
        (folder / part / "config.json").write_text(json.dumps(config))
        if part == "transformer" and not transformer:
            continue
        stem = "model" if part == "text_encoder" else "diffusion_pytorch_model"
        names, places = sorted(shapes), {}
        for i in range(files):
            file = f"{stem}-{i + 1:05}-of-{files:05}.safetensors" if files > 1 else f"{stem}.safetensors"
            header_only(folder / part / file, bf16({name: shapes[name] for name in names[i::files]}))
            places |= dict.fromkeys(names[i::files], file)
        if files > 1:
            (folder / part / f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    shutil.copytree(NANO / "tokenizer", folder / "tokenizer")
    (folder / "model_index.json").write_text(json.dumps(INDEX | added))
    return folder


def opened(path: Path, **more) -> Checkpoint:
    """Open it, build all parts, and see that nothing was read or computed."""
    with peak_memory() as peak:
        checkpoint = open_checkpoint(path, dtype=mx.float32, **more)
        checkpoint.load_transformer(), checkpoint.load_text_encoder(), checkpoint.load_autoencoder()
    assert peak.bytes < 2**20
    return checkpoint


@pytest.mark.parametrize("name", MODELS)
def test_released_folders(name, tmp_path):
    size, text_size, added = MODELS[name]
    checkpoint = opened(write_model(tmp_path / name, size, text_size, added))
    info = checkpoint.info
    assert (info.distilled, info.kv, info.size, info.max_length) == ("base" not in name, "kv" in name, 1024, 512)
    transformer, text_encoder = checkpoint.load_transformer(), checkpoint.load_text_encoder()

    def count(module):
        return sum(w.size for _, w in tree_flatten(module.parameters()))

    assert count(transformer) == {"4b": 3_875_544_576, "9b": 9_078_581_248}[size]
    assert len(text_encoder.layers) == 27
    layer = {"4b": 100_930_816, "8b": 192_946_432}[text_size]
    assert count(text_encoder) == 151936 * TEXT_ENCODERS[text_size]["hidden_size"] + 27 * layer
    assert {w.dtype for k, w in tree_flatten(transformer.parameters()) if "blocks" in k and "norm" not in k} == {
        mx.bfloat16  # stored as in the file, computed in float32
    }


@pytest.mark.parametrize(
    "size, text_size, told", [("4b", "8b", "reads 7680.*gives 12288"), ("9b", "4b", "reads 12288.*gives 7680")]
)
def test_the_wrong_text_encoder(size, text_size, told, tmp_path):
    folder = write_model(tmp_path / "m", size, text_size, {})
    with pytest.raises(ValueError, match=f"{told}.*belong to different models"):
        open_checkpoint(folder, dtype=mx.float32)


def quantized_shapes(size: str, kind: str, whole: set[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """A released single file: the blocks' matrices in `kind`, all but those in `whole`."""
    names = {}
    for name, shape in transformer_shapes(size, "single file").items():
        layer = name.removesuffix(".weight")
        if "_blocks." not in name or "norm" in name or name in whole:
            names[name] = ("BF16", shape)
        elif kind == "fp8":
            names |= {
                name: ("F8_E4M3", shape),
                f"{layer}.weight_scale": ("F32", ()),
                f"{layer}.input_scale": ("F32", ()),
            }
        else:
            rows, columns = shape
            names[name] = ("U8", (rows, columns // 2))
            names[f"{layer}.weight_scale"] = ("F8_E4M3", (rows, columns // 16))
            names |= {f"{layer}.weight_scale_2": ("F32", ()), f"{layer}.input_scale": ("F32", ())}
    return names


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("size", ["4b", "9b"])
@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
def test_quantized_single_files(size, kind, prefix, tmp_path, monkeypatch):
    """The transformer of `flux-2-klein-4b-fp8.safetensors` and its like; some of the blocks' matrices left whole."""
    monkeypatch.setattr("kleinlite.models.formats.is_swizzled", lambda *_: True)  # there are no numbers to look at
    parts = write_model(tmp_path / "parts", size, {"4b": "4b", "9b": "8b"}[size], {}, transformer=False)
    names = quantized_shapes(size, kind, whole={"single_blocks.3.linear1.weight", "double_blocks.1.txt_mlp.2.weight"})
    file = tmp_path / f"flux-2-klein-{size}-{kind}.safetensors"
    header_only(file, {prefix + name: found for name, found in names.items()})
    checkpoint = opened(file, parts=parts)
    assert checkpoint.info.distilled
    assert checkpoint.configs.transformer == configs.parse_config("transformer", TRANSFORMERS[size])
    weights = checkpoint.weights("transformer")
    packed = [w for w in weights.values() if isinstance(w, QuantizedMatrix)]
    assert len(packed) == {"4b": 5 * 8 + 20 * 2, "9b": 8 * 8 + 24 * 2}[size] - 2
    module = Transformer(checkpoint.configs.transformer)
    assert {name: w.shape for name, w in weights.items()} == {k: w.shape for k, w in tree_flatten(module.parameters())}
    bits = {"fp8": 8, "nvfp4": 4.5}[kind]
    stored = sum(
        w.nbytes for p in packed for k, w in p.tensors.items() if k in ("weight", "scales") and w.dtype != mx.float32
    )
    assert stored * 8 == bits * sum(math.prod(p.shape) for p in packed)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_small_decoder_in_place_of_the_vae(layout, tmp_path):
    """As one file, in either set of names, for either size of model."""
    folder = write_model(tmp_path / "m", "4b", "4b", {})
    file = tmp_path / "full_encoder_small_decoder.safetensors"
    header_only(file, {k: ("F32" if s else "I64", s) for k, s in autoencoder_shapes("small decoder", layout).items()})
    checkpoint = opened(folder, parts={"autoencoder": file})
    expected = configs.parse_config("autoencoder", AUTOENCODERS["small decoder"])
    assert checkpoint.configs.autoencoder == expected and checkpoint.info.size == 1024
    small = tmp_path / "small"  # its own folder, which has a config.json
    small.mkdir()
    shutil.copyfile(file, small / "diffusion_pytorch_model.safetensors")
    (small / "config.json").write_text(json.dumps(AUTOENCODERS["small decoder"]))
    checkpoint = opened(folder, parts={"autoencoder": small})
    assert (checkpoint.configs.autoencoder, checkpoint.files["autoencoder"].path) == (expected, small)


def test_what_is_read_is_written_again():
    """nano's own files, word for word."""

    def read(file):
        return json.loads((NANO / file).read_text())

    text = configs.read_config("text_encoder", NANO / "text_encoder", read("model_index.json"))
    assert KLEIN.text_encoder.format(text) == read("text_encoder/config.json")
    transformer = configs.read_config("transformer", NANO / "transformer")
    assert KLEIN.transformer.format(transformer) == read("transformer/config.json")
    autoencoder = configs.read_config("autoencoder", NANO / "vae")
    assert KLEIN.autoencoder.format(autoencoder) | {"sample_size": 96} == read("vae/config.json")
