"""Files of every kind: FP8 and both layouts of NVFP4 byte by byte, single files, replaced parts, other models."""

import json
import math
import shutil
import struct
from pathlib import Path

import mlx.core as mx
import pytest
from damage import DEEP
from golden_tools import GOLDENS
from mlx.utils import tree_flatten
from packings import as_nvfp4, error
from stand_in_hub import TINY

from kleinlite import Klein
from kleinlite.errors import UserError
from kleinlite.models.checkpoint import open_checkpoint, resolve_model
from kleinlite.models.families import KLEIN
from kleinlite.models.files import load_arrays
from kleinlite.models.formats import assemble
from kleinlite.pipeline import to_pixels
from kleinlite.quantization import QuantizedLinear, QuantizedMatrix

BYTES = mx.load(str(GOLDENS / "formats.safetensors"))
NANO = resolve_model("nano")
WISH = {"prompt": "a red circle above a blue square", "seed": 7, "progress": False}


def difference(a, b) -> float:
    """Mean difference of two pictures, in levels of 255."""
    return mx.abs(to_pixels(a) - to_pixels(b)).mean().item() * 127.5


# ---------------------------------------------------------------- byte by byte


def exactly(packed: QuantizedMatrix, value: mx.array) -> None:
    assert isinstance(packed, QuantizedMatrix) and packed.shape == value.shape
    assert mx.array_equal(packed.decode(), value.astype(mx.float32))


@pytest.mark.parametrize("scale", ["weight_scale", "scale_weight"])
@pytest.mark.parametrize("kind", ["one", "row"])
@pytest.mark.parametrize("shape", [None, (-1, 1)])
def test_fp8(kind, scale, shape):
    values = BYTES[f"fp8.{kind}.scale"]
    arrays = {"x.weight": BYTES["fp8.weight"], f"x.{scale}": values.reshape(shape) if shape else values}
    arrays |= {
        "x.input_scale": mx.array(3.0),
        "x.comfy_quant": mx.array(list(b"{}"), mx.uint8),
        "y.weight": mx.zeros((2, 2)),
    }
    found = assemble(arrays)
    assert set(found) == {"x.weight", "y.weight"} and isinstance(found["y.weight"], mx.array)
    exactly(found["x.weight"], BYTES[f"fp8.{kind}.value"])
    assert found["x.weight"].tensors["weight"].dtype == mx.uint8  # it stays in 8 bits


def test_fp8_without_a_scale():
    """Decided by the type: such files exist, and their numbers are the weights themselves."""
    ones = BYTES["fp8.row.value"] / BYTES["fp8.row.scale"][:, None]
    found = assemble({"x.weight": BYTES["fp8.weight"]})["x.weight"].decode()
    assert mx.allclose(found, ones, rtol=1e-6)


def nvfp4(layout: str, **more) -> dict[str, mx.array]:
    arrays = {"weight": BYTES[f"nvfp4.{layout}.weight"], "weight_scale": BYTES[f"nvfp4.{layout}.scale"]}
    return {f"x.{k}": w for k, w in arrays.items()} | {"x.weight_scale_2": BYTES["nvfp4.second"]} | more


@pytest.mark.parametrize("layout, said", [("plain", {"quantization": "nvfp4"}), ("plain", {}), ("tiled", {})])
def test_nvfp4(layout, said):
    packed = assemble(nvfp4(layout), said)["x.weight"]
    exactly(packed, BYTES["nvfp4.value"])
    assert packed.tensors["weight"].dtype == mx.uint32 and packed.tensors["weight"].nbytes * 2 == packed.shape[0] * 96


def trained(rows: int = 256, columns: int = 256) -> mx.array:
    """Some rows and some inputs are larger, as in every trained matrix."""
    key = iter(mx.random.split(mx.random.key(3), 3))
    spread = 0.3 * mx.random.normal((rows, 1), key=next(key)) + 0.3 * mx.random.normal((columns,), key=next(key))
    return mx.random.normal((rows, columns), key=next(key)) * mx.exp(spread)


@pytest.mark.parametrize("said", [{}, {"format": "pt"}])
@pytest.mark.parametrize("layout", ["plain", "tiled"])
def test_the_layout_is_found_where_no_shape_tells(layout, said):
    w = trained()
    packed = assemble({f"x.{k}": t for k, t in as_nvfp4(w, layout).items()}, said)["x.weight"]
    assert mx.sqrt(((packed.decode() - w) ** 2).mean() / (w**2).mean()).item() < 0.12


def test_metadata_goes_before_looks():
    w = trained()
    for layout, said in (("plain", {"quantization": "nvfp4"}), ("tiled", {"_quantization_metadata": "{}"})):
        assert assemble(  # the other layout's bytes, on purpose: what the file says is believed
            {f"x.{k}": t for k, t in as_nvfp4(w, "tiled" if layout == "plain" else "plain").items()}, said
        )["x.weight"].shape == (256, 256)
        packed = assemble({f"x.{k}": t for k, t in as_nvfp4(w, layout).items()}, said)["x.weight"]
        assert mx.sqrt(((packed.decode() - w) ** 2).mean() / (w**2).mean()).item() < 0.12


SCALES = mx.ones((32, 4), dtype=mx.uint8)  # of a matrix of 32 × 64 weights


@pytest.mark.parametrize(
    "arrays, what",
    [
        ({"x.weight_scale": mx.ones(3)}, "scales"),
        ({"x.weight_scale": mx.ones((3, 3), dtype=mx.uint8)}, "scales"),
        ({"x.weight_scale": mx.ones((3, 3), dtype=mx.uint8), "x.weight_scale_2": mx.array(1.0)}, "scales"),
        ({"x.weight_scale": SCALES, "x.weight_scale_2": mx.ones(3)}, "scales"),
    ],
)
@pytest.mark.parametrize("said", [{}, {"quantization": "nvfp4"}, {"_quantization_metadata": "{}"}])
def test_fp8_and_nvfp4_of_the_wrong_form(arrays, what, said):
    with pytest.raises(UserError, match=f"x.weight is quantized, and its {what} do not fit"):
        assemble({"x.weight": mx.ones((32, 32), dtype=mx.uint8)} | arrays, said)


def test_scales_without_their_matrix_do_not_decide_the_layout():
    lone = {"a.weight_scale": mx.ones((3,)), "a.weight_scale_2": mx.array(1.0), "b.weight_scale_2": mx.array(1.0)}
    exactly(assemble(nvfp4("plain") | lone)["x.weight"], BYTES["nvfp4.value"])


# ---------------------------------------------------------------- nano as a single file


def blocks(name: str) -> bool:
    """Is this one of the matrices that the released files quantise?"""
    return "_blocks." in name and name.endswith(".weight") and "norm" not in name


def single_file(path: Path, kind: str, prefix: str = "", metadata: dict | None = None) -> Path:
    """nano's transformer in the original names, its blocks' matrices in `kind`."""
    arrays = open_checkpoint("nano", dtype=mx.float32).weights("transformer")
    written = {}
    for name, w in arrays.items():
        layer = name.removesuffix(".weight")
        if kind == "fp8" and blocks(name) and "0.img_attn" not in name:  # two are left whole
            scale = mx.abs(w).max().astype(mx.float32) / 448
            written |= {f"{layer}.weight": mx.to_fp8(w.astype(mx.float32) / scale), f"{layer}.weight_scale": scale}
            written |= {f"{layer}.input_scale": mx.array(1.0)}
        elif kind in ("plain", "tiled") and blocks(name):
            written |= {f"{layer}.{k}": t for k, t in as_nvfp4(w.astype(mx.float32), kind).items()}
        else:
            written[name] = mx.contiguous(w)
    mx.save_safetensors(str(path), {prefix + name: w for name, w in written.items()}, metadata or {})
    return path


def test_a_single_file_beside_its_parts(tmp_path):
    """Names with and without the prefix; the other parts from the file's own folder, or from where we say."""
    file = single_file(tmp_path / "mine.safetensors", "float16", prefix="model.diffusion_model.")
    right = Klein.from_pretrained("nano")(**WISH)
    assert Klein.from_pretrained(file, parts="nano")(**WISH).tobytes() == right.tobytes()
    with pytest.raises(ValueError, match='is a single file.*parts="4b"'):
        open_checkpoint(file, dtype=mx.float32)
    folder = tmp_path / "whole"
    shutil.copytree(NANO, folder, ignore=shutil.ignore_patterns("base"))
    shutil.rmtree(folder / "transformer")
    file = single_file(folder / "mine.safetensors", "float16")
    assert Klein.from_pretrained(file)(**WISH).tobytes() == right.tobytes()


def test_a_part_is_no_model(tmp_path):
    """The sentence says what the file is: more files would not mend it."""
    autoencoder, text_encoder = (tmp_path / name for name in ("flux2-vae.safetensors", "qwen_3_4b.safetensors"))
    shutil.copy(NANO / "vae" / "diffusion_pytorch_model.safetensors", autoencoder)
    shutil.copy(NANO / "text_encoder" / "model.safetensors", text_encoder)
    for file, words in ((autoencoder, "no transformer, but autoencoder"), (text_encoder, "no transformer, but text")):
        with pytest.raises(ValueError, match=words):
            open_checkpoint(file, dtype=mx.float32)


def test_what_a_file_name_says(tmp_path):
    for name, distilled, kv in (
        ("flux-2-klein-4b.safetensors", True, False),
        ("flux-2-klein-base-4b-fp8.safetensors", False, False),
        ("flux-2-klein-9b-kv.safetensors", True, True),
        ("mine.safetensors", True, False),  # as the model that it takes its parts from
    ):
        file = single_file(tmp_path / name, "float16")
        info = open_checkpoint(file, dtype=mx.float32, parts="nano").info
        assert (info.distilled, info.kv) == (distilled, kv)
    assert not open_checkpoint(tmp_path / "mine.safetensors", dtype=mx.float32, parts="nano-base").info.distilled


def test_an_fp8_file(tmp_path):
    """It stays in 8 bits and draws exactly what its decoded numbers draw."""
    file = single_file(tmp_path / "nano-fp8.safetensors", "fp8")
    klein = Klein.from_pretrained(file, parts="nano")
    packed = [m for _, m in klein.transformer.named_modules() if isinstance(m, QuantizedLinear)]
    assert len(packed) == 24 and {m.weight.dtype for m in packed} == {mx.uint8}  # of 26 matrices, two left whole
    exact = Klein.from_pretrained("nano", dtype=mx.float32)
    modules = dict(exact.transformer.named_modules())
    for name, m in klein.transformer.named_modules():
        if isinstance(m, QuantizedLinear):
            modules[name].weight = m.matrix.decode()
    assert difference(klein(**WISH), exact(**WISH)) < 0.01
    assert difference(klein(**WISH), Klein.from_pretrained("nano")(**WISH)) < 6  # E4M3 keeps three bits of mantissa


@pytest.mark.parametrize("layout, said", [("tiled", {}), ("plain", {"quantization": "nvfp4"})])
def test_an_nvfp4_file(layout, said, tmp_path):
    file = single_file(tmp_path / "nano-nvfp4.safetensors", layout, metadata=said)
    klein = Klein.from_pretrained(file, parts="nano")
    packed = [m for _, m in klein.transformer.named_modules() if isinstance(m, QuantizedLinear)]
    assert len(packed) == 26 and {(m.weight.dtype, m.spec.mode) for m in packed} == {(mx.uint32, "nvfp4")}
    assert difference(klein(**WISH), Klein.from_pretrained("nano")(**WISH)) < 20
    with pytest.raises(ValueError, match="quantized already .nvfp4, 4 bits.: leave quantize out"):
        open_checkpoint(file, dtype=mx.float32, parts="nano", quantize=4)


def test_fp8_can_be_quantized(tmp_path):
    file = single_file(tmp_path / "nano-fp8.safetensors", "fp8")
    model = open_checkpoint(file, dtype=mx.float32, parts="nano", quantize=4).load_transformer()
    modes = {name: m.spec.mode for name, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    assert modes.pop("txt_in") == "stored"  # 288 wide, which is no multiple of 64
    assert len(modes) > 26 and set(modes.values()) == {"affine"}


# ---------------------------------------------------------------- parts


def test_an_autoencoder_from_a_single_file(tmp_path):
    """Its numbers come from its shapes. Both sets of names."""
    arrays = load_arrays(NANO / "vae")
    folder_file = tmp_path / "theirs.safetensors"
    mx.save_safetensors(str(folder_file), arrays)
    weights = open_checkpoint("nano", dtype=mx.float32).weights("autoencoder")
    ours = {k: w.transpose(0, 3, 1, 2) if w.ndim == 4 else w for k, w in weights.items()}
    ours = {k: w[..., None, None] if "attn_1" in k and w.ndim == 2 else w for k, w in ours.items()}
    ours["bn.num_batches_tracked"] = mx.array(0)
    own_file = tmp_path / "ours.safetensors"
    mx.save_safetensors(str(own_file), {k: mx.contiguous(w) for k, w in ours.items()})
    configs = []
    for file in (folder_file, own_file):
        checkpoint = open_checkpoint("nano", dtype=mx.float32, parts={"autoencoder": file})
        cfg, path = checkpoint.configs.autoencoder, checkpoint.files["autoencoder"].path
        assert path == file
        configs.append(cfg)
    right = open_checkpoint("nano", dtype=mx.float32).configs.autoencoder
    assert configs[0] == configs[1]
    assert (configs[0].channels, configs[0].decoder_channels) == (right.channels, right.decoder_channels)
    assert (configs[0].layers, configs[0].latent_channels) == (right.layers, right.latent_channels)

    def load(parts):
        return open_checkpoint("nano", dtype=mx.float32, parts=parts).load_autoencoder().parameters()

    for (name, a), (_, b) in zip(tree_flatten(load({"vae": own_file})), tree_flatten(load(None))):
        assert mx.array_equal(a, b), name


def test_parts_that_make_no_sense(tmp_path):
    with pytest.raises(
        ValueError, match="parts names 'unet'; a model's parts are transformer, text_encoder, autoencoder"
    ):
        open_checkpoint("nano", dtype=mx.float32, parts={"unet": "nano"})
    with pytest.raises(ValueError, match="nano is a whole model.*say which"):
        open_checkpoint("nano", dtype=mx.float32, parts="nano-base")
    mx.save_safetensors(str(tmp_path / "x.safetensors"), {"x": mx.ones((2,))})
    with pytest.raises(ValueError, match="a text encoder is a folder"):
        open_checkpoint("nano", dtype=mx.float32, parts={"text_encoder": tmp_path / "x.safetensors"})
    with pytest.raises(ValueError, match="no model, folder or file called 'gone.safetensors'"):
        open_checkpoint("gone.safetensors", dtype=mx.float32)


def test_the_transformer_of_another_folder():
    mixed = open_checkpoint("nano", dtype=mx.float32, parts={"transformer": NANO / "base"})
    assert mixed.files["transformer"].path == NANO / "base" / "transformer"


# ---------------------------------------------------------------- the text encoder stops


def test_layers_above_are_neither_needed_nor_read(tmp_path):
    shutil.copytree(NANO, tmp_path / "m", ignore=shutil.ignore_patterns("base"))
    file = tmp_path / "m" / "text_encoder" / "model.safetensors"
    arrays = mx.load(str(file))
    mx.eval(arrays)
    above = [name for name in arrays if name.startswith(("model.layers.3.", "model.norm."))]
    assert len(above) == 12
    spoilt = {k: mx.zeros((1,)) if k in above else w for k, w in arrays.items()} | {"lm_head.weight": mx.zeros((1,))}
    right = open_checkpoint("nano", dtype=mx.float32).load_text_encoder()
    assert len(right.layers) == 3 and "norm" not in right and "lm_head" not in right
    ids, mask = mx.array([[5, 6, 7]]), mx.array([[True, True, False]])
    for change in ({k: w for k, w in arrays.items() if k not in above}, spoilt):
        mx.save_safetensors(str(file), change)
        assert mx.array_equal(
            open_checkpoint(tmp_path / "m", dtype=mx.float32).load_text_encoder()(ids, mask), right(ids, mask)
        )
    for gone in ("model.layers.2.mlp.up_proj.weight", "model.embed_tokens.weight"):
        mx.save_safetensors(str(file), {k: w for k, w in arrays.items() if k != gone})
        with pytest.raises(ValueError, match=f"1 missing: {gone}"):
            open_checkpoint(tmp_path / "m", dtype=mx.float32)
    mx.save_safetensors(str(file), arrays | {"model.layers.0.stray.weight": mx.zeros(1)})
    with pytest.raises(ValueError, match="1 not expected: model.layers.0.stray.weight"):
        open_checkpoint(tmp_path / "m", dtype=mx.float32)


# ---------------------------------------------------------------- other models


def header_only(path: Path, names: dict[str, tuple[str, list[int]]]) -> None:
    """A file with these tensors and no numbers in it: the disk keeps nothing for the rest."""
    size = {"BF16": 2, "F16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1, "I64": 8}
    header, end = {}, 0
    for name, (dtype, shape) in names.items():
        begin, end = end, end + size[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.truncate(8 + len(text) + end)


@pytest.mark.parametrize(
    "names, who",
    [
        (["double_blocks.0.img_mod.lin.weight", "vector_in.in_layer.weight", "img_in.weight"], "FLUX.1"),
        (["model.diffusion_model.vector_in.in_layer.weight", "guidance_in.in_layer.weight"], "FLUX.1"),
        (["guidance_in.in_layer.weight", "single_blocks.47.linear1.weight"], r"FLUX.2 \[dev\]"),
    ],
)
def test_files_of_other_models(names, who, tmp_path):
    header_only(tmp_path / "x.safetensors", {name: ("BF16", [2, 2]) for name in names})
    with pytest.raises(
        ValueError,
        match=rf"x.safetensors is {who}, and kleinlite runs FLUX.2 \[klein\], Z-Image and FLUX 3 Image Klein: take 4b",
    ):
        open_checkpoint(tmp_path / "x.safetensors", dtype=mx.float32, parts="nano")


@pytest.mark.parametrize(
    "file, change, who",
    [
        ("model_index.json", {"_class_name": "FluxPipeline"}, "FLUX.1"),
        ("model_index.json", {"_class_name": "Flux2Pipeline"}, r"FLUX.2 \[dev\]"),
        ("model_index.json", {"_class_name": "StableDiffusionPipeline"}, "a StableDiffusionPipeline"),
        ("transformer/config.json", {"_class_name": "FluxTransformer2DModel"}, "FLUX.1"),
        ("transformer/config.json", {"joint_attention_dim": 15360}, r"FLUX.2 \[dev\]"),
        ("transformer/config.json", {"num_single_layers": 48}, r"FLUX.2 \[dev\]"),
        ("text_encoder/config.json", {"architectures": ["Mistral3ForConditionalGeneration"]}, ".*Mistral"),
        ("vae/config.json", {"_class_name": "AutoencoderKL"}, "a AutoencoderKL"),
    ],
)
def test_folders_of_other_models(file, change, who, tmp_path):
    shutil.copytree(NANO, tmp_path / "m")
    path = tmp_path / "m" / file
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=rf"{file} is {who}.*, and kleinlite runs FLUX.2 \[klein\]"):
        open_checkpoint(tmp_path / "m", dtype=mx.float32)


# ---------------------------------------------------------------- single files of other programs


WHOLE = {"text_encoder": "text_encoders.qwen3_4b.transformer.", "vae": "vae."}
PREFIXES = ["diffusion_model.", "transformer.", "module.", "_orig_mod.", "net.", "model.", "model.diffusion_model."]


def tiny_transformer(names: str = "ours") -> dict[str, mx.array]:
    if names == "ours":
        return dict(open_checkpoint(TINY, dtype=mx.float32).weights("transformer"))
    return load_arrays(TINY / "transformer")


def draws_alike(path: Path, arrays: dict[str, mx.array]) -> None:
    """The file with these tensors, with tiny's other parts, is tiny."""
    mx.eval(arrays)
    save = mx.save_gguf if path.suffix == ".gguf" else mx.save_safetensors
    save(str(path), arrays)
    found, tiny = (open_checkpoint(p, dtype=mx.float32, parts=parts) for p, parts in ((path, TINY), (TINY, None)))
    assert found.configs.transformer == tiny.configs.transformer
    for part in ("transformer", "autoencoder", "text_encoder"):
        weights = tiny.weights(part)
        assert found.weights(part).keys() == weights.keys()
        assert all(mx.array_equal(found.weights(part)[name], w) for name, w in weights.items())


@pytest.mark.parametrize("prefix", [*PREFIXES, "", "what.ever.it.is."])
@pytest.mark.parametrize("names", ["ours", "diffusers"])
def test_names_behind_whatever(tmp_path, prefix, names):
    draws_alike(tmp_path / "x.safetensors", {prefix + n: w for n, w in tiny_transformer(names).items()})


def test_a_compiled_module_within(tmp_path):
    arrays = {n.replace("blocks.0.", "blocks.0._orig_mod."): w for n, w in tiny_transformer().items()}
    draws_alike(tmp_path / "x.safetensors", arrays)


def test_names_of_diffusers_in_gguf(tmp_path):
    draws_alike(tmp_path / "x.gguf", {n: w.astype(mx.float32) for n, w in tiny_transformer("diffusers").items()})


def whole_model() -> dict[str, mx.array]:
    """As ComfyUI's SaveCheckpoint writes it."""
    arrays = {f"model.diffusion_model.{n}": w for n, w in tiny_transformer().items()}
    return arrays | {prefix + n: w for part, prefix in WHOLE.items() for n, w in load_arrays(TINY / part).items()}


def test_a_whole_model_in_one_file(tmp_path):
    """Its text encoder has no config there; its autoencoder is read."""
    path = tmp_path / "x.safetensors"
    arrays = whole_model()
    draws_alike(path, arrays)
    changed = {n: w + 1 if n == "vae.decoder.conv_in.bias" else w for n, w in arrays.items()}
    with pytest.raises(AssertionError):
        draws_alike(path, changed)
    with pytest.raises(ValueError, match='its tokenizer and its other parts: parts="4b"'):
        open_checkpoint(path, dtype=mx.float32)


def test_what_belongs_to_no_part_is_refused(tmp_path):
    for name in ("model.diffusion_model.more.weight", "stranger.weight"):
        with pytest.raises(ValueError, match=f"1 not expected: {name.removeprefix('model.diffusion_model.')}"):
            draws_alike(tmp_path / "x.safetensors", whole_model() | {name: mx.ones((2, 2))})


@pytest.mark.parametrize(
    "name, base", [("klein-base", True), ("kleinbase_9b", True), ("klein_Base4b", None), ("klein-9b-Baseball", False),
                   ("klein-database", False), ("klein.base.v2", True), ("flux2Klein_9bBase", True)],
)  # fmt: skip
def test_base_is_a_word_of_a_name(name, base):
    if base is not None:
        assert KLEIN.read_file_name(f"{name}.safetensors") == (not base, False)
    for kv in ("flux2_klein_9b_kv", "flux2Klein_9bKv"):
        assert KLEIN.read_file_name(f"{kv}.safetensors") == (True, True)


# ---------------------------------------------------------------- packings of other programs


@pytest.mark.parametrize(
    "ending, dtype, title",
    [
        ("SCB", None, "bitsandbytes' 8 bits"), ("absmax", None, "bitsandbytes' 4 bits"), ("zero_point", None, "SDNQ"),
        ("svd_up", None, "SDNQ"), ("scale", mx.uint8, "SDNQ"), ("qweight", None, "GPTQ or AWQ"),
        ("wscales", None, "nunchaku"), ("weight._data", None, "quanto"), ("weight_qdata", None, "torchao"),
        ("weight_packed", None, "compressed-tensors"), ("weight_scale_inv", None, "FP8 in blocks"),
        ("weight_scale", mx.int8, "int8"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("place", ["file", "folder"])
def test_another_programs_packing_is_named(tmp_path, place, ending, dtype, title):
    arrays = tiny_transformer("ours" if place == "file" else "diffusers")
    name = next(n for n, w in arrays.items() if w.ndim == 2 and n.endswith(".weight"))
    arrays[f"{name.removesuffix('weight')}{ending}"] = mx.ones((4,))
    if dtype:
        arrays[name] = mx.zeros((arrays[name].size, 1), dtype)
    mx.eval(arrays)
    folder = Path(shutil.copytree(TINY, tmp_path / "m", ignore=shutil.ignore_patterns("base")))
    path = tmp_path / "x.safetensors" if place == "file" else folder / "transformer/diffusion_pytorch_model.safetensors"
    mx.save_safetensors(str(path), arrays)
    with pytest.raises(ValueError, match=f"is packed as {title}, which kleinlite does not read: take"):
        open_checkpoint(path if place == "file" else folder, dtype=mx.float32, parts=TINY if place == "file" else None)


@pytest.mark.parametrize(
    "said, told",
    [
        ({"format": "mxfp8"}, "packed as mxfp8"),
        ({"format": "int8_tensorwise"}, "packed as int8_tensorwise"),
        ({"format": "float8_e4m3fn", "convrot": True}, "packed as a rotated matrix"),
        ({"format": "float8_e4m3fn"}, "its scales do not fit"),
    ],
)
@pytest.mark.parametrize("place", ["tensor", "header"])
def test_what_comfy_says_of_a_layer(said, told, place):
    arrays = {"x.weight": mx.zeros((32, 32), mx.uint8), "y.bias": mx.ones((3,))}
    words = {"x.comfy_quant": mx.array(list(json.dumps(said).encode()), mx.uint8)} if place == "tensor" else {}
    header = {} if words else {"_quantization_metadata": json.dumps({"layers": {"x": said}})}
    with pytest.raises(ValueError, match=told):
        assemble(arrays | words, header)
    good = {"format": "float8_e4m3fn", "full_precision_matrix_mult": True}
    words = {name: mx.array(list(json.dumps(good).encode()), mx.uint8) for name in words}
    assert isinstance(assemble(arrays | words | {"x.weight_scale": mx.array(2.0)})["x.weight"], QuantizedMatrix)


NO_WORDS = ["{", "", "[]", "5", "null", '"x"', DEEP]


@pytest.mark.parametrize("text", [*NO_WORDS, '{"layers": []}', '{"layers": {"x": 5}}'], ids=lambda text: text[:9])
def test_damaged_words_of_comfys_header(text):
    """They might say what kleinlite does not compute, so they are not passed over."""
    with pytest.raises(UserError, match="the file says about (_quantization_metadata|x) is damaged: download it again"):
        assemble({"x.weight": mx.zeros((32, 32), mx.uint8)}, {"_quantization_metadata": text})


@pytest.mark.parametrize("text", NO_WORDS, ids=lambda text: text[:9])
def test_damaged_words_of_a_layer(text):
    words = {"x.comfy_quant": mx.array([*text.encode()], mx.uint8)}
    with pytest.raises(UserError, match="the file says about x is damaged: download it again"):
        assemble({"x.weight": mx.zeros((32, 32), mx.uint8)} | words)


def test_comfys_words_in_a_tensor_of_another_kind():
    arrays = {"x.weight": mx.zeros((32, 32), mx.uint8), "x.weight_scale": mx.array(2.0)}
    assert "x.weight" in assemble(arrays | {"x.comfy_quant": mx.array([[*b"{}"]], mx.bfloat16)})
    for words in (mx.array(3.0), mx.array([255, 254], mx.uint8), mx.zeros((0,))):
        with pytest.raises(UserError, match="about x is damaged"):
            assemble(arrays | {"x.comfy_quant": words})


@pytest.mark.parametrize(
    "recipe", [{"embed_tokens": 8}, {"v_proj": 6, "down_proj": 6}, {"layers.0.": 8}, {"o_proj": None}]
)
def test_layers_of_other_bits(tmp_path, recipe):
    """As mlx_lm writes them: beside group_size and bits an entry for each layer that differs, or false."""
    part = Path(shutil.copytree(NANO / "text_encoder", tmp_path / "te"))
    words: dict = {"group_size": 32, "bits": 4}
    new = {}
    for name, w in load_arrays(part).items():
        layer = name.removesuffix(".weight")
        bits = next((b for key, b in recipe.items() if key in layer), 4)
        if w.ndim != 2 or w.shape[1] % 32 or bits is None:
            new[name] = w
        else:
            new[name], new[f"{layer}.scales"], new[f"{layer}.biases"] = mx.quantize(w, group_size=32, bits=bits)
        if bits != 4:
            words[layer] = {"group_size": 32, "bits": bits} if bits else False
    mx.eval(new)
    mx.save_safetensors(str(part / "model.safetensors"), new, {"format": "mlx"})
    config = json.loads((part / "config.json").read_text())
    (part / "config.json").write_text(json.dumps(config | {"quantization": words}))
    weights = open_checkpoint(NANO, dtype=mx.float32, parts={"text_encoder": part}).weights("text_encoder")
    exact = open_checkpoint(NANO, dtype=mx.float32).weights("text_encoder")
    bits = {w.spec.bits for w in weights.values() if isinstance(w, QuantizedMatrix)}
    assert bits == {4, *recipe.values()} - {None}
    for name, w in weights.items():
        decoded = w.decode() if isinstance(w, QuantizedMatrix) else w
        assert error(decoded, exact[name]) < 0.2, name
