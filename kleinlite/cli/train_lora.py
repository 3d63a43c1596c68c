"""`kleinlite train-lora`: an adapter from a folder of pictures and captions."""

import argparse

from ..errors import UserError
from ..inference.loaded_model import LoadedModel
from ..inference.picture_memory import compute_dtype
from ..inference.serialized import run_serialized
from ..klein import Klein
from ..models.checkpoint import Checkpoint
from ..models.download import Access
from ..models.facts import ModelFacts, find_facts
from ..trainer.adapter import LoraTrainer, check_output
from ..trainer.folder import read_folder
from ..trainer.settings import Settings, check_base
from ..trainer.training_memory import check_plan, plan_training
from .shared import check_folder


def run(args: argparse.Namespace) -> None:
    out = args.output
    if out.suffix != ".safetensors" or out.is_dir():
        raise UserError(f"{out} is not an adapter's file: name one that ends in .safetensors.")
    check_folder(out.parent)
    check_output(out)
    settings = Settings(
        rank=args.rank, steps=args.steps, rate=args.rate, batch=args.batch, accumulate=args.accumulate,
        seed=args.seed, every=args.every, layout=args.layout,
    )  # fmt: skip
    access = Access(local_files_only=args.offline)
    facts = run_serialized(find_facts, args.model, args.quantize, args.parts, dtype=compute_dtype(), access=access)
    check_base(facts.info)
    examples = read_folder(args.folder, args.size)
    model: ModelFacts | Checkpoint = facts
    if facts.configs is None:  # of a repository that is not here, nothing is known
        model = run_serialized(facts.open)
        check_base(model.info)
    assert model.configs is not None
    first = examples[0]  # all have its sizes
    before = [picture.size for picture in first.references]
    size = first.picture.size
    plan = plan_training(model.configs, size, before, bits=model.bits, rank=settings.rank, b=settings.batch)
    width, height = size
    if (only := model.info.only_size) and (width, height) != (only, only):
        print(f"{model.info.name} draws {only}x{only} and learns best from such pictures: add --size {only}x{only}.")
    print(f"{len(examples)} pictures of {width}x{height}, at most {plan.peak_bytes / 1e9:.1f} GB of memory.")
    if args.plan:
        return
    check_plan(plan)
    klein = Klein(run_serialized(lambda: LoadedModel(facts.open())))
    trainer = LoraTrainer(klein, examples, out, settings)
    trainer.train()
    print(
        f"{out}: {out.stat().st_size / 1e6:.1f} MB; how it went is in {trainer.folder}. "
        f"Not there yet? The same command goes on with --steps {2 * args.steps}."
    )
