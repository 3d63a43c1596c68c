"""A hub, a mirror or a hotel's login page that answers what it should not: one sentence, nothing outside the cache."""

import gzip
import json
from pathlib import Path

import pytest
from damage import one_sentence
from stand_in_hub import COMMIT, DECOYS, Answer, Repository, released

from kleinlite.errors import HubError
from kleinlite.models.download import download_model, fetch_model, find_cached
from kleinlite.models.hub import limit_bytes
from kleinlite.models.registry import MODELS

REPO = MODELS["4b"].repo
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
FILES = {name: data for name, data in released().items() if name not in DECOYS}
PAGE = b"<!DOCTYPE html><html><title>Hotel Wi-Fi</title>Please log in." + b" " * 500


@pytest.fixture
def told(hub, tmp_path, monkeypatch):
    """told(words): a download is refused; nothing is written outside of the cache, and the next one succeeds."""

    def call(*words: str, name: str = "4b") -> str:
        before = {path for path in tmp_path.rglob("*") if not path.is_relative_to(hub.cache)}
        asked = len(hub.requests)
        with pytest.raises((ValueError, OSError)) as refusal:
            fetch_model(name)
        assert len(hub.requests) - asked < 60, "it went on asking"
        sentence = str(refusal.value)
        assert one_sentence(refusal.value), sentence
        assert all(word in sentence for word in words), sentence
        assert {path for path in tmp_path.rglob("*") if not path.is_relative_to(hub.cache)} == before
        assert sum(path.stat().st_size for path in hub.cache.rglob("*") if path.is_file()) < 2 * 10**6
        hub.interfere = None
        if name == "4b":
            assert find_cached("4b") is None and fetch_model("4b")  # on a good network
        return sentence

    return call


def answer(request: Answer, body: bytes, status: int = 200, **headers: str) -> bool:
    request.extra = {name.replace("_", "-"): value for name, value in headers.items()}
    request.say(body, status)
    return True


# ---------------------------------------------------------------- what the API says


def about(hub, **changes) -> dict:
    found = Answer.about(None, REPO, hub.repositories[REPO])
    return {key: value for key, value in (found | changes).items() if value != "gone"}


def say_about(hub, found: object) -> None:
    text = found if isinstance(found, bytes) else json.dumps(found).encode()
    hub.interfere = lambda r: r.path.startswith("/api/") and answer(r, text, Content_Type="application/json")


@pytest.mark.parametrize(
    "text", [b"", b"{", b"null", b"[]", b"1", b'"x"', b"{}", b"[" * 100_000, b"\xff\xfe", b'{"sha": 1, "siblings": {}}']
)
def test_json_of_another_shape(hub, told, text):
    say_about(hub, text)
    told(REPO, "not what a hub says" if text != b"{}" else REPO)


@pytest.mark.parametrize(
    "changes",
    [
        {"sha": None}, {"sha": 7}, {"sha": "../../../../victim"}, {"sha": "main"}, {"sha": COMMIT[:-1] + "\n"},
        {"sha": "gone"},
        {"siblings": None}, {"siblings": "gone"}, {"siblings": [1]}, {"siblings": {"a": 1}}, {"siblings": [{}]},
        {"siblings": [{"rfilename": "model_index.json", "size": "x"}]}, {"siblings": [{"rfilename": 3, "size": 1}]},
        {"siblings": [{"rfilename": "model_index.json", "size": -5}]}, {"siblings": [{"rfilename": "x", "lfs": 5}]},
        {"siblings": [{"rfilename": "model_index.json", "size": 1.5}]},
        {"siblings": [{"rfilename": "x", "size": 1, "lfs": {"sha256": "/any/where", "size": 1, "pointerSize": 1}}]},
        {"cardData": "x"}, {"cardData": [1]}, {"id": "gone"},
    ],
    ids=str,
)  # fmt: skip
def test_json_with_odd_values(hub, told, changes):
    say_about(hub, about(hub, **changes))
    told(REPO)


def test_names_that_are_odd_are_not_for_us(hub):
    names = [
        "vae/..\\..\\x.json",
        "vae/a\0.json",
        "vae/\ud800.json",
        "../x.json",
        "/etc/x.json",
        "vae/../../x.json",
        "vae/a b.json",
    ]
    found = about(hub)
    found["siblings"] += [{"rfilename": name, "size": 1} for name in names]
    say_about(hub, found)
    folder = fetch_model("4b")
    assert {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} == set(FILES)


def test_a_licence_is_printed_without_its_control_characters(hub, capsys):
    hub.repositories["evil/model"] = Repository(FILES)
    found = about(hub, id="evil/model", cardData={"license_name": "x\x1b]0;owned\x07\x1b[2J" + "y" * 1000})
    hub.interfere = lambda r: (
        r.path.startswith("/api/models/evil") and answer(r, json.dumps(found).encode(), Content_Type="application/json")
    )
    fetch_model("evil/model")
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("evil/model: licence x\\x1b]0;owned\\x07") and first.isprintable() and len(first) < 200


# ---------------------------------------------------------------- versions that are paths


@pytest.mark.parametrize("etag", ["/any/where", "../../../../victim", "x", "", "g" * 64])
def test_a_hash_that_is_none(hub, told, tmp_path, etag):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    etag = etag.replace("/any/where", str(tmp_path / "other"))
    interfere(hub, X_Repo_Commit=COMMIT, X_Linked_ETag=f'"{etag}"', X_Linked_Size="142912")
    told(REPO)
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("commit", ["../../../../victim", "main", "/", COMMIT[:-1]])
def test_a_commit_that_is_none(hub, told, commit):
    interfere(hub, X_Repo_Commit=commit, X_Linked_ETag='"' + "0" * 64 + '"', X_Linked_Size="142912")
    told(REPO)


def interfere(hub, **headers) -> None:
    """Answers about the weights carry these headers."""
    hub.interfere = lambda r: r.path.startswith(f"/{REPO}/resolve/") and WEIGHTS in r.path and answer(r, b"", **headers)


def test_the_check_outlives_a_refused_connection(hub, told, tmp_path):
    """After one, huggingface_hub makes a new client."""
    from huggingface_hub.utils import close_session

    def once(request):
        close_session()
        return (
            WEIGHTS in request.path
            and "/resolve/" in request.path
            and answer(request, b"", X_Repo_Commit=COMMIT, X_Linked_ETag=f'"{tmp_path}/other"', X_Linked_Size="9")
        )

    hub.interfere = once
    told(REPO)


# ---------------------------------------------------------------- bodies


def body(hub, send) -> None:
    """`send(request)` answers in place of the weights' bytes."""
    hub.interfere = lambda r: (
        r.path.startswith("/cdn/") and WEIGHTS in r.path and r.command == "GET" and (send(r) or True)
    )


def test_a_body_without_end(hub, told):
    def send(request):
        request.send_response(200)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        for _ in range(20_000):  # 200 MB, if they were taken
            request.wfile.write(b"2710\r\n" + bytes(10_000) + b"\r\n")

    body(hub, send)
    told("more comes than the 142912 bytes")


def test_a_body_that_is_too_long(hub, told):
    body(hub, lambda r: answer(r, bytes(200_000)))
    told("it sends 200000 bytes where 142912 were announced")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_one_byte_too_long(hub, told, chunked):
    """The limit is the announced length itself, not some multiple of it."""
    right = FILES[WEIGHTS]

    def send(request):
        request.send_response(200)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        request.wfile.write(b"%x\r\n" % (len(right) + 1) + right + b"x\r\n0\r\n\r\n")

    body(hub, send if chunked else lambda r: answer(r, right + b"x"))
    told("more comes than the 142912 bytes" if chunked else "it sends 142913 bytes where 142912 were announced")


def test_a_small_file_without_end(hub, told):
    def send(request):
        if request.command != "GET" or "/resolve/" not in request.path or "config.json" not in request.path:
            return False
        request.send_response(200)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        for _ in range(2000):
            request.wfile.write(b"2710\r\n" + bytes(10_000) + b"\r\n")
        return True

    hub.interfere = send
    told("more comes than")


def test_a_compressed_body(hub, told):
    """300 MB in 0.3."""
    body(hub, lambda r: answer(r, gzip.compress(bytes(3 * 10**7)), Content_Encoding="gzip"))
    told("more comes than the 142912 bytes")


@pytest.mark.parametrize("where", ["/api/", "/cdn/", "/resolve/"])
def test_a_login_page(hub, told, where):
    hub.interfere = lambda r: where in r.path and answer(r, PAGE, Content_Type="text/html; charset=utf-8")
    told("a web page: does this network want a login first?")


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("where", ["/api/", "/resolve/"])
def test_a_wait_of_a_year(hub, told, where, status):
    hub.interfere = lambda r: where in r.path and answer(r, b"", status, Retry_After="31536000")
    told("it asks to wait for 31536000 seconds")


def test_others_questions_are_their_own(hub):
    """What this process asks a hub for itself is not looked at."""
    from huggingface_hub import get_session

    download_model("4b")
    hub.interfere = lambda r: answer(r, PAGE, Content_Type="text/html")
    assert get_session().get(f"{hub.url}/x").content == PAGE
    assert Path(fetch_model("4b")).is_dir()


def test_a_body_may_have_as_many_bytes_as_were_announced_and_no_more():
    def body():
        return iter([b"123", b"45"])

    assert b"".join(limit_bytes(5, body)()) == b"12345"
    with pytest.raises(HubError, match="more comes than the 4 bytes"):
        list(limit_bytes(4, body)())
