"""A hub on this machine that speaks as much of huggingface.co's language as a download needs, and can misbehave."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "0123456789abcdef" * 2 + "01234567"
CHUNK = 1000  # bytes that come and go together; 10 MB in the wild
TINY = Path(__file__).parent / "pipelines" / "tiny"


@dataclass
class Repository:
    files: dict[str, bytes]
    licence: str = "apache-2.0"
    gated: bool = False
    commit: str = COMMIT


@dataclass
class Request:
    method: str
    path: str  # decoded, with its query
    token: str | None
    sent: int = 0  # bytes of the answer's body


def released() -> dict[str, bytes]:
    """A tiny model's files as they lie in the released repositories, among others that are not for us."""
    skip = ("base/", "expected.safetensors", "meta.json")
    files = {path.relative_to(TINY).as_posix(): path.read_bytes() for path in TINY.rglob("*") if path.is_file()}
    files = {name: data for name, data in files.items() if not name.startswith(skip)}
    return files | dict.fromkeys(DECOYS, b"not for us" * 1000)


DECOYS = (
    "flux-2-klein-4b.safetensors", "README.md", "LICENSE.md", ".gitattributes", "teaser.png", "images/example.jpg",
    "transformer/diffusion_pytorch_model.bin", "text_encoder/pytorch_model.bin", "vae/preview.png",
    "text_encoder/onnx/model.safetensors", "lora/weights.safetensors",
)  # fmt: skip


class StandIn(ThreadingHTTPServer):
    """`repositories` are served; what was asked is in `requests`.

    `cut["file"] = [n, …]`: answers with that file's bytes end, with the connection, after n bytes.
    `down`: nothing works but what is said about repositories; `falls`: that is so after a cut.
    `interfere`: is asked first, and answers itself if it returns True.
    `token`: who sends it may have gated files.
    """

    daemon_threads = True

    def __init__(self, repositories: dict[str, Repository]):
        super().__init__(("127.0.0.1", 0), Answer)
        self.repositories, self.token = repositories, "hf_accepted"
        self.requests: list[Request] = []
        self.cut: dict[str, list[int]] = {}
        self.down = self.falls = False
        self.interfere: Callable[[Answer], bool] | None = None
        self.url = f"http://127.0.0.1:{self.server_port}"

    def asked(self, name: str) -> list[Request]:
        """What was asked for the content of a file."""
        return [r for r in self.requests if r.method == "GET" and r.path.startswith("/cdn/") and name in r.path]

    @property
    def sent(self) -> int:
        """Bytes of files that were sent, without what is said about them."""
        return sum(r.sent for r in self.requests if not r.path.startswith("/api/"))


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # head and body leave together

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        path = unquote(self.path)
        self.request_made = Request(self.command, path, self.headers.get("Authorization"))
        self.server.requests.append(self.request_made)
        if self.server.interfere and self.server.interfere(self):
            return
        about = re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/[^/]+|/tree/[^/]+)?", urlsplit(path).path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        stored = re.fullmatch(r"/cdn/([^/]+/[^/]+)/(.+)", path)
        repo = self.server.repositories.get((about or file or stored or [None, ""])[1])
        if repo is None:
            return self.refuse(401, "RepoNotFound", "Repository not found")
        if about:
            revision = (about[2] or "/revision/main").split("/")[2]
            if revision not in ("main", repo.commit):
                return self.refuse(404, "RevisionNotFound", "Revision not found")
            listing = "/tree/" in path
            return self.say(json.dumps(self.tree(repo) if listing else self.about(about[1], repo)).encode())
        if self.server.down:
            return self.refuse(503, "", "Service Unavailable")
        if stored:
            return self.content(stored[2], repo.files[stored[2]])
        if repo.gated and self.headers.get("Authorization") != f"Bearer {self.server.token}":
            return self.refuse(401, "GatedRepo", "Access to this model is restricted")
        if file[2] not in ("main", repo.commit):
            return self.refuse(404, "RevisionNotFound", "Revision not found")
        if file[3] not in repo.files:
            return self.refuse(404, "EntryNotFound", "Entry not found")
        self.resolve(file[1], repo, file[3])

    def about(self, name: str, repo: Repository) -> dict:
        siblings = []
        for file, data in repo.files.items():
            sibling = {"rfilename": file, "size": len(data), "blobId": git_hash(data)}
            if large(file):
                sibling["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
            siblings.append(sibling)
        return {
            "_id": "1", "id": name, "modelId": name, "author": name.split("/")[0], "sha": repo.commit,
            "private": False, "disabled": False, "gated": "auto" if repo.gated else False,
            "tags": ["mlx", f"license:{repo.licence}"], "cardData": {"license": repo.licence}, "siblings": siblings,
            "downloads": 0, "likes": 0,
        }  # fmt: skip

    def tree(self, repo: Repository) -> list[dict]:
        files = []
        for file, data in repo.files.items():
            entry = {"type": "file", "path": file, "size": len(data), "oid": git_hash(data)}
            if large(file):
                entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
            files.append(entry)
        return files

    def resolve(self, name: str, repo: Repository, file: str):
        """A small file at once; for a large one the address of where it is stored."""
        data = repo.files[file]
        self.extra = {"X-Repo-Commit": repo.commit}
        if not large(file):
            self.extra["ETag"] = f'"{git_hash(data)}"'
            return self.content(file, data)
        address = f"http://localhost:{self.server.server_port}/cdn/{name}/{file}"  # another host, as in the wild
        self.extra |= {"X-Linked-Size": str(len(data)), "X-Linked-ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
        self.extra |= {"Location": address}
        self.say(b"Found. Redirecting", status=302)

    def content(self, file: str, data: bytes):
        cuts = self.server.cut.get(file, []) if self.command == "GET" else []
        end = cuts.pop(0) if cuts else None
        self.say(data, end=end)
        self.server.down |= self.server.falls and end is not None

    def refuse(self, status: int, code: str, message: str):
        self.extra = {"X-Error-Code": code, "X-Error-Message": message} if code else {}
        self.say(json.dumps({"error": message}).encode(), status)

    def say(self, body: bytes, status: int = 200, end: int | None = None):
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | getattr(self, "extra", {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.request_made.sent = len(body[:end])
            self.wfile.write(body[:end])
        if end is not None:
            self.close_connection = True


def large(file: str) -> bool:
    return file.endswith((".safetensors", ".bin", ".png", ".jpg", "tokenizer.json"))


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A stand-in with the tiny model as "4b", and a cache of our own; no other hub can be reached."""
    constants = pytest.importorskip("huggingface_hub.constants")
    with StandIn({"black-forest-labs/FLUX.2-klein-4B": Repository(released())}) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda _: None))  # between tries
        monkeypatch.setattr(
            "kleinlite.inference.machine_memory.machine_memory", lambda held=0: (10**12, 10**12)
        )  # for what "4b" would take
        server.cache = tmp_path / "cache"
        yield server
        server.shutdown()
        thread.join()
