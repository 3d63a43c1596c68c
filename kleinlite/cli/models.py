"""`kleinlite models`: the models that have a name, what they take, and which are on this machine."""

import argparse
from typing import Any

from ..inference import machine_memory
from ..inference.machine_memory import FEWER_BITS, plan_model
from ..memory import count_parameters
from ..models.facts import find_facts
from ..models.families import network_of
from ..models.registry import BUNDLED, MODELS
from ..quantization import QUANT_SPECS


def run(args: argparse.Namespace) -> None:
    whole = machine_memory.machine_memory()[0] / 1e9
    head = "name", "steps", "parameters", "memory, GB", "download", "license", "fits", "here"
    rows = [head, *map(describe_model, [*BUNDLED, *MODELS])]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    print(
        "\nA distilled model has its guidance built in. Parameters: the transformer's + the text encoder's."
        "\nMemory: for a picture of 512x512 (bundled: 96x96), weights as published / in 8 bits / in 4 (`--quantize`);"
        f"\nPython and MLX take 0.1 GB more. Fits: into the {whole:.1f} GB of this machine."
        "\nWhat is not here is fetched on first use, or by `kleinlite download NAME`, from huggingface.co, a"
        "\ngated model after you have accepted its license there and logged in with `hf auth login`."
    )


def describe_model(name: str) -> tuple[str, ...]:
    """One row of the table."""
    facts = find_facts(name)
    assert facts.configs is not None  # all of them are known
    released = facts.released
    size = 512 if released else facts.info.size
    fewer = () if facts.is_quantized or not released else FEWER_BITS
    widths: dict[int | None, float | None] = {None: None, **{n: QUANT_SPECS[n].bits_per_weight for n in fewer}}
    peaks = {bits: plan_model(facts, width=size, height=size, bits=n).peak_bytes for bits, n in widths.items()}
    if released:
        counts = [released.size.transformer_parameters, released.size.text_encoder_parameters]
        here = "yes" if facts.here else "no, gated" if released.size.gated else "no"
    else:
        networks: list[Any] = [facts.configs.transformer, facts.configs.text_encoder]
        counts = [count_parameters(network_of(cfg), cfg) for cfg in networks]
        here = "bundled"
    fitting = [bits for bits in peaks if peaks[bits] <= machine_memory.machine_memory()[0]]
    fits = "no" if not fitting else "yes" if fitting[0] is None else f"--quantize {fitting[0]}"
    shown = [peaks[bits] for bits in (None, 8, 4) if bits in peaks]
    return (
        name,
        f"{facts.info.steps}, distilled" if facts.info.distilled else str(facts.info.steps),
        " + ".join(f"{n / 1e9:.1f} B" if n >= 1e9 else f"{n / 1e6:.1f} M" for n in counts),
        " / ".join(f"{n / 1e9:.{1 if n > 1e9 else 2}f}" for n in shown),
        f"{released.download_bytes / 1e9:.1f} GB" if released else "none",
        facts.license,
        fits,
        here,
    )
