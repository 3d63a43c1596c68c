"""From a model's name to its files on this machine: which files, what they cost, and who fetches them. Hand-written.

>>> from kleinlite.models import download
>>> download.fetch_model("4b")  # the folder of its files; what is not on this machine is fetched from huggingface.co

huggingface_hub downloads, into the cache that all of Hugging Face's tools share (`HF_HOME` moves it), so that nothing
is fetched twice. Ours to say is which files of a repository we need, their size and licence before the first byte,
whether what lies here is whole (without asking the network), and a sentence for each way in which it can fail.
"""

import contextlib
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from .files import check_weights_file
from .hub import ask_hub, checked_answers, explain_errors
from .registry import BUNDLED, MODELS, PARTS, SMALL_DECODER, SMALL_DECODER_REPO, find_released

__all__ = ["DownloadPlan", "download_model", "fetch_model", "fetch_parts", "find_cached"]

# What we take of a repository. In its root lie the same weights once more as a single file, and pictures.
FOLDERS = (*PARTS, "tokenizer", "scheduler")
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
            return file in (self.files or ["model_index.json"])
        wanted = self.transformer or folder != "transformer" or name == "config.json"
        named = re.fullmatch(r"[\w.-]+", name, re.ASCII)  # a hub may list any name
        return bool(wanted and named and folder in FOLDERS and name.endswith(SUFFIXES))

    def missing_files(self, files: Collection[str]) -> list[str]:
        """What must be there and is not, of a list of file names; a folder where all of it is missing."""
        weighty = PARTS if self.transformer else [part for part in PARTS if part != "transformer"]
        needed = ["model_index.json", *(f"{part}/config.json" for part in PARTS), "tokenizer/tokenizer.json"]
        needed += [f"{part}/*.safetensors" for part in weighty]
        absent = [pattern for pattern in self.files or needed if not any(fnmatch(file, pattern) for file in files)]
        here = {file.partition("/")[0] for file in files}
        folder = lambda file: file.partition("/")[0]
        return list(dict.fromkeys(f"{folder(a)}/" if "/" in a and folder(a) not in here else a for a in absent))


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
        raise ValueError(
            f"There is no model, folder or file called {name!r}. Known models: {', '.join([*BUNDLED, *MODELS])}; or "
            "give a hub repository (owner/name), a folder in the released layout, or a .safetensors file."
        )
    return [Repository(name)]


# ---------------------------------------------------------------- what is on this machine


def find_damage(path: Path) -> str | None:
    """Why a file cannot be used, if it is one of weights and damaged."""
    try:
        if path.suffix == ".safetensors":
            check_weights_file(path)
    except ValueError as error:
        return str(error)
    return None


def missing_files(folder: Path, repository: Repository) -> list[str]:
    """What a folder still lacks. A damaged file is as good as missing."""
    here = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    here = {file for file in here if repository.needs(file)}
    missing = repository.missing_files(here)
    for file in sorted(here):
        if file.endswith(".safetensors.index.json"):
            # A bad index lacks nothing here: `opening` has the sentence for it.
            with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
                shards = json.loads((folder / file).read_text(encoding="utf-8"))["weight_map"].values()
                missing += sorted({f"{file.partition('/')[0]}/{shard}" for shard in shards} - here)
        elif find_damage(folder / file):
            missing.append(file)
    return missing


def cached_folder(repository: Repository) -> Path | None:
    """The folder of a repository's files on this machine, complete or not; None if there is none."""
    from huggingface_hub import try_to_load_from_cache

    with explain_errors(repository.repo):
        found = try_to_load_from_cache(repository.repo, (*repository.files, "model_index.json")[0])
    return Path(found).parent if isinstance(found, str) else None


def complete_folders(repositories: list[Repository]) -> list[Path] | None:
    """The folders on this machine, if all of them are here and complete."""
    folders = [cached_folder(repository) for repository in repositories]
    return folders if all(f and not missing_files(f, r) for f, r in zip(folders, repositories)) else None


def find_cached(name: str) -> Path | None:
    """What `fetch_model` gives, if all of it is on this machine and complete, else None. Asks no network."""
    folders, model = complete_folders(required_repositories(name)), find_released(name)
    return folders and (folders[0] / model.file if model and model.file else folders[0])


def fetch_model(name: str, *, offline: bool = False) -> Path:
    """Where a model's files are on this machine; what is not here is downloaded.

    name: one of `MODELS`, `"small-decoder"`, or a repository `owner/name` that has a model in the released layout
    or in the one that `kleinlite quantize` writes. The path is the model's folder; of a model that is one file (such
    as "4b-fp8") it is that file, and `fetch_parts` tells where its other parts are.
    offline: download nothing; so does HF_HUB_OFFLINE. What goes wrong is told in one sentence, as a ValueError or an
    OSError.
    """
    fetch_repositories(name, required_repositories(name), offline)
    return find_cached(name)


def fetch_parts(name: str, *, offline: bool = False) -> Path:
    """The folder of a model's other parts: as `fetch_model`, but without weights for the transformer.

    For a model that is one file this is the folder of another: "4b-fp8" → that of "4b".
    """
    return fetch_repositories(name, [Repository(required_repositories(name)[-1].repo, transformer=False)], offline)[0]


def fetch_repositories(name: str, repositories: list[Repository], offline: bool) -> list[Path]:
    """The folders of what is needed, downloaded if need be and allowed."""
    from huggingface_hub import constants

    folders = complete_folders(repositories)
    if folders:
        return folders
    if offline or constants.HF_HUB_OFFLINE:
        lacks = [f"{f} lacks {', '.join(missing_files(f, r))}" for r in repositories if (f := cached_folder(r))]
        why = f" ({'; '.join(lacks)})" if lacks else ""
        way_out = "fetch it first, without the offline switch" if offline else "unset HF_HUB_OFFLINE"
        raise FileNotFoundError(
            f"{repositories[0].repo} is not on this machine, or not all of it{why}, and nothing may be downloaded: "
            f"{way_out}, or use a model that needs no download, such as nano."
        )
    return download_model(name, repositories)


# ---------------------------------------------------------------- the download


@dataclass(frozen=True)
class RemoteFile:
    """A file that we need from a repository."""

    repository: Repository
    name: str
    nbytes: int
    sha256: str | None  # of the large ones
    commit: str

    @property
    def path(self) -> Path:
        """Where it is, or will be, in the cache."""
        return cache_folder(self.repository.repo) / "snapshots" / self.commit / self.name

    def is_cached(self) -> bool:
        return self.path.is_file() and not find_damage(self.path)


@dataclass(frozen=True)
class DownloadPlan:
    """What a download would do; as text, the table that is shown before it starts."""

    name: str
    files: list[RemoteFile]
    missing: list[RemoteFile]  # those of them that are not here yet
    license: str
    gated: bool

    def __str__(self) -> str:
        lines = [f"{self.name}: licence {self.license}{', gated' if self.gated else ''}"]
        for repository in dict.fromkeys(file.repository for file in self.files):
            lines.append(f"{repository.repo} → {cache_folder(repository.repo)}")
            places: dict[str, list[RemoteFile]] = {}
            for file in self.files:
                if file.repository == repository:
                    folder, slash, _ = file.name.rpartition("/")
                    places.setdefault(f"{folder}/" if slash else file.name, []).append(file)
            lines += [self._format_row(place, files) for place, files in places.items()]
        return "\n".join([*lines, self._format_row("in all", self.files)])

    def _format_row(self, what: str, files: list[RemoteFile]) -> str:
        size, here = sum(f.nbytes for f in files), sum(f.nbytes for f in files if f not in self.missing)
        note = f", of which {format_bytes(here)} here already" if here else ""
        return f"  {what:18}{len(files):3} {'file ' if len(files) == 1 else 'files'}{format_bytes(size):>12}{note}"


def format_bytes(count: int) -> str:
    """10,000,000 → 10.0 MB."""
    for unit, size, digits in (("GB", 1e9, 2), ("MB", 1e6, 1), ("kB", 1e3, 1)):
        if count >= size:
            return f"{count / size:.{digits}f} {unit}"
    return f"{count} bytes"


def cache_folder(repo: str) -> Path:
    """The folder of the cache that belongs to a repository."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def plan_download(name: str, repositories: list[Repository]) -> DownloadPlan:
    """Asks the hub what there is to fetch."""
    files, remotes = [], []
    for repository in repositories:
        remote = ask_hub(repository.repo)
        needed = {file: found for file, found in remote.files.items() if repository.needs(file)}
        if missing := repository.missing_files(needed):
            raise ValueError(
                f"{repository.repo} on the hub has no {' and no '.join(missing)}: it is not a model in the released "
                "layout (model_index.json, transformer/, text_encoder/, vae/, tokenizer/)."
            )
        remotes.append(remote)
        for folder in (*FOLDERS, ""):
            inside = {file: found for file, found in needed.items() if file.rpartition("/")[0] == folder}
            files += [RemoteFile(repository, file, *found, remote.commit) for file, found in inside.items()]
    model, missing = find_released(name), [file for file in files if not file.is_cached()]
    license = model.size.license if model else remotes[0].license
    return DownloadPlan(name, files, missing, license, any(remote.gated for remote in remotes))


def download_model(name: str, repositories: list[Repository] | None = None) -> list[Path]:
    """Fetches what is missing, or newer on the hub; the folders of `repositories` (default: all that `name` needs).

    What, how much, under which licence and to where is on stderr before the first byte.
    """
    from huggingface_hub import hf_hub_download

    repositories = repositories or required_repositories(name)
    plan = plan_download(name, repositories)
    if plan.missing:
        print(plan, file=sys.stderr)
        check_disk_space(plan.missing)
    for file in plan.missing:
        damaged = file.path.is_file() and not file.is_cached()
        with explain_errors(file.repository.repo), checked_answers(file.nbytes):
            hf_hub_download(file.repository.repo, file.name, revision=file.commit, force_download=damaged)
        check_arrived(file)
    for file in {file.repository: file for file in plan.files}.values():
        with explain_errors(file.repository.repo), checked_answers(file.nbytes):
            hf_hub_download(file.repository.repo, file.name)  # fetches nothing: the cache notes which commit `main` is
    folders = complete_folders(repositories)
    if not folders:
        missing = [file for repository in repositories for file in missing_files(cached_folder(repository), repository)]
        raise ValueError(f"{name} on the hub is not complete ({', '.join(missing)} missing): take another model.")
    return folders


def check_arrived(file: RemoteFile) -> None:
    """Refuse and remove a file that is not what the hub announced, or that lies damaged on the hub."""
    if file.sha256 and hash_file(file.path) != file.sha256:
        why = f"{file.name} of {file.repository.repo} did not arrive as it is on the hub, and was removed: try again."
    elif damage := find_damage(file.path):
        why = f"{file.name} came damaged from {file.repository.repo} and was removed: {damage}"
    else:
        return
    for path in (file.path.resolve(), file.path):
        path.unlink(missing_ok=True)
    raise ValueError(why)


def hash_file(path: Path) -> str:
    """The SHA-256 of a file of any size."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check_disk_space(files: list[RemoteFile]) -> None:
    """Refuse a download for which the disk has no room."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    disk = next(folder for folder in (cache, *cache.parents) if folder.exists())
    needed, free = sum(file.nbytes for file in files), shutil.disk_usage(disk).free
    if needed > free:
        raise OSError(
            f"The download needs {format_bytes(needed)} and the disk of {cache} has {format_bytes(free)} left: make "
            "room there, or set HF_HOME to a folder on another disk."
        )
