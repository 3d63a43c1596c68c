"""How large the networks are, what they learn from and for how long."""

from dataclasses import dataclass, field

from kleinlite.autoencoder import AutoencoderConfig
from kleinlite.text_encoder import TextEncoderConfig
from kleinlite.transformer import TransformerConfig

STEPS = {
    "autoencoder": 5000, "text_encoder": 1000, "transformer": 16_000, "distill": 4500, "redraw": 600, "repair": 120
}  # fmt: skip


@dataclass(frozen=True)
class RecipeConfig:
    """The networks, as the bundled model's configs have them, what they learn from, and for how long."""

    autoencoder: AutoencoderConfig = AutoencoderConfig(
        channels=(16, 32, 64, 96), decoder_channels=(64, 32, 64, 96), layers=1, groups=8
    )
    text_encoder: TextEncoderConfig = TextEncoderConfig(
        2097, d=96, d_mlp=256, layers=4, heads=4, kv_heads=2, head_dim=32, out_layers=(1, 2, 3), max_length=32
    )
    transformer: TransformerConfig = TransformerConfig(
        double_blocks=2, single_blocks=5, heads=4, axes=(16, 16, 16, 16), d_text=288, mlp_ratio=1.5
    )
    begins_with: str | None = None  # the model whose autoencoder and transformer go on learning; None: from nothing
    pictures: int = 22_000
    edits: int = 8_000
    families: int = 600
    own_pictures: int = 3000  # that the student draws in each round in which it learns from its own
    batch: int = 32
    every: int = 200  # steps between two looks
    statistics: int = 512  # scenes whose latents are measured
    steps: dict[str, int] = field(default_factory=lambda: dict(STEPS))
