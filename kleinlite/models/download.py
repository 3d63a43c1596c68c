"""From a model's name to its files on this machine. No other module imports huggingface_hub.

>>> from kleinlite.models import download
>>> folder = download.fetch_model("4b")  # what is not on this machine is fetched from huggingface.co

huggingface_hub downloads, resumes and keeps the cache that all of Hugging Face's tools share. Ours to say: which files
of a repository we need, their size and license before the first byte, whether weights are whole, and what goes wrong.
"""

import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import FileError, HubError, MissingFileError, UserError, printable, say_once
from ..files import check_disk_space, spell
from .files import ModelFolder, check_file, open_weight_file, open_weights
from .folders import INDEXES, find_index
from .other_programs import MFLUX_FILE, MFLUX_RECORD, find_mlx_folder
from .registry import BUNDLED, DECODERS, FOLDERS, MODELS, find_released

__all__ = ["Access", "download", "fetch_model", "fetch_parts", "find_cached", "plan_download", "required_repositories"]

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
    license: str = ""  # of a released model

    def takes(self, file: str) -> bool:
        """In the root of a model's folder the same weights lie once more as a single file, and pictures."""
        folder, _, name = file.rpartition("/")
        if self.files or not folder:
            return file in (self.files or (*INDEXES, MFLUX_RECORD))
        if name.endswith(".safetensors"):
            return folder in self.parts
        return folder in (*FOLDERS.values(), "tokenizer", "scheduler") and name.endswith((".json", ".txt", ".jinja"))

    def find_trouble(self, folder: Path) -> str | None:
        """What a folder with its files lacks, or what in it is damaged, by the headers of the weights."""
        tokenizer = ModelFolder(folder, {}).part("tokenizer") / "tokenizer.json"
        try:
            saved = not self.files and not find_index(folder).exists() and find_mlx_folder(folder)
            ours = [] if saved else [find_index(folder), *(folder / f"{part}/config.json" for part in FOLDERS.values())]
            for path in [folder / file for file in self.files] or [*ours, tokenizer]:
                check_file(path)
            for place in [file for file in self.files if file.endswith(".safetensors")] or self.parts:
                open_weights(folder / place)
        except (UserError, FileError) as error:
            return str(error)
        return None

    def place(self, folder: Path) -> Path:
        """What is opened: the folder, or the one file that is wanted of it."""
        return folder / self.files[0] if len(self.files) == 1 else folder


def required_repositories(name: str, revision: str | None = None) -> list[Repository]:
    """The repositories of a model, the one that has the transformer first. Raises UserError for what is no name."""
    if name.lower() in DECODERS:
        return [Repository(*DECODERS[name.lower()])]
    model = find_released(name)
    if model is None:
        if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", name):
            raise UserError(explain_no_model(name))
        return [Repository(name, revision=revision)]
    own = Repository(model.repo, revision=revision, license=model.size.license)
    if not model.parts_from:
        return [own]
    return [own._replace(files=(model.file,)), without_transformer(model.parts_from)]


def without_transformer(name: str, revision: str | None = None) -> Repository:
    """The repository of a model's other parts, whose transformer's weights are not taken."""
    repository = required_repositories(name, revision)[-1]
    return repository._replace(files=(), parts=tuple(FOLDERS.values())[1:])


def explain_no_model(name: str) -> str:
    """The sentence for what is neither here nor the name of a repository, with a near name if there is one."""
    if "/" in name:
        near = get_close_matches(Path(name).name, [path.name for path in Path(name).parent.glob("*")], 1)
        way_out = f"there is {near[0]}." if near else "name one that does, or a model of `kleinlite models`."
        return f"The folder or file {name!r} does not exist: {way_out}"
    known = [*BUNDLED, *MODELS]
    near = get_close_matches(name.lower(), known, 1, cutoff=0.7)
    near = near or [part for part in sorted(known, key=len, reverse=True) if part in name.lower()]  # of klein-4b
    way_out = f"did you mean {near[0]}?" if near else f"name one of {', '.join(known)}, owner/name, a folder or a file."
    return f"There is no model, folder or file called {name!r}: {way_out}"


# ---------------------------------------------------------------- what is on this machine


def find_file(repository: Repository, name: str, access: Access = ANYWHERE) -> Path | None:
    """Where the cache has a file of a repository. Asks no network."""
    with explained(repository):
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(repository.repo, name, access.cache_dir, repository.revision)
    return Path(path) if isinstance(path, str) else None


def find_folder(repository: Repository, access: Access) -> Path | None:
    """The folder of a repository's files on this machine, whole or not."""
    names = repository.files[:1] or (*INDEXES, MFLUX_FILE)
    files = ((find_file(repository, name, access), name.count("/")) for name in names)
    return next((file.parents[depth] for file, depth in files if file), None)


def find_whole(repositories: list[Repository], access: Access) -> Path | None:
    """What the first of them is opened by, if all are on this machine and whole."""
    places = []
    for repository in repositories:
        folder = find_folder(repository, access)
        if folder is None or repository.find_trouble(folder):
            return None
        places.append(repository.place(folder))
    return places[0]


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
    return repository.place(found)


def find_cached(name: str) -> Path | None:
    """What `fetch_model` gives, if all of it is on this machine and whole, else None. Asks no network."""
    return find_whole(required_repositories(name), ANYWHERE)


def find_cached_parts(name: str) -> Path | None:
    """What `fetch_parts` gives, if all of it is on this machine and whole, else None. Asks no network."""
    return find_whole([without_transformer(name)], ANYWHERE)


def fetch_model(name: str, access: Access = ANYWHERE) -> Path:
    """Where a model's files are on this machine; what is not here is downloaded, if `access` allows it.

    name: of `MODELS` or `DECODERS`, or a repository `owner/name` with a model in the released layout, or in that of
    `kleinlite quantize`. The path is the model's folder; of a model that is one file, as "4b-fp8", it is that file, and
    `fetch_parts` tells where its other parts are. Raises UserError, FileError or HubError.
    """
    return fetch(required_repositories(name, access.revision), access)


def fetch_parts(name: str, access: Access = ANYWHERE) -> Path:
    """The folder of a model's other parts, without weights for the transformer; for "4b-fp8" it is that of "4b"."""
    return fetch([without_transformer(name, access.revision)], access)


def fetch(repositories: list[Repository], access: Access) -> Path:
    """What the first of them is opened by. Raises UserError, FileError or HubError."""
    found = find_whole(repositories, access)
    if found:
        return found
    from huggingface_hub import is_offline_mode

    if not access.local_files_only and not is_offline_mode():
        return download(repositories, access)
    others = [find_other_revision(repository, access) for repository in repositories]
    if others[0] and all(others):
        return others[0]
    way_out = "fetch it first, without the offline switch" if access.local_files_only else "unset HF_HUB_OFFLINE"
    raise MissingFileError(
        f"{repositories[0].repo} is not on this machine, or not all of it, and nothing may be downloaded: {way_out}, "
        "or use a model that needs no download, such as nano."
    )


# ---------------------------------------------------------------- the download


class DownloadPlan(NamedTuple):
    """What the download of a repository would do."""

    files: list[str]
    missing: int  # bytes that are not here yet
    cache: Path
    text: str  # for people: license and size


def plan_download(repository: Repository, access: Access = ANYWHERE) -> DownloadPlan:
    """Asks the hub what there is to fetch. Raises UserError if a repository holds no model."""
    with explained(repository):
        from huggingface_hub import HfApi, constants

        cache = Path(access.cache_dir or constants.HF_HUB_CACHE)
        api = HfApi(token=access.token)
        info = api.model_info(repository.repo, revision=repository.revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or () if repository.takes(file.rfilename)}
        card: Any = info.card_data or {}
    index = MFLUX_FILE if MFLUX_FILE in sizes else INDEXES[0]
    needed = repository.files or (index, *(f"{part}/" for part in FOLDERS.values()))
    lacking = [place for place in needed if not any(place in file for file in sizes)]
    if lacking:
        raise UserError(
            f"{repository.repo} on the hub has no {' and no '.join(lacking)}: it is not a model in the released "
            "layout (model_index.json, transformer/, text_encoder/, vae/, tokenizer/), nor one of mflux. What "
            f"flux3-mlx has saved is read from a folder: `hf download {repository.repo} --local-dir FOLDER`."
        )
    this = repository._replace(revision=info.sha)
    missing = sum(size for file, size in sizes.items() if not find_file(this, file, access))
    license = repository.license or str(card.get("license_name") or card.get("license") or "not stated")
    gated = ", gated" if info.gated else ""
    unrun = ", not run by kleinlite's authors" if repository.license else ""
    text = (
        f"{repository.repo}: license {printable(license)[:100]}{gated}{unrun}; {len(sizes)} files of "
        f"{sum(sizes.values()) / 1e6:,.1f} MB, of which {missing / 1e6:,.1f} MB go into {cache}"
    )
    return DownloadPlan(list(sizes), missing, cache, text)


def download(repositories: list[Repository], access: Access = ANYWHERE) -> Path:
    """As `fetch`, and what is newer on the hub is fetched, too.

    What, how much and under which license is logged before the first byte. Raises UserError, FileError or HubError.
    """
    for repository in repositories:
        remove_damaged(repository, find_folder(repository, access))  # or it would be taken for whole
    plans = [plan_download(repository, access) for repository in repositories]
    missing = sum(plan.missing for plan in plans)
    if missing:
        LOG.warning("%s", "\n".join(plan.text for plan in plans))  # a warning is heard where nobody has set up logging
        check_disk_space(plans[0].cache, missing)
    places = []
    for repository, planned in zip(repositories, plans):
        how = access._replace(revision=repository.revision)._asdict()
        with explained(repository):
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(repository.repo, allow_patterns=planned.files, **how))
        remove_damaged(repository, folder)
        if trouble := repository.find_trouble(folder):
            raise UserError(f"{repository.repo} on the hub is not whole ({trouble.rstrip('.')}): take another model.")
        places.append(repository.place(folder))
    return places[0]


def remove_damaged(repository: Repository, folder: Path | None) -> None:
    """Take those files of weights out of the cache that are damaged, which headers and lengths tell."""
    if folder is None:
        return
    for path in Path(spell(folder)).rglob("*.safetensors"):  # what has an odd name is not damaged
        if repository.takes(path.relative_to(folder).as_posix()):
            try:
                open_weight_file(path)
            except (UserError, FileError) as error:
                LOG.warning("%s It is removed.", error)
                path.resolve().unlink(missing_ok=True)
                path.unlink(missing_ok=True)  # of Windows' cache, where it is no link, there is nothing left


@contextmanager
def explained(repository: Repository) -> Iterator[None]:
    """Within, only huggingface_hub is at work: what it raises, its import too, becomes a sentence."""
    repo = repository.repo
    revision = repository.revision
    try:
        with warnings.catch_warnings(action="ignore"):  # a notebook without ipywidgets gets plain bars
            import tqdm.auto  # noqa: F401
        yield
    except Exception as error:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if "GatedRepoError" in kinds:
            way_out = f"accept its license at https://huggingface.co/{repo}, log in with `hf auth login`, and try again"
            raise UserError(f"{repo} is gated: {way_out}.") from error
        if "RevisionNotFoundError" in kinds:
            raise UserError(f"{repo} has no revision {revision!r}: name a branch, a tag or a commit.") from error
        if kinds & {"RepositoryNotFoundError", "HFValidationError"}:
            raise UserError(
                f"There is no folder or file {repo}, and the hub shows no repository of that name: check the name or, "
                "if it is private, log in with `hf auth login`."
            ) from error
        why = str(error.__cause__ or error).strip().split("\n")[0].split(" for url")[0][:160].rstrip(".: ")
        words = ("HF_", "SSL_CERT", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
        named = sorted(name for name in os.environ if name.upper().startswith(words) and "TOKEN" not in name)
        check = f"the network and the variables {', '.join(named)}" if named else "the network"
        raise HubError(
            f"{repo} could not be fetched from the hub ({why or type(error).__name__}): check {check}, and try again; "
            "or use a model that needs no download, such as nano."
        ) from error
