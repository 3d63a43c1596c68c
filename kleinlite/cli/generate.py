"""`kleinlite generate`: one picture, or one for each line of a file; under `mlx.launch` on several machines."""

import argparse
import contextlib
import itertools
import json
import os
import re
import sys
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.core as mx
from PIL import Image

from ..errors import ExistingFileError, FileError, UserError, printable
from ..files import check_replaceable
from ..inference import picture_file
from ..inference.loaded_model import LoadedModel
from ..inference.loras import Loras, add_loras, find_recorded_loras
from ..inference.machine_memory import FEWER_BITS, check_memory, plan_request
from ..inference.machines import from_first, say_who_is_lost
from ..inference.picture_memory import compute_dtype
from ..inference.request import Options, Request, check_request
from ..inference.serialized import run_serialized
from ..klein import Klein
from ..models.adapters import Adapter, open_adapter
from ..models.checkpoint import ModelInfo, name_parts
from ..models.download import Access, find_cached_parts
from ..models.facts import ModelFacts, find_facts, is_here
from ..models.places import find_told, tell
from ..nano.limits import describe_limits
from .shared import check_folder, ctrl_c, name_quantization
from .words import read_prompts


class Wish(NamedTuple):
    """What is to be drawn, and by what: as it was typed, else as the picture of --like says."""

    model: str
    quantize: int | str | None
    parts: Any  # as `Klein.from_pretrained` takes it
    adapters: list[tuple[Adapter, float]]  # and their scales
    prompts: list[str]
    options: Options


class Job(NamedTuple):
    """One picture of a list."""

    path: Path
    prompt: str
    seed: int


def run(args: argparse.Namespace) -> None:
    group = mx.distributed.init()
    with say_who_is_lost(), ctrl_c(at_once=True):
        generate(group, args)


def generate(group: mx.distributed.Group, args: argparse.Namespace) -> None:
    """Each machine its own share of --prompts, or all of them one picture together."""
    is_first = group.rank() == 0
    together = None if args.prompts else group
    wish = read_wish(args)
    access = Access(local_files_only=args.offline)
    facts = run_serialized(find_facts, wish.model, wish.quantize, wish.parts, dtype=compute_dtype(), access=access)
    if is_first or args.prompts:
        check_place(args)
    request = check_before_loading(facts, wish, 1 if together is None else group.size())
    seed = request.seeds[0] if wish.options["seed"] is not None else from_first(request.seeds[:1], group)[0]
    jobs = list_jobs(args, wish, seed)
    model = run_serialized(lambda: LoadedModel(facts.open(), group=together))
    klein = Klein(model)
    add_loras(klein.loras, wish.adapters)
    model.check_memory(request)  # before anything is said of it
    if is_first:
        for note in list_notes(request, klein.info, wish):
            print(printable(note), file=sys.stderr)
    title = wish.model if wish.quantize is None else f"{wish.model} in {name_quantization(wish.quantize)}"
    title += "".join(f" + {lora} × {scale:g}" for lora, scale in klein.loras.items())
    if args.prompts and args.output:
        args.output.mkdir(exist_ok=True)
    refused = 0
    for job in jobs[group.rank() :: group.size()] if args.prompts else jobs:  # every N-th on each of N machines
        start = time.perf_counter()
        options: Options = {**wish.options, "seed": job.seed}
        try:
            if args.prompts:
                made = check_request(klein.info, job.prompt, options).metadata(0) | model.metadata()
                if there := find_drawn(job.path, made):
                    print(printable(f"{there} is there already."))
                    continue
            picture = draw(klein, job.prompt, options, args.watch if is_first else None)
        except UserError as error:  # of a list, one prompt that is too long must not end the night's work
            if not args.prompts:
                raise
            print(printable(f"{job.path} is left out: {error}"), file=sys.stderr)
            refused += 1
            continue
        seconds = time.perf_counter() - start
        path = job.path
        if is_first or args.prompts:
            if args.prompts or not args.output:
                path = save_new(picture, path)
            else:
                save(picture, path)
        if is_first:
            about = f"{path}: {picture.width}x{picture.height}, {title}, seed {job.seed}, {seconds:.1f} s"
            print(printable(about), flush=True)
    if refused:
        raise UserError(f"{refused} of {len(jobs)} prompts were left out: change them, and start again.")


# ---------------------------------------------------------------- what is wished for


def read_wish(args: argparse.Namespace) -> Wish:
    """Everything that is asked for. Raises UserError."""
    like = {} if args.like is None else read_like(args)

    def pick(name: str, typed: Any, default: Any = None) -> Any:
        return like.get(name, default) if typed is None else typed

    prompt = pick("prompt", args.prompt)
    if args.prompts is not None and args.prompt is not None:
        raise UserError("A prompt and --prompts are given: leave one of them out.")
    if args.prompts is None and prompt is None:
        args.parser.error('say what to draw, in quotes, before --image and --lora: kleinlite generate "a red circle"')
    parts = args.parts or like.get("parts") or {}
    if args.decoder is not None:
        if isinstance(parts, str):
            raise UserError(f"All parts are those of {parts!r}: --decoder cannot replace one of them.")
        parts = {**name_parts(parts), "autoencoder": args.decoder}
    loras = find_recorded_loras(like, args.like) if args.lora is None else args.lora
    width, height = args.size or (like.get("width"), like.get("height"))
    options: Options = {
        "images": [picture_file.open_reference(path) for path in args.image or ()],
        "mask": None if args.mask is None else picture_file.open_picture(args.mask),
        "strength": pick("strength", args.strength),
        "extend": pick("extend", args.extend),
        "width": width,
        "height": height,
        "steps": pick("steps", args.steps),
        "guidance": pick("guidance", args.guidance),
        "negative_prompt": pick("negative_prompt", args.negative, ""),
        "seed": pick("seed", 0 if args.seed is None and args.prompts else args.seed),
        "progress": sys.stderr.isatty(),
    }
    return Wish(
        pick("model", args.model, "nano"), pick("quantize", args.quantize), parts,
        [(open_adapter(file), scale) for file, scale in loras],
        [prompt] if args.prompts is None else read_prompts(args.prompts), options,
    )  # fmt: skip


def read_like(args: argparse.Namespace) -> dict[str, Any]:
    """What the picture of --like says about itself, as far as it holds for this call. It may come from anybody."""
    file = args.like
    like = picture_file.read_metadata(file)
    near = Path(file).parent, Path()
    model = find_told(like["model"], *near)
    if args.model is None and not (model and is_here(model)):
        way_out = f"if you trust it, say --model {model}" if model else "name its folder or file with --model"
        raise UserError(f"{file} was drawn with {like['model']!r}, which is not on this machine: {way_out}.")
    same = args.model is None or like["model"] in (args.model, tell(args.model))
    like["model"] = model
    if not same:
        like = {name: value for name, value in like.items() if name not in ("steps", "guidance", "quantize", "parts")}
    for name, given, typed, way_out in (
        ("references", "from pictures", args.image, "name them with --image"),
        ("mask", "with a mask", args.mask, "name it with --mask"),
        ("noise", "with noise of its own", None if args.seed is None else "typed", "name a --seed"),
    ):
        if like.get(name) and not typed:
            raise UserError(f"{file} was drawn {given}, which it does not contain: {way_out}.")
    parts: Any = like.get("parts") or {}

    def find_part(told: str) -> str:
        place = find_told(told, *near)
        if place and (is_here(place) or (parts == told and find_cached_parts(place))):
            return place
        way_out = f"if you trust it, fetch it with `kleinlite download {place}`"
        if not place:
            way_out = f"put it beside the picture, or name it with {'--parts' if parts == told else '--decoder'}"
        raise UserError(f"{file} was drawn with parts of {told!r}, which is not on this machine: {way_out}.")

    if args.parts is None and isinstance(parts, dict):
        kept = {part: told for part, told in name_parts(parts).items() if part != "autoencoder" or not args.decoder}
        like["parts"] = {part: find_part(told) for part, told in kept.items()}
    elif args.parts is None:
        like["parts"] = find_part(parts)
    if "box" in like:  # it has the size of the picture that it was made from
        like = {name: value for name, value in like.items() if name not in ("width", "height")}
    return like


# ---------------------------------------------------------------- what is checked before gigabytes are read


def check_place(args: argparse.Namespace) -> None:
    """Refuse a place in which nothing could be saved."""
    folder = args.output or Path()
    if args.prompts is not None:
        check_folder(folder if os.path.lexists(folder) else folder.parent)
    for file in (args.watch, None if args.prompts else args.output or Path("picture.png")):
        if file:
            picture_file.check_png_name(file)
            check_replaceable(file)
            check_folder(file.parent)


def check_before_loading(facts: ModelFacts, wish: Wish, machines: int) -> Request:
    """Refuse what can be refused before gigabytes are fetched; the files have the last word."""
    options = wish.options
    if facts.configs is None:  # how its family counts guidance, its files will tell
        return check_request(facts.info, wish.prompts[0], {**options, "guidance": None})
    request = check_request(facts.info, wish.prompts[0], options)
    add_loras(Loras(facts.configs.transformer), wish.adapters)
    if not facts.here:
        fewer = () if wish.quantize or facts.is_quantized else FEWER_BITS
        check_memory(lambda bits: plan_request(facts, request, bits, machines), fewer)
    return request


def list_notes(request: Request, info: ModelInfo, wish: Wish) -> list[str]:
    """What is to be said before it is drawn: what will not come out, and why."""
    quick = request.steps > 1 and any(adapter.source == "one-look" for adapter, _ in wish.adapters)
    notes = ["one-look draws in a single step: add --steps 1."] * quick
    notes += info.family.notes(request.steps, info.distilled, wish.quantize)
    if not wish.adapters:
        size = request.width, request.height
        notes += [describe_limits(info.name, info.size, prompt, *size) for prompt in wish.prompts]
    return [note for note in dict.fromkeys(notes) if note]


# ---------------------------------------------------------------- pictures and their files


def make_stem(prompt: str) -> str:
    """The beginning of a file's name: a-red-circle."""
    plain = unicodedata.normalize("NFKD", prompt).encode("ascii", "ignore").decode().lower()
    return "-".join(re.findall("[a-z0-9]+", plain))[:60].strip("-") or "picture"


def number_names(path: Path) -> Iterator[Path]:
    """a-red-circle-7.png, a-red-circle-7-2.png, and so on."""
    return itertools.chain([path], (path.with_name(f"{path.stem}-{i}{path.suffix}") for i in itertools.count(2)))


def find_drawn(path: Path, made: dict[str, Any]) -> Path | None:
    """The picture under one of these names that was made as `made` says; the name alone says little of it."""
    for name in itertools.takewhile(os.path.lexists, number_names(path)):
        with contextlib.suppress(UserError, FileError):
            if picture_file.picture_info(name) == json.loads(json.dumps(made)):
                return name
    return None


def save_new(picture: Image.Image, path: Path) -> Path:
    """Write it under the first of these names that is free, whoever else looks for one; returns the name."""
    free = itertools.filterfalse(os.path.lexists, number_names(path))
    while True:
        name = next(free)
        with contextlib.suppress(ExistingFileError):
            save(picture, name, new=True)
            return name


def list_jobs(args: argparse.Namespace, wish: Wish, seed: int) -> list[Job]:
    """All that is to be drawn. The seeds of a list count up, so that it can be resumed.

    0003-a-red-circle-9.png is the third prompt, drawn with seed 9.
    """
    if args.prompts is None:
        [prompt] = wish.prompts
        return [Job(args.output or Path(f"{make_stem(prompt)}-{seed}.png"), prompt, seed)]
    folder = args.output or Path()
    return [
        Job(folder / f"{i + 1:04}-{make_stem(prompt)}-{seed + i}.png", prompt, seed + i)
        for i, prompt in enumerate(wish.prompts)
    ]


def save(picture: Image.Image, path: Path, new: bool = False) -> None:
    """Ctrl-C waits until the draft is taken away."""
    with ctrl_c(at_once=False):
        picture_file.save_picture(picture, path, new=new)


def draw(klein: Klein, prompt: str, options: Options, watch: Path | None) -> Image.Image:
    """One picture; watch: the file in which every step is shown."""
    for step in klein.stream(prompt, **options):
        if watch or not step.t_next:
            picture = cast(Image.Image, step.preview(fast=step.t_next > 0))  # of one prompt
        if watch:
            save(picture, watch)
    return picture
