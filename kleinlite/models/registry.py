"""The models that have a name: repositories, files and their bytes, sizes, licences. Plain data."""

from dataclasses import dataclass, replace

FOLDERS = {"transformer": "transformer", "text_encoder": "text_encoder", "autoencoder": "vae"}  # part → its folder
PARTS = tuple(FOLDERS)
BUNDLED = {"nano": "nano/weights", "nano-base": "nano/weights/base"}  # → folder in the package
BUNDLED_LICENSE = "Apache-2.0"
Files = dict[str, int]  # name → bytes


@dataclass(frozen=True)
class ModelSize:
    """What the models of one size share."""

    name: str
    transformer_parameters: int
    text_encoder_parameters: int
    files: Files  # all but the transformer's weights
    license: str
    gated: bool  # fetched only by those who accepted the licence

    @property
    def other_bytes(self) -> int:
        return sum(self.files.values())


@dataclass(frozen=True)
class ReleasedModel:
    """A released model, as far as it is known before a download."""

    repo: str
    size: ModelSize
    transformer_files: Files
    parts_from: str = ""  # of a single file: the model whose repository has the other parts

    @property
    def file(self) -> str:
        """The transformer alone in one file, in the repository's root; "" if the repository is a model's folder."""
        return next(iter(self.transformer_files)) if self.parts_from else ""

    @property
    def distilled(self) -> bool:
        return "-base" not in self.repo

    @property
    def kv(self) -> bool:
        return "-kv" in self.repo

    @property
    def quantized(self) -> bool:
        """Whether its weights come in few bits and so cannot be quantized again."""
        return self.repo.endswith("-nvfp4")

    @property
    def transformer_bytes(self) -> int:
        return sum(self.transformer_files.values())

    @property
    def download_bytes(self) -> int:
        """Bytes to fetch where nothing is here yet."""
        return self.transformer_bytes + self.size.other_bytes


def number_shards(stem: str, *nbytes: int) -> Files:
    """The shards of a part by their names, as diffusers and transformers number them."""
    return {f"{stem}-{i:05}-of-{len(nbytes):05}.safetensors": n for i, n in enumerate(nbytes, start=1)}


TOKENIZER_FILES = {
    "tokenizer/tokenizer.json": 11_422_654,
    "tokenizer/vocab.json": 2_776_833,
    "tokenizer/merges.txt": 1_671_853,
}
KLEIN_TOKENIZER_FILES = TOKENIZER_FILES | {
    "tokenizer/tokenizer_config.json": 5404,
    "tokenizer/chat_template.jinja": 4168,
    "tokenizer/added_tokens.json": 707,
    "tokenizer/special_tokens_map.json": 613,
}
AUTOENCODER_FILES = {"vae/diffusion_pytorch_model.safetensors": 168_120_878}
QWEN_4B = number_shards("text_encoder/model", 4_967_215_360, 3_077_766_632)
QWEN_8B = number_shards("text_encoder/model", 4_902_257_696, 4_915_960_368, 4_983_068_496, 1_580_230_264)
# Z-Image's text encoder is Qwen3-4B, in other shards; the third one's header was not seen.
Z_QWEN_4B = number_shards("text_encoder/model", 3_957_900_840, 3_987_450_520, 99_630_640)
Z_AUTOENCODER_FILES = {"vae/diffusion_pytorch_model.safetensors": 167_666_902}

SIZE_4B = ModelSize(
    name="4b",
    transformer_parameters=3_875_544_576,
    text_encoder_parameters=4_022_468_096,
    files=QWEN_4B | AUTOENCODER_FILES | KLEIN_TOKENIZER_FILES,
    license="Apache-2.0",
    gated=False,
)
SIZE_9B = ModelSize(
    name="9b",
    transformer_parameters=9_078_581_248,
    text_encoder_parameters=8_190_735_360,
    files=QWEN_8B | AUTOENCODER_FILES | KLEIN_TOKENIZER_FILES,
    license="FLUX Non-Commercial",
    gated=True,
)
SIZE_Z_IMAGE = ModelSize(
    name="z-image",
    transformer_parameters=6_154_908_736,
    text_encoder_parameters=4_022_468_096,
    files=Z_QWEN_4B | Z_AUTOENCODER_FILES | TOKENIZER_FILES,
    license="Apache-2.0",
    gated=False,
)

SIZE_FLUX3 = ModelSize(  # no header was seen: what the weights come to, in bfloat16, and the autoencoder in float32
    name="flux3",
    transformer_parameters=5_548_681_984,
    text_encoder_parameters=4_437_815_808,  # with the half for pictures, which is not read
    files={"text_encoder/*.safetensors": 8_875_631_616, "vae/*.safetensors": 336_000_000, "tokenizer.json": 7_000_000},
    license="FLUX Kommunity License",
    gated=True,
)
SIZE_FLUX3_BASE = replace(SIZE_FLUX3, name="flux3-base", transformer_parameters=5_538_458_368)

TRANSFORMER_4B = {"transformer/diffusion_pytorch_model.safetensors": 7_751_109_744}
TRANSFORMER_9B = number_shards("transformer/diffusion_pytorch_model", 9_801_069_272, 8_356_121_608)
TRANSFORMER_Z_IMAGE = {"transformer/*.safetensors": 4 * 6_154_908_736}  # in float32; its shards were not seen


def klein(name: str, size: ModelSize, files: Files) -> ReleasedModel:
    """A model whose repository is a folder."""
    return ReleasedModel(f"black-forest-labs/FLUX.2-klein-{name}", size, files)


def klein_file(name: str, size: ModelSize, nbytes: int, parts_from: str) -> ReleasedModel:
    """A transformer in one file, named as its repository is, in small letters."""
    file = f"flux-2-klein-{name}.safetensors"
    return ReleasedModel(f"black-forest-labs/FLUX.2-klein-{name}", size, {file: nbytes}, parts_from)


def flux3(name: str, size: ModelSize) -> ReleasedModel:
    """A FLUX 3, whose shards were not seen: two bytes for each weight."""
    files = {"transformer/*.safetensors": 2 * size.transformer_parameters}
    return ReleasedModel(f"black-forest-labs/flux-3-image-{name}", size, files)


MODELS = {
    "4b": klein("4B", SIZE_4B, TRANSFORMER_4B),
    "base-4b": klein("base-4B", SIZE_4B, TRANSFORMER_4B),
    "9b": klein("9B", SIZE_9B, TRANSFORMER_9B),
    "base-9b": klein("base-9B", SIZE_9B, TRANSFORMER_9B),
    "9b-kv": klein("9b-kv", SIZE_9B, TRANSFORMER_9B),  # its files were not seen; it has 9b's tensors
    "4b-fp8": klein_file("4b-fp8", SIZE_4B, 4_070_624_520, "4b"),
    "base-4b-fp8": klein_file("base-4b-fp8", SIZE_4B, 4_089_498_488, "base-4b"),
    "9b-fp8": klein_file("9b-fp8", SIZE_9B, 9_433_061_528, "9b"),
    "base-9b-fp8": klein_file("base-9b-fp8", SIZE_9B, 9_567_278_472, "base-9b"),
    "9b-kv-fp8": klein_file("9b-kv-fp8", SIZE_9B, 9_818_935_984, "9b-kv"),
    "4b-nvfp4": klein_file("4b-nvfp4", SIZE_4B, 2_460_413_488, "4b"),
    "base-4b-nvfp4": klein_file("base-4b-nvfp4", SIZE_4B, 2_487_544_776, "base-4b"),
    "9b-nvfp4": klein_file("9b-nvfp4", SIZE_9B, 5_760_960_048, "9b"),
    "base-9b-nvfp4": klein_file("base-9b-nvfp4", SIZE_9B, 5_809_193_808, "base-9b"),
    "z-image-turbo": ReleasedModel("Tongyi-MAI/Z-Image-Turbo", SIZE_Z_IMAGE, TRANSFORMER_Z_IMAGE),
    "flux3": flux3("klein", SIZE_FLUX3),
    "flux3-base": flux3("klein-base", SIZE_FLUX3_BASE),
}
# Decoders that any klein can have in place of its own: one half as wide, and one of a hundredth of the work.
SMALL_DECODER = "small-decoder"
SMALL_DECODER_REPO = "black-forest-labs/FLUX.2-small-decoder"
SMALL_DECODER_BYTES = 249_519_092
TAEF2 = "taef2"
TAEF2_REPO = "madebyollin/taef2"
TAEF2_FILE = "taef2.safetensors"
DECODERS = {
    SMALL_DECODER: (SMALL_DECODER_REPO, ("config.json", "diffusion_pytorch_model.safetensors")),
    TAEF2: (TAEF2_REPO, (TAEF2_FILE,)),
}


def find_released(name: str) -> ReleasedModel | None:
    """The released model of this short name, or of this repository's id, in any case; None if there is none."""
    named = name.lower()
    return MODELS.get(named) or next((model for model in MODELS.values() if model.repo.lower() == named), None)


def find_bundled(name: str) -> str | None:
    """The folder in the package of a bundled model, in any case; None if there is none."""
    return BUNDLED.get(name.lower())
