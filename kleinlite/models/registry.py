"""The models that have a name: repositories, files and their bytes, sizes, licenses. Plain data."""

from dataclasses import dataclass, replace

FOLDERS = {"transformer": "transformer", "text_encoder": "text_encoder", "autoencoder": "vae"}  # part → its folder
PARTS = tuple(FOLDERS)
PART_WORDS = {word: part for part, folder in FOLDERS.items() for word in (part, folder)}  # what a user may call it
BUNDLED = {"nano": "nano/weights", "nano-base": "nano/weights/base", "critters": "critters/weights"}  # → its folder
BUNDLED_LICENSE = "Apache-2.0"


@dataclass(frozen=True)
class ModelSize:
    """What the models of one size share."""

    name: str
    transformer_parameters: int
    text_encoder_parameters: int
    other_bytes: int  # of all files but the transformer's weights
    license: str
    gated: bool  # fetched only by those who accepted the license


@dataclass(frozen=True)
class ReleasedModel:
    """A released model, as far as it is known before a download."""

    repo: str
    size: ModelSize
    transformer_bytes: int
    parts_from: str = ""  # of a single file: the model whose repository has the other parts

    @property
    def file(self) -> str:
        """The transformer alone in one file, named as its repository is; "" if the repository is a model's folder."""
        name = self.repo.partition("/")[2].lower().replace(".", "-")
        return f"{name}.safetensors" if self.parts_from else ""

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
    def download_bytes(self) -> int:
        """Bytes to fetch where nothing is here yet."""
        return self.transformer_bytes + self.size.other_bytes


TOKENIZER_BYTES = 11_422_654 + 2_776_833 + 1_671_853  # tokenizer.json, vocab.json, merges.txt
KLEIN_TOKENIZER_BYTES = TOKENIZER_BYTES + 5404 + 4168 + 707 + 613  # and four small files
AUTOENCODER_BYTES = 168_120_878
QWEN_4B_BYTES = 4_967_215_360 + 3_077_766_632  # shard by shard
QWEN_8B_BYTES = 4_902_257_696 + 4_915_960_368 + 4_983_068_496 + 1_580_230_264

SIZE_4B = ModelSize(
    name="4b",
    transformer_parameters=3_875_544_576,
    text_encoder_parameters=4_022_468_096,
    other_bytes=QWEN_4B_BYTES + AUTOENCODER_BYTES + KLEIN_TOKENIZER_BYTES,
    license="Apache-2.0",
    gated=False,
)
SIZE_9B = ModelSize(
    name="9b",
    transformer_parameters=9_078_581_248,
    text_encoder_parameters=8_190_735_360,
    other_bytes=QWEN_8B_BYTES + AUTOENCODER_BYTES + KLEIN_TOKENIZER_BYTES,
    license="FLUX Non-Commercial",
    gated=True,
)
SIZE_Z_IMAGE = ModelSize(  # its text encoder is Qwen3-4B, in other shards; the third one's header was not seen
    name="z-image",
    transformer_parameters=6_154_908_736,
    text_encoder_parameters=4_022_468_096,
    other_bytes=3_957_900_840 + 3_987_450_520 + 99_630_640 + 167_666_902 + TOKENIZER_BYTES,
    license="Apache-2.0",
    gated=False,
)
SIZE_FLUX3 = ModelSize(  # no header was seen: what the weights come to, in bfloat16, and the autoencoder in float32
    name="flux3",
    transformer_parameters=5_548_681_984,
    text_encoder_parameters=4_437_815_808,  # with the half for pictures, which is not read
    other_bytes=8_875_631_616 + 336_000_000 + 7_000_000,
    license="FLUX Kommunity License",
    gated=True,
)
SIZE_FLUX3_BASE = replace(SIZE_FLUX3, name="flux3-base", transformer_parameters=5_538_458_368)

TRANSFORMER_4B = 7_751_109_744
TRANSFORMER_9B = 9_801_069_272 + 8_356_121_608
TRANSFORMER_Z_IMAGE = 4 * 6_154_908_736  # in float32; its shards were not seen


def klein(name: str, size: ModelSize, nbytes: int, parts_from: str = "") -> ReleasedModel:
    return ReleasedModel(f"black-forest-labs/FLUX.2-klein-{name}", size, nbytes, parts_from)


def flux3(name: str, size: ModelSize) -> ReleasedModel:
    """A FLUX 3, whose shards were not seen: two bytes for each weight."""
    return ReleasedModel(f"black-forest-labs/flux-3-image-{name}", size, 2 * size.transformer_parameters)


MODELS = {
    "4b": klein("4B", SIZE_4B, TRANSFORMER_4B),
    "base-4b": klein("base-4B", SIZE_4B, TRANSFORMER_4B),
    "9b": klein("9B", SIZE_9B, TRANSFORMER_9B),
    "base-9b": klein("base-9B", SIZE_9B, TRANSFORMER_9B),
    "9b-kv": klein("9b-kv", SIZE_9B, TRANSFORMER_9B),  # its files were not seen; it has 9b's tensors
    "4b-fp8": klein("4b-fp8", SIZE_4B, 4_070_624_520, "4b"),
    "base-4b-fp8": klein("base-4b-fp8", SIZE_4B, 4_089_498_488, "base-4b"),
    "9b-fp8": klein("9b-fp8", SIZE_9B, 9_433_061_528, "9b"),
    "base-9b-fp8": klein("base-9b-fp8", SIZE_9B, 9_567_278_472, "base-9b"),
    "9b-kv-fp8": klein("9b-kv-fp8", SIZE_9B, 9_818_935_984, "9b-kv"),
    "4b-nvfp4": klein("4b-nvfp4", SIZE_4B, 2_460_413_488, "4b"),
    "base-4b-nvfp4": klein("base-4b-nvfp4", SIZE_4B, 2_487_544_776, "base-4b"),
    "9b-nvfp4": klein("9b-nvfp4", SIZE_9B, 5_760_960_048, "9b"),
    "base-9b-nvfp4": klein("base-9b-nvfp4", SIZE_9B, 5_809_193_808, "base-9b"),
    "z-image-turbo": ReleasedModel("Tongyi-MAI/Z-Image-Turbo", SIZE_Z_IMAGE, TRANSFORMER_Z_IMAGE),
    "flux3": flux3("klein", SIZE_FLUX3),
    "flux3-base": flux3("klein-base", SIZE_FLUX3_BASE),
}
# Decoders that any klein can have instead of its own: one three quarters as wide, and one of a hundredth of the work.
SMALL_DECODER = "small-decoder"
TAEF2 = "taef2"
TAEF2_FILE = "taef2.safetensors"
DECODERS = {  # → repository, and its files that we take
    SMALL_DECODER: ("black-forest-labs/FLUX.2-small-decoder", ("config.json", "diffusion_pytorch_model.safetensors")),
    TAEF2: ("madebyollin/taef2", (TAEF2_FILE,)),
}


def find_released(name: str) -> ReleasedModel | None:
    """The released model of this short name, or of this repository's id, in any case; None if there is none."""
    named = name.lower()
    return MODELS.get(named) or next((model for model in MODELS.values() if model.repo.lower() == named), None)


def find_bundled(name: str) -> str | None:
    """The folder in the package of a bundled model, in any case; None if there is none."""
    return BUNDLED.get(name.lower())
