"""The released models: what there is to know before a download, and the download itself. Hand-written.

>>> from kleinlite import hub
>>> hub.fetch("4b")  # the folder of its files; what is not on this machine is fetched from huggingface.co

Files go to the cache that all of Hugging Face's tools share (`HF_HOME` moves it), so that nothing is fetched twice,
and what is there and whole is used without asking the network. That library drops the beginning of a file when a
download is cut, and these files have up to 10 GB. So the large ones are fetched here: they go on where they stopped,
and enter the cache only when length and SHA-256 are what the hub says.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

__all__ = ["MODELS", "SMALL_DECODER", "Model", "Size", "download", "fetch", "fetch_parts", "local"]

HUB = "https://huggingface.co"
PARTS = ("transformer", "text_encoder", "vae")
# What we take of a repository. In its root lie the same weights once more as a single file, and pictures.
FOLDERS = (*PARTS, "tokenizer", "scheduler")
SUFFIXES = (".json", ".safetensors", ".txt", ".jinja")

# ---------------------------------------------------------------- the catalogue


@dataclass(frozen=True)
class Size:
    """What the models of one size share."""

    transformer: int  # parameters
    text_encoder: int
    others: int  # bytes of all files but the transformer's weights
    licence: str
    gated: bool  # fetched only by those who accepted the licence


@dataclass(frozen=True)
class Model:
    """A released model, as far as it is known before a download."""

    repo: str
    size: Size
    weights: int  # bytes of the transformer's weights
    parts: str = ""  # of a single file: the model whose repository has the other parts

    @property
    def file(self) -> str:
        """The transformer alone in one file, in the repository's root; "" if the repository is a model's folder."""
        name = self.repo.split("/")[1].lower().replace(".", "-")
        return f"{name}.safetensors" if self.parts else ""

    @property
    def distilled(self) -> bool:
        return "-base-" not in self.repo

    @property
    def download(self) -> int:
        """Bytes to fetch where nothing is here yet."""
        return self.weights + self.size.others


VAE, TOKENIZER = 168_120_878, 11_422_654 + 2_776_833 + 1_671_853 + 5404 + 4168 + 707 + 613
TEXT_4B = 4_967_215_360 + 3_077_766_632
TEXT_8B = 4_902_257_696 + 4_915_960_368 + 4_983_068_496 + 1_580_230_264
B4 = Size(3_875_544_576, 4_022_468_096, TEXT_4B + VAE + TOKENIZER, "Apache-2.0", gated=False)
B9 = Size(9_078_581_248, 8_190_735_360, TEXT_8B + VAE + TOKENIZER, "FLUX Non-Commercial", gated=True)
BFL = "black-forest-labs/FLUX.2-klein"

MODELS = {
    "4b": Model(f"{BFL}-4B", B4, 7_751_109_744),
    "base-4b": Model(f"{BFL}-base-4B", B4, 7_751_109_744),
    "9b": Model(f"{BFL}-9B", B9, 9_801_069_272 + 8_356_121_608),
    "base-9b": Model(f"{BFL}-base-9B", B9, 9_801_069_272 + 8_356_121_608),
    # Its files were not seen; it has 9b's tensors.
    "9b-kv": Model(f"{BFL}-9b-kv", B9, 9_801_069_272 + 8_356_121_608),
    "4b-fp8": Model(f"{BFL}-4b-fp8", B4, 4_070_624_520, parts="4b"),
    "base-4b-fp8": Model(f"{BFL}-base-4b-fp8", B4, 4_089_498_488, parts="base-4b"),
    "9b-fp8": Model(f"{BFL}-9b-fp8", B9, 9_433_061_528, parts="9b"),
    "base-9b-fp8": Model(f"{BFL}-base-9b-fp8", B9, 9_567_278_472, parts="base-9b"),
    "9b-kv-fp8": Model(f"{BFL}-9b-kv-fp8", B9, 9_818_935_984, parts="9b-kv"),
    "4b-nvfp4": Model(f"{BFL}-4b-nvfp4", B4, 2_460_413_488, parts="4b"),
    "base-4b-nvfp4": Model(f"{BFL}-base-4b-nvfp4", B4, 2_487_544_776, parts="base-4b"),
    "9b-nvfp4": Model(f"{BFL}-9b-nvfp4", B9, 5_760_960_048, parts="9b"),
    "base-9b-nvfp4": Model(f"{BFL}-base-9b-nvfp4", B9, 5_809_193_808, parts="base-9b"),
}
# An autoencoder with a narrower decoder, which any model can have in place of its own. `fetch` knows its name too.
SMALL_DECODER = "small-decoder"
SMALL_DECODER_REPO, SMALL_DECODER_BYTES = "black-forest-labs/FLUX.2-small-decoder", 249_519_092


# ---------------------------------------------------------------- what a repository must have


@dataclass(frozen=True)
class Source:
    """A repository, and what we want from it."""

    repo: str
    want: str  # "folder": a model; "parts": one without the transformer's weights; else files of the root, by name

    def takes(self, file: str) -> bool:
        if self.want not in ("folder", "parts"):
            return file in self.want.split()
        weights = file.startswith("transformer/") and file != "transformer/config.json"
        folder, _, name = file.rpartition("/")
        ours = file == "model_index.json" or (folder in FOLDERS and name.endswith(SUFFIXES))
        return ours and not (weights and self.want == "parts")

    def lacks(self, files: Collection[str]) -> list[str]:
        """What must be there and is not, of a list of file names."""
        if self.want not in ("folder", "parts"):
            return [file for file in self.want.split() if file not in files]
        needed = ["model_index.json", *(f"{part}/config.json" for part in PARTS), "tokenizer/tokenizer.json"]
        needed += [f"{part}/*.safetensors" for part in PARTS if (part, self.want) != ("transformer", "parts")]
        absent = [pattern for pattern in needed if not any(fnmatch(file, pattern) for file in files)]
        folders = {file.split("/")[0] for file in files}
        whole = [f"{a.split('/')[0]}/" if "/" in a and a.split("/")[0] not in folders else a for a in absent]
        return list(dict.fromkeys(whole))


def sources(name: str) -> list[Source]:
    """The repositories of a model, the one that has the transformer first."""
    if name.lower() == SMALL_DECODER:
        return [Source(SMALL_DECODER_REPO, "config.json diffusion_pytorch_model.safetensors")]
    model = MODELS.get(name.lower())
    if model:
        first = Source(model.repo, model.file or "folder")
        return [first, Source(MODELS[model.parts].repo, "parts")] if model.parts else [first]
    if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", name):
        from ..checkpoints import BUNDLED

        raise ValueError(
            f"There is no model, folder or file called {name!r}. Known models: {', '.join([*BUNDLED, *MODELS])}; or "
            "give a hub repository (owner/name), a folder in the released layout, or a .safetensors file."
        )
    return [Source(name, "folder")]


# ---------------------------------------------------------------- what is here


def damaged(path: Path) -> str | None:
    """Why a file of weights cannot be used (cut short, or no safetensors file at all); None if it can."""
    from ..checkpoints import read_header

    if path.suffix == ".safetensors":
        try:
            read_header(path)
        except ValueError as error:
            return str(error)
    return None


def missing(folder: Path, source: Source) -> list[str]:
    """What a folder still lacks. A file that is shorter than its header says is as good as missing."""
    here = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    here = {file for file in here if source.takes(file)}
    lacks = source.lacks(here)
    for file in sorted(here):
        if file.endswith(".safetensors.index.json"):
            # A bad index lacks nothing here: `checkpoints` has the sentence for it.
            with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
                shards = json.loads((folder / file).read_text(encoding="utf-8"))["weight_map"].values()
                lacks += sorted({f"{file.partition('/')[0]}/{shard}" for shard in shards} - here)
        elif damaged(folder / file):
            lacks.append(file)
    return lacks


def cached(source: Source) -> Path | None:
    """The folder of a repository's files on this machine, whole or not; None if there is none."""
    from huggingface_hub import try_to_load_from_cache

    first = "model_index.json" if source.want in ("folder", "parts") else source.want.split()[0]
    with in_a_sentence(source.repo):
        found = try_to_load_from_cache(source.repo, first)
    return Path(found).parent if isinstance(found, str) else None


def whole(wanted: list[Source]) -> list[Path] | None:
    """The folders on this machine, if all of them are here and whole."""
    folders = [cached(source) for source in wanted]
    return folders if all(f and not missing(f, source) for f, source in zip(folders, wanted)) else None


def local(name: str) -> Path | None:
    """What `fetch` gives, if all of it is on this machine and whole, else None. Does not ask the network."""
    folders, model = whole(sources(name)), MODELS.get(name.lower())
    return folders and (folders[0] / model.file if model and model.file else folders[0])


def fetch(name: str, *, offline: bool = False) -> Path:
    """Where a model's files are on this machine; what is not here is downloaded.

    `name`: one of `MODELS`, `"small-decoder"`, or a repository `owner/name` that has a model in the released layout
    or in the one that `kleinlite quantize` writes. The path is the model's folder; of a model that is one file (such
    as "4b-fp8") it is that file, and `fetch_parts` tells where its other parts are.
    Nothing is downloaded with `offline`, or if HF_HUB_OFFLINE is set. What goes wrong is told in one sentence, as a
    ValueError or an OSError.
    """
    get(name, sources(name), offline)
    return local(name)


def fetch_parts(name: str, *, offline: bool = False) -> Path:
    """The folder of a model's other parts: as `fetch`, but without weights for the transformer.

    For a model that is one file this is the folder of another: "4b-fp8" → that of "4b".
    """
    return get(name, [Source(sources(name)[-1].repo, "parts")], offline)[0]


def get(name: str, wanted: list[Source], offline: bool) -> list[Path]:
    """The folders of what is wanted, downloaded if need be and allowed."""
    from huggingface_hub import constants

    folders = whole(wanted)
    if folders:
        return folders
    if offline or constants.HF_HUB_OFFLINE:
        lacks = [f"{folder} lacks {', '.join(missing(folder, s))}" for s in wanted if (folder := cached(s))]
        why = f" ({'; '.join(lacks)})" if lacks else ""
        way_out = "fetch it first, without the offline switch" if offline else "unset HF_HUB_OFFLINE"
        raise FileNotFoundError(
            f"{wanted[0].repo} is not on this machine, or not all of it{why}, and nothing may be downloaded: "
            f"{way_out}, or use a model that needs no download, such as nano."
        )
    return download(name, wanted)


# ---------------------------------------------------------------- the download


@dataclass(frozen=True)
class File:
    """A file that we want from a repository."""

    source: Source
    name: str
    bytes: int
    sha256: str | None  # of the large ones
    commit: str

    @property
    def path(self) -> Path:
        return storage(self.source.repo) / "snapshots" / self.commit / self.name

    @property
    def blob(self) -> Path:
        """What `path` is a link to."""
        return storage(self.source.repo) / "blobs" / self.sha256

    @property
    def draft(self) -> Path:
        """What has arrived of it."""
        return self.blob.with_name(f"{self.blob.name}.incomplete")

    def is_here(self) -> bool:
        if self.path.is_file():
            return not damaged(self.path)
        return bool(self.sha256) and self.blob.is_file()  # it has only no name yet

    def forget(self) -> None:
        """Remove it from the cache."""
        for path in (self.path.resolve(), self.path):
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Plan:
    """What a download would do; as text, the table that is shown before it starts."""

    name: str
    files: list[File]
    missing: list[File]  # those of them that are not here yet
    licence: str
    gated: bool

    def __str__(self) -> str:
        lines = [f"{self.name}: licence {self.licence}{', gated' if self.gated else ''}"]

        def row(what: str, files: list[File]) -> str:
            size, here = sum(f.bytes for f in files), sum(f.bytes for f in files if f not in self.missing)
            note = f", of which {gigabytes(here)} here already" if here else ""
            return f"  {what:18}{len(files):3} {'file ' if len(files) == 1 else 'files'}{gigabytes(size):>12}{note}"

        for source in dict.fromkeys(file.source for file in self.files):
            files = [file for file in self.files if file.source == source]
            lines.append(f"{source.repo} → {storage(source.repo)}")
            for folder in dict.fromkeys(file.name.partition("/")[0] for file in files):
                inside = [file for file in files if file.name.partition("/")[0] == folder]
                lines.append(row(f"{folder}/" if folder in FOLDERS else folder, inside))
        return "\n".join([*lines, row("in all", self.files)])


def gigabytes(count: int) -> str:
    """10,000,000 → 10.0 MB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.{2 if unit == 'GB' else 1}f} {unit}"
    return f"{count} bytes"


def storage(repo: str) -> Path:
    """The folder of the cache that belongs to a repository."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")


@contextlib.contextmanager
def in_a_sentence(repo: str, draft: Path | None = None) -> Iterator[None]:
    """Tells what goes wrong between us and the hub in one sentence. `draft`: a file that is on its way."""
    from huggingface_hub import constants, errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise ValueError(
            f"{repo} is gated: accept its licence at {HUB}/{repo}, log in with `hf auth login`, and try again."
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ValueError(
            f"There is no folder or file {repo}, and the hub shows no repository of that name: check the name or, if "
            "it is private, log in with `hf auth login`."
        ) from error
    except Exception as error:
        kept = draft.stat().st_size if draft and draft.exists() else 0
        again = f"; {gigabytes(kept)} of the file are kept, and the next run goes on from there" if kept else ""
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise OSError(
                f"The disk of {constants.HF_HUB_CACHE} is full: make room there, or set HF_HOME to a folder on another "
                f"disk{again}."
            ) from error
        foreign = type(error).__module__.split(".")[0] in ("huggingface_hub", "httpx", "httpx2", "requests", "urllib3")
        if not foreign and not (isinstance(error, OSError) and not error.errno):  # so the library tells a wrong length
            raise
        why = str(error.__cause__ or error).strip().split("\n")[0].split(" for url")[0][:160].rstrip(".: ")
        at = "" if constants.ENDPOINT == HUB else f" at {constants.ENDPOINT}"
        raise ConnectionError(
            f"{repo} could not be fetched from the hub{at} ({why or type(error).__name__}): check the network and try "
            f"again{again}, or use a model that needs no download, such as nano."
        ) from error


def plan(name: str, wanted: list[Source]) -> Plan:
    """Asks the hub what there is to fetch."""
    from huggingface_hub import HfApi

    files, licence, gated = [], None, False
    for source in wanted:
        with in_a_sentence(source.repo):
            found = HfApi().model_info(source.repo, files_metadata=True)
        siblings = {sibling.rfilename: sibling for sibling in found.siblings if source.takes(sibling.rfilename)}
        lacks = source.lacks(siblings)
        if lacks:
            raise ValueError(
                f"{source.repo} on the hub has no {' and no '.join(lacks)}: it is not a model in the released layout "
                "(model_index.json, transformer/, text_encoder/, vae/, tokenizer/)."
            )
        for folder in (*FOLDERS, ""):
            for file, sibling in siblings.items():
                if file.rpartition("/")[0] == folder:
                    sha256 = sibling.lfs.sha256 if sibling.lfs else None
                    files.append(File(source, file, sibling.size or 0, sha256, found.sha))
        card = found.card_data or {}
        licence = licence or card.get("license_name") or card.get("license") or "not stated"
        gated = gated or bool(found.gated)
    model = MODELS.get(name.lower())
    missing = [file for file in files if not file.is_here()]
    return Plan(name, files, missing, model.size.licence if model else licence, gated)


def download(name: str, wanted: list[Source] | None = None) -> list[Path]:
    """Fetches what is missing, or newer on the hub; the folders of `wanted` (default: all that `name` needs).

    What, how much, under which licence and to where is on stderr before the first byte.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    wanted = wanted or sources(name)
    todo = plan(name, wanted)
    if todo.missing:
        print(todo, file=sys.stderr)
        check_space(todo.missing)
    for file in todo.missing:
        if file.path.is_file() and damaged(file.path):
            file.forget()
        if file.sha256:
            fetch_large(file)
    # Now every large file is in the cache, and the library has only to give it its name. Each repository's last file
    # goes by the name of the branch: with it the cache's note of which commit `main` is moves on.
    last = {file.source: file for file in todo.files}.values()
    bars = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        for file in sorted(todo.files, key=lambda file: file in last):
            with in_a_sentence(file.source.repo):
                hf_hub_download(file.source.repo, file.name, revision="main" if file in last else file.commit)
    finally:
        if bars:
            enable_progress_bars()
    for file in todo.missing:
        why = damaged(file.path)
        if why:
            file.forget()
            raise ValueError(f"{file.name} came damaged from {file.source.repo} and was removed: {why}")
    folders = whole(wanted)
    if not folders:
        lacks = [file for source in wanted for file in missing(cached(source), source)]
        raise ValueError(f"{name} on the hub is not complete ({', '.join(lacks)} missing): take another model.")
    return folders


def fetch_large(file: File) -> None:
    """Puts one file into the cache's store, where the library looks for it; goes on where an earlier run stopped.

    The library's faster protocol (Xet) is not used: it cannot go on, and starts 10 GB anew.
    """
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import WeakFileLock, build_hf_headers

    repo, draft = file.source.repo, file.draft
    lock = Path(constants.HF_HUB_CACHE) / ".locks" / storage(repo).name / f"{file.sha256}.lock"
    for path in (draft, lock):
        path.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if file.blob.exists():  # another process was quicker
            return
        if draft.exists() and draft.stat().st_size > file.bytes:
            draft.unlink()
        with in_a_sentence(repo, draft), draft.open("ab") as f:
            http_get(
                hf_hub_url(repo, file.name, revision=file.commit),
                f,
                resume_size=f.tell(),
                headers=build_hf_headers(),
                expected_size=file.bytes,
                displayed_filename=file.name,
            )
        digest = hashlib.sha256()
        with draft.open("rb") as f:
            while block := f.read(1 << 20):
                digest.update(block)
        if digest.hexdigest() != file.sha256:
            draft.unlink()
            raise ValueError(f"{file.name} of {repo} did not arrive as it is on the hub, and was removed: try again.")
        draft.replace(file.blob)


def check_space(files: list[File]) -> None:
    """Refuse a download for which the disk has no room."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    disk = next(folder for folder in (cache, *cache.parents) if folder.exists())
    needed = sum(f.bytes - (f.draft.stat().st_size if f.sha256 and f.draft.exists() else 0) for f in files)
    free = shutil.disk_usage(disk).free
    if needed > free:
        raise OSError(
            f"The download needs {gigabytes(needed)} and the disk of {cache} has {gigabytes(free)} left: make room "
            "there, or set HF_HOME to a folder on another disk."
        )
