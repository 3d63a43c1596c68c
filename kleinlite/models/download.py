"""From a model's name to its files on this machine: which files, what they cost, and who fetches them.

>>> from kleinlite.models import download
>>> folder = download.fetch_model("4b")  # what is not on this machine is fetched from huggingface.co

huggingface_hub downloads, behind the door `hub`, into the cache that all of Hugging Face's tools share, so that nothing
is fetched twice. Ours to say is which files of a repository we need, their size and licence before the first byte,
whether what lies here is whole (without asking the network), and a sentence for each way in which it can fail.
"""

import contextlib
import json
import re
import shutil
import sys
from collections.abc import Collection
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path

from ..errors import FileError, MissingFileError, UserError
from ..files import check_disk_space
from .files import INDEX, INDEXES
from .hub import (
    RemoteFile,
    ask_hub,
    cache_root,
    fetch_file,
    find_damage,
    find_snapshot,
    is_here,
    is_offline,
    note_commit,
    remove_leftovers,
    repository_folder,
)  # fmt: skip
from .registry import BUNDLED, FOLDERS, MODELS, SMALL_DECODER, SMALL_DECODER_REPO, find_released

__all__ = ["DownloadPlan", "download_model", "fetch_model", "fetch_parts", "find_cached", "plan_offline"]

# What we take of a repository. In its root lie the same weights once more as a single file, and pictures.
TAKEN_FOLDERS = (*FOLDERS.values(), "tokenizer", "scheduler")
TOKENIZERS = ("tokenizer/tokenizer.json", "text_encoder/tokenizer.json")
SUFFIXES = (".json", ".safetensors", ".txt", ".jinja")

# ---------------------------------------------------------------- what a repository must have


@dataclass(frozen=True)
class Repository:
    """A repository, and what we need of it: a model's folder, or these files of its root alone."""

    repo: str
    files: tuple[str, ...] = ()
    transformer: bool = True  # whether the transformer's weights are wanted, too

    def needs(self, file: str) -> bool:
        """Whether we take this file."""
        folder, _, name = file.rpartition("/")
        if self.files or not folder:
            return file in (self.files or INDEXES)
        wanted = self.transformer or folder != "transformer" or name == "config.json"
        named = re.fullmatch(r"[\w.-]+", name, re.ASCII)  # a hub may list any name
        return bool(wanted and named and folder in TAKEN_FOLDERS and name.endswith(SUFFIXES))

    def missing_files(self, files: Collection[str]) -> list[str]:
        """What must be there and is not, of a list of file names; a folder where all of it is missing."""
        parts = list(FOLDERS.values())
        index = next((name for name in INDEXES if name in files), INDEX)
        tokenizer = next((name for name in TOKENIZERS if name in files), TOKENIZERS[0])
        needed = [index, *(f"{part}/config.json" for part in parts), tokenizer]
        needed += [f"{part}/*.safetensors" for part in parts if self.transformer or part != "transformer"]
        folders = {file.partition("/")[0] for file in files}
        missing = []
        for pattern in self.files or needed:
            folder, slash, _ = pattern.partition("/")
            if not any(fnmatch(file, pattern) for file in files):
                missing.append(f"{folder}/" if slash and folder not in folders else pattern)
        return list(dict.fromkeys(missing))


def required_repositories(name: str) -> list[Repository]:
    """The repositories of a model, the one that has the transformer first. Raises ValueError for what is no name."""
    if name.lower() == SMALL_DECODER:
        return [Repository(SMALL_DECODER_REPO, ("config.json", "diffusion_pytorch_model.safetensors"))]
    model = find_released(name)
    if model and model.parts_from:
        return [Repository(model.repo, (model.file,)), Repository(MODELS[model.parts_from].repo, transformer=False)]
    if model:
        return [Repository(model.repo)]
    if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", name):
        raise UserError(explain_no_model(name))
    return [Repository(name)]


def explain_no_model(name: str) -> str:
    """The sentence for what is neither here nor the name of a repository, with a near name if there is one."""
    if "/" in name:
        path = Path(name)
        beside = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        near = get_close_matches(path.name, beside, 1)
        hint = f"there is {path.parent / near[0]}" if near else "name one that does, or a model of `kleinlite models`"
        return f"The folder or file {name!r} does not exist: {hint}."
    near = get_close_matches(name.lower(), [*BUNDLED, *MODELS], 1, cutoff=0.7)
    if near:
        return f"There is no model, folder or file called {name!r}: did you mean {near[0]}?"
    return (
        f"There is no model, folder or file called {name!r}. Known models: {', '.join([*BUNDLED, *MODELS])}; or "
        "give a hub repository (owner/name), a folder in the released layout, or a .safetensors file."
    )


# ---------------------------------------------------------------- what is on this machine


def missing_files(folder: Path, repository: Repository) -> list[str]:
    """What a folder still lacks. A damaged file is as good as missing."""
    here = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    here = {file for file in here if repository.needs(file)}
    missing = repository.missing_files(here)
    for file in sorted(here):
        if file.endswith(".safetensors.index.json"):
            # A bad index lacks nothing here: `files.open_weights` has the sentence for it.
            with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
                shards = json.loads((folder / file).read_text(encoding="utf-8"))["weight_map"].values()
                missing += sorted({f"{file.partition('/')[0]}/{shard}" for shard in shards} - here)
        elif find_damage(folder / file):
            missing.append(file)
    return missing


def find_folder(repository: Repository) -> Path | None:
    """The folder of a repository's files on this machine, complete or not; None if there is none."""
    snapshots = (find_snapshot(repository.repo, file) for file in repository.files[:1] or INDEXES)
    return next((folder for folder in snapshots if folder), None)


def complete_folders(repositories: list[Repository]) -> list[Path] | None:
    """The folders on this machine, if all of them are here and complete."""
    folders = []
    for repository in repositories:
        folder = find_folder(repository)
        if folder is None or missing_files(folder, repository):
            return None
        folders.append(folder)
    return folders


def model_path(name: str, folder: Path) -> Path:
    """What a model is opened by: its folder, or the one file of a released model that is one."""
    model = find_released(name)
    return folder / model.file if model and model.file else folder


def find_cached(name: str) -> Path | None:
    """What `fetch_model` gives, if all of it is on this machine and complete, else None. Asks no network."""
    folders = complete_folders(required_repositories(name))
    return model_path(name, folders[0]) if folders else None


def fetch_model(name: str, *, offline: bool = False) -> Path:
    """Where a model's files are on this machine; what is not here is downloaded.

    name: one of `MODELS`, `"small-decoder"`, or a repository `owner/name` that has a model in the released layout
    or in the one that `kleinlite quantize` writes. The path is the model's folder; of a model that is one file (such
    as "4b-fp8") it is that file, and `fetch_parts` tells where its other parts are.
    offline: download nothing; so does HF_HUB_OFFLINE. Raises UserError, FileError or HubError.
    """
    return model_path(name, fetch_repositories(name, required_repositories(name), offline)[0])


def fetch_parts(name: str, *, offline: bool = False) -> Path:
    """The folder of a model's other parts: as `fetch_model`, but without weights for the transformer.

    For a model that is one file this is the folder of another: "4b-fp8" → that of "4b".
    """
    return fetch_repositories(name, [Repository(required_repositories(name)[-1].repo, transformer=False)], offline)[0]


def fetch_repositories(name: str, repositories: list[Repository], offline: bool) -> list[Path]:
    """The folders of what is needed, downloaded if need be and allowed."""
    folders = complete_folders(repositories)
    if folders:
        return folders
    if not offline and not is_offline():
        return download_model(name, repositories)
    lacks = []
    for repository in repositories:
        folder = find_folder(repository)
        if folder:
            lacks.append(f"{folder} lacks {', '.join(missing_files(folder, repository))}")
    why = f" ({'; '.join(lacks)})" if lacks else ""
    way_out = "fetch it first, without the offline switch" if offline else "unset HF_HUB_OFFLINE"
    raise MissingFileError(
        f"{repositories[0].repo} is not on this machine, or not all of it{why}, and nothing may be downloaded: "
        f"{way_out}, or use a model that needs no download, such as nano."
    )


# ---------------------------------------------------------------- the download


@dataclass(frozen=True)
class DownloadPlan:
    """What a download would do; as text, the table that is shown before it starts."""

    name: str
    files: list[RemoteFile]
    missing: list[RemoteFile]  # those of them that are not here yet
    license: str
    gated: bool

    def __str__(self) -> str:
        unrun = "; kleinlite's authors have not run it yet" if find_released(self.name) else ""
        lines = [f"{self.name}: licence {self.license}{', gated' if self.gated else ''}{unrun}"]
        for repo in dict.fromkeys(file.repo for file in self.files):
            lines.append(f"{repo} → {repository_folder(repo)}")
            places: dict[str, list[RemoteFile]] = {}
            for file in self.files:
                if file.repo == repo:
                    folder, slash, _ = file.name.rpartition("/")
                    places.setdefault(f"{folder}/" if slash else file.name, []).append(file)
            lines += [self._format_row(place, files) for place, files in places.items()]
        return "\n".join([*lines, self._format_row("in all", self.files)])

    def _format_row(self, place: str, files: list[RemoteFile]) -> str:
        size = sum(file.nbytes for file in files)
        here = sum(file.nbytes for file in files if file not in self.missing)
        note = f", of which {format_bytes(here)} here already" if here else ""
        count = "?" if any("*" in file.name for file in files) else len(files)
        return f"  {place:18}{count:>3} {'file ' if count == 1 else 'files'}{format_bytes(size):>12}{note}"


def format_bytes(count: int) -> str:
    """10,000,000 → 10.0 MB."""
    for unit, size, digits in (("GB", 1e9, 2), ("MB", 1e6, 1), ("kB", 1e3, 1)):
        if count >= size:
            return f"{count / size:.{digits}f} {unit}"
    return f"{count} bytes"


def plan_download(name: str, repositories: list[Repository]) -> DownloadPlan:
    """Asks the hub what there is to fetch. Raises UserError if a repository holds no model."""
    files: list[RemoteFile] = []
    licenses = []
    gated = False
    for repository in repositories:
        remote = ask_hub(repository.repo)
        needed = [file for file in remote.files if repository.needs(file.name)]
        missing = repository.missing_files([file.name for file in needed])
        if missing:
            raise UserError(
                f"{repository.repo} on the hub has no {' and no '.join(missing)}: it is not a model in the released "
                "layout (model_index.json, transformer/, text_encoder/, vae/, tokenizer/)."
            )
        licenses.append(remote.license)
        gated = gated or remote.gated
        for folder in (*TAKEN_FOLDERS, ""):
            files += [file for file in needed if file.name.rpartition("/")[0] == folder]
    model = find_released(name)
    license = model.size.license if model else licenses[0]
    return DownloadPlan(name, files, [file for file in files if not is_here(file)], license, gated)


def plan_offline(name: str) -> str:
    """What fetching a released model takes, as the registry knows it, and the room for it; no network is asked.

    Configs, of some kilobytes each, are not counted. Raises UserError for a model that the registry does not know.
    """
    model = find_released(name)
    if model is None:
        raise UserError(f"Only the hub knows what {name!r} takes: plans are for the models of `kleinlite models`.")
    other = MODELS[model.parts_from].repo if model.parts_from else model.repo
    parts = ((model.repo, model.transformer_files), (other, model.size.files))
    files = [RemoteFile(repo, file, size, None, "") for repo, sizes in parts for file, size in sizes.items()]
    missing = [] if find_cached(name) else [file for file in files if not find_snapshot(file.repo, file.name)]
    root = cache_root()
    disk = next(folder for folder in (root, *root.parents) if folder.exists())
    plan = DownloadPlan(name, files, missing, model.size.license, model.size.gated)
    return f"{plan}\n{format_bytes(shutil.disk_usage(disk).free)} are free on that disk"


def download_model(name: str, repositories: list[Repository] | None = None) -> list[Path]:
    """Fetches what is missing, or newer on the hub; the folders of `repositories` (default: all that `name` needs).

    What, how much, under which licence and to where is on stderr before the first byte. Raises UserError, FileError or
    HubError.
    """
    repositories = repositories or required_repositories(name)
    plan = plan_download(name, repositories)
    remove_leftovers(plan.files)
    if plan.missing:
        print(plan, file=sys.stderr)
        check_space(plan.missing)
    for file in plan.missing:
        fetch_file(file)
    for file in {file.repo: file for file in plan.files}.values():
        note_commit(file)
    folders = complete_folders(repositories)
    if not folders:
        found = [(repository, find_folder(repository)) for repository in repositories]
        missing = [file for repository, folder in found if folder for file in missing_files(folder, repository)]
        raise UserError(f"{name} on the hub is not complete ({', '.join(missing)} missing): take another model.")
    return folders


def check_space(files: list[RemoteFile]) -> None:
    """Refuse a download for which the disk of the cache has no room. Raises FileError."""
    try:
        check_disk_space(cache_root(), sum(file.nbytes for file in files))
    except FileError as error:
        raise FileError(f"{str(error).rstrip('.')}, or set HF_HOME to a folder on another disk.") from None
