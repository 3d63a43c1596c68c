"""From a model's name to its files on this machine. No other module imports huggingface_hub.

>>> from kleinlite.models import download
>>> folder = download.fetch_model("4b")  # what is not on this machine is fetched from huggingface.co

huggingface_hub downloads, resumes and keeps the cache that all of Hugging Face's tools share. Ours to say: which files
of a repository we need, their size and license before the first byte, whether weights are whole, and what goes wrong.
"""

import errno
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import FileError, HubError, MissingFileError, UserError, printable
from ..files import check_disk_space
from .fields import say_once
from .files import INDEXES, ModelFolder, check_file, find_index, open_weight_file, open_weights
from .registry import BUNDLED, DECODERS, FOLDERS, MODELS, find_released

__all__ = ["Access", "download_model", "fetch_model", "fetch_parts", "find_cached", "plan_download"]

LOG = logging.getLogger("kleinlite")


class Access(NamedTuple):
    """How the hub is asked, in the library's own words. revision: of the model, not of parts that it borrows."""

    revision: str | None = None
    token: str | bool | None = None
    cache_dir: str | Path | None = None
    local_files_only: bool = False


ANYWHERE = Access()


class Repository(NamedTuple):
    """A repository, and what we take of it: these files alone, or a model's folder with the weights of these parts."""

    repo: str
    files: tuple[str, ...] = ()
    parts: tuple[str, ...] = tuple(FOLDERS.values())
    revision: str | None = None

    def takes(self, file: str) -> bool:
        """In the root of a model's folder the same weights lie once more as a single file, and pictures."""
        folder, _, name = file.rpartition("/")
        if self.files or not folder:
            return file in (self.files or INDEXES)
        if name.endswith(".safetensors"):
            return folder in self.parts
        return folder in (*FOLDERS.values(), "tokenizer", "scheduler") and name.endswith((".json", ".txt", ".jinja"))

    def find_trouble(self, folder: Path) -> str | None:
        """What a folder with its files lacks, or what in it is damaged, by the headers of the weights."""
        tokenizer = ModelFolder(folder, {}).part("tokenizer") / "tokenizer.json"
        configs = [folder / part / "config.json" for part in FOLDERS.values()]
        try:
            for path in [folder / file for file in self.files] or [find_index(folder), tokenizer, *configs]:
                check_file(path)
            for place in [file for file in self.files if file.endswith(".safetensors")] or self.parts:
                open_weights(folder / place)
        except (UserError, FileError) as error:
            return str(error)
        return None


def required_repositories(name: str, revision: str | None = None) -> list[Repository]:
    """The repositories of a model, the one that has the transformer first. Raises UserError for what is no name."""
    if name.lower() in DECODERS:
        return [Repository(*DECODERS[name.lower()])]
    model = find_released(name)
    if model and model.parts_from:
        file = Repository(model.repo, (model.file,), revision=revision)
        return [file, without_transformer(Repository(MODELS[model.parts_from].repo))]
    if not model and not re.fullmatch(r"\w[\w.-]*/[\w.-]+", name):
        raise UserError(explain_no_model(name))
    return [Repository(model.repo if model else name, revision=revision)]


def without_transformer(repository: Repository) -> Repository:
    return repository._replace(files=(), parts=repository.parts[1:])


def explain_no_model(name: str) -> str:
    """The sentence for what is neither here nor the name of a repository, with a near name if there is one."""
    if "/" in name:
        return f"The folder or file {name!r} does not exist: name one that does, or a model of `kleinlite models`."
    near = get_close_matches(name.lower(), [*BUNDLED, *MODELS], 1, cutoff=0.7)
    if near:
        return f"There is no model, folder or file called {name!r}: did you mean {near[0]}?"
    return (
        f"There is no model, folder or file called {name!r}. Known models: {', '.join([*BUNDLED, *MODELS])}; or "
        "give a hub repository (owner/name), a folder in the released layout, or a .safetensors file."
    )


# ---------------------------------------------------------------- what is on this machine


def find_file(repository: Repository, name: str, access: Access = ANYWHERE) -> Path | None:
    """Where the cache has a file of a repository. Asks no network."""
    with explained(repository):
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(repository.repo, name, access.cache_dir, repository.revision)
    return Path(path) if isinstance(path, str) else None


def find_folder(repository: Repository, access: Access) -> Path | None:
    """The folder of a repository's files on this machine, whole or not."""
    files = (find_file(repository, name, access) for name in repository.files[:1] or INDEXES)
    return next((file.parent for file in files if file), None)


def find_folders(repositories: list[Repository], access: Access) -> list[Path] | None:
    folders = [folder for repository in repositories if (folder := find_folder(repository, access))]
    if len(folders) < len(repositories) or any(map(Repository.find_trouble, repositories, folders)):
        return None
    return folders


def find_other_revision(repository: Repository, access: Access) -> Path | None:
    """The newest whole revision in the cache, also one that no branch leads to: a copied cache may have no branches."""
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    home = Path(access.cache_dir or HF_HUB_CACHE) / repo_folder_name(repo_id=repository.repo, repo_type="model")
    newest_first = sorted(home.glob("snapshots/*"), key=lambda folder: folder.stat().st_mtime, reverse=True)
    found = next((folder for folder in newest_first if not repository.find_trouble(folder)), None)
    if repository.revision or not found:
        return None
    say_once(f"{repository.repo}: revision {found.name} is taken, the newest that is whole on this machine.")
    return found


def model_path(name: str, folder: Path) -> Path:
    """What a model is opened by: its folder, or the one file of a released model that is one."""
    model = find_released(name)
    return folder / model.file if model and model.file else folder


def find_cached(name: str, access: Access = ANYWHERE) -> Path | None:
    """What `fetch_model` gives, if all of it is on this machine and whole, else None. Asks no network."""
    folders = find_folders(required_repositories(name, access.revision), access)
    return model_path(name, folders[0]) if folders else None


def fetch_model(name: str, access: Access = ANYWHERE) -> Path:
    """Where a model's files are on this machine; what is not here is downloaded, if `access` allows it.

    name: of `MODELS` or `DECODERS`, or a repository `owner/name` with a model in the released layout, or in that of
    `kleinlite quantize`. The path is the model's folder; of a model that is one file, as "4b-fp8", it is that file, and
    `fetch_parts` tells where its other parts are. Raises UserError, FileError or HubError.
    """
    return model_path(name, fetch_repositories(name, required_repositories(name, access.revision), access)[0])


def fetch_parts(name: str, access: Access = ANYWHERE) -> Path:
    """The folder of a model's other parts, without weights for the transformer; for "4b-fp8" it is that of "4b"."""
    repository = without_transformer(required_repositories(name, access.revision)[-1])
    return fetch_repositories(name, [repository], access)[0]


def fetch_repositories(name: str, repositories: list[Repository], access: Access) -> list[Path]:
    folders = find_folders(repositories, access)
    if folders:
        return folders
    from huggingface_hub import is_offline_mode

    if not access.local_files_only and not is_offline_mode():
        return download_model(name, access, repositories)
    others = [find_other_revision(repository, access) for repository in repositories]
    if all(others):
        return [folder for folder in others if folder]
    way_out = "fetch it first, without the offline switch" if access.local_files_only else "unset HF_HUB_OFFLINE"
    raise MissingFileError(
        f"{repositories[0].repo} is not on this machine, or not all of it, and nothing may be downloaded: {way_out}, "
        "or use a model that needs no download, such as nano."
    )


# ---------------------------------------------------------------- the download


class DownloadPlan(NamedTuple):
    """What a download would do."""

    files: dict[str, list[str]]  # of each repository
    missing: int  # bytes that are not here yet
    cache: Path
    text: str  # a line for each repository


def plan_download(name: str, access: Access = ANYWHERE, repositories: list[Repository] | None = None) -> DownloadPlan:
    """Asks the hub what there is to fetch. Raises UserError if a repository holds no model."""
    model = find_released(name)
    unrun = ", not run by kleinlite's authors" if model else ""
    files: dict[str, list[str]] = {}
    lines = []
    missing = 0
    for repository in repositories or required_repositories(name, access.revision):
        with explained(repository):
            from huggingface_hub import HfApi, constants

            cache = Path(access.cache_dir or constants.HF_HUB_CACHE)
            api = HfApi(token=access.token)
            info = api.model_info(repository.repo, revision=repository.revision, files_metadata=True)
            sizes = {file.rfilename: file.size or 0 for file in info.siblings or () if repository.takes(file.rfilename)}
            card: Any = info.card_data or {}
        needed = repository.files or (INDEXES[0], *(f"{part}/" for part in FOLDERS.values()))
        lacking = [place for place in needed if not any(place in file for file in sizes)]
        if lacking:
            raise UserError(
                f"{repository.repo} on the hub has no {' and no '.join(lacking)}: it is not a model in the released "
                "layout (model_index.json, transformer/, text_encoder/, vae/, tokenizer/). What mflux, mlx-gen or "
                f"flux3-mlx has saved is read from a folder: `hf download {repository.repo} --local-dir FOLDER`."
            )
        files[repository.repo] = list(sizes)
        this = repository._replace(revision=info.sha)
        absent = sum(size for file, size in sizes.items() if not find_file(this, file, access))
        missing += absent
        license = model.size.license if model else str(card.get("license_name") or card.get("license") or "not stated")
        terms = f"license {printable(license)[:100]}{', gated' if info.gated else ''}{unrun}"
        size = f"{len(sizes)} files of {sum(sizes.values()) / 1e6:,.1f} MB"
        lines.append(f"{repository.repo}: {terms}; {size}, of which {absent / 1e6:,.1f} MB go into {cache}")
    return DownloadPlan(files, missing, cache, "\n".join(lines))


def download_model(name: str, access: Access = ANYWHERE, repositories: list[Repository] | None = None) -> list[Path]:
    """Fetches what is missing, or newer on the hub; the folders of `repositories` (default: all that `name` needs).

    What, how much and under which license is logged before the first byte. Raises UserError, FileError or HubError.
    """
    repositories = repositories or required_repositories(name, access.revision)
    for repository in repositories:
        remove_damaged(repository, find_folder(repository, access))  # or it would be taken for whole
    plan = plan_download(name, access, repositories)
    if plan.missing:
        LOG.warning("%s", plan.text)  # a warning is heard where nobody has set up logging
        check_disk_space(plan.cache, plan.missing)
    folders = []
    for repository in repositories:
        how: Any = {"revision": repository.revision, "token": access.token, "cache_dir": access.cache_dir}
        with explained(repository):
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(repository.repo, allow_patterns=plan.files[repository.repo], **how))
        remove_damaged(repository, folder)
        if trouble := repository.find_trouble(folder):
            raise UserError(f"{repository.repo} on the hub is not whole ({trouble.rstrip('.')}): take another model.")
        folders.append(folder)
    return folders


def remove_damaged(repository: Repository, folder: Path | None) -> None:
    """Take those files of weights out of the cache that are damaged, which headers and lengths tell."""
    if folder is None:
        return
    for path in folder.rglob("*.safetensors"):
        if repository.takes(path.relative_to(folder).as_posix()):
            try:
                open_weight_file(path)
            except UserError as error:
                LOG.warning("%s It is removed.", error)
                path.resolve().unlink()
                path.unlink(missing_ok=True)  # of Windows' cache, where it is no link, there is nothing left


@contextmanager
def explained(repository: Repository) -> Iterator[None]:
    """Within, only huggingface_hub is at work: what it raises, its import too, becomes a sentence."""
    try:
        yield
    except Exception as error:
        raise explain(repository, error) from error


def explain(repository: Repository, error: Exception) -> UserError | FileError:
    repo = repository.repo
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in kinds:
        page = f"https://huggingface.co/{repo}"
        return UserError(f"{repo} is gated: accept its license at {page}, log in with `hf auth login`, and try again.")
    if "RevisionNotFoundError" in kinds:
        return UserError(f"{repo} has no revision {repository.revision!r}: name a branch, a tag or a commit.")
    if kinds & {"RepositoryNotFoundError", "HFValidationError"}:
        return UserError(
            f"There is no folder or file {repo}, and the hub shows no repository of that name: check the name or, if "
            "it is private, log in with `hf auth login`."
        )
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return FileError("The disk of the hub's cache is full: make room, or set HF_HOME to a folder on another.")
    why = str(error.__cause__ or error).strip().split("\n")[0].split(" for url")[0][:160].rstrip(".: ")
    words = ("HF_", "SSL_CERT", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    named = sorted(name for name in os.environ if name.upper().startswith(words) and "TOKEN" not in name)
    check = f"check the network and the variables {', '.join(named)}" if named else "check the network"
    return HubError(
        f"{repo} could not be fetched from the hub ({why or type(error).__name__}): {check}, and try again; or use a "
        "model that needs no download, such as nano."
    )
