"""Folders that mflux, mlx-gen and flux3-mlx have saved: opened exactly, or refused by name with the way out.

`pipelines/mflux` was written and computed by mflux itself; flux3-mlx's layout is written here, from its own loader.
"""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from golden_tools import LOOSE, TIGHT, check, nchw, nhwc
from stand_in_hub import Repository

from kleinlite.klein import Klein
from kleinlite.models.checkpoint import open_checkpoint
from kleinlite.models.export import quantize_model
from kleinlite.models.families.qwen3 import IMPLIED, OUT_LAYERS
from kleinlite.models.other_programs import open_mlx_files
from kleinlite.position_ids import image_ids, text_ids
from kleinlite.quantization import QuantizedMatrix, QuantSpec, quantize_matrix

PIPELINES = Path(__file__).parents[1] / "pipelines"
MFLUX = PIPELINES / "mflux" / "klein-mflux-q4"
META = json.loads((PIPELINES / "mflux" / "meta.json").read_text())
EXPECTED = mx.load(str(PIPELINES / "mflux" / "expected.safetensors"))


@pytest.fixture
def small_text_encoder(monkeypatch):
    """mflux reads the layers 9, 18 and 27 of 512 tokens, and never says so: three layers make a smaller file."""
    monkeypatch.setitem(IMPLIED, OUT_LAYERS, tuple(META["out_layers"]))
    monkeypatch.setitem(IMPLIED, "max_sequence_length", META["max_length"])


small = pytest.mark.usefixtures("small_text_encoder")


def copy_mflux(folder: Path) -> Path:
    return Path(shutil.copytree(MFLUX, folder))


def open_model(folder: Path):
    return open_checkpoint(folder, dtype=mx.float32)


# ---------------------------------------------------------------- mflux


@small
@pytest.mark.parametrize("name", ["AbstractFramework/flux.2-klein-4b-4bit", "mlx-community/FLUX.2-klein-9B"])
def test_it_opens_by_its_name_on_the_hub(hub, name):
    """Under the names that others have given it there; a second time from the cache, without a byte."""
    files = {path.relative_to(MFLUX).as_posix(): path.read_bytes() for path in MFLUX.rglob("*") if path.is_file()}
    hub.repositories[name] = Repository(files | {"README.md": b"not for us"})
    pictures = []
    for place in (name, name, MFLUX):
        klein = Klein.from_pretrained(place, dtype=mx.float32)
        pictures.append(klein(META["prompt"], width=32, height=16, seed=3, progress=False).tobytes())
        hub.down = True
    assert pictures[0] == pictures[1] == pictures[2]
    assert "README.md" not in "".join(request.path for request in hub.requests)


@small
def test_it_computes_what_mflux_computes():
    """Features, velocity, decoder and encoder, from the same codes; then a picture."""
    klein = Klein.from_pretrained(MFLUX, dtype=mx.float32)
    txt = klein.encode_prompt(META["prompt"])
    check(txt[:, : EXPECTED["features"].shape[1]], EXPECTED["features"], TIGHT)
    latents = EXPECTED["latents"]
    check(klein.transformer(latents, txt, META["time"], image_ids(1, 2), text_ids(64)), EXPECTED["velocity"], LOOSE)
    check(nchw(klein.autoencoder.decode(latents.reshape(1, 1, 2, 128))), EXPECTED["decoded"], TIGHT)
    check(nchw(klein.autoencoder.encode(nhwc(EXPECTED["pixels"]))), EXPECTED["encoded"], TIGHT)
    assert klein(META["prompt"], width=32, height=16, progress=False).size == (32, 16)


@small
def test_every_matrix_has_bits_of_its_own():
    """Four, but one in eight and one in none; where three matrices become one, the bits of all must be the same."""
    weights = open_model(MFLUX).weights("transformer")
    specs = {name: w.spec for name, w in weights.items() if isinstance(w, QuantizedMatrix)}
    assert set(specs.values()) == {QuantSpec("affine", 4, 64)}
    decoded = {name for name, w in weights.items() if not isinstance(w, QuantizedMatrix) and w.ndim == 2}
    assert decoded == {"double_blocks.0.img_attn.qkv.weight", "final_layer.linear.weight"}


@small
@pytest.mark.parametrize("bits", [3, 5, 6, 8])
def test_all_bits_of_mflux(tmp_path, bits):
    folder = copy_mflux(tmp_path / f"klein-q{bits}")
    arrays, metadata = mx.load(str(folder / "transformer" / "0.safetensors"), return_metadata=True)
    w = quantize_matrix(mx.random.normal((64, 128), key=mx.random.key(0)), QuantSpec("affine", bits, 64))
    arrays |= {f"x_embedder.{kind}": tensor for kind, tensor in w.tensors.items()}
    mx.save_safetensors(str(folder / "transformer" / "0.safetensors"), arrays, metadata)
    ours = open_model(folder).weights("transformer")["img_in.weight"]
    assert ours.spec.bits == bits and mx.array_equal(ours.decode(), w.decode())


def test_a_packed_autoencoder_is_decoded(tmp_path):
    """Only matrices as wide as a group are packed, which the tiny autoencoder has not."""
    name = "decoder.mid_block.attentions.0.to_out"
    w = quantize_matrix(mx.random.normal((64, 64), key=mx.random.key(0)), QuantSpec("affine", 4, 64))
    kernel = mx.random.normal((8, 3, 3, 4), key=mx.random.key(1))
    arrays = {f"{name}.{kind}": tensor for kind, tensor in w.tensors.items()} | {"decoder.conv_in.weight": kernel}
    (tmp_path / "vae").mkdir()
    mx.save_safetensors(str(tmp_path / "vae" / "0.safetensors"), arrays, {"quantization_level": "4"})
    ours, _ = open_mlx_files(tmp_path / "vae").load()
    assert mx.array_equal(ours.pop(f"{name}.0.weight"), w.decode())
    assert ours.keys() == {"decoder.conv_in.weight"} and ours["decoder.conv_in.weight"].shape == (8, 4, 3, 3)


@small
@pytest.mark.parametrize(
    "folder, record, distilled, kv",
    [
        ("FLUX.2-klein-4B-mflux-q4", {}, True, False),
        ("flux.2-klein-base-4b-8bit", {}, False, False),
        ("klein-9b-kv", {}, True, True),
        ("mine", {"model_name": "flux2-klein-base-4b", "base_model": None}, False, False),
        ("mine", {"model_name": "me/tuned", "base_model": "flux2-klein-4b"}, True, False),
        ("models--me--klein-base-q4/snapshots/0123", {}, False, False),
    ],
)
def test_a_name_tells_the_variant(tmp_path, caplog, folder, record, distilled, kv):
    """mflux's record of what was saved before the folder's name, also in the hub's cache; the log says so."""
    folder = copy_mflux(tmp_path / folder)
    if record:
        (folder / "mflux_model.json").write_text(json.dumps(record))
    info = open_model(folder).info
    assert (info.distilled, info.kv, info.size) == (distilled, kv, 1024)
    assert caplog.text.count("by its name") <= 1


@small
def test_refused_with_the_way_out(tmp_path):
    """A name that tells nothing, another model, a second packing, a copy, a part alone."""
    mine = copy_mflux(tmp_path / "mine")
    with pytest.raises(ValueError, match="do not say whether the model is distilled: let the folder's name say it"):
        open_model(mine)
    with pytest.raises(ValueError, match=r"quantized already \(affine, 4 bits\): leave quantize out"):
        open_checkpoint(MFLUX, dtype=mx.float32, quantize=8)
    path = mine / "transformer" / "0.safetensors"
    arrays, metadata = mx.load(str(path), return_metadata=True)
    del arrays["time_guidance_embed.linear_1.weight"]
    mx.save_safetensors(str(path), arrays, metadata)
    with pytest.raises(ValueError, match=r"saved by mflux or mlx-gen and is no FLUX.2 \[klein\].*take the released"):
        open_model(mine)
    shutil.rmtree(mine / "transformer")
    with pytest.raises(FileNotFoundError, match=r"model_index.json is missing"):
        open_model(mine)


@small
def test_no_copy_of_another_layout(tmp_path):
    """The autoencoder's file would be copied as it is, channels last."""
    plain = copy_mflux(tmp_path / "klein-bf16")
    for part in ("transformer", "text_encoder"):
        path = plain / part / "0.safetensors"
        arrays, metadata = mx.load(str(path), return_metadata=True)
        for name in [name.removesuffix(".scales") for name in arrays if name.endswith(".scales")]:
            w = {kind: arrays.pop(f"{name}.{kind}") for kind in ("weight", "scales", "biases")}
            bits = w["weight"].shape[1] // (2 * w["scales"].shape[1])
            arrays[f"{name}.weight"] = QuantizedMatrix(w, QuantSpec("affine", bits, 64)).decode(mx.bfloat16)
        mx.save_safetensors(str(path), arrays, metadata | {"quantization_level": "None"})
    assert not open_model(plain).is_quantized
    with pytest.raises(ValueError, match="another program's layout.*name the released model"):
        quantize_model(plain, tmp_path / "out", 4, progress=False)


# ---------------------------------------------------------------- flux3-mlx


FLUX3 = PIPELINES / "flux3"
KEPT = ("modulation", "time_in", "emb_in", "txt_in", "final_layer")  # in bfloat16, by flux3-mlx


def write_flux3(folder: Path, spec: QuantSpec | None, language: str = "model.") -> Path:
    """The tiny FLUX 3 as flux3-mlx lays it out: the makers' names, `quantization` in the transformer's config."""
    source = open_model(FLUX3)
    vae = {name: w.transpose(0, 3, 1, 2) if w.ndim == 4 else w for name, w in source.weights("autoencoder").items()}
    transformer = {}
    for name, w in source.weights("transformer").items():
        if spec and w.ndim == 2 and not any(word in name for word in KEPT):
            tensors = quantize_matrix(w, spec).tensors
            transformer |= {f"{name.removesuffix('weight')}{kind}": tensor for kind, tensor in tensors.items()}
        else:
            transformer[name] = w
    text = mx.load(str(FLUX3 / "text_encoder" / "model.safetensors"))
    text = {name.replace("model.language_model.", language): w for name, w in text.items()}
    for part, file, arrays in (
        ("transformer", "model", transformer), ("vae", "ae", vae), ("text_encoder", "model", text),
    ):  # fmt: skip
        (folder / part).mkdir(parents=True)
        arrays = {name: mx.contiguous(w) for name, w in arrays.items()}
        mx.save_safetensors(str(folder / part / f"{file}.safetensors"), arrays)
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(FLUX3 / "text_encoder" / file, folder / "text_encoder" / file)
    words = {"quantization": {"group_size": spec.group, "bits": spec.bits}} if spec else {}
    (folder / "transformer" / "config.json").write_text(json.dumps(words))
    (folder / "config.json").write_text(json.dumps({"format": "flux3-mlx", "format_version": 1}))
    return folder


@pytest.mark.parametrize("language", ["model.", "language_model.model.", "model.language_model."])
def test_flux3_mlx_is_the_same_model(tmp_path, language):
    """Unquantized, named by the makers, its text encoder in three ways: the same picture as from diffusers' folder."""
    wish = {"prompt": "a red circle", "width": 64, "height": 48, "steps": 2, "seed": 7, "progress": False}
    folder = write_flux3(tmp_path / "plain", None, language)
    pictures = [Klein.from_pretrained(path, dtype=mx.float32)(**wish) for path in (FLUX3, folder)]
    assert open_model(folder).configs[:2] == open_model(FLUX3).configs[:2]
    assert pictures[0].tobytes() == pictures[1].tobytes()


@pytest.mark.parametrize("bits", [6, 8])
def test_flux3_mlx_quantized(tmp_path, bits):
    """The codes as they are; the widths of packed matrices follow from the config's group."""
    spec = QuantSpec("affine", bits, 32)
    folder = open_model(write_flux3(tmp_path / "packed", spec))
    plain = open_model(FLUX3)
    assert folder.configs[:2] == plain.configs[:2] and folder.info.distilled and folder.is_quantized
    weights = folder.weights("transformer")
    kept = {name for name, w in weights.items() if not isinstance(w, QuantizedMatrix) and w.ndim == 2}
    assert kept and all(any(word in name for word in KEPT) for name in kept)
    name = "single_blocks.0.mlp_out.weight"
    assert mx.array_equal(weights[name].decode(), quantize_matrix(plain.weights("transformer")[name], spec).decode())
    folder.load_transformer()
