"""A model's parts in memory: loaded when they are needed, released when what comes next needs the room."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from tokenizers import Tokenizer

from ..autoencoder import Autoencoder
from ..cpu import bfloat16_name, idle_cores_only, speed_up
from ..errors import UserError
from ..memory import count_parameters
from ..models.checkpoint import SMALL_PART_BYTES, Checkpoint, PartsArgument, open_checkpoint
from ..models.describe import ModelFacts
from ..models.download import ANYWHERE, Access
from ..models.families import Configs, Features, network_of
from ..quantization import QUANT_SPECS
from ..sharding import common_divisor, shard
from ..text_encoder import TextEncoder
from ..transformer import Transformer
from .fast_preview import fit_preview
from .loras import Loras
from .machines import from_first, least
from .memory_check import FEWER_BITS, all_parts_fit, check_memory, machine_memory, plan_model
from .memory_plan import MemoryPlan, compute_dtype
from .request import Request, check_prompts
from .serialized import run_serialized
from .strips import use_strips

__all__ = ["LoadedModel"]

P = ParamSpec("P")
R = TypeVar("R")
PARTS = ("tokenizer", "text_encoder", "transformer", "autoencoder")


def weights_of(part: nn.Module) -> list[mx.array]:
    """The arrays of a network."""
    return [cast(mx.array, item[1]) for item in tree_flatten(part.parameters())]


class LoadedModel:
    """The parts of one model: `loaded` has those that are in memory, by name; `loras` the adapters in use.

    A pinned part, such as `klein.text_encoder` once somebody asked for it, stays as it is, with what was changed in it.
    group: the machines that draw each picture together, if there are several. exact: float32 was asked for.
    """

    def __init__(
        self, checkpoint: Checkpoint, keep_loaded: bool = False, group: mx.distributed.Group | None = None,
        exact: bool = False,
    ):  # fmt: skip
        self.checkpoint = checkpoint
        self.info = checkpoint.info
        if self.is_large("transformer") and not (exact or checkpoint.is_quantized or checkpoint.quant_spec):
            self.info = replace(self.info, product=bfloat16_name())
        self.exact = exact
        self.keep_loaded = keep_loaded
        self.group = group if group and group.size() > 1 else None
        self.bits: tuple[float, float] = run_serialized(lambda: checkpoint.bits)
        self.loaded: dict[str, Any] = {}
        self.loras = Loras(checkpoint.configs.transformer)
        self._pinned: set[str] = set()
        self._features: dict[tuple[str, ...], Features] = {}  # of the last call's prompts
        self._preview_matrix: mx.array | None = None
        self.guidance_group = self._find_guidance_group()

    @classmethod
    def open(
        cls, name: str | Path, quantize: int | str | None = None, dtype: mx.Dtype | None = None,
        parts: PartsArgument = None, keep_loaded: bool = False,
        group: mx.distributed.Group | None = None, access: Access = ANYWHERE,
    ) -> LoadedModel:  # fmt: skip
        """The model of this name, its files checked, no weights read. Arguments are `from_pretrained`'s."""
        checkpoint = open_checkpoint(
            str(name), dtype=dtype or compute_dtype(), quantize=quantize, parts=parts, access=access
        )
        return cls(checkpoint, keep_loaded, group, exact=dtype is not None and dtype == mx.float32)

    @classmethod
    def of(
        cls, facts: ModelFacts, quantize: int | str | None = None, parts: PartsArgument = None,
        group: mx.distributed.Group | None = None, access: Access = ANYWHERE,
    ) -> LoadedModel:  # fmt: skip
        """The model that `describe` has looked at: what it has opened is not opened again."""
        if facts.checkpoint:
            return cls(facts.checkpoint, group=group)
        return cls.open(facts.info.name, quantize, None, parts, False, group, access)

    # ------------------------------------------------------------ several machines

    def _find_guidance_group(self) -> mx.distributed.Group | None:
        """Two machines of which each works out one of a base model's two answers, if both can hold the whole model.

        Else, and if there are more of them, machines share the model's heads.
        """
        if self.group is None or self.group.size() != 2 or self.info.guidance == self.info.family.no_guidance:
            return None
        plan = plan_model(self.checkpoint, width=self.info.size, height=self.info.size)
        return self.group if plan.peak_bytes <= least(machine_memory()[1], self.group) else None

    @property
    def machines(self) -> int:
        """How many machines share the heads of the model; 1: each holds the whole."""
        return 1 if self.group is None or self.guidance_group else self.group.size()

    def agree(self, request: Request, seeded: bool) -> Request:
        """The request as all machines draw it: where no seed was given, with the first machine's."""
        if self.group is None or seeded:
            return request
        return replace(request, seeds=from_first(request.seeds, self.group))

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """`run_serialized`; a small model leaves the cores to what else runs on them, and is quicker for it."""
        if self.is_large("transformer"):
            return run_serialized(function, *args, **kwargs)

        def run_beside_others() -> R:
            with idle_cores_only():
                return function(*args, **kwargs)

        return run_serialized(run_beside_others)

    # ------------------------------------------------------------ parts

    def is_large(self, name: str) -> bool:
        """Whether a part's weights stay as they are in its files, and its layers are this machine's quick ones."""
        return self.checkpoint.nbytes(name) >= SMALL_PART_BYTES

    @property
    def configs(self) -> Configs:
        """The numbers of the parts, which the files say."""
        return self.checkpoint.configs

    def load(self, name: str) -> Any:
        """A part, "transformer", "text_encoder", "autoencoder" or "tokenizer": read if it is not in memory."""
        if name not in PARTS:
            raise UserError(f"There is no part {name!r}: a model has {', '.join(PARTS)}.")
        return self._load(name)

    def load_tokenizer(self) -> Tokenizer:
        return self._load("tokenizer")

    def load_text_encoder(self) -> TextEncoder:
        return self._load("text_encoder")

    def load_transformer(self) -> Transformer:
        return self._load("transformer")

    def load_autoencoder(self) -> Autoencoder:
        return self._load("autoencoder")

    def _load(self, name: str) -> Any:
        part = self.loaded.get(name)
        return run_serialized(self._read, name) if part is None else part

    def _read(self, name: str) -> Any:
        part: Any = self.loaded.get(name)  # another thread may have had its turn before
        if part is None:
            load = getattr(self.checkpoint, f"load_{name}")
            is_shared = name in ("transformer", "text_encoder") and self.machines > 1
            part = load(lazy=True) if is_shared else load()
            if isinstance(part, nn.Module) and self.is_large(name):
                if mx.metal.is_available():  # or macOS may page weights out between steps; mlx-lm does the same
                    mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))
                # A small network runs the chapters' own code, so that a line changed there shows.
                speed_up(part, bfloat16=not self.exact)
            if name == "transformer":
                self.loras.attach_to(part)
            if is_shared:
                self._share(part)
            if name == "autoencoder":
                self._check_autoencoder(part)
                use_strips(part)
            self.loaded[name] = part
        return part

    def _check_autoencoder(self, part: nn.Module) -> None:
        """Refuse weights that are not finite: what they do to a picture is not looked at again before it is saved."""
        if not all(mx.isfinite(w).all().item() for w in weights_of(part)):
            path = self.checkpoint.files["autoencoder"].path
            raise UserError(f"{path} holds numbers that are not finite: download it again.")

    def _share(self, part: nn.Module) -> None:
        """Keep this machine's heads only. A text encoder whose heads do not go round stays whole everywhere."""
        assert self.group is not None
        if isinstance(part, TextEncoder) and common_divisor(part) % self.machines:
            return
        try:
            shard(part, self.group)
        except UserError:
            self.loras.release()
            raise
        mx.eval(part.parameters())

    def preview_matrix(self) -> mx.array:
        """What stands for the decoder in fast previews, see `fit_preview`; fitted when first asked for, and kept."""
        if self._preview_matrix is None:
            self._preview_matrix = run_serialized(fit_preview, self.load_autoencoder())
        return self._preview_matrix

    def pin(self, name: str) -> Any:
        """A part that stays in memory until `release_all`: the caller may change it."""
        self._pinned.add(name)
        return self._load(name)

    def release(self, name: str) -> None:
        """Take a part out of memory, unless it is pinned or `keep_loaded` says that all parts stay."""
        if not self.keep_loaded and name not in self._pinned:
            self._drop(name)

    def release_all(self) -> None:
        """Take every part out of memory, pinned ones too, and what is known of prompts."""
        self._pinned.clear()
        self._features.clear()
        for name in list(self.loaded):
            self._drop(name)

    def _drop(self, name: str) -> None:
        if self.loaded.pop(name, None) is None:
            return
        if name == "transformer":
            self.loras.release()
        mx.clear_cache()  # MLX keeps freed memory for itself; this hands it back

    # ------------------------------------------------------------ prompts

    def encode_prompt(self, prompt: str | list[str]) -> Features:
        """Text features (1, tokens, features), or a row per prompt of a list; of Z-Image a list: lengths differ."""
        [features] = run_serialized(self.encode_prompts, check_prompts(prompt))
        return features[0] if isinstance(features, list) and isinstance(prompt, str) else features

    def encode_prompts(self, *batches: list[str]) -> list[Features]:
        """The features of each batch of prompts; those of the last call are known and read no encoder.

        The encoder is released before this returns, so that the transformer's weights find its place free.
        """
        last = {} if "text_encoder" in self._pinned else self._features  # a pinned encoder may have been changed
        features = {tuple(batch): last[tuple(batch)] for batch in batches if tuple(batch) in last}
        missing = [batch for batch in batches if tuple(batch) not in features]
        if missing:
            for encoded, batch in zip(self.encode_each(missing), missing):
                features[tuple(batch)] = encoded
        self._features = features
        return [features[tuple(batch)] for batch in batches]

    def encode_each(self, batches: Iterable[list[str]]) -> Iterator[Features]:
        """The features of one batch of prompts after another, by an encoder that is read once and then released."""
        encoder = self.load_text_encoder()
        tokenizer = self.load_tokenizer()
        try:
            for batch in batches:
                encoded = self.info.family.encode(encoder, tokenizer, batch, self.info.max_length)
                mx.eval(encoded)  # or the features, not computed yet, would hold on to the encoder
                yield encoded
        finally:
            del encoder
            self.release("text_encoder")

    # ------------------------------------------------------------ memory

    def plan_memory(self, request: Request, bits: float | tuple[float, float] | None = None) -> MemoryPlan:
        """The bytes that a request takes, with the parts as they are loaded here or in so many bits per weight."""
        plan = plan_model(
            self.checkpoint, width=request.width, height=request.height, bits=bits or self.bits,
            reference_tokens=sum(gh * gw for gh, gw in request.reference_grids), b=len(request.prompts),
            prompts=[*request.prompts, request.negative_prompt], machines=self.machines,
        )  # fmt: skip
        return plan._replace(transformer=plan.transformer + self.loras.nbytes)

    def check_memory(self, request: Request) -> None:
        """Raises MemoryLimitError for a request that this machine cannot hold, with what would fit."""
        choice = () if self.checkpoint.is_quantized else FEWER_BITS
        smaller = {bits: self.plan_memory(request, QUANT_SPECS[bits].bits_per_weight) for bits in choice}
        # several machines look at the smallest of them, or one alone would refuse
        total = None if self.group is None else least(machine_memory()[0], self.group)
        check_memory(self.plan_memory(request), smaller, total=total)

    def offload_if_needed(self, request: Request) -> None:
        """Release the transformer after the last step, if the decoder or the next prompt needs its place."""
        if sys.is_finalizing():  # a stream that was left open ends with the process, where MLX has ended already
            return
        if not all_parts_fit(self.plan_memory(request)):
            self.release("transformer")

    def check_finite(self, latents: mx.array) -> None:
        """Refuse to make a picture of numbers that have grown beyond all bounds. Raises UserError."""
        if mx.isfinite(latents).all().item():
            return
        way_out = "give its adapters smaller scales" if self.loras else "take dtype=mx.float32, less noise or guidance"
        raise UserError(
            f"{self.info.name} has computed numbers that are not finite, of which no picture can be made: {way_out}, "
            "or download the weights again."
        )

    # ------------------------------------------------------------ what is said of it

    def metadata(self) -> dict[str, Any]:
        """What a picture remembers of the model, beside the request: bits, exchanged parts, adapters."""
        facts: dict[str, Any] = {}
        if self.checkpoint.quantize:
            facts["quantize"] = self.checkpoint.quantize
        if self.checkpoint.chosen:
            facts["parts"] = self.checkpoint.chosen
        if self.loras:
            facts["loras"] = self.loras.metadata()
        return facts

    def to_html(self) -> str:
        """A table of the parts, which a notebook shows for a model."""
        heads = (self.info.name, "weights", "each", "memory", "loaded")
        configs = self.checkpoint.configs
        lines = [
            ("text_encoder", configs.text_encoder, self.bits[1]),
            ("transformer", configs.transformer, self.bits[0]),
            ("autoencoder", configs.autoencoder, 32.0),
        ]
        rows = "".join(f"<th>{escape(head)}</th>" for head in heads)
        rows = f"<thead><tr>{rows}</tr></thead><tbody>"
        for name, cfg, bits in lines:
            network: type[nn.Module] = network_of(cfg)
            count = count_parameters(network, cfg)
            memory = f"{count * bits / 8e6:,.0f} MB"
            loaded = "yes" if name in self.loaded else "no"
            cells = (name.replace("_", " "), f"{count:,}", f"{bits:.3g} bits", memory, loaded)
            rows += "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
        return f"<table>{rows}</tbody></table>"
