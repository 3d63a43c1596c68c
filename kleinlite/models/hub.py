"""The one door to the hub: what it has, what of it is in the cache, and one file fetched; each answer is checked.

An answer may come from a mirror, from a proxy or from a hotel's login page. huggingface_hub writes where the answer's
commit and hash say and takes as many bytes as come; so both are looked at here, in hooks of its own HTTP client, before
it believes them. What goes wrong becomes a sentence. No other module imports huggingface_hub.

`snapshot_download(dry_run=True)` would not do for the plan: it asks once more for each file, in threads that our hooks
take for somebody else's, knows neither hashes nor licence, and counts a damaged file as cached.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import operator
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import FileError, HubError, UserError, printable
from .files import open_weight_file

if TYPE_CHECKING:
    import httpx2 as httpx  # the one that huggingface_hub takes
    from huggingface_hub import ModelInfo

HUB = "https://huggingface.co"
LONGEST_WAIT = 60  # seconds that the hub may ask us to wait
LARGEST_ANSWER = 2**25  # bytes of what the hub says about a repository
COMMIT = r"[0-9a-f]{40}"
SHA256 = r"[0-9a-f]{64}"
ETAG = r'(W/)?"?([0-9a-f]{40}|[0-9a-f]{64})"?'


class RemoteFile(NamedTuple):
    """A file on the hub."""

    repo: str
    name: str
    nbytes: int
    sha256: str | None  # of the large ones
    commit: str

    @property
    def path(self) -> Path:
        """Where it is, or will be, in the cache."""
        return repository_folder(self.repo) / "snapshots" / self.commit / self.name


class RemoteRepository(NamedTuple):
    """What the hub says about a repository."""

    files: list[RemoteFile]
    license: str
    gated: bool


# ---------------------------------------------------------------- what is asked


def cache_root() -> Path:
    """The cache that all of Hugging Face's tools share; `HF_HOME` moves it."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def repository_folder(repo: str) -> Path:
    """The folder of the cache that belongs to a repository."""
    return cache_root() / f"models--{repo.replace('/', '--')}"


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids to ask any network."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def find_snapshot(repo: str, file: str) -> Path | None:
    """The folder of a repository's files in the cache, if this file is in it. Asks no network."""
    from huggingface_hub import try_to_load_from_cache

    with explain_errors(repo):
        path = try_to_load_from_cache(repo, file)
    return Path(path).parent if isinstance(path, str) else None


def ask_hub(repo: str) -> RemoteRepository:
    """The files of a repository and its licence. Raises UserError, FileError or HubError."""
    from huggingface_hub import HfApi

    with explain_errors(repo), checked_answers(LARGEST_ANSWER):
        try:
            return parse_model_info(repo, HfApi().model_info(repo, files_metadata=True, timeout=LONGEST_WAIT))
        except (TypeError, LookupError, AttributeError, RecursionError, ValueError) as error:
            if is_from_library(error):
                raise
            raise HubError("its answer is not what a hub says about a repository") from None


def parse_model_info(repo: str, info: ModelInfo) -> RemoteRepository:
    """What we need of `HfApi.model_info`. Raises one of many errors where it is not what it should be."""
    commit = info.sha or ""
    if not re.fullmatch(COMMIT, commit):
        raise ValueError
    files = []
    for sibling in info.siblings or ():
        nbytes = operator.index(sibling.size or 0)
        sha256 = sibling.lfs.sha256 if sibling.lfs else None
        if nbytes < 0 or not isinstance(sibling.rfilename, str) or not re.fullmatch(SHA256, sha256 or "0" * 64):
            raise ValueError
        files.append(RemoteFile(repo, sibling.rfilename, nbytes, sha256, commit))
    card: Any = info.card_data or {}
    license = card.get("license_name") or card.get("license") or "not stated"
    return RemoteRepository(files, printable(str(license))[:100], bool(info.gated))


def fetch_file(file: RemoteFile) -> None:
    """Fetch a file into the cache, in place of a damaged one that may be there. Raises as `ask_hub`."""
    from huggingface_hub import hf_hub_download

    damaged = file.path.is_file() and not is_here(file)
    with explain_errors(file.repo), checked_answers(file.nbytes):
        hf_hub_download(file.repo, file.name, revision=file.commit, force_download=damaged)
    check_arrived(file)


def note_commit(file: RemoteFile) -> None:
    """Let the cache know that the commit of this file, which is there, is the newest: nothing is fetched."""
    from huggingface_hub import hf_hub_download

    with explain_errors(file.repo), checked_answers(file.nbytes):
        hf_hub_download(file.repo, file.name)


def remove_leftovers(files: Iterable[RemoteFile]) -> None:
    """Remove what killed downloads of these files have left in the cache: their own parts older than an hour.

    huggingface_hub writes each try into a part of its own, up to the size of the file, and reads none of them again.
    """
    for file in files:
        for part in (repository_folder(file.repo) / "blobs").glob(f"{file.sha256}*.incomplete"):
            with contextlib.suppress(OSError):  # somebody else's, or somebody else was quicker
                if time.time() - part.stat().st_mtime > 3600:
                    part.unlink()


# ---------------------------------------------------------------- files that came


def is_here(file: RemoteFile) -> bool:
    """Whether a file of the hub is in the cache, and not damaged."""
    return file.path.is_file() and not find_damage(file.path)


def find_damage(path: Path) -> str | None:
    """Why a file cannot be used, if it is one of weights and damaged."""
    if path.suffix != ".safetensors":
        return None
    try:
        open_weight_file(path)
    except UserError as error:
        return str(error)
    return None


def check_arrived(file: RemoteFile) -> None:
    """Refuse and remove a file that is not what the hub announced, or that lies damaged on the hub."""
    damage = find_damage(file.path)
    if file.sha256 and hash_file(file.path) != file.sha256:
        why = f"{file.name} of {file.repo} did not arrive as it is on the hub, and was removed: try again."
    elif damage:
        why = f"{file.name} came damaged from {file.repo} and was removed: {damage}"
    else:
        return
    for path in (file.path.resolve(), file.path):
        path.unlink(missing_ok=True)
    raise UserError(why)


def hash_file(path: Path) -> str:
    """The SHA-256 of a file of any size."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# ---------------------------------------------------------------- what goes wrong, in a sentence


def is_from_library(error: Exception) -> bool:
    """Whether it is an error of the hub's or the network's libraries, whose words say what happened."""
    return type(error).__module__.split(".")[0] in ("huggingface_hub", "httpx", "httpx2", "httpcore", "httpcore2")


@contextlib.contextmanager
def explain_errors(repo: str) -> Iterator[None]:
    """Tells what goes wrong between us and the hub in one sentence. Raises UserError, FileError or HubError."""
    from huggingface_hub import constants, errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise UserError(
            f"{repo} is gated: accept its licence at {HUB}/{repo}, log in with `hf auth login`, and try again."
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise UserError(
            f"There is no folder or file {repo}, and the hub shows no repository of that name: check the name or, if "
            "it is private, log in with `hf auth login`."
        ) from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise FileError(
                f"The disk of {constants.HF_HUB_CACHE} is full: make room there, or set HF_HOME to a folder on another "
                "disk."
            ) from error
        # An OSError without a number is the library's word for a wrong length, and ours for a wrong answer.
        if not is_from_library(error) and not (isinstance(error, OSError) and not error.errno):
            raise
        why = printable(str(error.__cause__ or error).strip().split("\n")[0].split(" for url")[0])[:160].rstrip(".: ")
        at = "" if constants.ENDPOINT == HUB else f" at {constants.ENDPOINT}"
        raise HubError(
            f"{repo} could not be fetched from the hub{at} ({why or type(error).__name__}): check the network and try "
            "again, or use a model that needs no download, such as nano."
        ) from error


# ---------------------------------------------------------------- each answer, before it is believed

LIMIT: ContextVar[int | None] = ContextVar("LIMIT", default=None)  # bytes; None: not our question, so not our business


@contextlib.contextmanager
def checked_answers(limit: int) -> Iterator[None]:
    """Within, huggingface_hub takes no answer that is odd, or larger than `limit` bytes."""
    from huggingface_hub import get_session, set_client_factory
    from huggingface_hub.utils import _http

    if check_answer not in get_session().event_hooks["response"]:
        make_client = _http._GLOBAL_CLIENT_FACTORY  # not the client: after a refused connection there is a new one

        def make_checked_client() -> httpx.Client:
            client = make_client()
            hooks = client.event_hooks
            client.event_hooks = {
                "request": [*hooks["request"], ask_for_plain_bytes],
                "response": [*hooks["response"], check_answer],
            }
            return client

        set_client_factory(make_checked_client)
    token = LIMIT.set(limit)
    try:
        yield
    finally:
        LIMIT.reset(token)


def ask_for_plain_bytes(request: httpx.Request) -> None:
    """No compressed bodies: what is announced is what comes."""
    if LIMIT.get() is not None:
        request.headers["Accept-Encoding"] = "identity"


def check_answer(response: httpx.Response) -> None:
    """Refuse an answer before its body is read. Raises HubError with half a sentence."""
    limit = LIMIT.get()
    if limit is None:
        return
    headers = response.headers
    waits = re.findall(r"\d+", headers.get("Retry-After", "")) + re.findall(r"t=(\d+)", headers.get("RateLimit", ""))
    if response.status_code in (429, 503) and (wait := max(map(int, waits), default=0)) > LONGEST_WAIT:
        raise HubError(f"it asks to wait for {wait} seconds")
    if "X-Repo-Commit" in headers:  # here are names that become paths in the cache
        etag = headers.get("X-Linked-Etag") or headers.get("ETag") or ""
        names = [(COMMIT, headers["X-Repo-Commit"]), (ETAG, etag), (SHA256, headers.get("X-Xet-Hash", "0" * 64))]
        if not all(re.fullmatch(pattern, name) for pattern, name in names):
            raise HubError("it names a version of a file by what is no hash")
    if response.status_code not in (200, 206):
        return  # the library says what that means
    if headers.get("Content-Type", "").startswith("text/html"):
        raise HubError("the answer is a web page: does this network want a login first?")
    if response.request.method == "GET":
        if int(headers.get("Content-Length", 0)) > limit:
            raise HubError(f"it sends {headers['Content-Length']} bytes where {limit} were announced")
        response.iter_bytes = limit_bytes(limit, response.iter_bytes)  # type: ignore[method-assign]


def limit_bytes(limit: int, iter_bytes: Callable[..., Iterator[bytes]]) -> Callable[..., Iterator[bytes]]:
    """A body of which no more than `limit` bytes are taken, counted after unpacking, should it come packed."""

    def limited(*args: Any, **kwargs: Any) -> Iterator[bytes]:
        count = 0
        for chunk in iter_bytes(*args, **kwargs):
            count += len(chunk)
            if count > limit:
                raise HubError(f"more comes than the {limit} bytes that were announced")
            yield chunk

    return limited
