"""A model's parts in memory: loaded when needed, released when what comes next needs the room. Hand-written."""

from html import escape

import mlx.core as mx
import mlx.nn as nn
from tokenizers import Tokenizer

from ..autoencoder import Autoencoder
from ..memory import MemoryPlan, count_parameters
from ..models.families import Features, network_of
from ..models.opening import Checkpoint
from ..quantisation import PACKINGS
from ..text_encoder import TextEncoder
from ..transformer import Transformer
from ..z_image import ScaledAutoencoder, ZImageTransformer
from .loras import Loras
from .memory_check import all_parts_fit, bits_per_weight, check_memory, plan_checkpoint
from .request import Request, check_prompts
from .thread import in_turn

__all__ = ["Parts"]


class Parts:
    """The parts of one model: `loaded` has those that are in memory, by name; `loras` its adapters and their scales.

    A part that you have asked for as an attribute, such as `klein.text_encoder`, is pinned: it stays as it is, with
    what you change in it.
    """

    def __init__(self, checkpoint: Checkpoint, keep_loaded: bool = False):
        self.checkpoint, self.info, self.keep_loaded = checkpoint, checkpoint.info, keep_loaded
        self.bits = in_turn(bits_per_weight, checkpoint)
        in_turn(plan_checkpoint, checkpoint, width=16, height=16, bits=self.bits)  # counts the weights, once for all
        self.loaded: dict[str, nn.Module | Tokenizer] = {}
        self.loras = Loras(checkpoint.parts["transformer"][0])
        self._pinned: set[str] = set()
        self._features: dict[tuple[str, ...], Features] = {}  # of the last prompts

    def load(self, name: str) -> nn.Module | Tokenizer:
        """The tokenizer, text_encoder, transformer or autoencoder, read from its files if it is not in memory."""
        part = self.loaded.get(name)
        return in_turn(self._load, name) if part is None else part

    def _load(self, name: str) -> nn.Module | Tokenizer:
        part = self.loaded.get(name)  # another thread may have had its turn before
        if part is None:
            part = getattr(self.checkpoint, f"load_{name}")()
            if name == "transformer":
                self.loras.attach_to(part)
            self.loaded[name] = part
        return part

    def release(self, name: str) -> None:
        """Take a part out of memory, unless it is pinned or `keep_loaded` says that all parts stay."""
        if not self.keep_loaded and name not in self._pinned and self.loaded.pop(name, None):
            if name == "transformer":
                self.loras.release()
            mx.clear_cache()  # MLX keeps freed memory for itself; this hands it back

    def _pin(self, name: str) -> nn.Module | Tokenizer:
        self._pinned.add(name)
        return self.load(name)

    tokenizer: Tokenizer = property(lambda self: self._pin("tokenizer"))
    text_encoder: TextEncoder = property(lambda self: self._pin("text_encoder"))
    transformer: Transformer | ZImageTransformer = property(lambda self: self._pin("transformer"))
    autoencoder: Autoencoder | ScaledAutoencoder = property(lambda self: self._pin("autoencoder"))

    def encode_prompt(self, prompt: str | list[str]) -> Features:
        """Text features (1, tokens, features), or a row per prompt of a list; of Z-Image a list: lengths differ."""
        [features] = in_turn(self.encode_prompts, check_prompts(prompt))
        return features[0] if isinstance(features, list) and isinstance(prompt, str) else features

    def encode_prompts(self, *batches: list[str]) -> list[Features]:
        """The features of each batch of prompts; the text encoder is read at most once, and not if all are known.

        It is released before this returns, so that the transformer's weights find its place free.
        """
        known = {} if "text_encoder" in self._pinned else self._features  # you may have changed what is pinned
        found = {tuple(batch): known.get(tuple(batch)) for batch in batches}
        if any(features is None for features in found.values()):
            encoder = self.load("text_encoder")
            for prompts in found:
                found[prompts] = self.info.family.encode(
                    encoder, self.load("tokenizer"), list(prompts), self.info.tokens
                )
                mx.eval(found[prompts])  # or the features, not worked out yet, would hold on to the encoder
            del encoder
            self.release("text_encoder")
        self._features = dict([*known.items(), *found.items()][-4:])
        return [found[tuple(batch)] for batch in batches]

    def plan_memory(self, request: Request, bits: float | tuple[float, float] | None = None) -> MemoryPlan:
        """What a request takes, as the parts are loaded here or in so many bits per weight."""
        references = sum(gh * gw for gh, gw in request.reference_grids)
        size = {"width": request.width, "height": request.height, "b": len(request.prompts), "references": references}
        plan = plan_checkpoint(self.checkpoint, bits=bits or self.bits, **size)
        return plan._replace(transformer=plan.transformer + self.loras.nbytes)

    def check_memory(self, request: Request) -> None:
        """Refuse a request that this machine cannot hold with a MemoryError that names what would fit."""
        choice = () if self.checkpoint.packed else (8, 6, 5, 4, 3)
        smaller = {q: self.plan_memory(request, PACKINGS[q].bits_per_weight) for q in choice}
        check_memory(self.plan_memory(request), smaller)

    def make_room(self, request: Request) -> None:
        """Release the transformer after the last step, if the decoder or the next prompt needs its place."""
        if not all_parts_fit(self.plan_memory(request)):
            self.release("transformer")

    def _repr_html_(self) -> str:
        """A table of the parts, which a notebook shows for a model."""
        heads = "".join(f"<th>{head}</th>" for head in (escape(self.info.name), "weights", "each", "memory", "loaded"))
        rows = ""
        for name, part, bits in (
            ("text_encoder", "text_encoder", self.bits[1]),
            ("transformer", "transformer", self.bits[0]),
            ("autoencoder", "vae", 32),
        ):
            cfg, loaded = self.checkpoint.parts[part][0], name in self.loaded
            count = count_parameters(network_of(cfg), cfg)
            cells = name.replace("_", " "), f"{count:,}", f"{bits:.3g} bits", f"{count * bits / 8e6:,.0f} MB"
            rows += "<tr>" + "".join(f"<td>{cell}</td>" for cell in (*cells, "yes" if loaded else "no")) + "</tr>"
        return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
