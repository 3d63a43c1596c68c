"""The command line as tests call it, and the small model that they draw with."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
from PIL import Image, PngImagePlugin

from kleinlite.autoencoder import Autoencoder, AutoencoderConfig
from kleinlite.cli import main
from kleinlite.text_encoder import TextEncoder, TextEncoderConfig
from kleinlite.training import initialize
from kleinlite.transformer import Transformer, TransformerConfig
from recipe.data import train_tokenizer
from recipe.saving import save_encoders, save_transformer
from recipe.shapes import WORLD

PROMPT = "a red circle"
MADE = {"model": "nano", "prompt": PROMPT, "seed": 1, "steps": 4, "guidance": 1.0}
MADE |= {"negative_prompt": "", "width": 64, "height": 64, "references": 0}


def save_tiny(folder: Path) -> Path:
    """A model of random weights in the released layout, distilled, and in `base` the same one undistilled."""
    tokenizer, vae_cfg, cfg = train_tokenizer(WORLD), AutoencoderConfig.tiny(), TransformerConfig.tiny()
    text_cfg = replace(TextEncoderConfig.tiny(), vocab=tokenizer.get_vocab_size())
    parts = Autoencoder(vae_cfg), TextEncoder(text_cfg), Transformer(cfg)
    for i, part in enumerate(parts):
        initialize(part, mx.random.key(i))
    autoencoder, text_encoder, transformer = parts
    save_encoders(folder, autoencoder, vae_cfg, 64, text_encoder, tokenizer)
    save_transformer(folder, transformer, text_cfg, distilled=True)
    save_transformer(folder / "base", transformer, text_cfg, distilled=False, shares=True)
    return folder


def run(*argv) -> int:
    """The exit status of `kleinlite argv…`."""
    try:
        return main([str(arg) for arg in argv])
    except SystemExit as end:  # how argparse ends
        return end.code


def remember(path: str, text: str) -> None:
    """A picture that says this about itself."""
    chunk = PngImagePlugin.PngInfo()
    chunk.add_itxt("kleinlite", text)
    Image.new("RGB", (64, 64)).save(path, pnginfo=chunk)
