"""`kleinlite download`: a model, or what is new in it, and where it is."""

import argparse
from pathlib import Path

from ..errors import UserError
from ..models.download import download, find_cached, plan_download, required_repositories
from ..models.registry import find_bundled, find_released
from .shared import ctrl_c


def run(args: argparse.Namespace) -> None:
    if find_bundled(args.model):
        return print(f"{args.model} comes with kleinlite: there is nothing to download.")
    if Path(args.model).exists():
        raise UserError(f"{args.model} is on this machine already: name a model of `kleinlite models`, or owner/name.")
    repositories = required_repositories(args.model)
    model = find_released(args.model)
    if args.plan and model:  # the registry knows it all, and no network is asked
        terms = f"license {model.size.license}{', gated' * model.size.gated}, not run by kleinlite's authors"
        here = "all of it is here" if find_cached(args.model) else "less what is here already"
        return print(f"{model.repo}: {terms}; {model.download_bytes / 1e9:.1f} GB, {here}.")
    with ctrl_c(at_once=True):
        if args.plan:
            return print("\n".join(plan_download(repository).text for repository in repositories))
        print(download(repositories))
