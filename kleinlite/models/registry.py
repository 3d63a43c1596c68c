"""The models that have a name: repositories, sizes, licences, and the parts of a model. Plain data. Hand-written."""

from dataclasses import dataclass

BUNDLED = {"nano": "nano", "nano-base": "nano/base"}  # → folder in the package; the base shares nano's other parts
PARTS = ("transformer", "text_encoder", "vae")


@dataclass(frozen=True)
class ModelSize:
    """What the models of one size share."""

    name: str
    transformer_parameters: int
    text_encoder_parameters: int
    other_bytes: int  # of all files but the transformer's weights
    license: str
    gated: bool  # fetched only by those who accepted the licence


@dataclass(frozen=True)
class ReleasedModel:
    """A released model, as far as it is known before a download."""

    repo: str
    size: ModelSize
    transformer_bytes: int
    parts_from: str = ""  # of a single file: the model whose repository has the other parts

    @property
    def file(self) -> str:
        """The transformer alone in one file, in the repository's root; "" if the repository is a model's folder."""
        name = self.repo.split("/")[1].lower().replace(".", "-")
        return f"{name}.safetensors" if self.parts_from else ""

    @property
    def distilled(self) -> bool:
        return "-base-" not in self.repo

    @property
    def packed(self) -> bool:
        """Whether its weights come in few bits and so cannot be packed again."""
        return self.repo.lower().endswith("-nvfp4")

    @property
    def download_bytes(self) -> int:
        """Bytes to fetch where nothing is here yet."""
        return self.transformer_bytes + self.size.other_bytes


VAE, TOKENIZER = 168_120_878, 11_422_654 + 2_776_833 + 1_671_853 + 5404 + 4168 + 707 + 613
QWEN_4B = 4_967_215_360 + 3_077_766_632
QWEN_8B = 4_902_257_696 + 4_915_960_368 + 4_983_068_496 + 1_580_230_264
B4 = ModelSize("4b", 3_875_544_576, 4_022_468_096, QWEN_4B + VAE + TOKENIZER, "Apache-2.0", gated=False)
B9 = ModelSize("9b", 9_078_581_248, 8_190_735_360, QWEN_8B + VAE + TOKENIZER, "FLUX Non-Commercial", gated=True)
# Stored in float32; the third shard's header was not seen. Its text encoder is Qwen3-4B, in other shards.
Z6 = ModelSize(
    "z-image", 6_154_908_736, 4_022_468_096,
    3_957_900_840 + 3_987_450_520 + 99_630_640 + 167_666_902 + 11_422_654 + 2_776_833 + 1_671_853, "Apache-2.0",
    gated=False,
)  # fmt: skip
BFL = "black-forest-labs/FLUX.2-klein"

MODELS = {
    "4b": ReleasedModel(f"{BFL}-4B", B4, 7_751_109_744),
    "base-4b": ReleasedModel(f"{BFL}-base-4B", B4, 7_751_109_744),
    "9b": ReleasedModel(f"{BFL}-9B", B9, 9_801_069_272 + 8_356_121_608),
    "base-9b": ReleasedModel(f"{BFL}-base-9B", B9, 9_801_069_272 + 8_356_121_608),
    # Its files were not seen; it has 9b's tensors.
    "9b-kv": ReleasedModel(f"{BFL}-9b-kv", B9, 9_801_069_272 + 8_356_121_608),
    "4b-fp8": ReleasedModel(f"{BFL}-4b-fp8", B4, 4_070_624_520, parts_from="4b"),
    "base-4b-fp8": ReleasedModel(f"{BFL}-base-4b-fp8", B4, 4_089_498_488, parts_from="base-4b"),
    "9b-fp8": ReleasedModel(f"{BFL}-9b-fp8", B9, 9_433_061_528, parts_from="9b"),
    "base-9b-fp8": ReleasedModel(f"{BFL}-base-9b-fp8", B9, 9_567_278_472, parts_from="base-9b"),
    "9b-kv-fp8": ReleasedModel(f"{BFL}-9b-kv-fp8", B9, 9_818_935_984, parts_from="9b-kv"),
    "4b-nvfp4": ReleasedModel(f"{BFL}-4b-nvfp4", B4, 2_460_413_488, parts_from="4b"),
    "base-4b-nvfp4": ReleasedModel(f"{BFL}-base-4b-nvfp4", B4, 2_487_544_776, parts_from="base-4b"),
    "9b-nvfp4": ReleasedModel(f"{BFL}-9b-nvfp4", B9, 5_760_960_048, parts_from="9b"),
    "base-9b-nvfp4": ReleasedModel(f"{BFL}-base-9b-nvfp4", B9, 5_809_193_808, parts_from="base-9b"),
    "z-image-turbo": ReleasedModel("Tongyi-MAI/Z-Image-Turbo", Z6, 4 * 6_154_908_736),
}
# An autoencoder with a narrower decoder, which any model can have in place of its own.
SMALL_DECODER = "small-decoder"
SMALL_DECODER_REPO, SMALL_DECODER_BYTES = "black-forest-labs/FLUX.2-small-decoder", 249_519_092


def find_released(name: str) -> ReleasedModel | None:
    """The released model of this name, in any case; None if there is none."""
    return MODELS.get(name.lower())
