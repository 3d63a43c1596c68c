"""The model card against what it speaks of: hashes and sizes."""

import hashlib
import re
from pathlib import Path

from kleinlite.models.checkpoint import resolve_model

PAGE = Path(__file__).parents[2] / "notebooks" / "nano-card.md"
CARD = PAGE.read_text("utf-8")
WEIGHTS = resolve_model("nano")


def test_the_card_names_todays_weights():
    parts = ("transformer", "base/transformer", "vae")
    files = [WEIGHTS / part / "diffusion_pytorch_model.safetensors" for part in parts]
    hashes = re.findall(r"\b([0-9a-f]{16})…", CARD)
    assert hashes == [hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files]


def test_the_card_says_how_large_the_files_are():
    nano = sum(file.stat().st_size for file in WEIGHTS.rglob("*") if file.is_file())
    book = sum(file.stat().st_size for file in (PAGE.parents[1] / "recipe" / "weights").iterdir())
    [row] = re.findall(r"^\| files \| (.*)", CARD, re.M)
    assert re.findall(r"([\d.]+) MB", row) == [f"{size / 1e6:.1f}" for size in (nano, book)]
